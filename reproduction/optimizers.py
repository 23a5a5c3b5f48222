"""What changes the weights, by an averaged gradient."""

import argparse
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from adacomp.torch.moments import Moments
from torch import Tensor

Gradients = Sequence[Tensor]


class Optimizer(Protocol):
    def step(self, gradients: Gradients, learning_rate: float, squared: Gradients) -> None:
        """Changes the weights; `squared` is what a second moment is made of."""

    def state(self) -> Any: ...
    def load(self, state: Any) -> None: ...


class Sgd:
    """Stochastic gradient descent with momentum."""

    def __init__(self, parameters: Gradients, momentum: float, weight_decay: float) -> None:
        self.parameters, self.momentum, self.weight_decay = parameters, momentum, weight_decay
        self.velocities = [torch.zeros_like(parameter) for parameter in parameters]

    def step(self, gradients: Gradients, learning_rate: float, squared: Gradients) -> None:
        with torch.no_grad():
            for parameter, gradient, velocity in zip(self.parameters, gradients, self.velocities):
                velocity.mul_(self.momentum).add_(gradient)
                if self.weight_decay:
                    velocity.add_(parameter, alpha=self.weight_decay)
                parameter.add_(velocity, alpha=-learning_rate)

    def state(self) -> Any:
        return self.velocities

    def load(self, state: Any) -> None:
        self.velocities = state


class Follower:
    """Adds updates that learners have made."""

    def __init__(self, parameters: Gradients) -> None:
        self.parameters = parameters

    def step(self, gradients: Gradients, learning_rate: float, squared: Gradients) -> None:
        with torch.no_grad():
            for parameter, update in zip(self.parameters, gradients):
                parameter.add_(update, alpha=-learning_rate)

    def state(self) -> Any:
        return None

    def load(self, state: Any) -> None:
        pass


class Adam(Follower):
    """Adam on the averaged gradient; the second moment can be that of another."""

    def __init__(self, parameters: Gradients) -> None:
        super().__init__(parameters)
        self.moments = Moments()

    def step(self, gradients: Gradients, learning_rate: float, squared: Gradients) -> None:
        super().step(updates(self.moments, gradients, squared), learning_rate, squared)

    def state(self) -> Any:
        return self.moments.kept

    def load(self, state: Any) -> None:
        self.moments.kept = state


def updates(moments: Moments, gradients: Gradients, squared: Gradients | None = None) -> list[Tensor]:
    """Returns what Adam makes of all gradients of a step."""
    pairs = zip(gradients, gradients if squared is None else squared)
    return [moments.update(number, gradient, square) for number, (gradient, square) in enumerate(pairs)]


def make_optimizer(parameters: Gradients, options: argparse.Namespace) -> Optimizer:
    if options.optimizer == "adam":
        return Adam(parameters)
    return Sgd(parameters, options.momentum, options.weight_decay)
