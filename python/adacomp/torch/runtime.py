"""What runs behind every door: named ranges of a model, the learners' group, and one step after the other.

A door (:mod:`.ddp`, :mod:`.fsdp`, :mod:`.local`) says which ranges there are and who the learners are. It begins a step, submits
buckets with the ranges in them, one after the other, and finishes the step. If the step is plain, it averages by its own means
instead.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.nn.modules.conv import _ConvNd

from .._native import Exchange, Layout, kind
from . import report, saved
from .auto import Auto
from .config import Config, Strategy
from .device import Path, SelectionPath
from .moments import Moments, rates_of
from .node import Inside, Node
from .transport import Transport, Worker, longest_message

if TYPE_CHECKING:
    from .._native import Kind

logger = logging.getLogger("adacomp")

FORMATS = (torch.float32, torch.float16, torch.bfloat16)

T = TypeVar("T")
Named = Sequence[tuple[str, torch.Tensor]]


@dataclass
class _Bucket:
    """Gradients on their way."""

    buffer: torch.Tensor
    numbers: list[int]
    future: torch.futures.Future[Any]
    # On a GPU: when its gradients are there.
    ready: torch.cuda.Event | None
    # Bytes of an element where it would be averaged dense.
    element_size: float
    # What is exchanged of it here, and its layers: all of it, or this process's part.
    exchanged: tuple[torch.Tensor, list[int]] = field(init=False)


class Door:
    """What a runtime has to know of its door."""

    # What it is called, and what it exchanges.
    title, exchanged = "hook", "gradients"
    # Whether it averages dense steps by its own means where nothing waits in residuals.
    has_plain_steps = True
    # With `local_adam`: whether it turns a process's gradients into updates itself, also in plain steps.
    makes_updates = False
    # What to tell when a step is dropped, and what to do about it.
    dropped = "a gradient is not finite: all learners get NaN gradients, so skip this optimizer step. Residuals stay finite."
    advice = " If a GradScaler is in use, pass it: attach(model, scaler=scaler)"


class Model:
    """The parameters that are exchanged, and how their gradients travel."""

    def __init__(
        self,
        module: torch.nn.Module,
        named: Named,
        config: Config,
        wholes: Sequence[torch.Tensor] | None = None,
        dense: Sequence[str] = (),
    ) -> None:
        """Where parameters are sharded, `wholes` are tensors of their whole shapes. Those named in `dense` travel dense."""
        self.device = _device_of(named)
        # Kept, because doors know parameters by their identity.
        self.trained = [parameter for _, parameter in named]
        self.parameters: list[torch.Tensor] = list(self.trained if wholes is None else wholes)
        self._shapes = [
            (name, tuple(whole.shape), kind) for (name, _), whole, kind in zip(named, self.parameters, kinds(module, named))
        ]
        self._config, self._dense = config, [(name, "dense") for name in dense]
        self.layout = self.layout_at(0)
        # Names of parameters that the door averages by its own means, because they cannot be compressed.
        self.others: list[str] = []

    def layout_at(self, step: int) -> Layout:
        """Returns the layout of whole parameters in a compressed step: bins may grow in the first ones."""
        policy = self._config.policy(step)
        return Layout(self._shapes, **{**policy, "names": policy["names"] + self._dense})


class Runtime:
    """One learner's side of all steps of a model; or that of one of its processes, which has its part of every parameter."""

    def __init__(
        self,
        model: Model,
        group: dist.ProcessGroup,
        config: Config,
        skip_unused: bool,
        in_place: bool | None = None,
        learners: Sequence[int] | None = None,
        inside: Inside | None = None,
        *,
        door: type[Door],
    ) -> None:
        """Connects these members of a process group, or all, which all must do. With `skip_unused`, parameters whose gradient is
        zero everywhere send nothing and keep their residual. `inside` are the other processes of the same learner."""
        self.config, self.model, self.device, self.inside, self.door = config, model, model.device, inside, door
        # The layers that are exchanged here, and which parts of which parameters they are.
        whole = [(number, 0, elements) for number, elements in enumerate(model.layout.elements)]
        self.parts = inside.parts if inside else whole
        self.layout, self._matrix = model.layout.parts(self.parts), config.matrix_at(0)

        self.transport = Transport(group, self.device, config.explicit_timeout(), learners, inside)
        self.learners = self.transport.learners
        self.check_agreement("mode", config.mode)
        self.check_agreement("local_adam", config.local_adam)
        self.check_agreement("an optimizer", config.optimizer is not None)
        self.check_agreement("bin_warm_up", config.bin_warm_up)
        if config.bin_warm_up:
            # The layout of the first step does not show it.
            self.check_agreement("matrix", config.matrix)
        self._skip_unused = skip_unused
        self._in_place = self.device.type == "cpu" if in_place is None else in_place
        strategy = config.strategy
        if strategy == "auto" and config.bin_warm_up:
            # Chosen for the bins that most steps have.
            self.layout = model.layout_at(config.bin_warm_up).parts(self.parts)
            strategy = self.connect(strategy)
            self.layout = model.layout.parts(self.parts)
        self.connect(strategy)
        # With `local_adam`: those of this learner's gradient.
        rates = rates_of(config.optimizer, model.trained) if config.optimizer else None
        rate = (lambda layer: rates(self.parts[layer][0])) if rates else None
        self.moments = Moments(config.local_adam, rate) if config.local_adam else None
        # What the door keeps of parameters beside that.
        self.kept_by_door: saved.Kept | None = None

        self.auto: Auto | None = None
        self.configure(config)
        self.counts = report.Counts()
        # Whether some learner keeps residuals; all learners have the same answer.
        self.keeps = False
        self._worker = Worker("adacomp")
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        # The step that is going on, if it is not plain: then the door averages it.
        self._step: Compressed | Flush | None = None
        self.is_plain = True
        # Whether the last step that was not plain was averaged, or dropped.
        self.averaged = True
        # How many steps of the optimiser the step stands for, each of which would have had a dense all-reduce.
        self.local_steps = 1
        self._buckets: list[_Bucket] = []
        self._sent_before = self._elements = 0
        self._dense_bytes = 0.0
        self._submitted = 0.0
        # Statistics of the last compressed step, where the exchange does not have them any more.
        self._last_layers: dict[str, dict[str, Any]] | None = None
        self._error: BaseException | None = None
        # Where scalars go, and in every how many steps.
        self.writer: tuple[Callable[[dict[str, float], int], object], int] | None = None

    def connect(self, strategy: Strategy) -> Strategy:
        """Begins an exchange with nothing in its residuals; returns its strategy. All learners must do the same."""
        config, skip_unused = self.config, self._skip_unused
        self.transport.begin_aside()
        self.exchange = Exchange(self.layout, strategy, config.codec, self.transport, config.threads, skip_unused, config.clip)
        # With `strategy="auto"` the one that was chosen, the same on all learners.
        self.strategy = cast(Strategy, self.exchange.strategy)
        # The learners have found that their layouts are the same.
        self._limit_messages()
        if self._in_place:
            self.path = Path(self.exchange)
        else:
            self.path = SelectionPath(self.exchange, self.layout, self.device, config.soft_threshold, skip_unused)
        return self.strategy

    def _change_strategy(self, strategy: Strategy) -> None:
        """Goes on with another exchange and the same residuals. All learners must do the same."""
        self.path.to_host()
        kept = self.exchange.save()
        self.connect(strategy)
        self.exchange.load([kept])
        self.path.to_device()

    def _limit_messages(self) -> None:
        self.transport.longest_message = longest_message(self.layout.elements, self.layout.treatments, self.learners)

    def _grow_bins(self) -> None:
        """In the warm-up: goes on with longer bins, and with all residuals, when it is time."""
        step = self.exchange.step
        if self.config.matrix_at(step) != self._matrix:
            self._matrix, self.model.layout = self.config.matrix_at(step), self.model.layout_at(step)
            if self.inside:
                self.inside.count_bins(self.model.layout)
            self.layout = self.model.layout.parts(self.parts)
            self.path.set_layout(self.layout)
            self._limit_messages()

    def set_mode(self, config: Config) -> None:
        """Takes over another mode, from the next step on, if all learners do."""
        self.check()
        mode = f"mode={config.mode!r} after step {self.counts.steps()}"
        self.agree("set the same hook.mode after the same step", mode)
        self.configure(config)

    def configure(self, config: Config) -> None:
        self.config = config
        wants_auto = config.mode == "auto" and self.learners > 1
        self.auto = (self.auto or Auto(self.largest)) if wants_auto else None

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all learners."""
        return self.transport.learner == 0 and (self.inside is None or self.inside.place == 0)

    @property
    def _makes_updates(self) -> bool:
        """Whether gradients become updates when they are submitted: those of a learner of several processes are not those of
        each."""
        return self.moments is not None and (self.inside is not None or not self.door.makes_updates)

    def apply_moments(self, buffer: torch.Tensor, layers: list[int]) -> None:
        """With `local_adam`: turns the gradients of these layers into updates, in place."""
        if self.moments:
            self.moments.apply(self._split(buffer, layers), self.is_plain)

    def _split(self, buffer: torch.Tensor, layers: list[int]) -> list[tuple[int, torch.Tensor]]:
        """Returns layers and what a buffer has of them."""
        elements = self.layout.elements
        return list(zip(layers, buffer.split([elements[layer] for layer in layers])))

    def submit(self, buffer: torch.Tensor, numbers: list[int], element_size: float | None = None) -> torch.futures.Future[Any]:
        """Takes the gradients of these parameters, one after the other in a buffer. Of a learner of several processes, but for a
        :class:`Node`, it has the parts that are here. Where the parameters are of another format, `element_size` are the bytes of
        their elements. Returns the future of the buffer, which has the average after `finish`."""
        future = torch.futures.Future[Any](devices=[self.device] if self._stream else None)
        ready = torch.cuda.current_stream(self.device).record_event() if self._stream else None
        bucket = _Bucket(buffer, numbers, future, ready, element_size or buffer.element_size())
        self._worker.submit(lambda: self._serve(bucket))
        return future.then(_averaged)

    def finish(self) -> None:
        """Ends the step: all buckets have been submitted."""
        self._submitted = time.perf_counter()
        self._worker.submit(self._finish)

    def layer_statistics(self) -> dict[str, dict[str, Any]]:
        """Returns what each parameter sent in the last compressed step, by name."""
        self.check()
        return self._last_layers or self._worker.call(self.exchange.statistics)

    def state_dict(self, consolidate: bool) -> dict[str, torch.Tensor]:
        self.check()
        if consolidate:
            # Whoever is alone here must know it before any collective.
            step = f"step {self.counts.steps()}"
            self.agree("call state_dict(consolidate=True) after the same step", step)
        try:
            return self._worker.call(lambda: self._on_stream(lambda: saved.save(self, consolidate)))
        except RuntimeError as error:
            if consolidate:
                # The learners have lost each other.
                self._fail(error)
            raise

    def load_state_dict(self, states: Sequence[Mapping[str, torch.Tensor]], strict: bool = True) -> None:
        self.check()
        # Those who have loaded flush residuals where others have none to flush.
        self.agree("load a state after the same step", f"step {self.counts.steps()}")
        failure: BaseException | None = None
        strategy = self.strategy
        try:
            strategy = self._worker.call(lambda: self._on_stream(lambda: saved.load(self, states, strict)))
        except Exception as error:
            failure = error
        failed = float(failure is not None)
        some_failed, some_loaded = self.largest([failed, 1.0 - failed])
        if some_failed and some_loaded:
            # They have no common state to go on from.
            failure = failure or RuntimeError("another learner could not load its state; its error says why")
            self._fail(failure)
        if failure is not None:
            raise failure
        if strategy != self.strategy:
            self._worker.call(lambda: self._on_stream(lambda: self._change_strategy(strategy)))
        self.keeps = True

    @property
    def is_closed(self) -> bool:
        return self._worker.is_closed

    def close(self) -> None:
        self._error = self._error or RuntimeError("the hook was closed")
        self._worker.close(self.transport.timeout.total_seconds())
        # Its traceback refers to what still uses the connections.
        self._error = RuntimeError(str(self._error))
        for transport in self._transports():
            transport.close()

    # A step.

    def begin(self, now: float, fragment: int = 0) -> None:
        """Begins a step. The worker has nothing to do at this time. Where steps have different layers, `fragment` is their
        number."""
        if self._step is not None:
            raise RuntimeError("the last backward pass has not ended, so the next cannot begin")
        try:
            compress = self._auto_begin(self.auto, now) if self.auto else self.config.mode == "on"
            can_be_plain = self.door.has_plain_steps and not self._makes_updates
            self.is_plain = can_be_plain and not (compress or self.keeps)
            if self.is_plain:
                self.counts.plain += 1
                self._log()
                return
            if compress and self.config.bin_warm_up:
                self._grow_bins()
            self._last_layers = None if compress else self._last_layers or self.exchange.statistics()
            self._sent_before, self._dense_bytes, self._elements = self.transport.sent, 0.0, 0
            loss_scale = self.config.loss_scale()
            self.path.set_loss_scale(1.0 if loss_scale is None else loss_scale)
            self.transport.begin_step(fragment)
            self._step = Compressed(self.path, self.inside) if compress else Flush(self.path, self.transport, self.inside)
        except BaseException as error:
            self._fail(error)
            raise

    def _auto_begin(self, auto: Auto, now: float) -> bool:
        before = auto.reason
        compress = auto.begin(now)
        if auto.reason != before and self.is_first:
            logger.info("%s", report.summary(self))
        return compress

    def _serve(self, bucket: _Bucket) -> None:
        """Exchanges a bucket, on the worker's thread."""
        self._buckets.append(bucket)
        try:
            self.check()
            step = self._step
            assert step is not None
            self._on_stream(lambda: self._submit(step, bucket), bucket)
        except BaseException as error:
            self._fail(error)

    def _submit(self, step: "Compressed | Flush", bucket: _Bucket) -> None:
        """Submits a bucket to a step, or what is this process's part of it."""
        buffer, layers = bucket.buffer, bucket.numbers
        if self.inside:
            layers = self.inside.begin(bucket.numbers)
            if isinstance(self.inside, Node):
                buffer = self.inside.take(buffer, bucket.numbers)
        if self._makes_updates:
            self.apply_moments(buffer, layers)
        self._dense_bytes += buffer.numel() * bucket.element_size
        self._elements += buffer.numel()
        bucket.exchanged = buffer, layers
        step.submit(buffer, layers)

    def _finish(self) -> None:
        """Ends the step, on the worker's thread."""
        try:
            self.check()
            assert self._step is not None
            self._end(self._step)
        except BaseException as error:
            self._fail(error)

    def _end(self, step: "Compressed | Flush") -> None:
        averaged = self._on_stream(step.finish)
        if self.moments and self.moments.rate:
            for bucket in self._buckets:
                self._on_stream(functools.partial(self.moments.restore, self._split(*bucket.exchanged)))
        if isinstance(self.inside, Node):
            self.inside.meet()
            for bucket in self._buckets:
                self._on_stream(functools.partial(self.inside.gather, bucket.buffer, bucket.numbers))
        if isinstance(step, Compressed):
            sent = self.transport.sent - self._sent_before
            self.counts.add_compressed(self, sent, self._dense_bytes, self._elements, averaged)
            # The backward pass waits from its last bucket to here.
            self.counts.last["held_up"] = time.perf_counter() - self._submitted
        else:
            self.counts.flush += 1
        self.keeps, self._step, self.averaged = step.keeps, None, averaged
        if not averaged:
            self._note_dropped()
        # Before the step is handed back: whoever ends training after it may close the writer.
        self._log()
        while self._buckets:
            bucket = self._buckets[0]
            self._on_stream(functools.partial(bucket.future.set_result, bucket.buffer))
            del self._buckets[0]

    def _fail(self, error: BaseException) -> None:
        """Tells all that wait that nothing more can be done."""
        self._error, self._step = self._error or error, None
        buckets, self._buckets = self._buckets, []
        for bucket in buckets:
            # It may be what has failed.
            with contextlib.suppress(RuntimeError):
                bucket.future.set_result(f"AdaComp: {error}")

    def _note_dropped(self) -> None:
        self.counts.dropped += 1
        if self.counts.dropped == 1 and self.config.loss_scale() is None:
            logger.warning("%s%s", self.door.dropped, "" if self.moments else self.door.advice)

    def _log(self) -> None:
        if self.writer is None or self.counts.steps() % self.writer[1]:
            return
        try:
            self.writer[0](report.scalars(self), self.counts.steps())
        except Exception as error:
            # Training matters more.
            logger.warning("no more scalars are logged: %s", error)
            self.writer = None

    def _on_stream(self, work: Callable[[], T], bucket: _Bucket | None = None) -> T:
        """On a GPU: runs beside the backward pass, and after what the bucket needs."""
        if self._stream is None:
            return work()
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if bucket is not None:
                assert bucket.ready is not None
                self._stream.wait_event(bucket.ready)
                bucket.buffer.record_stream(self._stream)
            return work()

    # Helpers.

    def decay(self, factor: float) -> None:
        """Multiplies all residuals by a factor, between steps."""
        self._on_stream(lambda: self.path.decay(factor))

    def check(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"AdaComp cannot go on: {self._error}") from self._error

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """Returns the largest of all learners for each of the numbers."""
        largest = self.transport.combine(numbers, max)
        return self.inside.combine(largest, max) if self.inside else largest

    def agree(self, what: str, value: str) -> None:
        """Makes sure that all learners, and all of their processes, say the same."""
        for transport in self._transports():
            transport.rendezvous.agree(what, value)

    def _transports(self) -> list[Transport]:
        """Returns that between learners, and that inside of this one."""
        return [self.transport, self.inside.transport] if self.inside else [self.transport]

    def check_agreement(self, option: str, value: object) -> None:
        for transport, who in zip(self._transports(), ("learner", "process")):
            for number, other in enumerate(transport.all_gather(repr(value).encode())):
                if other.decode() != repr(value):
                    raise ValueError(f"{who} {number} was attached with {option}={other.decode()}, this one with {value!r}")


