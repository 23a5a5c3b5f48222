"""The network benchmark: step times of DDP training over links of several speeds, each learner in its own namespace."""

import json
import sys
import time
from contextlib import ExitStack
from itertools import product

from reproduction import HERE, ROOT
from reproduction.machines import INTERFACE, far_machines, machines, name, on, run_together
from reproduction.studies import Result, json_lines

RESULTS = HERE / "results" / "network.jsonl"


# Links by their rates: how often each method takes its turn, and for how many seconds.
LINKS = {"unshaped": (3, 2), "10gbit": (3, 2), "1gbit": (3, 2), "100mbit": (2, 2), "10mbit": (1, 2)}
WORKLOADS = ["mlp", "resnet18", "lstm"]
# A model of 1,000 layers, for what each costs beside its elements. It is measured by name, and is in no table.
LAYERS = "layers"
LEARNERS = [2, 4]
METHODS = ["builtin", "fp16", "bf16", "powersgd-1", "powersgd-4", "top-k", "gather", "reduce", "sharded", "auto", "none"]
# What the tables have: the mlp over all links, and four learners and the other workloads over those that matter.
CELLS = [("mlp", 2, link) for link in LINKS]
USUAL = ["unshaped", "1gbit", "100mbit"]
CELLS += [case for case in product(WORKLOADS, LEARNERS, USUAL) if case not in CELLS]

# Two machines of two processes each, and what is compared there: DDP and HSDP; four learners; two, by DDP and by FSDP2; and two
# processes alone, one on each machine, each with the minibatch of a machine.
NODES = "2x2"
PLACES = 2
NODE_METHODS = ["builtin", "hsdp", "gather", "node", "fsdp", "two", "none"]
NODE_CELLS = [("mlp", "1gbit"), ("mlp", "100mbit"), ("resnet18", "1gbit")]

# Four sites with a processor core's worth of computing each, a link of this rate and a delay each way, in seconds.
SITES = "sites"
SITE_RATE, SITE_DELAY, SITE_LINK = "100mbit", 0.05, "100mbit, 100 ms"
SITE_WORKLOADS = ["transformer"]
SITE_METHODS = ["builtin", "powersgd-1", "gather", "local-dense", "local", "local-ahead", "none"]

# Freed memory stays with the process, as with the allocators that PyTorch's guide to tuning advises. Without it a third of a step
# goes into cleared pages for each gradient.
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1000000000000"}
# Freed memory goes back at once, so that what the process has is what is in use.
GIVES_MEMORY_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}

# A run that takes longer is given up.
LIMIT = 3 * 3600.0


class NetworkResults:
    """What was measured: lines of step times, of machines of several processes, and of memory."""

    def __init__(self) -> None:
        self.steps: dict[tuple[str, int, str, str], Result] = {}
        self.nodes: dict[tuple[str, str, str], Result] = {}
        self.peaks: dict[tuple[str, str], Result] = {}
        for line in json_lines(RESULTS):
            if "places" in line:
                self.nodes.setdefault((line["workload"], line["link"], line["method"]), line)
            elif "step_seconds" in line:
                self.steps.setdefault((line["workload"], line["learners"], line["link"], line["method"]), line)
            else:
                self.peaks.setdefault((line["workload"], line["method"]), line)

    def step(self, workload: str, learners: int, link: str, method: str) -> Result | None:
        return self.steps.get((workload, learners, link, method))

    def links(self, workload: str, learners: int) -> list[str]:
        """Returns the links that were measured, the fastest first."""
        return [link for link in LINKS if self.step(workload, learners, link, "builtin")]

    def cases(self) -> list[tuple[str, int]]:
        """Returns the workloads and numbers of learners that were measured."""
        return [case for case in product(WORKLOADS, LEARNERS) if self.links(*case)]

    def relative(self, workload: str, learners: int, link: str, method: str) -> float | None:
        """Returns a method's step time as a multiple of DDP's own."""
        own, builtin = (self.step(workload, learners, link, one) for one in (method, "builtin"))
        return float(own["step_seconds"] / builtin["step_seconds"]) if own and builtin else None


def read_words(words: list[str]) -> dict[str, list[str]]:
    """Returns what words such as `mlp 2 1gbit` choose, by what they are."""
    known = {
        "a link": list(LINKS),
        "a workload": [*WORKLOADS, LAYERS, *SITE_WORKLOADS],
        "a number of learners": [str(number) for number in LEARNERS],
        "a method": list(dict.fromkeys([*METHODS, *NODE_METHODS, *SITE_METHODS])),
        "or": ["memory", NODES, SITES],
    }
    for word in words:
        if not any(word in values for values in known.values()):
            expected = ", ".join(f"{what} {values}" for what, values in known.items())
            raise SystemExit(f"`{word}`: expected {expected}")
    return {what: [value for value in values if value in words] for what, values in known.items()}


