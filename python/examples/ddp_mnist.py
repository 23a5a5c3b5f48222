r"""Digits on several learners, with one line for AdaComp.

    torchrun --nproc-per-node 2 python/examples/ddp_mnist.py
    torchrun --nproc-per-node 2 python/examples/ddp_mnist.py --mode builtin    # without it

The digits are drawn by the example; `--data FOLDER` takes MNIST from its idx files. With `--node-size auto` the processes of a
machine are one learner: gradients are dense inside, and compressed between machines.

With `--save FOLDER` the learners save what they have, and go on from there if they are started again, also with another number of
learners. With `--max-restarts` torchrun starts them again by itself when one dies; with `--mode on` the result is the same to the
bit. (Without the variable, PyTorch 2.15's learners look for each other in vain after a restart.)

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 4 --max-restarts 3 \
        python/examples/ddp_mnist.py --mode on --save runs/mnist
"""

import argparse
import json
import logging
import os
from pathlib import Path

import checkpoint
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
    parser.add_argument("--node-size", default="1", help="processes that are one learner, or `auto`: those of a machine")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=100, help="samples of a step, over all learners")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--data", type=Path, help="the folder with MNIST's idx files; without it, digits are drawn")
    parser.add_argument("--save", type=Path, help="where to save, and to go on from")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
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
    hook = None
    if options.mode != "builtin":
        node_size = "auto" if options.node_size == "auto" else int(options.node_size)
        hook = adacomp.torch.attach(ddp, mode=options.mode, strategy=options.strategy, node_size=node_size)

    optimizer = torch.optim.SGD(ddp.parameters(), options.lr, momentum=0.9)
    step = load(options.save, ddp, optimizer, hook) if options.save else 0
    if learner == 0 and step:
        print(f"goes on from step {step} with {learners} learners", flush=True)
    steps, error = len(images) // options.batch, None
    for epoch in range(step // steps, options.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1000 + epoch)).split(options.batch)
        for batch in order[step % steps : steps]:
            own = batch[learner::learners]
            optimizer.zero_grad()
            cross_entropy(ddp(images[own]), labels[own]).backward()
            optimizer.step()
            step += 1
            if options.save and (step % options.save_every == 0 or step == options.epochs * steps):
                save(options.save, step, ddp, optimizer, hook)
        if learner == 0:
            error = test_error(ddp.module, test_images, test_labels)
            print(f"epoch {epoch + 1}: test error {error:.2f}%", flush=True)
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


def save(folder, step, ddp, optimizer, hook):
    """Model and optimiser are the same on all learners; each has its own residuals."""
    common = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint.save(folder, step, common, {"adacomp": hook.state_dict() if hook else None})


def load(folder, ddp, optimizer, hook):
    """Returns the steps that are done."""
    saved = checkpoint.load(folder)
    if saved is None:
        return 0
    step, common, own = saved
    ddp.module.load_state_dict(common["model"])
    optimizer.load_state_dict(common["optimizer"])
    if hook and own[0]["adacomp"]:
        hook.load_state_dict([each["adacomp"] for each in own])
    return step


if __name__ == "__main__":
    main()
