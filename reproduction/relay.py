"""A switch with a delay between machines, packet by packet, because the kernel may lack netem.

Each machine's interface is a TUN device whose file is here. What a machine sends is shaped by the machine's own queue; here it
waits for the delay, and what goes to a machine is shaped again, as by the other end of its link.
"""

import contextlib
import os
import select
import sys
import time
from collections import deque

# What would wait for a link longer than this, in seconds, is dropped, as by the kernel's queues in `machines`.
LATENCY = 0.05
# Packets that are read from a machine before the next one's.
TURN = 32


def relay(files: list[int], rate: float, delay: float) -> None:
    """Forwards IP packets for ever between machines, which have addresses 10.0.0.1, 10.0.0.2 and so on."""
    # Packets for each machine, with the times when they are due, and when its link is free again.
    waiting: list[deque[tuple[float, bytes]]] = [deque() for _ in files]
    free = [0.0] * len(files)
    while True:
        due = min((packets[0][0] for packets in waiting if packets), default=None)
        ready, _, _ = select.select(files, [], [], None if due is None else max(0.0, due - time.monotonic()))
        for file in ready:
            with contextlib.suppress(BlockingIOError):
                for _ in range(TURN):
                    packet = os.read(file, 1 << 16)
                    machine = packet[19] - 1
                    # IPv6, and what goes to nobody, is left out.
                    if packet[0] >> 4 != 4 or not 0 <= machine < len(files):
                        continue
                    now = time.monotonic()
                    if free[machine] - now < LATENCY:
                        free[machine] = max(free[machine], now) + len(packet) / rate
                        waiting[machine].append((free[machine] + delay, packet))
        now = time.monotonic()
        for file, packets in zip(files, waiting):
            while packets and packets[0][0] <= now:
                with contextlib.suppress(OSError):
                    os.write(file, packets.popleft()[1])


if __name__ == "__main__":
    # Learners keep all cores busy, and packets must not wait for them.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    rate, delay, *numbers = sys.argv[1:]
    relay([int(number) for number in numbers], float(rate), float(delay))
