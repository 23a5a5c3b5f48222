"""The reproduction itself: studies, tables, models, and the trainer on pictures of nothing."""

import math
import wave
from pathlib import Path

import pytest
import torch

from reproduction import ROOT
from reproduction.clusters import stand_in_mnist
from reproduction.documents import markdown, replaced
from reproduction.models import Workload, alexnet, resnet, small_resnet
from reproduction.network import SITE_WORKLOADS, WORKLOADS, NetworkResults, read_words
from reproduction.peers import PEERS, OneBitAdam, Peer
from reproduction.runner import program_result
from reproduction.schemes import Compressed, dense_average
from reproduction.speech import Speech
from reproduction.studies import Group, Run, all_studies, expand, read_results, ring_bytes
from reproduction.trainer import Training, arguments


def test_lists_of_settings_are_expanded() -> None:
    runs = list(expand({"trainer": "program", "recipe": "digits", "scheme": ["dense", "adacomp"], "seed": [1, 2]}))
    assert len({run.key for run in runs}) == 4
    assert runs[0].arguments() == ["digits", "--scheme", "dense", "--seed", "1"]


def test_every_run_has_options_of_the_trainer_and_every_result_a_run() -> None:
    trainer = (ROOT / "reproduction" / "trainer.py").read_text()
    runs = [run for study in all_studies() for run in study.runs]
    for run in runs:
        assert run["trainer"] in ("program", "pytorch")
        assert all(f'"--{key}"' in trainer for key in run.without("trainer", "recipe"))
    assert read_results().keys() <= {run.key for run in runs}


def test_ratios_are_of_what_a_ring_sends() -> None:
    assert ring_bytes(1000, 4) == 6000
    run = Run({"learners": 4, "scheme": "adacomp"})
    # Three others get a frame of 100 bytes each, which stands for 1,000 elements.
    result = {"bytes_sent": 300.0, "frame_ratios": {"rice": {"overall": 40.0}}}
    with_parameters = Group(run, {1: result | {"parameters": 1000}})
    assert with_parameters.compression_ratio() == Group(run, {1: result}).compression_ratio() == 20.0
    alone = Group(Run({"learners": 1, "scheme": "adacomp"}), {1: {"bytes_sent": 0.0, "parameters": 1000}})
    assert alone.compression_ratio() is None


def test_frame_ratios_of_a_kind_leave_dense_layers_out() -> None:
    result = {"frame_ratios": {"rice": {"matrix": 2.0}}, "elements": {"matrix": {"compressed": 60, "dense": 40}}}
    group = Group(Run({"learners": 4}), {1: result})
    # Half of 100 elements' bytes, 40 of them for those that are dense.
    assert group.frame_ratio("rice", "matrix") == pytest.approx(6.0)
    assert Group(Run({"strategy": "reduce"}), {1: result}).frame_ratio("rice", "matrix") is None


def test_only_the_part_between_the_marks_changes() -> None:
    text = "a\n<!-- one: by x -->\nold\n<!-- end of one -->\nb\n"
    assert replaced(text, "one", "new\n") == "a\n<!-- one: by x -->\nnew\n<!-- end of one -->\nb\n"
    with pytest.raises(ValueError):
        replaced(text, "two", "")


def test_tables_leave_out_empty_columns() -> None:
    assert markdown([{"a": "1", "b": "", "c": "3"}], {"c"}) == "\n| a | c |\n| --- | ---: |\n| 1 | 3 |\n\n"


def test_a_program_that_went_on_has_each_epoch_once() -> None:
    total = {"seconds": 2.0, "bytes_sent": 80.0, "frame_ratio": {}, "paper_frame_ratio": {}, "entropy_frame_ratio": {}}
    line = {"step": 4, "train_loss": 1.0, "test_loss": 1.0, "test_error": 5.0, "total": total}
    line["layers"] = [{"residual_norm": 3.0}, {"residual_norm": None}, {"residual_norm": 4.0}]
    result = program_result([{"run": 1}, line | {"epoch": 1}, line | {"epoch": 1}, line | {"epoch": 2, "step": 8}])
    assert [epoch["step"] for epoch in result["history"]] == [4, 8]
    assert result["history"][0]["residual_norm"] == 5.0
    assert result["bytes_sent"] == 10.0


