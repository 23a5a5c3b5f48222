"""Several processes of a machine are one learner: sums inside, compression between machines. Two machines of two processes."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from learners import Learners, learners, on_learners
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from training import (
    PATHS,
    STRATEGIES,
    Net,
    assert_conserved,
    assert_replicas,
    attach,
    batch,
    gradient,
    local_gradient,
    logged,
    make,
    mean_over_learners,
    own_state,
    residual_mean,
    submit,
    train,
    weights,
)

from adacomp.torch import LocalAdam
from adacomp.torch.node import Node

STEPS = 20


def train_machines(strategy, in_place, node_size):
    """Trains with two machines of so many processes, of which each has its share of the machine's minibatch."""
    model = make()
    hook = attach(model, in_place, strategy=strategy, node_size=node_size)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    machine, place = divmod(dist.get_rank(), node_size)
    own = slice(place * 8 // node_size, (place + 1) * 8 // node_size)
    for step in range(STEPS):
        images, labels = batch(step, 8, machine)
        optimizer.zero_grad()
        cross_entropy(model(images[own]), labels[own]).backward()
        optimizer.step()
    assert_replicas(model)
    stats = hook.stats()
    assert stats["learners"] == 2 and stats["steps"]["compressed"] == STEPS
    return weights(model)


# With `sharded` the scales are those of owners' shards, which follow from the parts.
@pytest.mark.parametrize("strategy", ["gather", "reduce"])
@PATHS
def test_a_machine_is_one_learner_with_all_of_its_samples(strategy, in_place):
    together, *_ = learners(4).run(train_machines, strategy, in_place, 2)
    alone, *_ = learners(2).run(train_machines, strategy, in_place, 1)
    difference = (together - alone).abs()
    assert difference.max().item() <= 1e-6, (difference > 1e-6).sum()


@on_learners(4)
def test_without_shared_memory_the_result_is_the_same():
    expected, share = train_machines("gather", None, 2), Node._share
    Node._share = lambda node, size: None
    try:
        with logged() as lines:
            assert torch.equal(train_machines("gather", None, 2), expected)
    finally:
        Node._share = share
    assert sum("cannot share memory" in line for line in lines) == 1, lines


@on_learners(4)
def test_a_closed_hook_tells_the_other_processes_of_its_machine():
    model = make()
    hook = attach(model, node_size=2, timeout=60)
    submit(model, 2)
    dist.barrier()
    # One plan for each bucket that is in use.
    numbers = [number for plan in hook._runtime.inside._plans for number in plan]
    assert len(numbers) == len(set(numbers)) > 0
    begin = time.monotonic()
    if dist.get_rank() != 1:
        with pytest.raises(RuntimeError, match="AdaComp"):
            submit(model, 1)
    # Those that are told end, too, and so tell the rest.
    hook.close()
    assert time.monotonic() - begin < 30


@on_learners(4)
def test_a_process_keeps_its_part_of_the_residuals():
    model = make()
    hook = attach(model, node_size=2)
    train(model, 3)
    elements = sum(values.numel() for name, values in own_state(hook).items() if name.startswith("residual."))
    compressed = sum(parameter.numel() for parameter in model.parameters() if parameter.numel() >= 1024)
    assert abs(elements - compressed / 2) < 1000, (elements, compressed)
    # Cut between bins, and named.
    assert f"residual.fc1.weight[{0 if dist.get_rank() % 2 == 0 else 30500}" in str(list(own_state(hook))), list(own_state(hook))


@STRATEGIES
@PATHS
@on_learners(4)
def test_nothing_is_lost(strategy, in_place):
    """In 50 steps, of which some are dense."""
    model = make()
    hook = attach(model, in_place, strategy=strategy, node_size=2)

    def go_dense_now_and_then(step):
        if step in (10, 12, 30, 31):
            hook.mode = "off" if step in (10, 30) else "on"

    given, received = submit(model, 50, go_dense_now_and_then)
    assert received.abs().max() > 0.1
    assert_conserved(model, hook, given, received)


def save_parts(folder, strategy):
    model = make()
    hook = attach(model, strategy=strategy, node_size=2)
    train(model, 7)
    torch.save(hook.state_dict(), f"{folder}/{dist.get_rank()}.pt")
    mean = residual_mean(model, hook)
    return mean, train(model, 3, start=7)


def load_parts(folder, strategy, node_size, own=False):
    model = make()
    hook = attach(model, strategy=strategy, node_size=node_size)
    if own:
        # Momentum begins anew in both runs.
        train(model, 7)
        other = attach(make(), strategy=strategy, node_size=node_size)
        other.load_state_dict(torch.load(f"{folder}/{dist.get_rank()}.pt"))
        same = other.state_dict()
        assert all(torch.equal(values, same[name]) for name, values in hook.state_dict().items())
        return residual_mean(model, hook)
    hook.load_state_dict([torch.load(f"{folder}/{number}.pt") for number in range(4)])
    mean = residual_mean(model, hook)
    train(model, 2)
    assert_replicas(model)
    return mean


@STRATEGIES
def test_another_number_of_machines_or_processes_conserves_the_total(tmp_path, strategy):
    (mean, _), *_ = learners(4).run(save_parts, tmp_path, strategy)
    assert mean.abs().max() > 1e-3
    assert torch.equal(learners(4).run(load_parts, tmp_path, strategy, 2, True)[0], mean)
    for count, node_size in ((3, 1), (2, 2), (4, 1), (4, 4)):
        for other in learners(count).run(load_parts, tmp_path, strategy, node_size):
            assert torch.allclose(mean, other, rtol=1e-5, atol=1e-8), (count, node_size, (mean - other).abs().max())


@on_learners(4)
def test_off_is_plain_ddp_and_auto_decides_together():
    builtin = train(make(), 10)
    model = make()
    attach(model, node_size=2, mode="off")
    assert (train(model, 10) - builtin).abs().max() <= 1e-6
    model = make()
    hook = attach(model, node_size=2, mode="auto")
    train(model, 40)
    assert_replicas(model)
    kinds = torch.tensor(list(hook.stats()["steps"].values()))
    assert (mean_over_learners(kinds) == kinds).all() and kinds.sum() == 40


@PATHS
@on_learners(4)
def test_a_nan_in_one_process_drops_the_step_of_all(in_place):
    model = make()
    hook = attach(model, in_place, node_size=2)
    train(model, 3)
    kept = residual_mean(model, hook)
    images, labels = batch(9)
    given = local_gradient(model, images, labels).double()
    if dist.get_rank() == 1:
        # In the part of one place only.
        model.module.fc2.bias.register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), torch.nan))
        given[-10] = 0
    model.zero_grad()
    cross_entropy(model(images), labels).backward()
    assert gradient(model).isnan().all()
    # What was compressed is kept, what is always dense is gone, as without compression.
    expected, found = kept + mean_over_learners(given), residual_mean(model, hook).double()
    compressed = found != 0
    assert compressed.sum() > 60000 and (found - expected)[compressed].abs().max() < 1e-6
    assert hook.stats()["steps"]["dropped"] == 1
    if dist.get_rank() == 1:
        model.module.fc2.bias._backward_hooks.clear()
    train(model, 3)
    assert_replicas(model)


