"""Local steps: the rule to the bit, nothing lost, and all that training loops do, with real processes."""

import copy
import os
import signal
import time

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from learners import Learners, learners, on_learners
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from training import (
    PATHS,
    STRATEGIES,
    Net,
    assert_replicas,
    assert_same,
    batch,
    everywhere,
    logged,
    own_state,
    train,
    weights,
)

import adacomp.torch.local
from adacomp.research import Layout
from adacomp.research import Learners as Simulation
from adacomp.torch import LocalSteps, Outer

OUTERS = pytest.mark.parametrize("outer", [Outer(), Outer(0.7, 0.9)], ids=["applied", "nesterov"])
FAST = {"matrix": 50, "timeout": 30}


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def start(model=None, every=4, optimizer=None, **options):
    model = model or net()
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 1e-3)
    return model, optimizer, LocalSteps(model, optimizer, every, **{**FAST, **options})


def simulate(count, every, rounds, outer, decay=1.0, size=6):
    """The same in one process; returns the shared weights and each learner's residual norms."""
    shared = net()
    replicas = [copy.deepcopy(shared) for _ in range(count)]
    optimizers = [torch.optim.Adam(replica.parameters(), 1e-3) for replica in replicas]
    shapes = [
        (name, tuple(parameter.shape), "conv" if parameter.dim() == 4 else None) for name, parameter in shared.named_parameters()
    ]
    simulation = Simulation(Layout(shapes, matrix=50), count, "gather")
    flat = [parameter.detach() for parameter in shared.parameters()]
    momenta = [torch.zeros_like(each) if outer.momentum else None for each in flat]
    for number in range(rounds):
        simulation.decay(decay)
        for learner, (replica, optimizer) in enumerate(zip(replicas, optimizers)):
            for step in range(number * every, (number + 1) * every):
                images, labels = batch(step, size, learner)
                optimizer.zero_grad()
                cross_entropy(replica(images), labels).backward()
                optimizer.step()
            simulation.submit(learner, [(one - each.detach()).numpy() for one, each in zip(flat, replica.parameters())])
        averages = [numpy.empty(tuple(each.shape), numpy.float32) for each in flat]
        assert simulation.finish(averages) is None
        for one, average, momentum in zip(flat, averages, momenta):
            outer.apply(one, torch.from_numpy(average), momentum)
        for replica in replicas:
            for one, parameter in zip(flat, replica.parameters()):
                parameter.detach().copy_(one)
    return weights(shared)


@OUTERS
@PATHS
@on_learners(3)
def test_processes_have_the_weights_of_a_simulation(outer, in_place):
    adacomp.torch.local._in_place = in_place
    try:
        decay = 0.95 if outer.momentum else 1.0
        model, optimizer, local = start(outer=outer, decay=decay, strategy="gather")
    finally:
        adacomp.torch.local._in_place = None
    train(model, 20, optimizer)
    assert torch.equal(weights(model), simulate(3, 4, 5, outer, decay))
    stats = local.stats()
    assert stats["rounds"] == 5 and stats["local_steps"] == 20 and stats["position"] == 0
    assert stats["steps"] == {"compressed": 5, "dense": 0, "dropped": 0}
    # Against a dense all-reduce in each of the four steps of a round.
    assert stats["compression_ratio"] == pytest.approx(stats["frame_ratio"] * 4 * 2 / 3, rel=1e-6)


def dense_rounds(count, every, rounds):
    """Dense DiLoCo in one process."""
    shared = net()
    replicas = [copy.deepcopy(shared) for _ in range(count)]
    optimizers = [torch.optim.Adam(replica.parameters(), 1e-3) for replica in replicas]
    for number in range(rounds):
        for learner, (replica, optimizer) in enumerate(zip(replicas, optimizers)):
            for step in range(number * every, (number + 1) * every):
                images, labels = batch(step, 6, learner)
                optimizer.zero_grad()
                cross_entropy(replica(images), labels).backward()
                optimizer.step()
        mean = torch.stack([weights(replica) for replica in replicas]).double().mean(0).float()
        for model in (shared, *replicas):
            nn.utils.vector_to_parameters(mean.clone(), model.parameters())
    return weights(shared)


@on_learners(2, 4)
def test_off_is_a_dense_average():
    model, optimizer, local = start(mode="off")
    train(model, 12, optimizer)
    assert_replicas(model)
    # Sums are made in another order, and Adam makes much of little.
    difference = (weights(model) - dense_rounds(dist.get_world_size(), 4, 3)).abs()
    assert difference.median() < 1e-7 and difference.max() < 1e-3, (difference.median(), difference.max())
    assert local.stats()["steps"] == {"compressed": 0, "dense": 3, "dropped": 0}
    assert "sends what local steps have changed dense" in str(local)


