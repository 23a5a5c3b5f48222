"""Trains one of the program's models in PyTorch, with any number of learners in this process.

A step is what as many machines would do: each learner has its part of the minibatch, its gradient and its residual, and all get
the same average. Progress is kept after each epoch, so a run that is started again goes on. The last line is the result as JSON.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from adacomp.torch import LocalAdam
from adacomp.torch.moments import Moments
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from reproduction.datasets import load
from reproduction.local import LocalSteps
from reproduction.models import Lstm, Transformer, alexnet, cnn, mlp, resnet, small_resnet
from reproduction.peers import PEERS
from reproduction.schemes import Compressed, Dense, Gradients, Scheme, clipped, dense_average

# What is trained: data, and the model for a number of classes.
MODELS: dict[str, tuple[str, Callable[[int], nn.Module]]] = {
    "mnist-dnn": ("mnist", lambda classes: mlp(784, [400, 400], classes)),
    "mnist-cnn": ("mnist", lambda classes: cnn(1, 28, [32, 64], 0, [128], classes)),
    "cifar10-cnn": ("cifar10", lambda classes: cnn(3, 32, [32, 32, 64], 2, [], classes)),
    "shakespeare-lstm": ("shakespeare", lambda classes: Lstm(classes, 128, 2)),
    "shakespeare-transformer": ("shakespeare", lambda classes: Transformer(classes, 128, 4, 4, 64)),
    "shakespeare-transformer-small": ("shakespeare", lambda classes: Transformer(classes, 64, 4, 2, 64)),
    "speech-dnn": ("speech", lambda classes: mlp(440, [1024] * 6, classes)),
}

# The same, for CIFAR-10's pictures with a side of this length.
LARGE: dict[str, Callable[[int, int], nn.Module]] = {
    "alexnet": alexnet,
    "resnet20": lambda side, classes: small_resnet(3, classes),
    "resnet18": lambda side, classes: resnet(18, side, classes),
    "resnet50": lambda side, classes: resnet(50, side, classes),
}

# What a checkpoint has of a training, beside the model and the residuals.
KEPT = ("velocities", "moments", "step", "rolled_back", "seconds", "history")

# How many times too large a bin is in the step of `--outlier-step`.
OUTLIER_FACTOR = 1e4


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=[*MODELS, *LARGE])
    parser.add_argument("--side", type=int, choices=[32, 224], default=32, help="of the pictures of large models")
    parser.add_argument("--scheme", choices=["dense", "adacomp", "local-selection", "top-k", *PEERS], default="adacomp")
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
    parser.add_argument("--momentum", type=float, default=0.9, help="of SGD, or the decay of Adam's first moment")
    parser.add_argument("--weight-decay", type=float, default=0.0, help="of SGD, added after the exchange")
    parser.add_argument("--schedule", choices=["cosine", "constant"], default="cosine")
    parser.add_argument("--rate-warm-up", type=float, default=0.0, help="the share of all steps in which the learning rate grows")
    parser.add_argument("--clip", type=float, help="the largest norm of the averaged gradient")
    parser.add_argument("--local-clip", type=float, help="the largest norm of a learner's gradient, before it is compressed")
    parser.add_argument("--conv-bin", type=int, default=50)
    parser.add_argument("--matrix-bin", type=int, default=500)
    parser.add_argument("--vector-bin", type=int, help="also compresses vectors and small matrices, with bins of this length")
    parser.add_argument("--soft-threshold", type=float, default=2.0)
    parser.add_argument("--scale", choices=["mean", "clamped"], default="mean")
    parser.add_argument("--top-percent", type=float, default=0.1)
    parser.add_argument("--bin-warm-up", type=float, default=0.0, help="the share of all steps in which bins of matrices grow")
    what = "what travels: with `updates`, what each learner's Adam makes, also if it is dense"
    parser.add_argument("--compress", choices=["gradients", "updates"], default="gradients", help=what)
    what = "what Adam's second moment is of: what it gets, or the average of dense gradients, or of all learners', now and then,"
    what += " or what a learner can tell of the average"
    parser.add_argument("--second-moment", choices=["sent", "dense", "shared", "estimated"], default="sent", help=what)
    parser.add_argument("--share-every", type=int, default=500, help="steps between averages of `--second-moment shared`")
    parser.add_argument("--slow-beta", type=float, default=0.999, help="of Adam's second moment")
    what = "of updates that travel: whether each learner's Adam has momentum, or what has arrived gets it"
    parser.add_argument("--adam-momentum", choices=["before", "after"], default="before", help=what)
    what = "of updates that travel: whether they are multiplied by the learning rate before they are compressed or after"
    parser.add_argument("--rate", choices=["before", "after"], default="after", help=what)
    parser.add_argument("--residual-decay", type=float, default=1.0, help="what residuals are multiplied by before each exchange")
    what = "steps that each learner does alone, after which it sends how far its weights have moved; 0 for an exchange in each"
    parser.add_argument("--local-steps", type=int, default=0, help=what)
    parser.add_argument("--delay", type=int, default=0, help="steps that are taken while what local steps send is under way")
    parser.add_argument("--outer-rate", type=float, default=1.0, help="how far shared weights follow what local steps send")
    parser.add_argument("--outer-momentum", type=float, default=0.0, help="Nesterov's, of the shared weights")
    what = "how much of what waits on a learner is applied to the weights at which its gradient is taken"
    parser.add_argument("--look-ahead", type=float, default=0.0, help=what)
    what = "with `flush` the last step also sends what waits; for `--rate before`"
    parser.add_argument("--last-step", choices=["compressed", "flush"], default="compressed", help=what)
    parser.add_argument("--rank", type=int, default=1, help="of PowerSGD")
    parser.add_argument("--chunk-top", type=int, default=32, help="what DeMo and SparseLoCo send of a chunk of 64x64")
    parser.add_argument("--outlier-step", type=int, help="in this step a bin of learner 0's largest layer is far too large")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="a folder for progress")
    options = parser.parse_args(words)
    if options.compress == "updates" and options.optimizer != "adam":
        parser.error("--compress updates is for --optimizer adam")
    if options.scheme == "sparseloco" and not options.local_steps:
        parser.error("--scheme sparseloco is for --local-steps")
    if not 0 <= options.delay <= options.local_steps:
        parser.error("--delay is for --local-steps, and at most as many")
    if options.rate == "before" and options.compress != "updates":
        parser.error("--rate before is for --compress updates")
    if options.last_step == "flush" and options.rate != "before" and not options.local_steps:
        parser.error("--last-step flush is for --rate before, or --local-steps")
    if options.weight_decay and options.optimizer != "sgd":
        parser.error("--weight-decay is for --optimizer sgd")
    return options


class OfAverage(Moments):
    """Adam on a learner's gradient with the second moment that the average of all gradients should have. What is signal, as the
    first moment tells, has the same square in the average; of what is noise, the average has one part in as many as learners."""

    def __init__(self, rule: LocalAdam, learners: int) -> None:
        super().__init__(rule)
        self.learners = learners

    @torch.no_grad()
    def update(self, number: int, gradient: Tensor, squared: Tensor | None = None) -> Tensor:
        super().update(number, gradient, squared)
        steps, first, second = self.kept[number]
        beta, slow_beta = self.rule.betas
        signal, all_ = first / (1 - beta**steps), second / (1 - slow_beta**steps)
        expected = signal.square().lerp_(all_, 1 / self.learners)
        return signal.div_(expected.sqrt_().add_(self.rule.eps))


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
        self.in_epoch = len(self.data) // options.minibatch
        self.steps: int = min(options.epochs * self.in_epoch, options.steps or options.epochs * self.in_epoch)
        self.scheme: Scheme | None = None
        if options.scheme != "dense" or options.local_steps:
            schemes = PEERS | {"dense": Dense}
            self.scheme = schemes.get(options.scheme, Compressed)(self.model, options, self.steps)
        self.local = LocalSteps(self.model, options, self.scheme) if self.scheme and options.local_steps else None
        # SGD's velocities, or Adam's moments: each learner's own where updates travel, else those of the average.
        self.velocities = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.updates_travel = options.compress == "updates"
        rule = LocalAdam(betas=(0.0 if options.adam_momentum == "after" else options.momentum, options.slow_beta))
        own = OfAverage(rule, options.learners) if options.second_moment == "estimated" else Moments(rule)
        self.moments = [deepcopy(own) for _ in range(options.learners if self.updates_travel else 1)]
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
        if self.local:
            batches = zip(inputs.chunk(options.learners), targets.chunk(options.learners))
            losses = self.local.step(self.learning_rate(), batches)
            self.step += 1
            if self.step % options.local_steps == 0 or self.step == self.steps:
                self.rolled_back += not self.local.exchange(self.step, self.step == self.steps)
            self.flush_at_the_end()
            return sum(losses) / len(losses)
        outlier = self.step == options.outlier_step
        apart = self.apart or self.scheme or self.updates_travel or outlier or options.local_clip is not None
        parts = options.learners if apart else 1
        waiting = self.waiting()
        gradients: list[Gradients] = []
        losses = []
        for learner, (own_inputs, own_targets) in enumerate(zip(inputs.chunk(parts), targets.chunk(parts))):
            with self.ahead(waiting[learner]) if options.look_ahead else nullcontext():
                scores = self.model(own_inputs)
                loss = cross_entropy(scores.flatten(0, -2), own_targets.flatten())
                # Also where pictures have their channels last, and so convolutions their gradients.
                gradients.append([gradient.contiguous() for gradient in torch.autograd.grad(loss, self.parameters)])
            losses.append(loss.item())
        if outlier:
            layer = max(gradients[0], key=torch.Tensor.numel).view(-1)
            first = int(layer.abs().argmax()) // options.matrix_bin * options.matrix_bin
            layer[first : first + options.matrix_bin] *= OUTLIER_FACTOR
        if options.local_clip is not None:
            gradients = [clipped(gradient, options.local_clip) for gradient in gradients]
        # Adam is not given gradients that are not finite.
        average: Gradients | None = None
        if not self.updates_travel or all(layer.isfinite().all() for gradient in gradients for layer in gradient):
            travelling = self.local_updates(gradients) if self.updates_travel else gradients
            if self.scheme:
                self.scheme.decay(options.residual_decay)
            average = self.scheme.exchange(self.step, travelling) if self.scheme else dense_average(travelling)
        if average is None:
            self.rolled_back += 1
        else:
            self.change_weights(average, gradients)
        self.step += 1
        self.flush_at_the_end()
        return sum(losses) / len(losses)

    def waiting(self) -> list[list[Tensor | None]]:
        """Returns what waits on each learner, if something depends on it."""
        return self.scheme.residuals() if self.options.look_ahead and isinstance(self.scheme, Compressed) else []

    @contextmanager
    def ahead(self, waiting: list[Tensor | None]) -> Iterator[None]:
        """Lets weights be for a while where what waits on a learner would bring them."""
        kept = [parameter.detach().clone() for parameter in self.parameters]
        factor = self.options.look_ahead * (1.0 if self.options.rate == "before" else self.learning_rate())
        with torch.no_grad():
            for parameter, rest in zip(self.parameters, waiting):
                if rest is not None:
                    parameter.sub_(rest, alpha=factor)
        yield
        with torch.no_grad():
            for parameter, weights in zip(self.parameters, kept):
                parameter.copy_(weights)

    @torch.no_grad()
    def local_updates(self, gradients: Sequence[Gradients]) -> list[Gradients]:
        """Returns what each learner's Adam makes of its gradient."""
        options = self.options
        own = [clipped(gradient, options.clip) for gradient in gradients]
        squared = [clipped(dense_average(gradients), options.clip)] * len(own) if options.second_moment == "dense" else own
        if options.second_moment == "shared" and self.step % options.share_every == 0 and self.step:
            share_second_moments(self.moments)
            if self.scheme:
                self.scheme.count_reduced(2)
        updates = [adam(*each) for each in zip(self.moments, own, squared)]
        rate = self.learning_rate() if options.rate == "before" else 1.0
        return [[layer * rate for layer in update] for update in updates]

    @torch.no_grad()
    def change_weights(self, average: Gradients, gradients: Sequence[Gradients]) -> None:
        """Lets the optimiser follow what has arrived; experiments give its second moment the learners' dense gradients."""
        options, updates = self.options, average
        if self.scheme and self.scheme.makes_updates:
            pass
        elif options.optimizer == "sgd":
            for velocity, gradient, parameter in zip(self.velocities, clipped(average, options.clip), self.parameters):
                velocity.mul_(options.momentum).add_(gradient).add_(parameter, alpha=options.weight_decay)
            updates = self.velocities
        elif not self.updates_travel:
            squared = dense_average(gradients) if options.second_moment == "dense" else average
            updates = adam(self.moments[0], clipped(average, options.clip), clipped(squared, options.clip))
        elif options.adam_momentum == "after":
            for velocity, update in zip(self.velocities, average):
                velocity.lerp_(update, 0.1)
            updates = self.velocities
        rate = 1.0 if options.rate == "before" else self.learning_rate()
        for parameter, update in zip(self.parameters, updates):
            parameter.add_(update, alpha=-rate)

    @torch.no_grad()
    def flush_at_the_end(self) -> None:
        """Lets weights follow all that waits, as a dense last step does."""
        if self.options.last_step == "flush" and self.step == self.steps and isinstance(self.scheme, Compressed):
            for parameter, *waiting in zip(self.parameters, *self.scheme.residuals()):
                if waiting[0] is not None:
                    parameter.sub_(sum(waiting) / len(waiting), alpha=self.options.outer_rate)
            self.scheme.count_reduced(4)

    def learning_rate(self) -> float:
        highest: float = self.options.learning_rate
        constant = self.options.schedule == "constant"
        highest *= min(1.0, (self.step + 1) / (self.options.rate_warm_up * self.steps + 1))
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
        if self.scheme:
            epoch["residual_norm"] = self.scheme.residual_norm()
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
        if self.scheme:
            result |= self.scheme.result(done)
        result["history"] = self.history
        return {key: without_nan(value) for key, value in result.items()}

    def save(self) -> None:
        state = {name: getattr(self, name) for name in KEPT} | {"model": self.model.state_dict()}
        state["scheme"] = self.scheme and self.scheme.state()
        state["local"] = self.local and self.local.state()
        self.options.out.mkdir(parents=True, exist_ok=True)
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.rename(self.checkpoint)

    def load(self) -> None:
        state = torch.load(self.checkpoint, weights_only=False)
        self.model.load_state_dict(state["model"])
        for name in KEPT:
            setattr(self, name, state[name])
        if self.scheme:
            self.scheme.load(state["scheme"])
        if self.local:
            self.local.load(state["local"])


def without_nan(result: Any) -> Any:
    """Replaces what is not a number by None: JSON has no word for it."""
    if isinstance(result, dict):
        return {key: without_nan(value) for key, value in result.items()}
    if isinstance(result, list):
        return [without_nan(value) for value in result]
    return None if isinstance(result, float) and not math.isfinite(result) else result


def adam(moments: Moments, gradients: Gradients, squared: Gradients | None = None) -> list[Tensor]:
    """Returns what Adam makes of all gradients of a step; the second moment can be that of others."""
    pairs = zip(gradients, squared or gradients)
    return [moments.update(number, gradient, square) for number, (gradient, square) in enumerate(pairs)]


def share_second_moments(learners: Sequence[Moments]) -> None:
    """Gives all learners the average of their second moments, in half the bits."""
    for number in learners[0].kept:
        average = torch.stack([learner.kept[number][2] for learner in learners]).mean(0).bfloat16()
        for learner in learners:
            learner.kept[number][2].copy_(average)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(Training(arguments()).train()), flush=True)
