"""Workloads of the network benchmark: models with random data, because a step takes as long whatever it learns."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from reproduction.models import Lstm, mlp, resnet

CHARACTERS = 96


@dataclass(frozen=True)
class Workload:
    name: str

    def model(self) -> nn.Module:
        if self.name == "mlp":
            # 25 million parameters, nearly all in matrices, and little to compute: the hardest case for a network.
            return mlp(2048, [4096, 3072, 1024], 1000)
        if self.name == "resnet18":
            # 11 million parameters in convolutions.
            return resnet(18, 32, 10)
        # Two recurrent layers: 4 million parameters.
        return Lstm(CHARACTERS, 512, 2)

    def batch(self, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Returns the inputs and targets of one step of a learner."""
        if self.name == "mlp":
            return torch.randn(8, 2048, generator=random), torch.randint(0, 1000, (8,), generator=random)
        if self.name == "resnet18":
            return torch.randn(8, 3, 32, 32, generator=random), torch.randint(0, 10, (8,), generator=random)
        text = torch.randint(0, CHARACTERS, (8, 51), generator=random)
        return text[:, :-1], text[:, 1:].contiguous()

    @cached_property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model().parameters())
