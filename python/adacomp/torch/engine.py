"""What runs behind a hook: a model's parameters, the learners' group, and one step after the other."""

import contextlib
import logging
import struct
from datetime import timedelta

import torch
import torch.distributed as dist

from .. import Exchange, Layout
from . import policy, report, state
from .auto import Auto
from .collective import Collective
from .paths import path_for
from .steps import Compressed, Everything, plain
from .worker import Worker

logger = logging.getLogger("adacomp")

FORMATS = (torch.float32, torch.float16, torch.bfloat16)


class Engine:
    def __init__(self, ddp, rules, options, on_host=None):
        self.options = options
        self.group = ddp.process_group
        named = policy.parameters(ddp)
        self.device = _check(named)
        # Kept, because parameters are known by their identity.
        self.parameters = [parameter for _, parameter in named]
        self._numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self._seen = set()
        names = [name for name, _ in named]
        kinds = policy.kinds(ddp.module, names)
        shapes = [tuple(parameter.shape) for parameter in self.parameters]
        self.layout = Layout(list(zip(names, shapes, kinds)), **rules)

        limit = options["time_limit"] or _limit_of(self.group, self.device)
        self._limit = limit
        # A group of its own, so that no order of collectives has to be kept with anybody else's.
        backend = dist.get_backend(self.group)
        self.own_group = dist.new_group(
            dist.get_process_group_ranks(self.group), timeout=limit, backend=backend, use_local_synchronization=True
        )
        by_host = backend in ("gloo", "mpi")
        self.collective = Collective(self.own_group, torch.device("cpu") if by_host else self.device, limit)
        self._check_agreement(options["mode"])
        self.exchange = Exchange(self.layout, options["strategy"], options["codec"], self.collective, options["threads"])
        # Parameters that no learner has used in a step do not get the average, so they must not send.
        unused_may_be = ddp.find_unused_parameters or ddp.static_graph
        self.path = path_for(self.device, self.exchange, self.layout, options["soft_threshold"], unused_may_be, on_host)
        self.learners = self.collective.learners
        self.auto = Auto(self._largest) if options["mode"] == "auto" and self.learners > 1 else None
        self.counts = report.Counts()
        self._compressed = {number for number, way in enumerate(self.layout.treatments) if way not in ("dense", "half")}
        # Parameters whose residual is not known to be empty.
        self.kept = set()
        self._worker = Worker("adacomp")
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._step, self._open, self._futures = None, False, []
        self._sent_before = 0
        self._error = None
        self._writer = None
        self._scaled = False

    def begin_step(self, now, loss_scale, scaled):
        """The first bucket of a step has come."""
        self._check()
        if self._open:
            raise RuntimeError("the last backward pass has not ended, so the next cannot begin")
        self._scaled = scaled
        compress = self.auto.begin(now) if self.auto else self.options["mode"] == "on"
        if compress or self.kept:
            # The worker has nothing to do now, so this can be done here.
            self.path.set_loss_scale(loss_scale)
            self._step = Compressed(self.path, self.collective) if compress else Everything(self.path, self.own_group)
            self._open, self._futures = True, []
            self._sent_before = self.collective.sent
        else:
            self._step = None
            self.counts.plain += 1

    def reduce(self, bucket):
        """Has a bucket averaged, in place; the future of its buffer."""
        self._check()
        if self._step is None:
            return plain(bucket, self.group)
        buffer, layers, last = bucket.buffer(), self._layers(bucket), bucket.is_last()
        future = torch.futures.Future(devices=[self.device] if self._stream else None)
        ready = torch.cuda.current_stream(self.device).record_event() if self._stream else None
        step = self._step
        self._worker.submit(lambda: self._serve(step, buffer, layers, future, last, ready))
        return future.then(_unwrap)

    def describe(self):
        return report.describe(self)

    def introduction(self):
        return report.introduction(self)

    def stats(self):
        return report.stats(self, self._worker.call(self.exchange.statistics))

    def log_to(self, writer, every):
        self._writer = (writer, every)

    def state_dict(self, consolidate):
        self._check()
        return self._worker.call(lambda: state.save(self, consolidate))

    def load_state_dict(self, states):
        self._check()
        self._worker.call(lambda: state.load(self, states))
        self.kept = set(self._compressed)

    def close(self):
        self._worker.close(self._limit.total_seconds())
        self._error = self._error or RuntimeError("the hook was closed")

    # On the worker's thread.

    def _serve(self, step, buffer, layers, future, last, ready):
        self._futures.append((future, buffer))
        try:
            self._check()
            with self._on_stream(buffer, ready):
                step.give(buffer, layers)
                if last:
                    self._finish(step)
        except BaseException as error:
            self._fail(error)

    def _finish(self, step):
        good = step.finish()
        self._open = False
        if isinstance(step, Compressed):
            self.kept = set(self._compressed)
            self.counts.compressed_step(self, self.collective.sent - self._sent_before, good)
        else:
            self.kept = step.unused if good else self.kept
            self.counts.everything += 1
        if not good:
            self._dropped()
        self._log()
        futures, self._futures = self._futures, []
        for future, buffer in futures:
            future.set_result(buffer)

    def _fail(self, error):
        """Nothing more can be done; all that wait are told."""
        self._error, self._open = self._error or error, False
        futures, self._futures = self._futures, []
        for future, _ in futures:
            future.set_result(_Failed(error))

    def _dropped(self):
        self.counts.dropped += 1
        if self.counts.dropped == 1 and not self._scaled:
            logger.warning(
                "a gradient is not finite: all learners get NaN, as with plain DDP, and residuals keep what they had. "
                "If a GradScaler is in use, pass it: attach(model, scaler=scaler)"
            )

    def _log(self):
        if self._writer is not None:
            writer, every = self._writer
            if self.counts.steps() % every == 0:
                report.log(self, writer)

    @contextlib.contextmanager
    def _on_stream(self, buffer, ready):
        """On a GPU: after what the bucket needs, and beside the backward pass."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            buffer.record_stream(self._stream)
            yield

    # Helpers.

    def _check(self):
        if self._error is not None:
            raise RuntimeError(f"AdaComp cannot go on: {self._error}") from self._error

    def _layers(self, bucket):
        """The numbers of a bucket's parameters, in its order."""
        try:
            layers = [self._numbers[id(parameter)] for parameter in bucket.parameters()]
        except KeyError:
            raise RuntimeError("a bucket has a parameter that the model did not have when the hook was attached") from None
        if tuple(layers) not in self._seen:
            # That they lie one after the other, once for each bucket that PyTorch makes.
            start = bucket.buffer().data_ptr()
            for gradient in bucket.gradients():
                if gradient.data_ptr() != start and gradient.numel():
                    raise RuntimeError("a bucket's gradients do not lie one after the other, in this version of PyTorch")
                start += gradient.numel() * gradient.element_size()
            self._seen.add(tuple(layers))
        return layers

    def _largest(self, numbers):
        """The largest of all learners for each of the numbers."""
        form = f"<{len(numbers)}d"
        message = struct.pack(form, *numbers)
        all_learners = self._to_all(message)
        return [max(column) for column in zip(*(struct.unpack(form, each) for each in all_learners))]

    def _to_all(self, message):
        self.collective.begin_step()
        return self.collective.to_all(message)

    def _check_agreement(self, mode):
        for learner, other in enumerate(self._to_all(mode.encode())):
            if other.decode() != mode:
                raise ValueError(f"learner {learner} was attached with mode={other.decode()!r}, this one with {mode!r}")


class _Failed:
    """Stands for a buffer that there is none of. A future of PyTorch carries values only."""

    def __init__(self, error):
        self.error = error


def _unwrap(future):
    value = future.value()
    if isinstance(value, _Failed):
        raise RuntimeError(f"AdaComp: {value.error}") from value.error
    return value


def _check(named):
    """That the parameters are such as can be exchanged; their device."""
    if not named:
        raise ValueError("the model has no parameters that DDP exchanges")
    for name, parameter in named:
        if parameter.dtype not in FORMATS:
            raise ValueError(f"parameter {name} is {parameter.dtype}; float32, float16 and bfloat16 can be exchanged")
    devices = {parameter.device for _, parameter in named}
    if len(devices) > 1:
        raise ValueError(f"the parameters are on several devices, {sorted(map(str, devices))}; one a process is supported")
    return devices.pop()


def _limit_of(group, device):
    """How long a process group waits, which only its backend knows; PyTorch's own default where it does not say."""
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return timedelta(minutes=30)
