"""One learner of the network benchmark: step times of what people use now and of AdaComp, side by side over one link.

Started once for each learner by `python -m reproduction network`, which makes the links. All methods take turns, several
times, so that what else the machine does falls on all of them. Learner 0 prints a line of JSON for each.

With `--memory` it trains with one method and prints the most memory that the process has had: in the first steps, and later.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adacomp.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from reproduction.machines import INTERFACE
from reproduction.models import SAMPLES, Workload
from reproduction.network import LAYERS, SITE_WORKLOADS, WORKLOADS
from reproduction.studies import Result

# Steps before AdaComp is timed for the first time, or seconds, if these take longer. Residuals fill up meanwhile, and messages
# get several times shorter.
TRAINED = 150
TRAINED_SECONDS = 90.0
# Steps before a turn, with AdaComp and without; fewer if one takes more than SLOW seconds. AdaComp pads its messages for eight
# steps after DDP has made its buckets anew, which it does in the first ones.
WARM_UP = {True: 12, False: 2}
SLOW = 3.0
# Steps of a turn, at most. What is slow is the link's doing and hardly varies, so one will do; from VERY_SLOW seconds on it is
# the first.
STEPS = 5
VERY_SLOW = 30.0

# PyTorch's setting for the size of the first bucket.
FIRST_BUCKET = "_DEFAULT_FIRST_BUCKET_BYTES"

STRATEGIES = ["gather", "reduce", "sharded"]
FILLING = [*STRATEGIES, "auto", "node", "fsdp", "two", "local", "local-ahead"]
# Local steps: as many are a round, and with an overlap the average arrives so many steps later.
ROUND, DELAY = 30, 15
# Of a step: bytes by the interface, bytes by `stats()`, and processor time.
COSTS = ("sent", "said", "cpu")


def top_k_hook(residuals: dict[tuple[int, int], Tensor], bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Sends the largest 0.1% of each bucket, with error feedback: what people write themselves. Waits in the hook."""
    flat = bucket.buffer()
    residual = residuals.setdefault((bucket.index(), flat.numel()), torch.zeros_like(flat))
    residual += flat
    indices = residual.abs().topk(max(1, flat.numel() // 1000)).indices
    values = residual[indices]
    residual[indices] = 0
    learners = dist.get_world_size()
    all_indices = [torch.empty_like(indices, dtype=torch.int32) for _ in range(learners)]
    all_values = [torch.empty_like(values) for _ in range(learners)]
    works = [dist.all_gather(all_indices, indices.int(), async_op=True), dist.all_gather(all_values, values, async_op=True)]
    for work in works:
        work.wait()
    flat.zero_()
    for indices, values in zip(all_indices, all_values):
        flat.index_add_(0, indices.long(), values)
    flat.div_(learners)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(flat)
    return future


class Method:
    """A model and a way to exchange its gradients."""

    def __init__(self, name: str, workload: Workload, states: Path | None = None) -> None:
        self.name, self.workload, self.decided = name, workload, False
        # Samples of a step, steps after which all is the same again, and whether residuals have to be filled.
        self.samples, self.round, self.fills = SAMPLES, 1, name in FILLING
        # Where the state of a training that is under way is kept.
        self.states: Path | None = None
        self.hook: Any = None
        self.model: Any
        torch.manual_seed(0)
        model = workload.model()
        if name in ("hsdp", "fsdp"):
            self.model = sharded(model, whole=name == "hsdp")
            if name == "fsdp":
                self.hook = adacomp.torch.attach(self.model, node_mesh()["replicate"], mode="on", strategy="gather")
        elif name == "two":
            self.connect_two(model)
        elif name.startswith("local"):
            self.model = model
        else:
            self.connect(model, states)
        self.optimizer = workload.optimizer(model)
        if workload.name in SITE_WORKLOADS and name == "none":
            # Learners begin up to a round trip one after the other, and share the cores only when all of them run.
            self.round = ROUND
        if name.startswith("local"):
            self.round = ROUND
            mode: Any = "off" if name == "local-dense" else "on"
            delay = DELAY if name == "local-ahead" else 0
            options: Any = {"matrix": 50, "vector": 50, "min_elements": 1}
            self.hook = adacomp.torch.LocalSteps(model, self.optimizer, every=ROUND, delay=delay, mode=mode, **options)

    def connect(self, model: torch.nn.Module, states: Path | None) -> None:
        """Wraps the model in DDP, with a hook."""
        name, options = self.name, dict[str, Any]()
        if name.startswith("powersgd"):
            # With several buckets it hangs on Gloo in about half of all runs, because it starts collectives in callbacks.
            setattr(dist, FIRST_BUCKET, 1 << 40)
            options["bucket_cap_mb"] = 1 << 20
        # Learners start from the same seed, and broadcasting would take long on slow links.
        self.model = DistributedDataParallel(model, init_sync=False, gradient_as_bucket_view=True, **options)
        setattr(dist, FIRST_BUCKET, 1 << 20)
        if name in ("fp16", "bf16"):
            self.model.register_comm_hook(None, getattr(default_hooks, f"{name}_compress_hook"))
        elif name.startswith("powersgd"):
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=int(name[-1]), start_powerSGD_iter=2)
            # Its first steps are dense, which is not what is timed.
            state.iter = state.start_powerSGD_iter
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif name == "top-k":
            self.model.register_comm_hook({}, top_k_hook)
        elif name == "node":
            self.hook = adacomp.torch.attach(self.model, mode="on", strategy="gather", node_size="auto")
        elif name == "auto" or name in STRATEGIES:
            mode: Any = "auto" if name == "auto" else "on"
            strategy: Any = "gather" if name == "auto" else name
            self.hook = adacomp.torch.attach(self.model, mode=mode, strategy=strategy)
            self.states = states and states / f"{self.workload.name}-{dist.get_world_size()}-{strategy}-{dist.get_rank()}.pt"

    def connect_two(self, model: torch.nn.Module) -> None:
        """Makes the first process of each machine a learner with the minibatch of the machine. The others do nothing."""
        places = int(os.environ["LOCAL_WORLD_SIZE"])
        first = list(range(0, dist.get_world_size(), places))
        group = dist.new_group(first)
        self.samples = places * SAMPLES if dist.get_rank() in first else 0
        self.model = model
        if self.samples:
            self.model = DistributedDataParallel(model, process_group=group, init_sync=False, gradient_as_bucket_view=True)
            self.hook = adacomp.torch.attach(self.model, mode="on", strategy="gather")

    def step(self) -> None:
        if not self.samples:
            return
        inputs, labels = self.workload.batch(self.samples)
        self.optimizer.zero_grad()
        with self.model.no_sync() if self.name == "none" else contextlib.nullcontext():
            outputs = self.model(inputs)
            cross_entropy(outputs.flatten(0, -2), labels.flatten()).backward()
        self.optimizer.step()

    def warm_up(self) -> list[float]:
        """Trains until buckets are rebuilt, residuals filled and auto mode has decided; returns the last steps' seconds, on the
        slowest learner."""
        if self.states:
            self.restore_or_train(self.states)
        elif self.fills and not self.decided:
            self.train_on(TRAINED_SECONDS)
        if self.name == "auto" and not self.decided:
            while self.hook.stats()["why"].startswith("trying"):
                self.step()
            if self.states and self.hook.stats()["compressing"]:
                # The trial has emptied the residuals.
                self.restore_or_train(self.states)
        self.states, self.decided = None, True
        times: list[float] = []
        while len(times) < WARM_UP[self.fills] and max(times, default=0.0) < SLOW:
            start = time.perf_counter()
            self.step()
            times.append(agreed(time.perf_counter() - start))
        return times

    def train_on(self, limit: float) -> None:
        """Trains until residuals are filled, or the time is over."""
        start = time.perf_counter()
        for _ in range(TRAINED):
            self.step()
            if agreed(time.perf_counter() - start) > limit:
                break

    def restore_or_train(self, states: Path) -> None:
        """Gets to the state of a training that is under way, which is kept for the next time."""
        if agreed(not states.exists()) == 0:
            state = torch.load(states)
            self.model.module.load_state_dict(state["model"])
            self.hook.load_state_dict(state["hook"])
        elif self.name != "auto":
            self.train_on(TRAINED_SECONDS)
            states.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"model": self.model.module.state_dict(), "hook": self.hook.state_dict()}, states)


