"""Studies (what is to be run) and results (what runs have shown)."""

import json
import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from reproduction import HERE

RESULTS = HERE / "results" / "studies.jsonl"
CODES = ["rice", "paper", "floor"]

Result = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One training run: all settings that its result depends on."""

    settings: dict[str, Any]

    def __getitem__(self, setting: str) -> Any:
        return self.settings.get(setting)

    @property
    def key(self) -> str:
        """Identifies the run among all results."""
        return json.dumps(self.settings, sort_keys=True)

    @property
    def name(self) -> str:
        """A short name, which is also that of a folder."""
        others = [f"{key}={value}" for key, value in sorted(self.without("recipe", "scheme").items())]
        return "-".join([self["recipe"], self["scheme"], *others])

    @property
    def is_plain(self) -> bool:
        """Whether it is plain data-parallel training, with an all-reduce in each step."""
        return self["scheme"] == "dense" and self["local-steps"] is None

    def without(self, *keys: str) -> dict[str, Any]:
        return {key: value for key, value in self.settings.items() if key not in keys}

    def arguments(self) -> list[str]:
        """Returns the arguments for either trainer."""
        options = [(f"--{key}", str(value)) for key, value in sorted(self.without("recipe", "trainer").items())]
        return [self["recipe"], *(word for option in options for word in option)]


@dataclass(frozen=True)
class Study:
    """Runs that show something together."""

    name: str
    about: str
    runs: list[Run]


def expand(settings: dict[str, Any]) -> Iterator[Run]:
    """Yields a run for each combination of the settings that are lists; those of the last list change last."""
    # Tables are shown in this order.
    keys = sorted(settings, reverse=True)
    values = [settings[key] if isinstance(settings[key], list) else [settings[key]] for key in keys]
    for combination in product(*values):
        yield Run(dict(sorted(zip(keys, combination))))


def all_studies() -> list[Study]:
    studies = []
    for path in sorted((HERE / "studies").glob("*.toml")):
        table = tomllib.loads(path.read_text())
        studies.append(Study(path.stem, table["about"], [run for settings in table["runs"] for run in expand(settings)]))
    return studies


def json_lines(path: Path) -> list[Result]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def read_results() -> dict[str, Result]:
    """Returns the results of all runs by the keys of the runs."""
    return {Run(line["run"]).key: line["result"] for line in json_lines(RESULTS)}


@dataclass(frozen=True)
class Measure:
    """What a model is judged by."""

    key: str
    name: str
    digits: int
    unit: str

    def show(self, values: list[float]) -> str:
        """Returns the mean, with the lowest and the highest."""
        if not values:
            return ""
        middle = sum(values) / len(values)
        if math.isnan(middle):
            return "diverged"
        text = f"{middle:.{self.digits}f}{self.unit}"
        spread = f" ({min(values):.{self.digits}f} to {max(values):.{self.digits}f})" if len(values) > 1 else ""
        return text + spread

    def behind(self, dense: float | None, other: float | None) -> str:
        """Returns how far another value is behind that of dense."""
        if dense is None or other is None:
            return ""
        return f"{other - dense:+.2f} points" if self.unit else f"{100 * (other / dense - 1):+.1f}%"

    def is_too_much(self, dense: float | None, other: float | None) -> bool:
        """Tells whether it is behind by more than half a point, or 1.5% of a loss."""
        if dense is None or other is None:
            return False
        return other > (dense + 0.5 if self.unit else dense * 1.015)


def measure_of(recipe: str) -> Measure:
    if recipe.startswith("shakespeare"):
        return Measure("test_loss", "test loss", 3, "")
    return Measure("test_error", "test error", 2, "%")


@dataclass
class Group:
    """Runs that differ in their seeds only, with their results by seed."""

    run: Run
    results: dict[int, Result]

    def with_seeds_of(self, other: "Group") -> "Group":
        """Returns the group without the seeds that the other has not."""
        return Group(self.run, {seed: result for seed, result in self.results.items() if seed in other.results})

    def values(self, *path: str) -> list[float]:
        """Returns the numbers at this place of each result that has it; NaN where a run has diverged."""
        numbers = []
        for _, result in sorted(self.results.items()):
            value: Any = result
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if path[0] in result:
                numbers.append(math.nan if value is None else float(value))
        return numbers

    def mean(self, *path: str) -> float | None:
        return mean(self.values(*path))

    def history(self, of: str) -> list[tuple[int, float]]:
        """Returns (step, value) after each epoch of the first seed."""
        first = self.results[min(self.results)]["history"]
        return [(epoch["step"], epoch[of]) for epoch in first if epoch.get(of) is not None]

    def compression_ratio(self) -> float | None:
        """Returns how many times fewer bytes a learner sends in a step than a ring all-reduce of the dense gradient."""
        ratios, learners = [], self.run["learners"]
        for result in self.results.values():
            sent, elements = result.get("bytes_sent"), result.get("parameters")
            if sent and elements is None and self.sends_frames:
                # Lines of the program lack it. It follows from the frame ratio, because each of the others gets the same frame.
                elements = result["frame_ratios"]["rice"]["overall"] * sent / (learners - 1) / 4
            if sent and elements:
                ratios.append(ring_bytes(elements, learners) / sent)
        return mean(ratios)

    @property
    def sends_frames(self) -> bool:
        """Whether learners send their frames as they are."""
        return self.run["strategy"] in (None, "gather")

    def frame_ratio(self, code: str, kind: str = "overall") -> float | None:
        """Returns how many times smaller a learner's frame is than dense f32: of a kind, its compressed layers alone."""
        if not self.sends_frames:
            return None
        ratio = self.mean("frame_ratios", code, kind)
        compressed, dense = self.mean("elements", kind, "compressed"), self.mean("elements", kind, "dense")
        if ratio is None or compressed is None or dense is None:
            return ratio
        return compressed / ((compressed + dense) / ratio - dense) if compressed else None


def ring_bytes(elements: float, learners: int) -> float:
    """Returns the bytes that a learner sends in a ring all-reduce of a dense f32 gradient, and receives."""
    return 2 * (learners - 1) / learners * 4 * elements


def mean(values: list[float]) -> float | None:
    """Returns the mean, or None if there is none."""
    result = sum(values) / len(values) if values else math.nan
    return result if math.isfinite(result) else None


def groups_of(study: Study, results: dict[str, Result]) -> list[Group]:
    """Returns the runs of a study that have results, those that differ in their seeds only together."""
    groups: dict[str, Group] = {}
    for run in study.runs:
        result = results.get(run.key)
        if result is not None:
            group = groups.setdefault(Run(run.without("seed")).key, Group(run, {}))
            group.results[run["seed"]] = result
    return list(groups.values())