@on_learners(4)
def test_bf16_and_a_scaler():
    model = make(lambda: Net().bfloat16())
    hook = attach(model, node_size=2)
    for step in range(4):
        images, labels = batch(step)
        cross_entropy(model(images.bfloat16()).float(), labels).backward()
    assert hook.stats()["steps"]["compressed"] == 4
    assert_replicas(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model = make()
    hook = attach(model, node_size=2, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(4):
        images, labels = batch(step)
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(images), labels) * (torch.inf if (step, dist.get_rank()) == (2, 3) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert hook.stats()["steps"] == {"compressed": 4, "dense": 0, "dropped": 1} and scaler.get_scale() == 2.0**9
    assert_replicas(model)


@on_learners(4)
def test_accumulation_unused_parameters_and_adam():
    model = make(find_unused_parameters=True)
    hook = attach(model, node_size=2)
    given = received = 0
    for step in range(6):
        model.zero_grad()
        first, second = batch(step), batch(100 + step)
        given = given + local_gradient(model, *first).double() + local_gradient(model, *second).double()
        with model.no_sync():
            cross_entropy(model(first[0]), first[1]).backward()
        cross_entropy(model(second[0]), second[1]).backward()
        received = received + gradient(model).double()
    assert_conserved(model, hook, given, received)
    # Not used by anybody in this step.
    model.zero_grad(set_to_none=True)
    model.module.conv1(batch(0)[0])
    kept = residual_mean(model, hook)
    model.module.forward, whole = lambda x: model.module.norm(model.module.conv1(x)).mean((1, 2, 3)), model.module.forward
    model(batch(0)[0]).sum().backward()
    assert model.module.fc1.weight.grad is None
    fc1 = slice(-(512 * 120 + 120 + 1210), -(120 + 1210))
    assert torch.equal(residual_mean(model, hook)[fc1], kept[fc1]) and kept[fc1].any()
    model.module.forward = whole
    train(model, 2)
    assert_replicas(model)
    for mode in ("on", "off"):
        model = make()
        hook = attach(model, node_size=2, local_adam=LocalAdam(), mode=mode)
        train(model, 4, torch.optim.SGD(model.parameters(), 1e-3))
        assert_replicas(model)
        assert any("adam.first" in name for name in own_state(hook))


@on_learners(4)
def test_who_is_where_can_be_said_in_several_ways():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("machine", "place"))
    results = []
    for node_size in (2, mesh, (mesh.get_group("machine"), mesh.get_group("place")), "auto"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOCAL_WORLD_SIZE", "2")
            model = make()
            attach(model, node_size=node_size)
            results.append(train(model, 3))
    assert all(torch.equal(results[0], other) for other in results)
    for wrong, told in ((3, "divisor"), (0, "node_size 0"), (1.5, "node_size is 1.5"), (mesh["place"], "dimensions")):
        with pytest.raises((TypeError, ValueError), match=told):
            attach(make(), node_size=wrong)


def until_killed():
    model = make()
    attach(model, node_size=2, timeout=4)
    try:
        for step in range(1000):
            if (step, dist.get_rank()) == (5, 2):
                model.module.fc1.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            train(model, 1, start=step)
    except RuntimeError as error:
        return str(error), step
    raise AssertionError("nobody was killed")


def test_a_killed_process_ends_all_others():
    with Learners(4) as four:
        four.start(until_killed)
        start = time.monotonic()
        told = [four.result(learner, timeout=60) for learner in (0, 1, 3)]
        assert time.monotonic() - start < 40
    assert all("AdaComp" in error and step == 5 for error, step in told), told


@on_learners(4)
def test_bins_can_grow():
    """In the first steps; parameters are cut between the bins that they have in the end."""
    model = make()
    hook = attach(model, node_size=2, bin_warm_up=16)
    given, received = submit(model, 20)
    assert_conserved(model, hook, given, received)
    layers = hook.stats()["layers"]
    assert {entry["treatment"] for name, entry in layers.items() if name.startswith("fc1.weight[")} == {500}, layers.keys()
