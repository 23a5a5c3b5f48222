"""The door for local steps: learners train alone, and exchange now and then how far their weights have moved.

Sending something in every step cannot work where a round trip takes a tenth of a second. So each learner, a site, takes steps of
its own optimiser on its own weights. A round ends after so many of them: what the steps have changed is averaged as gradients are
elsewhere, and an outer rule applies the average to the shared weights, from which all learners go on::

    D = shared - local             what the learner's steps have changed
    average = exchange(D)          by AdaComp: what is not sent waits in the residual
    shared -= outer(average)
    local = shared

The ranges of the runtime are the model's parameters and buffers, and its step is a round. It runs on the runtime's thread, so it
can also run beside the next steps: then `local += shared - submitted` some steps later, which keeps what these have done.
"""

import functools
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .config import CommonOptions, Config
from .ddp import ddp_inside, make_node
from .fsdp import as_group, param_groups, sharded
from .handle import Handle
from .node import Node
from .runtime import FORMATS, Door, Model, Runtime, trained_parameters
from .saved import MOMENTUM, SHARED, SUBMITTED, Find, Range, clean_name, strides

WHO = (
    "say who the learners are: the processes that have the same place at the other sites. mesh = init_device_mesh(device, "
    "(sites, places), mesh_dim_names=('site', 'place')); {inside}; LocalSteps(model, optimizer, learners=mesh['site'])"
)
DDP_INSIDE = "DistributedDataParallel(model, process_group=mesh.get_group('place'))"
FSDP_INSIDE = "fully_shard(model, mesh=mesh['place'])"

# Returns what this process has of a parameter, or a buffer, to be changed in place.
Local = Callable[[], torch.Tensor]

# For tests: whether to take the path for buckets in the processor's memory, whatever the device is.
_in_place: bool | None = None


@dataclass(frozen=True)
class Outer:
    """What becomes of the shared weights with the average of what local steps have changed: SGD, with Nesterov's momentum as
    ``torch.optim.SGD`` has it. The default applies the average; DiLoCo's rule is ``Outer(rate=0.7, momentum=0.9)``."""

    rate: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise ValueError(f"rate {self.rate}; expected more than 0")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum {self.momentum}; expected a number from 0 to below 1")

    @torch.no_grad()
    def apply(self, shared: torch.Tensor, average: torch.Tensor, momentum: torch.Tensor | None) -> None:
        """Moves the shared weights by an average, in place. The momentum has their shape, and begins with zeros."""
        if momentum is not None:
            momentum.mul_(self.momentum).add_(average)
            average = average.add(momentum, alpha=self.momentum)
        shared.sub_(average, alpha=self.rate)


