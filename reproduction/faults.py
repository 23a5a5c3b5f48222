"""Faults of network and clock: training goes on with the same bits, or ends with a message.

Three machines with a learner each, once with the PyTorch hook over Gloo, once with the program over MPI. The program, with MPI,
and the Python package must have been built. Machines are network namespaces. Packets are lost by nft, because the kernel may lack
netem; `clock.c` sets learners' time of day.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import adacomp.torch
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from reproduction import ROOT
from reproduction.clusters import AGENT
from reproduction.machines import INTERFACE, machines, name, on

WORK = ROOT / "target" / "faults"
MACHINES = 3
# The one whose link fails.
VICTIM = 2
AWAY, LONG, SHORT = 5.0, 60, 5
STEPS = 30
# Whatever happens, nothing takes longer than this, in seconds.
LIMIT = 180.0


# Returns the commands to start, and their environment, for a timeout.
Trainer = Callable[[int], tuple[list[list[str]], dict[str, str]]]


@dataclass
class Outcome:
    """What became of a training."""

    codes: list[int]
    # Of each process.
    texts: list[str]
    # From the fault to the end of the last process.
    seconds: float


def learner(timeout: float) -> None:
    """Trains a small model on data that follow from the step; prints a line for each step, then a checksum of the weights."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(200, 400), torch.nn.ReLU(), torch.nn.Linear(400, 10))
    ddp = DistributedDataParallel(model)
    adacomp.torch.attach(ddp, mode="on", timeout=timeout)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        images, labels = torch.randn(8, 200, generator=generator), torch.randint(0, 10, (8,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(ddp(images), labels).backward()
        optimizer.step()
        print("step", step, flush=True)
        time.sleep(0.1)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    print("weights checksum:", hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16], flush=True)


def hook(timeout: int) -> tuple[list[list[str]], dict[str, str]]:
    """Returns the commands of learners with the hook, and their environment."""
    script = "from reproduction.faults import learner; learner({})"
    environment = {"MASTER_ADDR": name(0), "MASTER_PORT": "29500", "WORLD_SIZE": str(MACHINES), "GLOO_SOCKET_IFNAME": INTERFACE}
    commands = []
    for machine in range(MACHINES):
        python = ["env", f"RANK={machine}", sys.executable, "-c", script.format(timeout)]
        commands.append(on(machine, python))
    return commands, environment


def program(timeout: int) -> tuple[list[list[str]], dict[str, str]]:
    """Returns the one command that starts the program on all machines, and its environment."""
    hosts, agent, out = WORK / "hosts", WORK / "agent", WORK / "run"
    hosts.write_text("".join(f"{name(machine)} slots=1\n" for machine in range(MACHINES)))
    agent.write_text(AGENT)
    agent.chmod(0o755)
    shutil.rmtree(out, ignore_errors=True)
    train = f"train digits --transport mpi --steps 60 --minibatch 60 --json=steps --timeout {timeout} --out {out}"
    mpi = f"-n {MACHINES} --hostfile {hosts} --map-by node --mca btl_tcp_if_include {INTERFACE}"
    command = ["mpirun", *mpi.split(), str(ROOT / "target" / "release" / "adacomp"), *train.split()]
    environment = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_plm_rsh_agent": str(agent),
        "OMPI_MCA_oob_tcp_if_include": INTERFACE,
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    return [on(0, command)], environment


def jump() -> None:
    """Sets the time of day of all learners that are started with `CLOCK` two hours ahead, then two hours back."""
    OFFSET.write_text("7200")
    time.sleep(1)
    OFFSET.write_text("-7200")


OFFSET = WORK / "offset"
CLOCK = {"LD_PRELOAD": str(WORK / "clock.so"), "CLOCK_OFFSET": str(OFFSET)}


def link(state: str) -> None:
    """Takes away the victim's link, or gives it back."""
    subprocess.run(["ip", "-n", "switch", "link", "set", f"port{VICTIM}", state], check=True)


def away_for_a_while() -> None:
    link("down")
    time.sleep(AWAY)
    link("up")


def away() -> None:
    link("down")


def lose(percent: int) -> Callable[[], None]:
    """Returns what makes the victim lose packets in both directions."""

    def act() -> None:
        nft = ["ip", "netns", "exec", name(VICTIM), "nft"]
        subprocess.run([*nft, "add table ip faults"], check=True)
        for direction in ("input", "output"):
            subprocess.run([*nft, f"add chain ip faults {direction} {{ type filter hook {direction} priority 0; }}"], check=True)
            rule = f"add rule ip faults {direction} numgen random mod 100 < {percent} drop"
            subprocess.run([*nft, rule], check=True)

    return act


def train(trainer: Trainer, timeout: int, fault: Callable[[], None]) -> Outcome:
    """Trains, with a fault after some steps."""
    OFFSET.write_text("0")
    with machines(MACHINES):
        commands, environment = trainer(timeout)
        if fault is jump:
            environment |= CLOCK
        outputs = [WORK / f"output-{number}" for number in range(len(commands))]
        processes = []
        try:
            for command, output in zip(commands, outputs):
                with output.open("w") as file:
                    processes.append(
                        subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stdout=file, stderr=file)
                    )
            wait_until(lambda: outputs[0].read_text().count("step") > 8)
            start = time.monotonic()
            fault()
            if fault is away:
                # Until all have said so that can: mpirun itself waits for the machine that is gone.
                wait_until(lambda: are_told([output.read_text() for output in outputs]))
            codes = [] if fault is away else [process.wait(LIMIT) for process in processes]
            return Outcome(codes, [output.read_text() for output in outputs], time.monotonic() - start)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def wait_until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not reached():
        if time.monotonic() > end:
            raise RuntimeError(f"nothing within {LIMIT:.0f} s; see {WORK}")
        time.sleep(0.02)


