"""Digits that are drawn here, and MNIST from the files that everybody has."""

import gzip
import sys
from pathlib import Path

import numpy
import torch
from torch.nn.functional import affine_grid, grid_sample

# Ten digits, five pixels wide and seven high.
DIGITS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)


def drawn(train):
    """The same as `mnist`, but 6,000 and 1,000 digits that are drawn here: turned, stretched, moved, blurred and with noise."""
    count = 6000 if train else 1000
    generator = torch.Generator().manual_seed(1 if train else 2)
    shapes = torch.tensor([[[int(pixel) for pixel in row] for row in digit.split()] for digit in DIGITS], dtype=torch.float32)
    labels = torch.randint(0, 10, (count,), generator=generator)

    def uniform(low, high):
        return torch.empty(count).uniform_(low, high, generator=generator)

    angle, tall, wide, slant = uniform(-0.2, 0.2), uniform(1.1, 1.4), uniform(1.5, 2.0), uniform(-0.2, 0.2)
    row = torch.stack([wide * angle.cos(), wide * (slant - angle.sin()), uniform(-0.3, 0.3)], 1)
    column = torch.stack([tall * angle.sin(), tall * angle.cos(), uniform(-0.2, 0.2)], 1)
    grid = affine_grid(torch.stack([row, column], 1), (count, 1, 28, 28), align_corners=False)
    images = grid_sample(shapes[labels].unsqueeze(1), grid, align_corners=False)
    images += 0.2 * torch.randn(images.shape, generator=generator)
    return images.clamp(0, 1) * 2 - 1, labels


def mnist(folder, train):
    """Images from -1 to 1, and labels, from idx files."""
    part = "train" if train else "t10k"
    images = _idx(Path(folder) / f"{part}-images-idx3-ubyte", 16).reshape(-1, 1, 28, 28)
    labels = _idx(Path(folder) / f"{part}-labels-idx1-ubyte", 8)
    return torch.from_numpy(images / numpy.float32(127.5) - 1), torch.from_numpy(labels.astype(numpy.int64))


def _idx(path, header):
    for candidate, opened in ((path, open), (path.with_name(path.name + ".gz"), gzip.open)):
        if candidate.exists():
            with opened(candidate, "rb") as file:
                return numpy.frombuffer(file.read(), numpy.uint8)[header:]
    sys.exit(f"{path} is missing: put MNIST's four idx files there, or run `adacomp data get mnist`")
