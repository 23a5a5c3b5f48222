"""A small model, its data, and loops over it: what learners' processes run."""

import contextlib
import copy
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from adacomp.torch import AdaCompState, Config, adacomp_hook

# Tests that hold for buckets in place and by way of selections, and for all strategies.
PATHS = pytest.mark.parametrize("in_place", [True, False], ids=["native", "torch-operations"])
STRATEGIES = pytest.mark.parametrize("strategy", ["gather", "reduce", "sharded"])


class Net(nn.Module):
    """Convolutions, matrices and vectors in more than one bucket of 0.1 MB."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3)
        self.norm = nn.GroupNorm(4, 16)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.fc1 = nn.Linear(32 * 4 * 4, 120)
        self.fc2 = nn.Linear(120, 10)

    def forward(self, x):
        x = self.norm(self.conv1(x)).relu()
        x = self.conv2(x).relu().flatten(1)
        return self.fc2(self.fc1(x).relu())


def make(module=Net, seed=0, **ddp):
    torch.manual_seed(seed)
    ddp.setdefault("bucket_cap_mb", 0.1)
    return DistributedDataParallel(module(), **ddp)


def batch(step, size=6, learner=None):
    """The same for the same learner and step."""
    learner = dist.get_rank() if learner is None else learner
    generator = torch.Generator().manual_seed(1000 * step + learner)
    return torch.randn(size, 1, 8, 8, generator=generator), torch.randint(0, 10, (size,), generator=generator)


def train(model, steps, optimizer=None, start=0):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(start, start + steps):
        images, labels = batch(step)
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    return weights(model)


def whole(tensor):
    """A sharded tensor in one piece, on all processes that share it. `full_tensor` would damage memory now and then on Gloo: see
    docs/reliability.md."""
    if not isinstance(tensor, DTensor):
        return tensor
    group = tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)
    parts = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, tensor.to_local().detach(), group=group)
    return torch.cat(parts)


def weights(model):
    return torch.cat([whole(parameter).detach().float().flatten() for parameter in model.parameters()]).clone()


def gradient(model):
    return torch.cat([parameter.grad.detach().float().flatten() for parameter in model.parameters()]).clone()


def everywhere(tensor):
    """All learners' tensors, in all."""
    result = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(result, tensor.contiguous())
    return result


def assert_same(value):
    """All learners have the same value."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert all(other == value for other in values), values


def mean_over_learners(values):
    return sum(everywhere(values.double())) / dist.get_world_size()


def assert_conserved(model, hook, given, received, tolerance=1e-5):
    """All that learners gave is what they got, or what they keep."""
    mean = mean_over_learners(given)
    found = received.double() + residual_mean(model, hook).double()
    assert (mean - found).abs().max() < tolerance * mean.abs().max(), (mean - found).abs().max()


def assert_replicas(model):
    for other in everywhere(weights(model)):
        assert torch.equal(other, weights(model))


def attach(model, in_place=None, **options):
    """Attaches with compression on; `in_place=False` takes the path for other devices."""
    state = AdaCompState(Config(**{"mode": "on", "timeout": 30, **options}))
    state._in_place = in_place
    state.bind(model)
    model.register_comm_hook(state, adacomp_hook)
    return state


@contextlib.contextmanager
def logged():
    """Gives the list of what is logged meanwhile."""
    lines, logger, handler = [], logging.getLogger("adacomp"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def local_gradient(model, images, labels):
    """This learner's own gradient, by a copy of the model without DDP."""
    alone = copy.deepcopy(model.module)
    alone.zero_grad()
    cross_entropy(alone(images), labels).backward()
    return gradient(alone)


def submit(model, steps, before=lambda step: None, dtype=torch.float32):
    """Runs steps that leave the weights as they are; returns the sums of what this learner gave, and of what it received."""
    given = received = 0
    for step in range(steps):
        before(step)
        images, labels = batch(step)
        images = images.to(dtype)
        given = given + local_gradient(model, images, labels).double()
        model.zero_grad()
        cross_entropy(model(images), labels).backward()
        received = received + gradient(model).double()
    return given, received


def own_state(hook):
    """What this process keeps, by keys without its name."""
    return {key.partition("/")[2]: values for key, values in hook.state_dict().items()}


def residual_mean(model, hook):
    """The mean over learners of what they keep, flat like the model's weights. All learners must ask."""
    state = hook.state_dict(consolidate=True)
    parts = []
    for name, parameter in model.module.named_parameters():
        parts.append(state.get("residual." + name, torch.zeros_like(parameter)).detach().flatten())
    return torch.cat(parts)
