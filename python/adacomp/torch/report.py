"""What a hook says of itself: statistics, text, and scalars for loggers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runtime import Runtime


@dataclass
class Counts:
    """Sums over steps. Bytes are those of compressed steps."""

    plain: int = 0
    flush: int = 0
    compressed: int = 0
    dropped: int = 0
    # Handed to the process group for other learners, padding and headers included.
    bytes_sent: int = 0
    # What a dense ring all-reduce would have sent in the buckets' own formats.
    ring_bytes: float = 0.0
    # What the same exchange would have sent with dense frames.
    frame_bytes: float = 0.0
    # Of the last compressed step.
    last: dict[str, Any] = field(default_factory=dict)

    def steps(self) -> int:
        return self.plain + self.flush + self.compressed

    def add_compressed(self, runtime: Runtime, sent: int, dense: float, elements: int, averaged: bool) -> None:
        """Counts a compressed step, in which `sent` bytes stood for buckets of `dense` bytes and so many elements."""
        self.compressed += 1
        ring = 2 * dense * (runtime.learners - 1) / runtime.learners * runtime.local_steps
        frames = 4 * elements * _copies(runtime)
        self.bytes_sent += sent
        self.ring_bytes += ring
        self.frame_bytes += frames
        self.last = {
            "bytes_sent": sent,
            "compression_ratio": _ratio(ring, sent),
            "frame_ratio": _ratio(frames, sent),
            "averaged": averaged,
            "seconds": dict(zip(("compress", "encode", "wait", "decode"), runtime.exchange.seconds())),
        }

    def compression_ratio(self) -> float | None:
        return _ratio(self.ring_bytes, self.bytes_sent)


def _ratio(dense: float, sent: int) -> float | None:
    return dense / sent if sent else None


def _copies(runtime: Runtime) -> float:
    """Returns how many times a learner sends each element: to each other learner, or to its owner and from there to all."""
    others = runtime.learners - 1
    return others if runtime.strategy == "gather" else 2 * others / runtime.learners


def compressing(runtime: Runtime) -> bool:
    return runtime.auto.compressing if runtime.auto else runtime.config.mode == "on"


def why(runtime: Runtime) -> str:
    if runtime.auto:
        return runtime.auto.reason
    if runtime.config.mode == "auto":
        return "there is one learner, so there is nothing to exchange"
    return f'mode="{runtime.config.mode}"'


def stats(runtime: Runtime) -> dict[str, Any]:
    """Returns what :meth:`AdaCompState.stats` documents."""
    layers, counts = runtime.layer_statistics(), runtime.counts
    treatments = dict(zip(runtime.layout.names, runtime.layout.treatments))
    for name, entry in layers.items():
        entry["treatment"] = treatments[name]
        entry["frame_ratio"] = _ratio(4 * entry["elements"] * _copies(runtime), entry["bytes"])
    return {
        "mode": runtime.config.mode,
        "compressing": compressing(runtime),
        "why": why(runtime),
        "strategy": runtime.strategy,
        "learners": runtime.learners,
        "steps": {"compressed": counts.compressed, "dense": counts.plain + counts.flush, "dropped": counts.dropped},
        "bytes_sent": counts.bytes_sent,
        "compression_ratio": counts.compression_ratio(),
        "frame_ratio": _ratio(counts.frame_bytes, counts.bytes_sent),
        "last": counts.last,
        "layers": layers,
    }


def introduction(runtime: Runtime) -> str:
    """Returns one line for the log."""
    config = runtime.config
    attached = f"AdaComp is attached: mode {config.mode}, {runtime.strategy} between {_learners(runtime)}"
    return "; ".join([attached, *_parameters(runtime)])


def _learners(runtime: Runtime) -> str:
    processes = f" of {runtime.inside.places} processes each" if runtime.inside else ""
    return f"{runtime.learners} learners{processes}"


def unmatched(runtime: Runtime) -> str | None:
    """Returns a warning if patterns of names match no parameter, which is most often a mistake in writing."""
    names = [*runtime.model.layout.names, *runtime.model.others]
    # The native side knows `*` and `?` only.
    patterns = {pattern: pattern.replace("[", "[[]") for pattern in runtime.config.names or ()}
    useless = [repr(pattern) for pattern, form in patterns.items() if not any(fnmatchcase(name, form) for name in names)]
    return f"names: {', '.join(useless)} matches no parameter; there are {', '.join(names[:5])}, ..." if useless else None


def summary(runtime: Runtime) -> str:
    """Returns what it does now, why, and what compression is worth, in three lines or four."""
    counts, config = runtime.counts, runtime.config
    now = f"compresses with {runtime.strategy}" if compressing(runtime) else f"sends {runtime.door.exchanged} dense"
    lines = [
        f"AdaComp {runtime.door.title}, mode {config.mode}: {now}, {_learners(runtime)}",
        f"  why: {why(runtime)}",
        f"  steps: {counts.compressed} compressed, {counts.plain + counts.flush} dense, {counts.dropped} dropped",
    ]
    if ratio := counts.compression_ratio():
        lines.append(
            f"  compression ratio {ratio:.1f}: {counts.bytes_sent:,} bytes sent in compressed steps, "
            f"{counts.ring_bytes:,.0f} by a dense ring all-reduce (frame ratio {counts.frame_bytes / counts.bytes_sent:.1f})"
        )
    return "\n".join(lines)


def describe(runtime: Runtime) -> str:
    """Returns the same, and which parameters are compressed."""
    return "\n  ".join([summary(runtime), *_parameters(runtime)])


def _parameters(runtime: Runtime) -> list[str]:
    """Returns what is sent of the parameters, by treatment."""
    groups: dict[str, list[int]] = {}
    for elements, treatment in zip(runtime.model.layout.elements, runtime.model.layout.treatments):
        groups.setdefault(f"bins of {treatment}" if isinstance(treatment, int) else treatment, []).append(elements)
    lines = [f"{key}: {len(group)} parameters, {sum(group):,} elements" for key, group in sorted(groups.items())]
    if runtime.model.others:
        lines.append(f"by the process group's own sum: {', '.join(runtime.model.others)}")
    if runtime.kept_by_door:
        lines.insert(0, runtime.kept_by_door.describe())
    if runtime.moments:
        lines.insert(0, "local_adam: each learner's Adam comes first, so the optimiser must be SGD without momentum")
    return lines


def scalars(runtime: Runtime) -> dict[str, float]:
    """Returns what :meth:`AdaCompState.scalars` documents."""
    last = runtime.counts.last
    found: dict[str, float | None] = {"compressing": compressing(runtime), "dropped_steps": runtime.counts.dropped}
    found |= {key: last.get(key) for key in ("bytes_sent", "compression_ratio", "frame_ratio")}
    seconds = {**last.get("seconds", {}), "held_up": last.get("held_up")}
    found |= {f"seconds/{part}": value for part, value in seconds.items()}
    return {f"adacomp/{key}": float(value) for key, value in found.items() if value is not None}


def logger_of(writer: Any) -> Callable[[dict[str, float], int], object]:
    """Returns how a writer takes numbers and the step that they are of: a TensorBoard writer, or whatever has
    ``log_metrics(numbers, step=)``, as MLflow and Lightning's loggers, or ``log(numbers, step=)``, as W&B and Accelerate."""
    if callable(add_scalar := getattr(writer, "add_scalar", None)):
        return lambda numbers, step: [add_scalar(name, value, step) for name, value in numbers.items()]
    for name in ("log_metrics", "log"):
        method = getattr(writer, name, None)
        if callable(method) and _takes_step(method):
            return functools.partial(_log, method)
    raise TypeError(f"{type(writer).__name__} has neither add_scalar, nor log_metrics(numbers, step=), nor log(numbers, step=)")


def _takes_step(method: Callable[..., object]) -> bool:
    try:
        parameters = inspect.signature(method).parameters.values()
    except ValueError:
        # It is not written in Python.
        return True
    return any(each.name == "step" or each.kind is each.VAR_KEYWORD for each in parameters)


def _log(method: Callable[..., object], numbers: dict[str, float], step: int) -> None:
    method(numbers, step=step)
