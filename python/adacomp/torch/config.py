"""What a user can set: one frozen, typed configuration, checked here and nowhere else."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, TypedDict, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._native import growing_bin

Mode = Literal["auto", "on", "off"]
Strategy = Literal["auto", "gather", "reduce", "sharded"]
Treatment = int | Literal["dense"]
Scale = Literal["mean", "clamped"]
Codec = Literal["rice", "paper"]
# Processes of a machine; or a group of those with the same place on other machines, and one of those of the same machine.
NodeSize = int | Literal["auto"] | tuple[dist.ProcessGroup, dist.ProcessGroup] | DeviceMesh


@dataclass(frozen=True)
class LocalAdam:
    """Adam on each learner: ``attach(model, local_adam=LocalAdam())``. The optimiser is then ``torch.optim.SGD`` without
    momentum, whose learning rate is Adam's and whose weight decay is AdamW's."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {self.betas}; expected two numbers from 0 to below 1")
        if not self.eps > 0:
            raise ValueError(f"eps {self.eps}; expected more than 0")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of :func:`attach`.

    Args:
        mode: ``"auto"`` times steps with and without compression and runs what is faster, and tries again now and then; ``"on"``
            always compresses, ``"off"`` never.
        strategy: ``"gather"`` (the paper's), ``"reduce"`` for many learners, or ``"sharded"``, whose traffic does not grow with
            their number. ``"auto"`` is the one of the first two that should send fewer bytes for this model and number of
            learners.
        conv, matrix, vector: how kernels of convolutions, matrices and vectors are sent: the number of elements of a bin,
            or ``"dense"``. The defaults are the paper's.
        min_elements: tensors with fewer elements are sent dense.
        names: the same by name: ``{"head.*": "dense", "encoder.*.weight": 1000}``; the last pattern that matches wins.
        soft_threshold: the factor of the soft threshold; 2 is AdaComp, 1 its comparison scheme Local Selection.
        scale: ``"mean"``, or ``"clamped"``, which limits what one gradient that is far too large does to its layer's scale.
        codec: ``"rice"``, or ``"paper"`` for the code of the paper.
        clip: bounds what one learner can do to the average: in each parameter, no value that a learner sends counts for more than
            this many times the median, over learners, of the largest value that each sends. It needs ``mode="on"``.
        scaler: the ``torch.amp.GradScaler`` of the training loop, if it has one, so that residuals do not depend on its scale.
        timeout: seconds or ``timedelta`` that learners wait for each other; by default as long as DDP's own group. Dense steps
            without residuals always have DDP's own timeout.
        threads: threads that the native kernel may use for one large tensor.
        bin_warm_up: compressed steps, such as a tenth of all, in which bins of matrices grow from 50 elements to ``matrix``.
            Training starts faster, for a few more bytes. Not with ``"sharded"``.
        local_adam: runs Adam on each learner before compression, in all modes, and exchanges its updates. The optimiser is then
            ``torch.optim.SGD`` without momentum. For training in which Adam on compressed gradients lags behind.
        optimizer: with ``local_adam``, the optimiser whose learning rates updates are multiplied by before they are compressed,
            not after. What waits then moves weights as far as it would have moved them at once, whatever the schedule does.
        node_size: for DDP, the number of processes of a machine, which are then one learner: gradients are summed dense inside,
            and compressed between machines. ``"auto"`` takes it from ``LOCAL_WORLD_SIZE``. It can also be a mesh of machines and
            places in a machine, or two process groups: those with the same place on all machines, and those of the same machine.
    """

    mode: Mode = "auto"
    strategy: Strategy = "auto"
    conv: Treatment = 50
    matrix: Treatment = 500
    vector: Treatment = "dense"
    min_elements: int = 1024
    names: Mapping[str, Treatment] | None = None
    soft_threshold: float = 2.0
    scale: Scale = "mean"
    codec: Codec = "rice"
    clip: float | None = None
    scaler: torch.amp.GradScaler | None = None
    timeout: float | datetime.timedelta | None = None
    threads: int = 1
    bin_warm_up: int = 0
    local_adam: LocalAdam | None = None
    optimizer: torch.optim.Optimizer | None = None
    node_size: NodeSize = 1

    def __post_init__(self) -> None:
        for option, choices in (("mode", Mode), ("strategy", Strategy), ("scale", Scale), ("codec", Codec)):
            *others, last = get_args(choices)
            if getattr(self, option) not in (*others, last):
                raise ValueError(f"{option} {getattr(self, option)!r}; expected {', '.join(others)} or {last}")
        treatments = [(kind, getattr(self, kind)) for kind in ("conv", "matrix", "vector")]
        for option, treatment in treatments + [(f"names[{name!r}]", each) for name, each in (self.names or {}).items()]:
            if treatment != "dense" and (isinstance(treatment, bool) or not isinstance(treatment, Integral)):
                raise TypeError(f"{option} is {treatment!r}; expected the number of elements of a bin, or 'dense'")
        if isinstance(self.threads, bool) or not isinstance(self.threads, Integral) or self.threads < 1:
            raise ValueError(f"threads {self.threads!r}; expected a number from 1 on")
        if not isinstance(self.timeout, int | float | datetime.timedelta | None):
            raise TypeError(f"timeout is {self.timeout!r}; expected seconds, or a timedelta")
        if self.clip is not None and not 1 <= self.clip < float("inf"):
            raise ValueError(f"clip {self.clip}; expected a number from 1 on")
        if self.clip is not None and self.mode != "on":
            raise ValueError('clip needs mode="on": DDP\'s own dense steps have no bound')
        if isinstance(self.node_size, int) and (isinstance(self.node_size, bool) or self.node_size < 1):
            raise ValueError(f"node_size {self.node_size!r}; expected the number of processes of a machine, or 'auto'")
        if not isinstance(self.node_size, int | tuple | DeviceMesh) and self.node_size != "auto":
            raise TypeError(f"node_size is {self.node_size!r}; expected a number, 'auto', a DeviceMesh or two process groups")
        if self.scaler is not None and not isinstance(self.scaler, torch.amp.GradScaler):
            raise TypeError(f"scaler is {type(self.scaler).__name__}; expected the torch.amp.GradScaler of the training loop")
        timeout = self.explicit_timeout()
        if timeout is not None and timeout <= datetime.timedelta(0):
            raise ValueError(f"timeout {timeout}; expected more than 0")
        if isinstance(self.bin_warm_up, bool) or not isinstance(self.bin_warm_up, Integral) or self.bin_warm_up < 0:
            raise ValueError(f"bin_warm_up {self.bin_warm_up!r}; expected a number of steps, 0 for none")
        if self.bin_warm_up and (self.strategy == "sharded" or not isinstance(self.matrix, Integral)):
            raise ValueError(
                "bin_warm_up makes bins of matrices grow, but not between owners of shards; use another strategy, or 0"
            )
        if self.local_adam is not None and not isinstance(self.local_adam, LocalAdam):
            raise TypeError(f"local_adam is {type(self.local_adam).__name__}; expected adacomp.torch.LocalAdam(...)")
        if self.optimizer is not None and not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is {type(self.optimizer).__name__}; expected the torch.optim.SGD of the training loop")
        if self.optimizer is not None and self.local_adam is None:
            raise ValueError("optimizer is for local_adam only; leave it out")
        if self.optimizer is not None and any(group.get("momentum") or "betas" in group for group in self.optimizer.param_groups):
            raise ValueError(
                f"optimizer is {type(self.optimizer).__name__} with momentum; with local_adam it must be torch.optim.SGD without "
                "it, because each learner's Adam has its own"
            )
        if self.local_adam is not None and self.loss_scale() is not None:
            raise ValueError(
                "local_adam does not go with a GradScaler, whose scale would make Adam's updates overflow; use bfloat16"
            )

    def explicit_timeout(self) -> datetime.timedelta | None:
        """Returns the timeout, if there is one."""
        return datetime.timedelta(seconds=self.timeout) if isinstance(self.timeout, int | float) else self.timeout

    def loss_scale(self) -> float | None:
        """Returns the scaler's scale as it is now, if there is a scaler that scales."""
        return self.scaler.get_scale() if self.scaler is not None and self.scaler.is_enabled() else None

    def matrix_at(self, step: int) -> Treatment:
        """Returns the treatment of matrices in a compressed step."""
        if step >= self.bin_warm_up or not isinstance(self.matrix, Integral):
            return self.matrix
        return growing_bin(int(self.matrix), step, self.bin_warm_up)

    def policy(self, step: int = 0) -> dict[str, Any]:
        """Returns the keywords of the native layout of a compressed step."""
        keys = ("conv", "matrix", "vector", "min_elements", "soft_threshold", "scale")
        options = {key: getattr(self, key) for key in keys} | {"matrix": self.matrix_at(step)}
        return options | {"names": list((self.names or {}).items())}


class CommonOptions(TypedDict, total=False):
    """The options of :class:`Config` that local steps have, too, for editors and type checks."""

    mode: Mode
    strategy: Strategy
    conv: Treatment
    matrix: Treatment
    vector: Treatment
    min_elements: int
    names: Mapping[str, Treatment] | None
    soft_threshold: float
    scale: Scale
    codec: Codec
    clip: float | None
    timeout: float | datetime.timedelta | None
    threads: int
    bin_warm_up: int


class Options(CommonOptions, total=False):
    """All of them."""

    scaler: torch.amp.GradScaler | None
    local_adam: LocalAdam | None
    optimizer: torch.optim.Optimizer | None
    node_size: NodeSize
