"""What training loops do beside forward, backward and step: one test for each."""

import copy
import pickle
import time

import pytest
import torch
import torch.distributed as dist
from learners import on_learners
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from training import (
    STRATEGIES,
    Net,
    assert_conserved,
    assert_replicas,
    attach,
    batch,
    everywhere,
    gradient,
    local_gradient,
    make,
    own_state,
    submit,
    train,
    weights,
)

from adacomp.torch import AdaCompState, Config, adacomp_hook
from adacomp.torch import attach as real_attach


@on_learners(2)
def test_gradient_accumulation():
    model = make()
    hook = attach(model)
    given = received = 0
    for step in range(8):
        model.zero_grad()
        for part in range(3):
            images, labels = batch(3 * step + part)
            given = given + local_gradient(model, images, labels)
            if part < 2:
                with model.no_sync():
                    cross_entropy(model(images), labels).backward()
            else:
                cross_entropy(model(images), labels).backward()
        received = received + gradient(model)
    assert hook.stats()["steps"]["compressed"] == 8
    assert_conserved(model, hook, given, received)


@on_learners(2)
def test_clipping():
    model = make()
    attach(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(10):
        images, labels = batch(step)
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert all(norm.item() == other.item() for other in everywhere(norm.reshape(1)))
        optimizer.step()
    assert_replicas(model)


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.fc1.weight.requires_grad_(False)


@on_learners(2)
def test_frozen_parameters():
    model = make(Frozen)
    hook = attach(model)
    before = model.module.fc1.weight.clone()
    train(model, 5)
    assert_replicas(model)
    assert torch.equal(before, model.module.fc1.weight)
    assert "residual.fc1.weight" not in own_state(hook)
    assert "fc1.weight" not in hook.stats()["layers"]


class Branches(nn.Module):
    """Of two branches a step uses one, or another on every learner; of the third none is used, ever."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(64, 50), nn.Linear(64, 50)
        self.never = nn.Linear(64, 50)
        self.head = nn.Linear(50, 10)

    def forward(self, images, use_left):
        return self.head((self.left if use_left else self.right)(images.flatten(1)).relu())


def flat_or_zero(module):
    """The gradient, zero where there is none."""
    return torch.cat([p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in module.parameters()])


@pytest.mark.parametrize("as_view, in_place", [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("dense_from", [24, 13])
@STRATEGIES
@on_learners(2)
def test_unused_parameters(strategy, dense_from, as_view, in_place):
    model = make(Branches, find_unused_parameters=True, bucket_cap_mb=0.01, gradient_as_bucket_view=as_view)
    hook = attach(model, in_place, strategy=strategy)
    given = received = 0
    for step in range(24):
        hook.mode = "off" if step >= dense_from else "on"
        # Both on one side, both on the other, or one on each.
        use_left = [True, False, dist.get_rank() == 0][step % 3]
        images, labels = batch(step)
        alone = Branches()
        alone.load_state_dict(model.module.state_dict())
        cross_entropy(alone(images, use_left), labels).backward()
        given = given + flat_or_zero(alone)
        model.zero_grad()
        cross_entropy(model(images, use_left), labels).backward()
        assert model.module.never.weight.grad is None or not model.module.never.weight.grad.any()
        received = received + flat_or_zero(model)
    assert_conserved(model, hook, given, received)
    kept = hook.state_dict(consolidate=True)
    assert not kept["residual.never.weight"].any()
    if dense_from < 24:
        # The steps after gave both branches occasion to send what they had kept.
        assert not kept["residual.left.weight"].any() and not kept["residual.right.weight"].any()
        # And then there is nothing more to take along, though one branch is never used.
        assert hook._runtime.counts.plain > 5


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(64, 50), nn.Linear(64, 50)

    def forward(self, images, both):
        x = images.flatten(1)
        return self.one(x) + self.other(x) if both else self.one(x)


@on_learners(2)
def test_learners_go_dense_together():
    """In the step in which learners go dense, one uses all and the other does not: they must go on together."""
    model = make(TwoHeads, find_unused_parameters=True, bucket_cap_mb=0.01)
    hook = attach(model)
    given = received = 0
    kept = []
    for step in range(10):
        hook.mode = "off" if step >= 5 else "on"
        both = step != 5 or dist.get_rank() == 0
        images, labels = batch(step)
        alone = TwoHeads()
        alone.load_state_dict(model.module.state_dict())
        cross_entropy(alone(images, both), labels).backward()
        given = given + flat_or_zero(alone)
        model.zero_grad()
        cross_entropy(model(images, both), labels).backward()
        received = received + gradient(model)
        kept.append(hook._runtime.keeps)
    assert_conserved(model, hook, given, received)
    assert kept == [True] * 6 + [False] * 4 and hook._runtime.counts.plain == 3


@pytest.mark.parametrize(
    "options",
    [{"static_graph": True}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.001}, {"find_unused_parameters": True}],
    ids=str,
)
@on_learners(2)
def test_ddp_options(options):
    """The same bits whatever DDP does with its buckets."""
    results = []
    for ddp in ({"bucket_cap_mb": 100}, options):
        model = make(**ddp)
        hook = attach(model)
        train(model, 12)
        assert_replicas(model)
        results.append((weights(model), hook.state_dict()))
    (one, state), (other, other_state) = results
    assert torch.equal(one, other)
    assert all(torch.equal(state[name], other_state[name]) for name in state)


class Backwards(Net):
    """Registers its parameters in another order than it uses them, so that PyTorch's rebuilt buckets differ a lot."""

    def __init__(self):
        super().__init__()
        self.conv1, self.fc1 = self._modules.pop("conv1"), self._modules.pop("fc1")
        self._modules = dict(reversed(self._modules.items()))


@on_learners(2)
def test_buckets_are_rebuilt_and_nothing_is_lost():
    model = make(Backwards, bucket_cap_mb=0.005)
    hook = attach(model)
    seen = set()
    layers = hook._door._layers

    def spy(bucket):
        seen.add((bucket.index(), tuple(layers(bucket))))
        return layers(bucket)

    hook._door._layers = spy
    given, received = submit(model, 10)
    assert_conserved(model, hook, given, received)
    buckets = max(index for index, _ in seen) + 1
    assert len(seen) > buckets > 2, "the buckets were not rebuilt, so this shows nothing"


class Slow(nn.Module):
    """Its backward pass takes a while between the last layer and the first."""

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            time.sleep(0.3)
            return gradient

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 200), nn.Linear(200, 10)

    def forward(self, images):
        return self.last(self.Wait.apply(self.first(images.flatten(1)).relu()))


