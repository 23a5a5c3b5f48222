"""How gradients, or updates, travel: AdaComp and its relatives, by the library that users run. Others are in `peers.py`."""

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from adacomp.research import Layout, Learners
from adacomp.torch import Config
from adacomp.torch.runtime import kinds
from torch import Tensor, nn

from reproduction.studies import CODES, ring_bytes

Gradients = Sequence[Tensor]

# The bytes of a frame's header.
FRAME_BYTES = 36


class Scheme:
    """All learners' side of every exchange, with what it takes."""

    # Whether the average is what weights follow, with no optimiser after it.
    makes_updates = False

    def __init__(self, model: nn.Module, options: argparse.Namespace) -> None:
        self.options = options
        self.named = list(model.named_parameters())
        self.kinds = kinds(model, self.named)
        self.layout = self.layout_of(options.matrix_bin)
        # Since the start: bytes that a learner sent and received, and those of its frame by kind of layer and by code.
        self.traffic, self.frames = [0.0, 0.0], 0
        self.bytes = {kind: dict.fromkeys(CODES, 0.0) for kind in ("conv", "matrix", "vector")}

    def layout_of(self, matrix_bin: int | str) -> Layout:
        options = self.options
        conv: int | str = options.conv_bin
        matrix: int | str = matrix_bin
        if options.scheme == "top-k":
            conv = matrix = f"top-k {options.top_percent}"
        soft_threshold = 1.0 if options.scheme == "local-selection" else options.soft_threshold
        parameters = [(name, tuple(parameter.shape), kind) for (name, parameter), kind in zip(self.named, self.kinds)]
        policy = {} if options.vector_bin is None else {"vector": options.vector_bin, "min_elements": 1}
        return Layout(parameters, conv=conv, matrix=matrix, soft_threshold=soft_threshold, scale=options.scale, **policy)

    def exchange(self, step: int, gradients: Sequence[Gradients]) -> list[Tensor] | None:
        """Returns the average of what each learner has, or None if one is not finite."""
        raise NotImplementedError

    def decay(self, factor: float) -> None:
        """Multiplies what all learners keep."""
        raise NotImplementedError

    def residual_norm(self) -> float:
        """Returns the norm of what the first learner keeps."""
        raise NotImplementedError

    def count_bytes(self, traffic: tuple[float, float], frame: Sequence[dict[str, float]]) -> None:
        """Adds up what an exchange took: bytes sent and received, and those of a frame by parameter and code."""
        self.frames += 1
        self.traffic = [sum(pair) for pair in zip(self.traffic, traffic)]
        for kind, sizes in zip(self.kinds, frame):
            for code, total in self.bytes[kind].items():
                self.bytes[kind][code] = total + sizes[code]

    def count_reduced(self, element_bytes: int) -> None:
        """Adds an all-reduce of something that all elements have."""
        sizes = [element_bytes * elements for elements in self.layout.elements]
        sent = ring_bytes(sum(sizes) / 4, self.options.learners)
        self.count_bytes((sent, sent), [dict.fromkeys(CODES, float(size)) for size in sizes])

    def frame_ratios(self, steps: int) -> dict[str, dict[str, float | None]]:
        """Returns how many times smaller frames are than dense f32, by code and kind of layer, with dense layers and headers."""

        def ratio(code: str, wanted: tuple[str, ...]) -> float | None:
            elements = sum(count for kind, count in zip(self.kinds, self.layout.elements) if kind in wanted)
            taken = sum(self.bytes[kind][code] for kind in wanted)
            if len(wanted) == 3 and code != "floor":
                taken += FRAME_BYTES * self.frames
            return 4 * elements * steps / taken if taken else None

        wanted = {"overall": ("conv", "matrix", "vector"), "conv": ("conv",), "matrix": ("matrix",)}
        return {code: {name: ratio(code, some) for name, some in wanted.items()} for code in CODES}

    def count(self) -> dict[str, dict[str, int]]:
        """Returns the elements by kind of layer, those of compressed layers and those of dense ones."""
        counts: dict[str, dict[str, int]] = {}
        for kind, elements, treatment in zip(self.kinds, self.layout.elements, self.layout.treatments):
            of_kind = counts.setdefault(kind, {"compressed": 0, "dense": 0})
            of_kind["dense" if treatment == "dense" else "compressed"] += elements
        return counts

    def result(self, steps: int) -> dict[str, Any]:
        sent, received = (total / max(1, steps) for total in self.traffic)
        ratios = {"frame_ratios": self.frame_ratios(steps), "elements": self.count()}
        return ratios | {"bytes_sent": sent, "bytes_received": received}

    def state(self) -> dict[str, Any]:
        return {"traffic": self.traffic, "frames": self.frames, "bytes": self.bytes}

    def load(self, state: dict[str, Any]) -> None:
        self.traffic, self.frames, self.bytes = state["traffic"], state["frames"], state["bytes"]


