"""A thread that does one thing after the other, while the backward pass goes on.

Collectives must be started in the same order on all learners, so one thread starts them all. The hook cannot do it itself: it
must return at once, and a callback of a future must neither start nor wait for a transport.
"""

import atexit
import queue
import threading
import weakref

# How long the end of the program waits for what is under way. A thread that comes back to an interpreter that is gone ends the
# process with an abort.
AT_EXIT = 5.0

_workers = weakref.WeakSet()


class Worker:
    def __init__(self, name):
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()
        self._closed = False
        _workers.add(self)
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job):
        """Has the job done after all that came before. It must not raise, and each of its waits must have a limit."""
        if self._closed:
            raise RuntimeError("the hook was closed")
        self._jobs.put(job)

    def call(self, function):
        """The same, and waits for its result."""
        done = queue.SimpleQueue()

        def job():
            try:
                done.put((function(), None))
            except BaseException as error:
                done.put((None, error))

        self.submit(job)
        result, error = done.get()
        if error is not None:
            raise error
        return result

    def close(self, limit):
        """Takes no more jobs, and ends the thread after those that it has."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join(limit)


def _serve(jobs):
    while (job := jobs.get()) is not None:
        job()
        # A job holds buckets, which must not stay until the next one comes.
        del job


@atexit.register
def _close_all():
    for worker in list(_workers):
        worker.close(AT_EXIT)
