"""Tries `docs/clusters.md`, and the two sites of `docs/sites.md`, as far as one machine can: two machines, each a network
namespace, do what these say.

The program, with MPI, and the Python package must have been built.
"""

import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import yaml

from reproduction import ROOT
from reproduction.machines import INTERFACE, address, machines, on, run_together

DOCUMENT = ROOT / "docs" / "clusters.md"
SITES = ROOT / "docs" / "sites.md"
WORK = ROOT / "target" / "clusters"
LIMIT = 180.0

# Stands for a login on another machine: `agent MACHINE COMMAND...`.
AGENT = """#!/bin/sh
machine=$1
shift
exec ip netns exec $machine unshare --uts sh -c "hostname $machine; $*"
"""


def check() -> None:
    """Checks the form of all blocks of the document, and runs those for torchrun and mpirun. Inside of namespaces."""
    blocks: list[tuple[str, str]] = re.findall(r"^```(\w+)\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    for language, text in blocks:
        if language == "bash":
            subprocess.run(["bash", "-n", "-c", text], check=True)
        elif language == "yaml":
            check_yaml(text)

    def find(language: str, word: str) -> str:
        found = [text for own, text in blocks if own == language and word in text]
        if not found:
            raise RuntimeError(f"{DOCUMENT} has no {language} block with {word}")
        return found[0].strip().replace("MACHINE-", "machine-").replace("INTERFACE", INTERFACE)

    WORK.mkdir(parents=True, exist_ok=True)
    with machines(2):
        torchrun(find("bash", "--rdzv-endpoint MACHINE-1"))
        mpirun(find("text", "slots"), find("bash", "--hostfile hosts"))
        sites()


def check_yaml(text: str) -> None:
    job = yaml.safe_load(text)
    specs = next(value for key, value in job["spec"].items() if key.endswith("ReplicaSpecs"))
    if not all(spec["template"]["spec"]["containers"][0]["image"] for spec in specs.values()):
        raise RuntimeError(f"{DOCUMENT}: a container without an image in {job['kind']}")
    print("clusters:", job["kind"], {name: spec["replicas"] for name, spec in specs.items()})


def torchrun(block: str) -> None:
    """Runs the same command on both machines, as the document has it, with one process and few samples each."""
    stand_in_mnist(WORK / "mnist")
    block = f"{block.replace('--nproc-per-node 4', '--nproc-per-node 1')} --epochs 1 --data {WORK / 'mnist'}"
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    run_together([on(machine, ["bash", "-ec", block]) for machine in range(2)], LIMIT, [path, path])
    print("clusters: torchrun on two machines")


def sites() -> None:
    """Runs the command for two sites, with namespaces for the VPN: they know each other by addresses only."""
    [block] = re.findall(r"^```bash\nwg-quick up wg0\n(.*?)^```", SITES.read_text(), re.MULTILINE | re.DOTALL)
    for old, new in (("wg0", INTERFACE), ("10.77.0.1", address(0)), ("--every 30", "--every 10 --rounds 2")):
        if old not in block:
            raise RuntimeError(f"{SITES}: the block for two sites has no `{old}`")
        block = block.replace(old, new)
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    blocks = [block.replace("--node-rank 0", f"--node-rank {site}") for site in range(2)]
    run_together([on(site, ["bash", "-ec", own]) for site, own in enumerate(blocks)], LIMIT, [path, path])
    print("clusters: torchrun at two sites")


def stand_in_mnist(folder: Path) -> None:
    """Writes meaningless pictures in MNIST's format: what is tried is how learners find each other."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 1000), ("t10k", 100)):
        images = bytes(at % 251 for at in range(count * 28 * 28))
        (folder / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 0x803, count, 28, 28) + images)
        labels = bytes(at % 10 for at in range(count))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + labels)


def mpirun(hosts: str, block: str) -> None:
    """Runs one process a machine, started from the first."""
    host_file, agent, out = WORK / "hosts", WORK / "agent", WORK / "run"
    host_file.write_text(hosts.replace("slots=4", "slots=1") + "\n")
    agent.write_text(AGENT)
    agent.chmod(0o755)
    shutil.rmtree(out, ignore_errors=True)
    for old, new in (
        ("-n 8", "-n 2"),
        ("mnist-cnn", "digits"),
        ("--epochs 3", "--steps 20"),
        ("--hostfile hosts", f"--hostfile {host_file}"),
    ):
        if old not in block:
            raise RuntimeError(f"{DOCUMENT}: the block for mpirun has no `{old}`")
        block = block.replace(old, new)
    environment = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_plm_rsh_agent": str(agent),
        "OMPI_MCA_oob_tcp_if_include": INTERFACE,
    }
    run_together([on(0, ["bash", "-ec", f"{block} --out {out}"])], LIMIT, [environment])
    print("clusters: mpirun on two machines")
