"""The program's models in PyTorch, for the trainer and for the network benchmark."""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.functional import gelu, pad, relu, scaled_dot_product_attention


def mlp(inputs: int, hidden: list[int], outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in pairwise([inputs, *hidden, outputs]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def cnn(channels: int, side: int, widths: list[int], padding: int, hidden: list[int], outputs: int) -> nn.Module:
    """Makes convolutions of 5x5, each with a rectifier and pooling by two, then fully-connected layers."""
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Conv2d(channels, width, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
        channels, side = width, (side + 2 * padding - 4) // 2
    return nn.Sequential(*layers, mlp(channels * side * side, hidden, outputs))


class Lstm(nn.Module):
    def __init__(self, characters: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True)
        self.top = nn.Linear(hidden, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.top(self.lstm(self.embedding(tokens))[0])
        return scores


class Deep(nn.Module):
    """Many small fully-connected layers, each beside a short cut."""

    def __init__(self, width: int, layers: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers - 1)])
        self.top = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu() / len(self.layers)
        scores: Tensor = self.top(x)
        return scores


class Block(nn.Module):
    """Attention, then two fully-connected layers, each beside a short cut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        parts = self.projections(self.attention_norm(x)).view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(samples, length, width))
        result: Tensor = x + self.narrow(gelu(self.wide(self.norm(x))))
        return result


class Transformer(nn.Module):
    """A decoder-only transformer with norms before each part, as GPT-2 has them."""

    def __init__(self, characters: int, width: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.top = nn.Linear(width, characters, bias=False)
        # Narrow, so that the first scores are all alike.
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.top(self.norm(self.blocks(self.embedding(tokens) + self.positions)))
        return scores


def alexnet(side: int, outputs: int) -> nn.Module:
    if side != 224:
        raise ValueError(f"AlexNet is for pictures of 224x224, not of {side}x{side}")
    model: nn.Module = torchvision.models.alexnet(num_classes=outputs)
    return model


def resnet(depth: int, side: int, outputs: int) -> nn.Module:
    """Makes a ResNet; one for small pictures starts with a convolution of 3x3 and no pooling."""
    make = {18: torchvision.models.resnet18, 50: torchvision.models.resnet50}[depth]
    with torch.random.fork_rng(devices=[]):
        model: nn.Module = make(num_classes=outputs)
        if side <= 64:
            model.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
            model.maxpool = nn.Identity()
    # PyTorch's own first weights, as the program and all other models here have them.
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.reset_parameters()
    return model


class SmallBlock(nn.Module):
    """Two convolutions of 3x3 beside a short cut, which leaves out pixels and adds channels of zeros, so has no parameters."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.stride, self.added = stride, width - channels
        self.conv1, self.conv2 = (
            nn.Conv2d(before, width, 3, step, 1, bias=False) for before, step in ((channels, stride), (width, 1))
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        short_cut = pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.added // 2, self.added // 2))
        return relu(short_cut + self.norm2(self.conv2(relu(self.norm1(self.conv1(x))))))


def small_resnet(blocks: int, outputs: int) -> nn.Module:
    """Makes He et al.'s ResNet for CIFAR-10: three times as many blocks, of 16, 32 and 64 channels. Three make ResNet-20."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    for width in (16, 32, 64):
        first = SmallBlock(max(16, width // 2), width, 1 if width == 16 else 2)
        layers += [first, *(SmallBlock(width, width, 1) for _ in range(blocks - 1))]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, outputs))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


CHARACTERS = 96
# Samples of a learner in a step of the network benchmark.
SAMPLES = 8
# Characters of a sample of the transformer.
CONTEXT = 64


@dataclass(frozen=True)
class Workload:
    """A model of the network benchmark with random data, because a step takes as long whatever it learns."""

    name: str
    random: torch.Generator = field(default_factory=torch.Generator)

    def model(self) -> nn.Module:
        if self.name == "mlp":
            # 25 million parameters, nearly all in matrices, and little to compute: the hardest case for a network.
            return mlp(2048, [4096, 3072, 1024], 1000)
        if self.name == "resnet18":
            # 11 million parameters in convolutions.
            return resnet(18, 32, 10)
        if self.name == "layers":
            return Deep(64, 1000, 10)
        if self.name == "transformer":
            # That of the studies, for training across sites.
            return Transformer(CHARACTERS, 128, 4, 4, CONTEXT)
        # Two recurrent layers: 4 million parameters.
        return Lstm(CHARACTERS, 512, 2)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns what the model is trained with."""
        if self.name == "transformer":
            return torch.optim.Adam(model.parameters(), 0.001)
        return torch.optim.SGD(model.parameters(), 0.01)

    def batch(self, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
        """Returns the inputs and targets of one step of a learner."""
        shape, classes = {"mlp": ([2048], 1000), "resnet18": ([3, 32, 32], 10), "layers": ([64], 10)}.get(self.name, ([], 0))
        if shape:
            inputs = torch.randn(samples, *shape, generator=self.random)
            return inputs, torch.randint(0, classes, (samples,), generator=self.random)
        length = CONTEXT if self.name == "transformer" else 50
        text = torch.randint(0, CHARACTERS, (samples, length + 1), generator=self.random)
        return text[:, :-1], text[:, 1:].contiguous()

    @cached_property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model().parameters())
