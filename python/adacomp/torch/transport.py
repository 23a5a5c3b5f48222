"""Messages between learners over a PyTorch process group, and the thread that starts them.

Process groups move tensors of equal size, messages have any. So each message travels in a row with a header, of a capacity that
all learners know: it follows from the longest messages of the last times. Only if a message is longer is there a second round,
for the rest of all; headers say so to everybody. A round is thus one collective nearly always, and padding is a few percent.
Nothing is allocated for a header that says more than the model's messages can have.

Where each learner has a machine for itself, a message for all is sent to each of them directly. Gloo's own all-gather has as many
bytes, but passes them around a ring, which takes as many latencies, one after the other, as there are other learners. Where
learners share machines, the ring sends less between these.
"""

from __future__ import annotations

import atexit
import queue
import socket
import struct
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

import numpy
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from .rendezvous import Rendezvous

if TYPE_CHECKING:
    from .._native import Inside

# The length of the message, and of the longest message of its sender.
HEADER = 8

# The position of rounds that are not of a step.
NO_STEP = -1

# The longest message of such rounds: the text in which a learner describes its layout, about 100 bytes for each parameter. All
# learners know it, whatever their layouts are.
LONGEST_ASIDE = 2**24

# Times for which a longest message is remembered. Lengths go up and down from step to step, but after a change, such as new
# buckets, rows must not stay too long.
REMEMBERED = 8

# How long the end of the program waits for what is under way. A thread that comes back to an interpreter that is gone ends the
# process with an abort.
AT_EXIT = 5.0

T = TypeVar("T")
Rows = NDArray[numpy.uint8]


@dataclass
class _Round:
    position: int
    capacity: int
    # What is behind the capacity, for a second round.
    rests: list[memoryview]
    work: dist.Work
    # Kept until the work is over, because it reads and writes them.
    outgoing: torch.Tensor
    incoming: torch.Tensor


class Transport:
    """Carries bytes; used by one thread at a time. Rounds are started and finished in the same order on all learners."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: timedelta | None = None,
        members: Sequence[int] | None = None,
        inside: Inside | None = None,
    ) -> None:
        """Connects the learners of a process group, which all must do; of several disjoint sets of its members each connects its
        own. `inside` are the other processes of this learner, if there are any.

        It has a Gloo group of its own, whatever the other is, so that no order has to be kept with anybody else's collectives;
        messages are in the processor's memory anyway. It is made without ``dist.new_group``: if some processes call that and
        others do not, PyTorch gets the names of later groups wrong.
        """
        self.timeout = timeout or _timeout_of(group, device)
        ranks = dist.get_process_group_ranks(group)
        self.rendezvous = Rendezvous(ranks if members is None else [ranks[member] for member in members], self.timeout)
        self.learner, self.learners = self.rendezvous.learner, self.rendezvous.learners
        self.inside = inside
        own = dist.ProcessGroupGloo(self.rendezvous.store, self.learner, self.learners, self.timeout)
        _transports.add(self)
        # PyTorch's annotations have a backend without methods, but it has those of a group.
        self._group = cast(dist.ProcessGroup, own)
        # Whether messages for all go to each directly.
        self._direct = False
        # The longest message of a step. It must be the same on all learners, so it is set once these have the same layout.
        self.longest_message = LONGEST_ASIDE
        # Bytes handed to the process group for other learners.
        self.sent = 0
        self._pending: deque[_Round] = deque()
        # The longest messages of the last times, by position of the round in the step: what is long in one bucket is long there
        # the next time, too.
        self._longest: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        # Nothing before the first step is of one.
        self._position = NO_STEP
        hosts = self.all_gather(socket.gethostname().encode())
        self._direct = len(set(hosts)) == self.learners
        self._longest.clear()

    @property
    def group(self) -> dist.ProcessGroup:
        """Its own process group."""
        return self._group

    def start_sum(self, tensor: torch.Tensor) -> dist.Work:
        """Starts to sum a tensor over all learners, in place."""
        return self._group.allreduce([tensor])

    def begin_step(self, fragment: int = 0) -> None:
        """Counts the rounds that follow from the first again. Steps of another fragment have other positions."""
        self._position = fragment << 16

    def begin_aside(self) -> None:
        """The rounds that follow are not of a step."""
        self._position = NO_STEP

    def start_all_gather(self, message: bytes) -> None:
        self._start(self._for_all(message))

    def start_all_to_all(self, messages: list[bytes]) -> None:
        self._start(messages)

    def all_gather(self, message: bytes) -> list[bytes]:
        """Returns all learners' messages of a round that is not of a step."""
        self._start(self._for_all(message), NO_STEP)
        return [each.tobytes() for each in self.finish()]

    def combine(self, numbers: Sequence[float], combine: Callable[[Sequence[float]], float]) -> list[float]:
        """Returns for each of the numbers the largest, or the sum, of all learners: the same bits for all."""
        form = f"<{len(numbers)}d"
        received = self.all_gather(struct.pack(form, *numbers))
        return [combine(column) for column in zip(*(struct.unpack(form, each) for each in received))]

    def finish(self) -> list[Rows]:
        """Returns all learners' messages of the oldest round, as arrays of bytes."""
        oldest = self._pending.popleft()
        rows = self._rows(oldest.work, oldest.incoming)
        headers: list[tuple[int, int]] = rows[:, :HEADER].copy().view("<u4").tolist()
        most = LONGEST_ASIDE if oldest.position == NO_STEP else self.longest_message
        for learner, (length, longest) in enumerate(headers):
            if not length <= longest <= most:
                raise RuntimeError(
                    f"learner {learner} announces {length} bytes, and {longest} as its longest message; "
                    f"those of this round have at most {most}"
                )
        longest = max(longest for _, longest in headers)
        messages = rows[:, HEADER:]
        if longest > oldest.capacity:
            rows = numpy.zeros((len(oldest.rests), longest - oldest.capacity), numpy.uint8)
            for row, rest in zip(rows, oldest.rests):
                row[: len(rest)] = numpy.frombuffer(rest, numpy.uint8)
            work, _, incoming = self._move(rows)
            messages = numpy.concatenate([messages, self._rows(work, incoming)], axis=1)
        self._longest[oldest.position].append(longest)
        return [row[:length] for row, (length, _) in zip(messages, headers)]

    def _for_all(self, message: bytes) -> list[bytes]:
        return [message] * (self.learners if self._direct else 1)

    def _start(self, messages: Sequence[bytes], position: int | None = None) -> None:
        """Starts a round with a message for each learner, or one for all."""
        if position is None:
            position, self._position = self._position, self._position + 1
        # A little more than the longest message of the last times.
        expected = max(self._longest[position], default=0)
        capacity = expected + expected // 32
        longest = max(len(message) for message in messages)
        if longest >= 2**32:
            raise ValueError("a bucket's message of 4 GiB or more; use a smaller bucket_cap_mb")
        rows = numpy.zeros((len(messages), HEADER + capacity), numpy.uint8)
        for row, message in zip(rows, messages):
            row[:HEADER].view("<u4")[:] = len(message), longest
            front = numpy.frombuffer(message, numpy.uint8)[:capacity]
            row[HEADER : HEADER + len(front)] = front
        rests = [memoryview(message)[capacity:] for message in messages]
        work, outgoing, incoming = self._move(rows)
        self._pending.append(_Round(position, capacity, rests, work, outgoing, incoming))

    def _move(self, rows: Rows) -> tuple[dist.Work, torch.Tensor, torch.Tensor]:
        """Starts to move a row to each learner, or one to all."""
        width = rows.shape[1]
        outgoing = torch.from_numpy(rows).reshape(-1)
        incoming = torch.empty(self.learners * width, dtype=torch.uint8)
        self.sent += (self.learners - 1) * width
        if len(rows) < self.learners:
            return self._group._allgather_base(incoming, outgoing), outgoing, incoming
        return self._group.alltoall_base(incoming, outgoing, [], []), outgoing, incoming

    def _rows(self, work: dist.Work, incoming: torch.Tensor) -> Rows:
        self.wait(work)
        return incoming.numpy().reshape(self.learners, -1)

    def close(self) -> None:
        """Ends the connections, so that learners that still wait for this one are told at once."""
        # Gloo's own `shutdown` does nothing: they end with the last that refers to them.
        self._pending.clear()
        self.__dict__.pop("_group", None)

    def wait(self, work: dist.Work) -> None:
        """Waits until something that was started on the group is over."""
        try:
            # A timeout for each wait, whatever the group's own is.
            done = work.wait(self.timeout)
        except RuntimeError as error:
            raise RuntimeError(f"{error} (a learner has died, hangs, or is slower than {self.timeout})") from None
        if done is False:
            raise RuntimeError(f"no answer within {self.timeout}: a learner has died, hangs, or is slower")


