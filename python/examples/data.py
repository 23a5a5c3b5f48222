"""MNIST and CIFAR10 from the files that everybody has."""

import gzip
import json
import os
import sys
from pathlib import Path

import numpy
import torch


def folder_of(name):
    """Where `adacomp data get NAME` puts them."""
    home = os.environ.get("ADACOMP_DATA") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "adacomp"
    return Path(home) / name


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


def cifar10(folder, train):
    """The same from CIFAR-10's binary files, or from the pictures that `adacomp data get cifar10` brings."""
    folder = Path(folder)
    names = [f"data_batch_{number}" for number in range(1, 6)] if train else ["test_batch"]
    if (folder / f"{names[0]}.bin").exists():
        rows = numpy.concatenate([numpy.fromfile(folder / f"{name}.bin", numpy.uint8).reshape(-1, 3073) for name in names])
        labels, images = rows[:, 0], rows[:, 1:].reshape(-1, 3, 32, 32)
    elif (folder / f"{names[0]}.png").exists():
        from PIL import Image

        rows = numpy.concatenate([numpy.asarray(Image.open(folder / f"{name}.png").convert("RGB")) for name in names])
        images = rows.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
        labels = numpy.array(json.loads((folder / f"{'train' if train else 'test'}_lables.json").read_text()))
    else:
        sys.exit(f"{folder} has no CIFAR-10: put its binary files there, or run `adacomp data get cifar10`")
    images = torch.from_numpy(images / numpy.float32(127.5) - 1)
    return images, torch.from_numpy(labels.astype(numpy.int64))
