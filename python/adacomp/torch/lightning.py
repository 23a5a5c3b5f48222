"""AdaComp for Lightning, whose own arguments for communication hooks work on GPUs only::

trainer = lightning.Trainer(strategy="ddp", callbacks=[AdaCompCallback(mode="on")])
"""

from typing import Any, Unpack

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from . import trainers
from .config import Options
from .hook import AdaCompState


class AdaCompCallback(Callback):
    """Attaches when training begins, on any device, writes to the trainer's loggers, and puts one state for all learners into
    checkpoints, from which any number of learners can go on. The options are those of :func:`adacomp.torch.attach`."""

    def __init__(self, **options: Unpack[Options]) -> None:
        self._keeper = trainers.Keeper(options)
        self._to_load: dict[str, torch.Tensor] = {}

    @property
    def hook(self) -> AdaCompState | None:
        """What :func:`adacomp.torch.attach` returned; nothing before training, and with one process."""
        return self._keeper.hook

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = trainer.strategy.model
        assert model is not None
        self._keeper.attach(model)
        if self.hook is not None and self._to_load:
            self.hook.load_state_dict(self._to_load)
        self._to_load = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # Lightning sets it without saying so.
        every: int = getattr(trainer, "log_every_n_steps", 50)
        if self.hook is not None and every and trainer.global_step % every == 0:
            for logger in trainer.loggers:
                logger.log_metrics(self.hook.scalars(), step=trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        # Lightning asks all learners, and keeps what the first says.
        return self.hook.state_dict(consolidate=True) if self.hook is not None else self._to_load

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._to_load = state_dict
