"""The reproduction itself: studies, tables, models, and the trainer on pictures of nothing."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from reproduction import ROOT
from reproduction.clusters import stand_in_mnist
from reproduction.documents import markdown, replaced
from reproduction.models import Workload, alexnet, resnet
from reproduction.network import WORKLOADS, NetworkResults, read_words
from reproduction.runner import program_result
from reproduction.studies import Group, Run, all_studies, expand, read_results, ring_bytes
from reproduction.trainer import Training, arguments


def test_lists_of_settings_are_expanded() -> None:
    runs = list(expand({"trainer": "program", "recipe": "digits", "scheme": ["dense", "adacomp"], "seed": [1, 2]}))
    assert len({run.key for run in runs}) == 4
    assert runs[0].arguments() == ["digits", "--scheme", "dense", "--seed", "1"]


def test_every_study_has_all_results_and_options_of_the_trainer() -> None:
    trainer, results = (ROOT / "reproduction" / "trainer.py").read_text(), read_results()
    for study in all_studies():
        for run in study.runs:
            assert results.get(run.key), run.name
            assert run["trainer"] in ("program", "pytorch")
            assert all(f'"--{key}"' in trainer for key in run.without("trainer", "recipe"))


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
    assert {name: Workload(name).parameters for name in WORKLOADS} == measured
    assert sum(each.numel() for each in resnet(50, 224, 10).parameters()) == 23_528_522
    assert sum(each.numel() for each in alexnet(224, 10).parameters()) == 57_044_810


def test_words_choose_what_is_measured() -> None:
    wanted = read_words(["mlp", "2", "1gbit", "gather"])
    assert list(wanted.values()) == [["1gbit"], ["mlp"], ["2"], ["gather"], []]
    with pytest.raises(SystemExit, match="expected a link"):
        read_words(["2gbit"])


@pytest.mark.parametrize("options", ["--scheme dense", "--strategy sharded", "--optimizer adam --compress updates"])
def test_the_trainer_goes_on_where_it_stopped(options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_mnist(tmp_path / "data" / "mnist")
    monkeypatch.setenv("ADACOMP_DATA", str(tmp_path / "data"))
    torch.set_num_threads(1)

    def train(folder: str, epochs: int) -> dict[str, Any]:
        words = f"mnist-dnn {options} --learning-rate 0.01 --schedule constant --minibatch 40 --epochs {epochs}"
        return Training(arguments([*words.split(), "--out", str(tmp_path / folder)])).train()

    once = train("once", 2)
    train("twice", 1)
    twice = train("twice", 2)
    assert once["steps"] == 50 and math.isfinite(once["test_loss"])
    assert once["history"] == twice["history"]
    states = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=False)["model"] for name in ("once", "twice")]
    assert all(torch.equal(weight, states[1][name]) for name, weight in states[0].items())
    if "dense" not in options:
        assert 0 < once["bytes_sent"] == twice["bytes_sent"] < ring_bytes(once["parameters"], 4)
