"""The hook: what DDP calls with each bucket, and what the user asks."""

import gc
import logging
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .engine import Engine
from .moments import LocalAdam

logger = logging.getLogger("adacomp")

MODES = ("auto", "on", "off")
STRATEGIES = ("gather", "reduce", "sharded")


class Hook:
    """AdaComp for one DDP model: the state of :func:`adacomp_hook`.

    Usually made by :func:`attach`. Where something else registers the hook, make one and hand it over with
    :func:`adacomp_hook`; it finds its model when the first gradients come.

    Args:
        mode: ``"auto"`` times whole steps with and without compression and runs what is faster, now and then again; ``"on"``
            always compresses, ``"off"`` never.
        strategy: ``"gather"`` (the paper's), ``"reduce"`` for many learners, or ``"sharded"``, whose traffic does not grow with
            their number.
        conv, matrix, vector: how kernels of convolutions, matrices and vectors travel: the number of elements of a bin,
            or ``"dense"``. The paper's: 50, 500 and dense.
        min_elements: tensors with fewer elements go dense.
        names: the same by name: ``{"head.*": "dense", "encoder.*.weight": 1000}``; the last that matches wins.
        soft_threshold: the factor of the soft threshold; 2 is AdaComp, 1 its comparison scheme Local Selection.
        scale: ``"mean"``, or ``"clamped"``, which one gradient that is far too large does not inflate for its whole layer.
        codec: ``"rice"``, or ``"paper"`` for the code of the paper.
        scaler: the ``torch.amp.GradScaler`` of the training loop, if it has one, so that residuals do not depend on its scale.
        timeout: seconds or ``timedelta`` that learners wait for each other; as long as DDP's own group, unless told. Steps
            that are as without a hook have DDP's own limit.
        threads: threads that the native kernel may use for one large tensor.
        local_adam: a :class:`LocalAdam`: each learner's Adam runs before compression, and its updates travel, in all modes. The
            optimiser is then ``torch.optim.SGD`` without momentum. For where Adam on compressed gradients lags behind.
    """

    def __init__(
        self,
        *,
        mode="auto",
        strategy="gather",
        conv=50,
        matrix=500,
        vector="dense",
        min_elements=1024,
        names=None,
        soft_threshold=2.0,
        scale="mean",
        codec="rice",
        scaler=None,
        timeout=None,
        threads=1,
        local_adam=None,
    ):
        if mode not in MODES:
            raise ValueError(f"mode {mode!r}; expected one of {MODES}")
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy {strategy!r}; expected one of {STRATEGIES}")
        if timeout is not None and not isinstance(timeout, timedelta):
            timeout = timedelta(seconds=timeout)
        if timeout is not None and timeout <= timedelta(0):
            raise ValueError(f"timeout {timeout}; expected more than 0")
        if local_adam is not None and not isinstance(local_adam, LocalAdam):
            raise TypeError(f"local_adam is {type(local_adam).__name__}; expected adacomp.torch.LocalAdam(...)")
        if local_adam is not None and scaler is not None and scaler.is_enabled():
            raise ValueError(
                "local_adam does not go with a GradScaler, whose scale would make Adam's updates overflow; use bfloat16"
            )
        self.mode, self.strategy, self.scaler = mode, strategy, scaler
        self._options = dict(
            mode=mode,
            strategy=strategy,
            codec=codec,
            timeout=timeout,
            threads=threads,
            soft_threshold=soft_threshold,
            local_adam=local_adam,
        )
        self._policy = dict(
            conv=conv,
            matrix=matrix,
            vector=vector,
            min_elements=min_elements,
            soft_threshold=soft_threshold,
            scale=scale,
            names=list((names or {}).items()),
        )
        # For tests: the path for other devices, on tensors of the processor.
        self._in_place = None
        self._engine = None
        self._to_load = None

    def bind(self, ddp):
        """Connects the hook with its model and the other learners; all must do so."""
        if self._engine is not None:
            raise RuntimeError("the hook has a model already; make one for each model")
        self._engine = Engine(ddp, self._policy, self._options, self._in_place)
        if self._engine.transport.learner == 0:
            _show_log()
            logger.info("%s", self._engine.introduction())
        if self._to_load is not None:
            states, self._to_load = self._to_load, None
            self.load_state_dict(states)

    def average(self, bucket):
        """Averages a bucket; the future of its buffer."""
        if self._engine is None:
            self.bind(_model_of(self))
        if bucket.index() == 0:
            scaled = self.scaler is not None and self.scaler.is_enabled()
            self._engine.begin_step(time.perf_counter(), self.scaler.get_scale() if scaled else 1.0, scaled)
        return self._engine.average(bucket)

    def stats(self):
        """What it does and what that is worth, as a dict.

        ``mode``, ``compressing`` and ``why``; ``steps`` by kind; ``bytes_sent`` to other learners in compressed steps and
        ``rate``, how many times more the same exchange would have sent dense, both with everything that was handed to the process
        group; ``last``: the same for the last compressed step, with ``seconds`` by what they went into; and ``layers``: for each
        parameter name its elements, bin, and what it selected and sent in that step.
        """
        return self._bound().stats()

    def state_dict(self, consolidate=False):
        """What must be saved so that nothing is lost at resume: a dict of tensors, for ``torch.save`` or safetensors.

        Each learner has its own: save all of them and give each its own back, and training goes on as if nothing had been, but
        for the automatic mode, which times steps anew. With ``consolidate`` all learners must call it and all get the same: the
        average of all, of which one copy is enough, and which can be loaded by any number of learners.
        """
        return self._bound().state_dict(consolidate)

    def load_state_dict(self, state):
        """Takes over what was saved: this learner's own, or one that is consolidated, or a list of those of all learners, from
        which any number of learners can go on. All learners must do so, or none."""
        states = [state] if isinstance(state, dict) else list(state)
        if self._engine is None:
            self._to_load = states
        else:
            self._engine.load_state_dict(states)

    def log_to(self, writer, every=50):
        """Has every so many steps write scalars to a TensorBoard ``SummaryWriter``."""
        self._bound().log_to(writer, every)

    def close(self):
        """Ends the hook's thread and process group. The model cannot be trained any further after that."""
        if self._engine is not None:
            self._engine.close()

    def _bound(self):
        if self._engine is None:
            raise RuntimeError("the hook has no model yet; use adacomp.torch.attach, or ask after the first step")
        return self._engine

    def __repr__(self):
        if self._engine is None:
            return f"AdaComp hook, mode {self.mode}, not yet attached to a model"
        return self._engine.describe()

    def __getstate__(self):
        # A copy has no model: neither has a copied DDP model a hook.
        return {**self.__dict__, "_engine": None, "scaler": None}


