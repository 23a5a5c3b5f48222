r"""Digits on several learners that train alone, and exchange every so many steps what these have changed: for slow links.

    torchrun --nproc-per-node 2 python/examples/local_steps.py

docs/sites.md says how to run it at several sites. With `--save FOLDER` learners save after each round, and go on from there if
they are started again, also with another number of learners. With `--max-restarts` torchrun starts them again when one dies:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 3 --max-restarts 3 \
        python/examples/local_steps.py --save runs/sites
"""

import argparse
import logging
import os
from pathlib import Path

import checkpoint
import torch
import torch.distributed as dist
from data import drawn
from ddp_mnist import model, test_error
from torch.nn.functional import cross_entropy

from adacomp.torch import LocalSteps


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--every", type=int, default=10, help="the local steps of a round")
    parser.add_argument("--delay", type=int, default=0, help="the steps that are taken while a round is exchanged")
    parser.add_argument("--batch", type=int, default=50, help="samples of a learner's step")
    parser.add_argument("--timeout", type=float, default=600, help="seconds to wait for the slowest learner's round")
    parser.add_argument("--save", type=Path, help="where to save, and to go on from")
    return parser.parse_args()


def main():
    options = arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    learner, learners = dist.get_rank(), dist.get_world_size()
    (images, labels), test = drawn(train=True), drawn(train=False)

    # The same weights on all learners.
    torch.manual_seed(1)
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    # This is the line.
    local = LocalSteps(module, optimizer, options.every, delay=options.delay, timeout=options.timeout, matrix=50)

    step = load(options.save, module, optimizer, local) if options.save else 0
    if learner == 0 and step:
        print(f"goes on from step {step} with {learners} learners", flush=True)
    while local.rounds < options.rounds:
        generator = torch.Generator().manual_seed(1000 * step + learner)
        batch = torch.randint(0, len(images), (options.batch,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(module(images[batch]), labels[batch]).backward()
        optimizer.step()
        step += 1
        if options.save and local.position == 0:
            save(options.save, step, module, optimizer, local)
    # What is still under way, or not sent, so that all have the same weights.
    local.end_round()
    if learner == 0:
        print(local)
        print(f"test error {test_error(module, *test):.2f}%", flush=True)
    dist.destroy_process_group()


def save(folder, step, module, optimizer, local):
    """Each learner has its own of all: weights may differ within a round, and the optimiser's state always does."""
    own = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "local": local.state_dict()}
    checkpoint.save(folder, step, {}, own)


def load(folder, module, optimizer, local):
    """Returns the steps that are done."""
    saved = checkpoint.load(folder)
    if saved is None:
        return 0
    step, _, states = saved
    # A learner that is new takes what another has.
    own = states[dist.get_rank() % len(states)]
    module.load_state_dict(own["model"])
    optimizer.load_state_dict(own["optimizer"])
    local.load_state_dict([state["local"] for state in states])
    return step


if __name__ == "__main__":
    main()
