"""Schemes of others, each by the rules of its authors, to be trained beside AdaComp. Messages are counted, not made."""

import argparse
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from adacomp.torch.moments import Moments
from torch import Tensor, nn

from reproduction.schemes import Gradients, Scheme, clipped, dense_average
from reproduction.studies import CODES


class Peer(Scheme):
    """What all have in common: layers one by one, with something that each learner keeps of each."""

    # Whether it treats all layers alike, or leaves those dense that AdaComp leaves dense.
    all_layers = False
    # Whether messages can be summed on their way, so that an all-reduce carries them, or each learner gets all of them.
    is_reduced = True

    def __init__(self, model: nn.Module, options: argparse.Namespace, steps: int) -> None:
        super().__init__(model, options)
        self.steps = steps
        # By name and number of the layer; what learners keep apart has their number as first dimension.
        self.kept: dict[tuple[str, int], Tensor] = {}

    def layer(self, step: int, number: int, gradients: Tensor) -> tuple[Tensor, float]:
        """Returns what arrives of a layer, from the gradients of all learners, and the bytes of a message."""
        raise NotImplementedError

    @torch.no_grad()
    def exchange(self, step: int, gradients: Sequence[Gradients]) -> list[Tensor] | None:
        if not all(bool(layer.isfinite().all()) for gradient in gradients for layer in gradient):
            return None
        if self.makes_updates:
            # No optimiser comes after it that could limit the average.
            gradients = [clipped(gradient, self.options.clip) for gradient in gradients]
        average, frame, sent = dense_average(gradients), [], 0.0
        others, learners = self.options.learners - 1, self.options.learners
        for number, treatment in enumerate(self.layout.treatments):
            size, is_reduced = 4.0 * average[number].numel(), True
            if self.all_layers or treatment != "dense":
                layers = torch.stack([gradient[number] for gradient in gradients])
                (average[number], size), is_reduced = self.layer(step, number, layers), self.is_reduced
            frame.append(dict.fromkeys(CODES, size))
            sent += size * (2 * others / learners if is_reduced else others)
        self.count_bytes((sent, sent), frame)
        return average

    def keep(self, name: str, number: int, like: Tensor) -> Tensor:
        """Returns what is kept under this name, zeros at first."""
        return self.kept.setdefault((name, number), torch.zeros_like(like))

    def decay(self, factor: float) -> None:
        for (name, _), rest in self.kept.items():
            if name == "rest" and factor != 1:
                rest *= factor

    def residual_norm(self) -> float:
        return math.hypot(*(rest[0].norm().item() for (name, _), rest in self.kept.items() if name == "rest"))

    def state(self) -> dict[str, Any]:
        return super().state() | {"kept": self.kept}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.kept = state["kept"]


class PowerSgd(Peer):
    """Vogels et al., 2019: two thin matrices whose product is near the gradient; each step starts from the one of the last."""

    def layer(self, step: int, number: int, gradients: Tensor) -> tuple[Tensor, float]:
        rest = self.keep("rest", number, gradients)
        rest += gradients
        matrices = rest.flatten(2)
        rows, columns = matrices.shape[1:]
        rank = min(self.options.rank, rows, columns)
        if ("right", number) not in self.kept:
            self.kept["right", number] = torch.randn(columns, rank, generator=torch.Generator().manual_seed(number))
        left = torch.linalg.qr((matrices @ self.kept["right", number]).mean(0)).Q
        right = self.kept["right", number] = (matrices.mT @ left).mean(0)
        average = (left @ right.T).view_as(gradients[0])
        rest -= average
        return average, 4.0 * rank * (rows + columns)


class Dgc(Peer):
    """Deep Gradient Compression, Lin et al., 2018: top-k of a residual of momenta, which are forgotten where they are sent."""

    makes_updates = True
    is_reduced = False
    # Densities in percent, in the first twentieth of the steps.
    WARM_UP = (25.0, 6.25, 1.5625, 0.4)

    def layer(self, step: int, number: int, gradients: Tensor) -> tuple[Tensor, float]:
        options, weights = self.options, self.named[number][1]
        velocity, rest = self.keep("velocity", number, gradients), self.keep("rest", number, gradients)
        velocity.mul_(options.momentum).add_(gradients).add_(weights, alpha=options.weight_decay)
        rest += velocity
        stage = step * 20 * len(self.WARM_UP) // self.steps
        percent = self.WARM_UP[stage] if stage < len(self.WARM_UP) else options.top_percent
        count = max(1, round(weights.numel() * percent / 100))
        sent = torch.zeros_like(rest)
        indices = rest.flatten(1).abs().topk(count, 1).indices
        sent.flatten(1).scatter_(1, indices, rest.flatten(1).gather(1, indices))
        for kept in (velocity, rest):
            kept.flatten(1).scatter_(1, indices, 0.0)
        # A value of 32 bits and the gap to the one before in 16.
        return sent.mean(0), 6.0 * count


