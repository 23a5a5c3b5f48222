"""No hang, ever: what goes wrong on one learner ends the others with an error, inside the limit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from learners import free_port
from training import Net, assert_replicas, attach, make, train, weights


def until_killed(folder, strategy, victim, kill_at):
    """Trains and saves after every step. The victim kills itself in the middle of a backward pass."""
    model = make(bucket_cap_mb=0.01)
    hook = attach(model, strategy=strategy, timeout=10)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    learner = dist.get_rank()
    buckets = []
    layers = hook._engine._layers

    def count(bucket):
        buckets.append(bucket.index())
        if learner == victim and len(buckets) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return layers(bucket)

    hook._engine._layers = count
    step = 0
    try:
        for step in range(1000):
            train(model, 1, optimizer, start=step)
            torch.save(
                [model.module.state_dict(), optimizer.state_dict(), hook.state_dict(), step + 1], f"{folder}/{learner}.tmp"
            )
            os.rename(f"{folder}/{learner}.tmp", f"{folder}/{learner}-{step + 1}.pt")
    except RuntimeError as error:
        # Once broken, it says so at once.
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="AdaComp"):
            train(model, 1, optimizer)
        assert time.monotonic() - start < 1
        return str(error), step
    raise AssertionError("nobody was killed")


def resume_at(folder, strategy, step, end):
    model = make(bucket_cap_mb=0.01)
    hook = attach(model, strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    if step > 0:
        module, momentum, state, saved = torch.load(f"{folder}/{dist.get_rank()}-{step}.pt")
        assert saved == step
        model.module.load_state_dict(module)
        optimizer.load_state_dict(momentum)
        hook.load_state_dict(state)
    train(model, end - step, optimizer, start=step)
    assert_replicas(model)
    return weights(model)


@pytest.mark.parametrize("strategy", ["gather", "reduce", "sharded"])
def test_a_killed_learner_ends_the_others_and_resume_goes_on(learners, own_learners, tmp_path, strategy):
    four = own_learners(4)
    four.start(until_killed, str(tmp_path), strategy, 2, 45)
    start = time.monotonic()
    told = [four.result(learner, limit=60) for learner in (0, 1, 3)]
    assert time.monotonic() - start < 45
    assert all("AdaComp" in error for error, _ in told), told
    steps = {step for _, step in told}
    assert len(steps) == 1 and steps.pop() > 3
    # All have saved the same last step, or one more than the one that was killed.
    last = min(max(int(path.stem.split("-")[1]) for path in tmp_path.glob(f"{learner}-*.pt")) for learner in range(4))
    resumed = learners(4).run(resume_at, str(tmp_path), strategy, last, last + 5)
    undisturbed = learners(4).run(resume_at, str(tmp_path), strategy, 0, last + 5)
    for one, other in zip(resumed, undisturbed):
        assert torch.equal(one, other)


def slow_learner(where):
    """One learner does not come; how long the other waits, and what it says."""
    model = make()
    hook = attach(model, strategy="gather" if where == "gather" else "reduce", timeout=2)
    train(model, 2)
    if dist.get_rank() == 1:
        time.sleep(5)
        return None
    work = {
        "everything": lambda: (hook._engine.options.update(mode="off"), train(model, 1)),
        "agreement": lambda: hook._engine._largest([1.0]),
        "consolidate": lambda: hook.state_dict(consolidate=True),
    }
    start = time.monotonic()
    try:
        work.get(where, lambda: train(model, 1))()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("nobody waited")


@pytest.mark.parametrize("where", ["gather", "reduce", "everything", "agreement", "consolidate"])
def test_every_wait_has_a_limit(own_learners, where):
    (error, seconds), _ = own_learners(2).run(slow_learner, where)
    assert "0:00:02" in error, error
    assert 1.5 < seconds < 4.5


def disagreement(what):
    options = {"mode": "on"}
    module = Net
    if dist.get_rank() == 1:
        options, module = {
            "mode": ({"mode": "off"}, Net),
            "bins": ({"mode": "on", "matrix": 100}, Net),
            "strategy": ({"mode": "on", "strategy": "reduce"}, Net),
        }[what]
    try:
        attach(make(module), **options)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize(
    "what, told",
    [("mode", "was attached with mode="), ("bins", "learner 1 does not fit learner 0"), ("strategy", "strategy is reduce")],
)
def test_learners_that_were_started_differently_are_told(own_learners, what, told):
    for error in own_learners(2).run(disagreement, what):
        assert told in error, error


def refused():
    import adacomp.torch

    told = []
    for call in (
        lambda: adacomp.torch.attach(Net()),
        lambda: adacomp.torch.attach(make(), mode="sometimes"),
        lambda: adacomp.torch.attach(make(), strategy="ring"),
        lambda: adacomp.torch.attach(make(), codec="zip"),
        lambda: adacomp.torch.attach(make(), timeout=0),
        lambda: adacomp.torch.attach(make(), names={"fc1.weight": 0}),
        lambda: adacomp.torch.attach(make(lambda: Net().double())),
    ):
        try:
            call()
            told.append("taken")
        except (TypeError, ValueError) as error:
            told.append(str(error))
    return told


def test_bad_input_is_refused(own_learners):
    for told in own_learners(2).run(refused):
        expected = [
            "wrap the model first",
            "mode 'sometimes'",
            "strategy 'ring'",
            "rice or paper",
            "more than 0",
            "bin",
            "float64",
        ]
        assert all(part in text for part, text in zip(expected, told)), told


MANY_STARTS = int(os.environ.get("ADACOMP_STARTS", "3"))


def test_many_starts(tmp_path):
    """Whole runs of four processes, many buckets and 20 steps, from start to exit: no hang, no crash."""
    script = Path(__file__).parent / "many_buckets.py"
    for number in range(MANY_STARTS):
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "4"}
        processes = [
            subprocess.Popen(
                [sys.executable, script, ["gather", "reduce", "sharded"][number % 3]],
                env={**environment, "RANK": str(learner)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for learner in range(4)
        ]
        try:
            outputs = [process.communicate(timeout=90)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        assert [process.returncode for process in processes] == [0] * 4, f"start {number}:\n" + "\n".join(outputs)
        assert len({output.splitlines()[-1] for output in outputs}) == 1, outputs
