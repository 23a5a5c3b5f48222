"""The automatic mode runs what is faster, and all learners agree on it."""

import time

import pytest
import torch
import torch.distributed as dist
from training import assert_replicas, attach, make, train

from adacomp.torch import auto
from adacomp.torch.auto import Auto


class World:
    """Steps of given durations."""

    def __init__(self, compressed, dense, others=None):
        self.seconds = {True: compressed, False: dense}
        self.now, self.ran = 0.0, []
        self.auto = Auto(lambda numbers: [max(pair) for pair in zip(numbers, others or numbers)])

    def run(self, steps):
        for _ in range(steps):
            compress = self.auto.begin(self.now)
            self.ran.append(compress)
            self.now += self.seconds[compress]
        return self.ran[-1]


def test_the_faster_one_runs():
    assert World(0.1, 0.2).run(50) is True
    assert World(0.2, 0.1).run(50) is False
    # Noise does not choose compression.
    assert World(0.0995, 0.1).run(50) is False


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
    world = World(0.1, 0.3)
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


def test_trials_come_again_and_take_little():
    world = World(0.01, 0.5)
    world.run(60_000)
    dense = world.ran.count(False)
    assert dense >= 2, "there was no second trial"
    first = auto.WARM_UP + auto.SAMPLE + auto.CHANGE + auto.SAMPLE
    later = sum(not compress for compress in world.ran[first + 1 :])
    assert later * 0.5 < 1.5 * auto.TRIALS * world.now


def test_it_changes_with_the_network():
    world = World(0.1, 0.2)
    assert world.run(50) is True
    world.seconds = {True: 0.1, False: 0.05}
    assert world.run(10 * auto.INTERVAL) is False
    world.seconds = {True: 0.1, False: 0.3}
    assert world.run(10 * auto.INTERVAL) is True
    assert "dense one" in world.auto.reason


def slow_way(slow):
    """Real learners, one way of which is made slow."""
    from adacomp.torch import steps

    model = make()
    hook = attach(model, mode="auto")
    kind = {"compressed": steps.Compressed, "dense": None}[slow]
    plain, give = steps.plain, steps.Compressed.give
    import adacomp.torch.engine as engine

    def slowly(function):
        def call(*arguments):
            time.sleep(0.03)
            return function(*arguments)

        return call

    if kind:
        steps.Compressed.give = slowly(give)
    else:
        engine.plain = slowly(plain)
    try:
        train(model, 40)
    finally:
        steps.Compressed.give, engine.plain = give, plain
    assert_replicas(model)
    stats = hook.stats()
    assert str(hook).count("\n") >= 4
    return stats["compressing"], stats["steps"], stats["why"]


@pytest.mark.parametrize("slow", ["compressed", "dense"])
def test_learners_agree_on_the_faster_way(learners, slow):
    results = learners(2).run(slow_way, slow)
    for compressing, steps, why in results:
        assert compressing == (slow == "dense"), why
        assert steps["compressed"] > 5 and steps["dense"] >= 1
    assert results[0] == results[1]


def alone():
    model = make()
    hook = attach(model, mode="auto")
    train(model, 5)
    return hook.stats()["compressing"], hook.stats()["why"]


def test_one_learner_has_nothing_to_exchange(learners):
    [(compressing, why)] = learners(1).run(alone)
    assert not compressing and "one learner" in why


def alone_but_on():
    model = make()
    hook = attach(model, mode="on")
    train(model, 5)
    return hook.stats()["steps"]["compressed"], hook.stats()["rate"], dist.get_world_size(), torch.get_num_threads()


def test_one_learner_can_compress(learners):
    [(steps, rate, count, _)] = learners(1).run(alone_but_on)
    assert (steps, rate, count) == (5, None, 1)