def test_models_have_the_published_sizes() -> None:
    measured = {line["workload"]: line["parameters"] for line in NetworkResults().steps.values()}
    assert {name: Workload(name).parameters for name in [*WORKLOADS, *SITE_WORKLOADS]} == measured
    assert sum(each.numel() for each in resnet(50, 224, 10).parameters()) == 23_528_522
    assert sum(each.numel() for each in alexnet(224, 10).parameters()) == 57_044_810
    assert sum(each.numel() for each in small_resnet(3, 10).parameters()) == 269_722


def test_words_choose_what_is_measured() -> None:
    wanted = read_words(["mlp", "2", "1gbit", "gather"])
    assert list(wanted.values()) == [["1gbit"], ["mlp"], ["2"], ["gather"], []]
    with pytest.raises(SystemExit, match="expected a link"):
        read_words(["2gbit"])


def peer(options: str) -> Peer:
    words = f"mnist-dnn {options} --learning-rate 1 --learners 2 --out /dev/null"
    chosen = arguments(words.split())
    return PEERS[chosen.scheme](torch.nn.Linear(64, 32), chosen, 100)


def test_peers_that_may_send_everything_give_the_average() -> None:
    gradients = [[torch.randn(32, 64), torch.randn(32)] for _ in range(2)]
    average = dense_average(gradients)
    for options in ("--scheme powersgd --rank 32", "--scheme dgc --top-percent 100", "--scheme demo --chunk-top 4096"):
        scheme = peer(options)
        arrived = scheme.exchange(50, gradients)
        assert arrived is not None
        expected = [layer.sign() for layer in average] if "demo" in options else average
        assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(arrived, expected)), options
        # Of 2,048 numbers of about 1, of which a product of matrices is not exact.
        assert scheme.kept["rest", 0].mean(0).norm() < 1e-3
    nan = [[layer * math.nan for layer in gradients[0]], gradients[1]]
    assert scheme.exchange(51, nan) is None


KEEPS = ["--scheme powersgd", "--scheme dgc --momentum 0", "--scheme 1-bit-adam", "--scheme sparseloco --local-steps 1"]


@pytest.mark.parametrize("options", KEEPS)
def test_peers_keep_what_they_do_not_send(options: str) -> None:
    scheme, gradient = peer(options), [torch.randn(32, 64), torch.randn(32)]
    if isinstance(scheme, OneBitAdam):
        for _ in range(3):
            scheme.exchange(0, [gradient, gradient])
        momentum = scheme.moments.kept[0][1].clone()
        scheme.exchange(50, [gradient, gradient])
        sent, made = scheme.moments.kept[0][1] + scheme.kept["server", 0], 0.9 * momentum + 0.1 * gradient[0]
    else:
        arrived = scheme.exchange(50, [gradient, gradient])
        assert arrived is not None
        sent, made = arrived[0], gradient[0]
    assert torch.allclose(sent + scheme.kept["rest", 0][0], made, atol=1e-5)
    assert scheme.residual_norm() > 0.1
    assert 0 < scheme.result(1)["bytes_sent"]


def test_bins_grow_in_the_warm_up_and_residuals_stay() -> None:
    words = "mnist-dnn --bin-warm-up 0.5 --matrix-bin 500 --learning-rate 1 --learners 2 --out /dev/null"
    scheme = Compressed(torch.nn.Linear(64, 32), arguments(words.split()), 100)
    total, bins = torch.zeros(32, 64), []
    for step in range(52):
        gradient = torch.randn(32, 64)
        total += gradient
        arrived = scheme.exchange(step, [[gradient, torch.zeros(32)]] * 2)
        assert arrived is not None
        total -= arrived[0]
        bins.append(scheme.bin)
    assert bins[0] == 50 and bins[49] < 500 == bins[50] and len(set(bins)) == 9
    kept = scheme.residuals()[0]
    assert kept[1] is None and kept[0] is not None and torch.allclose(kept[0], total, atol=1e-3)