@dataclass
class _Part:
    """Elements of a parameter or buffer that are here, from the first to the end, and their first place in flat tensors."""

    number: int
    start: int
    end: int
    first: int
    local: Local
    is_buffer: bool

    def flat(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns its elements of a flat tensor."""
        return flat[self.first : self.first + self.end - self.start]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the same, in the shape of the local tensor."""
        local = self.local()
        if local.numel() != self.end - self.start:
            raise RuntimeError(
                f"a buffer has {local.numel()} elements now and had {self.end - self.start} when LocalSteps was made. Make it "
                "when all have their size; buffers with persistent=False are left out"
            )
        return flat.as_strided(local.shape, strides(local), flat.storage_offset() + self.first)


@dataclass
class _Fragment:
    """Layers that are exchanged together, after so many steps of each round."""

    index: int
    point: int
    numbers: list[int]
    parts: list[_Part]
    # Where in flat tensors its parameters are, and its buffers after them.
    weights: slice
    buffers: slice
    # The step after which it was exchanged last.
    exchanged_at: int = 0


@dataclass
class _Round:
    """A fragment whose exchange is under way, or over and not yet applied."""

    fragment: _Fragment
    # The steps until it is applied; 0 if it is applied at once.
    remaining: int
    # Nothing if the shared weights have the average already.
    average: torch.futures.Future[Any] | None
    # Whether local weights may have moved since.
    overlapped: bool
    dropped: bool = False


class LocalDoor(Door):
    """The weights that all learners share, and the rounds in which they change."""

    title, exchanged = "local steps", "what local steps have changed"
    has_plain_steps = False
    dropped = (
        "the weights of a learner are not finite: all learners drop the round and go on from the shared weights. What others had "
        "changed waits in residuals, and the optimiser forgets what is not finite."
    )
    advice = ""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        learners: dist.ProcessGroup | DeviceMesh | None,
        config: Config,
        every: int,
        outer: Outer,
        decay: float,
        delay: int,
        fragments: int,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self.every, self.outer, self.decay, self.delay = every, outer, decay, delay
        self.runtime, weights, buffers = _connect(model, learners, config)
        for option in ("every", "outer", "decay", "delay"):
            self.runtime.check_agreement(option, getattr(self, option))
        self.runtime.check_agreement("fragments", fragments)
        self.runtime.kept_by_door = self
        self._trained = {id(parameter) for parameter in self.runtime.model.trained}
        self.fragments = self._cut(weights, buffers, fragments)
        elements = self.fragments[-1].buffers.stop
        self.shared = torch.zeros(elements, device=self.runtime.device)
        self._momentum = torch.zeros_like(self.shared) if outer.momentum else None
        self._submitted = torch.zeros_like(self.shared) if delay else None
        self._values = torch.zeros_like(self.shared)
        self.shared_kinds = (SHARED, MOMENTUM) if outer.momentum else (SHARED,)
        # All steps, and those of the round that is going on; all rounds that are over.
        self.steps = self.position = self.rounds = 0
        self._round: _Round | None = None
        # Whether the shared weights are there, and are known to be the same on all learners.
        self._has_shared = self._agreed = False
        # Buffers as they are now, because the first forward pass may change them.
        self._take(buffers=True)
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self._begin()),
            optimizer.register_step_post_hook(lambda *_: self._step()),
        ]

    def _cut(self, weights: Sequence[Local], buffers: Sequence[Local], count: int) -> list[_Fragment]:
        """Returns fragments of about as many elements each, spread evenly over a round."""
        runtime, locals = self.runtime, [*weights, *buffers]
        elements = runtime.model.layout.elements
        whole = [(number, 0, size) for number, size in enumerate(elements)]
        here = {number: (start, end) for number, start, end in (whole if isinstance(runtime.inside, Node) else runtime.parts)}
        numbers: list[list[int]] = [[] for _ in range(count)]
        before = 0
        for number, size in enumerate(elements):
            numbers[min(before * count // sum(elements), count - 1)].append(number)
            before += size
        fragments, first = [], 0
        for index, own in enumerate(numbers):
            start = end = first
            parts: list[_Part] = []
            for number in own:
                if number in here:
                    parts.append(_Part(number, *here[number], first, locals[number], number >= len(weights)))
                    first += here[number][1] - here[number][0]
                end = first if number < len(weights) else end
            point = (index + 1) * self.every // count
            fragments.append(_Fragment(index, point, own, parts, slice(start, end), slice(end, first)))
        return fragments

    # Steps and rounds.

    @torch.no_grad()
    def _begin(self) -> None:
        """Before the first step: makes sure that all learners have the same weights."""
        if self._agreed:
            return
        if not self._has_shared:
            self._take_loaded_buffers()
            self._take_weights()
            self._has_shared = True
        others = [_local(parameter) for parameter in self._parameters() if id(parameter) not in self._trained]
        digest = _digest([self.shared, *others])
        # Places of a learner may have different shards.
        self.runtime.transport.rendezvous.agree("start from the same weights, of one seed or checkpoint", digest)
        self._agreed = True

    def _take_loaded_buffers(self) -> None:
        """Takes the buffers anew that may have been loaded since the start. Where they differ, because the first forward pass has
        changed them, it takes the mean: of all learners, and first of the processes of a learner that share its buffers."""
        runtime = self.runtime
        parts = [part for part in self._parts() if part.is_buffer]
        for part in parts:
            part.of(self.shared).copy_(part.local())
        inside = [runtime.inside.transport] if isinstance(runtime.inside, Node) else []
        for transport in [*inside, runtime.transport]:
            digests = " ".join(_digest([part.flat(self.shared)]) for part in parts)
            words = transport.rendezvous.meet("take the first step", digests)
            for part, *digest in zip(parts, *(word.split() for word in words)):
                if len(set(digest)) > 1:
                    values = part.flat(self.shared)
                    sums = values.cpu().double()
                    transport.wait(transport.start_sum(sums))
                    values.copy_(sums / transport.learners)

    def _parameters(self) -> Iterable[torch.Tensor]:
        """Returns all parameters; those of FSDP as they are between steps, also if they are gathered now."""
        sharded = [each for group in param_groups(self._model) for each in group.fsdp_params]
        forms = {id(form) for each in sharded for form in (each.sharded_param, getattr(each, "_unsharded_param", None))}
        return [each.sharded_param for each in sharded] + [each for each in self._model.parameters() if id(each) not in forms]

    def _take_weights(self) -> None:
        """Takes the shared weights from the local ones, if nothing was loaded and no step was taken."""
        if not self._has_shared:
            self._take(buffers=False)

    def _take(self, buffers: bool) -> None:
        for part in self._parts():
            if part.is_buffer == buffers:
                part.of(self.shared).copy_(part.local())

    @torch.no_grad()
    def _step(self) -> None:
        """After a step of the optimiser."""
        self.runtime.check()
        self.steps += 1
        self.position += 1
        if self._round is not None:
            self._round.remaining -= 1
            if self._round.remaining == 0:
                self._apply(self._round)
        for fragment in self.fragments:
            if fragment.point == self.position and fragment.numbers:
                self._submit(fragment, self.delay)
        if self.position == self.every:
            self.rounds, self.position = self.rounds + 1, 0

    @torch.no_grad()
    def end_round(self) -> None:
        """Exchanges all fragments now, if a learner has taken a step since they were."""
        self._reshard()
        self._begin()
        before = f"{self.rounds} rounds and {self.runtime.counts.steps()} exchanges before"
        self.runtime.agree("call end_round() in the same round", before)
        is_over = len(self.fragments) == 1 and self.runtime.largest([self.position])[0] == 0
        if self._round is not None:
            # If nobody has taken a step since, all get the shared weights to the bit.
            self._round.overlapped = not is_over
            self._apply(self._round)
        if not is_over:
            for fragment in self.fragments:
                if fragment.numbers:
                    self._submit(fragment, 0)
            self.rounds, self.position = self.rounds + 1, 0

    def _submit(self, fragment: _Fragment, delay: int) -> None:
        """Begins the exchange of what the steps have changed."""
        runtime = self.runtime
        if any(parameter.requires_grad and id(parameter) not in self._trained for parameter in self._parameters()):
            raise RuntimeError("a parameter is trained that was frozen, or not there, when LocalSteps was made")
        values = self._values[fragment.weights.start : fragment.buffers.stop]
        for part in fragment.parts:
            local, change = part.local(), part.of(self._values)
            # In the format of the weights, so that what these have lost by it does not count as changed.
            base = part.of(self.shared).to(local.dtype)
            change.copy_(base).sub_(local)
            if part.is_buffer:
                # Infinities in masks.
                change.masked_fill_(base == local, 0.0)
            if delay and self._submitted is not None:
                part.of(self._submitted).copy_(local)
        if self.decay != 1.0 and fragment.index == 0:
            # Once a round, for all fragments.
            runtime.decay(self.decay)
        # Learners whose scaler skips steps may have taken others.
        runtime.local_steps, fragment.exchanged_at = max(1, self.steps - fragment.exchanged_at), self.steps
        runtime.begin(time.perf_counter(), fragment.index)
        local_bytes = sum(part.local().nbytes for part in fragment.parts)
        future = runtime.submit(values, fragment.numbers, local_bytes / max(1, values.numel()))
        runtime.finish()
        self._round = _Round(fragment, delay, future, overlapped=delay > 0)
        if delay == 0:
            self._apply(self._round)

    @torch.no_grad()
    def settle(self) -> None:
        """Waits for the exchange that is under way, if there is one, and gives the shared weights its average. They reach the
        local weights when it is time."""
        if self._round is None or self._round.average is None:
            return
        self._round.average.wait()
        self._round.average, self._round.dropped = None, not self.runtime.averaged
        if self.runtime.averaged:
            weights, buffers = self._round.fragment.weights, self._round.fragment.buffers
            momentum = None if self._momentum is None else self._momentum[weights]
            self.outer.apply(self.shared[weights], self._values[weights], momentum)
            self.shared[buffers] -= self._values[buffers]

    def _apply(self, round: _Round) -> None:
        """Gives the local weights the result of an exchange."""
        self.settle()
        self._round = None
        if round.dropped:
            self._forget()
        exchanged = {part.number for part in round.fragment.parts}
        for part in self._parts() if round.dropped else round.fragment.parts:
            local, new = part.local(), part.of(self.shared)
            if part.number not in exchanged:
                # What is not finite in other fragments would make the next steps so, too.
                if not bool(local.isfinite().all()):
                    local.copy_(new)
            elif round.dropped or not round.overlapped or self._submitted is None:
                local.copy_(new)
            else:
                old = part.of(self._submitted)
                change = new - old
                local += change.masked_fill_(new == old, 0.0) if part.is_buffer else change

    def _parts(self) -> list[_Part]:
        return [part for fragment in self.fragments for part in fragment.parts]

    def _forget(self) -> None:
        """What the optimiser keeps of a parameter begins anew where it is not finite, or no step could be finite again."""
        for state in self._optimizer.state.values():
            tensors = [_local(value) for value in state.values() if isinstance(value, torch.Tensor)]
            if not all(bool(value.isfinite().all()) for value in tensors):
                state.clear()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    # What is kept: see `saved.Kept`.

    def describe(self) -> str:
        overlap = f", applied {self.delay} steps later" if self.delay else ""
        parts = f", in {len(self.fragments)} fragments" if len(self.fragments) > 1 else ""
        return f"local steps: a round every {self.every} steps{overlap}{parts}; {self.outer}, decay {self.decay}"

    def _schedule(self) -> list[int]:
        return [self.every, self.delay, len(self.fragments)]

    def ranges(self) -> list[tuple[int, int, int]]:
        return [(part.number, part.start, part.end) for part in self._parts()]

    def save(self, consolidate: bool) -> tuple[torch.Tensor, list[Range]]:
        if not self._has_shared:
            self._take(buffers=True)
        self._take_weights()
        counts, round = [self.steps, self.rounds], self._round
        if not consolidate:
            counts += [self.position, *self._schedule()]
            counts += [round.fragment.index, round.remaining, round.dropped] if round is not None else []
        ranges = [
            Range(kind, part.number, part.start, part.end, part.flat(flat).to("cpu", copy=True))
            for kind, flat in self._kept(consolidate)
            for part in self._parts()
        ]
        # Of one length, because distributed checkpoints load into tensors of the same size.
        return torch.tensor(counts + [-1] * (9 - len(counts))), ranges

    def _reshard(self) -> None:
        """Drops weights that a forward pass has gathered, because they would not follow the shards."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @torch.no_grad()
    def load(self, counts: torch.Tensor, find: Find, own: bool) -> None:
        self._reshard()
        self._take_weights()
        self._has_shared = True
        self.steps, self.rounds, position, *schedule, index, remaining, dropped = counts.tolist()
        # Otherwise the round that was going on begins anew.
        own = own and schedule == self._schedule()
        self.position, self._round, self._agreed = position if own else 0, None, False
        for kind, flat in self._kept(consolidate=not own):
            for part in self._parts():
                values = find(kind, part.number, part.start, part.end)
                if values is not None:
                    part.flat(flat).copy_(values)
                elif kind == SUBMITTED:
                    # A parameter that is new has not changed.
                    part.flat(flat).copy_(part.flat(self.shared))
        if own and index >= 0:
            self._round = _Round(self.fragments[index], remaining, None, True, bool(dropped))
        if not own or (self.position == 0 and self._round is None and len(self.fragments) == 1):
            for part in self._parts():
                part.local().copy_(part.of(self.shared))
        for fragment in self.fragments:
            ago = (self.position - fragment.point) % self.every if own else 0
            fragment.exchanged_at = max(0, self.steps - ago)
        self.synchronize()

    def _kept(self, consolidate: bool) -> list[tuple[str, torch.Tensor]]:
        """Returns what is kept, by kind: the same kinds at any time, because distributed checkpoints load what they find here."""
        all_kinds = [(SHARED, self.shared), (MOMENTUM, self._momentum), (SUBMITTED, None if consolidate else self._submitted)]
        return [(kind, flat) for kind, flat in all_kinds if flat is not None]

    def synchronize(self) -> None:
        """On a GPU: the thread of the runtime has another stream."""
        if self.runtime.device.type == "cuda":
            torch.cuda.synchronize(self.runtime.device)


class LocalSteps(Handle):
    """Local steps: each learner trains alone, and every so many steps of the optimiser what these have changed is exchanged by
    AdaComp::

        optimizer = torch.optim.AdamW(model.parameters())
        local = adacomp.torch.LocalSteps(model, optimizer, every=30)

    All learners must make it in the same way, and begin with the same weights. It exchanges inside of ``optimizer.step()``; the
    rest of the loop stays as it is. The model is not wrapped by DDP, and each learner is a process; or DDP or FSDP2 average
    gradients inside of a site, and ``learners`` are the processes that have the same place at the other sites.

    Args:
        model: the model whose trained parameters, and float buffers such as statistics of batch norms, are exchanged.
        optimizer: the optimiser whose steps count. Each learner keeps its own state of it.
        every: the steps of a round.
        learners: a process group or mesh of one dimension; all processes by default.
        outer: what becomes of the shared weights.
        decay: what residuals are multiplied by before each round. 1 loses nothing.
        delay: the steps that are taken while a round is exchanged. 0 is exact: learners wait for it.
        fragments: the groups of layers whose exchanges are spread evenly over a round.
        options: those of :class:`Config`; ``mode`` is ``"on"`` by default, and ``"off"`` averages dense, which is DiLoCo.
    """

    def __init__(
        self,
        # What `torch.compile` returns is annotated as a callable.
        model: torch.nn.Module | Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        every: int = 30,
        *,
        learners: dist.ProcessGroup | DeviceMesh | None = None,
        outer: Outer | None = None,
        decay: float = 1.0,
        delay: int = 0,
        fragments: int = 1,
        **options: Unpack[CommonOptions],
    ) -> None:
        for option, value, least in (("every", every, 1), ("delay", delay, 0), ("fragments", fragments, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{option} {value!r}; expected a number from {least} on")
        if fragments > every or delay > every // fragments:
            raise ValueError(
                f"delay {delay} and fragments {fragments}; expected a delay of up to every // fragments steps, and no more "
                f"fragments than the {every} steps of a round"
            )
        if not 0 <= decay <= 1:
            raise ValueError(f"decay {decay}; expected a number from 0 to 1")
        if unknown := sorted(options.keys() - CommonOptions.__annotations__.keys()):
            raise TypeError(f"{unknown[0]} is not an option of LocalSteps")
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"LocalSteps takes a torch.nn.Module, not {type(model).__name__}")
        if not hasattr(optimizer, "_optimizer_step_post_hooks"):
            # What Accelerate prepares takes no hooks, but has the optimiser inside.
            optimizer = getattr(optimizer, "optimizer", optimizer)
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not trained.intersection(map(id, model.parameters())):
            raise ValueError("the optimizer has no parameter of the model; pass the one that trains it")
        options.setdefault("mode", "on")
        super().__init__(Config(**options))
        self._door = LocalDoor(model, optimizer, learners, self._config, every, outer or Outer(), decay, delay, fragments)
        self._connected(self._door.runtime)

    @property
    def rounds(self) -> int:
        """Rounds that are over."""
        return self._door.rounds

    @property
    def position(self) -> int:
        """Steps since the last round: 0 when one has just ended."""
        return self._door.position

    def end_round(self) -> None:
        """Ends the round now, whatever its number of steps; all learners must call it in the same round. After it all learners
        have the same weights: for the end of training, and before the number of learners changes."""
        self._settled()
        self._door.end_round()

    def stats(self) -> dict[str, Any]:
        """Returns what :meth:`Handle.stats` does, of rounds, and ``every``, ``rounds``, ``local_steps`` and ``position``. The
        compression ratio compares with a dense all-reduce in each local step."""
        door = self._door
        counts = {"every": door.every, "rounds": door.rounds, "local_steps": door.steps, "position": door.position}
        return {**super().stats(), **counts}

    def close(self) -> None:
        """Ends the thread and the connections; learners that wait for this one are told at once. Later steps are taken alone."""
        self._door.close()
        super().close()

    def _settled(self) -> Runtime:
        runtime = self._bound()
        runtime.check()
        self._door.settle()
        self._door.synchronize()
        return runtime


def _connect(
    model: torch.nn.Module, learners: dist.ProcessGroup | DeviceMesh | None, config: Config
) -> tuple[Runtime, list[Local], list[Local]]:
    """Returns a runtime for a model's parameters and buffers, and what is here of each."""
    if not dist.is_initialized():
        raise RuntimeError("learners find each other by torch.distributed: call init_process_group first")
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    is_ddp = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    if learners is None and (is_sharded or is_ddp):
        raise TypeError(WHO.format(inside=FSDP_INSIDE if is_sharded else DDP_INSIDE))
    group = dist.group.WORLD if learners is None else as_group(learners)
    assert group is not None
    module = ddp_inside(model).module if is_ddp else model
    found = _buffers(module, next(module.parameters()).device, small=is_sharded)
    buffers = [(name, local()) for name, local in found]
    if is_sharded:
        exchanged, inside = sharded(model, group, config, buffers)
    else:
        dense = [name for name, buffer in buffers if buffer.dim() < 2]
        exchanged, inside = Model(module, [*trained_parameters(module), *buffers], config, None, dense), None
        if is_ddp and dist.get_world_size(site := ddp_inside(model).process_group) > 1:
            ranks = dist.get_process_group_ranks(site)
            if set(ranks) & set(dist.get_process_group_ranks(group)) != {dist.get_rank()}:
                raise ValueError("DDP averages between learners itself: " + WHO.format(inside=DDP_INSIDE))
            inside = make_node(site, list(range(len(ranks))), exchanged, config, _in_place, differs=False)
    runtime = Runtime(exchanged, group, config, False, _in_place, None, inside, door=LocalDoor)
    weights = exchanged.trained[: len(exchanged.trained) - len(buffers)]
    return runtime, [functools.partial(_local, each) for each in weights], [local for _, local in found]


def _buffers(module: torch.nn.Module, device: torch.device, small: bool) -> list[tuple[str, Local]]:
    """Returns the names and getters of float buffers that belong to the model's state: modules may replace them. Small ones have
    up to one dimension."""
    found: list[tuple[str, Local]] = []
    seen = set()
    for prefix, owner in module.named_modules():
        for key, buffer in owner._buffers.items():
            fits = buffer is not None and buffer.dtype in FORMATS and buffer.device == device
            fits = fits and key not in owner._non_persistent_buffers_set
            if buffer is not None and fits and id(buffer) not in seen and (buffer.dim() < 2 or not small):
                seen.add(id(buffer))
                found.append((clean_name(f"{prefix}.{key}" if prefix else key), functools.partial(owner.get_buffer, key)))
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this process has of a parameter, to be changed in place."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    """Returns a short text that differs if any bit does."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]