@STRATEGIES
@pytest.mark.parametrize("fragments", [1, 3])
@on_learners(4)
def test_nothing_is_lost(strategy, fragments):
    """What all steps have changed is what the shared weights have moved, or waits in residuals; some rounds are dense."""
    model, optimizer, local = start(strategy=strategy, fragments=fragments)
    before = weights(model).double()
    moved = torch.zeros_like(before)
    for step in range(24):
        # A step of the optimiser alone, by a hook that runs before the exchange.
        if step in (8, 12):
            local.mode = "off" if step == 8 else "on"
        old = weights(model).double()
        seen = []
        handle = optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append(weights(model).double()))
        # Before the exchange's own, which was registered first.
        optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)
        train(model, 1, optimizer, start=step)
        handle.remove()
        moved += seen[0] - old
    local.end_round()
    assert_replicas(model)
    residual = local.state_dict(consolidate=True)
    kept = torch.cat(
        [residual.get(f"residual.{name}", torch.zeros_like(each)).flatten() for name, each in model.named_parameters()]
    )
    assert kept.abs().max() > 1e-4
    mean = sum(everywhere(moved)) / dist.get_world_size()
    lost = (weights(model).double() - before) - kept.double() - mean
    assert lost.abs().max() < 1e-5 * mean.abs().max() + 1e-6, lost.abs().max()


@on_learners(2)
def test_auto_decides_together():
    model, optimizer, local = start(every=2, mode="auto")
    train(model, 60, optimizer)
    assert_replicas(model)
    steps = local.stats()["steps"]
    assert_same(steps)
    assert sum(steps.values()) == 30


def overlapped(delay, fragments, steps=24, saves=(), folder=None):
    model, optimizer, local = start(every=6, delay=delay, fragments=fragments)
    for step in range(steps):
        train(model, 1, optimizer, start=step)
        if step + 1 in saves:
            torch.save([model.state_dict(), optimizer.state_dict(), local.state_dict()], f"{folder}/{dist.get_rank()}-{step + 1}")
    before_the_end = weights(model)
    local.end_round()
    assert_replicas(model)
    return before_the_end, weights(model), local.stats()


def resumed(delay, fragments, folder, step, steps=24):
    """Goes on from a file, with all made in an order in which users may."""
    model, optimizer = net(seed=7), None
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    saved, inner, state = torch.load(f"{folder}/{dist.get_rank()}-{step}")
    if step % 2:
        model.load_state_dict(saved)
    local = LocalSteps(model, optimizer, 6, delay=delay, fragments=fragments, **FAST)
    local.load_state_dict(state)
    model.load_state_dict(saved)
    optimizer.load_state_dict(inner)
    train(model, steps - step, optimizer, start=step)
    before_the_end = weights(model)
    local.end_round()
    return before_the_end, weights(model), local.stats()


@pytest.mark.parametrize("delay, fragments", [(0, 1), (3, 1), (6, 1), (0, 3), (2, 3)])
def test_a_resume_anywhere_in_a_round_gives_the_same_bits(tmp_path, delay, fragments):
    plain = learners(2).run(overlapped, delay, fragments)
    saving = learners(2).run(overlapped, delay, fragments, saves=(5, 6, 8, 13), folder=tmp_path)
    for (ends, shared, stats), (ends_too, shared_too, _) in zip(plain, saving):
        assert torch.equal(ends, ends_too) and torch.equal(shared, shared_too)
        # Of three fragments the second is empty: one layer has most of the elements. What was exchanged before the last step is
        # exchanged again at the end.
        rounds = 5 if fragments > 1 else 4
        assert stats["rounds"] == rounds and stats["steps"]["compressed"] == rounds * min(fragments, 2)
    for step in (5, 6, 8, 13):
        for (ends, shared, stats), (ends_too, shared_too, stats_too) in zip(
            plain, learners(2).run(resumed, delay, fragments, tmp_path, step)
        ):
            assert torch.equal(ends, ends_too) and torch.equal(shared, shared_too), step
            assert stats_too["rounds"] == stats["rounds"] and stats_too["local_steps"] == 24


