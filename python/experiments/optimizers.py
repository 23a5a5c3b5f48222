"""What changes the weights, by an averaged gradient."""

import torch


class Sgd:
    """Stochastic gradient descent with momentum."""

    def __init__(self, parameters, options):
        self.parameters, self.momentum, self.weight_decay = parameters, options.momentum, options.weight_decay
        self.velocities = [torch.zeros_like(parameter) for parameter in parameters]

    @torch.no_grad()
    def step(self, gradients, learning_rate):
        for parameter, gradient, velocity in zip(self.parameters, gradients, self.velocities):
            velocity.mul_(self.momentum).add_(gradient)
            if self.weight_decay:
                velocity.add_(parameter, alpha=self.weight_decay)
            parameter.add_(velocity, alpha=-learning_rate)

    def state(self):
        return {"velocities": self.velocities}

    def load(self, state):
        self.velocities = state["velocities"]


class Adam:
    DECAYS = (0.9, 0.999)
    EPSILON = 1e-8

    def __init__(self, parameters, options):
        self.parameters, self.weight_decay, self.steps = parameters, options.weight_decay, 0
        self.firsts, self.seconds = ([torch.zeros_like(parameter) for parameter in parameters] for _ in range(2))

    @torch.no_grad()
    def step(self, gradients, learning_rate):
        self.steps += 1
        corrections = [1 - decay**self.steps for decay in self.DECAYS]
        for parameter, gradient, first, second in zip(self.parameters, gradients, self.firsts, self.seconds):
            if self.weight_decay:
                gradient = gradient + self.weight_decay * parameter
            first.mul_(self.DECAYS[0]).add_(gradient, alpha=1 - self.DECAYS[0])
            second.mul_(self.DECAYS[1]).addcmul_(gradient, gradient, value=1 - self.DECAYS[1])
            root = (second / corrections[1]).sqrt_().add_(self.EPSILON)
            parameter.addcdiv_(first, root, value=-learning_rate / corrections[0])

    def state(self):
        return {"steps": self.steps, "firsts": self.firsts, "seconds": self.seconds}

    def load(self, state):
        self.steps, self.firsts, self.seconds = state["steps"], state["firsts"], state["seconds"]


def make_optimizer(parameters, options):
    return {"sgd": Sgd, "adam": Adam}[options.optimizer](parameters, options)