def messages(text: str) -> list[str]:
    """Returns what processes say of their end."""
    return re.findall(r"^.*?((?:RuntimeError|error): .*)", text, re.MULTILINE)


def are_told(texts: list[str]) -> bool:
    """Tells whether each process, or at least all but the victim's, has said why it ends."""
    return all(map(messages, texts)) and sum(len(messages(text)) for text in texts) >= MACHINES - 1


def checksums(outcome: Outcome) -> set[str]:
    found = [re.findall(r"weights checksum: (\w+)", text) for text in outcome.texts]
    if any(outcome.codes) or not all(found):
        raise RuntimeError(f"training ended with {outcome.codes}:\n" + "\n".join(text[-2000:] for text in outcome.texts))
    return {checksum for each in found for checksum in each}


def check() -> None:
    """Tries all faults. Inside of namespaces."""
    WORK.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", WORK / "clock.so", ROOT / "reproduction" / "clock.c"], check=True)
    for trainer in (hook, program):
        undisturbed = train(trainer, LONG, lambda: None)
        expected = checksums(undisturbed)
        if len(expected) != 1:
            raise RuntimeError(f"learners disagree: {expected}")
        print(f"faults, {trainer.__name__}: undisturbed {undisturbed.seconds:.1f} s", flush=True)
        faults = {
            f"a link away for {AWAY:.0f} s": away_for_a_while,
            "5% of packets lost": lose(5),
            "20% of packets lost": lose(20),
            "the time of day 2 h ahead, then 2 h back": jump,
        }
        for text, fault in faults.items():
            outcome = train(trainer, LONG, fault)
            if checksums(outcome) != expected:
                raise RuntimeError(f"{text}: the weights are others")
            print(f"faults, {trainer.__name__}: {text}: {outcome.seconds:.1f} s, the same weights", flush=True)
        outcome = train(trainer, SHORT, away)
        if outcome.seconds > SHORT + 20:
            raise RuntimeError(f"a link away for good: learners were told after {outcome.seconds:.1f} s only")
        print(f"faults, {trainer.__name__}: a link away for good: all told after {outcome.seconds:.1f} s:", flush=True)
        print("  " + messages(outcome.texts[0])[-1], flush=True)