def test_overlap_keeps_what_the_steps_have_done():
    """It trains about as well as without; with a delay the exchange is still under way when optimizer.step() returns."""
    images, labels = (torch.cat(each) for each in zip(*(batch(step, 6, learner) for step in range(60) for learner in range(2))))
    before, *gains = (
        cross_entropy(model(images), labels).item()
        for model in [net(), *(trained_with(delay, fragments) for delay, fragments in ((0, 1), (3, 1), (2, 3)))]
    )
    gains = [before - loss for loss in gains]
    assert gains[0] > 0.02 and min(gains) > 0.7 * gains[0], gains


def trained_with(delay, fragments):
    (_, shared, _), *_ = learners(2).run(overlapped, delay, fragments, 60)
    model = net()
    nn.utils.vector_to_parameters(shared, model.parameters())
    return model


@on_learners(2)
def test_steps_go_on_while_a_round_is_exchanged():
    model, optimizer, local = start(every=4, delay=3)
    train(model, 3, optimizer)
    wait = local._runtime.transport.wait

    def slowly(work):
        time.sleep(0.5)
        wait(work)

    local._runtime.transport.wait = slowly
    train(model, 1, optimizer, start=3)
    begin = time.monotonic()
    train(model, 2, optimizer, start=4)
    assert time.monotonic() - begin < 0.4 and local._door._round.average is not None
    train(model, 1, optimizer, start=6)
    assert time.monotonic() - begin > 0.8 and local._door._round is None


def save_all(folder, steps, delay=0):
    model, optimizer, local = start(delay=delay)
    train(model, steps, optimizer)
    torch.save([model.state_dict(), optimizer.state_dict(), local.state_dict()], f"{folder}/{dist.get_rank()}")
    return consolidated(local)


def consolidated(local):
    return local.state_dict(consolidate=True)


