"""Bins that grow in the first steps."""

import pytest
import torch
import torch.distributed as dist
from learners import on_learners
from torch import nn
from training import PATHS, assert_conserved, assert_replicas, attach, make, submit, train, weights

from adacomp.torch import Config, LocalAdam


def test_bins_grow_to_those_that_were_asked_for():
    config = Config(bin_warm_up=80, matrix=800)
    bins = [config.matrix_at(step) for step in range(100)]
    assert bins == sorted(bins) and bins[0] == 50 and bins[79] < 800 and set(bins[80:]) == {800}
    assert len(set(bins)) == 9
    assert Config(bin_warm_up=80, matrix=20).matrix_at(0) == 20
    assert Config().matrix_at(0) == 500


@pytest.mark.parametrize(
    "options", [{"bin_warm_up": -1}, {"bin_warm_up": 9, "strategy": "sharded"}, {"bin_warm_up": 9, "matrix": "dense"}]
)
def test_what_cannot_be_is_refused(options):
    with pytest.raises(ValueError, match="bin_warm_up"):
        Config(**options)


@PATHS
@pytest.mark.parametrize("strategy", ["gather", "reduce"])
@on_learners(2)
def test_residuals_stay_when_bins_grow(in_place, strategy):
    model = make()
    hook = attach(model, in_place, strategy=strategy, bin_warm_up=6)
    seen = []
    given, received = submit(model, 9, lambda step: seen.append(treatment(hook)))
    assert_conserved(model, hook, given, received)
    assert seen[0] == 50 and treatment(hook) == 500 and len(set(seen)) > 4


def treatment(hook):
    return hook.stats()["layers"]["fc1.weight"]["treatment"] if hook.stats()["steps"]["compressed"] else 50


@PATHS
@on_learners(2)
def test_a_resume_within_the_warm_up_gives_the_same_bits(in_place, tmp_path):
    options = {"bin_warm_up": 10, "strategy": "gather", "local_adam": LocalAdam()}
    model = make()
    hook = attach(model, in_place, **options)
    train(model, 5, torch.optim.SGD(model.parameters(), 0.003))
    state, kept = hook.state_dict(), {name: value.clone() for name, value in model.module.state_dict().items()}
    expected = train(model, 8, torch.optim.SGD(model.parameters(), 0.003), start=5)
    again = make(seed=99)
    again.module.load_state_dict(kept)
    attach(again, in_place, **options).load_state_dict(state)
    assert torch.equal(train(again, 8, torch.optim.SGD(again.parameters(), 0.003), start=5), expected)
    assert_replicas(again)
    assert dist.get_world_size() == 2 and torch.equal(weights(again), weights(model))


@on_learners(2)
def test_learners_must_agree():
    with pytest.raises(ValueError, match="was attached with bin_warm_up="):
        attach(make(), bin_warm_up=5 + dist.get_rank())
    # In the first step their bins are the same.
    with pytest.raises(ValueError, match="was attached with matrix="):
        attach(make(), bin_warm_up=5, strategy="gather", matrix=500 + dist.get_rank())


@on_learners(4)
def test_the_strategy_is_chosen_for_the_bins_that_stay():
    def chosen(**options):
        model = make(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 5000, bias=False)))
        return attach(model, strategy="auto", **options).stats()["strategy"]

    assert [chosen(), chosen(bin_warm_up=9), chosen(matrix=50)] == ["gather", "gather", "reduce"]
