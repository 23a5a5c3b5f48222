"""The program's models in PyTorch: the same layers and sizes, for those that train faster here."""

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention


def mlp(inputs, hidden, outputs):
    widths = [inputs, *hidden, outputs]
    layers = [layer for pair in zip(widths, widths[1:]) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def cnn(channels, side, widths, padding, hidden, outputs):
    """Convolutions of 5x5, each with a rectifier and pooling by two, then fully-connected layers."""
    layers = []
    for width in widths:
        layers += [nn.Conv2d(channels, width, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
        channels, side = width, (side + 2 * padding - 4) // 2
    return nn.Sequential(*layers, mlp(channels * side * side, hidden, outputs))


def alexnet(side, outputs):
    """AlexNet, for 224x224, or with smaller kernels and pools for 32x32."""
    shapes, pool, left = {
        32: ([(3, 2, 1), (3, 1, 1), (3, 1, 1), (3, 1, 1), (3, 1, 1)], 2, 2),
        224: ([(11, 4, 2), (5, 1, 2), (3, 1, 1), (3, 1, 1), (3, 1, 1)], 3, 6),
    }[side]
    layers, channels = [], 3
    for number, (width, shape) in enumerate(zip((64, 192, 384, 256, 256), shapes)):
        layers += [nn.Conv2d(channels, width, *shape), nn.ReLU()]
        if number not in (2, 3):
            layers.append(nn.MaxPool2d(pool, 2))
        channels = width
    hidden = [nn.Dropout(), nn.Linear(256 * left * left, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), *hidden, nn.Linear(4096, outputs))


class Lstm(nn.Module):
    def __init__(self, characters, hidden, layers):
        super().__init__()
        self.embedding = nn.Embedding(characters, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True)
        self.top = nn.Linear(hidden, characters)

    def forward(self, tokens):
        return self.top(self.lstm(self.embedding(tokens))[0])


class Block(nn.Module):
    """Attention, then two fully-connected layers, each beside a short cut."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        samples, length, width = x.shape
        parts = self.projections(self.attention_norm(x)).view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(samples, length, width))
        return x + self.narrow(gelu(self.wide(self.norm(x))))


class Transformer(nn.Module):
    """A decoder-only transformer with norms before each part, as GPT-2 has them."""

    def __init__(self, characters, width, heads, layers, context):
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.top = nn.Linear(width, characters, bias=False)
        # Narrow, so that the first scores are all alike.
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, tokens):
        return self.top(self.norm(self.blocks(self.embedding(tokens) + self.positions)))


class Residual(nn.Module):
    """A block of a residual network: two convolutions of 3x3, or with `wide` one between two of 1x1."""

    def __init__(self, before, width, stride, wide):
        super().__init__()
        after = width * wide
        kernels = [(before, width, 1, 1), (width, width, 3, stride), (width, after, 1, 1)]
        if wide == 1:
            kernels = [(before, width, 3, stride), (width, width, 3, 1)]
        parts = []
        for inputs, outputs, size, step in kernels:
            parts += [nn.Conv2d(inputs, outputs, size, step, size // 2, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.parts = nn.Sequential(*parts[:-1])
        self.short = nn.Identity()
        if stride != 1 or before != after:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x):
        return (self.parts(x) + self.short(x)).relu()


def resnet(side, blocks, wide, outputs):
    """A residual network; for large pictures it starts with a convolution of 7x7 and pooling."""
    if side > 64:
        layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    else:
        layers = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    before = 64
    for stage, count in enumerate(blocks):
        for number in range(count):
            layers.append(Residual(before, 64 << stage, 2 if stage and not number else 1, wide))
            before = (64 << stage) * wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, outputs))
