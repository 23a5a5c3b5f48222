"""Data as the program has it, from where `adacomp data get` puts it."""

import sys
from pathlib import Path

import numpy
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from data import cifar10, folder_of, mnist  # noqa: E402


class Pictures:
    """Pictures and their classes, with each channel's mean and deviation taken out; augmented ones are shifted and mirrored."""

    def __init__(self, read, name, augment, side):
        (images, self.labels), (test, self.test_labels) = (read(folder_of(name), train) for train in (True, False))
        mean, deviation = (getattr(images, what)((0, 2, 3), keepdim=True) for what in ("mean", "std"))
        self.images, self.test_images = (images - mean) / deviation, (test - mean) / deviation
        # Pictures are shown larger where a model is made for larger ones.
        self.augment, self.side = augment, side
        self.classes = 10

    def __len__(self):
        return len(self.labels)

    def train(self, samples, random):
        images = self.images[samples]
        if self.augment:
            images = torch.stack([_shifted(image, random) for image in images])
        return self._sized(images), self.labels[samples]

    def test(self):
        parts = zip(self.test_images.split(100), self.test_labels.split(100))
        return ((self._sized(images), labels) for images, labels in parts)

    def _sized(self, images):
        if self.side in (None, images.shape[-1]):
            return images
        return torch.nn.functional.interpolate(images, size=(self.side, self.side), mode="bilinear")


def _shifted(image, random):
    padded = torch.nn.functional.pad(image, (4, 4, 4, 4))
    x, y, mirror = (int(torch.randint(limit, (), generator=random)) for limit in (9, 9, 2))
    shifted = padded[:, y : y + image.shape[1], x : x + image.shape[2]]
    return shifted.flip(2) if mirror else shifted


class Text:
    """Tiny Shakespeare by characters: samples of equal length, of which each epoch cuts others. The last tenth is for testing."""

    def __init__(self, length):
        characters = numpy.frombuffer((folder_of("shakespeare") / "input.txt").read_bytes(), numpy.uint8)
        alphabet, tokens = numpy.unique(characters, return_inverse=True)
        middle = len(tokens) * 9 // 10
        self.tokens, self.test_tokens = (torch.from_numpy(part) for part in (tokens[:middle], tokens[middle:]))
        self.length, self.classes = length, len(alphabet)
        self.offset = 0

    def __len__(self):
        # One less than fits, because an epoch may start to cut anywhere within the first.
        return (len(self.tokens) - 1) // self.length - 1

    def begin_epoch(self, random):
        self.offset = int(torch.randint(self.length, (), generator=random))

    def train(self, samples, random):
        return self._cut(self.tokens, [self.offset + int(sample) * self.length for sample in samples])

    def test(self):
        starts = range(0, len(self.test_tokens) - self.length, self.length)
        return (self._cut(self.test_tokens, starts[first : first + 100]) for first in range(0, len(starts), 100))

    def _cut(self, tokens, starts):
        rows = torch.stack([tokens[start : start + self.length + 1] for start in starts])
        return rows[:, :-1], rows[:, 1:]


def load(name, augment, length, side):
    if name == "shakespeare":
        return Text(length)
    return Pictures({"mnist": mnist, "cifar10": cifar10}[name], name, augment, side)
