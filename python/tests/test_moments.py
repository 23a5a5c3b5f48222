"""Adam before compression."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from training import assert_replicas, attach, batch, make, train, weights

import adacomp.torch
from adacomp.torch import LocalAdam

RATE = 0.003


def follower(model):
    return torch.optim.SGD(model.parameters(), RATE)


def alone(betas, eps):
    """One learner's Adam is PyTorch's; the largest difference of weights."""
    usual = make()
    train(usual, 20, torch.optim.Adam(usual.parameters(), RATE, betas, eps))
    model = make()
    attach(model, mode="off", local_adam=LocalAdam(betas, eps))
    train(model, 20, follower(model))
    return float((weights(usual) - weights(model)).abs().max())


@pytest.mark.parametrize(("betas", "eps"), [((0.9, 0.999), 1e-8), ((0.8, 0.95), 1e-4)])
def test_one_learner_alone_has_pytorchs_adam(learners, betas, eps):
    assert learners(1).run(alone, betas, eps)[0] < 1e-5


def averaged():
    """Without compression all follow the mean of what each learner's own Adam would do in the first step."""
    model = make()
    before = weights(model)
    attach(model, mode="off", local_adam=LocalAdam())
    train(model, 1, follower(model))
    assert_replicas(model)
    steps = []
    for learner in range(dist.get_world_size()):
        own = make()
        images, labels = batch(0, learner=learner)
        cross_entropy(own.module(images), labels).backward()
        torch.optim.Adam(own.parameters(), RATE).step()
        steps.append(weights(own) - before)
    assert (weights(model) - before - sum(steps) / len(steps)).abs().max() < 1e-6


def test_without_compression_all_follow_the_mean(learners):
    learners(2).run(averaged)


def resumed(strategy, buckets):
    """Going on from what was saved, with other buckets, gives the same bits."""
    model = make()
    hook = attach(model, strategy=strategy, local_adam=LocalAdam())
    train(model, 6, follower(model))
    state, module = hook.state_dict(), {name: values.clone() for name, values in model.module.state_dict().items()}
    expected = train(model, 6, follower(model), start=6)
    assert_replicas(model)

    again = make(seed=99, bucket_cap_mb=buckets)
    again.module.load_state_dict(module)
    hook = attach(again, strategy=strategy, local_adam=LocalAdam())
    hook.load_state_dict(state)
    assert torch.equal(train(again, 6, follower(again), start=6), expected)
    # One copy for all has the mean.
    whole = hook.state_dict(consolidate=True)
    assert whole["adam.steps"] == 12 and whole["adam.second.fc1.weight"].shape == model.module.fc1.weight.shape
    hook.load_state_dict(whole)
    train(again, 2, follower(again), start=12)
    assert_replicas(again)


@pytest.mark.parametrize("strategy", ["gather", "sharded"])
def test_resume_gives_the_same_bits(learners, strategy):
    learners(2).run(resumed, strategy, 25)


def poisoned():
    """A gradient that is not finite leaves both moments as they were, and all learners go on."""
    model = make()
    hook = attach(model, local_adam=LocalAdam())
    optimizer = follower(model)
    train(model, 3, optimizer)
    before = weights(model)
    images, labels = batch(3)
    if dist.get_rank() == 1:
        images = images * torch.nan
    optimizer.zero_grad()
    cross_entropy(model(images), labels).backward()
    assert all(bool(parameter.grad.isnan().all()) for parameter in model.parameters())
    assert all(bool(values.isfinite().all()) for values in hook.state_dict().values())
    train(model, 3, optimizer, start=4)
    assert_replicas(model)
    assert bool(weights(model).isfinite().all()) and not torch.equal(weights(model), before)


def test_a_bad_gradient_does_not_poison_moments(learners):
    learners(2).run(poisoned)


def mismatched():
    own = LocalAdam() if dist.get_rank() else None
    with pytest.raises(ValueError, match="learner . was attached with local_adam="):
        attach(make(), local_adam=own)


def test_learners_must_agree(learners):
    learners(2).run(mismatched)


def without():
    model = make()
    hook = attach(model, local_adam=LocalAdam())
    train(model, 2, follower(model))
    state = hook.state_dict()
    with pytest.raises(ValueError, match="attach with local_adam"):
        attach(make()).load_state_dict(state)


def test_moments_are_not_left_behind(learners):
    learners(2).run(without)


def test_bad_options():
    with pytest.raises(ValueError, match="betas"):
        LocalAdam(betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="eps"):
        LocalAdam(eps=0.0)
    with pytest.raises(TypeError, match="LocalAdam"):
        adacomp.torch.Hook(local_adam=True)
    with pytest.raises(ValueError, match="GradScaler"):
        adacomp.torch.Hook(local_adam=LocalAdam(), scaler=torch.amp.GradScaler("cpu"))
