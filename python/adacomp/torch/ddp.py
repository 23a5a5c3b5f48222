"""The door for ``DistributedDataParallel``: what comes in is PyTorch's buckets. A learner is a process, or all of a machine's."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .config import Config
from .node import Node, members
from .runtime import FORMATS, Door, Model, Named, Runtime
from .saved import clean_name
from .transport import Transport


class DdpDoor(Door):
    """Hands the buckets of a DDP model to a runtime."""

    makes_updates = True

    def __init__(self, ddp: DistributedDataParallel, config: Config, in_place: bool | None = None) -> None:
        if getattr(ddp, "_use_python_reducer", False):
            raise ValueError(
                "DDP with optimize_ddp='python_reducer' has no buckets for hooks: set torch._dynamo.config.optimize_ddp = True "
                "before the model is wrapped"
            )
        self.group = ddp.process_group
        named, others = parameters(ddp)
        if others and config.local_adam:
            raise ValueError(f"local_adam has no updates for {others[0][0]}: it is sparse, or not float32, float16 or bfloat16")
        self._numbers = {id(parameter): number for number, (_, parameter) in enumerate(named)}
        # Those that travel in buckets of their own, as without a hook. Kept, because they are known by their identity.
        self._others = [parameter for _, parameter in others]
        self._other_numbers = {id(parameter) for parameter in self._others}
        # The numbers of a bucket's parameters, by their identities.
        self._buckets: dict[tuple[int, ...], list[int]] = {}
        # Parameters that no learner has used in a step do not get the average, so they must not send.
        skip_unused = bool(ddp.find_unused_parameters or ddp.static_graph)
        model = Model(ddp.module, named, config)
        learners, node = None, None
        if config.node_size != 1:
            learners, inside = members(self.group, config.node_size)
            node = make_node(self.group, inside, model, config, in_place, differs=True) if len(inside) > 1 else None
        self.runtime = Runtime(model, self.group, config, skip_unused, in_place, learners, node, door=DdpDoor)
        self.runtime.model.others = [name for name, _ in others]

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Averages a bucket in place; returns the future of its buffer."""
        runtime = self.runtime
        runtime.check()
        if bucket.index() == 0:
            runtime.begin(time.perf_counter())
        is_other = bool(self._others) and id(bucket.parameters()[0]) in self._other_numbers
        layers = self._layers(bucket) if not is_other and (runtime.moments or not runtime.is_plain) else []
        if layers and not runtime.inside:
            runtime.apply_moments(bucket.buffer(), layers)
        if runtime.is_plain or is_other:
            future = plain(bucket, self.group)
        else:
            future = runtime.submit(bucket.buffer(), layers)
        if bucket.is_last() and not runtime.is_plain:
            runtime.finish()
        return future

    def _layers(self, bucket: dist.GradBucket) -> list[int]:
        """Returns the numbers of a bucket's parameters, in its order."""
        # Only this is done for each parameter in each step, and not by the interpreter.
        identities = tuple(map(id, bucket.parameters()))
        layers = self._buckets.get(identities)
        if layers is None:
            try:
                layers = [self._numbers[identity] for identity in identities]
            except KeyError:
                raise RuntimeError("a bucket has a parameter that the model did not have when the hook was attached") from None
            # That they lie one after the other, once for each bucket that PyTorch makes.
            start = bucket.buffer().data_ptr()
            for gradient in bucket.gradients():
                if gradient.data_ptr() != start and gradient.numel():
                    raise RuntimeError("a bucket's gradients do not lie one after the other, in this version of PyTorch")
                start += gradient.numel() * gradient.element_size()
            self._buckets[identities] = layers
        return layers


def make_node(
    group: dist.ProcessGroup, inside: list[int], model: Model, config: Config, in_place: bool | None, differs: bool
) -> Node:
    """Connects the processes of a machine, all machines at the same time. Their values may differ, or are the same."""
    transport = Transport(group, model.device, config.explicit_timeout(), inside)
    device_group = None
    if model.device.type != "cpu":
        # Its name follows from its members, so those of other machines need not take part.
        ranks = [dist.get_global_rank(group, member) for member in inside]
        made = dist.new_group(ranks, use_local_synchronization=True)
        device_group = made if isinstance(made, dist.ProcessGroup) else None
    elif in_place is False:
        device_group = transport.group
    return Node(transport, model.layout, model.layout_at(config.bin_warm_up), device_group, differs)


def plain(bucket: dist.GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """Averages as DDP does without a hook, where no residuals are kept."""
    buffer = bucket.buffer().div_(dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    # Complex numbers are summed as pairs, but DDP wants its own buffer back.
    return work.get_future().then(lambda future: buffer if buffer.is_complex() else future.value()[0])


def ddp_inside(model: object) -> DistributedDataParallel:
    """Returns the DDP model, which may be inside of another, as ``torch.compile`` and trainers make them."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    found = [module for module in modules if isinstance(module, DistributedDataParallel)]
    if isinstance(model, DistributedDataParallel) or len(found) == 1:
        return found[0]
    if found:
        raise TypeError(f"{type(model).__name__} has {len(found)} DistributedDataParallel models inside; attach to each of them")
    raise TypeError(
        f"AdaComp takes a DistributedDataParallel model, and {type(model).__name__} has none inside; wrap the model first. "
        "With Accelerate, attach to what prepare() returns; with Hugging Face's Trainer or Lightning, use the AdaCompCallback of "
        "adacomp.torch.huggingface or adacomp.torch.lightning"
    )


def parameters(ddp: DistributedDataParallel) -> tuple[Named, Named]:
    """Returns name and parameter of all that DDP exchanges, in its order: no frozen ones, shared ones once. The second ones
    cannot be compressed: their gradients are sparse, or of another format."""
    # Where DDP looks, the outermost module's own parameters have a dot before their names.
    ignored = ddp.parameters_to_ignore
    named = ddp.module.named_parameters()
    exchanged = [(name, p) for name, p in named if p.requires_grad and (name if "." in name else f".{name}") not in ignored]
    sparse = {
        id(module.weight)
        for module in ddp.module.modules()
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
    }
    good: list[tuple[str, torch.nn.Parameter]] = []
    others: list[tuple[str, torch.nn.Parameter]] = []
    for name, parameter in exchanged:
        fits = parameter.dtype in FORMATS and id(parameter) not in sparse
        (good if fits else others).append((clean_name(name), parameter))
    return good, others
