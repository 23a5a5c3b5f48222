"""Adam on each learner, before compression: updates travel, not gradients.

AdaComp sends what is large. Adam makes all parameters' steps about equally large, whatever the size of their gradients, so
parameters with small gradients wait long in residuals, which Adam alone would not have made them do. Where each learner's Adam
comes first, what is large is what moves weights far. Its moments are those of gradients that were never compressed, and all
learners get the average of the updates, which the optimiser only has to apply.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from .config import LocalAdam


class Moments:
    """Both moments of one learner's gradient, by the numbers of the parameters, in float32."""

    def __init__(self, rule: LocalAdam | None = None, rate: Callable[[int], float] | None = None) -> None:
        """With `rate`, which returns a parameter's learning rate as it is now, updates travel multiplied by it."""
        self.rule, self.rate = rule or LocalAdam(), rate
        # The number of a parameter's gradients so far, and both moments, flat.
        self.kept: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def update(self, number: int, gradient: torch.Tensor, squared: torch.Tensor | None = None) -> torch.Tensor:
        """Returns what Adam makes of a parameter's gradient, to be multiplied by the learning rate. The second moment can be that
        of another gradient, for experiments."""
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

    def apply(self, parts: Iterable[tuple[int, torch.Tensor]], is_plain: bool) -> None:
        """Turns gradients into updates, in place. In a plain step nothing waits, so they need no learning rate. An all-zero
        gradient, of an unused parameter, is left as it is. If any element is NaN or infinite, all become NaN: the others are
        gradients, not updates, and must not enter the residual."""
        for number, gradient in parts:
            if not bool(gradient.isfinite().all()):
                gradient.fill_(torch.nan)
            elif bool(gradient.any()):
                rate = 1.0 if is_plain or self.rate is None else self.rate(number)
                gradient.copy_(self.update(number, gradient) * rate)

    def restore(self, parts: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Takes the learning rate out of averages, because the optimiser multiplies by it."""
        rate = self.rate or (lambda number: 1.0)
        for number, average in parts:
            # At a rate of 0 nothing moves, whatever the average is.
            average.div_(rate(number) or 1.0)


def rates_of(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> Callable[[int], float]:
    """Returns a function that returns the optimiser's learning rate of a parameter, by its number."""
    groups = {id(parameter): number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    missing = sum(id(parameter) not in groups for parameter in parameters)
    if missing:
        raise ValueError(f"the optimizer lacks {missing} parameters of the model; pass the one that trains it")
    numbers = [groups[id(parameter)] for parameter in parameters]
    # Looked up each time: `optimizer.load_state_dict` replaces the groups.
    return lambda number: float(optimizer.param_groups[numbers[number]]["lr"])
