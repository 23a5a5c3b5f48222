"""AdaComp for Hugging Face's ``Trainer``, which knows no communication hooks::

    trainer = Trainer(model, args, train_dataset=data)
    trainer.add_callback(AdaCompCallback(trainer, mode="on"))
    trainer.train()

With Accelerate alone no callback is needed: attach to what ``prepare`` returns, and
``accelerator.register_for_checkpointing(hook.consolidated)``.
"""

import logging
import os
from typing import Any, Unpack

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from . import trainers
from .config import Options
from .hook import AdaCompState

logger = logging.getLogger("adacomp")


class AdaCompCallback(TrainerCallback):
    """Attaches when training begins, logs with the trainer, and saves into its checkpoints. The options are those of
    :func:`adacomp.torch.attach`. A second ``train()`` goes on with what the first has left.

    The trainer does not tell callbacks what it resumes from. So if that is not ``checkpoint-STEP`` in the output folder, name it
    here, too: ``AdaCompCallback(trainer, resume_from=path)``.
    """

    def __init__(
        self, trainer: Trainer, *, resume_from: str | os.PathLike[str] | None = None, **options: Unpack[Options]
    ) -> None:
        self._trainer, self._resume_from = trainer, resume_from
        self._keeper = trainers.Keeper(options)

    @property
    def hook(self) -> AdaCompState | None:
        """What :func:`adacomp.torch.attach` returned; nothing before training, and with one process."""
        return self._keeper.hook

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._keeper.attach(self._trainer.model_wrapped)
        if self.hook is not None and state.global_step > 0:
            folders = (self._resume_from, args.resume_from_checkpoint, _folder(args, state))
            # Trainers may be told to resume from `True`: the last checkpoint.
            named = [folder for folder in folders if isinstance(folder, str | os.PathLike)]
            try:
                saved = next((found for folder in named if (found := trainers.load(folder))), None)
            except Exception as error:
                # A damaged file.
                logger.warning("%s", error)
                saved = None
            # All learners must load, or none.
            missing = self.hook._bound().largest([float(not saved)])[0]
            if saved and not missing:
                self.hook.load_state_dict(saved)
            else:
                where = "that of another learner" if saved else folders[-1]
                logger.warning("no state of AdaComp in %s, so nothing waits to be sent; see resume_from", where)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.hook is not None and control.should_log:
            self._trainer.log(self.hook.scalars())

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.hook is not None:
            trainers.save(self.hook, _folder(args, state))


def _folder(args: TrainingArguments, state: TrainerState) -> str:
    return os.path.join(args.output_dir or ".", f"checkpoint-{state.global_step}")
