"""What a hook keeps, to and from dicts of tensors.

Keys name who has saved, so that no two processes have the same: `learner 0 of 2/residual.fc.weight`. Of a learner of several
processes each saves its parts of the parameters: `learner 0 of 2, place 1 of 2/residual.fc.weight[500:1000]`, by elements as they
lie in the parameter's memory. Keys without such a prefix are those of consolidated states, and of older versions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy
import torch
from numpy.typing import NDArray

from .config import Strategy

if TYPE_CHECKING:
    from .runtime import Model, Runtime

TEXT = "adacomp"
# What `strategy="auto"` stands for, and between how many learners.
STRATEGY = "strategy"
CHOICES: tuple[Strategy, ...] = ("gather", "reduce")
RESIDUAL, OWNER = "residual.", "owner."
# Those of `local_adam`, by parameter: of how many gradients they are, and both.
STEPS, FIRST, SECOND = "adam.steps.", "adam.first.", "adam.second."
# That residuals of updates have the learning rate in them.
RATE = "adam.rate"
# Those of local steps: how many, and where in a round; weights and the outer momentum, both the same on all learners; and what
# this learner has submitted of its weights to a round that is under way.
LOCAL_STEPS, SHARED, MOMENTUM, SUBMITTED = "local.steps", "shared.", "momentum.", "submitted."
# The length of texts, whatever they say: distributed checkpoints load into tensors of the same size.
TEXT_BYTES = 96

PREFIX = re.compile(r"learner \d+ of \d+(?:, place (\d+) of (\d+))?/")
PART = re.compile(r"(.*)\[(\d+):(\d+)\]")
SAVED_BY = re.compile(r".*, learner (\d+) of (\d+), step \d+")

Tensors = Mapping[str, torch.Tensor]
Arrays = dict[str, NDArray[numpy.float32]]
# Residuals by name, what an owner keeps by name, and a text that says who saved them.
Native = tuple[Arrays, Arrays, str]


# What wrappers of modules add to the names of parameters: ``torch.compile`` and activation checkpointing.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def clean_name(name: str) -> str:
    """Returns a parameter's name as it is without wrappers: the one by which residuals are kept."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@dataclass
class Range:
    """Elements of something that is kept of a parameter, flat; or the number of its gradients."""

    kind: str
    number: int
    start: int
    end: int
    values: torch.Tensor


# What several processes have saved, by kind and number of the parameter.
Index = dict[tuple[str, int], list[Range]]
# Returns what was saved of a kind, a number of a parameter and its elements from one to another, if it was.
Find = Callable[[str, int, int, int], torch.Tensor | None]


class Kept(Protocol):
    """What a door keeps of parameters, beside residuals."""

    # The kinds that are the same on all learners.
    shared_kinds: tuple[str, ...]

    def describe(self) -> str:
        """Returns what it does, for the log."""

    def ranges(self) -> list[tuple[int, int, int]]:
        """Returns the number, first element and end of each range that it keeps something of."""

    def save(self, consolidate: bool) -> tuple[torch.Tensor, list[Range]]:
        """Returns counts, and what is kept: all that this learner has, or what all have."""

    def load(self, counts: torch.Tensor, find: Find, own: bool) -> None:
        """Takes over what this learner has saved, or any."""


# Saving.


def save(runtime: Runtime, consolidate: bool) -> dict[str, torch.Tensor]:
    runtime.path.to_host()
    try:
        ranges = [*_residuals(runtime, consolidate), *_moments(runtime)]
    finally:
        runtime.path.to_device()
    counts = None
    if runtime.kept_by_door:
        counts, kept = runtime.kept_by_door.save(consolidate)
        ranges += kept
    if consolidate:
        ranges = list(_consolidated(runtime, ranges))
    exchange, learner, learners = runtime.exchange, runtime.transport.learner, runtime.learners
    prefix = "" if consolidate else _prefix(runtime)
    state = {prefix + TEXT: _from_text(exchange.saved_by(0, 1) if consolidate else exchange.saved_by(learner, learners))}
    if runtime.config.strategy == "auto":
        state[prefix + STRATEGY] = _from_text(_chosen(runtime.strategy, learners))
    if runtime.moments and runtime.moments.rate:
        state[prefix + RATE] = torch.ones(1)
    if counts is not None:
        state[prefix + LOCAL_STEPS] = counts
    for each in ranges:
        name, parameter = runtime.model.layout.names[each.number], runtime.model.parameters[each.number]
        if each.kind == OWNER or each.end - each.start < parameter.numel():
            name += f"[{each.start}:{each.end}]"
        elif each.kind != STEPS:
            each.values = _shaped(each.values, parameter)
        state[prefix + each.kind + name] = each.values
    return state


