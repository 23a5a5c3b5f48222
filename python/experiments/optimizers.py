"""What changes the weights, by an averaged gradient."""

import torch


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


class Moments:
    """Adam's two moments, and what it makes of a gradient."""

    DECAYS = (0.9, 0.999)
    EPSILON = 1e-8

    def __init__(self, parameters):
        self.steps = 0
        self.firsts, self.seconds = ([torch.zeros_like(parameter) for parameter in parameters] for _ in range(2))

    @torch.no_grad()
    def update(self, gradients, squared=None):
        """The direction to go; the second moment can be that of other gradients."""
        self.steps += 1
        corrections = [1 - decay**self.steps for decay in self.DECAYS]
        updates = []
        for gradient, other, first, second in zip(gradients, squared or gradients, self.firsts, self.seconds):
            first.mul_(self.DECAYS[0]).add_(gradient, alpha=1 - self.DECAYS[0])
            second.mul_(self.DECAYS[1]).addcmul_(other, other, value=1 - self.DECAYS[1])
            root = (second / corrections[1]).sqrt_().add_(self.EPSILON)
            updates.append(first.div(root).div_(corrections[0]))
        return updates

    def state(self):
        return self.steps, self.firsts, self.seconds

    def load(self, state):
        self.steps, self.firsts, self.seconds = state


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
    def __init__(self, parameters, _options):
        super().__init__(parameters)
        self.moments = Moments(parameters)

    def step(self, gradients, learning_rate, squared):
        super().step(self.moments.update(gradients, squared), learning_rate, None)

    def state(self):
        return self.moments.state()

    def load(self, state):
        self.moments.load(state)


def make_optimizer(parameters, options):
    return {"sgd": Sgd, "adam": Adam}[options.optimizer](parameters, options)