def test_speech_has_states_and_windows_within_an_utterance(tmp_path: Path) -> None:
    for folder in ("wav", "lab"):
        (tmp_path / folder).mkdir()
    for number in range(10):
        with wave.open(str(tmp_path / "wav" / f"u{number}.wav"), "wb") as file:
            file.setparams((1, 2, 16_000, 0, "NONE", ""))
            file.writeframes(torch.randint(-99, 99, (4000,), dtype=torch.int16).numpy().tobytes())
        (tmp_path / "lab" / f"u{number}.lab").write_text("header\n#\n0.1 125 pau\n0.2 125 a ; more\n")
    speech = Speech(tmp_path)
    # 23 windows of 10 ms fit; a third of each phone is a state.
    assert (len(speech), len(speech.test_labels), speech.classes) == (9 * 23, 23, 6)
    inputs, labels = speech.train(torch.tensor([0, 22]), torch.Generator())
    first, last = inputs.view(2, 11, 40)
    assert all(torch.equal(first[0], first[edge]) and torch.equal(last[10], last[-edge - 1]) for edge in range(6))
    assert labels[0] != labels[1]


GOES_ON = ["--scheme dense", "--strategy sharded", "--optimizer adam --compress updates --bin-warm-up 0.9 --second-moment shared"]
# Pixels that are never used have no second moment, which 1-bit Adam does not bear.
GOES_ON += ["--local-steps 10 --vector-bin 50 --outer-momentum 0.9 --outer-rate 0.7", "--scheme dense --local-steps 10 --delay 5"]
GOES_ON += ["--optimizer adam --scheme sparseloco --chunk-top 8 --local-steps 10 --residual-decay 0.95"]
GOES_ON += ["--scheme powersgd", "--scheme 1-bit-adam --optimizer adam --learning-rate 1e-12"]


def test_one_local_step_is_a_step_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_mnist(tmp_path / "data" / "mnist")
    monkeypatch.setenv("ADACOMP_DATA", str(tmp_path / "data"))
    weights = []
    for options in ("", "--local-steps 1", "--local-steps 5"):
        words = f"mnist-dnn --scheme dense --momentum 0 --learning-rate 0.1 --minibatch 40 --steps 10 {options}"
        training = Training(arguments([*words.split(), "--out", str(tmp_path / options)]))
        sent = training.train().get("bytes_sent")
        # Of ten steps in rounds of five, two send.
        assert not options or sent == ring_bytes(478_410, 4) / int(options[-1])
        weights.append(training.parameters[0].detach())
    together, one, five = weights
    assert torch.allclose(together, one, atol=1e-5)
    assert not torch.allclose(together, five, atol=1e-5)


@pytest.mark.parametrize("options", GOES_ON)
def test_the_trainer_goes_on_where_it_stopped(options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_mnist(tmp_path / "data" / "mnist")
    monkeypatch.setenv("ADACOMP_DATA", str(tmp_path / "data"))
    torch.set_num_threads(1)

    def training(folder: str) -> Training:
        words = f"mnist-dnn --learning-rate 0.01 --minibatch 40 --epochs 2 {options}"
        return Training(arguments([*words.split(), "--out", str(tmp_path / folder)]))

    once, stopped = training("once").train(), training("twice")

    def save_and_stop() -> None:
        Training.save(stopped)
        raise InterruptedError

    monkeypatch.setattr(stopped, "save", save_and_stop)
    with pytest.raises(InterruptedError):
        stopped.train()
    twice = training("twice").train()
    assert once["steps"] == 50 and math.isfinite(once["test_loss"])
    assert once["history"] == twice["history"]
    states = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=False)["model"] for name in ("once", "twice")]
    assert all(torch.equal(weight, states[1][name]) for name, weight in states[0].items())
    if "--scheme dense" != options:
        assert 0 < once["bytes_sent"] == twice["bytes_sent"] < ring_bytes(once["parameters"], 4)
