"""Whether compression pays: steps are timed both ways at the start and now and then after, and the faster way runs.

Nothing is predicted. A step is timed from the first bucket of one to the first bucket of the next, so all that the user's loop
does counts. All learners decide from the same numbers, the slowest one's time of each step, so all decide the same.

A trial runs both ways in turns of a few steps, so that whatever else happens on the machine meets both alike. It ends when a
rank-sum test (Mann and Whitney) finds one way faster. If it finds none after some turns, all stays as it is, and what was timed
counts in the next trial, too.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import sqrt
from statistics import median

# Steps at the start that count for nothing: PyTorch rebuilds its buckets after the first, and caches fill.
WARM_UP = 3
# The first step after a change counts for nothing either: it carries the residuals, or finds them empty.
CHANGE = 1
# Steps of a turn that are timed, the fewest turns of each way that a decision needs, and the most of a trial.
TURN = 3
FEWEST, MOST = 2, 8
# How sure the test must be: in standard deviations of what it would find if both ways took the same time.
SURE = 2.5
# The last steps of each way that count.
REMEMBERED = 96
# A trial ends early if the way that is tried takes this many times as long: after two steps, or after the first if that also
# takes at least LONG seconds, longer than a pause of the loop would.
HOPELESS = 3.0
HOPELESS_AT_ONCE = 5.0
LONG = 2.0
# Compression must take less than this share of the dense time to be chosen.
GAIN = 0.98
# The share of all time that the second trial may cost. Each trial that changes nothing halves it, down to that of all later
# ones. A trial is taken to cost the time of at least LEAST steps.
EARLY, LATE = 0.05, 0.01
LEAST = 5


class Auto:
    """Says for each step whether to compress."""

    def __init__(self, agree: Callable[[Sequence[float]], list[float]]) -> None:
        """`agree(numbers)` returns the largest of all learners for each of the numbers."""
        self._agree = agree
        self.reason = "trying both ways"
        # Whether the step that is going on compresses, and whether steps do between trials; nothing before the first decision.
        self.compressing = True
        self._chosen: bool | None = None
        # In a trial: the way that it began with, and how many turns of the other way have ended.
        self._trial: bool | None = True
        self._turns = 0
        # Seconds of steps in trials, by way, and of the last steps between trials, which become the next one's first turn.
        self._times: dict[bool, deque[float]] = {way: deque(maxlen=REMEMBERED) for way in (True, False)}
        self._recent: deque[float] = deque(maxlen=TURN)
        self._skip = WARM_UP
        # Steps timed since the last change.
        self._timed = 0
        self._share = EARLY
        self._until_trial = 0.0
        self._last: float | None = None
        self._last_seconds = 0.0

    def begin(self, now: float) -> bool:
        """Begins a step; returns whether to compress in it."""
        if self._last is not None:
            self._note(now - self._last)
        self._last = now
        if self._trial is None:
            self._until_trial -= 1
            if self._until_trial <= 0 and len(self._recent) == TURN:
                self._begin_trial()
        elif self.compressing == self._trial:
            if self._timed >= TURN:
                self._change()
        elif self._is_hopeless():
            self._choose(not self.compressing)
        elif self._timed >= TURN:
            self._turns += 1
            pays = self._verdict() if self._turns >= FEWEST else None
            if pays is None and self._turns < MOST:
                self._change()
            else:
                self._choose(pays)
        return self.compressing

    def _note(self, seconds: float) -> None:
        self._last_seconds = seconds
        if self._skip > 0:
            self._skip -= 1
            return
        self._timed += 1
        (self._recent if self._trial is None else self._times[self.compressing]).append(seconds)

    def _change(self) -> None:
        """Takes the other way, from this step on."""
        self.compressing = not self.compressing
        self._skip, self._timed = CHANGE, 0

    def _begin_trial(self) -> None:
        self._trial, self._turns = self.compressing, 0
        self._times[self.compressing].extend(self._recent)
        self._recent.clear()
        self._change()

    def _agreed(self) -> tuple[list[float], list[float]]:
        """Returns the times of compressed and of dense steps, on the slowest learner."""
        compressed = len(self._times[True])
        agreed = self._agree([*self._times[True], *self._times[False]])
        return agreed[:compressed], agreed[compressed:]

    def _is_hopeless(self) -> bool:
        """Returns whether the way that is tried takes several times as long, from its first steps."""
        if self._turns or self._timed == 1:
            return False
        if self._timed:
            return self._is_slower(HOPELESS)
        # On a slow link one step may take minutes. It counts only if it is the last.
        tried = self._times[self.compressing]
        tried.append(self._last_seconds)
        hopeless = self._is_slower(HOPELESS_AT_ONCE, LONG)
        if not hopeless:
            tried.pop()
        return hopeless

    def _is_slower(self, factor: float, least: float = 0.0) -> bool:
        compressed, dense = map(median, self._agreed())
        tried, other = (compressed, dense) if self.compressing else (dense, compressed)
        return tried > max(factor * other, least)

    def _verdict(self) -> bool | None:
        """Returns whether compression pays, or nothing if that is not sure."""
        compressed, dense = self._agreed()
        if is_faster(dense, compressed):
            return False
        # What runs already need not be better, only not worse.
        gain = 1.0 if self._chosen else GAIN
        return is_faster(compressed, [gain * seconds for seconds in dense]) or None

    def _choose(self, pays: bool | None) -> None:
        """Ends a trial that found whether compression pays, or no difference."""
        compressed, dense = map(median, self._agreed())
        found = "" if pays is not None else "no clear difference: "
        self.reason = (
            f"{found}a compressed step takes {1000 * compressed:.3g} ms and a dense one {1000 * dense:.3g} ms "
            "on the slowest learner"
        )
        if pays is None:
            pays = bool(self._chosen)
        else:
            self._times[True].clear()
            self._times[False].clear()
        self._share = max(LATE, self._share / 2) if pays == self._chosen else EARLY
        chosen, other = (compressed, dense) if pays else (dense, compressed)
        cost = max(self._turns, 1) * (CHANGE + TURN) * (other / chosen - 1)
        self._until_trial = max(cost, LEAST) / self._share
        self._chosen, self._trial = pays, None
        if self.compressing != pays:
            self._change()


def is_faster(some: Sequence[float], others: Sequence[float]) -> bool:
    """Returns whether some steps are faster than others, by the rank-sum test."""
    pairs = len(some) * len(others)
    wins = sum((one < other) + (one == other) / 2 for one in some for other in others)
    deviation = sqrt(pairs * (len(some) + len(others) + 1) / 12)
    return wins - pairs / 2 > SURE * deviation