def _averaged(done: torch.futures.Future[Any]) -> torch.Tensor:
    """Returns what has become of a bucket. An error is told by text: DDP finds an exception only if a callback raises it, and one
    that the future keeps would by its traceback keep the future, with all that the step refers to."""
    result = done.value()
    if isinstance(result, torch.Tensor):
        return result
    raise RuntimeError(result)


# The kinds of steps that are not plain. They are submitted bucket by bucket and then finished, on the worker's thread.


class Compressed:
    """A step in which what is selected is sent."""

    def __init__(self, path: Path, inside: Inside | None) -> None:
        self._path, self._inside = path, inside
        self._buckets: list[tuple[torch.Tensor, list[int]]] = []
        # Whether any learner keeps something after the step.
        self.keeps = True

    def submit(self, buffer: torch.Tensor, layers: list[int]) -> None:
        if layers or not self._inside:
            self._path.submit(buffer, layers)
            self._buckets.append((buffer, layers))
        else:
            # The other places have something of the bucket.
            self._inside.share_scales([], [])

    def finish(self) -> bool:
        """Returns whether the gradient was averaged. If not, all learners get NaN; residuals took in what was finite."""
        averaged = self._path.finish(self._buckets) is None
        if not averaged:
            _fill_with_nan(buffer for buffer, _ in self._buckets)
        return averaged


