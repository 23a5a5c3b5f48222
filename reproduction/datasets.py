"""Data as the program has it, from where `adacomp data get` puts it."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from reproduction.speech import Speech

Batch = tuple[Tensor, Tensor]


class Pictures:
    """Pictures and their classes, with each channel's mean and deviation taken out; augmented ones are shifted and mirrored."""

    classes = 10

    def __init__(self, read: Callable[[Path, bool], Batch], folder: Path, augment: bool, side: int | None) -> None:
        (images, self.labels), (test, self.test_labels) = read(folder, True), read(folder, False)
        mean, deviation = images.mean((0, 2, 3), keepdim=True), images.std((0, 2, 3), keepdim=True)
        self.images, self.test_images = (images - mean) / deviation, (test - mean) / deviation
        # Pictures are enlarged for a model that is made for larger ones.
        self.augment, self.side = augment, side or images.shape[-1]

    def __len__(self) -> int:
        return len(self.labels)

    def begin_epoch(self, random: torch.Generator) -> None:
        pass

    def train(self, samples: Tensor, random: torch.Generator) -> Batch:
        images = self.images[samples]
        if self.augment:
            # A network with norms between convolutions takes three quarters of the time with channels last.
            images = torch.stack([_shifted(image, random) for image in images]).contiguous(memory_format=torch.channels_last)
        return self._sized(images), self.labels[samples]

    def test(self) -> Iterator[Batch]:
        for images, labels in zip(self.test_images.split(100), self.test_labels.split(100)):
            yield self._sized(images), labels

    def _sized(self, images: Tensor) -> Tensor:
        if self.side == images.shape[-1]:
            return images
        return torch.nn.functional.interpolate(images, size=(self.side, self.side), mode="bilinear")


def _shifted(image: Tensor, random: torch.Generator) -> Tensor:
    padded = torch.nn.functional.pad(image, (4, 4, 4, 4))
    x, y, mirror = (int(torch.randint(limit, (), generator=random)) for limit in (9, 9, 2))
    shifted = padded[:, y : y + image.shape[1], x : x + image.shape[2]]
    return shifted.flip(2) if mirror else shifted


class Text:
    """Tiny Shakespeare by characters: samples of equal length, of which each epoch cuts others. The last tenth is for testing."""

    def __init__(self, folder: Path, length: int) -> None:
        characters = numpy.frombuffer((folder / "input.txt").read_bytes(), numpy.uint8)
        alphabet, tokens = numpy.unique(characters, return_inverse=True)
        middle = len(tokens) * 9 // 10
        self.tokens, self.test_tokens = (torch.from_numpy(part) for part in (tokens[:middle], tokens[middle:]))
        self.length, self.classes = length, len(alphabet)
        self.offset = 0

    def __len__(self) -> int:
        # One less than fits, because an epoch may start to cut anywhere within the first.
        return (len(self.tokens) - 1) // self.length - 1

    def begin_epoch(self, random: torch.Generator) -> None:
        self.offset = int(torch.randint(self.length, (), generator=random))

    def train(self, samples: Tensor, random: torch.Generator) -> Batch:
        return self._cut(self.tokens, [self.offset + int(sample) * self.length for sample in samples])

    def test(self) -> Iterator[Batch]:
        starts = range(0, len(self.test_tokens) - self.length, self.length)
        for first in range(0, len(starts), 100):
            yield self._cut(self.test_tokens, list(starts[first : first + 100]))

    def _cut(self, tokens: Tensor, starts: list[int]) -> Batch:
        rows = torch.stack([tokens[start : start + self.length + 1] for start in starts])
        return rows[:, :-1], rows[:, 1:]


def folder_of(name: str) -> Path:
    """Returns where `adacomp data get NAME` puts data."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("ADACOMP_DATA") or cache / "adacomp") / name


def mnist(folder: Path, train: bool) -> Batch:
    """Returns images from -1 to 1, and labels, from idx files."""
    part = "train" if train else "t10k"
    images = numpy.fromfile(folder / f"{part}-images-idx3-ubyte", numpy.uint8)[16:].reshape(-1, 1, 28, 28)
    return samples(images, numpy.fromfile(folder / f"{part}-labels-idx1-ubyte", numpy.uint8)[8:])


def cifar10(folder: Path, train: bool) -> Batch:
    """Returns the same from CIFAR-10's binary files, or from the pictures that `adacomp data get cifar10` brings, one a row."""
    names = [f"data_batch_{number}" for number in range(1, 6)] if train else ["test_batch"]
    if (folder / f"{names[0]}.bin").exists():
        rows = numpy.concatenate([numpy.fromfile(folder / f"{name}.bin", numpy.uint8).reshape(-1, 3073) for name in names])
        return samples(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0])
    rows = numpy.concatenate([numpy.asarray(Image.open(folder / f"{name}.png").convert("RGB")) for name in names])
    labels = json.loads((folder / f"{'train' if train else 'test'}_lables.json").read_text())
    return samples(rows.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2), numpy.array(labels))


def samples(images: NDArray[numpy.uint8], labels: NDArray[Any]) -> Batch:
    return torch.from_numpy(images / numpy.float32(127.5) - 1), torch.from_numpy(labels.astype(numpy.int64))


def load(name: str, augment: bool, length: int, side: int | None) -> Pictures | Text | Speech:
    folder = folder_of(name)
    if not folder.is_dir():
        raise SystemExit(f"{folder} is missing: run `cargo run --release -- data get {name}`")
    if name == "shakespeare":
        return Text(folder, length)
    if name == "speech":
        return Speech(folder)
    return Pictures({"mnist": mnist, "cifar10": cifar10}[name], folder, augment, side)