def _prefix(runtime: Runtime) -> str:
    place = f", place {runtime.inside.place} of {runtime.inside.places}" if runtime.inside else ""
    return f"learner {runtime.transport.learner} of {runtime.learners}{place}/"


def _residuals(runtime: Runtime, consolidate: bool) -> Iterator[Range]:
    """Returns what this process keeps, as a learner and as an owner; or both together, such that the mean over learners is what
    counts."""
    residuals, owner, _ = ({}, {}, "") if consolidate else runtime.exchange.save()
    for layer, (name, (number, start, end)) in enumerate(zip(runtime.layout.names, runtime.parts)):
        values = runtime.exchange.kept(layer) if consolidate else residuals.get(name)
        if values is not None:
            yield Range(RESIDUAL, number, start, end, torch.from_numpy(values).reshape(-1))
        if name in owner:
            first, last = runtime.layout.shard(layer, runtime.transport.learner, runtime.learners)
            yield Range(OWNER, number, start + first, start + last, torch.from_numpy(owner[name]))


def _moments(runtime: Runtime) -> Iterator[Range]:
    for layer, (number, start, end) in enumerate(runtime.parts if runtime.moments else ()):
        zeros = torch.zeros(end - start)
        count, first, second = runtime.moments.kept.get(layer, (0, zeros, zeros)) if runtime.moments else (0, zeros, zeros)
        yield Range(STEPS, number, start, end, torch.tensor([count]))
        yield Range(FIRST, number, start, end, first.to("cpu", copy=True))
        yield Range(SECOND, number, start, end, second.to("cpu", copy=True))


