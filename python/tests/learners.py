"""Learners in real processes, which stay from test to test because starting them takes long, under time limits that kill them."""

import multiprocessing
import os
import socket
import traceback

LIMIT = 120


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(learner, learners, port, pipe):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(learner), WORLD_SIZE=str(learners))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Learners:
    """So many processes with a process group."""

    def __init__(self, count):
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self.processes, self.pipes = [], []
        for learner in range(count):
            pipe, other = context.Pipe()
            process = context.Process(target=_serve, args=(learner, count, port, other), daemon=True)
            process.start()
            self.processes.append(process)
            self.pipes.append(pipe)

    def start(self, function, *arguments):
        """Has every learner call a function of a module."""
        for pipe in self.pipes:
            pipe.send((function, arguments))

    def result(self, learner, limit=LIMIT):
        """What it gave; its error is ours."""
        if not self.pipes[learner].poll(limit):
            self.kill()
            raise TimeoutError(f"learner {learner} did not answer within {limit} s")
        good, value = self.pipes[learner].recv()
        if not good:
            raise AssertionError(f"learner {learner}:\n{value}")
        return value

    def run(self, function, *arguments, limit=LIMIT):
        """The results of all."""
        self.start(function, *arguments)
        outcomes = []
        for learner in range(len(self.pipes)):
            try:
                outcomes.append(self.result(learner, limit))
            except AssertionError as error:
                outcomes.append(error)
        for outcome in outcomes:
            if isinstance(outcome, AssertionError):
                # They may have lost each other.
                self.kill()
                raise outcome
        return outcomes

    @property
    def alive(self):
        return all(process.is_alive() for process in self.processes)

    def kill(self):
        for process in self.processes:
            process.kill()
            process.join()
