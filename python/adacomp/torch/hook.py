"""What users call: the communication hook, its state, and the one line that connects both with a model."""

import dataclasses
import logging
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from .config import Codec, Config, LocalAdam, Mode, NodeSize, Scale, Strategy, Treatment
from .ddp import DdpDoor, ddp_inside
from .fsdp import FsdpDoor, fsdp_learners
from .handle import Handle

logger = logging.getLogger("adacomp")


class AdaCompState(Handle):
    """AdaComp for one DDP model: the state of :func:`adacomp_hook`. Usually made by :func:`attach`.

    Where something else registers the hook, make a state, hand it over with :func:`adacomp_hook`, and bind it to the model
    before the first step::

        state = AdaCompState(Config(mode="on"))
        ddp.register_comm_hook(state, adacomp_hook)
        state.bind(ddp)

    ``print(state)`` says whether it compresses, why, and what that is worth.
    """

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config or Config())
        # For tests: whether to take the path for buckets in the processor's memory, whatever the device is.
        self._in_place: bool | None = None
        self._door: DdpDoor | FsdpDoor | None = None
        # Whether the hook has been called, or is sure to be.
        self._used = [False]
        weakref.finalize(self, _warn_if_unused, self._used)

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
        try:
            self._connected(self._door.runtime)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._used[0] = True
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no model: neither has a copied DDP model a hook.
        config = dataclasses.replace(self._config, scaler=None, optimizer=None, node_size=1)
        return {**self.__dict__, "_door": None, "_runtime": None, "_config": config}


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