def go_on(folder, count, one=False):
    model = net(seed=3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    saved = [torch.load(f"{folder}/{number}") for number in range(count)]
    _, inner, _ = saved[dist.get_rank() % count]
    local = LocalSteps(model, optimizer, 4, **FAST)
    local.load_state_dict(torch.load(f"{folder}/one") if one else [state for _, _, state in saved])
    optimizer.load_state_dict(inner)
    state, begin = consolidated(local), weights(model)
    train(model, 8, optimizer)
    assert_replicas(model)
    assert local.rounds == 4 and local.position == 0
    return state, begin


@pytest.mark.parametrize("steps, delay", [(8, 0), (10, 0), (9, 2)], ids=["after a round", "in a round", "while one is exchanged"])
def test_another_number_of_learners_conserves_the_total(tmp_path, steps, delay):
    expected, *_ = learners(3).run(save_all, tmp_path, steps, delay)
    torch.save(expected, tmp_path / "one")
    shared = torch.cat([expected[f"shared.{name}"].flatten() for name, _ in net().named_parameters()])
    assert any(values.any() for name, values in expected.items() if name.startswith("residual."))
    for count in (2, 4, 1):
        for one in (False, True):
            for state, begin in learners(count).run(go_on, tmp_path, 3, one):
                # What all share, they have at first.
                assert torch.equal(begin, shared)
                for name, values in expected.items():
                    if name.startswith(("residual.", "shared.")):
                        torch.testing.assert_close(state[name], values, rtol=1e-5, atol=1e-8)


@on_learners(2)
def test_states_of_others_are_refused():
    model, optimizer, local = start()
    train(model, 4, optimizer)
    hook = adacomp.torch.attach(DistributedDataParallel(net()), mode="on")
    for one, other in ((local, hook), (hook, local)):
        with pytest.raises(ValueError, match="load the state with what has saved it"):
            one.load_state_dict(other.state_dict())
    changed = {key: values for key, values in local.state_dict().items() if "shared.fc1.weight" not in key}
    with pytest.raises(ValueError, match="fc1.weight"):
        local.load_state_dict(changed)


class Tied(nn.Module):
    """Batch norms, tied and frozen parameters, and buffers that do not change."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.frozen, self.last = nn.Linear(64, 64), nn.Linear(64, 10)
        self.frozen.requires_grad_(False)
        self.register_buffer("mask", torch.full((64, 64), -torch.inf).triu(1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        # Replaced, not changed in place.
        self.mean = 0.9 * self.mean + 0.1 * x.mean()
        return self.last(self.frozen(self.second(self.norm(self.first(x.flatten(1))).relu()).relu()).relu())


@PATHS
@pytest.mark.parametrize("delay", [0, 2])
@on_learners(2)
def test_tied_and_frozen_parameters_and_buffers(in_place, delay):
    torch.manual_seed(0)
    model = Tied()
    frozen = model.frozen.weight.clone()
    adacomp.torch.local._in_place = in_place
    _, optimizer, local = start(model, delay=delay)
    adacomp.torch.local._in_place = None
    start_of_round = None
    for step in range(12):
        if step == 3 and not delay:
            alone = copy.deepcopy(model)
            images, _ = batch(step)
            alone(images)
            start_of_round = [alone.norm.running_var.clone(), alone.mean.clone()]
        train(model, 1, optimizer, start=step)
        if step == 3 and not delay:
            for own, found in zip(start_of_round, (model.norm.running_var, model.mean)):
                torch.testing.assert_close(found, sum(everywhere(own)) / 2)
    local.end_round()
    assert_replicas(model)
    for buffer in (model.norm.running_mean, model.norm.running_var, model.mean):
        assert_same(buffer.tolist())
    assert torch.equal(model.frozen.weight, frozen) and model.second.weight is model.first.weight
    assert model.calls == 12 and model.norm.num_batches_tracked == 12
    assert torch.equal(model.mask, torch.full((64, 64), -torch.inf).triu(1))
    layers = local.stats()["layers"]
    assert "frozen.weight" not in layers and "second.weight" not in layers and "norm.running_mean" in layers
    # A mask that never changes costs next to nothing.
    assert layers["mask"]["bytes"] < 100


@on_learners(2)
def test_clipping_accumulation_schedules_and_weight_decay():
    """A loop with all of it gives the weights of the same loop without, whose weights are averaged by hand."""

    def loop(model, optimizer, after):
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        for step in range(12):
            optimizer.zero_grad()
            for part in range(2):
                images, labels = batch(2 * step + part)
                (cross_entropy(model(images), labels) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            after(step, model)
        return weights(model)

    def average(step, model):
        if step % 4 == 3:
            for parameter in model.parameters():
                parameter.data = (sum(everywhere(parameter.detach())) / 2).clone()

    byhand = net()
    expected = loop(byhand, torch.optim.AdamW(byhand.parameters(), 1e-2, weight_decay=0.1), average)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    start(model, optimizer=optimizer, mode="off")
    assert (loop(model, optimizer, lambda *_: None) - expected).abs().max() < 1e-5


@on_learners(2)
def test_steps_that_a_scaler_skips_do_not_count():
    model, optimizer, local = start(every=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    step = 0
    # Learners skip different steps, so the loop ends by rounds.
    while local.rounds < 3:
        images, labels = batch(step)
        optimizer.zero_grad()
        bad = step in (1, 4) and dist.get_rank() == 1
        scaler.scale(cross_entropy(model(images), labels) * (torch.inf if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        step += 1
    assert step == (11 if dist.get_rank() == 1 else 9) and local.stats()["steps"]["dropped"] == 0
    assert_replicas(model)


class Codebook(nn.Module):
    """Has a large buffer that the first forward pass changes, on each learner to something else."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 10)
        self.register_buffer("book", torch.zeros(3000, 1000))

    def forward(self, x):
        self.book += 1 + dist.get_rank()
        return self.net(x.flatten(1))


@on_learners(2)
def test_a_large_buffer_that_differs_after_the_first_forward_pass():
    torch.manual_seed(0)
    model = Codebook()
    _, optimizer, local = start(model, every=1, mode="off")
    train(model, 1, optimizer)
    assert local.rounds == 1 and (model.book == 1.5).all()


class Cached(nn.Module):
    """A table that is loaded with the weights, one that is made anew when it must be longer, and one that grows by mistake."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 10)
        self.register_buffer("table", torch.rand(64, 64))
        self.register_buffer("cache", torch.zeros(2, 2), persistent=False)
        self.register_buffer("grows", torch.zeros(2, 2))

    def forward(self, x):
        self.cache = torch.zeros(self.cache.shape[0] + 1, 2)
        return self.net(x.flatten(1) @ self.table)


@on_learners(2)
def test_buffers_that_are_loaded_after_the_start():
    """Learners that begin with other tables, and then load the same, have it from the first round on."""
    torch.manual_seed(dist.get_rank())
    model = Cached()
    _, optimizer, local = start(model)
    torch.manual_seed(5)
    model.load_state_dict(Cached().state_dict())
    if dist.get_rank() == 0:
        # Reading changes nothing.
        local.state_dict()
    table = model.table.clone()
    train(model, 4, optimizer)
    assert local.rounds == 1 and torch.equal(model.table, table)
    assert_replicas(model)
    assert "cache" not in local.stats()["layers"]
    model.grows = torch.zeros(3, 2)
    with pytest.raises(RuntimeError, match="6 elements now and had 4"):
        train(model, 4, optimizer)


@on_learners(2)
def test_statistics_that_are_loaded_survive_a_first_round_that_is_dropped():
    """The first forward pass has changed them, on each learner to something else."""
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    _, optimizer, local = start(model, every=2)
    model.load_state_dict({**model.state_dict(), "1.running_mean": torch.full((64,), 5.0)})
    train(model, 1, optimizer)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[2].weight.fill_(torch.nan)
    train(model, 1, optimizer, start=1)
    assert local.stats()["steps"]["dropped"] == 1
    # The momentum of statistics is 0.1, and samples have a mean near 0.
    assert (model[1].running_mean - 4.5).abs().max() < 0.2
    assert_same(model[1].running_mean.tolist())


@on_learners(2)
def test_parameters_that_are_trained_later_are_told():
    model = net()
    model.fc2.bias.requires_grad_(False)
    _, optimizer, _ = start(model)
    model.fc2.bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match="frozen, or not there, when LocalSteps was made"):
        train(model, 4, optimizer)


@on_learners(2)
def test_what_accelerate_prepares():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = net()
    prepared = accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), 0.05))
    local = LocalSteps(model, prepared, 4, timeout=30)
    train(model, 4, prepared)
    assert local.rounds == 1
    assert_replicas(model)


@on_learners(2)
def test_bf16_weights():
    model = net().bfloat16()
    model, optimizer, local = start(model, optimizer=torch.optim.SGD(model.parameters(), 0.05))
    for step in range(8):
        images, labels = batch(step)
        optimizer.zero_grad()
        cross_entropy(model(images.bfloat16()).float(), labels).backward()
        optimizer.step()
    assert_replicas(model)
    assert local.rounds == 2 and own_state(local)["shared.fc1.weight"].dtype == torch.float32
    # Against a dense all-reduce of two bytes an element, in each of four steps.
    stats, elements = local.stats(), sum(parameter.numel() for parameter in model.parameters())
    assert stats["compression_ratio"] == pytest.approx(2 * 4 * 2 * elements / stats["bytes_sent"])


@pytest.mark.parametrize("mode", ["on", "off"])
@pytest.mark.parametrize("delay", [0, 2])
@on_learners(2)
def test_a_nan_on_one_learner_drops_the_round_on_all(mode, delay):
    model, optimizer, local = start(mode=mode, delay=delay)
    train(model, 4 + delay, optimizer)
    shared = [values.clone() for name, values in own_state(local).items() if name.startswith("shared.")]
    kept = consolidated(local)
    train(model, 2 - delay, optimizer, start=4 + delay)
    with logged() as lines:
        if dist.get_rank() == 1:
            hook = model.fc1.weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), torch.nan))
        train(model, 1, optimizer, start=6)
        if dist.get_rank() == 1:
            hook.remove()
            assert weights(model).isnan().any()
        train(model, 1 + delay, optimizer, start=7)
    # All are back at the shared weights, which are what they were.
    assert torch.equal(weights(model), torch.cat([values.flatten() for values in shared]))
    assert any("drop the round" in line for line in lines), lines
    stats = local.stats()
    assert stats["steps"]["dropped"] == 1 and stats["rounds"] == 2
    # What the other had changed waits.
    if mode == "on":
        assert not torch.equal(consolidated(local)["residual.fc1.weight"], kept["residual.fc1.weight"])
    assert all(values.isfinite().all() for values in consolidated(local).values())
    # And training goes on: the optimiser has forgotten what was not finite.
    train(model, 8 - delay, optimizer, start=8 + delay)
    local.end_round()
    assert weights(model).isfinite().all() and local.stats()["steps"]["dropped"] == 1
    assert_replicas(model)


@on_learners(2)
def test_a_nan_leaves_all_fragments():
    model, optimizer, local = start(every=6, fragments=3)
    train(model, 6, optimizer)
    if dist.get_rank() == 1:
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
    train(model, 12, optimizer, start=6)
    local.end_round()
    assert weights(model).isfinite().all() and local.stats()["steps"]["dropped"] == 1
    assert_replicas(model)


@pytest.mark.parametrize("delay", [0, 2])
@on_learners(2)
def test_the_end_of_a_round_that_is_over_changes_nothing(delay):
    model, optimizer, local = start(delay=delay, outer=Outer(0.7, 0.9))
    train(model, 8, optimizer)
    kept = {name: values.clone() for name, values in own_state(local).items()}
    local.end_round()
    assert local.rounds == 2 and local.stats()["steps"]["compressed"] == 2
    for name, values in own_state(local).items():
        assert name.startswith("local.") or torch.equal(values, kept[name]), name
    shared = torch.cat([kept[f"shared.{name}"].flatten() for name, _ in model.named_parameters()])
    assert torch.equal(weights(model), shared)
    assert_replicas(model)


@on_learners(2)
def test_frame_ratios_are_of_what_is_exchanged():
    ratios = []
    for fragments in (1, 3):
        model, optimizer, local = start(every=6, fragments=fragments)
        train(model, 18, optimizer)
        ratios.append(local.stats()["frame_ratio"])
    assert 0.7 < ratios[1] / ratios[0] < 1.4, ratios


@on_learners(2)
def test_distributed_checkpoints_in_the_middle_of_an_exchange(tmp_path):
    model, optimizer, local = start(every=6, delay=3)
    train(model, 8, optimizer)
    dcp.save({"local": local}, checkpoint_id=tmp_path)
    other, other_optimizer, resumed = start(net(seed=5), every=6, delay=3)
    dcp.load({"local": resumed}, checkpoint_id=tmp_path)
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one in ((model, 4, optimizer), (other, 4, other_optimizer)):
        train(*one, start=8)
    assert torch.equal(weights(model), weights(other)) and local.rounds == resumed.rounds == 2


def inside_ddp(every, steps, **options):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "place"))
    ddp = DistributedDataParallel(net(), process_group=mesh.get_group("place"))
    optimizer = torch.optim.Adam(ddp.parameters(), 1e-3)
    local = LocalSteps(ddp, optimizer, every, learners=mesh["site"], **{**FAST, **options})
    site, place = divmod(dist.get_rank(), 2)
    for step in range(steps):
        images, labels = batch(step, 8, site)
        optimizer.zero_grad()
        cross_entropy(ddp(images[place::2]), labels[place::2]).backward()
        optimizer.step()
    return ddp, optimizer, local


@pytest.mark.parametrize("options", [{}, {"mode": "off"}, {"delay": 2}, {"fragments": 2}, {"strategy": "reduce"}], ids=str)
@on_learners(4)
def test_ddp_inside_of_a_site(options):
    ddp, _, local = inside_ddp(4, 12, **options)
    # Before the end of a round places of a site are the same; after it all are.
    local.end_round()
    assert_replicas(ddp)
    stats = local.stats()
    assert stats["learners"] == 2
    assert "2 learners of 2 processes each" in str(local)
    if options.get("mode") != "off":
        # Each process keeps its part of the residuals.
        elements = sum(values.numel() for name, values in own_state(local).items() if name.startswith("residual."))
        assert elements < 0.6 * weights(ddp).numel()
    # Every process is a site: all places of the two have saved all of the shared weights.
    states = [None] * 4
    dist.all_gather_object(states, local.state_dict())
    model, _, alone = start(net(seed=5), **options)
    alone.load_state_dict(states)
    assert torch.equal(weights(model), weights(ddp))


@on_learners(4)
def test_statistics_of_the_processes_of_a_site_stay_the_same():
    """Each place of a site begins the first round with statistics of its own samples."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "place"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    ddp = DistributedDataParallel(model, process_group=mesh.get_group("place"))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    LocalSteps(ddp, optimizer, 2, learners=mesh["site"], **FAST)
    for step in range(4):
        images, labels = batch(step, 8)
        cross_entropy(ddp(images * (1 + dist.get_rank())), labels).backward()
        optimizer.step()
    assert_same(model[1].running_var.tolist())


@on_learners(4)
def test_a_site_is_one_learner_with_all_of_its_samples():
    ddp, _, _ = inside_ddp(4, 8, strategy="gather")
    expected = simulate(2, 4, 2, Outer(), size=8)
    # Gradients of two halves are summed in another order.
    difference = (weights(ddp) - expected).abs()
    assert difference.median() < 1e-6 and difference.max() < 5e-3, difference.max()


@on_learners(4)
def test_what_fsdp_does_not_shard_is_looked_at_too():
    def partly(seed):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "place"))
        model = net()
        model.fc2.requires_grad_(False)
        with torch.no_grad():
            model.fc2.weight.fill_(seed)
        for module in (model.conv1, model.norm, model.conv2, model.fc1):
            fully_shard(module, mesh=mesh["place"])
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        LocalSteps(model, optimizer, 4, learners=mesh["site"], **FAST)
        return model, optimizer

    model, optimizer = partly(seed=1)
    train(model, 2, optimizer)
    model.fc2.requires_grad_(True)
    with pytest.raises(RuntimeError, match="frozen, or not there, when LocalSteps was made"):
        train(model, 2, optimizer)
    model, optimizer = partly(seed=dist.get_rank() // 2)
    with pytest.raises(RuntimeError, match="start from the same weights"):
        train(model, 1, optimizer)


def inside_fsdp(every, steps, mesh=None, saved=None, **options):
    mesh = mesh or init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "place"))
    model = net()
    for module in (model.conv2, model.fc1):
        fully_shard(module, mesh=mesh["place"])
    fully_shard(model, mesh=mesh["place"])
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    local = LocalSteps(model, optimizer, every, learners=mesh["site"], **{**FAST, **options})
    if saved:
        with torch.no_grad():
            # What this gathers must not be used after that.
            model(batch(0)[0])
        local.load_state_dict(saved)
    site, place = divmod(dist.get_rank(), 2)
    for step in range(steps):
        images, labels = batch(step, 8, site)
        optimizer.zero_grad()
        cross_entropy(model(images[place::2]), labels[place::2]).backward()
        optimizer.step()
    return model, local


