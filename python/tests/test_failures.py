"""No hang, ever: what goes wrong on one learner ends the others with an error, inside the timeout."""

import dataclasses
import gc
import inspect
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from learners import Learners, free_port, learners, on_learners
from training import STRATEGIES, Net, assert_replicas, attach, make, train, weights

import adacomp.torch


def until_killed(folder, strategy, victim, kill_at):
    """Trains and saves after every step. The victim kills itself in the middle of a backward pass."""
    model = make(bucket_cap_mb=0.01)
    hook = attach(model, strategy=strategy, timeout=5)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    learner = dist.get_rank()
    buckets = []
    layers = hook._door._layers

    def count(bucket):
        buckets.append(bucket.index())
        if learner == victim and len(buckets) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return layers(bucket)

    hook._door._layers = count
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


@STRATEGIES
def test_a_killed_learner_ends_the_others_and_resume_goes_on(tmp_path, strategy):
    with Learners(4) as four:
        four.start(until_killed, tmp_path, strategy, 2, 45)
        start = time.monotonic()
        told = [four.result(learner, timeout=60) for learner in (0, 1, 3)]
        assert time.monotonic() - start < 45
    assert all("AdaComp" in error for error, _ in told), told
    steps = {step for _, step in told}
    assert len(steps) == 1 and steps.pop() > 3
    # All have saved the same last step, or one more than the one that was killed.
    last = min(max(int(path.stem.split("-")[1]) for path in tmp_path.glob(f"{learner}-*.pt")) for learner in range(4))
    resumed = learners(4).run(resume_at, tmp_path, strategy, last, last + 5)
    undisturbed = learners(4).run(resume_at, tmp_path, strategy, 0, last + 5)
    for one, other in zip(resumed, undisturbed):
        assert torch.equal(one, other)


def refused(call):
    """Returns what an error says."""
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return "taken"


def slow_learner(where):
    """One learner does not come; the other says so after the timeout."""
    model = make()
    hook = attach(model, strategy="gather" if where == "gather" else "reduce", timeout=2)
    train(model, 2)
    if dist.get_rank() == 0:
        if where == "flush":
            hook._runtime.configure(dataclasses.replace(hook.config, mode="off"))
        work = {
            "mode": lambda: setattr(hook, "mode", "off"),
            "agreement": lambda: hook._runtime.largest([1.0]),
            "consolidate": lambda: hook.state_dict(consolidate=True),
        }
        start = time.monotonic()
        error = refused(work.get(where, lambda: train(model, 1)))
        seconds = time.monotonic() - start
        assert "0:00:02" in error, (where, error)
        assert 1.5 < seconds < 4.5, (where, seconds)
    # The other waits here, with its part of the hook's group.
    dist.barrier()


def test_every_wait_has_a_timeout():
    with Learners(2) as two:
        for where in ("gather", "reduce", "flush", "agreement", "consolidate", "mode"):
            two.run(slow_learner, where)


def steps_that_take_time(folder, steps, timeout):
    """Trains; returns the weights, or what it is told."""
    model = make()
    attach(model, timeout=timeout)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(steps):
        error = refused(lambda step=step: train(model, 1, optimizer, start=step))
        if error != "taken":
            return error
        Path(folder, f"{dist.get_rank()}-{step}").touch()
        time.sleep(0.05)
    return weights(model)


def stop_in_training(group, folder, victim):
    """Sends SIGSTOP to a learner after its third step."""
    end = time.monotonic() + 60
    while not Path(folder, f"{victim}-3").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(group.processes[victim].pid, signal.SIGSTOP)


def test_a_learner_that_stops_for_less_than_the_timeout_changes_nothing(tmp_path):
    expected = learners(4).run(steps_that_take_time, tmp_path, 12, 30)
    (folder := tmp_path / "stopped").mkdir()
    with Learners(4) as four:
        four.start(steps_that_take_time, folder, 12, 30)
        stop_in_training(four, folder, 2)
        time.sleep(3)
        os.kill(four.processes[2].pid, signal.SIGCONT)
        for learner, undisturbed in enumerate(expected):
            assert torch.equal(four.result(learner), undisturbed)


