"""Proof that it is on."""

import logging
import time

import pytest
import torch
import torch.distributed as dist
from learners import on_learners
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from training import STRATEGIES, Net, assert_replicas, attach, logged, make, submit, train


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@STRATEGIES
@on_learners(2, 4)
def test_stats_log_and_description(strategy, dtype, tmp_path):
    handlers = logging.getLogger("adacomp").handlers[:]
    model = make(lambda: Net().to(dtype))
    with logged() as lines:
        hook = attach(model, strategy=strategy, names={"fc2.*": "dense", "fc1.weight": 100})
    assert logging.getLogger("adacomp").handlers == handlers, "a library must not install handlers"
    assert len(lines) == (1 if dist.get_rank() == 0 else 0)
    learners = dist.get_world_size()
    assert all("AdaComp is attached: mode on" in line and f"{learners} learners" in line for line in lines)
    writer = SummaryWriter(tmp_path / f"{dist.get_rank()} of {learners}")
    hook.log_to(writer, every=5)
    sent = [0]
    transport = hook._runtime.transport
    move = transport._move

    def count(rows):
        sent[0] += rows.nbytes // len(rows) * (transport.learners - 1)
        return move(rows)

    transport._move = count
    submit(model, 10, dtype=dtype)
    writer.close()

    stats, text = hook.stats(), str(hook)
    assert stats["steps"] == {"compressed": 10, "dense": 0, "dropped": 0}
    assert stats["mode"] == "on" and stats["compressing"] and stats["why"] == 'mode="on"'
    assert stats["bytes_sent"] == sent[0]
    layers = stats["layers"]
    elements = sum(layer["elements"] for layer in layers.values())
    # What a ring sends of DDP's own buckets.
    ring = 2 * (learners - 1) / learners * sum(p.numel() * p.element_size() for p in model.parameters())
    assert stats["compression_ratio"] == pytest.approx(10 * ring / sent[0])
    # What the same exchange sends with dense frames of float32.
    copies = learners - 1 if strategy == "gather" else 2 * (learners - 1) / learners
    assert stats["frame_ratio"] == pytest.approx(10 * 4 * elements * copies / sent[0])
    assert f"compresses with {strategy}" in text and "bins of 100: 1 parameters" in text
    assert f"compression ratio {stats['compression_ratio']:.1f}: {sent[0]:,} bytes" in text
    assert layers["fc1.weight"]["treatment"] == 100 and layers["fc2.weight"]["treatment"] == "dense"
    assert layers["conv2.weight"]["treatment"] == 50 and layers["conv1.weight"]["treatment"] == "dense"
    assert 0 < layers["fc1.weight"]["selected"] < 120 * 512
    assert layers["fc1.weight"]["frame_ratio"] > 5
    last = stats["last"]
    # What is not in the layers is headers and padding.
    assert sum(layer["bytes"] for layer in layers.values()) <= last["bytes_sent"]
    assert last["compression_ratio"] == pytest.approx(ring / last["bytes_sent"])
    assert set(last["seconds"]) == {"compress", "encode", "wait", "decode"} and last["seconds"]["compress"] > 0
    assert 0 < last["held_up"] < 1

    events = EventAccumulator(str(tmp_path / f"{dist.get_rank()} of {learners}"))
    events.Reload()
    scalars = {f"adacomp/{name}" for name in ("compression_ratio", "frame_ratio", "bytes_sent", "compressing", "dropped_steps")}
    assert scalars <= set(events.Tags()["scalars"])
    written = events.Scalars("adacomp/compression_ratio")
    assert [event.step for event in written] == [5, 10]
    assert written[-1].value == pytest.approx(last["compression_ratio"])


class Broken:
    def add_scalar(self, *_):
        raise ValueError("I/O operation on closed file")


@on_learners(2)
def test_a_writer_that_fails_does_not_end_training():
    model = make()
    hook = attach(model)
    hook.log_to(Broken(), every=1)
    train(model, 3)
    assert_replicas(model)
    assert hook.stats()["steps"]["compressed"] == 3


