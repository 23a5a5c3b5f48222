"""Where learners make sure that all of them are there, before any of them starts a collective.

A collective that some learners start and others do not hangs, or pairs with another one and ends the process. So what a user may
call on some learners only, by mistake, comes here first: each learner leaves a word in the process group's store and waits for
those of all others. If somebody does not come, it takes its word back and says who is missing. Nothing else has happened then.
"""

import hashlib
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

# How long to sleep between two looks into the store, at most.
LONGEST_SLEEP = 0.05

# How many hooks have been attached by each group of learners, for each default process group.
_attached: "weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]]" = weakref.WeakKeyDictionary()


class Rendezvous:
    """The learners of one hook."""

    def __init__(self, members: Sequence[int], timeout: timedelta) -> None:
        """Meets these processes, by their ranks, which all must be attaching."""
        store, world = dist.distributed_c10d._get_default_store(), dist.group.WORLD
        if store is None or world is None or not dist.is_gloo_available():
            raise ValueError("learners find each other by Gloo, which this PyTorch or its process group does not have")
        self.learner, self.learners, self.timeout = members.index(dist.get_rank()), len(members), timeout
        # PyTorch's own names of groups differ between processes if some have made more groups than others.
        ranks = hashlib.sha256(repr(list(members)).encode()).hexdigest()[:16]
        counts = _attached.setdefault(world, Counter())
        self.store = dist.PrefixStore(f"adacomp/{ranks}", store)
        self._number = counts[ranks]
        names = self.meet("attach AdaComp", uuid.uuid4().hex)
        counts[ranks] = self._number
        # Of this hook alone.
        self.store = dist.PrefixStore(f"adacomp/{hashlib.sha256(''.join(names).encode()).hexdigest()[:32]}", store)
        self._number = 0

    def agree(self, what: str, value: object) -> None:
        """Makes sure that all learners say the same: "all learners must `what`"."""
        for learner, other in enumerate(self.meet(what, str(value))):
            if other != str(value):
                raise RuntimeError(f"all learners must {what}: learner {learner} has {other}, this one {value}")

    def meet(self, what: str, value: str = "") -> list[str]:
        """Returns what each learner says; all must have come for the same."""
        keys = [f"meeting/{self._number}/{learner}" for learner in range(self.learners)]
        own = keys[self.learner]
        self.store.set(own, f"{what}\n{value}")
        end, sleep = time.monotonic() + self.timeout.total_seconds(), 0.0
        while not self.store.check(keys):
            if time.monotonic() > end:
                missing = [learner for learner, key in enumerate(keys) if not self.store.check([key])]
                self.store.delete_key(own)
                raise RuntimeError(f"learner {_listed(missing)} did not come within {self.timeout}: all learners must {what}")
            time.sleep(sleep)
            sleep = min(LONGEST_SLEEP, sleep + 0.001)
        words = [self.store.get(key).decode().split("\n", 1) for key in keys]
        # All have come to this meeting, so all have read the words of the one before.
        if self._number:
            self.store.delete_key(f"meeting/{self._number - 1}/{self.learner}")
        self._number += 1
        for learner, (other, _) in enumerate(words):
            if other != what:
                raise RuntimeError(f"all learners must {what}, but learner {learner} is about to {other}")
        return [value for _, value in words]


def _listed(learners: list[int]) -> str:
    """Returns numbers for an error."""
    return ", ".join(map(str, learners[:8])) + (", ..." if len(learners) > 8 else "")
