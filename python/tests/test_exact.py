"""The same weights as DDP when off, the same bits on all learners always, and nothing lost."""

import pytest
import torch
from training import PATHS, STRATEGIES, assert_conserved, assert_replicas, attach, give, make, train


def off():
    builtin = train(make(), 20)
    model = make()
    hook = attach(model, mode="off")
    difference = (train(model, 20) - builtin).abs().max().item()
    assert_replicas(model)
    assert hook.stats()["steps"] == {"compressed": 0, "dense": 20, "dropped": 0}
    return difference


@pytest.mark.parametrize("count", [2, 4])
def test_off_is_plain_ddp(learners, count):
    assert max(learners(count).run(off)) <= 1e-6


def replicas(mode, strategy, codec):
    model = make()
    hook = attach(model, mode=mode, strategy=strategy, codec=codec)
    train(model, 25)
    assert_replicas(model)
    stats = hook.stats()
    assert stats["steps"]["compressed"] + stats["steps"]["dense"] == 25
    return stats


@pytest.mark.parametrize("mode", ["on", "auto"])
@STRATEGIES
@pytest.mark.parametrize("count", [2, 4])
def test_replicas_are_the_same_bits(learners, count, strategy, mode):
    for stats in learners(count).run(replicas, mode, strategy, "rice"):
        assert mode == "auto" or stats["steps"]["compressed"] == 25
        assert stats["rate"] > 3


def test_the_codec_of_the_paper(learners):
    rice, paper = (learners(2).run(replicas, "on", "gather", codec)[0] for codec in ("rice", "paper"))
    assert rice["bytes_sent"] < paper["bytes_sent"]
    assert rice["layers"]["fc1.weight"]["selected"] == paper["layers"]["fc1.weight"]["selected"]


def conservation(strategy, in_place, dense_steps):
    """Everything that was given, and where it is after 50 steps."""
    model = make()
    hook = attach(model, in_place, strategy=strategy)

    def go_dense_now_and_then(step):
        """As in the automatic mode."""
        hook._engine.options["mode"] = "off" if step in dense_steps else "on"

    given, received = give(model, 50, go_dense_now_and_then)
    assert received.abs().max() > 0.1
    assert_conserved(model, hook, given, received)


@PATHS
@STRATEGIES
def test_nothing_is_lost(learners, strategy, in_place):
    for dense_steps in ((), (10, 11, 12, 30, 49)):
        learners(4).run(conservation, strategy, in_place, dense_steps)


def paths(strategy):
    """Weights and residuals with the native kernel and with torch operations."""
    results = []
    for in_place in (True, False):
        model = make()
        hook = attach(model, in_place, strategy=strategy)
        train(model, 15)
        state = hook.state_dict()
        results.append((train(model, 0), state))
    (weights, state), (other_weights, other_state) = results
    assert torch.equal(weights, other_weights)
    assert state.keys() == other_state.keys()
    for name in state:
        assert torch.equal(state[name], other_state[name]), name


@STRATEGIES
def test_torch_operations_give_the_same_bits(learners, strategy):
    learners(2).run(paths, strategy)
