"""Messages between learners over a PyTorch process group.

Process groups move tensors of equal size, messages have any. So each message travels in a row with a header, of a capacity that
all learners know: it follows from the longest messages of the last times. Only if a message is longer is there a second round,
for the rest of all; headers say so to everybody. A round is thus one transport nearly always, and padding is a few percent.
"""

import uuid
from collections import defaultdict, deque
from dataclasses import dataclass
from datetime import timedelta

import numpy
import torch
import torch.distributed as dist

# The length of the message, and of the longest message of its sender.
HEADER = 8

# The position of rounds that are not of a step.
ASIDE = -1

# Times for which a longest message is remembered. Lengths go up and down from step to step, but after a change, such as new
# buckets, rows must not stay too long.
REMEMBERED = 8


@dataclass
class _Round:
    all_gather: bool
    position: int
    capacity: int
    # What is behind the capacity, for a second round.
    rests: list
    work: object
    # Kept until the work is over, because it reads and writes them.
    outgoing: torch.Tensor
    incoming: torch.Tensor


class Transport:
    """Carries bytes; used by one thread at a time. Rounds are started and finished in the same order on all learners."""

    def __init__(self, group, limit: timedelta):
        self._group, self.limit = group, limit
        self.learner, self.learners = group.rank(), group.size()
        # Bytes handed to the process group for other learners.
        self.sent = 0
        self._pending = deque()
        # The longest messages of the last times, by position of the round in the step: what is long in one bucket is long there
        # the next time, too.
        self._longest = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._position = 0

    @classmethod
    def between(cls, group, device, limit=None):
        """A transport for the learners of a process group, which all must make.

        It has a Gloo group of its own, whatever the other is, so that no order has to be kept with anybody else's collectives;
        messages are in the processor's memory anyway. It is made without ``dist.new_group``: if some processes call that and
        others do not, PyTorch gets the names of later groups wrong.
        """
        store = dist.distributed_c10d._get_default_store()
        if store is None or not dist.is_gloo_available():
            raise ValueError("learners find each other by Gloo, which this PyTorch or its process group does not have")
        limit = limit or _limit_of(group, device)
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, dist.get_global_rank(group, 0), group, device)
        store = dist.PrefixStore(f"adacomp/{name[0]}", store)
        return cls(dist.ProcessGroupGloo(store, dist.get_rank(group), dist.get_world_size(group), limit), limit)

    def start_sum(self, tensor):
        """Starts to sum a tensor over all learners, in place."""
        return self._group.allreduce([tensor])

    def forget_lengths(self):
        """Rounds will have other lengths from now on."""
        self._longest.clear()

    def begin_step(self):
        """The rounds that follow are counted from 0 again."""
        self._position = 0

    def start_all_gather(self, message):
        self._start([message], True)

    def start_all_to_all(self, messages):
        self._start(messages, False)

    def all_gather(self, message):
        """A round of its own, aside from those of a step: all learners' messages."""
        self._start([message], True, ASIDE)
        return [each.tobytes() for each in self.finish()]

    def finish(self):
        """All learners' messages of the oldest round, as arrays of bytes."""
        oldest = self._pending.popleft()
        rows = self._rows(oldest.work, oldest.incoming)
        lengths, longest = rows[:, :HEADER].copy().view("<u4").T
        longest = int(longest.max())
        fronts = rows[:, HEADER:]
        parts = [fronts]
        if longest > oldest.capacity:
            rows = numpy.zeros((len(oldest.rests), longest - oldest.capacity), numpy.uint8)
            for row, rest in zip(rows, oldest.rests):
                row[: len(rest)] = numpy.frombuffer(rest, numpy.uint8)
            work, _, incoming = self._move(rows, oldest.all_gather)
            parts.append(self._rows(work, incoming))
        self._longest[oldest.position].append(longest)
        whole = numpy.concatenate(parts, axis=1) if len(parts) > 1 else fronts
        return [row[:length] for row, length in zip(whole, lengths)]

    def _start(self, messages, all_gather, position=None):
        if position is None:
            position, self._position = self._position, self._position + 1
        capacity = _capacity(max(self._longest[position], default=0))
        longest = max(len(message) for message in messages)
        if longest >= 2**32:
            raise ValueError("a bucket's message of 4 GiB or more; use a smaller bucket_cap_mb")
        rows = numpy.zeros((len(messages), HEADER + capacity), numpy.uint8)
        for row, message in zip(rows, messages):
            row[:HEADER].view("<u4")[:] = len(message), longest
            front = numpy.frombuffer(message, numpy.uint8)[:capacity]
            row[HEADER : HEADER + len(front)] = front
        rests = [message[capacity:] for message in messages]
        work, outgoing, incoming = self._move(rows, all_gather)
        self._pending.append(_Round(all_gather, position, capacity, rests, work, outgoing, incoming))

    def _move(self, rows, all_gather):
        """Starts to move rows: one to all learners, or one to each."""
        width = rows.shape[1]
        outgoing = torch.from_numpy(rows).reshape(-1)
        incoming = torch.empty(self.learners * width, dtype=torch.uint8)
        self.sent += (self.learners - 1) * width
        if all_gather:
            return self._group._allgather_base(incoming, outgoing), outgoing, incoming
        return self._group.alltoall_base(incoming, outgoing, [], []), outgoing, incoming

    def _rows(self, work, incoming):
        self.wait(work)
        return incoming.numpy().reshape(self.learners, -1)

    def wait(self, work):
        """Until something that was started on the group is over."""
        try:
            # A limit for each wait, whatever the group's own is.
            done = work.wait(self.limit)
        except RuntimeError as error:
            raise RuntimeError(f"{error} (a learner has died, hangs, or is slower than {self.limit})") from None
        if done is False:
            raise RuntimeError(f"no answer within {self.limit}: a learner has died, hangs, or is slower")


def _capacity(longest):
    """A little more than the longest message."""
    return longest + longest // 32


def _limit_of(group, device):
    """How long a process group waits, which only its backend knows; PyTorch's own default where it does not say."""
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return timedelta(minutes=30)
