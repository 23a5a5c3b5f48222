"""Checkpoints for `torchrun --max-restarts`: copy this file into your project.

A checkpoint is a folder that all learners write together. It appears with all its files or not at all, so a learner may be killed
at any time: all are started again and go on from the last one, with the same bits as if nothing had happened. Another number of
learners can go on from it, too, and nothing is lost. Learners on several machines need a folder that all of them see.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DRAFT = ".draft"


def save(folder: Path, step: int, common: dict[str, Any], own: dict[str, Any]) -> None:
    """Saves what all learners have in common (model, optimiser), and each learner's own (the hook's state). All must call it."""
    learner = dist.get_rank()
    checkpoint = folder / f"step-{step}"
    draft = checkpoint.with_suffix(DRAFT)
    draft.mkdir(parents=True, exist_ok=True)
    _write(draft / f"learner-{learner}.pt", own)
    if learner == 0:
        _write(draft / "common.pt", common)
    # All files are there.
    dist.barrier()
    if learner == 0:
        _sync(draft)
        draft.rename(checkpoint)
        _sync(folder)
        for other in _checkpoints(folder)[:-1]:
            shutil.rmtree(other)


def load(folder: Path) -> tuple[int, dict[str, Any], list[dict[str, Any]]] | None:
    """Returns the step, what is common, and a list of learners' own: this learner's, or if their number is another one, those
    of all who saved. If nothing was saved it returns None. All learners must call it."""
    newest: list[str | None] = [None]
    if dist.get_rank() == 0:
        # What was being written when somebody was killed.
        for draft in folder.glob(f"step-*{DRAFT}"):
            shutil.rmtree(draft)
        newest = [path.name for path in _checkpoints(folder)[-1:]] or [None]
    dist.broadcast_object_list(newest)
    if newest[0] is None:
        return None
    checkpoint = folder / newest[0]
    learners = len(list(checkpoint.glob("learner-*.pt")))
    wanted = [dist.get_rank()] if learners == dist.get_world_size() else range(learners)
    own = [torch.load(checkpoint / f"learner-{learner}.pt") for learner in wanted]
    return _step(checkpoint), torch.load(checkpoint / "common.pt"), own


def _checkpoints(folder: Path) -> list[Path]:
    """Returns all that are complete, the oldest first."""
    return sorted((path for path in folder.glob("step-*") if path.suffix != DRAFT), key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _write(path: Path, state: dict[str, Any]) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        # On the disk before the folder has its name, so that it also survives the loss of power.
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
