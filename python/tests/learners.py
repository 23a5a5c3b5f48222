"""Learners in real processes, which stay from test to test because starting them takes long, under timeouts that kill them."""

import faulthandler
import functools
import gc
import multiprocessing
import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT = 120

# Processes are forks of one that has imported what takes long.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch.nn.parallel", "adacomp.torch", "pytest"])

_pools: dict[int, "Learners"] = {}


def learners(count: int) -> "Learners":
    """Returns this many processes with a process group, which other tests may have used before."""
    if count not in _pools or not _pools[count].alive:
        _pools[count] = Learners(count)
    return _pools[count]


def kill_all() -> None:
    for pool in _pools.values():
        pool.kill()


class Crash(AssertionError):
    """A learner's process was ended by a signal, and not by a test."""


def on_learners(*counts: int) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Runs a test on each of this many learners, with the arguments that pytest gives; several counts one after the other."""

    def decorate(body: Callable[..., object]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: object) -> None:
            for count in counts:
                learners(count).run(test, **arguments)

        test.body = body  # type: ignore[attr-defined]
        return test

    return decorate


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _serve(learner: int, count: int, port: int, pipe: Any, crash: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(learner), WORLD_SIZE=str(count))
    import torch
    import torch.distributed as dist

    # If it crashes, where all of its threads were.
    faulthandler.enable(open(crash, "w"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    while True:
        function, arguments, keywords = pipe.recv()
        try:
            result = getattr(function, "body", function)(*arguments, **keywords)
            # Hooks that are left end now, on all learners, and not while the next test begins.
            gc.collect()
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Learners:
    """Processes with a process group. As a context they are killed at its end: for tests that do harm to them."""

    def __init__(self, count: int) -> None:
        port = free_port()
        self.processes, self.pipes = [], []
        self._folder = tempfile.TemporaryDirectory(prefix="adacomp-tests-")
        self._crashes = [Path(self._folder.name) / str(learner) for learner in range(count)]
        for learner in range(count):
            pipe, other = _context.Pipe()
            arguments = (learner, count, port, other, str(self._crashes[learner]))
            process = _context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)
            self.pipes.append(pipe)

    def __enter__(self) -> "Learners":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, function: Callable[..., object], *arguments: object, **keywords: object) -> None:
        """Makes every learner call a function of a module."""
        for pipe in self.pipes:
            pipe.send((function, arguments, keywords))

    def result(self, learner: int, timeout: float = TIMEOUT) -> Any:
        """Returns what it gave, or raises its error."""
        if not self.pipes[learner].poll(timeout):
            self.kill()
            raise TimeoutError(f"learner {learner} did not answer within {timeout} s")
        try:
            good, value = self.pipes[learner].recv()
        except (EOFError, ConnectionError):
            self.processes[learner].join()
            code, threads = self.processes[learner].exitcode, self._crashes[learner].read_text()
            raise Crash(f"learner {learner} ended with {code}\n{threads}") from None
        if not good:
            raise AssertionError(f"learner {learner}:\n{value}")
        return value

    def run(self, function: Callable[..., object], *arguments: object, **keywords: object) -> list[Any]:
        """Returns the results of all."""
        self.start(function, *arguments, **keywords)
        outcomes: list[Any] = []
        errors: list[AssertionError] = []
        for learner in range(len(self.pipes)):
            try:
                outcomes.append(self.result(learner))
            except AssertionError as error:
                errors.append(error)
        if errors:
            # They may have lost each other.
            self.kill()
            # One that has crashed is why others fail.
            raise max(errors, key=lambda error: isinstance(error, Crash))
        return outcomes

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