def node_mesh() -> DeviceMesh:
    """Returns the mesh of machines and of processes in a machine."""
    places = int(os.environ["LOCAL_WORLD_SIZE"])
    return init_device_mesh("cpu", (dist.get_world_size() // places, places), mesh_dim_names=("replicate", "shard"))


def sharded(model: torch.nn.Module, whole: bool) -> torch.nn.Module:
    """Shards a model by FSDP2 inside of machines; or by HSDP, which averages between machines, too."""
    mesh = node_mesh()
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh if whole else mesh["shard"])
    fully_shard(model, mesh=mesh if whole else mesh["shard"])
    return model


def interface_bytes() -> int:
    """Returns the bytes that this machine has sent so far."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def agreed(value: float) -> float:
    """Returns the largest value of all learners."""
    tensor = torch.tensor([float(value)], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def machine() -> str:
    """Returns the name of this machine's processor."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    about = {key.strip(): value.strip() for key, _, value in lines}
    return f"{about.get('model name', platform.machine())}, family {about.get('cpu family')}, model {about.get('model')}"


def header(workload: Workload, method: str) -> Result:
    """Returns what each line starts with."""
    about = {"workload": workload.name, "parameters": workload.parameters, "learners": dist.get_world_size(), "method": method}
    return about | {"machine": machine()}


def measure(method: Method, budget: float) -> tuple[list[float], dict[str, float]]:
    """Returns the times of a turn of one method, and what a step costs."""

    def costs() -> list[float]:
        return [interface_bytes(), method.hook.stats()["bytes_sent"] if method.hook else 0, time.process_time()]

    dist.barrier()
    before = costs()
    times = method.warm_up()
    seconds, count = times[-1], 1
    if len(times) > 1 or seconds < VERY_SLOW or method.fills:
        count = method.round * max(1 if seconds > SLOW else 2, min(STEPS, int(budget / seconds / method.round)))
        times = []
        dist.barrier()
        before = costs()
        for _ in range(count):
            start = time.perf_counter()
            method.step()
            times.append(time.perf_counter() - start)
        if method.round > 1:
            times = [sum(times) / count]
    return times, {key: (end - start) / count for key, start, end in zip(COSTS, before, costs())}


def run(workload: Workload, names: list[str], options: argparse.Namespace) -> Iterator[Result]:
    """Measures all methods in turn; yields a line for each."""
    times: dict[str, list[float]] = {name: [] for name in names}
    costs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    # A trial takes long, and to fill residuals, so what has them need not begin again.
    kept: dict[str, Method] = {}
    for _ in range(options.blocks):
        for name in names:
            method = kept.get(name) or Method(name, workload, options.states)
            if name == "auto" or (method.fills and not options.states):
                kept[name] = method
            turn, cost = measure(method, options.budget)
            times[name] += turn
            costs[name].append(cost)
            if method.hook and name not in kept:
                method.hook.close()
            del method
    for name in names:
        cost = {key: agreed(statistics.median(entry[key] for entry in costs[name])) for key in COSTS}
        line = header(workload, name) | {
            "cores": os.cpu_count(),
            "step_seconds": statistics.median(times[name]),
            "steps": len(times[name]),
            "sent_bytes": round(cost["sent"]),
            "said_bytes": round(cost["said"]),
            "cpu_seconds": cost["cpu"],
        }
        if name == "auto":
            line["compressing"] = kept[name].hook.stats()["compressing"]
        yield line


def memory(workload: Workload, name: str) -> Result:
    """Returns the most memory that a learner takes with one method: in its first steps, and when residuals are filled."""
    method = Method(name, workload)
    method.warm_up()
    first = peak_bytes()
    if method.hook:
        method.train_on(TRAINED_SECONDS)
    # Forgets the peak.
    Path("/proc/self/clear_refs").write_text("5")
    method.warm_up()
    return header(workload, name) | {"peak_bytes": round(agreed(first)), "later_peak_bytes": round(agreed(peak_bytes()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=[*WORKLOADS, LAYERS, *SITE_WORKLOADS])
    parser.add_argument("--methods", required=True, help="which, separated by commas")
    parser.add_argument("--blocks", type=int, default=3, help="turns of each method")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of a turn, roughly")
    parser.add_argument("--states", type=Path, help="a folder for states of training that is under way")
    parser.add_argument("--memory", action="store_true", help="measure the memory of one method instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = Workload(options.workload, torch.Generator().manual_seed(dist.get_rank()))
    names = options.methods.split(",")
    for line in [memory(workload, names[0])] if options.memory else run(workload, names, options):
        if dist.get_rank() == 0:
            print(json.dumps(line), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