class Curious:
    """A writer that asks for more than it is given."""

    def __init__(self, hook):
        self.hook, self.found = hook, []

    def log(self, numbers, step):
        self.found.append((self.hook.stats()["steps"]["compressed"], len(self.hook.state_dict())))


@on_learners(2)
def test_a_writer_may_ask_the_hook():
    model = make()
    hook = attach(model)
    writer = Curious(hook)
    hook.log_to(writer, every=1)
    train(model, 2)
    assert [steps for steps, _ in writer.found] == [1, 2] and writer.found[0][1] > 1


@on_learners(2)
def test_scalars_are_logged_every_step_or_less_often():
    model = make()
    hook = attach(model)
    for every in (0, -1, 0.5, True, None):
        with pytest.raises(ValueError, match=f"every {every}; expected a number of steps"):
            hook.log_to(Broken(), every=every)
    train(model, 2)
    assert_replicas(model)


@on_learners(2)
def test_dense_steps_are_logged_too():
    model = make()
    hook = attach(model, mode="off")
    writer, scalars = Broken(), []
    writer.add_scalar = lambda *scalar: scalars.append(scalar)
    hook.log_to(writer, every=2)
    train(model, 6)
    with pytest.raises(TypeError, match="object has neither add_scalar, nor"):
        hook.log_to(object())
    assert [step for name, _, step in scalars if name == "adacomp/compressing"] == [2, 4, 6]


@on_learners(2)
def test_layers_are_those_of_the_last_compressed_step():
    model = make()
    hook = attach(model)
    train(model, 3)
    before = hook.stats()["layers"]
    hook.mode = "off"
    train(model, 2)
    assert before == hook.stats()["layers"]


class WandbRun:
    """With the signature of ``wandb.Run.log``."""

    def __init__(self):
        self.lines = []

    def log(self, data, step=None, commit=None):
        self.lines.append((step, data))


class MlflowClient:
    """With the signature of ``mlflow.log_metrics``, and a ``log`` that is something else."""

    def __init__(self):
        self.lines = []

    def log_metrics(self, metrics, step=None, synchronous=None):
        self.lines.append((step, metrics))

    def log(self, name, value):
        raise AssertionError("that is for one value")


@pytest.mark.parametrize("writer", [WandbRun, MlflowClient, "lightning", "accelerate"])
@on_learners(2)
def test_scalars_go_to_other_loggers(writer, tmp_path):
    model = make()
    hook = attach(model)
    if writer == "lightning":
        from lightning.pytorch.loggers import CSVLogger

        own = CSVLogger(tmp_path)
    elif writer == "accelerate":
        from accelerate import Accelerator

        own = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
        own.init_trackers("run")
    else:
        own = writer()
    hook.log_to(own, every=2)
    with logged() as lines:
        train(model, 5)
    assert not lines and hook._runtime.writer is not None, lines
    if writer == "lightning":
        own.save()
        if dist.get_rank() == 0:
            [rows] = tmp_path.rglob("metrics.csv")
            assert "adacomp/compression_ratio" in rows.read_text() and len(rows.read_text().splitlines()) == 3
    elif writer == "accelerate":
        for tracker in own.trackers:
            tracker.finish()
        if dist.get_rank() == 0:
            assert any(tmp_path.rglob("events*"))
    else:
        assert [step for step, _ in own.lines] == [2, 4]
        assert own.lines[-1][1]["adacomp/compression_ratio"] > 5
        assert own.lines[-1][1]["adacomp/seconds/held_up"] > 0


@on_learners(1)
def test_stats_take_little_time():
    """Below a millisecond for 1,000 parameters, and in proportion to their number."""
    seconds = []
    for count in (500, 1000, 2000):
        model = make(lambda count=count: Many(count), bucket_cap_mb=25)
        hook = attach(model)
        model(torch.ones(())).backward()
        times = []
        for _ in range(20):
            start = time.perf_counter()
            stats = hook.stats()
            times.append(time.perf_counter() - start)
        assert len(stats["layers"]) == count
        seconds.append(min(times))
    assert seconds[1] < 0.001 and seconds[2] < 8 * seconds[0], seconds


class Many(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(30, 40)) for _ in range(count)])

    def forward(self, x):
        return sum((part * x).sum() for part in self.parts)
