"""Local steps: learners train alone for some steps, then exchange how far their weights have moved."""

import argparse
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from adacomp.torch import Outer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from reproduction.datasets import Batch
from reproduction.schemes import Scheme


class LocalSteps:
    """All learners of a run, each with weights and an optimiser of its own, and the weights that they share, the model's."""

    def __init__(self, model: nn.Module, options: argparse.Namespace, scheme: Scheme) -> None:
        self.model, self.options, self.scheme = model, options, scheme
        self.replicas = [deepcopy(model) for _ in range(options.learners)]
        self.optimizers = [optimizer_of(replica, options) for replica in self.replicas]
        self.velocities = [torch.zeros_like(parameter) for parameter in model.parameters()]
        # With `--delay`: what learners submitted to the exchange that is under way, and the steps until it arrives.
        self.submitted: list[list[Tensor]] = []
        self.arrives_in = 0

    def step(self, rate: float, batches: Iterable[Batch]) -> list[float]:
        """Lets each learner do a step with its part of the minibatch, and returns their losses."""
        losses = []
        for replica, optimizer, (inputs, targets) in zip(self.replicas, self.optimizers, batches):
            optimizer.zero_grad()
            loss = cross_entropy(replica(inputs).flatten(0, -2), targets.flatten())
            loss.backward()
            if self.options.clip is not None:
                nn.utils.clip_grad_norm_(replica.parameters(), self.options.clip)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            losses.append(loss.item())
        if self.submitted:
            self.arrives_in -= 1
            if self.arrives_in == 0:
                self.arrive()
        return losses

    @torch.no_grad()
    def exchange(self, step: int, is_last: bool) -> bool:
        """Moves the shared weights by what all learners have moved theirs, and gives them to all, with `--delay` so many steps
        later, but for the last. Returns whether it did: where something is not finite, all go back to the weights that they
        shared."""
        if self.submitted:
            self.arrive()
        shared = list(self.model.parameters())
        moved = [[before - after for before, after in zip(shared, replica.parameters())] for replica in self.replicas]
        self.scheme.decay(self.options.residual_decay)
        average = self.scheme.exchange(step, moved)
        if average is not None:
            self.follow(shared, average)
            for buffer, *own in zip(self.model.buffers(), *(replica.buffers() for replica in self.replicas)):
                buffer.copy_(torch.stack(own).float().mean(0))
        if average is not None and self.options.delay and not is_last:
            self.submitted = [[weights.clone() for weights in replica.parameters()] for replica in self.replicas]
            self.arrives_in = self.options.delay
        else:
            for replica in self.replicas:
                replica.load_state_dict(self.model.state_dict())
        return average is not None

    @torch.no_grad()
    def arrive(self) -> None:
        """Gives the shared weights to all learners, who keep what their steps have done meanwhile."""
        for replica, before in zip(self.replicas, self.submitted):
            for buffer, average in zip(replica.buffers(), self.model.buffers()):
                buffer.copy_(average)
            for weights, shared, submitted in zip(replica.parameters(), self.model.parameters(), before):
                weights.add_(shared - submitted)
        self.submitted = []

    def follow(self, shared: Iterable[Tensor], average: Iterable[Tensor]) -> None:
        """Does the outer optimiser's step."""
        outer = Outer(self.options.outer_rate, self.options.outer_momentum)
        for weights, velocity, update in zip(shared, self.velocities, average):
            outer.apply(weights, update, velocity if outer.momentum else None)

    def state(self) -> dict[str, Any]:
        replicas = [replica.state_dict() for replica in self.replicas]
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        under_way = {"submitted": self.submitted, "arrives_in": self.arrives_in}
        return {"replicas": replicas, "optimizers": optimizers, "velocities": self.velocities} | under_way

    def load(self, state: dict[str, Any]) -> None:
        for replica, optimizer, *own in zip(self.replicas, self.optimizers, state["replicas"], state["optimizers"]):
            replica.load_state_dict(own[0])
            optimizer.load_state_dict(own[1])
        self.velocities, self.submitted, self.arrives_in = (state[key] for key in ("velocities", "submitted", "arrives_in"))


def optimizer_of(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    if options.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), options.learning_rate, (options.momentum, options.slow_beta))
    return torch.optim.SGD(model.parameters(), options.learning_rate, options.momentum, weight_decay=options.weight_decay)
