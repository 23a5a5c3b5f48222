"""``torch.compile`` around DDP, inside of it, and with each way to optimise DDP: the same bits, or a clear line."""

import pytest
import torch
from learners import on_learners
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import assert_replicas, batch, weights

import adacomp.torch


class Wide(nn.Module):
    """More than the first megabyte, which is a bucket of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(64, 600), nn.Linear(600, 600), nn.Linear(600, 10)

    def forward(self, images):
        return self.last(self.middle(self.first(images.flatten(1)).relu()).relu())


def trained(model, module):
    """Trains a few steps; returns the weights and the hook's parameters."""
    hook = adacomp.torch.attach(model, mode="on", timeout=30, names={"first.weight": 100})
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    for step in range(3):
        images, labels = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    stats = hook.stats()
    assert stats["steps"]["compressed"] == 3
    assert_replicas(module)
    return weights(module), {name: layer["treatment"] for name, layer in stats["layers"].items()}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_learners(2)
def test_compiled_models_train_as_others(backend):
    def module():
        torch._dynamo.reset()
        torch.manual_seed(0)
        return Wide()

    def ddp(module):
        return DistributedDataParallel(module, bucket_cap_mb=1)

    def compiled(module):
        return torch.compile(module, backend=backend)

    expected, treatments = trained(ddp(plain := module()), plain)
    assert treatments["first.weight"] == 100
    ways = [True] if backend == "inductor" else [True, False]
    # With the optimiser of DDP, which cuts the graph into buckets, and without.
    for way in ways:
        with torch._dynamo.config.patch(optimize_ddp=way):
            found, names = trained(compiled(ddp(around := module())), around)
        assert names == treatments
        assert torch.allclose(found, expected, atol=1e-5) if backend == "inductor" else torch.equal(found, expected)
    if backend != "inductor":
        found, names = trained(ddp(compiled(inside := module())), inside)
        assert names == treatments and torch.equal(found, expected)


@on_learners(2)
def test_ddp_in_python_is_refused():
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        with pytest.raises(ValueError, match="set torch._dynamo.config.optimize_ddp = True"):
            adacomp.torch.attach(DistributedDataParallel(Wide()))
