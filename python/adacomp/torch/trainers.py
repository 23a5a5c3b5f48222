"""What the callbacks for trainers have in common: one hook for a training, whose model the trainer may wrap several times."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .config import Config, Options
from .ddp import ddp_inside
from .hook import AdaCompState, attach

logger = logging.getLogger("adacomp")


class Keeper:
    """Keeps a hook attached to the model that is trained now."""

    def __init__(self, options: Options) -> None:
        # Wrong ones are told at once.
        Config(**options)
        self._options = options
        self._ddp: DistributedDataParallel | None = None
        self.hook: AdaCompState | None = None

    def attach(self, model: torch.nn.Module) -> None:
        """Attaches to a model. If it was wrapped anew, what the hook before kept is taken along."""
        alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        if alone and not any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            logger.info("AdaComp is not attached: there is one learner, so there is nothing to exchange")
            return
        ddp = ddp_inside(model)
        if ddp is self._ddp and self.hook is not None:
            return
        state = None
        if self.hook is not None:
            state = self.hook.state_dict()
            self.hook.close()
        self._ddp, self.hook = ddp, attach(ddp, **self._options)
        if state is not None:
            self.hook.load_state_dict(state)


def save(hook: AdaCompState, folder: str | os.PathLike[str]) -> None:
    """Writes this learner's state into a folder that all learners use."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / _name(dist.get_rank())
    torch.save(hook.state_dict(), path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)
    # Machines need not share the folder.
    if int(os.environ.get("LOCAL_RANK", dist.get_rank())) == 0:
        for other in Path(folder).glob("adacomp-*-of-*.pt"):
            # Of an earlier training with another number of learners.
            if other.name.partition("-of-")[2] != path.name.partition("-of-")[2]:
                other.unlink(missing_ok=True)


def load(folder: str | os.PathLike[str]) -> Sequence[dict[str, torch.Tensor]]:
    """Returns what `save` has written: this learner's state, or those of another number of learners; or nothing."""
    own = Path(folder) / _name(dist.get_rank())
    found = [own] if own.exists() else sorted(Path(folder).glob("adacomp-*-of-*.pt"))
    return [torch.load(path, map_location="cpu", weights_only=True) for path in found]


def _name(learner: int) -> str:
    return f"adacomp-{learner:05}-of-{dist.get_world_size():05}.pt"
