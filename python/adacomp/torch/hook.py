"""What users call: the communication hook, its state, and the one line that connects both with a model."""

import dataclasses
import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from . import report
from .config import Codec, Config, LocalAdam, Mode, NodeSize, Scale, Strategy, Treatment
from .ddp import DdpDoor, ddp_inside
from .fsdp import FsdpDoor, fsdp_learners
from .runtime import Runtime

logger = logging.getLogger("adacomp")


class AdaCompState:
    """AdaComp for one DDP model: the state of :func:`adacomp_hook`. Usually made by :func:`attach`.

    Where something else registers the hook, make a state, hand it over with :func:`adacomp_hook`, and bind it to the model
    before the first step::

        state = AdaCompState(Config(mode="on"))
        ddp.register_comm_hook(state, adacomp_hook)
        state.bind(ddp)

    ``print(state)`` says whether it compresses, why, and what that is worth.
    """

    def __init__(self, config: Config | None = None) -> None:
        self._config = config or Config()
        # For tests: whether to take the path for buckets in the processor's memory, whatever the device is.
        self._in_place: bool | None = None
        self._door: DdpDoor | FsdpDoor | None = None
        self._runtime: Runtime | None = None
        self._to_load: tuple[list[Mapping[str, torch.Tensor]], bool] | None = None
        # Whether the hook has been called, or is sure to be.
        self._used = [False]
        weakref.finalize(self, _warn_if_unused, self._used)

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
            self._runtime.set_mode(config)
        self._config = config

    def bind(self, model: torch.nn.Module | Callable[..., Any], learners: dist.ProcessGroup | DeviceMesh | None = None) -> None:
        """Connects the state with its model and the other learners, which all must do the same; see :func:`attach`."""
        if self._runtime is not None:
            raise RuntimeError("the state has a model already; make one for each model")
        if isinstance(model, torch.nn.Module) and any(isinstance(module, FSDPModule) for module in model.modules()):
            self._door = FsdpDoor(model, fsdp_learners(learners), self._config, self._in_place)
            self._used[0] = True
        elif learners is None:
            ddp = ddp_inside(model)
            self._door = DdpDoor(ddp, self._config, self._in_place)
            if not self._used[0]:
                _watch(ddp, self._used)
        else:
            raise TypeError("learners are for FSDP2 models; those of a DDP model are its processes: see node_size")
        self._runtime = self._door.runtime
        if self._runtime.is_first:
            logger.info("%s", report.introduction(self._runtime))
            if warning := report.unmatched(self._runtime):
                logger.warning("%s", warning)
        if self._to_load is not None:
            (states, strict), self._to_load = self._to_load, None
            self._runtime.load_state_dict(states, strict)

    def stats(self) -> dict[str, Any]:
        """Returns what the hook does and what that is worth.

        - ``mode``, ``compressing``, ``why``, ``strategy`` (where it is ``"auto"``, the one that was chosen), ``learners``, and
          ``steps`` by kind.
        - ``bytes_sent``: bytes that this learner handed to the process group in compressed steps, padding and headers included.
        - ``compression_ratio``: bytes that a dense ring all-reduce of the same steps would have sent, over ``bytes_sent``.
        - ``frame_ratio``: the paper's measure: bytes of dense float32 gradients, sent to the same learners in the same way, over
          ``bytes_sent``.
        - ``last``: the same for the last compressed step, with ``seconds`` by what they went into and ``held_up``, those from the
          last bucket to the end of the backward pass.
        - ``layers``: for each parameter name its elements, its treatment, and what it selected and sent in that step.
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
        return self._bound().state_dict(consolidate)

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
            self._runtime.load_state_dict(states, strict)

    @property
    def consolidated(self) -> "Consolidated":
        """The hook for those who save one copy of a state for all learners, and who call ``state_dict()`` on all of them, as
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
        """Ends the hook's thread and its connections; learners that wait for this one are told at once. The model cannot be
        trained any further after that."""
        self._used[0] = True
        if self._runtime is not None:
            self._runtime.close()

    def _bound(self) -> Runtime:
        if self._runtime is None:
            raise RuntimeError(
                "the AdaComp state has no model yet: use adacomp.torch.attach(ddp), or call state.bind(ddp) before the first step"
            )
        return self._runtime

    def __repr__(self) -> str:
        if self._runtime is None:
            return f"AdaComp hook, mode {self.mode}, not yet attached to a model"
        return report.describe(self._runtime)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no model: neither has a copied DDP model a hook.
        config = dataclasses.replace(self._config, scaler=None, optimizer=None, node_size=1)
        return {**self.__dict__, "_door": None, "_runtime": None, "_config": config}


class Consolidated:
    """See :attr:`AdaCompState.consolidated`."""

    def __init__(self, hook: AdaCompState) -> None:
        self._hook = hook

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._hook.state_dict(consolidate=True)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._hook.load_state_dict(state)


UNUSED = (
    "an AdaComp state was made, but its hook is never called, so gradients travel dense. Use adacomp.torch.attach(ddp), which "
    "registers it; Lightning registers hooks on GPUs only, and Accelerate only its own"
)
# Forward passes after which a hook must have been called.
PATIENCE = 3


def _warn_if_unused(used: list[bool]) -> None:
    """At the end of a state, or of the program."""
    if not used[0]:
        logger.warning("%s", UNUSED)


def _watch(ddp: DistributedDataParallel, used: list[bool]) -> None:
    """Warns in the first steps if somebody else was to register the hook, and did not."""
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += ddp.training and torch.is_grad_enabled() and ddp.require_backward_grad_sync
        if used[0] or passes > PATIENCE:
            _warn_if_unused(used)
            used[0] = True
            handle.remove()

    handle = ddp.register_forward_pre_hook(count)


def adacomp_hook(state: AdaCompState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket: for ``ddp.register_comm_hook(state, adacomp_hook)``, and all that does so."""
    state._used[0] = True
    state._bound()
    assert isinstance(state._door, DdpDoor)
    return state._door.average(bucket)


def attach(
    # What `torch.compile` returns is annotated as a callable.
    model: torch.nn.Module | Callable[..., Any],
    learners: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    mode: Mode = "auto",
    strategy: Strategy = "auto",
    conv: Treatment = 50,
    matrix: Treatment = 500,
    vector: Treatment = "dense",
    min_elements: int = 1024,
    names: Mapping[str, Treatment] | None = None,
    soft_threshold: float = 2.0,
    scale: Scale = "mean",
    codec: Codec = "rice",
    clip: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    timeout: float | timedelta | None = None,
    threads: int = 1,
    bin_warm_up: int = 0,
    local_adam: LocalAdam | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    node_size: NodeSize = 1,
) -> AdaCompState:
    """Makes a model exchange its gradients by AdaComp; all learners must do the same.

    It takes a ``DistributedDataParallel`` model; or one of FSDP2, sharded inside of a machine, with the processes that have the
    same shards on other machines: ``fully_shard(model, mesh=mesh["shard"])``, ``attach(model, mesh["replicate"])``.

    The options are those of :class:`Config`. Call ``stats()`` on what is returned, and save its ``state_dict()``.
    """
    # The keywords are the fields of the configuration, by the same names.
    options = {name: value for name, value in locals().items() if name not in ("model", "learners")}
    state = AdaCompState(Config(**options))
    state._used[0] = True
    # First, because it is what may be refused.
    state.bind(model, learners)
    try:
        if isinstance(state._door, DdpDoor):
            ddp_inside(model).register_comm_hook(state, adacomp_hook)
    except BaseException:
        state.close()
        raise
    return state
