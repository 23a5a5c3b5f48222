"""The examples run as their first lines say, on small stand-ins for the data in the published formats."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy
import pytest
import torch
from endurance import digest
from learners import free_port, learners
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from training import assert_replicas, attach, residual_mean

EXAMPLES = Path(__file__).parents[1] / "examples"
QUICK_START = Path(__file__).parents[2] / "docs" / "quick-start.md"


def run_together(commands, folder=None, timeout=150, meanwhile=lambda process: None):
    """Runs commands side by side, the first with something that happens meanwhile; returns what they print."""
    # Otherwise PyTorch's learners cannot find each other after a restart.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    end = time.monotonic() + timeout
    with tempfile.TemporaryFile("w+") as output:
        where = {"cwd": folder, "env": environment, "stdout": output, "stderr": subprocess.STDOUT}
        processes = [subprocess.Popen(list(map(str, command)), **where) for command in commands]
        try:
            meanwhile(processes[0])
            for process in processes:
                process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in processes:
                # It ends its learners, which are not in its group, and then itself.
                process.terminate()
                process.wait(30)
        output.seek(0)
        text = output.read()
    assert all(process.returncode == 0 for process in processes), f"{commands}\n{text}"
    return text


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def torchrun(processes, script, *arguments, restarts=0, **options):
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", processes, "--max-restarts", restarts]
    return run_together([[*command, EXAMPLES / script, *arguments]], **options)


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    """Pictures with a bright square whose place is the label."""
    folder = tmp_path_factory.mktemp("mnist")
    generator = numpy.random.default_rng(1)
    for part, count in (("train", 2000), ("t10k", 500)):
        labels = generator.integers(0, 10, count).astype(numpy.uint8)
        images = generator.integers(0, 80, (count, 28, 28)).astype(numpy.uint8)
        for image, label in zip(images, labels):
            row, column = divmod(int(label), 4)
            image[8 * row + 2 : 8 * row + 8, 7 * column : 7 * column + 6] += 150
        header = bytes([0, 0, 8, 3]) + b"".join(size.to_bytes(4, "big") for size in images.shape)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1]) + count.to_bytes(4, "big") + labels.tobytes())
    return folder


@pytest.fixture(scope="module")
def mnist_command(mnist):
    return ["ddp_mnist.py", "--data", mnist, "--epochs", 3, "--lr", 0.02, "--json", "--save-every", 20]


@pytest.fixture(scope="module")
def undisturbed(mnist_command, tmp_path_factory):
    """Returns what a run of three learners prints, and its checkpoints."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return torchrun(3, *mnist_command, "--mode", "on", "--save", folder), folder


def test_ddp_mnist(undisturbed):
    # As in the quick start, with digits that it draws.
    builtin = json.loads(torchrun(2, "ddp_mnist.py", "--mode", "builtin", "--epochs", 1, "--json").splitlines()[-1])
    output, _ = undisturbed
    assert "AdaComp is attached" in output and "compresses with" in output
    result = json.loads(output.splitlines()[-1])
    assert result["compression_ratio"] > 40
    # The stand-in is easy, so both learn it.
    assert builtin["test_error"] < 15 and result["test_error"] < 5


def kill_after_the_first_checkpoint(folder):
    def act(process):
        end = time.monotonic() + 60
        while not list(folder.glob("step-*[0-9]")):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.01)
        first, *_ = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGKILL)

    return act


def go_on(folder, data):
    """Goes on from a checkpoint with another number of learners; returns the mean of all residuals, and trains a step."""
    import ddp_mnist
    from data import mnist

    model = DistributedDataParallel(ddp_mnist.model())
    hook, optimizer = attach(model), torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    assert ddp_mnist.load(folder, model, optimizer, hook) == 60
    mean = residual_mean(model, hook)
    images, labels = mnist(data, train=True)
    cross_entropy(model(images[:50]), labels[:50]).backward()
    optimizer.step()
    assert_replicas(model)
    return mean


def test_a_killed_learner_is_restarted_and_nothing_is_lost(mnist, mnist_command, undisturbed, tmp_path):
    kill = kill_after_the_first_checkpoint(tmp_path)
    output = torchrun(3, *mnist_command, "--mode", "on", "--save", tmp_path, restarts=1, meanwhile=kill)
    assert "goes on from step" in output
    # Only the last checkpoint is left, and nothing else.
    assert [path.name for path in tmp_path.iterdir()] == ["step-60"]
    # Weights, momentum, and each learner's residuals.
    names = ["common.pt", "learner-0.pt", "learner-1.pt", "learner-2.pt"]
    states = [[torch.load(folder / "step-60" / name) for name in names] for folder in (undisturbed[1], tmp_path)]
    assert digest(states[0]) == digest(states[1])
    # With one learner fewer.
    saved, *own = states[1]
    residuals = [{key.split("/residual.")[-1]: values for key, values in state["adacomp"].items()} for state in own]
    kept = {name: sum(state[name] for state in residuals) / 3 for name in saved["model"] if name in residuals[0]}
    flat = [kept.get(name, torch.zeros_like(values)).flatten() for name, values in saved["model"].items()]
    for mean in learners(2).run(go_on, tmp_path, mnist):
        assert mean.any()
        torch.testing.assert_close(mean, torch.cat(flat))


