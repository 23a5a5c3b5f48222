"""Faults of network, clock and machines: training goes on with the same bits, or ends with a message.

Three machines with a learner each, once with the PyTorch hook over Gloo, once with the program over MPI; and two machines whose
agents of torchrun go on when one is gone. The program, with MPI, and the Python package must have been built. Machines are
network namespaces. Packets are lost by nft, because the kernel may lack netem; `clock.c` sets learners' time of day.
"""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import adacomp.torch
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from reproduction import ROOT
from reproduction.clusters import AGENT, stand_in_mnist
from reproduction.machines import INTERFACE, machines, name, on

WORK = ROOT / "target" / "faults"
PROGRAM = ROOT / "target" / "release" / "adacomp"
MACHINES = 3
# The one that fails, or its link.
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
    # From the fault to the end of the last process, or until all have said why they end.
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
    command = ["mpirun", *mpi.split(), str(PROGRAM), *train.split()]
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


def send(machine: int, number: signal.Signals) -> None:
    """Sends a signal to the learners on a machine, and to torchrun's agent."""
    programs = [PROGRAM.resolve(), Path(sys.executable).resolve()]
    pids = subprocess.run(["ip", "netns", "pids", name(machine)], check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/exe").resolve() in programs:
                os.kill(int(pid), number)
        except ProcessLookupError:
            pass


def stopped_for_a_while() -> None:
    send(VICTIM, signal.SIGSTOP)
    time.sleep(AWAY)
    send(VICTIM, signal.SIGCONT)


def stopped() -> None:
    send(VICTIM, signal.SIGSTOP)


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
            told = None
            if fault in (away, stopped):
                # Who is stopped can say nothing.
                awaited = outputs[:VICTIM] if fault is stopped else outputs
                wait_until(lambda: are_told([output.read_text() for output in awaited]))
                told = time.monotonic()
            if fault is stopped:
                send(VICTIM, signal.SIGCONT)
            # mpirun waits for a machine that is gone.
            codes = [] if fault is away else [process.wait(LIMIT) for process in processes]
            return Outcome(codes, [output.read_text() for output in outputs], (told or time.monotonic()) - start)
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
            f"a learner stopped for {AWAY:.0f} s": stopped_for_a_while,
            "5% of packets lost": lose(5),
            "20% of packets lost": lose(20),
            "the time of day 2 h ahead, then 2 h back": jump,
        }
        for text, fault in faults.items():
            outcome = train(trainer, LONG, fault)
            if checksums(outcome) != expected:
                raise RuntimeError(f"{text}: the weights are others")
            print(f"faults, {trainer.__name__}: {text}: {outcome.seconds:.1f} s, the same weights", flush=True)
        for text, fault in {"a link away for good": away, "a learner stopped for longer than the timeout": stopped}.items():
            outcome = train(trainer, SHORT, fault)
            if outcome.seconds > SHORT + 20 or (fault is stopped and not all(outcome.codes)):
                raise RuntimeError(f"{text}: learners were told after {outcome.seconds:.1f} s, and ended with {outcome.codes}")
            print(f"faults, {trainer.__name__}: {text}: all told after {outcome.seconds:.1f} s:", flush=True)
            print("  " + messages(outcome.texts[0])[-1], flush=True)
    elastic()


def elastic() -> None:
    """Trains under torchrun on one or two machines: the second dies, with its agent and its learner, and comes back."""
    folder = WORK / "elastic"
    shutil.rmtree(folder, ignore_errors=True)
    stand_in_mnist(folder / "mnist")
    # The agents wait for others for so long before they begin with fewer.
    torchrun = "--nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-conf last_call_timeout=5"
    script = (
        f"{ROOT}/python/examples/ddp_mnist.py --mode on --epochs 120 --save-every 20 --data {folder}/mnist --save {folder}/run"
    )
    rendezvous = f"--rdzv-id faults --rdzv-endpoint {name(0)}:29400"
    command = [sys.executable, "-m", "torch.distributed.run", *f"{torchrun} {rendezvous} {script}".split()]
    environment = {"GLOO_SOCKET_IFNAME": INTERFACE, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    outputs = [folder / f"output-{number}" for number in range(3)]
    agents: list[subprocess.Popen[bytes]] = []

    def start(machine: int) -> None:
        with outputs[len(agents)].open("w") as file:
            environment_of_all = {**os.environ, **environment}
            agents.append(subprocess.Popen(on(machine, command), cwd=ROOT, env=environment_of_all, stdout=file, stderr=file))

    def goes_on(learners: int) -> bool:
        # Learner 0 may be on either machine.
        return any(f" with {learners} learners" in output.read_text() for output in outputs if output.exists())

    with machines(2):
        try:
            start(0)
            start(1)
            wait_until(lambda: (folder / "run" / "step-20").exists())
            send(1, signal.SIGKILL)
            dead = time.monotonic()
            wait_until(lambda: goes_on(1))
            alone = time.monotonic()
            start(1)
            wait_until(lambda: goes_on(2))
            together = time.monotonic()
            codes = [agents[number].wait(LIMIT) for number in (0, 2)]
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
    [last] = (folder / "run").iterdir()
    saved = sorted(path.name for path in last.glob("learner-*"))
    if any(codes) or (last.name, len(saved)) != ("step-1200", 2):
        raise RuntimeError(f"torchrun ended with {codes}, and {last} has {saved}; see {folder}")
    print(f"faults, torchrun: one learner goes on {alone - dead:.1f} s after the other machine died,", end=" ")
    print(f"two {together - alone:.1f} s after it is back", flush=True)
