"""Trains one of the program's models in PyTorch, with any number of learners in this process.

A step is what as many machines would do: each learner has its part of the minibatch, its gradient and its residual, and all get
the same average. Progress is kept after each epoch, so a run that is started again goes on. The last line is the result as JSON.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from adacomp.research import Layout, Learners
from adacomp.torch.moments import Moments
from adacomp.torch.runtime import kinds
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from reproduction.datasets import load
from reproduction.models import Lstm, Transformer, alexnet, cnn, mlp, resnet
from reproduction.studies import CODES

Gradients = Sequence[Tensor]

# What is trained: data, and the model for a number of classes.
MODELS: dict[str, tuple[str, Callable[[int], nn.Module]]] = {
    "mnist-dnn": ("mnist", lambda classes: mlp(784, [400, 400], classes)),
    "mnist-cnn": ("mnist", lambda classes: cnn(1, 28, [32, 64], 0, [128], classes)),
    "cifar10-cnn": ("cifar10", lambda classes: cnn(3, 32, [32, 32, 64], 2, [], classes)),
    "shakespeare-lstm": ("shakespeare", lambda classes: Lstm(classes, 128, 2)),
    "shakespeare-transformer": ("shakespeare", lambda classes: Transformer(classes, 128, 4, 4, 64)),
}

# The same, for CIFAR-10's pictures with a side of this length.
LARGE: dict[str, Callable[[int, int], nn.Module]] = {
    "alexnet": alexnet,
    "resnet18": lambda side, classes: resnet(18, side, classes),
    "resnet50": lambda side, classes: resnet(50, side, classes),
}

# What a checkpoint has of a training, beside the model and the residuals.
KEPT = ("velocities", "moments", "step", "rolled_back", "seconds", "history")

MOMENTUM = 0.9
# The bytes of a frame's header.
FRAME_BYTES = 36
# How many times too large a bin is in the step of `--outlier-step`.
OUTLIER_FACTOR = 1e4


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=[*MODELS, *LARGE])
    parser.add_argument("--side", type=int, choices=[32, 224], default=32, help="of the pictures of large models")
    parser.add_argument("--scheme", choices=["dense", "adacomp", "local-selection", "top-k"], default="adacomp")
    parser.add_argument("--strategy", choices=["gather", "reduce", "sharded"], default="gather")
    parser.add_argument("--owner-divisor", type=int, default=1, help="how many times shorter the bins of sharded's owners are")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--minibatch", type=int, default=128, help="samples in a step, over all learners")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, help="end earlier")
    parser.add_argument("--trace", type=int, help="steps between tests, in addition to one after each epoch")
    parser.add_argument("--test-parts", type=int, help="hundreds of test samples to test with, instead of all")
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--schedule", choices=["cosine", "constant"], default="cosine")
    parser.add_argument("--clip", type=float, help="the largest norm of the averaged gradient")
    parser.add_argument("--local-clip", type=float, help="the largest norm of a learner's gradient, before it is compressed")
    parser.add_argument("--conv-bin", type=int, default=50)
    parser.add_argument("--matrix-bin", type=int, default=500)
    parser.add_argument("--soft-threshold", type=float, default=2.0)
    parser.add_argument("--scale", choices=["mean", "clamped"], default="mean")
    parser.add_argument("--top-percent", type=float, default=0.1)
    parser.add_argument("--second-moment", choices=["sent", "dense"], default="sent", help="what Adam's second moment is of")
    what = "what travels: with `updates`, what each learner's Adam makes, also if it is dense"
    parser.add_argument("--compress", choices=["gradients", "updates"], default="gradients", help=what)
    parser.add_argument("--outlier-step", type=int, help="in this step a bin of learner 0's largest layer is far too large")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="a folder for progress")
    options = parser.parse_args(words)
    if options.compress == "updates" and options.optimizer != "adam":
        parser.error("--compress updates is for --optimizer adam")
    return options


class Compressed:
    """Learners whose gradients are compressed."""

    def __init__(self, model: nn.Module, options: argparse.Namespace) -> None:
        named = list(model.named_parameters())
        self.kinds = kinds(model, named)
        parameters = [(name, tuple(parameter.shape), kind) for (name, parameter), kind in zip(named, self.kinds)]
        conv, matrix = options.conv_bin, options.matrix_bin
        if options.scheme == "top-k":
            conv = matrix = f"top-k {options.top_percent}"
        soft_threshold = 1.0 if options.scheme == "local-selection" else options.soft_threshold
        layout = Layout(parameters, conv=conv, matrix=matrix, soft_threshold=soft_threshold, scale=options.scale)
        self.learners = Learners(layout, options.learners, options.strategy, owner_divisor=options.owner_divisor)
        self.elements, self.treatments = layout.elements, layout.treatments
        self.average = [torch.empty_like(parameter) for _, parameter in named]
        # Since the start: bytes that a learner sent and received, and those of its frame by kind of layer and by code.
        self.traffic = [0.0, 0.0]
        self.bytes = {kind: dict.fromkeys(CODES, 0.0) for kind in ("conv", "matrix", "vector")}

    def exchange(self, gradients: Sequence[Gradients]) -> list[Tensor] | None:
        """Returns the average of what each learner has, or None if one is not finite."""
        for learner, gradient in enumerate(gradients):
            self.learners.submit(learner, arrays(gradient))
        if self.learners.finish(arrays(self.average)) is not None:
            return None
        self.traffic = [sum(pair) for pair in zip(self.traffic, self.learners.traffic())]
        for kind, sizes in zip(self.kinds, self.learners.sizes().values()):
            for code, total in self.bytes[kind].items():
                self.bytes[kind][code] = total + sizes[code]
        return self.average

    def frame_ratios(self, steps: int) -> dict[str, dict[str, float | None]]:
        """Returns how many times smaller frames are than dense f32, by code and kind of layer, with dense layers and headers."""

        def ratio(code: str, wanted: tuple[str, ...]) -> float | None:
            elements = sum(count for kind, count in zip(self.kinds, self.elements) if kind in wanted)
            taken = sum(self.bytes[kind][code] for kind in wanted)
            if len(wanted) == 3 and code != "floor":
                taken += FRAME_BYTES * steps
            return 4 * elements * steps / taken if taken else None

        wanted = {"overall": ("conv", "matrix", "vector"), "conv": ("conv",), "matrix": ("matrix",)}
        return {code: {name: ratio(code, some) for name, some in wanted.items()} for code in CODES}

    def count(self) -> dict[str, dict[str, int]]:
        """Returns the elements by kind of layer, those of compressed layers and those of dense ones."""
        counts: dict[str, dict[str, int]] = {}
        for kind, elements, treatment in zip(self.kinds, self.elements, self.treatments):
            of_kind = counts.setdefault(kind, {"compressed": 0, "dense": 0})
            of_kind["dense" if treatment == "dense" else "compressed"] += elements
        return counts

    def residual_norm(self) -> float:
        norms = [norm for norm in self.learners.residual_norms() if norm is not None]
        return math.hypot(*norms)

    def state(self) -> dict[str, Any]:
        return {"learners": self.learners.save(), "traffic": self.traffic, "bytes": self.bytes}

    def load(self, state: dict[str, Any]) -> None:
        self.learners.load(state["learners"])
        self.traffic, self.bytes = state["traffic"], state["bytes"]


class Training:
    """One run, from its start or its checkpoint to its result."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        large = LARGE.get(options.recipe)
        name = "cifar10" if large else MODELS[options.recipe][0]
        self.data = load(name, bool(large), 64 if "transformer" in options.recipe else 50, options.side if large else None)
        torch.manual_seed(options.seed)
        classes = self.data.classes
        self.model = large(options.side, classes) if large else MODELS[options.recipe][1](classes)
        self.parameters = list(self.model.parameters())
        # Norms over a minibatch are each learner's own, so its part must be computed apart also without compression.
        self.apart = any(isinstance(module, torch.nn.BatchNorm2d) for module in self.model.modules())
        self.compressed = None if options.scheme == "dense" else Compressed(self.model, options)
        # SGD's velocities, or Adam's moments: each learner's own where updates travel, else those of the average.
        self.velocities = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.updates_travel = options.compress == "updates"
        self.moments = [Moments() for _ in range(options.learners if self.updates_travel else 1)]
        self.in_epoch = len(self.data) // options.minibatch
        self.steps: int = min(options.epochs * self.in_epoch, options.steps or options.epochs * self.in_epoch)
        self.step, self.rolled_back, self.seconds = 0, 0, 0.0
        self.history: list[dict[str, float]] = []
        self.checkpoint = options.out / "checkpoint.pt"

    def train(self) -> dict[str, Any]:
        if self.checkpoint.exists():
            self.load()
        while self.step < self.steps:
            start = time.perf_counter()
            random = torch.Generator().manual_seed(1000 * self.options.seed + self.step // self.in_epoch)
            order = torch.randperm(len(self.data), generator=random)
            self.data.begin_epoch(random)
            self.model.train()
            losses: list[float] = []
            for samples in order.split(self.options.minibatch)[: self.in_epoch]:
                losses.append(self.one_step(samples, random))
                if self.step == self.steps or self.step % self.in_epoch == 0:
                    break
                if self.options.trace and self.step % self.options.trace == 0:
                    self.test(sum(losses) / len(losses))
                    self.model.train()
                    losses = []
            self.seconds += time.perf_counter() - start
            self.test(sum(losses) / len(losses))
            self.save()
        return self.result()

    def one_step(self, samples: Tensor, random: torch.Generator) -> float:
        inputs, targets = self.data.train(samples, random)
        options = self.options
        outlier = self.step == options.outlier_step
        apart = self.apart or self.compressed or self.updates_travel or outlier or options.local_clip is not None
        parts = options.learners if apart else 1
        gradients: list[Gradients] = []
        losses: list[float] = []
        for own_inputs, own_targets in zip(inputs.chunk(parts), targets.chunk(parts)):
            scores = self.model(own_inputs)
            loss = cross_entropy(scores.flatten(0, -2), own_targets.flatten())
            gradients.append(torch.autograd.grad(loss, self.parameters))
            losses.append(loss.item())
        if outlier:
            layer = max(gradients[0], key=torch.Tensor.numel).view(-1)
            first = int(layer.abs().argmax()) // options.matrix_bin * options.matrix_bin
            layer[first : first + options.matrix_bin] *= OUTLIER_FACTOR
        if options.local_clip is not None:
            gradients = [clipped(gradient, options.local_clip) for gradient in gradients]
        average: Gradients | None = None
        # Adam is not given gradients that are not finite.
        if not self.updates_travel or all(layer.isfinite().all() for gradient in gradients for layer in gradient):
            if self.updates_travel:
                own = zip(self.moments, gradients)
                gradients = [adam(moments, clipped(gradient, options.clip)) for moments, gradient in own]
            average = self.compressed.exchange(gradients) if self.compressed else dense_average(gradients)
        if average is None:
            self.rolled_back += 1
        else:
            self.change_weights(average, gradients)
        self.step += 1
        return sum(losses) / len(losses)

    @torch.no_grad()
    def change_weights(self, average: Gradients, gradients: Sequence[Gradients]) -> None:
        """Lets the optimiser follow what has arrived; experiments give its second moment the learners' dense gradients."""
        clip, updates = self.options.clip, average
        if self.options.optimizer == "sgd":
            for velocity, gradient in zip(self.velocities, clipped(average, clip)):
                velocity.mul_(MOMENTUM).add_(gradient)
            updates = self.velocities
        elif not self.updates_travel:
            squared = dense_average(gradients) if self.options.second_moment == "dense" else average
            updates = adam(self.moments[0], clipped(average, clip), clipped(squared, clip))
        for parameter, update in zip(self.parameters, updates):
            parameter.add_(update, alpha=-self.learning_rate())

    def learning_rate(self) -> float:
        highest: float = self.options.learning_rate
        constant = self.options.schedule == "constant"
        return highest if constant else highest * 0.5 * (1 + math.cos(math.pi * self.step / self.steps))

    @torch.no_grad()
    def test(self, train_loss: float) -> None:
        """Adds an entry to the history."""
        self.model.eval()
        loss, wrong, count = 0.0, 0, 0
        for inputs, targets in islice(self.data.test(), self.options.test_parts):
            scores, targets = self.model(inputs).flatten(0, -2), targets.flatten()
            loss += cross_entropy(scores, targets, reduction="sum").item()
            wrong += int((scores.argmax(1) != targets).sum())
            count += len(targets)
        epoch = {"step": self.step, "train_loss": train_loss, "test_loss": loss / count, "test_error": 100 * wrong / count}
        if self.compressed:
            epoch["residual_norm"] = self.compressed.residual_norm()
        self.history.append(epoch)
        print(f"epoch {len(self.history)}: {json.dumps(epoch)}", flush=True)

    def result(self) -> dict[str, Any]:
        last, done = self.history[-1], self.step - self.rolled_back
        result: dict[str, Any] = {
            "test_error": last["test_error"],
            "test_loss": last["test_loss"],
            "steps": self.step,
            "rolled_back": self.rolled_back,
            "seconds": round(self.seconds, 1),
            "parameters": sum(parameter.numel() for parameter in self.parameters),
        }
        if self.compressed:
            sent, received = (total / max(1, done) for total in self.compressed.traffic)
            result |= {"frame_ratios": self.compressed.frame_ratios(done), "elements": self.compressed.count()}
            result |= {"bytes_sent": sent, "bytes_received": received}
        result["history"] = self.history
        return {key: without_nan(value) for key, value in result.items()}

    def save(self) -> None:
        state = {name: getattr(self, name) for name in KEPT} | {"model": self.model.state_dict()}
        state["compressed"] = self.compressed and self.compressed.state()
        self.options.out.mkdir(parents=True, exist_ok=True)
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.rename(self.checkpoint)

    def load(self) -> None:
        state = torch.load(self.checkpoint, weights_only=False)
        self.model.load_state_dict(state["model"])
        for name in KEPT:
            setattr(self, name, state[name])
        if self.compressed:
            self.compressed.load(state["compressed"])


def without_nan(result: Any) -> Any:
    """Replaces what is not a number by None: JSON has no word for it."""
    if isinstance(result, dict):
        return {key: without_nan(value) for key, value in result.items()}
    if isinstance(result, list):
        return [without_nan(value) for value in result]
    return None if isinstance(result, float) and not math.isfinite(result) else result


def arrays(gradients: Gradients) -> list[Any]:
    """Returns the gradients as arrays that share their memory."""
    return [gradient.contiguous().numpy() for gradient in gradients]


def adam(moments: Moments, gradients: Gradients, squared: Gradients | None = None) -> list[Tensor]:
    """Returns what Adam makes of all gradients of a step; the second moment can be that of others."""
    pairs = zip(gradients, squared or gradients)
    return [moments.update(number, gradient, square) for number, (gradient, square) in enumerate(pairs)]


def dense_average(gradients: Sequence[Gradients]) -> list[Tensor]:
    return [sum(layer[1:], layer[0]) / len(layer) for layer in zip(*gradients)]


def clipped(gradients: Gradients, limit: float | None) -> Gradients:
    """Scales gradients down to a norm of at most the limit."""
    if limit is None:
        return gradients
    norm = math.hypot(*(gradient.norm().item() for gradient in gradients))
    return [gradient * (limit / norm) for gradient in gradients] if norm > limit else gradients


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(Training(arguments()).train()), flush=True)