def _consolidated(runtime: Runtime, ranges: Sequence[Range]) -> Iterator[Range]:
    """Returns the average over learners, of whole parameters."""
    own = {(each.kind, each.number): each for each in ranges}
    treatments = runtime.model.layout.treatments
    shared = runtime.kept_by_door.shared_kinds if runtime.kept_by_door else ()
    for number, parameter in enumerate(runtime.model.parameters):
        kinds = [RESIDUAL] if isinstance(treatments[number], int) else []
        for kind in kinds + ([FIRST, SECOND] if runtime.moments else []) + list(shared):
            whole = torch.zeros(parameter.numel())
            if part := own.get((kind, number)):
                values = part.values if kind in shared else _sum(runtime, part.values) / runtime.learners
                # What all places have whole, the first one gives.
                if kind not in shared or part.values.numel() < whole.numel() or not runtime.inside or not runtime.inside.place:
                    whole[part.start : part.end] = values
            if runtime.inside:
                runtime.inside.transport.wait(runtime.inside.transport.start_sum(whole))
            yield Range(kind, number, 0, parameter.numel(), whole)
        if runtime.moments:
            part = own.get((STEPS, number))
            steps = [float(_sum(runtime, part.values) // runtime.learners)] if part else [0.0]
            steps = runtime.inside.combine(steps, max) if runtime.inside else steps
            yield Range(STEPS, number, 0, parameter.numel(), torch.tensor([int(steps[0])]))


def _sum(runtime: Runtime, tensor: torch.Tensor) -> torch.Tensor:
    runtime.transport.wait(runtime.transport.start_sum(tensor))
    return tensor


# Loading.


@dataclass
class Piece:
    """What one process has saved, by kind and by the name of a parameter or part."""

    by: str
    place: int
    places: int
    strategy: str
    has_rate: bool
    # Of local steps, if it is of such.
    counts: torch.Tensor | None
    tensors: dict[str, dict[str, torch.Tensor]]

    def learner(self) -> tuple[int, int]:
        """Returns who saved it, of how many."""
        match = SAVED_BY.fullmatch(self.by)
        # What is wrong with the text comes out when it is loaded.
        return (int(match[1]), int(match[2])) if match else (0, 1)

    def ranges(self, model: Model) -> Iterator[Range]:
        """Returns its parts of parameters that the model has."""
        numbers = {name: number for number, name in enumerate(model.layout.names)}
        for kind, tensors in self.tensors.items():
            for name, values in tensors.items():
                part = None if name in numbers else PART.fullmatch(name)
                number = numbers.get(part[1] if part else name)
                if number is None:
                    continue
                parameter = model.parameters[number]
                start, end = (int(part[2]), int(part[3])) if part else (0, parameter.numel())
                if kind == OWNER and not part:
                    start, end = model.layout.shard(number, *self.learner())
                if kind not in (OWNER, STEPS) and not part and values.shape == parameter.shape:
                    values = _flat(values, parameter)
                if kind == STEPS or tuple(values.shape) == (end - start,):
                    yield Range(kind, number, start, end, values)

    def native(self, runtime: Runtime) -> Native:
        """Returns it as it is, for the same parts of parameters."""
        parameters = dict(zip(runtime.model.layout.names, runtime.model.parameters))
        layers = {runtime.model.layout.names[number]: name for name, (number, _, _) in zip(runtime.layout.names, runtime.parts)}
        residuals, owner = {}, {}
        for name, values in self.tensors.get(RESIDUAL, {}).items():
            parameter = parameters.get(name)
            flat = values if parameter is None or parameter.shape != values.shape else _flat(values, parameter)
            residuals[name] = flat.contiguous().numpy().reshape(tuple(values.shape))
        for name, values in self.tensors.get(OWNER, {}).items():
            part = None if name in layers else PART.fullmatch(name)
            owner[layers.get(part[1] if part else name, name)] = values.contiguous().numpy()
        return residuals, owner, self.by


def load(runtime: Runtime, states: Sequence[Tensors], strict: bool) -> Strategy:
    """Returns the strategy to go on with: what `strategy="auto"` stood for between as many learners, whatever this version would
    choose. Without `strict`, parameters that no state has begin with nothing, and what the model does not have is left out."""
    pieces = [piece for state in states for piece in _pieces(state)]
    here = (runtime.inside.place, runtime.inside.places) if runtime.inside else (0, 1)
    same_place = [piece for piece in pieces if (piece.place, piece.places) == here]
    names = set(runtime.layout.names)
    if not runtime.inside:
        fits = len(same_place) == len(pieces)
    else:
        fits = bool(same_place) and all(names.issuperset(piece.tensors.get(RESIDUAL, ())) for piece in same_place)
    native = [piece.native(runtime) for piece in same_place] if fits and strict else _assembled(runtime, pieces, strict)
    learner = (runtime.transport.learner, runtime.learners)
    own = [piece for piece in same_place if fits and piece.learner() == learner]
    moments = _read_moments(runtime, own or pieces, strict)
    counts = pieces[0].counts
    if (counts is None) != (runtime.kept_by_door is None):
        raise ValueError("residuals of local steps are of weights, others of gradients: load the state with what has saved it")
    if runtime.kept_by_door:
        first = min(piece.learner() for piece in pieces)
        of_one = [piece for piece in pieces if piece.learner() == (learner if own else first)]
        # That of this place is last, and so counts where others have the same elements.
        index = _index(runtime, sorted(of_one, key=lambda piece: (piece.place, piece.places) == here))

    def find(kind: str, number: int, start: int, end: int) -> torch.Tensor | None:
        values, found = _collect(index, kind, number, start, end)
        if found < end - start and kind == SHARED and strict:
            name = runtime.model.layout.names[number]
            raise ValueError(f"{kind}{name}[{start}:{end}] is missing in a state, or has another shape")
        return values if found == end - start else None

    if runtime.kept_by_door:
        for part in runtime.kept_by_door.ranges():
            # What is missing is told before anything has changed.
            find(SHARED, *part)
    runtime.exchange.load(native)
    runtime.path.to_device()
    if runtime.moments:
        runtime.moments.kept = moments
    if runtime.kept_by_door and counts is not None:
        runtime.kept_by_door.load(own[0].counts if own and own[0].counts is not None else counts, find, bool(own))
    chosen = (own or pieces)[0].strategy if runtime.config.strategy == "auto" else ""
    return next((each for each in CHOICES if chosen == _chosen(each, runtime.learners)), runtime.strategy)


def _pieces(state: Tensors) -> Iterator[Piece]:
    """Returns what processes have saved in a dict: most often one."""
    by_prefix: dict[str, dict[str, torch.Tensor]] = {}
    for key, values in state.items():
        prefix = match[0] if (match := PREFIX.match(key)) else ""
        by_prefix.setdefault(prefix, {})[clean_name(key.removeprefix(prefix))] = values.detach().cpu()
    for prefix, tensors in by_prefix.items() or [("", {})]:
        if TEXT not in tensors:
            raise ValueError(f"not a state of an AdaComp hook: it has no {TEXT!r}")
        match = PREFIX.fullmatch(prefix)
        place, places = (int(match[1]), int(match[2])) if match and match[1] else (0, 1)
        kinds: dict[str, dict[str, torch.Tensor]] = {}
        for key, values in tensors.items():
            for kind in (RESIDUAL, OWNER, STEPS, FIRST, SECOND, SHARED, MOMENTUM, SUBMITTED):
                if key.startswith(kind):
                    kinds.setdefault(kind, {})[key.removeprefix(kind)] = values
        strategy, counts = _text(tensors, STRATEGY), tensors.get(LOCAL_STEPS)
        yield Piece(_text(tensors, TEXT), place, places, strategy, RATE in tensors, counts, kinds)


def _assembled(runtime: Runtime, pieces: Sequence[Piece], strict: bool) -> list[Native]:
    """Returns the residuals of all learners that have saved, for the parts of parameters that are here. What owners kept is
    added, which conserves it, because it is of the average."""
    natives: list[Native] = []
    for learner in sorted({piece.learner() for piece in pieces}):
        own = [piece for piece in pieces if piece.learner() == learner]
        index = _index(runtime, own)
        residuals, missing = {}, []
        for name, part, treatment in zip(runtime.layout.names, runtime.parts, runtime.layout.treatments):
            if isinstance(treatment, int):
                values, found = _collect(index, RESIDUAL, *part)
                owned, _ = _collect(index, OWNER, *part)
                parameter = runtime.model.parameters[part[0]]
                shape = parameter.shape if values.numel() == parameter.numel() else values.shape
                residuals[name] = values.add_(owned, alpha=learner[1]).reshape(shape).numpy()
                missing += [name] if found < values.numel() else []
        saved = {PART.sub(r"\1", name) for piece in own for name in piece.tensors.get(RESIDUAL, ())}
        extra = sorted(saved.difference(runtime.model.layout.names))
        if strict and (missing or extra):
            raise ValueError(
                f"saved residuals of learner {learner[0]} do not fit the model: missing or reshaped {missing}; extra {extra}; "
                "give the states of all processes"
            )
        natives.append((residuals, {}, own[0].by))
    return natives


def _index(runtime: Runtime, pieces: Sequence[Piece]) -> Index:
    index: Index = {}
    for piece in pieces:
        for each in piece.ranges(runtime.model):
            index.setdefault((each.kind, each.number), []).append(each)
    return index


def _collect(index: Index, kind: str, number: int, start: int, end: int) -> tuple[torch.Tensor, int]:
    """Returns these elements of what is kept of a parameter, and how many of them were there."""
    values, found, covered = torch.zeros(end - start), 0, start
    # Several processes may have the same elements.
    for each in sorted(index.get((kind, number), ()), key=lambda each: each.start):
        first, last = max(start, each.start), min(end, each.end)
        if last > first:
            values[first - start : last - start] = each.values[first - each.start : last - each.start]
            found += max(0, last - max(first, covered))
            covered = max(covered, last)
    return values, found


def _read_moments(runtime: Runtime, pieces: Sequence[Piece], strict: bool) -> dict[int, tuple[int, torch.Tensor, torch.Tensor]]:
    """Returns, by layer, those of one learner, or the average of those of several."""
    found = any(STEPS in piece.tensors for piece in pieces)
    if found and not runtime.moments:
        raise ValueError("the state has Adam's moments: attach with local_adam=adacomp.torch.LocalAdam()")
    if runtime.moments and not found:
        raise ValueError("the state has no moments of Adam, and its residuals are of gradients: attach without local_adam")
    if runtime.moments and (runtime.moments.rate is None) == any(piece.has_rate for piece in pieces):
        raise ValueError("residuals of the state were made otherwise: attach with optimizer=... as when it was saved, or without")
    moments = {}
    by_learner = {learner: [piece for piece in pieces if piece.learner() == learner] for learner in map(Piece.learner, pieces)}
    indices = [_index(runtime, own) for own in by_learner.values()] if found else []
    for layer, part in enumerate(runtime.parts if found else ()):
        steps = [int(each.values) for index in indices for each in index.get((STEPS, part[0]), ())]
        means = []
        for kind in (FIRST, SECOND):
            collected = [_collect(index, kind, *part) for index in indices]
            if not steps or any(found < values.numel() for values, found in collected):
                if strict:
                    raise ValueError(f"{kind}{runtime.layout.names[layer]} is missing in a state, or has another shape")
                steps = [0]
            means.append(torch.stack([values for values, _ in collected]).mean(0).to(runtime.device))
        if max(steps):
            moments[layer] = (max(steps), means[0], means[1])
    return moments


# Texts and shapes.


def _chosen(strategy: str, learners: int) -> str:
    return f"{strategy} between {learners} learners"


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode().ljust(TEXT_BYTES)), dtype=torch.uint8)


def _text(state: Tensors, key: str) -> str:
    return bytes(state[key].tolist()).decode(errors="replace").rstrip(" ") if key in state else ""


def _shaped(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns values that lie as in a bucket, with a parameter's shape."""
    return flat.as_strided(parameter.shape, strides(parameter)).contiguous()


def _flat(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Does the reverse."""
    stored = torch.empty_strided(parameter.shape, strides(parameter), dtype=torch.float32).copy_(values)
    return stored.as_strided((parameter.numel(),), (1,))


def strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns how a parameter's elements lie in buckets: as in its memory if they fill a piece of that, otherwise in order."""
    # PyTorch gives a new tensor the same strides only if they do.
    kept = torch.empty_like(parameter, device="meta").stride()
    return kept if kept == parameter.stride() else torch.empty(parameter.shape, device="meta").stride()
