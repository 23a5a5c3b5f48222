r"""FSDP2 inside of each machine, AdaComp between machines. Two machines of two processes, which here are all on one:

    torchrun --nproc-per-node 4 python/examples/fsdp_digits.py --places 2

On real machines leave `--places` out: it is what torchrun starts on each. The digits are drawn by the example.

With `--save FOLDER` all processes save after each epoch, by `torch.distributed.checkpoint`, and go on from there if as many are
started again.
"""

import argparse
import logging
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from data import drawn
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import adacomp.torch

WIDTH = 128


class Model(nn.Module):
    """A transformer that reads a picture row by row."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Linear(28, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(28, WIDTH))
        layers = [
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(2)
        ]
        self.blocks = nn.ModuleList(layers)
        self.top = nn.Linear(WIDTH, 10)

    def forward(self, images):
        x = self.rows(images.squeeze(1)) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.top(x.mean(1))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", type=int, default=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), help="processes of a machine")
    parser.add_argument("--mode", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=100, help="samples of a step, over all processes")
    parser.add_argument("--save", type=Path, help="where to save, and to go on from")
    return parser.parse_args()


def main():
    options = arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    process, processes = dist.get_rank(), dist.get_world_size()
    (images, labels), (test_images, test_labels) = ([part.to(device) for part in drawn(train)] for train in (True, False))

    torch.manual_seed(1)
    model = Model().to(device)
    machines = processes // options.places
    mesh = init_device_mesh(device.type, (machines, options.places), mesh_dim_names=("replicate", "shard"))
    # FSDP gets the axis inside of a machine, AdaComp the one between machines.
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    hook = adacomp.torch.attach(model, mesh["replicate"], mode=options.mode, matrix=50)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    first = load(options.save, model, optimizer, hook) if options.save else 0
    for epoch in range(first, options.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1000 + epoch))
        for batch in order.split(options.batch):
            own = batch[process::processes]
            optimizer.zero_grad()
            cross_entropy(model(images[own]), labels[own]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        with torch.no_grad():
            error = 100 * (model(test_images).argmax(1) != test_labels).float().mean().item()
        if process == 0:
            print(f"epoch {epoch + 1}: test error {error:.2f}%", flush=True)
        if options.save:
            save(options.save, epoch + 1, model, optimizer, hook)
    if process == 0:
        print(hook)
    dist.destroy_process_group()


def save(folder, epochs, model, optimizer, hook):
    """Each process has its shards of model and optimiser, and its own residuals."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "adacomp": hook}, checkpoint_id=folder / f"epoch-{epochs}")


def load(folder, model, optimizer, hook):
    """Returns the epochs that are done."""
    saved = sorted(int(path.name.removeprefix("epoch-")) for path in folder.glob("epoch-*") if (path / ".metadata").exists())
    if not saved:
        return 0
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments, "adacomp": hook}, checkpoint_id=folder / f"epoch-{saved[-1]}")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    if dist.get_rank() == 0:
        print(f"goes on after epoch {saved[-1]}", flush=True)
    return saved[-1]


if __name__ == "__main__":
    main()
