"""The three kinds of steps, each given bucket by bucket and then finished. All but the plain one run on the worker's thread."""

import torch
import torch.distributed as dist


def plain(bucket, group):
    """As DDP does it without a hook: nothing is kept, so there is nothing to do but to average."""
    buffer = bucket.buffer().div_(dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class Compressed:
    """What is selected travels."""

    def __init__(self, path, collective):
        self._path, self._buckets = path, []
        collective.begin_step()

    def give(self, buffer, layers):
        self._path.give(buffer, layers)
        self._buckets.append((buffer, layers))

    def finish(self):
        """Whether the gradient was averaged. If not, no learner can use the step, and residuals keep it."""
        if self._path.finish(self._buckets) is None:
            return True
        _poison(buffer for buffer, _ in self._buckets)
        return False


class Everything:
    """Gradients travel whole, by the process group's own sum, and take along the residuals: the way from compressed to plain
    steps, on which nothing is lost."""

    def __init__(self, path, group):
        self._path, self._group, self._works = path, group, []
        # Parameters that no learner has used, which keep their residual.
        self.unused = set()
        path.lend()

    def give(self, buffer, layers):
        good, unused = self._path.add_residuals(buffer, layers)
        self.unused.update(unused)
        if not good:
            # All others learn of it, because no sum with it is finite.
            _poison([buffer])
        buffer.div_(dist.get_world_size(self._group))
        self._works.append((dist.all_reduce(buffer, group=self._group, async_op=True), buffer))

    def finish(self):
        for work, _ in self._works:
            work.wait()
        # The same bits everywhere, so all learners find the same.
        arrived = all(bool(buffer.isfinite().all()) for _, buffer in self._works)
        self._path.end_elsewhere(arrived)
        self._path.take()
        return arrived


def _poison(buffers):
    """What plain DDP would give after an overflow on some learner, so that a gradient scaler skips the step and backs off."""
    for buffer in buffers:
        buffer.fill_(torch.nan)
