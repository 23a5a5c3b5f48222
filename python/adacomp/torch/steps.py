"""The three kinds of steps. All but the plain one are given bucket by bucket and then finished, on the worker's thread."""

import torch
import torch.distributed as dist


def plain(bucket, group):
    """As DDP does it without a hook: nothing is kept, so there is nothing to do but to average."""
    buffer = bucket.buffer().div_(dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class Compressed:
    """What is selected travels."""

    def __init__(self, path, transport):
        self._path, self._buckets = path, []
        # Whether any learner keeps something after the step.
        self.keeps = True
        transport.begin_step()

    def submit(self, buffer, layers):
        self._path.submit(buffer, layers)
        self._buckets.append((buffer, layers))

    def finish(self):
        """Whether the gradient was averaged. If not, no learner can use the step, and residuals keep it."""
        averaged = self._path.finish(self._buckets) is None
        if not averaged:
            _poison(buffer for buffer, _ in self._buckets)
        return averaged


class Flush:
    """Gradients travel whole, by the process group's own sum, and take along the residuals: the way from compressed to plain
    steps, on which nothing is lost."""

    def __init__(self, path, transport):
        self._path, self._collective, self._works = path, transport, []
        self.keeps = False
        transport.begin_step()
        path.lend()

    def submit(self, buffer, layers):
        good, keeps = self._path.add_residuals(buffer, layers)
        # A parameter that this learner has not used in the step, and that waits for one in which it does.
        self.keeps = self.keeps or keeps
        if not good:
            # All others learn of it, because no sum with it is finite.
            _poison([buffer])
        buffer.div_(self._collective.learners)
        self._works.append((self._collective.start_sum(buffer), buffer))

    def finish(self):
        """The same as of a compressed step."""
        for work, _ in self._works:
            self._collective.wait(work)
        # The same bits everywhere, so all learners find the same.
        arrived = all(bool(buffer.isfinite().all()) for _, buffer in self._works)
        if not arrived:
            _poison(buffer for _, buffer in self._works)
        self._path.end_elsewhere(arrived)
        self._path.take()
        # What one learner keeps, another may have sent, so they tell each other.
        told = self._collective.all_gather(bytes([self.keeps or not arrived]))
        self.keeps = any(message != b"\0" for message in told)
        return arrived


def _poison(buffers):
    """What plain DDP would give after an overflow on some learner, so that a gradient scaler skips the step and backs off."""
    for buffer in buffers:
        buffer.fill_(torch.nan)
