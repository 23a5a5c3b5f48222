"""Adam before compression."""

import pytest
import torch
import torch.distributed as dist
from learners import learners, on_learners
from torch.nn.functional import cross_entropy
from training import (
    PATHS,
    STRATEGIES,
    Net,
    assert_replicas,
    attach,
    batch,
    local_gradient,
    make,
    mean_over_learners,
    own_state,
    residual_mean,
    train,
    weights,
)

from adacomp.torch import Config, LocalAdam
from adacomp.torch.moments import Moments, rates_of

RATE = 0.003


def follower(model):
    return torch.optim.SGD(model.parameters(), RATE)


@pytest.mark.parametrize(("betas", "eps"), [((0.9, 0.999), 1e-8), ((0.8, 0.95), 1e-4)])
@on_learners(1)
def test_one_learner_alone_has_pytorchs_adam(betas, eps):
    usual = make()
    train(usual, 20, torch.optim.Adam(usual.parameters(), RATE, betas, eps))
    model = make()
    attach(model, mode="off", local_adam=LocalAdam(betas, eps))
    train(model, 20, follower(model))
    assert (weights(usual) - weights(model)).abs().max() < 1e-5


@on_learners(2)
def test_without_compression_all_follow_the_mean():
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


def saved(folder, in_place, strategy):
    """Trains, saves, and trains on; the weights then."""
    model = make()
    hook = attach(model, in_place, strategy=strategy, local_adam=LocalAdam())
    train(model, 6, follower(model))
    torch.save(hook.state_dict(), f"{folder}/{dist.get_rank()}.pt")
    consolidated = hook.state_dict(consolidate=True)
    if dist.get_rank() == 0:
        torch.save(consolidated, f"{folder}/all.pt")
        torch.save(model.module.state_dict(), f"{folder}/model.pt")
    train(model, 6, follower(model), start=6)
    assert_replicas(model)
    return weights(model)


def resumed(folder, in_place, strategy, files):
    """Goes on with other buckets."""
    model = make(seed=99, bucket_cap_mb=25)
    model.module.load_state_dict(torch.load(f"{folder}/model.pt"))
    hook = attach(model, in_place, strategy=strategy, local_adam=LocalAdam())
    hook.load_state_dict([torch.load(f"{folder}/{file}.pt") for file in files])
    train(model, 6, follower(model), start=6)
    assert_replicas(model)
    return weights(model)


@PATHS
@STRATEGIES
@on_learners(2)
def test_resume_gives_the_same_bits(tmp_path, in_place, strategy):
    expected = saved(tmp_path, in_place, strategy)
    # Whatever order their states are in.
    assert torch.equal(resumed(tmp_path, in_place, strategy, [1, 0]), expected)


def test_another_number_of_learners_has_the_mean(tmp_path):
    learners(2).run(saved, tmp_path, None, "gather")
    ways = [learners(4).run(resumed, tmp_path, None, "gather", files)[0] for files in (["all"], [0, 1])]
    assert torch.allclose(*ways, atol=1e-5)
    own, mean = (torch.load(tmp_path / f"{name}.pt") for name in (0, "all"))
    assert (
        mean["adam.steps.fc1.weight"] == 6
        and own["learner 0 of 2/adam.first.fc1.weight"].shape == mean["adam.first.fc1.weight"].shape
    )


def kept(hook):
    return {name: values for name, values in own_state(hook).items() if name != "adacomp"}


@PATHS
@on_learners(2)
def test_a_bad_gradient_does_not_poison_moments(in_place):
    """One element of one learner's gradient that is not finite: its parameter's moments and residual stay as they were."""
    model = make()
    hook = attach(model, in_place, local_adam=LocalAdam())
    optimizer = follower(model)
    train(model, 3, optimizer)
    before = kept(hook)
    handle = model.module.fc1.weight.register_hook(spoiled)
    images, labels = batch(3)
    optimizer.zero_grad()
    cross_entropy(model(images), labels).backward()
    handle.remove()
    assert all(bool(parameter.grad.isnan().all()) for parameter in model.parameters())
    after = kept(hook)
    assert all(bool(values.isfinite().all()) for values in after.values())
    if dist.get_rank() == 1:
        own = [name for name in after if name.endswith("fc1.weight")]
        assert len(own) == 4 and all(torch.equal(after[name], before[name]) for name in own)
    train(model, 3, optimizer, start=4)
    assert_replicas(model)
    assert bool(weights(model).isfinite().all())


def spoiled(gradient):
    gradient = gradient.clone()
    if dist.get_rank() == 1:
        gradient[3, 5] = torch.inf
    return gradient


class Half(Net):
    def __init__(self):
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, x):
        return super().forward(x.to(torch.bfloat16)).float()


