"""What users hold, whichever door their model has: options, statistics and state of a runtime."""

import dataclasses
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import report
from .config import Config, Mode
from .runtime import Runtime

logger = logging.getLogger("adacomp")


class Handle:
    """What :class:`AdaCompState` and :class:`LocalSteps` have in common."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._runtime: Runtime | None = None
        self._to_load: tuple[list[Mapping[str, torch.Tensor]], bool] | None = None

    @property
    def config(self) -> Config:
        """The options as they are now."""
        return self._config

    @property
    def mode(self) -> Mode:
        """``"auto"``, ``"on"`` or ``"off"``. Can be set while training; it counts from the next step on. All learners must set it
        after the same step, or they get an error and nothing changes. The first dense step after compressed ones also sends the
        residuals, so nothing is lost."""
        return self._config.mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        config = dataclasses.replace(self._config, mode=mode)
        if self._runtime is not None:
            self._settled().set_mode(config)
        self._config = config

    def stats(self) -> dict[str, Any]:
        """Returns what it does and what that is worth.

        - ``mode``, ``compressing``, ``why``, ``strategy`` (where it is ``"auto"``, the one that was chosen), ``learners``, and
          ``steps`` by kind.
        - ``bytes_sent``: bytes that this process handed to the process group in compressed steps, padding and headers included.
        - ``compression_ratio``: bytes that a dense ring all-reduce of the same steps would have sent, over ``bytes_sent``.
        - ``frame_ratio``: the paper's measure: bytes of dense float32 gradients, sent to the same learners in the same way, over
          ``bytes_sent``.
        - ``last``: the same for the last compressed step, with ``seconds`` by what they went into and ``held_up``, those from the
          last bucket to the end of the step; with a ``delay`` of local steps nobody need have waited for it.
        - ``layers``: for each parameter name its elements, its treatment, and what it selected and sent in that step. Where
          several processes are one learner, it has this one's parts, as ``name[start:end]``.
        """
        return report.stats(self._bound())

    def state_dict(self, consolidate: bool = False) -> dict[str, torch.Tensor]:
        """Returns what must be saved so that nothing is lost at resume, for ``torch.save`` or safetensors.

        Each learner has its own: save all of them and give each its own back, and training goes on with the same bits, but
        for the automatic mode, which times steps anew. With ``consolidate`` all learners must call it and all get the same: the
        average of all, of which one copy is enough, and which any number of learners can load.
        """
        if not consolidate and sys._getframe(1).f_globals.get("__name__") == "accelerate.checkpointing":
            raise RuntimeError("Accelerate keeps one learner's state only: register_for_checkpointing(hook.consolidated)")
        return self._settled().state_dict(consolidate)

    def load_state_dict(
        self, state: Mapping[str, torch.Tensor] | Sequence[Mapping[str, torch.Tensor]], strict: bool = True
    ) -> None:
        """Takes over what was saved: this learner's own, or one that is consolidated, or a list of those of all learners, from
        which any number of learners can go on. All learners must do so, or none. Without ``strict`` the state may be of another
        model: parameters that it does not have, or in another shape, begin with nothing, and others of it are left out."""
        states = [state] if isinstance(state, Mapping) else list(state)
        if self._runtime is None:
            self._to_load = states, strict
        else:
            self._settled().load_state_dict(states, strict)

    @property
    def consolidated(self) -> "Consolidated":
        """The same for those who save one copy of a state for all learners, and who call ``state_dict()`` on all of them, as
        Accelerate does: ``accelerator.register_for_checkpointing(hook.consolidated)``."""
        return Consolidated(self)

    def scalars(self) -> dict[str, float]:
        """Returns numbers for a log by name: whether it compresses, dropped steps, and of the last compressed step bytes, ratios,
        where its time went, and ``adacomp/seconds/held_up``, for how long the backward pass waited for it at its end."""
        return report.scalars(self._bound())

    def log_to(self, writer: Any, every: int = 50) -> None:
        """Writes scalars in each step whose number is a multiple of ``every``. The writer is a TensorBoard ``SummaryWriter``, or
        has ``log(numbers, step=)`` as a W&B run, or ``log_metrics(numbers, step=)`` as MLflow and Lightning's loggers."""
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every {every!r}; expected a number of steps, 1 or more")
        self._bound().writer = (report.logger_of(writer), every)

    def close(self) -> None:
        """Ends the thread and the connections; learners that wait for this one are told at once. The model cannot be trained
        together with others any further after that."""
        if self._runtime is not None:
            self._runtime.close()

    def _connected(self, runtime: Runtime) -> None:
        """Takes a runtime that has met the other learners."""
        self._runtime = runtime
        if runtime.is_first:
            logger.info("%s", report.introduction(runtime))
            if warning := report.unmatched(runtime):
                logger.warning("%s", warning)
        if self._to_load is not None:
            (states, strict), self._to_load = self._to_load, None
            runtime.load_state_dict(states, strict)

    def _bound(self) -> Runtime:
        if self._runtime is None:
            raise RuntimeError(
                "the AdaComp state has no model yet: use adacomp.torch.attach(ddp), or call state.bind(ddp) before the first step"
            )
        return self._runtime

    def _settled(self) -> Runtime:
        """Returns the runtime when no step is under way."""
        return self._bound()

    def __repr__(self) -> str:
        if self._runtime is None:
            return f"AdaComp hook, mode {self.mode}, not yet attached to a model"
        return report.describe(self._runtime)


class Consolidated:
    """See :attr:`Handle.consolidated`."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._handle.state_dict(consolidate=True)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._handle.load_state_dict(state)
