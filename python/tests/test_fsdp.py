"""FSDP2 inside of a machine, compression between machines. Two machines of two processes."""

import gc
import operator
import os
import signal
import time
import weakref
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from learners import Learners, learners, on_learners
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from training import (
    STRATEGIES,
    Net,
    batch,
    everywhere,
    make,
    mean_over_learners,
    own_state,
    residual_mean,
    train,
    weights,
    whole,
)
from training import attach as attach_ddp

from adacomp.torch import AdaCompState, Config, LocalAdam


def mesh_of(places=2):
    return init_device_mesh("cpu", (dist.get_world_size() // places, places), mesh_dim_names=("replicate", "shard"))


def make_fsdp(module=Net, mesh=None, **options):
    """A model with units for two of its layers, and itself."""
    torch.manual_seed(0)
    model = module()
    mesh = mesh_of() if mesh is None else mesh
    inside = mesh if mesh.ndim == 1 or options.pop("hsdp", False) else mesh["shard"]
    for unit in (model.conv2, model.fc1):
        fully_shard(unit, mesh=inside, **options)
    return fully_shard(model, mesh=inside, **options)


def attach(model, in_place=None, learners=None, **options):
    state = AdaCompState(Config(**{"mode": "on", "timeout": 30, **options}))
    state._in_place = in_place
    state.bind(model, mesh_of()["replicate"] if learners is None else learners)
    return state


def full(tensors):
    return torch.cat([whole(each).detach().float().flatten() for each in tensors])


def gradient(model):
    return full(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())


def local_gradient(model, images, labels, module=Net):
    """This process's own gradient, by a model without FSDP that has the same weights."""
    alone = module()
    flat, start = weights(model), 0
    for parameter in alone.parameters():
        parameter.data.copy_(flat[start : start + parameter.numel()].view_as(parameter))
        start += parameter.numel()
    cross_entropy(alone(images), labels).backward()
    return torch.cat([p.grad.flatten() for p in alone.parameters()])


def kept(model, hook):
    state = hook.state_dict(consolidate=True)
    return torch.cat([state.get("residual." + n, torch.zeros(p.shape)).flatten() for n, p in model.named_parameters()])


def step_of(model, step, optimizer=None):
    images, labels = batch(step)
    if optimizer:
        optimizer.zero_grad()
    cross_entropy(model(images), labels).backward()
    if optimizer:
        optimizer.step()


def assert_replicas(model):
    assert all(torch.equal(other, weights(model)) for other in everywhere(weights(model)))


@on_learners(4)
def test_off_is_plain_hsdp():
    results = []
    for hsdp in (True, False):
        model = make_fsdp(hsdp=hsdp)
        hook = None if hsdp else attach(model, mode="off")
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        for step in range(10):
            step_of(model, step, optimizer)
        results.append(weights(model))
    assert (results[0] - results[1]).abs().max() <= 1e-6
    assert hook.stats()["steps"] == {"compressed": 0, "dense": 10, "dropped": 0}


def conserve(model, hook, steps, before=lambda step: None):
    given = received = 0
    for step in range(steps):
        before(step)
        images, labels = batch(step)
        given = given + local_gradient(model, images, labels).double()
        model.zero_grad()
        cross_entropy(model(images), labels).backward()
        received = received + gradient(model).double()
    mean, found = mean_over_learners(given), received + kept(model, hook).double()
    assert received.abs().max() > 0.1
    assert (mean - found).abs().max() < 1e-5 * mean.abs().max(), (mean - found).abs().max()


@STRATEGIES
@pytest.mark.parametrize("in_place", [True, False], ids=["native", "torch-operations"])
@on_learners(4)
def test_nothing_is_lost(strategy, in_place):
    model = make_fsdp()
    hook = attach(model, in_place, strategy=strategy)

    def go_dense_now_and_then(step):
        if step in (10, 12, 30, 31):
            hook.mode = "off" if step in (10, 30) else "on"

    conserve(model, hook, 50, go_dense_now_and_then)
    # A process keeps the residuals of its shards.
    elements = sum(values.numel() for name, values in own_state(hook).items() if name.startswith("residual."))
    compressed = sum(p.numel() for p in model.parameters() if p.numel() >= 1024)
    assert abs(elements - compressed / 2) < 1000


@on_learners(4)
def test_training_goes_as_with_ddp():
    """Not to the bit: bins begin where shards do."""
    losses = []
    for fsdp in (True, False):
        model = make_fsdp() if fsdp else make()
        attach(model) if fsdp else attach_ddp(model, node_size=2)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        images, labels = batch(0, 32, learner=0)
        own = slice(8 * dist.get_rank(), 8 * dist.get_rank() + 8)
        for _ in range(60):
            optimizer.zero_grad()
            cross_entropy(model(images[own]), labels[own]).backward()
            if fsdp:
                # Of sharded gradients.
                nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
        losses.append(cross_entropy(model(images), labels).item())
        if fsdp:
            assert_replicas(model)
    assert max(losses) < 0.1, losses


@on_learners(4)
def test_a_nan_in_one_process_drops_the_step_of_all():
    model = make_fsdp()
    hook = attach(model)
    for step in range(3):
        step_of(model, step)
    before = kept(model, hook)
    images, labels = batch(9)
    model.zero_grad()
    loss = cross_entropy(model(images), labels)
    (loss * (torch.nan if dist.get_rank() == 1 else 1.0)).backward()
    assert gradient(model).isnan().all()
    after = kept(model, hook)
    assert after.isfinite().all() and (after - before).abs().max() < 1
    assert hook.stats()["steps"]["dropped"] == 1
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    step_of(model, 10, optimizer)
    assert_replicas(model)
    assert weights(model).isfinite().all()


class Checkpointed(Net):
    def forward(self, x):
        x = self.norm(self.conv1(x)).relu()
        x = checkpoint(self.conv2, x, use_reentrant=False).relu().flatten(1)
        return self.fc2(self.fc1(x).relu())


class Compiled(Net):
    def __init__(self):
        super().__init__()
        self.fc1.compile(backend="eager")


@on_learners(4)
def test_accumulation_checkpointing_compiled_blocks_and_resharding():
    for module, options in (
        (Net, {"reshard_after_forward": False}),
        (Checkpointed, {}),
        (Compiled, {"reshard_after_forward": 2}),
    ):
        model = make_fsdp(module, **options)
        hook = attach(model)
        given = received = 0
        for step in range(3):
            model.zero_grad()
            for part, sync in ((0, False), (1, True)):
                model.set_requires_gradient_sync(sync)
                images, labels = batch(100 * part + step)
                given = given + local_gradient(model, images, labels).double()
                cross_entropy(model(images), labels).backward()
            received = received + gradient(model).double()
        # And two passes that each synchronise.
        model.zero_grad()
        for part in range(2):
            images, labels = batch(500 + part)
            given = given + local_gradient(model, images, labels).double()
            cross_entropy(model(images), labels).backward()
        received = received + gradient(model).double()
        mean, found = mean_over_learners(given), received + kept(model, hook).double()
        assert (mean - found).abs().max() < 1e-5 * mean.abs().max(), module
        assert hook.stats()["steps"]["compressed"] == 5
        hook.close()


@on_learners(4)
def test_mixed_precision():
    for policy in (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        MixedPrecisionPolicy(reduce_dtype=torch.float16),
    ):
        results = []
        for hsdp in (True, False):
            model = make_fsdp(hsdp=hsdp, mp_policy=policy)
            if not hsdp:
                # All in f32 bins of one element: what is sent is all of it.
                hook = attach(model, conv="dense", matrix="dense")
            step_of(model, 0)
            results.append(gradient(model))
        assert hook.stats()["steps"]["compressed"] == 1
        assert torch.allclose(*results, rtol=0.05, atol=2e-3), (results[0] - results[1]).abs().max()
        model = make_fsdp(mp_policy=policy)
        attach(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step in range(4):
            step_of(model, step, optimizer)
        assert_replicas(model)


class Branches(nn.Module):
    """A branch that only some machines use, one that nobody uses, and an unused parameter in a unit that is used."""

    def __init__(self):
        super().__init__()
        self.conv2, self.fc1, self.never = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.extra = nn.Parameter(torch.zeros(2048, 2))
        self.out = nn.Linear(64, 10)

    def forward(self, x, left=True):
        return self.out((self.conv2 if left else self.fc1)(x.flatten(1)).relu())


@on_learners(4)
def test_unused_parameters():
    model = make_fsdp(Branches)
    hook = attach(model)
    machine = dist.get_rank() // 2
    given = received = 0
    for step in range(8):
        # Both machines use the left branch in every second step; in the others one uses the right.
        left = step % 2 == 0 or machine == 0
        images, labels = batch(step)
        alone = Branches()
        flat, start = weights(model), 0
        for parameter in alone.parameters():
            parameter.data.copy_(flat[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()
        cross_entropy(alone(images, left), labels).backward()
        parts = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in alone.parameters()]
        given = given + torch.cat(parts).double()
        model.zero_grad()
        cross_entropy(model(images, left), labels).backward()
        assert model.extra.grad is None and model.never.weight.grad is None
        # With a gradient everywhere or nowhere, or this would hang.
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        received = received + gradient(model).double()
    mean, found = mean_over_learners(given), received + kept(model, hook).double()
    assert (mean - found).abs().max() < 1e-5 * mean.abs().max(), (mean - found).abs().max()
    assert not kept(model, hook)[: 2048 * 2].any()


@on_learners(4)
def test_replicate():
    """Each process is a learner."""
    mesh = mesh_of(places=1)
    torch.manual_seed(0)
    model = Net()
    for unit in (model.fc1, model):
        replicate(unit, mesh=mesh["shard"])
    hook = attach(model, learners=mesh["replicate"])
    assert hook.stats()["learners"] == 4
    conserve(model, hook, 10)


@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.parametrize("options", [{"mode": "off"}, {}, {"optimizer": True}], ids=["off", "on", "with its optimizer"])
@on_learners(4)
def test_adam_on_each_learner(places, options):
    """In the first step a machine's Adam moves each element by the rate, so that learners of one sign move it by all of it."""
    mesh = mesh_of(places)
    model = make_fsdp(mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.003)
    options = {**options, "optimizer": optimizer} if "optimizer" in options else options
    attach(model, learners=mesh["replicate"], local_adam=LocalAdam(), vector=1, matrix=1, conv=1, min_elements=1, **options)
    before = weights(model)
    images, labels = batch(0, learner=0)
    cross_entropy(model(images), labels).backward()
    optimizer.step()
    moved = (weights(model) - before).abs()
    assert_replicas(model)
    # All had the same samples. What is sent has one scale a layer, a mean that counts elements without a gradient, too.
    assert 0.5 * 0.003 < moved[moved > 0].median() < 1.01 * 0.003, moved[moved > 0].median()


@on_learners(4)
def test_parameters_that_are_trained_later_are_told():
    # One of a unit, and all of a unit.
    for name, mode in product(("fc2.bias", "fc1"), ("on", "off")):
        model = make_fsdp()
        frozen = operator.attrgetter(name)(model)
        frozen.requires_grad_(False)
        attach(model, mode=mode)
        step_of(model, 0)
        frozen.requires_grad_(True)
        with pytest.raises(RuntimeError, match="frozen when the hook was attached"):
            step_of(model, 1)


@on_learners(4)
def test_a_dense_backward_pass_that_breaks_off_is_forgotten():
    model = make_fsdp()
    hook = attach(model, mode="off")
    step_of(model, 0)
    images, labels = batch(1)
    # Of what is computed last.
    images.requires_grad_().register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cross_entropy(model(images), labels).backward()
    model.reset_iter_state()
    step_of(model, 2)
    hook.mode = "on"
    for step in range(3, 6):
        step_of(model, step)
    assert hook.stats()["steps"]["compressed"] == 3


@on_learners(4)
def test_a_model_has_one_hook():
    model = make_fsdp()
    hook = attach(model)
    with pytest.raises(RuntimeError, match="an all-reduce hook already"):
        attach(model)
    hook.close()
    old = weakref.ref(hook._door)
    del hook
    attach(model)
    step_of(model, 0)
    gc.collect()
    assert old() is None


def wrong(call):
    try:
        call()
    except (TypeError, ValueError) as error:
        return str(error)
    return "taken"


@on_learners(4)
def test_models_wrapped_in_another_way_are_told_what_to_do():
    mesh = mesh_of()
    partly = Net()
    fully_shard(partly.fc1, mesh=mesh["shard"])
    for call, told in (
        (lambda: attach(make_fsdp(hsdp=True)), "fully_shard(module, mesh=mesh['shard'])"),
        (lambda: attach(make_fsdp(), learners=mesh["shard"]), "fully_shard(module, mesh=mesh['shard'])"),
        (lambda: attach(make_fsdp(), learners=mesh), "mesh of 2 dimensions"),
        (lambda: AdaCompState(Config()).bind(make_fsdp()), "attach(model, mesh['replicate'])"),
        (lambda: attach(partly), "is not sharded"),
        (lambda: attach(make_fsdp(), node_size=2), "node_size is for DDP"),
        (lambda: attach(make()), "learners are for FSDP2"),
    ):
        assert told in wrong(call), wrong(call)


def save_ddp(folder):
    model = make()
    hook = attach_ddp(model, node_size=2, strategy="sharded")
    train(model, 7)
    torch.save(hook.state_dict(), f"{folder}/{dist.get_rank()}.pt")
    return residual_mean(model, hook)


def through_fsdp(folder):
    model = make_fsdp()
    hook = attach(model)
    hook.load_state_dict([torch.load(f"{folder}/{number}.pt") for number in range(4)])
    mean = kept(model, hook)
    torch.save(hook.state_dict(), f"{folder}/fsdp-{dist.get_rank()}.pt")
    own = hook.state_dict()
    other = attach(make_fsdp())
    other.load_state_dict(torch.load(f"{folder}/fsdp-{dist.get_rank()}.pt"))
    assert all(torch.equal(values, own[name]) for name, values in other.state_dict().items())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    step_of(model, 0, optimizer)
    assert_replicas(model)
    return mean


def back_to_ddp(folder):
    model = make()
    hook = attach_ddp(model)
    hook.load_state_dict([torch.load(f"{folder}/fsdp-{number}.pt") for number in range(4)])
    return residual_mean(model, hook)


def test_from_ddp_to_fsdp_and_back_conserves_the_total(tmp_path):
    mean = learners(4).run(save_ddp, tmp_path)[0]
    assert mean.abs().max() > 1e-3
    for other in [*learners(4).run(through_fsdp, tmp_path), *learners(2).run(back_to_ddp, tmp_path)]:
        assert torch.allclose(mean, other, rtol=1e-5, atol=1e-8), (mean - other).abs().max()


@on_learners(4)
def test_distributed_checkpoints_keep_every_process_apart(tmp_path):
    for form in ("fsdp", "ddp"):
        make_one = make_fsdp if form == "fsdp" else make
        attach_one = attach if form == "fsdp" else attach_ddp
        model = make_one()
        hook = attach_one(model)
        # Another number of digits than when it is loaded.
        for step in range(12):
            step_of(model, step)
        dcp.save({"hook": hook}, checkpoint_id=tmp_path / form)
        expected = hook.state_dict()
        other = attach_one(make_one())
        dcp.load({"hook": other}, checkpoint_id=tmp_path / form)
        assert all(torch.equal(values, expected[name]) for name, values in other.state_dict().items())
        # One copy, which any number can load.
        whole = hook.state_dict(consolidate=True)
        dcp.save({"hook": whole}, checkpoint_id=tmp_path / f"{form}-whole")
        loaded = other.state_dict(consolidate=True)
        dcp.load({"hook": loaded}, checkpoint_id=tmp_path / f"{form}-whole")
        assert all(torch.equal(values, whole[name]) for name, values in loaded.items())
        other.load_state_dict(loaded)


def until_killed():
    model = make_fsdp()
    attach(model, timeout=4)
    try:
        for step in range(1000):
            if (step, dist.get_rank()) == (5, 2):
                model.register_full_backward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            step_of(model, step)
    except RuntimeError as error:
        return str(error), step
    raise AssertionError("nobody was killed")


def test_a_killed_process_ends_the_others():
    with Learners(4) as four:
        four.start(until_killed)
        start = time.monotonic()
        # The one of the same machine is in a collective of FSDP's own, which ends as those do.
        told = [four.result(learner, timeout=60) for learner in (0, 1)]
        assert time.monotonic() - start < 40
    assert all(step == 5 for _, step in told) and any("AdaComp" in error for error, _ in told), told
