"""What runs behind a hook: a model's parameters, the learners' group, and one step after the other."""

import contextlib
import logging
import struct
from dataclasses import dataclass

import torch

from .. import Exchange, Layout
from . import policy, report, state
from .auto import Auto
from .transport import Transport
from .moments import Moments
from .paths import path_for
from .steps import Compressed, Flush, plain
from .worker import Worker

logger = logging.getLogger("adacomp")

FORMATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class _Bucket:
    """A bucket of PyTorch's on its way."""

    buffer: torch.Tensor
    layers: list
    is_last: bool
    future: torch.futures.Future
    # On a GPU: when its gradients are there.
    ready: object


class Engine:
    def __init__(self, ddp, rules, options, in_place=None):
        self.options = options
        self.group = ddp.process_group
        named = policy.parameters(ddp)
        self.device = _device_of(named)
        # Kept, because parameters are known by their identity.
        self.parameters = [parameter for _, parameter in named]
        self._numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self._seen = set()
        kinds = policy.kinds(ddp.module, named)
        parameters = [(name, tuple(parameter.shape), kind) for (name, parameter), kind in zip(named, kinds)]
        self.layout = Layout(parameters, **rules)

        self.transport = Transport.between(self.group, self.device, options["timeout"])
        self.learners = self.transport.learners
        self._check_agreement("mode", options["mode"])
        self._check_agreement("local_adam", options["local_adam"])
        self.exchange = Exchange(self.layout, options["strategy"], options["codec"], self.transport, options["threads"])
        # Those of the handshake.
        self.transport.forget_lengths()
        # Parameters that no learner has used in a step do not get the average, so they must not send.
        unused_may_be = ddp.find_unused_parameters or ddp.static_graph
        self.path = path_for(self.device, self.exchange, self.layout, options["soft_threshold"], unused_may_be, in_place)
        # With `local_adam`: those of this learner's gradient.
        self.moments = Moments(options["local_adam"]) if options["local_adam"] else None

        self.auto = Auto(self._largest) if options["mode"] == "auto" and self.learners > 1 else None
        self.counts = report.Counts()
        # Whether some learner keeps something; all learners have the same answer.
        self.keeps = False
        self._worker = Worker("adacomp")
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._step, self._buckets, self._sent_before = None, [], 0
        # Statistics of the last compressed step, where they cannot be asked for any more.
        self._last_layers = None
        self._error = None
        self._writer = None
        self._scaled = False

    def begin_step(self, now, loss_scale, scaled):
        """The first bucket of a step has come. The worker has nothing to do at this time."""
        self._check()
        if self._step is not None:
            raise RuntimeError("the last backward pass has not ended, so the next cannot begin")
        self._scaled = scaled
        try:
            compress = self.auto.begin(now) if self.auto else self.options["mode"] == "on"
            if compress or self.keeps:
                self._begin(Compressed if compress else Flush, loss_scale)
            else:
                self.counts.plain += 1
                self._log()
        except BaseException as error:
            self._fail(error)
            raise

    def average(self, bucket):
        """Has a bucket averaged, in place; the future of its buffer."""
        self._check()
        layers = self._layers(bucket) if self.moments or self._step else None
        if self.moments:
            parts = bucket.buffer().split([self.parameters[layer].numel() for layer in layers])
            self.moments.apply(zip(layers, parts))
        if self._step is None:
            return plain(bucket, self.group)
        future = torch.futures.Future(devices=[self.device] if self._stream else None)
        ready = torch.cuda.current_stream(self.device).record_event() if self._stream else None
        given = _Bucket(bucket.buffer(), layers, bucket.is_last(), future, ready)
        self._worker.submit(lambda: self._serve(given))
        return future.then(_unwrap)

    def describe(self):
        return report.describe(self)

    def introduction(self):
        return report.introduction(self)

    def stats(self):
        self._check()
        return report.stats(self, self._last_layers or self._worker.call(self.exchange.statistics))

    def log_to(self, writer, every):
        self._writer = (writer, every)

    def state_dict(self, consolidate):
        self._check()
        if not consolidate:
            return self._worker.call(lambda: self._on_stream(lambda: state.save(self, False)))
        try:
            return self._worker.call(lambda: self._on_stream(lambda: state.save(self, True)))
        except RuntimeError as error:
            # The learners have lost each other.
            self._fail(error)
            raise

    def load_state_dict(self, states):
        self._check()
        self._worker.call(lambda: self._on_stream(lambda: state.load(self, states)))
        self.keeps = True

    def close(self):
        self._error = self._error or RuntimeError("the hook was closed")
        self._worker.close(self.transport.limit.total_seconds())

    # A step.

    def _begin(self, kind, loss_scale):
        self._last_layers = self.exchange.statistics() if kind is Flush else None
        self._sent_before = self.transport.sent
        self.path.set_loss_scale(loss_scale)
        self._step = kind(self.path, self.transport)

    def _serve(self, bucket):
        """On the worker's thread."""
        self._buckets.append(bucket)
        try:
            self._check()
            self._on_stream(lambda: self._step.submit(bucket.buffer, bucket.layers), bucket)
            if bucket.is_last:
                self._finish()
        except BaseException as error:
            self._fail(error)

    def _finish(self):
        good = self._on_stream(self._step.finish)
        if isinstance(self._step, Compressed):
            self.counts.compressed_step(self, self.transport.sent - self._sent_before, good)
        else:
            self.counts.flush += 1
        self.keeps, self._step = self._step.keeps, None
        if not good:
            self._note_dropped()
        # Before the step is handed back: whoever ends training after it may close the writer.
        self._log()
        while self._buckets:
            bucket = self._buckets[0]
            self._on_stream(lambda bucket=bucket: bucket.future.set_result(bucket.buffer))
            del self._buckets[0]

    def _fail(self, error):
        """Nothing more can be done; all that wait are told."""
        self._error, self._step = self._error or error, None
        buckets, self._buckets = self._buckets, []
        for bucket in buckets:
            # It may be what has failed.
            with contextlib.suppress(RuntimeError):
                bucket.future.set_result(_Failed(str(error)))

    def _note_dropped(self):
        self.counts.dropped += 1
        if self.counts.dropped == 1 and not self._scaled:
            advice = "" if self.moments else "If a GradScaler is in use, pass it: attach(model, scaler=scaler)"
            logger.warning(
                "a gradient is not finite: all learners get NaN, as with plain DDP, and residuals keep what they had. %s", advice
            )

    def _log(self):
        if self._writer is None or self.counts.steps() % self._writer[1]:
            return
        try:
            report.log(self, self._writer[0])
        except Exception as error:
            # Training matters more.
            logger.warning("no more scalars for TensorBoard: %s", error)
            self._writer = None

    def _on_stream(self, work, bucket=None):
        """On a GPU: beside the backward pass, and after what the bucket needs."""
        if self._stream is None:
            return work()
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if bucket is not None:
                self._stream.wait_event(bucket.ready)
                bucket.buffer.record_stream(self._stream)
            return work()

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
        told = self.transport.all_gather(struct.pack(form, *numbers))
        return [max(column) for column in zip(*(struct.unpack(form, each) for each in told))]

    def _check_agreement(self, option, value):
        for learner, other in enumerate(self.transport.all_gather(repr(value).encode())):
            if other.decode() != repr(value):
                raise ValueError(f"learner {learner} was attached with {option}={other.decode()}, this one with {value!r}")


class _Failed:
    """Stands for a buffer that there is none of. A future of PyTorch carries values only."""

    def __init__(self, reason):
        self.reason = reason


def _unwrap(future):
    value = future.value()
    if isinstance(value, _Failed):
        raise RuntimeError(f"AdaComp: {value.reason}")
    return value


def _device_of(named):
    """The device of parameters that can be exchanged."""
    if not named:
        raise ValueError("the model has no parameters that DDP exchanges")
    for name, parameter in named:
        if parameter.dtype not in FORMATS:
            raise ValueError(f"parameter {name} is {parameter.dtype}; float32, float16 and bfloat16 can be exchanged")
    devices = {parameter.device for _, parameter in named}
    if len(devices) > 1:
        raise ValueError(f"the parameters are on several devices, {sorted(map(str, devices))}; one a process is supported")
    return devices.pop()