def test_local_steps(tmp_path):
    """A learner is killed after the first round, and all go on from there; then with one learner fewer, and with one more."""
    kill = kill_after_the_first_checkpoint(tmp_path)
    output = torchrun(3, "local_steps.py", "--rounds", 30, "--save", tmp_path, restarts=1, meanwhile=kill)
    assert "goes on from step" in output and "a round every 10 steps" in output and "31 compressed" not in output, output
    for number, rounds in ((2, 31), (3, 32)):
        output = torchrun(number, "local_steps.py", "--rounds", rounds, "--save", tmp_path)
        assert f"goes on from step {10 * (rounds - 1)} with {number} learners" in output, output
    assert float(output.split("test error ")[1].split("%")[0]) < 10, output
    # As at first, and with the exchange beside the next steps.
    output = torchrun(2, "local_steps.py", "--rounds", 6, "--delay", 5)
    assert "6 compressed" in output and "applied 5 steps later" in output, output


def test_fsdp(tmp_path):
    """Two machines of two processes, and a resume."""
    common = ["--places", 2, "--mode", "on", "--save", tmp_path]
    output = torchrun(4, "fsdp_digits.py", "--epochs", 1, *common)
    assert "60 compressed" in output, output
    output = torchrun(4, "fsdp_digits.py", "--epochs", 2, *common)
    assert "goes on after epoch 1" in output and "60 compressed" in output, output
    assert float(output.split("epoch 2: test error ")[1].split("%")[0]) < 30, output


def test_processes_of_a_machine_are_one_learner():
    output = torchrun(2, "ddp_mnist.py", "--mode", "on", "--node-size", 2, "--epochs", 1)
    assert "1 learners" in output and "60 compressed" in output, output


def save_on_a_full_disk(folder):
    """Stands in for it by a limit for files."""
    import checkpoint

    state = {"values": torch.ones(50_000)}
    checkpoint.save(folder, 1, state, state)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
    with pytest.raises((OSError, RuntimeError)):
        checkpoint.save(folder, 2, state, state)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    step, common, [own] = checkpoint.load(folder)
    assert step == 1 and torch.equal(common["values"], own["values"])


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    learners(2).run(save_on_a_full_disk, tmp_path)
    # What was half written is gone.
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def quick_starts():
    """Returns the Python scripts of docs/quick-start.md by their headings, each with the command above it."""
    sections = re.split(r"^## ", QUICK_START.read_text(), flags=re.MULTILINE)
    pattern = re.compile(r"```sh\n(torchrun .*?)\n```\n\n```python\n(.*?)```", re.DOTALL)
    found = {section.split("\n")[0]: pattern.search(section) for section in sections}
    return {name: match.groups() for name, match in found.items() if match}


def run_quick_start(name, folder, *arguments, learners=None, epochs=2):
    """Runs a script as its section says, but always compressing, and with two processes where the section has eight GPUs."""
    command, script = quick_starts()[name]
    always = re.sub(r"(attach|AdaCompCallback)\((.*?)\)(?=\s)", r'\1(\2, mode="on")', script).replace("(, ", "(")
    always = always.replace("max_epochs=2", f"max_epochs={epochs}")
    (folder / "train.py").write_text(always)
    port = str(free_port())
    for old, new in (("MACHINE-1:29500", f"127.0.0.1:{port}"), ("ADDRESS-1", "127.0.0.1"), ("29500", port), ("node 8", "node 2")):
        command = command.replace(old, new)
    words = command.split()[1:]
    if learners:
        words[words.index("--nproc-per-node") + 1] = str(learners)
    machines = int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
    here = ["--standalone"] if machines == 1 else []
    commands = [[*TORCHRUN, *here, *words, *arguments] for _ in range(machines)]
    for machine, own in enumerate(commands if "--node-rank" in words else []):
        own[own.index("--node-rank") + 1] = str(machine)
    return run_together(commands, folder)


@pytest.mark.parametrize(
    ("name", "learners", "exchanges"),
    [
        ("PyTorch DDP", 2, 200),
        ("Several GPUs a machine", 2, 200),
        ("FSDP2", 2, 200),
        ("Across sites", 2, 10),
        ("Hugging Face Trainer", 2, 200),
        ("Accelerate", 2, 200),
    ],
)
def test_quick_start(name, learners, exchanges, tmp_path):
    output = run_quick_start(name, tmp_path)
    assert f"{learners} learners" in output and f"{exchanges} compressed" in output, output
    # Before training it is 2.3 and more.
    assert float(re.search(r"^loss (.*)", output, re.MULTILINE)[1]) < 2.1, output


def test_quick_start_with_lightning_and_a_resume(tmp_path):
    output = run_quick_start("Lightning", tmp_path)
    assert "2 learners" in output and "200 compressed" in output, output
    [metrics] = tmp_path.rglob("metrics.csv")
    assert "adacomp/compression_ratio" in metrics.read_text()
    [checkpoint] = tmp_path.rglob("*.ckpt")
    # One more epoch, on another number of learners.
    output = run_quick_start("Lightning", tmp_path, checkpoint, learners=1, epochs=3)
    assert "1 learners" in output and "200 compressed" in output, output


def test_each_quick_start_is_tried():
    """Also those that are added later."""
    assert len(quick_starts()) == 7
