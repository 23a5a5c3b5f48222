"""The same training by two doors: DDP with two learners, and HSDP (FSDP2) on two machines of two processes, all real processes.

Both have the same samples in each step, and a machine has as many as a learner of DDP. So results differ by the order of sums
only, which selections make larger, and by no more than two seeds do. Run by `python -m reproduction doors`; lines go to
results/doors.jsonl.
"""

import argparse
import json
import socket
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import adacomp.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from reproduction import HERE
from reproduction.datasets import load
from reproduction.machines import run_together
from reproduction.models import Transformer
from reproduction.studies import Result, json_lines

RESULTS = HERE / "results" / "doors.jsonl"
# Doors and their processes, and what they are called.
DOORS = {"ddp": 2, "hsdp": 4}
TITLES = {"ddp": "DDP, 2 learners", "hsdp": "HSDP, 2 machines of 2 processes"}
MODES = ["off", "on"]
SEEDS = [1, 2]
STEPS, MINIBATCH, TRACE = 500, 16, 50
# Hundreds of test samples, which all processes share.
TEST_PARTS = 8
# A run that takes longer is given up.
LIMIT = 1200


def opened(door: str, mode: Any, model: nn.Module) -> tuple[nn.Module, Any]:
    """Returns the model behind a door, and the hook."""
    if door == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return model, adacomp.torch.attach(model, mode=mode, matrix=50)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert isinstance(model, Transformer)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model, adacomp.torch.attach(model, mesh["replicate"], mode=mode, matrix=50)


def learn(door: str, mode: str, seed: int) -> None:
    """Trains as one process; the first prints the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    data = load("shakespeare", False, 64, None)
    torch.manual_seed(seed)
    whole = Transformer(data.classes, 256, 4, 4, 64)
    parameters = sum(parameter.numel() for parameter in whole.parameters())
    model, hook = opened(door, mode, whole)
    optimizer = torch.optim.Adam(model.parameters(), 0.001)
    random = torch.Generator().manual_seed(seed)
    history = []

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    for step in range(1, STEPS + 1):
        samples = torch.randint(len(data), (MINIBATCH,), generator=random)
        inputs, targets = data.train(samples, random)
        optimizer.zero_grad()
        loss_of(inputs.chunk(processes)[rank], targets.chunk(processes)[rank]).backward()
        optimizer.step()
        if step % TRACE == 0:
            parts = [part for part, _ in zip(data.test(), range(TEST_PARTS))][rank::processes]
            with torch.no_grad():
                loss = torch.stack([loss_of(*part) for part in parts]).mean()
            dist.all_reduce(loss)
            history.append({"step": step, "test_loss": loss.item() / processes})
    if rank == 0:
        about = {"door": door, "mode": mode, "seed": seed, "processes": processes, "parameters": parameters}
        ratio = hook.stats().get("compression_ratio")
        print(json.dumps(about | {"test_loss": history[-1]["test_loss"], "ratio": ratio, "history": history}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def results() -> dict[tuple[str, str, int], Result]:
    return {(line["door"], line["mode"], line["seed"]): line for line in json_lines(RESULTS)}


def run_and_keep(module: str, words: list[str], count: int, kept: Path) -> None:
    """Runs a module as this many processes that find each other, and keeps the line of JSON that one of them prints."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    with tempfile.TemporaryFile("w+") as output:
        commands = [[sys.executable, "-m", module, *words] for _ in range(count)]
        run_together(commands, LIMIT, [common | {"RANK": str(rank)} for rank in range(count)], [output] * count)
        output.seek(0)
        line = next(line for line in output if line.startswith("{"))
    print(line, end="", flush=True)
    with kept.open("a") as file:
        file.write(line)


def make() -> None:
    """Trains what has no result yet."""
    for seed, door, mode in product(SEEDS, DOORS, MODES):
        if (door, mode, seed) not in results():
            run_and_keep("reproduction.doors", [door, mode, str(seed)], DOORS[door], RESULTS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("door", choices=DOORS)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("seed", type=int)
    options = parser.parse_args()
    learn(options.door, options.mode, options.seed)