@on_learners(2)
def test_messages_travel_while_the_backward_pass_goes_on():
    """Bytes are on their way when the last bucket comes."""
    model = make(Slow, bucket_cap_mb=0.001)
    hook = attach(model)
    runtime = hook._runtime
    layers, sent = hook._door._layers, []

    def spy(bucket):
        sent.append((bucket.index(), runtime.transport.sent - runtime._sent_before))
        return layers(bucket)

    train(model, 2)
    hook._door._layers = spy
    train(model, 1)
    assert sent[0] == (0, 0) and len(sent) > 1
    assert sent[-1][1] > 100, sent


class Tied(nn.Module):
    """One matrix in two places."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(10, 120), nn.Linear(120, 10, bias=False)
        self.inner = nn.Linear(64, 120)
        self.out.weight = self.embedding.weight

    def forward(self, images):
        return self.out(self.inner(images.flatten(1)) + self.embedding.weight.sum(0))


@on_learners(2)
def test_tied_parameters():
    model = make(Tied)
    hook = attach(model)
    train(model, 5)
    assert_replicas(model)
    assert "residual.embedding.weight" in own_state(hook) and "residual.out.weight" not in own_state(hook)


@on_learners(2)
def test_channels_last():
    """Kernels that are stored in another order keep their residual in their own shape."""
    model = make(lambda: Net().to(memory_format=torch.channels_last))
    hook = attach(model)
    given, received = submit(model, 6)
    assert_conserved(model, hook, given, received)
    before = hook.state_dict()
    hook.load_state_dict(before)
    assert all(torch.equal(values, hook.state_dict()[name]) for name, values in before.items())


@on_learners(2)
def test_uneven_inputs():
    """Learners with fewer batches: DDP's join goes on with the others."""
    model = make()
    hook = attach(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with model.join():
        for step in range(3 + 2 * dist.get_rank()):
            images, labels = batch(step)
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
    assert hook.stats()["steps"]["compressed"] == 5


@on_learners(2)
def test_two_models_in_one_process():
    first, second = make(seed=1), make(seed=2)
    hooks = attach(first), attach(second, strategy="reduce")
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.05)
    before = weights(first)
    for step in range(5):
        images, labels = batch(step)
        optimizer.zero_grad()
        (cross_entropy(first(images), labels) + cross_entropy(second(images), labels)).backward()
        optimizer.step()
    assert not torch.equal(before, weights(first))
    assert_replicas(first)
    assert_replicas(second)
    assert [hook.stats()["steps"]["compressed"] for hook in hooks] == [5, 5]


