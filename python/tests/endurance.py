"""Four learners that train, are killed and go on, for as long as asked; and what must hold all the time.

    python python/tests/endurance.py --minutes 120

Every few minutes a learner is killed. The others close their hooks, and with a new process in its place all go on from the last
checkpoint. Learner 0 is never killed, so what leaks in a step or at a resume adds up in it. Each third step is of a model with
another strategy. Between steps the learners sleep, so that the machine can be used for other work.

There is a line of JSON for each minute and for each kill. In the end all must hold:

- At every resume each learner has loaded what it had saved, to the bit.
- At every checkpoint the mean of the gradients that learners gave is the sum of the averages plus the mean of the residuals.
- The last weights, moments and residuals are those of a run that nobody disturbed, to the bit.
- Learner 0's memory, threads, file descriptors and listening ports do not grow, and no process or file is left.
"""

import argparse
import gc
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import checkpoint
from training import attach, batch, make, mean_over_learners, residual_mean

LEARNERS = 4
STRATEGIES = ["gather", "reduce", "sharded"]
SAVE_EVERY = 9
# Much longer than anything takes, also on a machine that has other work.
TIMEOUT = 300.0


class Account:
    """A model that trains, and what its learner gave and received since the first step."""

    def __init__(self, strategy: str) -> None:
        self.model = make()
        self.hook = attach(self.model, strategy=strategy, timeout=TIMEOUT)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)
        parameters = list(self.model.parameters())
        self.given, self.magnitude, self.received = (
            [torch.zeros_like(p, dtype=torch.float64) for p in parameters] for _ in range(3)
        )
        for numbers in zip(parameters, self.given, self.magnitude):
            _watch(*numbers)

    def train(self, step: int) -> None:
        images, labels = batch(step)
        self.optimizer.zero_grad()
        cross_entropy(self.model(images), labels).backward()
        for received, parameter in zip(self.received, self.model.parameters()):
            assert parameter.grad is not None
            received += parameter.grad
        self.optimizer.step()

    def imbalance(self) -> float:
        """Returns how far what was given is from what was received and what is kept, relative to all that was given."""
        given, magnitude, received = (
            torch.cat([each.flatten() for each in part]) for part in (self.given, self.magnitude, self.received)
        )
        kept = residual_mean(self.model, self.hook).double()
        return float((mean_over_learners(given) - received - kept).abs().max() / mean_over_learners(magnitude).max())

    def common(self) -> dict[str, Any]:
        return {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict(), "received": self.received}

    def own(self) -> dict[str, Any]:
        return {"hook": self.hook.state_dict(), "given": self.given, "magnitude": self.magnitude}

    def load(self, common: dict[str, Any], own: list[dict[str, Any]]) -> None:
        self.model.module.load_state_dict(common["model"])
        self.optimizer.load_state_dict(common["optimizer"])
        self.received = common["received"]
        self.hook.load_state_dict([each["hook"] for each in own])
        for part, sums in (("given", self.given), ("magnitude", self.magnitude)):
            for number, values in enumerate(sums):
                # As residuals: with another number of learners each goes on with the mean.
                values.copy_(torch.stack([state[part][number] for state in own]).mean(0))