@on_learners(2)
def test_bfloat16():
    """Moments are float32 whatever gradients are."""
    model = make(Half)
    hook = attach(model, local_adam=LocalAdam())
    train(model, 5, follower(model))
    assert_replicas(model)
    assert all(values.dtype is torch.float32 for name, values in kept(hook).items() if "adam.second" in name)


class Late(Net):
    """A layer that is used from the third step on."""

    def __init__(self):
        super().__init__()
        self.late, self.calls = torch.nn.Linear(10, 200, bias=False), 0

    def forward(self, x):
        self.calls += 1
        x = super().forward(x)
        return x + self.late(x)[:, :10] if self.calls > 2 else x


@on_learners(2)
def test_steps_are_counted_by_parameter():
    """Its first step is as long as Adam's first steps are."""
    model = make(Late, find_unused_parameters=True)
    hook = attach(model, mode="off", local_adam=LocalAdam())
    before = model.module.late.weight.detach().clone()
    train(model, 3, follower(model))
    moved = (model.module.late.weight.detach() - before).abs().max()
    assert own_state(hook)["adam.steps.late.weight"] == 1
    assert 0.5 * RATE < moved < 1.01 * RATE, moved


@on_learners(2)
def test_learners_must_agree():
    own = LocalAdam() if dist.get_rank() else None
    with pytest.raises(ValueError, match="learner . was attached with local_adam="):
        attach(make(), local_adam=own)


@on_learners(2)
def test_states_of_another_kind_are_refused():
    """Neither moments nor residuals of another kind are taken for something else."""
    states = []
    for local_adam in (LocalAdam(), None):
        model = make()
        hook = attach(model, local_adam=local_adam)
        train(model, 2, follower(model))
        states.append(own_state(hook))
    with pytest.raises(ValueError, match="attach with local_adam"):
        attach(make()).load_state_dict(states[0])
    hook = attach(make(), local_adam=LocalAdam())
    with pytest.raises(ValueError, match="attach without local_adam"):
        hook.load_state_dict(states[1])
    del states[0]["adam.second.fc1.weight"]
    with pytest.raises(ValueError, match=r"adam\.second\.fc1\.weight is missing"):
        hook.load_state_dict(states[0])


def test_bad_options():
    with pytest.raises(ValueError, match="betas"):
        LocalAdam(betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="eps"):
        LocalAdam(eps=0.0)
    with pytest.raises(TypeError, match="LocalAdam"):
        Config(local_adam=True)
    with pytest.raises(ValueError, match="GradScaler"):
        Config(local_adam=LocalAdam(), scaler=torch.amp.GradScaler("cpu"))


@PATHS
@on_learners(2)
def test_with_the_optimizer_weights_move_as_far_whenever_an_update_arrives(in_place):
    """All steps' updates, each times the learning rate of its step, have moved the weights, or wait."""
    model = make()
    before, optimizer = weights(model), follower(model)
    hook = attach(model, in_place, strategy="gather", local_adam=LocalAdam(), optimizer=optimizer)
    moved, own = 0, Moments()
    for step in range(8):
        if step == 4:
            # It replaces the groups that have the learning rates.
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] = RATE / 2**step
        images, labels = batch(step)
        gradients = local_gradient(model, images, labels).split([parameter.numel() for parameter in model.parameters()])
        updates = [own.update(number, gradient) for number, gradient in enumerate(gradients)]
        moved = moved + mean_over_learners(torch.cat(updates)) * optimizer.param_groups[0]["lr"]
        train(model, 1, optimizer, start=step)
    assert_replicas(model)
    found = (before - weights(model)).double() + residual_mean(model, hook).double()
    assert (moved - found).abs().max() < 1e-6


@on_learners(2)
def test_residuals_with_a_learning_rate_are_told_from_others():
    model = make()
    hook = attach(model, local_adam=LocalAdam(), optimizer=follower(model))
    train(model, 2, follower(model))
    with pytest.raises(ValueError, match="made otherwise"):
        attach(make(), local_adam=LocalAdam()).load_state_dict(hook.state_dict())


def test_an_optimizer_is_for_local_adam():
    optimizer = follower(Net())
    for wrong in (torch.optim.AdamW(Net().parameters()), torch.optim.SGD(Net().parameters(), 0.1, momentum=0.9)):
        with pytest.raises(ValueError, match="with momentum; with local_adam it must be torch.optim.SGD without"):
            Config(local_adam=LocalAdam(), optimizer=wrong)
    with pytest.raises(ValueError, match="optimizer is for local_adam only"):
        Config(optimizer=optimizer)
    with pytest.raises(ValueError, match="lacks 1 parameters"):
        rates_of(optimizer, [torch.nn.Parameter(torch.zeros(1))])
