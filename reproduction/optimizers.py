"""What changes the weights, by an averaged gradient."""

import torch

from adacomp.torch.moments import Moments


class Sgd:
    """Stochastic gradient descent with momentum."""

    def __init__(self, parameters, options):
        self.parameters, self.momentum, self.weight_decay = parameters, options.momentum, options.weight_decay
        self.velocities = [torch.zeros_like(parameter) for parameter in parameters]

    @torch.no_grad()
    def step(self, gradients, learning_rate, _squared):
        for parameter, gradient, velocity in zip(self.parameters, gradients, self.velocities):
            velocity.mul_(self.momentum).add_(gradient)
            if self.weight_decay:
                velocity.add_(parameter, alpha=self.weight_decay)
            parameter.add_(velocity, alpha=-learning_rate)

    def state(self):
        return self.velocities

    def load(self, state):
        self.velocities = state


class Follower:
    """Goes where it is told."""

    def __init__(self, parameters):
        self.parameters = parameters

    @torch.no_grad()
    def step(self, updates, learning_rate, _squared):
        for parameter, update in zip(self.parameters, updates):
            parameter.add_(update, alpha=-learning_rate)

    def state(self):
        return None

    def load(self, state):
        pass


class Adam(Follower):
    """Adam's moments of the averaged gradient; the second can be that of another."""

    def __init__(self, parameters, _options):
        super().__init__(parameters)
        self.moments = Moments()

    def step(self, gradients, learning_rate, squared):
        super().step(updates(self.moments, gradients, squared), learning_rate, None)

    def state(self):
        return self.moments.kept

    def load(self, state):
        self.moments.kept = state


def updates(moments, gradients, squared=None):
    """What Adam makes of all gradients of a step."""
    squared = gradients if squared is None else squared
    return [moments.update(number, *pair) for number, pair in enumerate(zip(gradients, squared))]


def make_optimizer(parameters, options):
    return {"sgd": Sgd, "adam": Adam}[options.optimizer](parameters, options)
