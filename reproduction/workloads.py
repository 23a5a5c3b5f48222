"""Models of the network benchmark, with random data: a step takes as long whatever it learns."""

import torch
from torch import nn


class Mlp:
    """25 million parameters, nearly all in matrices, and little to compute: the hardest case for a network."""

    def model(self):
        return nn.Sequential(
            nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 3072), nn.ReLU(), nn.Linear(3072, 1024), nn.ReLU(),
            nn.Linear(1024, 1000),
        )  # fmt: skip

    def batch(self, generator):
        return torch.randn(8, 2048, generator=generator), torch.randint(0, 1000, (8,), generator=generator)


class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after))
        same = stride == 1 and before == after
        self.short = (
            nn.Identity() if same else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        )

    def forward(self, x):
        return (self.second(self.first(x)) + self.short(x)).relu()


class Resnet18:
    """11 million parameters in convolutions, for pictures of 32x32."""

    def model(self):
        stages = [
            (64, 64, 1),
            (64, 64, 1),
            (64, 128, 2),
            (128, 128, 1),
            (128, 256, 2),
            (256, 256, 1),
            (256, 512, 2),
            (512, 512, 1),
        ]
        return nn.Sequential(
            nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), *[Block(*stage) for stage in stages],
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10),
        )  # fmt: skip

    def batch(self, generator):
        return torch.randn(8, 3, 32, 32, generator=generator), torch.randint(0, 10, (8,), generator=generator)


class LstmModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(96, 512)
        self.lstm = nn.LSTM(512, 512, 2, batch_first=True)
        self.out = nn.Linear(512, 96)

    def forward(self, text):
        return self.out(self.lstm(self.embedding(text))[0])


class Lstm:
    """Two recurrent layers of 512 for single characters: 4 million parameters."""

    def model(self):
        return LstmModel()

    def batch(self, generator):
        text = torch.randint(0, 96, (8, 51), generator=generator)
        return text[:, :-1], text[:, 1:].contiguous()


class Named:
    """A workload that knows its name and how many parameters it has."""

    def __init__(self, name, workload):
        self.name, self.model, self.batch = name, workload.model, workload.batch
        self.parameters = sum(parameter.numel() for parameter in workload.model().parameters())


WORKLOADS = {
    "mlp": lambda: Named("mlp", Mlp()),
    "resnet18": lambda: Named("resnet18", Resnet18()),
    "lstm": lambda: Named("lstm", Lstm()),
}
