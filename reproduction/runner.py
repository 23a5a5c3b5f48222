"""Makes what is missing of the studies: one run a core, each result written down as soon as it is there."""

import json
import math
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from reproduction import ROOT
from reproduction.network import KEEPS_MEMORY
from reproduction.studies import RESULTS, Result, Run, read_results

WORK = ROOT / "target" / "reproduction"
PROGRAM = ROOT / "target" / "release" / "adacomp"


def make(runs: list[Run], at_once: int) -> list[str]:
    """Makes the results that are missing and returns what has failed. Runs that were stopped go on from their checkpoints."""
    done, writing = read_results(), threading.Lock()
    missing = [run for run in runs if run.key not in done]
    print(f"{len(runs)} runs, {len(missing)} of them to be made", flush=True)
    if any(run["trainer"] == "program" for run in missing):
        subprocess.run(["cargo", "build", "--release", "--locked", "-p", "adacomp-cli"], cwd=ROOT, check=True)

    def one(numbered: tuple[int, Run]) -> str | None:
        number, run = numbered
        print(f"[{number}/{len(missing)}] {run.name}", flush=True)
        start = time.monotonic()
        try:
            result = train(run)
        except RuntimeError as failure:
            return f"{run.name}: {failure}"
        with writing, RESULTS.open("a") as file:
            file.write(json.dumps({"run": run.settings, "result": result}) + "\n")
        print(f"    {run.name}: {time.monotonic() - start:.0f} s", flush=True)
        return None

    with ThreadPoolExecutor(at_once) as pool:
        return [failure for failure in pool.map(one, enumerate(missing, 1)) if failure]


def train(run: Run) -> Result:
    """Trains to the end and returns the result."""
    folder = WORK / run.name
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    with log.open("a") as file:
        command = command_of(run, folder)
        environment = {**os.environ, **KEEPS_MEMORY}
        status = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file).returncode
    lines = log.read_text().splitlines()
    if status:
        raise RuntimeError("\n".join([f"ended with {status}", *lines[-5:]]))
    objects: list[Result] = [json.loads(line) for line in lines if line.startswith("{")]
    if not objects:
        raise RuntimeError(f"{log} has no result")
    return program_result(objects) if run["trainer"] == "program" else objects[-1]


def command_of(run: Run, folder: Path) -> list[str]:
    if run["trainer"] == "pytorch":
        return [sys.executable, "-m", "reproduction.trainer", *run.arguments(), "--out", str(folder)]
    folder /= "run"
    # A run that names no strategy has the paper's, as in the trainer; the program would choose one.
    strategy = [] if run["strategy"] else ["--strategy", "gather"]
    # A run that was stopped in its first epoch has a folder, but no checkpoint to go on from.
    resume = ["--resume"] if any(folder.glob("checkpoint-*")) else [*run.arguments(), *strategy, "--out"]
    return [str(PROGRAM), "train", *resume, str(folder), "--threads", "1", "--json"]


def program_result(lines: list[Result]) -> Result:
    """Turns the program's lines, one an epoch, into the form of the PyTorch trainer's result."""
    # A run that was stopped and went on may have an epoch twice.
    epochs = {line["epoch"]: line for line in lines if "epoch" in line}
    if not epochs:
        raise RuntimeError("no epoch in the log")
    *_, last = epochs.values()
    total = last["total"]
    kept = ("step", "train_loss", "test_loss", "test_error")

    def norm(epoch: Result) -> float:
        return math.hypot(*(layer["residual_norm"] or 0.0 for layer in epoch["layers"]))

    return {
        "test_error": last["test_error"],
        "test_loss": last["test_loss"],
        "steps": last["step"],
        "seconds": total["seconds"],
        "bytes_sent": total["bytes_sent"] / last["step"],
        "frame_ratios": {
            "rice": total["frame_ratio"],
            "paper": total["paper_frame_ratio"],
            "floor": total["entropy_frame_ratio"],
        },
        "history": [{key: epoch[key] for key in kept} | {"residual_norm": norm(epoch)} for epoch in epochs.values()],
    }