class Dense(Scheme):
    """An all-reduce: of local steps, where it does not come in each step."""

    def __init__(self, model: nn.Module, options: argparse.Namespace, steps: int) -> None:
        super().__init__(model, options)

    def exchange(self, step: int, gradients: Sequence[Gradients]) -> list[Tensor] | None:
        average = dense_average(gradients)
        if not all(bool(layer.isfinite().all()) for layer in average):
            return None
        self.count_reduced(4)
        return average

    def decay(self, factor: float) -> None:
        pass

    def residual_norm(self) -> float:
        return 0.0


class Compressed(Scheme):
    """AdaComp, Local Selection and top-k: to the bit what as many processes send."""

    def __init__(self, model: nn.Module, options: argparse.Namespace, steps: int) -> None:
        super().__init__(model, options)
        self.config = Config(matrix=options.matrix_bin, bin_warm_up=round(steps * options.bin_warm_up))
        self.bin = options.matrix_bin
        self.learners = self.learners_with(self.bin)
        self.average = [torch.empty_like(parameter) for _, parameter in self.named]

    def learners_with(self, matrix_bin: int | str) -> Learners:
        options = self.options
        return Learners(self.layout_of(matrix_bin), options.learners, options.strategy, owner_divisor=options.owner_divisor)

    def exchange(self, step: int, gradients: Sequence[Gradients]) -> list[Tensor] | None:
        if self.config.matrix_at(step) != self.bin:
            state, self.bin = self.learners.save(), self.config.matrix_at(step)
            self.learners = self.learners_with(self.bin)
            self.learners.load(state)
        for learner, gradient in enumerate(gradients):
            self.learners.submit(learner, arrays(gradient))
        if self.learners.finish(arrays(self.average)) is not None:
            return None
        self.count_bytes(self.learners.traffic(), list(self.learners.sizes().values()))
        return self.average

    def decay(self, factor: float) -> None:
        if factor != 1:
            self.learners.decay(factor)

    def residuals(self) -> list[list[Tensor | None]]:
        """Returns what each learner keeps of each parameter, None for what is sent dense. They are copies."""
        return [tensors(residuals, [name for name, _ in self.named]) for residuals, _ in self.learners.save()]

    def residual_norm(self) -> float:
        return math.hypot(*(norm for norm in self.learners.residual_norms() if norm is not None))

    def state(self) -> dict[str, Any]:
        return super().state() | {"learners": self.learners.save(), "bin": self.bin}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.bin = state["bin"]
        self.learners = self.learners_with(self.bin)
        self.learners.load(state["learners"])


def dense_average(gradients: Sequence[Gradients]) -> list[Tensor]:
    return [sum(layer[1:], layer[0]) / len(layer) for layer in zip(*gradients)]


def clipped(gradients: Gradients, limit: float | None) -> Gradients:
    """Scales gradients down to a norm of at most the limit."""
    if limit is None:
        return gradients
    norm = math.hypot(*(gradient.norm().item() for gradient in gradients))
    return [gradient * (limit / norm) for gradient in gradients] if norm > limit else gradients


def arrays(gradients: Gradients) -> list[Any]:
    """Returns the gradients as arrays that share their memory."""
    return [gradient.contiguous().numpy() for gradient in gradients]


def tensors(file: bytes, names: list[str]) -> list[Tensor | None]:
    """Returns the tensors of a safetensors file of f32 by name, None for those that it has not."""
    length = int.from_bytes(file[:8], "little")
    header, values = json.loads(file[8 : 8 + length]), torch.frombuffer(bytearray(file[8 + length :]), dtype=torch.float32)

    def tensor(name: str) -> Tensor | None:
        if name not in header:
            return None
        start, end = header[name]["data_offsets"]
        return values[start // 4 : end // 4].view(header[name]["shape"])

    return [tensor(name) for name in names]