class OneBitAdam(Peer):
    """Tang et al., 2021: dense Adam for a fifth of the steps; then its second moment stays, and momenta travel as signs. What
    rounding leaves is kept on both sides."""

    makes_updates = True
    all_layers = True
    DENSE = 0.2
    BETA = 0.9

    def __init__(self, model: nn.Module, options: argparse.Namespace, steps: int) -> None:
        super().__init__(model, options, steps)
        self.moments = Moments()

    def layer(self, step: int, number: int, gradients: Tensor) -> tuple[Tensor, float]:
        if step < self.DENSE * self.steps:
            return self.moments.update(number, gradients.mean(0)), 4.0 * gradients[0].numel()
        count, momentum, second = self.moments.kept[number]
        rest, server = self.keep("rest", number, gradients), self.keep("server", number, momentum)
        rest += momentum * self.BETA + gradients * (1 - self.BETA)
        sent = torch.stack([signs(each) for each in rest])
        rest -= sent
        server += sent.mean(0)
        momentum.copy_(signs(server))
        server -= momentum
        root = (second / (1 - self.moments.rule.betas[1] ** count)).sqrt() + self.moments.rule.eps
        return momentum / root, gradients[0].numel() / 8 + 4.0

    def state(self) -> dict[str, Any]:
        return super().state() | {"moments": self.moments}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.moments = state["moments"]


def signs(values: Tensor) -> Tensor:
    """Returns the signs, times a scale that keeps the norm."""
    return torch.where(values < 0, -1.0, 1.0).mul(values.norm() / math.sqrt(values.numel()))


class DeMo(Peer):
    """Decoupled momentum, Peng et al., 2024: the largest coefficients of the cosine transform of each chunk of a slow momentum;
    weights follow the signs of what arrives."""

    makes_updates = True
    all_layers = True
    is_reduced = False
    DECAY = 0.999

    def layer(self, step: int, number: int, gradients: Tensor) -> tuple[Tensor, float]:
        rest = self.keep("rest", number, gradients)
        rest.mul_(self.DECAY).add_(gradients)
        chunks = chunks_of(rest)
        across, down = cosines(chunks.shape[-2]), cosines(chunks.shape[-1])
        coefficients = (across @ chunks @ down.T).flatten(3)
        top = min(self.options.chunk_top, coefficients.shape[-1])
        indices = coefficients.abs().topk(top, -1).indices
        sent = torch.zeros_like(coefficients).scatter_(-1, indices, coefficients.gather(-1, indices))
        back = (across.T @ sent.view_as(chunks) @ down).transpose(2, 3).reshape_as(rest)
        rest -= back
        # A value of 16 bits and its place in the chunk in 16.
        return back.mean(0).sign(), 4.0 * top * chunks.shape[1] * chunks.shape[2]


class SparseLoCo(Peer):
    """Sarfi et al., 2025: the largest elements of each chunk of what local steps have moved, in two bits each. Its other rules
    are settings: 30 local steps, residuals that decay by 0.95, an outer rate of 1, 64 elements of a chunk. How values are
    rounded to two bits is our reading."""

    all_layers = True
    is_reduced = False
    LEVELS = 4

    def layer(self, step: int, number: int, gradients: Tensor) -> tuple[Tensor, float]:
        rest = self.keep("rest", number, gradients)
        rest += gradients
        chunks = chunks_of(rest)
        flat = chunks.flatten(3)
        elements = flat.shape[-1]
        top = min(self.options.chunk_top, elements)
        indices = flat.abs().topk(top, -1).indices
        values = torch.stack([self.rounded(own) for own in flat.gather(-1, indices)])
        sent = torch.zeros_like(flat).scatter_(-1, indices, values).view_as(chunks).transpose(2, 3).reshape_as(rest)
        rest -= sent
        # Places need no bits where all are sent.
        bits = 2 + (math.ceil(math.log2(elements)) if top < elements else 0)
        return sent.mean(0), indices[0].numel() * bits / 8 + 4.0 * self.LEVELS

    def rounded(self, values: Tensor) -> Tensor:
        """Cuts six standard deviations around the mean into as many ranges as there are levels, and replaces values by the means
        of those in the same range."""
        width = 6 * values.std() / self.LEVELS if values.numel() > 1 else torch.tensor(0.0)
        if not width > 0:
            return values
        ranges = ((values - values.mean()) / width + self.LEVELS // 2).round().long().clamp_(0, self.LEVELS - 1)
        zeros = torch.zeros(self.LEVELS)
        counts = zeros.scatter_add(0, ranges.flatten(), torch.ones(values.numel()))
        return (zeros.scatter_add(0, ranges.flatten(), values.flatten()) / counts.clamp_(min=1))[ranges]


def chunks_of(layers: Tensor, side: int = 64) -> Tensor:
    """Returns the chunks of all learners' layers: learner, row and column of the chunk, row and column in it."""
    rows, columns = layers.flatten(2).shape[1:] if layers.dim() > 2 else (1, layers.shape[1])
    height, width = chunk_side(rows, side), chunk_side(columns, side)
    return layers.view(-1, rows // height, height, columns // width, width).transpose(2, 3)


@cache
def cosines(points: int) -> Tensor:
    """Returns the orthonormal matrix of the cosine transform."""
    angles = torch.arange(points)[:, None] * (torch.arange(points) + 0.5) * (math.pi / points)
    matrix = angles.cos() * math.sqrt(2 / points)
    matrix[0] /= math.sqrt(2)
    return matrix


def chunk_side(length: int, wanted: int) -> int:
    """Returns the largest divisor of a length that is not more than wanted."""
    return max(side for side in range(1, wanted + 1) if length % side == 0)


PEERS: dict[str, type[Peer]] = {"powersgd": PowerSgd, "dgc": Dgc, "1-bit-adam": OneBitAdam, "demo": DeMo}
PEERS["sparseloco"] = SparseLoCo
