"""The examples run as their first lines say, on small stand-ins for the data in the published formats."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def torchrun(processes, script, *arguments, timeout=150):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, EXAMPLES / script, *map(str, arguments)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            # It ends its learners, which are not in its group, and then itself.
            process.terminate()
            process.wait(30)
        finally:
            process.kill()
        output.seek(0)
        text = output.read()
    assert process.returncode == 0, f"{script}: {process.returncode}\n{text}"
    return text


@pytest.fixture
def mnist(tmp_path):
    """Pictures with a bright square whose place is the label."""
    generator = numpy.random.default_rng(1)
    for part, count in (("train", 2000), ("t10k", 500)):
        labels = generator.integers(0, 10, count).astype(numpy.uint8)
        images = generator.integers(0, 80, (count, 28, 28)).astype(numpy.uint8)
        for image, label in zip(images, labels):
            row, column = divmod(int(label), 4)
            image[8 * row + 2 : 8 * row + 8, 7 * column : 7 * column + 6] += 150
        header = bytes([0, 0, 8, 3]) + b"".join(size.to_bytes(4, "big") for size in images.shape)
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1]) + count.to_bytes(4, "big") + labels.tobytes())
    return tmp_path


def test_ddp_mnist(mnist, tmp_path):
    common = ["--data", mnist, "--epochs", 3, "--lr", 0.02, "--json"]
    builtin = json.loads(torchrun(2, "ddp_mnist.py", "--mode", "builtin", *common).splitlines()[-1])
    output = torchrun(2, "ddp_mnist.py", "--mode", "on", "--save", tmp_path / "saved", *common)
    assert "AdaComp is attached" in output and "compresses with gather" in output
    result = json.loads(output.splitlines()[-1])
    assert result["compression_ratio"] > 40
    # The stand-in is easy, so both learn it.
    assert builtin["test_error"] < 5 and result["test_error"] < 5
    # Goes on from what was saved, with one more epoch.
    more = torchrun(2, "ddp_mnist.py", "--mode", "on", "--save", tmp_path / "saved", *common, "--epochs", 4)
    assert "epoch 4" in more and "epoch 3" not in more


def test_lightning_cifar(tmp_path):
    generator = numpy.random.default_rng(1)
    for name in [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]:
        rows = generator.integers(0, 256, (40, 3073)).astype(numpy.uint8)
        rows[:, 0] %= 10
        (tmp_path / f"{name}.bin").write_bytes(rows.tobytes())
    common = ["--data", tmp_path, "--mode", "on", "--batch", 20, "--folder", tmp_path / "runs"]
    output = torchrun(2, "lightning_cifar.py", "--epochs", 2, *common)
    assert "test error" in output and "10 compressed" in output, output
    [checkpoint] = (tmp_path / "runs").rglob("*.ckpt")
    # On another number of learners.
    output = torchrun(1, "lightning_cifar.py", "--epochs", 3, "--resume", checkpoint, *common)
    assert "10 compressed" in output, output
