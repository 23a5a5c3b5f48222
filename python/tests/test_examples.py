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
    # As in the quick start, with digits that it draws.
    builtin = json.loads(torchrun(2, "ddp_mnist.py", "--mode", "builtin", "--epochs", 1, "--json").splitlines()[-1])
    common = ["--data", mnist, "--epochs", 3, "--lr", 0.02, "--json"]
    output = torchrun(2, "ddp_mnist.py", "--mode", "on", "--save", tmp_path / "saved", *common)
    assert "AdaComp is attached" in output and "compresses with gather" in output
    result = json.loads(output.splitlines()[-1])
    assert result["compression_ratio"] > 40
    # The stand-in is easy, so both learn it.
    assert builtin["test_error"] < 15 and result["test_error"] < 5
    # Goes on from what was saved, with one more epoch.
    more = torchrun(2, "ddp_mnist.py", "--mode", "on", "--save", tmp_path / "saved", *common, "--epochs", 4)
    assert "epoch 4" in more and "epoch 3" not in more


def test_lightning(tmp_path):
    common = ["--mode", "on", "--folder", tmp_path]
    output = torchrun(2, "lightning_digits.py", "--epochs", 1, *common)
    assert "test error" in output and "60 compressed" in output, output
    [metrics] = tmp_path.rglob("metrics.csv")
    assert "adacomp/compression_ratio" in metrics.read_text()
    [checkpoint] = tmp_path.rglob("*.ckpt")
    # On another number of learners.
    output = torchrun(1, "lightning_digits.py", "--epochs", 2, "--resume", checkpoint, *common)
    assert "120 compressed" in output and "1 learners" in output, output


def test_accelerate(tmp_path):
    common = ["--mode", "on", "--folder", tmp_path]
    output = torchrun(2, "accelerate_digits.py", "--epochs", 1, *common)
    assert "test error" in output and "60 compressed" in output, output
    output = torchrun(2, "accelerate_digits.py", "--epochs", 2, *common)
    assert "60 compressed" in output, output
    assert len(list(tmp_path.glob("epoch-*/custom_checkpoint_0.pkl"))) == 2


def test_trainer(tmp_path):
    output = torchrun(2, "trainer_digits.py", "--epochs", 2, "--mode", "on", "--folder", tmp_path)
    assert "test error" in output and "120 compressed" in output and "'adacomp/compression_ratio'" in output, output
    saved = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("adacomp-*"))
    assert saved == [f"checkpoint-{step}/adacomp-0000{learner}-of-00002.pt" for step in (120, 60) for learner in (0, 1)]
