"""The studies' training as users do it: each learner a real process with DDP, `attach` and an optimiser of PyTorch.

The one-process trainer, which makes the studies, has the same samples. Run by `python -m reproduction doors`; lines go to
results/front.jsonl.
"""

import argparse
import hashlib
import json
import tempfile

import torch
import torch.distributed as dist
from adacomp.torch import LocalAdam, attach
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from reproduction import HERE
from reproduction.doors import run_and_keep
from reproduction.studies import Result, json_lines
from reproduction.trainer import Training, arguments

RESULTS = HERE / "results" / "front.jsonl"
LEARNERS = 4
# What is trained, by options of the trainer.
ROWS = {
    "mnist-cnn": "--epochs 2 --minibatch 128 --learning-rate 0.02",
    "resnet20": "--epochs 2 --minibatch 128 --learning-rate 0.1 --rate-warm-up 0.1",
    "shakespeare-transformer-small": "--epochs 2 --minibatch 32 --learning-rate 0.004 --optimizer adam --compress updates "
    "--rate before --bin-warm-up 0.1",
}
# By whom: real processes, or the trainer.
WAYS = {"processes": LEARNERS, "trainer": 1}


class Attached(Training):
    """The trainer, where this process is one of the learners."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        # The hook has it.
        self.scheme = None
        updates = self.updates_travel
        self.optimizer = torch.optim.SGD(self.parameters, options.learning_rate, 0.0 if updates else options.momentum)
        self.replica = DistributedDataParallel(self.model)
        rule = LocalAdam(betas=(options.momentum, options.slow_beta))
        local_adam, optimizer = (rule, self.optimizer) if updates else (None, None)
        warm_up = round(options.bin_warm_up * self.steps)
        attach(
            self.replica, mode="on", strategy=options.strategy, bin_warm_up=warm_up, local_adam=local_adam, optimizer=optimizer
        )

    def one_step(self, samples: Tensor, random: torch.Generator) -> float:
        inputs, targets = (all_.chunk(LEARNERS)[dist.get_rank()] for all_ in self.data.train(samples, random))
        self.optimizer.param_groups[0]["lr"] = self.learning_rate()
        self.optimizer.zero_grad()
        loss = cross_entropy(self.replica(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def save(self) -> None:
        """It is short."""


def learn(recipe: str, way: str) -> None:
    """Trains as one process; the first prints the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        options = arguments([recipe, *ROWS[recipe].split(), "--learners", str(LEARNERS), "--out", folder])
        training = (Attached if way == "processes" else Training)(options)
        training.train()
    if dist.get_rank() == 0:
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in training.parameters)
        last = training.history[-1] | {"weights": hashlib.sha256(weights).hexdigest()}
        print(json.dumps({"recipe": recipe, "way": way} | last), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def results() -> dict[tuple[str, str], Result]:
    return {(line["recipe"], line["way"]): line for line in json_lines(RESULTS)}


def make() -> None:
    """Trains what has no result yet."""
    for recipe in ROWS:
        for way, processes in WAYS.items():
            if (recipe, way) not in results():
                run_and_keep("reproduction.front", [recipe, way], processes, RESULTS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", choices=ROWS)
    parser.add_argument("way", choices=WAYS)
    options = parser.parse_args()
    learn(options.recipe, options.way)
