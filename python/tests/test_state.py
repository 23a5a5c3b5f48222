"""Nothing is lost at resume."""

import pytest
import torch
import torch.distributed as dist
from learners import learners, on_learners
from torch import nn
from torch.nn.functional import cross_entropy
from training import STRATEGIES, Net, assert_replicas, attach, batch, everywhere, make, own_state, residual_mean, train, weights

from adacomp.torch import AdaCompState, Config, LocalAdam, adacomp_hook


def run_and_save(folder, strategy, steps, form):
    """Trains and saves; returns the weights after, those after as many steps more, and the mean of what was kept."""
    model = make()
    hook = attach(model, strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    train(model, steps, optimizer)
    state = hook.state_dict()
    own = f"{folder}/hook-{dist.get_rank()}.{form}"
    if form == "safetensors":
        from safetensors.torch import save_file

        save_file(state, own)
    else:
        torch.save(state, own)
    consolidated = hook.state_dict(consolidate=True)
    if dist.get_rank() == 0:
        torch.save([model.module.state_dict(), optimizer.state_dict(), consolidated], f"{folder}/model.pt")
    # Saving has changed nothing.
    assert all(torch.equal(values, hook.state_dict()[name]) for name, values in state.items())
    saved = weights(model)
    mean = residual_mean(model, hook)
    return saved, train(model, steps, optimizer, start=steps), mean


def load(path, form):
    if form == "safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path)


def resume(folder, strategy, steps, form, states, lazily=False):
    """Goes on from what was saved; `states` are the numbers of learners' files, or none for the consolidated one. With `lazily`,
    the hook gets its model after the state."""
    model = make(seed=99)
    module, optimizer_state, consolidated = torch.load(f"{folder}/model.pt")
    model.module.load_state_dict(module)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    optimizer.load_state_dict(optimizer_state)
    if lazily:
        hook = AdaCompState(Config(mode="on", strategy=strategy))
        model.register_comm_hook(hook, adacomp_hook)
    else:
        hook = attach(model, strategy=strategy)
    if states is None:
        hook.load_state_dict(consolidated)
    elif states == "own":
        hook.load_state_dict(load(f"{folder}/hook-{dist.get_rank()}.{form}", form))
    else:
        hook.load_state_dict([load(f"{folder}/hook-{number}.{form}", form) for number in states])
    if lazily:
        hook.bind(model)
    mean = residual_mean(model, hook)
    result = train(model, steps, optimizer, start=steps)
    assert_replicas(model)
    return result, mean


@STRATEGIES
@pytest.mark.parametrize("form", ["pt", "safetensors"])
@on_learners(2)
def test_resuming_gives_the_same_bits(tmp_path, strategy, form):
    _, expected, _ = run_and_save(tmp_path, strategy, 7, form)
    for lazily in (False, True):
        actual, _ = resume(tmp_path, strategy, 7, form, "own", lazily)
        assert torch.equal(expected, actual)


@STRATEGIES
def test_another_number_of_learners_conserves_the_total(tmp_path, strategy):
    (_, _, mean), _ = learners(2).run(run_and_save, tmp_path, strategy, 7, "pt")
    for states in ([0, 1], None):
        for _, other in learners(4).run(resume, tmp_path, strategy, 3, "pt", states):
            assert torch.allclose(mean, other, rtol=1e-5, atol=1e-8), (mean - other).abs().max()
    # And from one strategy to another.
    for _, other in learners(2).run(resume, tmp_path, "gather", 3, "pt", [0, 1]):
        assert torch.allclose(mean, other, rtol=1e-5, atol=1e-8)


def auto_from(folder):
    """Goes on with a state that says another choice than this version's, if the learners are as many as there."""
    hook = attach(make(), strategy="auto")
    learners = dist.get_world_size()
    own = hook.stats()["strategy"]
    other = {"gather": "reduce", "reduce": "gather"}[own]
    state = own_state(hook)
    assert bytes(state["strategy"].tolist()).decode().rstrip() == f"{own} between {learners} learners"
    text = f"{other} between 4 learners"
    state["strategy"] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    state["residual.fc1.weight"] += 1
    model = make()
    resumed = attach(model, strategy="auto")
    resumed.load_state_dict(state)
    assert f"compresses with {resumed.stats()['strategy']}" in str(resumed)
    assert (own_state(resumed)["residual.fc1.weight"] == 1).all()
    train(model, 2)
    assert_replicas(model)
    return own, resumed.stats()["strategy"]


def test_as_many_learners_keep_the_strategy_that_was_chosen(tmp_path):
    assert set(learners(2).run(auto_from, tmp_path)) == {("gather", "gather")}
    assert set(learners(4).run(auto_from, tmp_path)) == {("reduce", "gather")}


@on_learners(2)
def test_a_state_that_does_not_fit_is_refused():
    model = make()
    hook = attach(model)
    train(model, 3)
    state = own_state(hook)
    without = {name: values for name, values in state.items() if name != "residual.fc1.weight"}
    reshaped = {**state, "residual.fc1.weight": torch.zeros(5, 5)}
    broken = {**state, "residual.fc1.weight": torch.full((120, 512), torch.nan)}
    told = []
    for bad in ({}, without, reshaped, broken, {**state, "adacomp": torch.zeros(3, dtype=torch.uint8)}):
        try:
            hook.load_state_dict(bad)
            told.append("taken")
        except ValueError as error:
            told.append(str(error))
    # Nothing was changed by what was refused.
    assert all(torch.equal(values, own_state(hook)[name]) for name, values in state.items())
    train(model, 2)
    assert_replicas(model)
    empty, missing, reshaped, broken, text = told
    assert "not a state of an AdaComp hook" in empty
    assert "fc1.weight" in missing and "fc1.weight" in reshaped and "fc1.weight" in broken
    assert "learner L of N, step S" in text


@pytest.mark.parametrize("chosen", ["gather", "reduce"])
@on_learners(2)
def test_a_state_that_only_some_can_load_ends_all(chosen):
    model = make()
    hook = attach(model, strategy="auto")
    train(model, 3)
    text = f"{chosen} between 2 learners"
    state = own_state(hook) | {"strategy": torch.tensor(list(text.encode()), dtype=torch.uint8)}
    told = "no state of an AdaComp hook|not a state" if dist.get_rank() else "another learner could not load"
    with pytest.raises((ValueError, RuntimeError), match=told):
        hook.load_state_dict({} if dist.get_rank() else state)
    with pytest.raises(RuntimeError, match="AdaComp cannot go on"):
        train(model, 1)


@STRATEGIES
@on_learners(2)
def test_going_dense_takes_residuals_along(strategy):
    """A state that is loaded into a hook that is off: the first step takes it along."""
    model = make()
    hook = attach(model, strategy=strategy)
    train(model, 5)
    kept = residual_mean(model, hook)
    state = hook.state_dict()
    other = make()
    off = attach(other, strategy=strategy, mode="off")
    off.load_state_dict(state)
    images, labels = batch(50)
    cross_entropy(other(images), labels).backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in other.parameters()])
    plain = make()
    cross_entropy(plain(images), labels).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()])
    assert torch.allclose(flat - expected, kept, atol=1e-6)
    assert kept.abs().max() > 1e-3
    assert not residual_mean(other, off).any()
    assert all(torch.equal(one, flat) for one in everywhere(flat))


