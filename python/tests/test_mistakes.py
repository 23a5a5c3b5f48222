"""What users get wrong is told at once or within the timeout, and harms nothing."""

import time

import pytest
import torch
import torch.distributed as dist
from learners import Learners, on_learners
from torch import nn
from torch.nn.functional import cross_entropy
from training import Net, assert_replicas, attach, batch, logged, make, train, weights

import adacomp.torch


@on_learners(2)
def test_attaching_on_one_learner_only_is_told():
    model = make()
    if dist.get_rank() == 0:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="learner 1 did not come within 0:00:01: all learners must attach AdaComp"):
            attach(model, timeout=1)
        assert time.monotonic() - start < 3
    dist.barrier()
    # It harms nothing: both can attach after it.
    hook = attach(model)
    train(model, 2)
    assert_replicas(model)
    assert hook.stats()["steps"]["compressed"] == 2


def consolidate_alone():
    model = make()
    hook = attach(model, timeout=2)
    train(model, 2)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="must call state_dict" if dist.get_rank() == 0 else "AdaComp"):
        if dist.get_rank() == 0:
            hook.state_dict(consolidate=True)
        else:
            train(model, 1)
    assert time.monotonic() - start < 6


def test_consolidating_on_one_learner_only_is_told_to_all():
    with Learners(2) as two:
        two.run(consolidate_alone)
        assert two.alive


@on_learners(2)
def test_all_learners_set_the_same_mode_or_none_is_set():
    model = make()
    hook = attach(model, timeout=5)
    train(model, 2)
    with pytest.raises(RuntimeError, match="all learners must set the same hook.mode after the same step"):
        hook.mode = "off" if dist.get_rank() == 0 else "auto"
    assert hook.mode == "on"
    if dist.get_rank() == 0:
        hook._runtime.transport.rendezvous.timeout *= 0.1
        with pytest.raises(RuntimeError, match="learner 1 did not come within"):
            hook.mode = "off"
        hook._runtime.transport.rendezvous.timeout *= 10
    dist.barrier()
    train(model, 2)
    assert_replicas(model)
    assert hook.mode == "on" and hook.stats()["steps"]["compressed"] == 4


@on_learners(2)
def test_loading_on_one_learner_only_is_told():
    model = make()
    hook = attach(model, mode="off")
    state = hook.state_dict()
    if dist.get_rank() == 0:
        hook._runtime.transport.rendezvous.timeout *= 0.03
        with pytest.raises(RuntimeError, match="learner 1 did not come within.*: all learners must load a state"):
            hook.load_state_dict(state)
    dist.barrier()
    train(model, 2)
    assert_replicas(model)