def adacomp_hook(state: Hook, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For ``ddp.register_comm_hook(state, adacomp_hook)``, and all that does so."""
    return state.average(bucket)


def attach(ddp, **options):
    """Has a ``DistributedDataParallel`` model exchange its gradients by AdaComp; all learners must do so.

    The options are those of :class:`Hook`, which is returned: ask it for ``stats()``, and save its ``state_dict()``.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"attach() takes a DistributedDataParallel model, not {type(ddp).__name__}; wrap the model first")
    hook = Hook(**options)
    # First, because it is what may be refused.
    hook.bind(ddp)
    try:
        ddp.register_comm_hook(hook, adacomp_hook)
    except BaseException:
        hook.close()
        raise
    return hook


def _show_log():
    """Has the line at the start be seen, unless the program has its own idea of logging."""
    if logger.level == logging.NOTSET and not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)
        logger.propagate = False


def _model_of(hook):
    """The model with which the hook was registered. PyTorch does not say, but the model remembers its hook."""
    for candidate in gc.get_objects():
        # By its type alone: asking an object itself may run its code, or fail if it is a dead reference.
        if issubclass(type(candidate), DistributedDataParallel):
            if any(state is hook for _, state in getattr(candidate, "_comm_hooks", ())):
                return candidate
    raise RuntimeError("the hook was called, but no DistributedDataParallel model has registered it; use adacomp.torch.attach")