def test_a_learner_that_stops_for_longer_ends_the_others_inside_the_timeout(tmp_path):
    with Learners(4) as four:
        four.start(steps_that_take_time, tmp_path, 1000, 3)
        stop_in_training(four, tmp_path, 2)
        start = time.monotonic()
        told = [four.result(learner, timeout=30) for learner in (0, 1, 3)]
        assert time.monotonic() - start < 10
        # And itself, when it comes back.
        os.kill(four.processes[2].pid, signal.SIGCONT)
        told.append(four.result(2, timeout=30))
    assert all("AdaComp" in error for error in told), told
    assert any("a learner has died, hangs, or is slower than 0:00:03" in error for error in told), told


def closed_hook():
    """Learner 0 closes its hook and stays; the other learns of it at once, and then keeps nothing of the model."""
    model = make()
    hook = attach(model)
    train(model, 2)
    if dist.get_rank() == 0:
        hook.close()
    else:
        start = time.monotonic()
        error = refused(lambda: train(model, 1))
        assert "AdaComp" in error and time.monotonic() - start < 10, error
        hook.close()
        assert "AdaComp cannot go on" in refused(lambda: train(model, 1))
        kept = weakref.ref(hook._runtime)
        del model, hook
        gc.collect()
        assert kept() is None
    dist.barrier()


def test_a_hook_that_is_closed_tells_the_others_at_once():
    with Learners(2) as two:
        two.run(closed_hook)


def disagreement(options, told):
    """One learner attaches with other options; both are told in what."""
    error = refused(lambda: attach(make(), **{"mode": "on", **(options if dist.get_rank() == 1 else {})}))
    assert told in error, error


def test_learners_that_were_started_differently_are_told():
    for options, told in (
        ({"mode": "off"}, "was attached with mode="),
        ({"matrix": 100}, "learner 1 does not fit learner 0"),
        ({"strategy": "reduce"}, "strategy is reduce"),
    ):
        with Learners(2) as two:
            two.run(disagreement, options, told)


@on_learners(2)
def test_bad_input_is_refused():
    for call, told in (
        (lambda: adacomp.torch.attach(Net()), "wrap the model first"),
        (lambda: adacomp.torch.attach(make(), mode="sometimes"), "mode 'sometimes'; expected auto, on or off"),
        (lambda: adacomp.torch.attach(make(), strategy="ring"), "strategy 'ring'"),
        (lambda: adacomp.torch.attach(make(), codec="zip"), "rice or paper"),
        (lambda: adacomp.torch.attach(make(), scale="median"), "mean or clamped"),
        (lambda: adacomp.torch.attach(make(), timeout=0), "more than 0"),
        (lambda: adacomp.torch.attach(make(), timeout="5"), "timeout is '5'; expected seconds"),
        (lambda: adacomp.torch.attach(make(), threads="2"), "threads '2'; expected a number"),
        (lambda: adacomp.torch.attach(make(), matrix="50"), "matrix is '50'; expected the number of elements"),
        (lambda: adacomp.torch.attach(make(), names={"fc1.weight": 0}), "bin"),
        (lambda: adacomp.torch.attach(make(), matrix=True), "matrix is True; expected the number of elements of a bin"),
        (lambda: adacomp.torch.attach(make(), vector=50.0), "vector is 50.0"),
        (lambda: adacomp.torch.attach(make(), names={"fc1.*": False}), "names['fc1.*'] is False"),
        (lambda: adacomp.torch.attach(make(), scaler=True), "scaler is bool; expected the torch.amp.GradScaler"),
        (lambda: adacomp.torch.attach(make(lambda: Net().double())), "nothing to compress: no parameter in float32"),
    ):
        assert told in refused(call)


def test_options_are_listed_alike():
    """What `attach` takes is what a configuration has, in the same order, with the same types and defaults."""
    _, _, *keywords = inspect.signature(adacomp.torch.attach).parameters.values()
    fields = inspect.signature(adacomp.torch.Config).parameters.values()
    assert [(each.name, each.annotation, each.default) for each in keywords] == [
        (each.name, each.annotation, each.default) for each in fields
    ]
    config = adacomp.torch.Config(mode="on")
    with pytest.raises(AttributeError):
        config.mode = "off"


MANY_STARTS = int(os.environ.get("ADACOMP_STARTS", "3"))


def test_many_starts(tmp_path):
    """Complete runs of four processes, many buckets and 20 steps, from start to exit: no hang, no crash."""
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
