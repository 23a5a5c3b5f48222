"""Which parameters a DDP model exchanges, and what they are used for."""

from torch import nn
from torch.nn.modules.conv import _ConvNd


def parameters(ddp):
    """Name and parameter of all that DDP exchanges, in its order: no frozen ones, shared ones once."""
    named = ddp.module.named_parameters()
    return [(name, parameter) for name, parameter in named if parameter.requires_grad and not _is_ignored(name, ddp)]


def _is_ignored(name, ddp):
    # Where DDP looks, the outermost module's own parameters have a dot before their names.
    return (name if "." in name else f".{name}") in ddp.parameters_to_ignore


def kinds(module: nn.Module, named):
    """For each parameter `conv`, `matrix` or `vector`, from the module that has it.

    Convolutions are known by their type. Where a parameter belongs to something else, four dimensions are taken for a kernel,
    two or three for a matrix: the positions of a transformer, say, have three.
    """
    modules = dict(module.named_modules())
    return [_kind(modules[name.rpartition(".")[0]], parameter.dim()) for name, parameter in named]


def _kind(owner, dimensions):
    if dimensions <= 1:
        return "vector"
    if isinstance(owner, _ConvNd) or dimensions >= 4:
        return "conv"
    return "matrix"