def bench(words: list[str]) -> None:
    """Measures what is chosen and not in the results yet. Chosen methods are printed only. Inside of namespaces."""
    links, workloads, numbers, methods, others = read_words(words).values()

    def chosen(workload: str, link: str) -> bool:
        return workload in (workloads or [workload]) and link in (links or [link])

    if not others or NODES in others:
        for workload, link in NODE_CELLS:
            if chosen(workload, link) and not numbers:
                measure_nodes(workload, link, methods)
    if not others or SITES in others:
        for workload in SITE_WORKLOADS:
            if chosen(workload, SITE_LINK) and not numbers:
                measure_sites(workload, methods)
    if not others:
        named = list(product({LAYERS} & set(workloads), LEARNERS, links))
        for workload, learners, link in [*CELLS, *named]:
            if chosen(workload, link) and str(learners) in (numbers or [str(learners)]):
                measure(workload, learners, link, methods)
    if not words or "memory" in others:
        # Memory does not depend on the link, nor much on the number of learners.
        for workload in workloads or WORKLOADS:
            measure_memory(workload, LEARNERS[0], methods)


def measure_nodes(workload: str, link: str, methods: list[str]) -> None:
    print(f"{workload}, {NODES}, {link}", flush=True)
    done = NetworkResults()
    if not methods and all((workload, link, method) in done.nodes for method in NODE_METHODS):
        print("is there already")
        return
    arguments = ["--blocks", "2", "--budget", "3", "--methods", ",".join(methods or NODE_METHODS)]
    with machines(2, link):
        lines = train(workload, 4, arguments, KEEPS_MEMORY, PLACES)
    show_and_keep([{"link": link, "places": PLACES} | line for line in lines], keep=not methods)


def measure_sites(workload: str, methods: list[str]) -> None:
    print(f"{workload}, {SITE_LINK}", flush=True)
    done = NetworkResults()
    if not methods and all(done.step(workload, 4, SITE_LINK, method) for method in SITE_METHODS):
        print("is there already")
        return
    arguments = ["--blocks", "2", "--budget", "8", "--methods", ",".join(methods or SITE_METHODS)]
    with far_machines(4, SITE_RATE, SITE_DELAY):
        lines = train(workload, 4, arguments, KEEPS_MEMORY)
    show_and_keep([{"link": SITE_LINK} | line for line in lines], keep=not methods)


def measure(workload: str, learners: int, link: str, methods: list[str]) -> None:
    print(f"{workload}, {learners} learners, {link}", flush=True)
    done = NetworkResults()
    if not methods and all(done.step(workload, learners, link, method) for method in METHODS):
        print("is there already")
        return
    start = time.monotonic()
    turns, seconds = LINKS[link]
    arguments = ["--states", str(ROOT / "target" / "network"), "--blocks", str(turns), "--budget", str(seconds)]
    arguments += ["--methods", ",".join(methods or METHODS)]
    with machines(learners, None if link == "unshaped" else link):
        lines = [{"link": link} | line for line in train(workload, learners, arguments, KEEPS_MEMORY)]
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


def show_and_keep(lines: list[Result], keep: bool) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    print(text, end="", flush=True)
    if keep:
        with RESULTS.open("a") as file:
            file.write(text)


def train(workload: str, learners: int, arguments: list[str], allocator: dict[str, str], places: int = 1) -> list[Result]:
    """Runs a learner on each machine, or several, and returns the lines of the first."""
    command = [sys.executable, "-m", "reproduction.learner", workload, *arguments]
    common = {"MASTER_ADDR": name(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": INTERFACE, "WORLD_SIZE": str(learners)}
    common["LOCAL_WORLD_SIZE"] = str(places)
    environments = [allocator | common | {"RANK": str(learner)} for learner in range(learners)]
    logs = [ROOT / "target" / f"network-{learner}.log" for learner in range(learners)]
    with ExitStack() as stack:
        outputs = [stack.enter_context(log.open("w")) for log in logs]
        run_together([on(learner // places, command) for learner in range(learners)], LIMIT, environments, outputs)
    text = logs[0].read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"no results:\n{text}")
    return lines
