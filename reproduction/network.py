"""The network benchmark: step times of DDP training over links of several speeds, each learner in its own namespace."""

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reproduction import HERE, ROOT
from reproduction.machines import INTERFACE, machines, name, on, run_together

RESULTS = HERE / "results" / "network.jsonl"


@dataclass(frozen=True)
class Link:
    """A link: its speed, how often each method takes its turn, and for how many seconds."""

    name: str
    rate: str | None
    turns: int
    seconds: int


LINKS = [
    Link("unshaped", None, 2, 4),
    Link("10gbit", "10gbit", 2, 4),
    Link("1gbit", "1gbit", 2, 6),
    Link("100mbit", "100mbit", 2, 10),
    Link("10mbit", "10mbit", 1, 20),
]
WORKLOADS = ["mlp", "resnet18", "lstm"]
LEARNERS = [2, 4]
METHODS = ["builtin", "fp16", "bf16", "powersgd-1", "powersgd-4", "top-k", "gather", "reduce", "sharded", "auto", "none"]

# Freed memory stays with the process, as with the allocators that PyTorch's guide to tuning advises. Without it a third of a step
# goes into cleared pages for each gradient.
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1000000000000"}
# Freed memory goes back at once, so that what the process has is what is in use.
GIVES_MEMORY_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}

# A run that takes longer is given up.
LIMIT = 3 * 3600.0


class NetworkResults:
    """What was measured: lines of step times, and lines of memory."""

    def __init__(self, path: Path = RESULTS) -> None:
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.steps: dict[tuple[str, int, str, str], dict[str, Any]] = {}
        self.peaks: dict[tuple[str, str], dict[str, Any]] = {}
        for line in lines:
            if "step_seconds" in line:
                self.steps.setdefault((line["workload"], line["learners"], line["link"], line["method"]), line)
            else:
                self.peaks.setdefault((line["workload"], line["method"]), line)

    def step(self, workload: str, learners: int, link: str, method: str) -> dict[str, Any] | None:
        return self.steps.get((workload, learners, link, method))

    def links(self, workload: str, learners: int) -> list[str]:
        """Returns the links that were measured, the fastest first."""
        return [link.name for link in LINKS if self.step(workload, learners, link.name, "builtin")]

    def relative(self, workload: str, learners: int, link: str, method: str) -> float | None:
        """Returns a method's step time as a multiple of DDP's own."""
        own, builtin = (self.step(workload, learners, link, one) for one in (method, "builtin"))
        return float(own["step_seconds"] / builtin["step_seconds"]) if own and builtin else None


@dataclass
class Wanted:
    """What is to be measured; of what is not mentioned, all."""

    links: list[str] = field(default_factory=list)
    workloads: list[str] = field(default_factory=list)
    learners: list[int] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    memory: bool = False


def read_words(words: list[str]) -> Wanted:
    """Reads words such as `mlp 2 1gbit`."""
    wanted, links = Wanted(), [link.name for link in LINKS]
    for word in words:
        if word in links:
            wanted.links.append(word)
        elif word in WORKLOADS:
            wanted.workloads.append(word)
        elif word in METHODS:
            wanted.methods.append(word)
        elif word in map(str, LEARNERS):
            wanted.learners.append(int(word))
        elif word == "memory":
            wanted.memory = True
        else:
            known = f"a link {links}, a workload {WORKLOADS}, a number of learners {LEARNERS}, a method {METHODS}, or `memory`"
            raise SystemExit(f"`{word}`: expected {known}")
    return wanted


def bench(wanted: Wanted) -> None:
    """Measures what is not in the results yet. Chosen methods are printed only. Inside of namespaces."""
    for learners in wanted.learners or LEARNERS:
        for link in (link for link in LINKS if not wanted.links or link.name in wanted.links):
            for workload in wanted.workloads or WORKLOADS:
                if not wanted.memory:
                    measure(workload, learners, link, wanted.methods)
                # Memory does not depend on the link, nor much on the number of learners.
                if (wanted.memory or not wanted.methods) and learners == LEARNERS[0] and link.rate is None:
                    measure_memory(workload, learners, wanted.methods)


def measure(workload: str, learners: int, link: Link, methods: list[str]) -> None:
    print(f"{workload}, {learners} learners, {link.name}", flush=True)
    done = NetworkResults()
    if not methods and all(done.step(workload, learners, link.name, method) for method in METHODS):
        print("is there already")
        return
    start = time.monotonic()
    # Claims are made about the mlp; the others' turns are long enough once they share cores.
    turns = 1 if learners > 2 and workload != "mlp" else link.turns
    arguments = ["--states", str(ROOT / "target" / "network"), "--blocks", str(turns), "--budget", str(link.seconds)]
    arguments += ["--methods", ",".join(methods)] if methods else []
    with machines(learners, link.rate):
        lines = [{"link": link.name} | line for line in train(workload, learners, arguments, KEEPS_MEMORY)]
    show_and_keep(lines, keep=not methods)
    print(f"{time.monotonic() - start:.0f} s", flush=True)


def measure_memory(workload: str, learners: int, methods: list[str]) -> None:
    """Measures the most memory that learners take, each method in processes of its own."""
    print(f"{workload}, {learners} learners: memory", flush=True)
    done = NetworkResults()
    with machines(learners):
        for method in methods or METHODS:
            if methods or (workload, method) not in done.peaks:
                lines = train(workload, learners, ["--memory", "--methods", method], GIVES_MEMORY_BACK)
                show_and_keep(lines, keep=not methods)


def show_and_keep(lines: list[dict[str, Any]], keep: bool) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    print(text, end="", flush=True)
    if keep:
        with RESULTS.open("a") as file:
            file.write(text)


def train(workload: str, learners: int, arguments: list[str], allocator: dict[str, str]) -> list[dict[str, Any]]:
    """Runs a learner on each machine and returns the lines of the first."""
    command = [sys.executable, "-m", "reproduction.learner", workload, "--interface", INTERFACE, *arguments]
    common = {"MASTER_ADDR": name(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": INTERFACE, "WORLD_SIZE": str(learners)}
    environments = [allocator | common | {"RANK": str(learner)} for learner in range(learners)]
    logs = [ROOT / "target" / f"network-{learner}.log" for learner in range(learners)]
    outputs = [log.open("w") for log in logs]
    try:
        run_together([on(learner, command) for learner in range(learners)], LIMIT, environments, outputs)
    finally:
        for output in outputs:
            output.close()
    text = logs[0].read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"no results:\n{text}")
    return lines