class Flush:
    """A dense step, by the process group's own sum, that also sends the residuals: the way from compressed to plain steps, on
    which nothing is lost."""

    def __init__(self, path: Path, transport: Transport, inside: Inside | None) -> None:
        self._path, self._transport, self._inside = path, transport, inside
        self._sums: list[tuple[dist.Work, torch.Tensor]] = []
        self.keeps = False
        path.to_host()

    def submit(self, buffer: torch.Tensor, layers: list[int]) -> None:
        finite, keeps = self._path.add_residuals(buffer, layers)
        # A parameter that this learner has not used in the step, and that waits for one in which it does.
        self.keeps = self.keeps or keeps
        if not finite:
            # All others learn of it, because no sum with it is finite.
            _fill_with_nan([buffer])
        buffer.div_(self._transport.learners)
        self._sums.append((self._transport.start_sum(buffer), buffer))

    def finish(self) -> bool:
        """Returns the same as of a compressed step."""
        for work, _ in self._sums:
            self._transport.wait(work)
        # The same bits everywhere, so all learners find the same.
        arrived = all(bool(buffer.isfinite().all()) for _, buffer in self._sums)
        arrived = self._inside.agree(arrived) if self._inside else arrived
        if not arrived:
            _fill_with_nan(buffer for _, buffer in self._sums)
        self._path.end_elsewhere(arrived)
        self._path.to_device()
        # What one learner keeps, another may have sent, so they tell each other.
        received = self._transport.all_gather(bytes([self.keeps or not arrived]))
        self.keeps = any(message != b"\0" for message in received)
        self.keeps = not self._inside.agree(not self.keeps) if self._inside else self.keeps
        return arrived


