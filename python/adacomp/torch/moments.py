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
        self.rule = rule or LocalAdam()
        # How many gradients of a parameter they are of, and both, flat.
        self.kept = {}

    @torch.no_grad()
    def update(self, number, gradient, squared=None):
        """What Adam makes of a parameter's gradient, to be multiplied by the learning rate. The second moment can be that of
        another gradient, for experiments."""
        gradient = gradient.float()
        squared = gradient if squared is None else squared.float()
        steps, first, second = self.kept.get(number) or (0, torch.zeros_like(gradient), torch.zeros_like(gradient))
        steps += 1
        beta, slow_beta = self.rule.betas
        first.lerp_(gradient, 1 - beta)
        second.mul_(slow_beta).addcmul_(squared, squared, value=1 - slow_beta)
        self.kept[number] = steps, first, second
        root = (second / (1 - slow_beta**steps)).sqrt_().add_(self.rule.eps)
        return first.div(root).div_(1 - beta**steps)

    def apply(self, parts):
        """Has (number, gradient) pairs be updates, in place. One that is zero everywhere has not been used, and stays so. One
        that is not finite is so everywhere then: what is finite of it is no update, and residuals must not get it."""
        for number, gradient in parts:
            if not bool(gradient.isfinite().all()):
                gradient.fill_(torch.nan)
            elif bool(gradient.any()):
                gradient.copy_(self.update(number, gradient))