@on_learners(4)
def test_a_group_of_some_learners():
    """A model that only some learners train, over a group of their own."""
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        torch.manual_seed(0)
        model = DistributedDataParallel(Net(), process_group=group)
        hook = attach(model)
        train(model, 4)
        assert (hook.stats()["learners"], hook.stats()["steps"]["compressed"]) == (2, 4)


@on_learners(2)
def test_the_classic_pair():
    """As Lightning does it: the state is made without a model, and registered by somebody else."""
    model = make()
    state = AdaCompState(Config(mode="on", names={"fc1.weight": 100}))
    assert "not yet attached" in repr(state)
    model.register_comm_hook(state, adacomp_hook)
    for call in (state.stats, state.state_dict, lambda: train(model, 1)):
        with pytest.raises(RuntimeError, match=r"call state\.bind\(ddp\) before the first step"):
            call()
    # DDP itself cannot go on after a backward pass that broke off.
    model = make()
    model.register_comm_hook(state, adacomp_hook)
    state.bind(model)
    train(model, 4)
    assert_replicas(model)
    stats = state.stats()
    assert (stats["steps"]["compressed"], stats["layers"]["fc1.weight"]["treatment"]) == (4, 100)
    with pytest.raises(RuntimeError, match="has a model already"):
        state.bind(make())


@on_learners(2)
def test_ignored_parameters():
    """Parameters that DDP was told to leave alone, of the outermost module and of others."""
    exchanged = []
    for module, names in ((nn.Linear(64, 10), [".bias"]), (nn.Linear(64, 10), ["bias"]), (Net(), ["fc1.bias"])):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
        model = DistributedDataParallel(module)
        hook = attach(model)
        images, labels = batch(0)
        outputs = model(images.flatten(1) if isinstance(module, nn.Linear) else images)
        cross_entropy(outputs, labels).backward()
        exchanged.append(list(hook.stats()["layers"]))
    dotted, plain, inner = exchanged
    # DDP itself knows the outermost module's parameters only with a dot.
    assert dotted == ["weight"] and plain == ["weight", "bias"]
    assert "fc1.bias" not in inner and "fc2.bias" in inner


@on_learners(2)
def test_models_can_be_copied():
    """A copy of the model is one without a hook, as without compression."""
    model = make()
    hook = attach(model)
    train(model, 2)
    other = copy.deepcopy(model)
    assert torch.equal(weights(other), weights(model))
    assert "not yet attached" in repr(copy.deepcopy(hook)) and "not yet attached" in repr(pickle.loads(pickle.dumps(hook)))
    train(model, 2)
    assert_replicas(model)


@on_learners(2)
def test_a_closed_hook_says_so():
    model = make()
    hook = attach(model)
    train(model, 2)
    hook.close()
    for call in (hook.stats, hook.state_dict, lambda: train(model, 1)):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    again = make()
    attach(again)
    with pytest.raises(RuntimeError):
        real_attach(again)
    train(again, 2)
    assert_replicas(again)
