"""Machines on a common switch, each a network namespace of its own.

All of it is in namespaces for network, mounts and processes that end with this program, so nothing is left behind, and nothing
but these machines can be reached.
"""

import fcntl
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from reproduction import ROOT

# Set for the program that runs inside of the namespaces.
INSIDE = "ADACOMP_INSIDE_NAMESPACES"
# Machines whose names are known.
MOST = 8
# The name of the network interface of each machine.
INTERFACE = "eth"

# What may be sent at once is some milliseconds' worth: with more, a slow link would save up for a good part of a step's messages
# while the step computes. With less than 64 kB the kernel cuts what it sends into real packets first, which takes the processor
# long at all but the lowest speed.
BURSTS = {"10mbit": "16kb", "100mbit": "68kb"}

# Of Linux: makes a network interface of a file, without a header before each packet.
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def run_inside(arguments: Sequence[str], act: Callable[[], None]) -> int:
    """Acts inside of new namespaces, where `python -m reproduction ARGUMENTS` comes here again; returns the exit status."""
    if INSIDE in os.environ:
        _set_up()
        act()
        return 0
    unshare = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [*unshare, sys.executable, "-m", "reproduction", *arguments]
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, INSIDE: "1"}).returncode
    if status:
        print("(network namespaces need root and the package iproute2)", file=sys.stderr)
    return status


def _set_up() -> None:
    """Makes the names of machines known."""
    Path("/run/netns").mkdir(parents=True, exist_ok=True)
    _run("mount -t tmpfs tmpfs /run/netns")
    hosts = ROOT / "target" / "machines"
    hosts.parent.mkdir(exist_ok=True)
    names = [f"{address(machine)} {name(machine)}\n" for machine in range(MOST)]
    hosts.write_text("".join(["127.0.0.1 localhost\n", *names]))
    _run(f"mount --bind {hosts} /etc/hosts")
    _run("ip link set lo up")


def name(machine: int) -> str:
    """Returns a machine's name, by which all machines find its address."""
    return f"machine-{machine + 1}"


def address(machine: int) -> str:
    return f"10.0.0.{machine + 1}"


@contextmanager
def machines(count: int, rate: str | None = None) -> Iterator[None]:
    """Makes machines whose links have this speed in both directions, or any; removes them at the end."""
    _run("ip netns add switch")
    _run("ip -n switch link add bridge type bridge")
    _run("ip -n switch link set bridge up")
    for machine in range(count):
        _run(f"ip netns add {name(machine)}")
        _run(f"ip link add {INTERFACE} netns {name(machine)} type veth peer name port{machine} netns switch")
        _run(f"ip -n switch link set port{machine} master bridge up")
        _run(f"ip -n {name(machine)} addr add {address(machine)}/24 dev {INTERFACE}")
        _run(f"ip -n {name(machine)} link set {INTERFACE} up")
        _run(f"ip -n {name(machine)} link set lo up")
        if rate:
            _run(f"tc -n {name(machine)} qdisc add dev {INTERFACE} {_shape(rate)}")
            _run(f"tc -n switch qdisc add dev port{machine} {_shape(rate)}")
    try:
        yield
    finally:
        # Links go with their namespaces.
        for namespace in [*map(name, range(count)), "switch"]:
            subprocess.run(["ip", "netns", "del", namespace], stderr=subprocess.DEVNULL)


@contextmanager
def far_machines(count: int, rate: str, delay: float) -> Iterator[None]:
    """Makes the same, but what a machine sends arrives this many seconds later. A relay is their switch."""
    files = [os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK) for _ in range(count)]
    switch: subprocess.Popen[bytes] | None = None
    try:
        for machine, file in enumerate(files):
            fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", f"far{machine}".encode(), IFF_TUN | IFF_NO_PI))
            _run(f"ip netns add {name(machine)}")
            _run(f"ip link set far{machine} netns {name(machine)} name {INTERFACE}")
            _run(f"ip -n {name(machine)} addr add {address(machine)}/24 dev {INTERFACE}")
            _run(f"ip -n {name(machine)} link set {INTERFACE} up")
            _run(f"ip -n {name(machine)} link set lo up")
            _run(f"tc -n {name(machine)} qdisc add dev {INTERFACE} {_shape(rate)}")
        numbers = [str(file) for file in files]
        bytes_a_second = float(rate.removesuffix("mbit")) * 1e6 / 8
        command = [sys.executable, "-m", "reproduction.relay", str(bytes_a_second), str(delay), *numbers]
        switch = subprocess.Popen(command, cwd=ROOT, pass_fds=files)
        yield
    finally:
        if switch:
            switch.kill()
            switch.wait()
        for machine, file in enumerate(files):
            os.close(file)
            subprocess.run(["ip", "netns", "del", name(machine)], stderr=subprocess.DEVNULL)


def on(machine: int, command: Sequence[str]) -> list[str]:
    """Returns the command that runs this one on a machine, under the machine's name."""
    named = 'hostname "$0" && exec "$@"'
    return ["ip", "netns", "exec", name(machine), "unshare", "--uts", "sh", "-c", named, name(machine), *command]


def run_together(
    commands: Sequence[Sequence[str]],
    limit: float,
    environments: Sequence[Mapping[str, str]],
    outputs: Sequence[IO[str] | None] = (),
) -> None:
    """Runs commands side by side until all have ended well. If one has not, or it takes too long, all are ended."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command, environment, output in zip(commands, environments, outputs or [None] * len(commands)):
            processes.append(subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stdout=output))
        end = time.monotonic() + limit
        while None in (states := [process.poll() for process in processes]) and not any(states):
            if time.monotonic() > end:
                raise RuntimeError(f"{len(processes)} processes took more than {limit:.0f} s")
            time.sleep(0.1)
        if any(states):
            raise RuntimeError(f"one of {len(processes)} processes failed: {states}")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _shape(rate: str) -> str:
    return f"root tbf rate {rate} burst {BURSTS.get(rate, '256kb')} latency 50ms"


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)