class Odd(nn.Module):
    """One parameter of each sort that cannot be compressed, before, between and after others."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.randn(64, 50, dtype=torch.float64) / 8)
        self.first = nn.Linear(50, 120)
        self.table = nn.Embedding(40, 120, sparse=True)
        self.last = nn.Linear(120, 10)
        self.turn = nn.Parameter(torch.randn(10, dtype=torch.complex64))

    def forward(self, images):
        x = (images.flatten(1).double() @ self.wide).float()
        x = self.first(x).relu() + self.table(images.flatten(1)[:, 0].abs().mul(10).long() % 40)
        return (self.last(x) * self.turn).real


def steps_of(model, count, optimizer):
    for step in range(count):
        images, labels = batch(step)
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()


@pytest.mark.parametrize("bucket_cap_mb", [0.001, 100])
@pytest.mark.parametrize("mode", ["off", "on"])
@on_learners(2)
def test_sparse_float64_and_complex_parameters_travel_dense(mode, bucket_cap_mb):
    results = []
    for hooked in (False, True):
        model = make(Odd, bucket_cap_mb=bucket_cap_mb)
        hook = attach(model, mode=mode) if hooked else None
        steps_of(model, 6, torch.optim.SGD(model.parameters(), 0.05))
        results.append({name: parameter.detach().clone() for name, parameter in model.module.named_parameters()})
        for name, parameter in model.named_parameters():
            others = [torch.empty_like(parameter) for _ in range(2)]
            dist.all_gather(others, parameter.detach())
            assert torch.equal(*others), name
    plain, mine = results
    others = ["wide", "turn", "table.weight"]
    assert sorted(hook._runtime.model.others) == sorted(others)
    assert not set(hook.stats()["layers"]) & set(others) and "residual.wide" not in hook.state_dict()
    assert f"by the process group's own sum: {', '.join(hook._runtime.model.others)}" in str(hook)
    if mode == "off":
        assert all(torch.equal(plain[name], mine[name]) for name in plain)
    else:
        assert hook.stats()["steps"]["compressed"] == 6
        # Going dense flushes what the others keep.
        hook.mode = "off"
        steps_of(model, 2, torch.optim.SGD(model.parameters(), 0.05))
        assert not hook._runtime.keeps
    with pytest.raises(ValueError, match="local_adam has no updates for wide"):
        attach(make(Odd), local_adam=adacomp.torch.LocalAdam())


@on_learners(2)
def test_the_model_inside_is_found_or_the_error_says_what_to_do():
    class Wrapper(nn.Module):
        def __init__(self, *inner):
            super().__init__()
            self.inner = nn.ModuleList(inner)

    inner = make()
    hook = adacomp.torch.attach(Wrapper(inner), mode="on")
    train(inner, 2)
    assert hook.stats()["steps"]["compressed"] == 2
    with pytest.raises(TypeError, match="has 2 DistributedDataParallel models inside; attach to each"):
        adacomp.torch.attach(Wrapper(make(), make()))
    for model in (Net(), torch.compile(Net())):
        with pytest.raises(TypeError, match="wrap the model first. With Accelerate, attach to what prepare"):
            adacomp.torch.attach(model)


@on_learners(2)
def test_convolutions_with_weight_normalisation_are_convolutions():
    def module():
        new = nn.utils.parametrizations.weight_norm(nn.Conv1d(16, 32, 9))
        with pytest.warns(FutureWarning):
            old = nn.utils.weight_norm(nn.Conv1d(32, 16, 9))
        return nn.Sequential(new, old, nn.Linear(48, 64))

    hook = attach(make(module))
    treatments = {name: layer["treatment"] for name, layer in hook.stats()["layers"].items()}
    assert treatments["0.parametrizations.weight.original1"] == treatments["1.weight_v"] == 50
    assert treatments["2.weight"] == 500


@on_learners(2)
def test_names_are_without_wrappers_also_in_states():
    """A model that was compiled goes on uncompiled, and the reverse; patterns fit both."""

    class Compiled(nn.Module):
        """With the names of ``DDP(torch.compile(model))``."""

        def __init__(self):
            super().__init__()
            self._orig_mod = Net()

        def forward(self, images):
            return self._orig_mod(images)

    with logged() as lines:
        model = make(Compiled)
        hook = attach(model, names={"fc1.weight": 100})
    assert not any("matches no parameter" in line for line in lines)
    train(model, 3)
    assert hook.stats()["layers"]["fc1.weight"]["treatment"] == 100
    other = make()
    plain = attach(other, names={"fc1.weight": 100})
    train(other, 3)
    mine, theirs = hook.state_dict(), plain.state_dict()
    assert torch.equal(weights(model), weights(other))
    assert list(mine) == list(theirs) and all(torch.equal(mine[key], theirs[key]) for key in mine)
    # As they were saved before names were cleaned.
    plain.load_state_dict({key.replace("residual.", "residual._orig_mod."): values for key, values in mine.items()})
    assert torch.equal(train(model, 2, start=3), train(other, 2, start=3))


@on_learners(2)
def test_patterns_that_match_nothing_are_told():
    with logged() as lines:
        attach(make(), names={"fcl.*": "dense", "fc?.weight": 100, "fc[1].weight": 50})
    told = [line for line in lines if "matches no parameter" in line]
    assert len(told) == (1 if dist.get_rank() == 0 else 0)
    assert all("'fcl.*', 'fc[1].weight' matches no parameter; there are conv1.weight" in line for line in told)