class More(Net):
    """With a layer more, and one that is wider."""

    def __init__(self):
        super().__init__()
        self.fc2, self.fc3 = nn.Linear(120, 40), nn.Linear(40, 10)

    def forward(self, images):
        return self.fc3(super().forward(images))


@pytest.mark.parametrize("consolidate", [False, True])
@on_learners(2)
def test_a_model_that_was_changed_loads_what_fits(consolidate):
    """Without `strict` what is new begins with nothing, and what is gone is left out; both ways."""
    for before, after in ((Net, More), (More, Net)):
        model = make(before, seed=1)
        hook = attach(model, local_adam=LocalAdam())
        train(model, 4, torch.optim.SGD(model.parameters(), 0.003))
        state = hook.state_dict(consolidate=consolidate)
        other = make(after)
        again = attach(other, local_adam=LocalAdam())
        with pytest.raises(ValueError, match="fc2"):
            again.load_state_dict(state)
        again.load_state_dict(state, strict=False)
        prefix = "" if consolidate else f"learner {dist.get_rank()} of 2/"
        found = again.state_dict(consolidate=consolidate)
        for key in ("residual.conv2.weight", "residual.fc1.weight", "adam.first.fc1.weight"):
            assert state[prefix + key].any() and torch.equal(found[prefix + key], state[prefix + key]), key
        if after is More:
            assert not found[prefix + "residual.fc2.weight"].any() and not found[prefix + "adam.first.fc3.weight"].any()
        train(other, 2, torch.optim.SGD(other.parameters(), 0.003))
        assert_replicas(other)


@on_learners(2)
def test_states_of_0_1_0_load():
    """Their keys do not name the learner, and they do not have the strategy."""
    model = make()
    hook = attach(model, strategy="gather")
    train(model, 5)
    expected = hook.state_dict()
    old = {key.partition("/")[2]: values for key, values in expected.items() if not key.endswith("/strategy")}
    old["adacomp"] = torch.tensor(list(f"residuals 1, learner {dist.get_rank()} of 2, step 5".encode()), dtype=torch.uint8)
    again = attach(make(), strategy="gather")
    again.load_state_dict(old)
    assert all(torch.equal(values, expected[key]) for key, values in again.state_dict().items())
    assert any("residual." in key and values.any() for key, values in expected.items())
