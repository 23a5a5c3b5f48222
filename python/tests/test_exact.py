"""The same weights as DDP when off, the same bits on all learners always, and nothing lost."""

import pytest
import torch
from learners import on_learners
from training import PATHS, STRATEGIES, assert_conserved, assert_replicas, attach, make, submit, train


@on_learners(2, 4)
def test_off_is_plain_ddp():
    builtin = train(make(), 20)
    model = make()
    hook = attach(model, mode="off")
    assert (train(model, 20) - builtin).abs().max().item() <= 1e-6
    assert_replicas(model)
    assert hook.stats()["steps"] == {"compressed": 0, "dense": 20, "dropped": 0}


def replicas(mode, strategy, codec):
    model = make()
    hook = attach(model, mode=mode, strategy=strategy, codec=codec)
    train(model, 25)
    assert_replicas(model)
    stats = hook.stats()
    assert stats["steps"]["compressed"] + stats["steps"]["dense"] == 25
    assert mode == "auto" or stats["steps"]["compressed"] == 25
    assert stats["frame_ratio"] > 3
    return stats


@pytest.mark.parametrize("mode", ["on", "auto"])
@STRATEGIES
@on_learners(2, 4)
def test_replicas_are_the_same_bits(strategy, mode):
    replicas(mode, strategy, "rice")


@on_learners(2)
def test_the_codec_of_the_paper():
    rice, paper = (replicas("on", "gather", codec) for codec in ("rice", "paper"))
    assert rice["bytes_sent"] < paper["bytes_sent"]
    assert rice["layers"]["fc1.weight"]["selected"] == paper["layers"]["fc1.weight"]["selected"]


@PATHS
@STRATEGIES
@pytest.mark.parametrize("dense_steps", [(), (10, 11, 12, 30, 49)], ids=["compressed", "now and then dense"])
@on_learners(4)
def test_nothing_is_lost(strategy, in_place, dense_steps):
    """All that was given in 50 steps was received, or is kept."""
    model = make()
    hook = attach(model, in_place, strategy=strategy)

    def go_dense_now_and_then(step):
        """As in the automatic mode."""
        hook.mode = "off" if step in dense_steps else "on"

    given, received = submit(model, 50, go_dense_now_and_then)
    assert received.abs().max() > 0.1
    assert_conserved(model, hook, given, received)


@STRATEGIES
@on_learners(2)
def test_torch_operations_give_the_same_bits(strategy):
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
