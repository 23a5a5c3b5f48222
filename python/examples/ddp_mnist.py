"""Digits on several learners, with one line for AdaComp.

    torchrun --nproc-per-node 2 python/examples/ddp_mnist.py
    torchrun --nproc-per-node 2 python/examples/ddp_mnist.py --mode builtin    # without it

The digits are drawn by the example; `--data FOLDER` takes MNIST from its idx files. With `--save FOLDER` every learner saves its
state after each epoch, and goes on from there if it is started again.
"""

import argparse
import json
import logging
import os
from pathlib import Path

import torch
import torch.distributed as dist
from data import drawn, mnist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import adacomp.torch


def model():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 5 * 5, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mode", choices=["auto", "on", "off", "builtin"], default="auto", help="`builtin` is DDP without a hook"
    )
    parser.add_argument("--strategy", choices=["auto", "gather", "reduce", "sharded"], default="auto")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=100, help="samples of a step, over all learners")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--data", type=Path, help="the folder with MNIST's idx files; without it, digits are drawn")
    parser.add_argument("--save", type=Path, help="where to save, and to go on from")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    return parser.parse_args()


def main():
    options = arguments()
    # AdaComp says there that it is attached, and each time it decides what is faster.
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # One thread a learner where several share a machine, as torchrun's default has it.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    learner, learners = dist.get_rank(), dist.get_world_size()
    (images, labels), (test_images, test_labels) = (
        mnist(options.data, train) if options.data else drawn(train) for train in (True, False)
    )

    torch.manual_seed(1)
    ddp = DistributedDataParallel(model())
    # This is the line.
    hook = None if options.mode == "builtin" else adacomp.torch.attach(ddp, mode=options.mode, strategy=options.strategy)

    optimizer = torch.optim.SGD(ddp.parameters(), options.lr, momentum=0.9)
    first = load(options.save, ddp, optimizer, hook) if options.save else 0
    error = test_error(ddp.module, test_images, test_labels) if first >= options.epochs else None
    for epoch in range(first, options.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1000 + epoch))
        for batch in order[: len(order) // options.batch * options.batch].split(options.batch):
            own = batch[learner::learners]
            optimizer.zero_grad()
            cross_entropy(ddp(images[own]), labels[own]).backward()
            optimizer.step()
        error = test_error(ddp.module, test_images, test_labels)
        if learner == 0:
            print(f"epoch {epoch + 1}: test error {error:.2f}%", flush=True)
        if options.save:
            save(options.save, ddp, optimizer, hook, epoch + 1)
    if learner == 0 and hook:
        print(hook)
    if learner == 0 and options.json:
        ratio = hook.stats()["compression_ratio"] if hook else None
        print(json.dumps({"mode": options.mode, "learners": learners, "test_error": error, "compression_ratio": ratio}))
    dist.destroy_process_group()


@torch.no_grad()
def test_error(module, images, labels):
    wrong = sum((module(x).argmax(1) != y).sum().item() for x, y in zip(images.split(500), labels.split(500)))
    return 100 * wrong / len(labels)


def save(folder, ddp, optimizer, hook, epoch):
    """Every learner its own, because each has its own residuals."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"learner-{dist.get_rank()}-of-{dist.get_world_size()}.pt"
    state = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save({**state, "adacomp": hook.state_dict() if hook else None}, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def load(folder, ddp, optimizer, hook):
    """The first epoch that is still to do."""
    path = folder / f"learner-{dist.get_rank()}-of-{dist.get_world_size()}.pt"
    if not path.exists():
        return 0
    state = torch.load(path)
    ddp.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if hook and state["adacomp"]:
        hook.load_state_dict(state["adacomp"])
    return state["epoch"]


if __name__ == "__main__":
    main()
