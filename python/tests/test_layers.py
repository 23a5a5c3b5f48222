"""A model of many layers: what a step costs in Python does not depend on them."""

import os
import sys

import torch
from learners import on_learners
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from training import attach

import adacomp.torch

PACKAGE = os.path.dirname(adacomp.torch.__file__)


class Instructions:
    """Counts what the interpreter executes of the package, on a thread on which it is set as the trace function."""

    def __init__(self):
        self.count = 0

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.count += event == "opcode"
        return self


def instructions(layers, in_place):
    """Returns how many instructions a compressed step of a model with this many small layers takes."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(16, 16) for _ in range(layers // 2)]))
    hook = attach(model, in_place, strategy="gather", min_elements=100)
    counted = Instructions()
    worker = hook._door.runtime._worker
    for step in range(4):
        loss = cross_entropy(model(torch.randn(4, 16)), torch.randint(0, 10, (4,)))
        if step == 3:
            worker.call(lambda: sys.settrace(counted))
            sys.settrace(counted)
        try:
            loss.backward()
        finally:
            if step == 3:
                sys.settrace(None)
                worker.call(lambda: sys.settrace(None))
    hook.close()
    return counted.count


@on_learners(2)
def test_python_executes_the_same_however_many_layers_there_are():
    for in_place in (True, False):
        few, many = instructions(8, in_place), instructions(800, in_place)
        assert 200 < few < 10_000, few
        assert many < 1.1 * few, (few, many)
