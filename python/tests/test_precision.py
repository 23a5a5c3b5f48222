"""Mixed precision, and gradients that are not finite: one test for each."""

import pytest
import torch
import torch.distributed as dist
from learners import on_learners
from torch.nn.functional import cross_entropy
from training import (
    PATHS,
    STRATEGIES,
    Net,
    assert_conserved,
    assert_replicas,
    assert_same,
    attach,
    batch,
    gradient,
    local_gradient,
    logged,
    make,
    own_state,
    submit,
    train,
    weights,
)


@PATHS
@STRATEGIES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@on_learners(2)
def test_sixteen_bits(dtype, strategy, in_place):
    """A model whose weights and gradients are of 16 bits. Residuals are not. Some steps are dense."""
    model = make(lambda: Net().to(dtype))
    hook = attach(model, in_place, strategy=strategy)

    def go_dense_now_and_then(step):
        hook.mode = "off" if step in (8, 9) else "on"

    given, received = submit(model, 20, go_dense_now_and_then, dtype)
    assert next(model.parameters()).grad.dtype is dtype
    # What each step delivers is rounded to the format.
    assert_conserved(model, hook, given, received, 2e-3 if dtype is torch.float16 else 2e-2)
    assert own_state(hook)["residual.fc1.weight"].dtype is torch.float32
    assert hook.stats()["steps"]["dropped"] == 0
    train_half(model, dtype)
    assert_replicas(model)


def train_half(model, dtype):
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(5):
        images, labels = batch(step)
        optimizer.zero_grad()
        cross_entropy(model(images.to(dtype)), labels).backward()
        optimizer.step()


@on_learners(2)
def test_autocast():
    """Autocast in bfloat16: weights and gradients stay float32."""
    model = make()
    attach(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(5):
        images, labels = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    assert_replicas(model)


@PATHS
@STRATEGIES
@on_learners(2)
def test_an_overflow_is_skipped_by_all(strategy, in_place):
    """An overflow on one learner: all skip the step and back off, and the residuals are what they were or finite."""
    model = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    hook = attach(model, in_place, scaler=scaler, strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scales, skipped = [], []
    for step in range(14):
        images, labels = batch(step)
        if step == 6 and dist.get_rank() == 1:
            images[0, 0, 0, 0] = float("inf")
        before = weights(model)
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(images), labels)).backward()
        if step == 6:
            assert not torch.isfinite(gradient(model)).any()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(torch.equal(before, weights(model)))
        scales.append(scaler.get_scale())
        residuals = [values for name, values in own_state(hook).items() if name != "adacomp"]
        assert all(torch.isfinite(values).all() for values in residuals)
    assert skipped == [step == 6 for step in range(14)]
    assert hook.stats()["steps"]["dropped"] == 1
    assert_replicas(model)
    assert_same(scales)
    # It has grown before and after, and been halved once.
    assert scales[5] == 2048.0 and scales[6] == 1024.0 and scales[-1] == 2048.0


@PATHS
@on_learners(2)
def test_a_changed_loss_scale_distorts_nothing(in_place):
    """A loss scale that changes from step to step changes nothing, and going dense in between neither."""
    states = []
    for scales in ([1.0] * 6, [2.0**16, 2.0**3, 2.0**10, 2.0**12, 2.0**5, 1.0]):
        model = make()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.zeros(1))
        hook = attach(model, in_place, scaler=scaler)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step, scale in enumerate(scales):
            hook.mode = "off" if step == 3 else "on"
            scaler.update(scale)
            images, labels = batch(step)
            optimizer.zero_grad()
            scaler.scale(cross_entropy(model(images), labels)).backward()
            scaler.step(optimizer)
        states.append((weights(model), own_state(hook)["residual.fc1.weight"]))
    (plain, plain_residual), (scaled, scaled_residual) = states
    assert torch.allclose(plain, scaled, rtol=1e-5, atol=1e-7)
    assert torch.allclose(plain_residual, scaled_residual, rtol=1e-3, atol=1e-7)


@on_learners(2)
def test_an_average_that_overflows_is_dropped():
    """Averages that fit float32 but not float16: all drop the step, and its gradient is kept."""
    model = make(lambda: Net().to(torch.float16))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    hook = attach(model, scaler=scaler, conv="dense", names={"fc1.weight": 500})
    for layer, (name, _) in enumerate(model.module.named_parameters()):
        if name == "fc1.weight":
            hook._runtime.exchange.set_residual(layer, torch.full((512 * 120,), 0.5).numpy())
    images, labels = batch(0)
    (model(images.half()) * 1e-6).sum().backward()
    assert not torch.isfinite(gradient(model)).any()
    assert hook.stats()["steps"]["dropped"] == 1
    assert own_state(hook)["residual.fc1.weight"].mean() > 0.49


@on_learners(2)
def test_a_nan_stays_out_of_residuals():
    """Without a scaler all learners get NaN, as with plain DDP, and are told once; the residuals stay clean."""
    model = make()
    hook = attach(model)
    train(model, 3)
    before = own_state(hook)
    with logged() as lines:
        for _ in range(2):
            images, labels = batch(9)
            if dist.get_rank() == 0:
                images[:] = float("nan")
            model.zero_grad()
            cross_entropy(model(images), labels).backward()
            assert torch.isnan(gradient(model)).all()
    if dist.get_rank() == 0:
        # Its own gradients were no good at all, so its residuals are what they were.
        after = own_state(hook)
        assert all(torch.equal(values, after[name]) for name, values in before.items() if name != "adacomp")
    assert len(lines) == 1 and "scaler=scaler" in lines[0]
    train(model, 3)
    assert_replicas(model)
    assert torch.isfinite(weights(model)).all()


@pytest.mark.parametrize("kind", ["compressed", "flush"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@PATHS
@STRATEGIES
@on_learners(2)
def test_a_dropped_step_is_delayed_and_not_lost(strategy, in_place, dtype, kind):
    """One learner's gradient is not finite in one layer: nobody gets anything, and nothing is lost but what was not finite and
    what is sent dense."""
    model = make(lambda: Net().to(dtype))
    hook = attach(model, in_place, strategy=strategy)
    given = received = 0
    for step in range(8):
        hook.mode = "off" if step == 4 and kind == "flush" else "on"
        images, labels = batch(step)
        images = images.to(dtype)
        bad = step == 4 and dist.get_rank() == 1
        if bad:
            # In the last layer, so that all others are finite.
            handle = model.module.fc2.weight.register_hook(lambda gradient: gradient * torch.inf)
        model.zero_grad()
        cross_entropy(model(images), labels).backward()
        if bad:
            handle.remove()
        if step == 4:
            assert torch.isnan(gradient(model)).all()
        else:
            received = received + gradient(model)
        given = given + local_gradient(model, images, labels) * kept_in(model, step == 4, bad)
    assert hook.stats()["steps"]["dropped"] == 1
    assert_conserved(model, hook, given, received, 1e-5 if dtype is torch.float32 else 2e-3)


def kept_in(model, is_dropped, bad):
    """1 for the elements whose gradient a learner keeps of a step, 0 for others."""
    parts = []
    for name, parameter in model.module.named_parameters():
        compressed = parameter.dim() > 1 and parameter.numel() >= 1024
        lost = is_dropped and (not compressed or (bad and name == "fc2.weight"))
        parts.append(torch.full((parameter.numel(),), 0.0 if lost else 1.0))
    return torch.cat(parts)
