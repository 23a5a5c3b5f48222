"""The automatic mode runs what is faster, and all learners agree on it."""

import random
import time

import pytest
import torch.distributed as dist
from learners import on_learners
from training import (
    assert_conserved,
    assert_replicas,
    assert_same,
    attach,
    logged,
    make,
    residual_mean,
    submit,
    train,
)

from adacomp.torch import auto, ddp, runtime
from adacomp.torch.auto import Auto


class World:
    """Steps of given durations."""

    def __init__(self, compressed, dense, others=None):
        self.seconds = {True: compressed, False: dense}
        self.now, self.ran = 0.0, []
        self.others = others
        self.auto = Auto(self.agree)

    def run(self, steps):
        for _ in range(steps):
            compress = self.auto.begin(self.now)
            self.ran.append(compress)
            self.now += self.step(compress)
        return self.auto._chosen

    def step(self, compress):
        return self.seconds[compress]

    def agree(self, numbers):
        """As if another learner took its own times for compressed and dense steps."""
        if self.others is None:
            return list(numbers)
        compressed = len(self.auto._times[True])
        return [max(number, self.others[at >= compressed]) for at, number in enumerate(numbers)]


def test_the_faster_one_runs():
    assert World(0.1, 0.2).run(50) is True
    assert World(0.2, 0.1).run(50) is False
    # A gain that does not matter does not choose compression.
    world = World(0.0995, 0.1)
    assert world.run(100) is False and world.auto.reason.startswith("no clear difference: ")


def test_the_first_steps_do_not_count():
    world = World(0.1, 0.2)
    world.seconds[True] = 5.0
    world.run(auto.WARM_UP)
    world.seconds[True] = 0.1
    assert world.run(50) is True


def test_the_slowest_learner_counts():
    assert World(0.1, 0.2, others=[0.3, 0.2]).run(50) is False
    assert World(0.2, 0.1, others=[0.2, 0.9]).run(50) is True


def test_a_hopeless_trial_ends_early():
    world = World(0.1, 0.4)
    world.run(50)
    assert world.ran.count(False) == auto.CHANGE + 2
    # One step is enough if it takes as long as that.
    world = World(0.01, 100.0)
    world.run(50)
    assert world.ran.count(False) == 1
    assert world.ran[-1] and world.auto.reason.endswith("10 ms and a dense one 1e+05 ms on the slowest learner")
    # A hiccup of the loop does not last as long.
    world = World(0.01, 1.0)
    world.run(50)
    assert world.ran.count(False) == auto.CHANGE + 2


def test_trials_come_again_soon_and_take_little():
    world = World(0.01, 0.011)
    world.run(200)
    turns = auto.FEWEST * (auto.CHANGE + auto.TURN)
    assert world.ran.count(False) == 2 * turns, "there was no second look"
    world = World(0.01, 0.5)
    world.run(10_000)
    start, steps = world.now, len(world.ran)
    world.run(100_000)
    dense = world.ran[steps:].count(False)
    assert dense >= 2 and dense * 0.5 < 1.2 * auto.LATE * (world.now - start)


class NoisyWorld(World):
    """A machine that others use, too: steps vary by 15%, one in twenty is much longer, and now and then all take twice as long
    for a while."""

    def __init__(self, ratio, seed):
        self.random, self.busy = random.Random(seed), 0.0
        super().__init__(ratio, 1.0)

    def step(self, compress):
        draw = self.random
        self.busy -= 1
        if self.busy <= 0 and draw.random() < 1 / 150:
            self.busy = draw.expovariate(1 / 15)
        long = draw.expovariate(0.5) if draw.random() < 0.05 else 0.0
        return self.seconds[compress] * draw.lognormvariate(0, 0.15) * (2 if self.busy > 0 else 1) + long


@pytest.mark.parametrize(
    "ratio, least, most",
    [(0.5, 0.99, 1), (0.8, 0.95, 1), (1.0, 0, 0.06), (1.1, 0, 0.03), (1.25, 0, 0.02), (2.0, 0, 0.01)],
)
def test_decisions_hold_up_on_a_noisy_machine(ratio, least, most):
    """Of 200 runs nearly all decide alike, and right: what makes no difference is not chosen."""
    decisions = [NoisyWorld(ratio, seed).run(700) for seed in range(200)]
    assert least <= sum(decisions) / len(decisions) <= most


def test_it_changes_with_the_network():
    world = World(0.1, 0.2)
    assert world.run(50) is True
    world.seconds = {True: 0.1, False: 0.05}
    assert world.run(2000) is False
    world.seconds = {True: 0.1, False: 0.3}
    assert world.run(2000) is True
    assert "dense one" in world.auto.reason


@pytest.mark.parametrize("slow", ["compressed", "dense"])
@on_learners(2)
def test_learners_agree_on_the_faster_way(slow):
    """Real learners, one way of which is made slow."""
    model = make()
    hook = attach(model, mode="auto")

    def slowly(function):
        def call(*arguments):
            time.sleep(0.03)
            return function(*arguments)

        return call

    place, name = (runtime.Compressed, "submit") if slow == "compressed" else (ddp, "plain")
    with pytest.MonkeyPatch.context() as patch, logged() as lines:
        patch.setattr(place, name, slowly(getattr(place, name)))
        train(model, 40)
    assert_replicas(model)
    stats = hook.stats()
    assert str(hook).count("\n") >= 4
    assert stats["compressing"] == (slow == "dense"), stats["why"]
    assert stats["steps"]["compressed"] > 5 and stats["steps"]["dense"] >= 1
    assert_same([stats["compressing"], stats["steps"], stats["why"]])
    # One learner logs each decision, with what compression is worth.
    assert len(lines) == (1 if dist.get_rank() == 0 else 0)
    assert all("  why: a compressed step takes" in line and "compression ratio" in line for line in lines)


@on_learners(1)
def test_one_learner_has_nothing_to_exchange():
    model = make()
    hook = attach(model, mode="auto")
    train(model, 5)
    assert not hook.stats()["compressing"] and "one learner" in hook.stats()["why"]


@on_learners(1)
def test_one_learner_can_compress():
    model = make()
    hook = attach(model, mode="on")
    train(model, 5)
    stats = hook.stats()
    assert (stats["steps"]["compressed"], stats["compression_ratio"], stats["learners"]) == (5, None, 1)


@on_learners(2)
def test_the_mode_can_be_set_while_training():
    """Going dense sends the residuals in one step; going on again, and back to auto, works as at the start."""
    model = make()
    hook = attach(model, mode="on")
    given, received = 0, 0
    for mode, steps in (("on", 4), ("off", 3), ("on", 4), ("off", 2)):
        hook.mode = mode
        assert hook.mode == mode and hook.config.mode == mode
        more_given, more_received = submit(model, steps)
        given, received = given + more_given, received + more_received
        assert bool(residual_mean(model, hook).any()) == (mode == "on")
        assert (hook.stats()["compressing"], hook.stats()["why"]) == (mode == "on", f'mode="{mode}"')
    assert_conserved(model, hook, given, received)
    assert hook.stats()["steps"] == {"compressed": 8, "dense": 5, "dropped": 0}
    hook.mode = "auto"
    train(model, auto.WARM_UP + 1)
    assert hook.stats()["why"] == "trying both ways" and hook.stats()["steps"]["compressed"] == 8 + auto.WARM_UP + 1
    with pytest.raises(ValueError, match="mode 'sometimes'; expected auto, on or off"):
        hook.mode = "sometimes"
    assert hook.mode == "auto"
