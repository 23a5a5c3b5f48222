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

STUDIES = HERE / "studies"
RESULTS = HERE / "results" / "studies.jsonl"


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

    def without(self, *keys: str) -> dict[str, Any]:
        return {key: value for key, value in self.settings.items() if key not in keys}

    def has(self, word: str) -> bool:
        """Tells whether some setting has this value."""
        return any(str(value) == word for value in self.settings.values())

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


def read_study(path: Path) -> Study:
    table = tomllib.loads(path.read_text())
    return Study(path.stem, table["about"], [run for settings in table["runs"] for run in expand(settings)])


def all_studies() -> list[Study]:
    return [read_study(path) for path in sorted(STUDIES.glob("*.toml"))]


class Results:
    """The results of all runs, a JSON line for each."""

    def __init__(self, path: Path = RESULTS) -> None:
        self.path = path
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.by_key: dict[str, dict[str, Any]] = {Run(line["run"]).key: line["result"] for line in lines}

    def get(self, run: Run) -> dict[str, Any] | None:
        return self.by_key.get(run.key)

    def add(self, run: Run, result: dict[str, Any]) -> None:
        """Appends a result to the file."""
        with self.path.open("a") as file:
            file.write(json.dumps({"run": run.settings, "result": result}) + "\n")
        self.by_key[run.key] = result


@dataclass
class Group:
    """Runs that differ in their seeds only, with their results by seed."""

    run: Run
    results: dict[int, dict[str, Any]]

    def with_seeds_of(self, other: "Group") -> "Group":
        """Returns the group without the seeds that the other has not."""
        return Group(self.run, {seed: result for seed, result in self.results.items() if seed in other.results})

    def values(self, *path: str) -> list[float]:
        """Returns the numbers at this place of each result; NaN where a run has diverged."""
        found = [_at(result, path) for _, result in sorted(self.results.items()) if path[0] in result]
        return [math.nan if value is None else float(value) for value in found]

    def mean(self, *path: str) -> float | None:
        return mean(self.values(*path))

    def history(self, of: str) -> list[tuple[int, float]]:
        """Returns (step, value) after each epoch of the first seed."""
        first = self.results[min(self.results)]["history"]
        return [(epoch["step"], epoch[of]) for epoch in first if epoch.get(of) is not None]

    def compression_ratio(self) -> float | None:
        """Returns how many times fewer bytes a learner sends in a step than a ring all-reduce of the dense gradient."""
        ratios = [_compression_ratio(self.run, result) for result in self.results.values()]
        return mean([ratio for ratio in ratios if ratio is not None])

    def frame_ratio(self, code: str, kind: str = "overall") -> float | None:
        """Returns how many times smaller a learner's frame is than dense f32: of a kind, its compressed layers alone."""
        # Only gather sends frames as they are.
        if self.run["strategy"] not in (None, "gather"):
            return None
        ratio = self.mean("frame_ratios", code, kind)
        compressed, dense = self.mean("elements", kind, "compressed"), self.mean("elements", kind, "dense")
        if ratio is None or compressed is None or dense is None:
            return ratio
        return compressed / ((compressed + dense) / ratio - dense) if compressed else None


def ring_bytes(elements: float, learners: int) -> float:
    """Returns the bytes that a learner sends in a ring all-reduce of a dense f32 gradient, and receives."""
    return 2 * (learners - 1) / learners * 4 * elements


def _compression_ratio(run: Run, result: dict[str, Any]) -> float | None:
    sent, learners = result.get("bytes_sent"), run["learners"]
    if not sent:
        return None
    elements = result.get("parameters")
    if elements is None and run["strategy"] in (None, "gather"):
        # Lines of the program lack it. It follows from the frame ratio, because each of the others gets the same frame.
        elements = result["frame_ratios"]["rice"]["overall"] * sent / (learners - 1) / 4
    return ring_bytes(elements, learners) / float(sent) if elements else None


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def mean(values: list[float]) -> float | None:
    """Returns the mean, or None if there is none."""
    result = sum(values) / len(values) if values else math.nan
    return result if math.isfinite(result) else None


def groups_of(study: Study, results: Results) -> list[Group]:
    """Returns the runs of a study that have results, those that differ in their seeds only together."""
    groups: dict[str, Group] = {}
    for run in study.runs:
        result = results.get(run)
        if result is not None:
            group = groups.setdefault(Run(run.without("seed")).key, Group(run, {}))
            group.results[run["seed"]] = result
    return list(groups.values())
