"""Whether compression pays: steps are timed both ways at the start and now and then after, and the faster way runs.

Nothing is predicted. A step is timed from the first bucket of one to the first bucket of the next, so all that the user's loop
does counts. All learners decide from the same numbers, those of the slowest, so all decide the same.
"""

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

# Steps at the start that count for nothing: PyTorch rebuilds its buckets after the first, and caches fill.
WARM_UP = 3
# The first step after a change counts for nothing either: it carries the residuals, or finds them empty.
CHANGE = 1
# Steps that are timed of each way.
SAMPLE = 5
# A trial of the other way ends early if its steps take this many times as long: after two steps, or after the first if that
# also takes at least LONG seconds, longer than a pause of the loop would.
HOPELESS = 2.0
HOPELESS_AT_ONCE = 5.0
LONG = 2.0
# Compression must take less than this share of the dense time to be chosen, so that noise does not choose it.
GAIN = 0.98
# The share of all time that later trials may take, and the fewest steps between them.
TRIALS = 0.01
INTERVAL = 200


class Auto:
    """Says for each step whether to compress."""

    def __init__(self, agree: Callable[[Sequence[float]], list[float]]) -> None:
        """`agree(numbers)` returns the largest of all learners for each of the numbers."""
        self._agree = agree
        self.reason = "trying both ways"
        # Whether the step that is going on compresses, and whether steps do between trials; nothing before the first decision.
        self.compressing = True
        self._chosen: bool | None = None
        self._skip = WARM_UP
        self._times: dict[bool, deque[float]] = {way: deque(maxlen=2 * SAMPLE + 1) for way in (True, False)}
        self._timed = 0
        self._until_trial = 0.0
        self._last: float | None = None
        self._last_seconds = 0.0

    def begin(self, now: float) -> bool:
        """Begins a step; returns whether to compress in it."""
        if self._last is not None:
            self._note(now - self._last)
        self._last = now
        if self._chosen is None and self.compressing:
            if self._timed >= SAMPLE:
                self._change()
        elif self.compressing != self._chosen:
            if self._trial_is_over():
                self._choose()
        else:
            self._until_trial -= 1
            if self._until_trial <= 0 and self._timed >= SAMPLE:
                self._change()
        return self.compressing

    def _note(self, seconds: float) -> None:
        self._last_seconds = seconds
        if self._skip > 0:
            self._skip -= 1
        else:
            self._times[self.compressing].append(seconds)
            self._timed += 1

    def _change(self) -> None:
        """Takes the other way, from this step on."""
        self.compressing = not self.compressing
        self._times[self.compressing].clear()
        self._skip, self._timed = CHANGE, 0

    def _medians(self) -> list[float]:
        """Returns those of a compressed and of a dense step, on the slowest learner."""
        return self._agree([median(self._times[True]), median(self._times[False])])

    def _trial_is_over(self) -> bool:
        if self._timed >= SAMPLE:
            return True
        times = self._times[self.compressing]
        if self._timed >= 2:
            return self._is_slower(HOPELESS)
        # On a slow link one step may take minutes. It counts only if it is the last.
        times.append(self._last_seconds)
        over = self._is_slower(HOPELESS_AT_ONCE, LONG)
        if not over:
            times.pop()
        return over

    def _is_slower(self, factor: float, seconds: float = 0.0) -> bool:
        compressed, dense = self._medians()
        tried, other = (compressed, dense) if self.compressing else (dense, compressed)
        return tried > max(factor * other, seconds)

    def _choose(self) -> None:
        compressed, dense = self._medians()
        # What runs already need not be better, only not worse.
        pays = compressed < dense * (1.0 if self._chosen else GAIN)
        self.reason = (
            f"a compressed step takes {1000 * compressed:.3g} ms and a dense one {1000 * dense:.3g} ms on the slowest learner"
        )
        chosen, other = (compressed, dense) if pays else (dense, compressed)
        self._until_trial = max(INTERVAL, (CHANGE + SAMPLE) * other / (TRIALS * chosen))
        self._chosen = pays
        if self.compressing != pays:
            self._change()
        else:
            self._timed = 0