def longest_message(elements: Sequence[int], treatments: Sequence[int | str], learners: int) -> int:
    """Returns a length that no message of a step exceeds, whatever the buckets, strategy and codec are.

    Of each parameter a message has at most all values in float32. A selection is shorter: two bits for each element, or with the
    code of the paper two bytes. Only the sums of signs of ``reduce`` can be longer: two bits for each element of an owner's shard
    and each level of magnitude, of which there are as many as learners.
    """
    total = 0
    for count, treatment in zip(elements, treatments):
        bin = treatment if isinstance(treatment, int) else 1
        bins = -(-count // bin)
        shard = min(count, -(-bins // learners) * bin)
        # Numbers of layers and elements, lengths and scales, and for each level a count and an incomplete byte.
        total += max(4 * count, learners * shard // 4) + 6 * learners + 64
    # Headers and checksums of a frame or an envelope.
    return min(total + 64, 2**32 - 1)


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Returns how long a process group waits, which only its backend knows; PyTorch's own default where it does not say."""
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return timedelta(minutes=30)


class Worker:
    """A thread that does one job after the other, while the backward pass goes on.

    Collectives must be started in the same order on all learners, so one thread starts them all. The hook cannot do it itself:
    it must return at once, and a callback of a future must neither start nor wait for a collective. It is not an executor of
    ``concurrent.futures``, because the end of the program waits for those as long as a job takes: with a learner that has died,
    for as long as the timeout.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()
        self.is_closed = False
        _workers.add(self)
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Callable[[], object]) -> None:
        """Does the job after all that came before. It must not raise, and each of its waits must have a timeout."""
        if self.is_closed:
            raise RuntimeError("the hook was closed")
        self._jobs.put(job)

    def call(self, function: Callable[[], T]) -> T:
        """Does the same, and returns its result."""
        if threading.current_thread() is self._thread:
            # A writer of scalars asks for more of them.
            return function()
        future = Future[T]()

        def job() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.submit(job)
        return future.result()

    def close(self, seconds: float) -> bool:
        """Takes no more jobs, and ends the thread after those that it has. Returns whether it has ended in time."""
        self.is_closed = True
        self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()
_transports: weakref.WeakSet[Transport] = weakref.WeakSet()


def _serve(jobs: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        # A job holds buckets, which must not stay until the next one comes.
        del job


@atexit.register
def _close_all() -> None:
    if all([worker.close(AT_EXIT) for worker in list(_workers)]):
        # Gloo's threads, too, let go of tensors, for which they need the interpreter. They end with the connections.
        for transport in list(_transports):
            transport.close()