@pytest.mark.parametrize("options", [{}, {"mode": "off"}, {"delay": 2}, {"fragments": 2}], ids=str)
@on_learners(4)
def test_fsdp_inside_of_a_site(options):
    model, local = inside_fsdp(4, 12, **options)
    images, _ = batch(0, learner=0)
    with torch.no_grad():
        # Leaves weights gathered, which must not be used after the round.
        model(images)
        local.end_round()
        assert_same(model(images).tolist())
        model.reshard()
    values = weights(model)
    assert all(torch.equal(values, other) for other in everywhere(values))
    assert local.stats()["learners"] == 2
    if options == {"mode": "off"}:
        ddp, _, other = inside_ddp(4, 12, **options)
        other.end_round()
        assert (weights(ddp) - values).abs().max() < 1e-4
    # Each process keeps its shard of the shared weights.
    elements = sum(values.numel() for name, values in own_state(local).items() if name.startswith("shared."))
    assert elements < 0.6 * values.numel()
    # One copy for all, and a list of all processes' own.
    state = local.state_dict(consolidate=True)
    assert torch.equal(torch.cat([state[f"shared.{name}"].flatten() for name, _ in model.named_parameters()]), values)
    states = [None] * 4
    dist.all_gather_object(states, local.state_dict())
    # Within a round fragments have weights of their own, which the model's state has.
    with torch.no_grad():
        expected = model(images)
    for saved in (state, states) if options != {"fragments": 2} else (state,):
        model, other = inside_fsdp(4, 0, saved=saved, **options)
        with torch.no_grad():
            assert torch.equal(model(images), expected)
        model.reshard()
        assert torch.equal(weights(model), values)
        # And by DDP.
        ddp, _, other = inside_ddp(4, 0, **options)
        other.load_state_dict(saved)
        assert torch.equal(weights(ddp), values)


