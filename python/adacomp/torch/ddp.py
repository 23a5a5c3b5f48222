"""The door for ``DistributedDataParallel``: a learner is a process, and what comes in is PyTorch's buckets."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .config import Config
from .runtime import Named, Runtime


class DdpDoor:
    """Hands the buckets of a DDP model to a runtime."""

    def __init__(self, ddp: DistributedDataParallel, config: Config, in_place: bool | None = None) -> None:
        self.group = ddp.process_group
        named = parameters(ddp)
        self._numbers = {id(parameter): number for number, (_, parameter) in enumerate(named)}
        self._seen: set[tuple[int, ...]] = set()
        # Parameters that no learner has used in a step do not get the average, so they must not send.
        skip_unused = bool(ddp.find_unused_parameters or ddp.static_graph)
        self.runtime = Runtime(ddp.module, named, self.group, config, skip_unused, in_place)

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Averages a bucket in place; returns the future of its buffer."""
        runtime = self.runtime
        runtime.check()
        if bucket.index() == 0:
            runtime.begin(time.perf_counter())
        layers = self._layers(bucket) if runtime.moments or not runtime.is_plain else []
        runtime.apply_moments(bucket.buffer(), layers)
        if runtime.is_plain:
            return plain(bucket, self.group)
        future = runtime.submit(bucket.buffer(), layers)
        if bucket.is_last():
            runtime.finish()
        # DDP finds the exception of a future in what its callback raises only.
        return future.then(lambda done: done.value())

    def _layers(self, bucket: dist.GradBucket) -> list[int]:
        """Returns the numbers of a bucket's parameters, in its order."""
        try:
            layers = [self._numbers[id(parameter)] for parameter in bucket.parameters()]
        except KeyError:
            raise RuntimeError("a bucket has a parameter that the model did not have when the hook was attached") from None
        if tuple(layers) not in self._seen:
            # That they lie one after the other, once for each bucket that PyTorch makes.
            start = bucket.buffer().data_ptr()
            for gradient in bucket.gradients():
                if gradient.data_ptr() != start and gradient.numel():
                    raise RuntimeError("a bucket's gradients do not lie one after the other, in this version of PyTorch")
                start += gradient.numel() * gradient.element_size()
            self._seen.add(tuple(layers))
        return layers


def plain(bucket: dist.GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """Averages as DDP does without a hook, where no residuals are kept."""
    buffer = bucket.buffer().div_(dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def parameters(ddp: DistributedDataParallel) -> Named:
    """Returns name and parameter of all that DDP exchanges, in its order: no frozen ones, shared ones once."""
    # Where DDP looks, the outermost module's own parameters have a dot before their names.
    ignored = ddp.parameters_to_ignore
    named = ddp.module.named_parameters()
    return [(name, p) for name, p in named if p.requires_grad and (name if "." in name else f".{name}") not in ignored]
