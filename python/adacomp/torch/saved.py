"""What a hook keeps, to and from dicts of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy
import torch
from numpy.typing import NDArray

from .config import Strategy

if TYPE_CHECKING:
    from .runtime import Runtime

TEXT = "adacomp"
# What `strategy="auto"` stands for, and between how many learners.
STRATEGY = "strategy"
CHOICES: tuple[Strategy, ...] = ("gather", "reduce")
RESIDUAL, OWNER = "residual.", "owner."
# Those of `local_adam`, by parameter: of how many gradients they are, and both.
STEPS, FIRST, SECOND = "adam.steps.", "adam.first.", "adam.second."
# That residuals of updates have the learning rate in them.
RATE = "adam.rate"

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


def save(runtime: Runtime, consolidate: bool) -> dict[str, torch.Tensor]:
    runtime.path.to_host()
    try:
        residuals, owner, text = _consolidated(runtime) if consolidate else runtime.exchange.save()
    finally:
        runtime.path.to_device()
    state = {TEXT: _from_text(text)}
    if runtime.config.strategy == "auto":
        state[STRATEGY] = _from_text(_chosen(runtime.strategy, runtime.learners))
    for name, parameter in zip(runtime.layout.names, runtime.parameters):
        if name in residuals:
            state[RESIDUAL + name] = _shaped(torch.from_numpy(residuals[name]).reshape(-1), parameter)
    # Shards of parameters are flat.
    state.update({OWNER + name: torch.from_numpy(values) for name, values in owner.items()})
    if runtime.moments:
        state.update(_save_moments(runtime, consolidate))
    return state


def load(runtime: Runtime, states: Sequence[Tensors]) -> None:
    parameters = dict(zip(runtime.layout.names, runtime.parameters))
    read = [_read(state, parameters) for state in states]
    here = _saver(runtime.exchange.saved_by(runtime.transport.learner, runtime.learners))
    own = [state for state, (_, _, text) in zip(states, read) if _saver(text) == here]
    moments = _read_moments(runtime, own or states)
    runtime.exchange.load(read)
    if runtime.config.strategy == "auto":
        # As many learners as before keep to what was chosen then, whatever this version would choose.
        chosen = _text(states[0], STRATEGY)
        for strategy in CHOICES:
            if chosen == _chosen(strategy, runtime.learners) and strategy != runtime.strategy:
                runtime.connect(strategy)
                runtime.exchange.load(read)
    runtime.path.to_device()
    if runtime.moments:
        runtime.moments.kept = moments


def _chosen(strategy: str, learners: int) -> str:
    return f"{strategy} between {learners} learners"


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _text(state: Tensors, key: str) -> str:
    return bytes(state[key].tolist()).decode(errors="replace") if key in state else ""


def _saver(text: str) -> str:
    """Returns a state's text without the step."""
    return text.rpartition(", step ")[0]


def _read(state: Tensors, parameters: Mapping[str, torch.nn.Parameter]) -> Native:
    if TEXT not in state:
        raise ValueError(f"not a state of an AdaComp hook: it has no {TEXT!r}")
    residuals, owner = {}, {}
    for key, values in state.items():
        key, values = clean_name(key), values.detach().cpu()
        if key.startswith(RESIDUAL):
            name = key.removeprefix(RESIDUAL)
            parameter = parameters.get(name)
            flat = values if parameter is None or parameter.shape != values.shape else _flat(values, parameter)
            residuals[name] = flat.contiguous().numpy().reshape(tuple(values.shape))
        elif key.startswith(OWNER):
            owner[key.removeprefix(OWNER)] = values.contiguous().numpy()
    return residuals, owner, _text(state, TEXT)


def _consolidated(runtime: Runtime) -> Native:
    """Returns the average over learners of all that they keep, as the state of one learner alone."""
    residuals = {}
    for number, (name, parameter) in enumerate(zip(runtime.layout.names, runtime.parameters)):
        values = runtime.exchange.kept(number)
        if values is not None:
            total = _sum(runtime, torch.from_numpy(values))
            residuals[name] = (total / runtime.learners).numpy().reshape(tuple(parameter.shape))
    return residuals, {}, runtime.exchange.saved_by(0, 1)


def _sum(runtime: Runtime, tensor: torch.Tensor) -> torch.Tensor:
    runtime.transport.wait(runtime.transport.start_sum(tensor))
    return tensor


def _save_moments(runtime: Runtime, consolidate: bool) -> dict[str, torch.Tensor]:
    """Returns this learner's, or the average of all learners'."""
    assert runtime.moments is not None
    state = {RATE: torch.ones(1)} if runtime.moments.groups else {}
    for number, (name, parameter) in enumerate(zip(runtime.layout.names, runtime.parameters)):
        zeros = torch.zeros(parameter.numel(), dtype=torch.float32)
        count, *both = runtime.moments.kept.get(number) or (0, zeros, zeros)
        both = [moment.to("cpu", copy=True) for moment in both]
        steps = torch.tensor([count])
        if consolidate:
            steps = _sum(runtime, steps) // runtime.learners
            both = [_sum(runtime, moment) / runtime.learners for moment in both]
        state[STEPS + name] = steps
        state |= {key + name: _shaped(moment, parameter) for key, moment in zip((FIRST, SECOND), both)}
    return state


def _read_moments(runtime: Runtime, states: Sequence[Tensors]) -> dict[int, tuple[int, torch.Tensor, torch.Tensor]]:
    """Returns, by number of the parameter, those of one state, or the average of those of several."""
    found = any(key.startswith(STEPS) for state in states for key in state)
    if found and not runtime.moments:
        raise ValueError("the state has Adam's moments: attach with local_adam=adacomp.torch.LocalAdam()")
    if runtime.moments and not found:
        raise ValueError("the state has no moments of Adam, and its residuals are of gradients: attach without local_adam")
    if runtime.moments and (runtime.moments.groups is None) == any(RATE in state for state in states):
        raise ValueError("residuals of the state were made otherwise: attach with optimizer=... as when it was saved, or without")
    moments = {}
    for number, (name, parameter) in enumerate(zip(runtime.layout.names, runtime.parameters) if found else ()):
        for key in (STEPS, FIRST, SECOND):
            shape = (1,) if key == STEPS else tuple(parameter.shape)
            for state in states:
                if key + name not in state or tuple(state[key + name].shape) != shape:
                    raise ValueError(f"{key}{name} is missing in a state, or has another shape than {shape}")
        steps = max(int(state[STEPS + name]) for state in states)
        if steps:
            first, second = (
                torch.stack([_flat(state[key + name].cpu(), parameter) for state in states]).mean(0) for key in (FIRST, SECOND)
            )
            moments[number] = (steps, first.to(parameter.device), second.to(parameter.device))
    return moments


def _shaped(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns values that lie as in a bucket, with a parameter's shape."""
    return flat.as_strided(parameter.shape, _strides(parameter)).contiguous()


def _flat(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Does the reverse."""
    stored = torch.empty_strided(parameter.shape, _strides(parameter), dtype=torch.float32).copy_(values)
    return stored.as_strided((parameter.numel(),), (1,))


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns how a parameter's elements lie in buckets: as in its memory if they fill a piece of that, otherwise in order."""
    # PyTorch gives a new tensor the same strides only if they do.
    strides = torch.empty_like(parameter, device="meta").stride()
    return strides if strides == parameter.stride() else torch.empty(parameter.shape, device="meta").stride()
