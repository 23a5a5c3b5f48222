"""Which parameters a DDP model exchanges, and what they are used for."""

from torch import nn
from torch.nn.modules.conv import _ConvNd


def parameters(ddp):
    """Name and parameter of all that DDP exchanges, in its order: no frozen ones, shared ones once."""
    ignored = set(ddp.parameters_to_ignore)
    return [
        (name, parameter) for name, parameter in ddp.module.named_parameters() if parameter.requires_grad and name not in ignored
    ]


def kinds(module: nn.Module, names):
    """For each parameter name `conv`, `matrix` or `vector`, from the module that has it.

    Convolutions are known by their type. Where a parameter belongs to something else, four dimensions are taken for a kernel,
    two or three for a matrix: the positions of a transformer, say, have three.
    """
    modules = dict(module.named_modules())
    return [_kind(modules[name.rpartition(".")[0]], modules[""].get_parameter(name).dim()) for name in names]


def _kind(owner, dimensions):
    if dimensions <= 1:
        return "vector"
    if isinstance(owner, _ConvNd) or dimensions >= 4:
        return "conv"
    return "matrix"