def until_killed(delay):
    model, optimizer, local = start(every=3, delay=delay, timeout=4)
    try:
        for step in range(1000):
            if (step, dist.get_rank()) == (8, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, 1, optimizer, start=step)
    except RuntimeError as error:
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="AdaComp"):
            train(model, 1, optimizer)
        assert time.monotonic() - begin < 1
        return str(error), local.rounds
    raise AssertionError("nobody was killed")


@pytest.mark.parametrize("delay", [0, 2])
def test_a_killed_learner_ends_the_others(delay):
    with Learners(4) as four:
        four.start(until_killed, delay)
        begin = time.monotonic()
        told = [four.result(learner, timeout=60) for learner in (0, 1, 3)]
        assert time.monotonic() - begin < 40
    assert all("AdaComp" in error for error, _ in told), told
    # With the exchange under way, the round counts as begun.
    assert {rounds for _, rounds in told} == {2 if delay == 0 else 3}, told


def never_comes():
    model, optimizer, local = start(every=2, timeout=2)
    train(model, 2, optimizer)
    if dist.get_rank() == 0:
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="0:00:02"):
            train(model, 2, optimizer, start=2)
        assert 1.5 < time.monotonic() - begin < 4.5
    dist.barrier()


def test_a_learner_that_does_not_come_ends_the_wait():
    with Learners(2) as two:
        two.run(never_comes)


