"""Adam on each learner, before compression: updates travel, not gradients.

AdaComp sends what is large. Adam makes all parameters' steps about equally large, whatever the size of their gradients, so those
with small gradients wait long in residuals for what Adam would not have kept from them. Where each learner's Adam comes first,
what is large is what moves weights far. Its moments are those of gradients that were never compressed, and what all learners get
is its update, which the optimiser only has to follow.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LocalAdam:
    """Adam on each learner: ``attach(model, local_adam=LocalAdam())``. The optimiser is then ``torch.optim.SGD`` without
    momentum, whose learning rate is Adam's and whose weight decay is AdamW's."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self):
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {self.betas}; expected two numbers from 0 to below 1")
        if not self.eps > 0:
            raise ValueError(f"eps {self.eps}; expected more than 0")


class Moments:
    """Both moments of one learner's gradient, by the numbers of the parameters, in float32."""

    def __init__(self, rule=None):
        self.rule, self.steps = rule or LocalAdam(), 0
        self.kept = {}

    def begin_step(self):
        self.steps += 1

    @torch.no_grad()
    def update(self, number, gradient, squared=None):
        """What Adam makes of a parameter's gradient, to be multiplied by the learning rate. The second moment can be that of
        another gradient, for experiments."""
        if number not in self.kept:
            self.kept[number] = tuple(torch.zeros_like(gradient, dtype=torch.float32) for _ in range(2))
        first, second = self.kept[number]
        beta, slow_beta = self.rule.betas
        gradient = gradient.float()
        squared = gradient if squared is None else squared.float()
        first.lerp_(gradient, 1 - beta)
        second.mul_(slow_beta).addcmul_(squared, squared, value=1 - slow_beta)
        root = (second / (1 - slow_beta**self.steps)).sqrt_().add_(self.rule.eps)
        return first.div(root).div_(1 - beta**self.steps)

    def apply(self, parts, skip_unused):
        """Has (number, gradient) pairs be updates, in place. One that is not finite is left as it is, for all to find; one that
        has not been used, too."""
        for number, gradient in parts:
            if bool(gradient.isfinite().all()) and not (skip_unused and not gradient.any()):
                gradient.copy_(self.update(number, gradient))