def _watch(parameter: torch.Tensor, given: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Adds up this learner's own gradients of a parameter, before they are averaged."""

    def add(gradient: torch.Tensor) -> None:
        given.add_(gradient)
        magnitude.add_(gradient.abs())

    parameter.register_hook(add)


def digest(states: list[dict[str, Any]]) -> str:
    """Returns the same for the same names and bits."""
    result = hashlib.sha256()

    def add(value: object) -> None:
        if isinstance(value, torch.Tensor):
            result.update(value.contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key, each in sorted(value.items()):
                result.update(str(key).encode())
                add(each)
        elif isinstance(value, list):
            for each in value:
                add(each)
        else:
            result.update(repr(value).encode())

    add(states)
    return result.hexdigest()[:16]


def total(states: list[dict[str, Any]]) -> float:
    """Returns the sum of all that a learner keeps."""
    return sum(
        float(values.double().sum()) for state in states for key, values in state["hook"].items() if not key.endswith("adacomp")
    )


# A learner.


def learner(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", options.port, is_master=False, timeout=timedelta(seconds=TIMEOUT))
    generation = options.generation
    while True:
        with group(store, options.learner, options.learners, generation):
            lost = train(store, generation, options)
        if lost is None:
            return
        gc.collect()
        generation += 1
        store.wait([f"generation/{generation}"], timedelta(seconds=TIMEOUT))


@contextmanager
def group(store: dist.TCPStore, rank: int, learners: int, generation: int) -> Iterator[None]:
    own = dist.PrefixStore(f"group/{generation}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=learners, timeout=timedelta(seconds=TIMEOUT))
    try:
        yield
    finally:
        dist.destroy_process_group()


def train(store: dist.TCPStore, generation: int, options: argparse.Namespace) -> str | None:
    """Trains until the end; returns None, or what it is told when others are lost."""
    accounts: list[Account] = []
    try:
        accounts = [Account(strategy) for strategy in STRATEGIES]
        step, status = resume(options.folder, accounts)

        def tell(**more: object) -> None:
            status.update(generation=generation, step=step, **more)
            store.set(f"learner/{options.learner}", json.dumps(status))

        tell()
        while True:
            accounts[step % len(accounts)].train(step)
            step += 1
            if step % SAVE_EVERY == 0:
                imbalance = [account.imbalance() for account in accounts]
                common, own = [account.common() for account in accounts], [account.own() for account in accounts]
                checkpoint.save(options.folder, step, {"all": common}, {"all": own, "total": total(own)})
                # Learner 0 says whether it was the last one.
                end = [step == options.steps or store.check(["end"])]
                dist.broadcast_object_list(end)
                tell(imbalance=max(imbalance), saved=step, digest=digest([*common, *own]) if end[0] else None)
                if end[0]:
                    return None
            else:
                tell()
            time.sleep(options.pause)
    except RuntimeError as error:
        return str(error)
    finally:
        for account in accounts:
            account.hook.close()


def resume(folder: Path, accounts: list[Account]) -> tuple[int, dict[str, Any]]:
    """Goes on from the last checkpoint; returns its step, and what is told of it."""
    saved = checkpoint.load(folder)
    if saved is None:
        return 0, {}
    step, common, own = saved
    for number, account in enumerate(accounts):
        account.load(common["all"][number], [each["all"][number] for each in own])
    loaded = [account.own() for account in accounts]
    status: dict[str, Any] = {
        "from": step,
        "loaded_total": total(loaded),
        "saved_total": sum(each["total"] for each in own) / len(own),
    }
    if len(own) == 1:
        pairs = ((account["hook"], before["hook"]) for account, before in zip(loaded, own[0]["all"]))
        assert all(digest([now]) == digest([before]) for now, before in pairs), "what was loaded is not what was saved"
    return step, status


# Who starts and kills them.


class Run:
    """Learners in processes of their own, and the store by which they find each other."""

    def __init__(self, folder: Path, pause: float, steps: int = 0) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT))
        self.folder, self.pause, self.steps = folder, pause, steps
        self.generation = 0
        self.processes = [self._start(number) for number in range(LEARNERS)]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        options = {"learner": number, "learners": LEARNERS, "port": self.store.port, "generation": self.generation}
        options |= {"folder": self.folder, "pause": self.pause, "steps": self.steps}
        words = [f"--{name}={value}" for name, value in options.items()]
        return subprocess.Popen([sys.executable, __file__, *words])

    def status(self, number: int) -> dict[str, Any]:
        key = f"learner/{number}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else {"generation": -1}

    def kill(self, victim: int) -> dict[str, Any]:
        """Kills a learner, and returns what is told when all go on with another in its place."""
        step, start = self.status(0)["step"], time.monotonic()
        self.processes[victim].send_signal(signal.SIGKILL)
        self.processes[victim].wait()
        self.generation += 1
        self.processes[victim] = self._start(victim)
        self.store.set(f"generation/{self.generation}", "")
        self.wait(lambda status: status["generation"] == self.generation)
        statuses = [self.status(number) for number in range(LEARNERS)]
        told = {key: [status[key] for status in statuses] for key in ("saved_total", "loaded_total")}
        assert told["saved_total"] == told["loaded_total"], told
        seconds = round(time.monotonic() - start, 1)
        return {"killed": victim, "step": step, "from": statuses[0]["from"], "seconds": seconds, **told}

    def measure(self) -> dict[str, list[int]]:
        """Returns what each learner's process takes."""
        measured = [measure(process.pid) for process in self.processes]
        return {key: [each[key] for each in measured] for key in measured[0]}

    def wait(self, reached: Callable[[dict[str, Any]], object], timeout: float = TIMEOUT) -> None:
        """Waits until all learners have reached something; if one ends early, or it takes too long, that is an error."""
        end = time.monotonic() + timeout
        while not all(map(reached, statuses := [self.status(number) for number in range(LEARNERS)])):
            codes = [process.poll() for process in self.processes]
            assert not any(codes), f"a learner has ended: {codes}"
            assert time.monotonic() < end, f"not within {timeout} s: {statuses}"
            time.sleep(0.2)

    def end(self, timeout: float = TIMEOUT) -> list[str]:
        """Waits until all have ended; returns the digests of all that they have."""
        self.wait(lambda status: status.get("digest"), timeout)
        assert [process.wait(TIMEOUT) for process in self.processes] == [0] * LEARNERS
        return [self.status(number)["digest"] for number in range(LEARNERS)]

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def measure(pid: int) -> dict[str, int]:
    """Returns what a process has of memory (MB), threads, file descriptors, and ports on which it listens."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(path))
        except FileNotFoundError:
            continue
    sockets = {line.split()[9] for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"}
    return {
        "rss": int(status["VmRSS"].split()[0]) // 1000,
        "anonymous": int(status["RssAnon"].split()[0]) // 1000,
        "threads": int(status["Threads"]),
        "descriptors": len(links),
        "ports": sum(link.removeprefix("socket:[").removesuffix("]") in sockets for link in links),
    }


class Log:
    """Lines of JSON, and what must hold over all of them."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.kills = 0
        self.imbalance = 0.0
        self.measured: list[dict[str, list[int]]] = []

    def say(self, **what: object) -> None:
        print(json.dumps({"minute": round((time.monotonic() - self.start) / 60, 2), **what}), flush=True)

    def add(self, run: Run) -> None:
        """Writes a line of what the learners have and take now."""
        status = run.status(0)
        self.imbalance = max(self.imbalance, status["imbalance"])
        self.measured.append(run.measure())
        self.say(kills=self.kills, step=status["step"], imbalance=self.imbalance, **self.measured[-1])

    def growth(self, key: str) -> tuple[int, int]:
        """Returns what learner 0 took at most in the first and in the last fifth of the time."""
        series = [measured[key][0] for measured in self.measured]
        part = max(1, len(series) // 5)
        return max(series[:part]), max(series[-part:])


def endure(minutes: float, kill_every: float, pause: float) -> None:
    """Trains with kills, then without; raises an error if something does not hold."""
    log = Log()
    with tempfile.TemporaryDirectory() as name:
        disturbed = Path(name) / "disturbed"
        with Run(disturbed, pause) as run:
            digests, last = _disturb(run, log, minutes, kill_every)
        left = sorted(str(path.relative_to(disturbed)) for path in disturbed.rglob("*"))
        log.say(step=last, digests=digests, left=left, next="the same without a kill")
        assert left == [f"step-{last}{file}" for file in ("", "/common.pt", *(f"/learner-{n}.pt" for n in range(LEARNERS)))]
        with Run(Path(name) / "undisturbed", 0.0, last) as run:
            assert run.end(60 * minutes + TIMEOUT) == digests, "the bits are not those of a run without a kill"
    children = "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))
    assert not children, f"processes are left: {children}"
    grown = {key: log.growth(key) for key in log.measured[0]}
    log.say(steps=last, kills=log.kills, imbalance=log.imbalance, same_bits=True, first_and_last=grown)
    assert log.imbalance < 1e-6
    # What the allocator keeps settles within the first resumes.
    assert all(last <= first + (40 if key in ("rss", "anonymous") else 2) for key, (first, last) in grown.items()), grown


def _disturb(run: Run, log: Log, minutes: float, kill_every: float) -> tuple[list[str], int]:
    """Kills a learner every now and then; returns what all have in the end, and the last step."""
    draws = random.Random(1)
    # After the first resume, because what PyTorch loads for it stays.
    next_report, next_kill = float("inf"), 0.0
    run.wait(lambda status: status.get("saved", 0) > 0)
    while time.monotonic() < log.start + 60 * minutes:
        if time.monotonic() >= next_kill:
            log.say(**run.kill(1 + log.kills % (LEARNERS - 1)))
            log.kills += 1
            run.wait(lambda status: "saved" in status)
            log.add(run)
            next_report = time.monotonic() + 60
            next_kill = time.monotonic() + kill_every * draws.uniform(0.8, 1.2)
        elif time.monotonic() >= next_report:
            log.add(run)
            next_report += 60
        time.sleep(0.5)
        run.wait(lambda status: True)
    run.store.set("end", "")
    return run.end(), run.status(0)["saved"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--kill-every", type=float, default=15.0, metavar="SECONDS")
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="sleep after each step")
    for name in ("learner", "learners", "port", "generation", "steps"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    if options.learner is None:
        endure(options.minutes, options.kill_every, options.pause)
    else:
        learner(options)