def told_apart(options, told):
    with pytest.raises((RuntimeError, ValueError), match=told):
        model = net(seed=dist.get_rank()) if options is None else net()
        model, optimizer, _ = start(model, **(options or {}) if dist.get_rank() else {})
        train(model, 1, optimizer)


@pytest.mark.parametrize(
    "options, told",
    [
        (None, "start from the same weights"),
        ({"every": 5}, "was attached with every="),
        ({"outer": Outer(0.5)}, "was attached with outer="),
        ({"delay": 1}, "was attached with delay="),
        ({"mode": "off"}, "was attached with mode="),
        ({"matrix": 100}, "does not fit"),
    ],
    ids=str,
)
def test_learners_that_were_started_differently_are_told(options, told):
    with Learners(2) as two:
        two.run(told_apart, options, told)


@on_learners(2)
def test_bad_input_is_refused():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    double = net().double()
    for arguments, options, told in (
        ((model, optimizer, 0), {}, "every 0"),
        ((model, optimizer, 4), {"delay": 5}, "delay 5"),
        ((model, optimizer, 4), {"delay": 3, "fragments": 2}, "every // fragments"),
        ((model, optimizer, 4), {"fragments": 5}, "no more fragments"),
        ((model, optimizer, 4), {"decay": 1.5}, "decay 1.5"),
        ((model, optimizer, 4), {"scaler": None}, "scaler is not an option"),
        ((model, optimizer, 4), {"mode": "sometimes"}, "mode 'sometimes'"),
        ((net(), optimizer, 4), {}, "no parameter of the model"),
        ((double, torch.optim.SGD(double.parameters(), 0.1), 4), {}, "float64"),
        ((DistributedDataParallel(model), optimizer, 4), {}, "say who the learners are"),
        ((DistributedDataParallel(model), optimizer, 4), {"learners": dist.group.WORLD}, "averages between learners itself"),
        ((len, optimizer, 4), {}, "takes a torch.nn.Module"),
    ):
        with pytest.raises((TypeError, ValueError), match=told):
            LocalSteps(*arguments, **options)
    for rate, momentum in ((0, 0), (1, 1)):
        with pytest.raises(ValueError):
            Outer(rate, momentum)


