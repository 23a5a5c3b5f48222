"""Proof that it is on."""

import logging

import torch.distributed as dist
from training import assert_replicas, attach, make, train


def told(strategy, folder):
    from torch.utils.tensorboard import SummaryWriter

    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("adacomp")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    model = make()
    hook = attach(model, strategy=strategy, names={"fc2.*": "dense", "fc1.weight": 100})
    logger.removeHandler(handler)
    writer = SummaryWriter(f"{folder}/{dist.get_rank()}")
    hook.log_to(writer, every=5)
    sent = [0]
    transport = hook._engine.transport
    move = transport._move

    def count(rows, all_gather):
        sent[0] += rows.nbytes // len(rows) * (transport.learners - 1)
        return move(rows, all_gather)

    transport._move = count
    train(model, 10)
    writer.close()
    return [record.getMessage() for record in records], str(hook), hook.stats(), sent[0]


def test_stats_log_and_description(learners, tmp_path):
    for strategy in ("gather", "reduce", "sharded"):
        results = learners(2).run(told, strategy, str(tmp_path / strategy))
        for learner, (lines, text, stats, sent) in enumerate(results):
            assert len(lines) == (1 if learner == 0 else 0)
            assert all("AdaComp is attached: mode on" in line and "2 learners" in line for line in lines)
            assert f"compresses with {strategy}" in text and "bins of 100: 1 parameters" in text
            assert stats["steps"] == {"compressed": 10, "dense": 0, "dropped": 0}
            assert stats["mode"] == "on" and stats["compressing"] and stats["why"] == 'mode="on"'
            assert stats["bytes_sent"] == sent
            elements = sum(layer["elements"] for layer in stats["layers"].values())
            assert abs(stats["rate"] - 10 * 4 * elements / sent) < 1e-9 * stats["rate"] + 0.1
            layers = stats["layers"]
            assert layers["fc1.weight"]["treatment"] == 100 and layers["fc2.weight"]["treatment"] == "dense"
            assert layers["conv2.weight"]["treatment"] == 50 and layers["conv1.weight"]["treatment"] == "dense"
            assert 0 < layers["fc1.weight"]["selected"] < 120 * 512
            assert layers["fc1.weight"]["rate"] > 5
            # What is not in the layers is headers and padding.
            assert sum(layer["bytes"] for layer in layers.values()) <= stats["last"]["bytes_sent"]
            assert set(stats["last"]["seconds"]) == {"compress", "encode", "wait", "decode"}
            assert stats["last"]["seconds"]["compress"] > 0


def test_tensorboard(learners, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    learners(2).run(told, "gather", str(tmp_path))
    events = EventAccumulator(str(tmp_path / "0"))
    events.Reload()
    assert {"adacomp/rate", "adacomp/bytes_sent", "adacomp/compressing"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("adacomp/rate")] == [5, 10]


class Broken:
    def add_scalar(self, *_):
        raise ValueError("I/O operation on closed file")


def broken_writer():
    model = make()
    hook = attach(model)
    hook.log_to(Broken(), every=1)
    train(model, 3)
    assert_replicas(model)
    return hook.stats()["steps"]["compressed"]


def test_a_writer_that_fails_does_not_end_training(learners):
    assert learners(2).run(broken_writer) == [3, 3]


def dense_logs():
    model = make()
    hook = attach(model, mode="off")
    writer, scalars = Broken(), []
    writer.add_scalar = lambda *scalar: scalars.append(scalar)
    hook.log_to(writer, every=2)
    train(model, 6)
    return [step for name, _, step in scalars if name == "adacomp/compressing"]


def test_dense_steps_are_logged_too(learners):
    assert learners(2).run(dense_logs) == [[2, 4, 6]] * 2


def layers_after_dense():
    model = make()
    hook = attach(model)
    train(model, 3)
    before = hook.stats()["layers"]
    hook._engine.options["mode"] = "off"
    train(model, 2)
    return before == hook.stats()["layers"]


def test_layers_are_those_of_the_last_compressed_step(learners):
    assert all(learners(2).run(layers_after_dense))