def _fill_with_nan(buffers: Iterable[torch.Tensor]) -> None:
    """Writes what plain DDP would give after an overflow on some learner, so that a gradient scaler skips the step."""
    for buffer in buffers:
        buffer.fill_(torch.nan)


# A model's parameters.


def kinds(module: torch.nn.Module, named: Named) -> "list[Kind]":
    """Returns the kind of each parameter, from the module that has it. Convolutions are known by their type."""
    # Its own, and those from which it makes them, such as with weight normalisation.
    convolutions = {id(p) for owner in module.modules() if isinstance(owner, _ConvNd) for p in owner.parameters()}
    return [kind(parameter.dim(), id(parameter) in convolutions) for _, parameter in named]


def trained_parameters(module: torch.nn.Module) -> Named:
    """Returns the name and parameter of all that can be exchanged: no frozen ones, shared ones once. Others are refused."""
    named = [(saved.clean_name(name), parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    for name, parameter in named:
        if parameter.dtype not in FORMATS:
            raise ValueError(f"parameter {name} is {parameter.dtype}; float32, float16 and bfloat16 can be exchanged")
    return named


def _device_of(named: Named) -> torch.device:
    """Returns the device of parameters that can be exchanged."""
    if not named:
        raise ValueError("the model has nothing to compress: no parameter in float32, float16 or bfloat16 with a dense gradient")
    devices = {parameter.device for _, parameter in named}
    if len(devices) > 1:
        raise ValueError(f"the parameters are on several devices, {sorted(map(str, devices))}; one a process is supported")
    return devices.pop()