@on_learners(2)
def test_a_state_that_does_not_fit_changes_nothing():
    model, optimizer, local = start()
    train(model, 6, optimizer)
    saved = {key: values for key, values in local.state_dict().items() if not key.endswith("shared.fc2.bias")}
    train(model, 4, optimizer)
    before = {key: values.clone() for key, values in local.state_dict().items()}
    with pytest.raises(ValueError, match="fc2.bias.* is missing"):
        local.load_state_dict(saved)
    after = local.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(values, after[key]) for key, values in before.items())


@on_learners(2)
def test_layers_are_those_of_the_last_compressed_round():
    model, optimizer, local = start()
    train(model, 8, optimizer)
    before = local.stats()["layers"]
    local.mode = "off"
    # Dense rounds are flushes, each of them.
    train(model, 12, optimizer)
    assert before == local.stats()["layers"]


@on_learners(2)
def test_options_reports_and_close():
    fields = adacomp.torch.Config.__annotations__
    options = adacomp.torch.config.CommonOptions.__annotations__
    assert all(options[name] == fields[name] for name in options)
    assert fields.keys() - options.keys() == {"scaler", "local_adam", "optimizer", "node_size"}
    with logged() as lines:
        model, optimizer, local = start(names={"fc2.*": "dense"})
    assert (dist.get_rank() == 0) == any("AdaComp is attached" in line and "a round every 4 steps" in line for line in lines)
    written = []

    class Writer:
        def log(self, numbers, step):
            written.append((step, numbers))

    local.log_to(Writer(), every=2)
    train(model, 16, optimizer)
    assert [step for step, _ in written] == [2, 4] and "adacomp/compression_ratio" in written[0][1]
    assert local.scalars()["adacomp/compression_ratio"] > 10 and local.config.names == {"fc2.*": "dense"}
    assert "local steps, mode on: compresses with" in str(local) and "Outer(rate=1.0, momentum=0.0)" in str(local)
    local.close()
    # Alone.
    train(model, 8, optimizer)
    other = copy.deepcopy(model)
    assert torch.equal(weights(other), weights(model))
