"""Results as Markdown tables."""

import math
from dataclasses import dataclass

from reproduction.network import LEARNERS, METHODS, WORKLOADS, NetworkResults
from reproduction.studies import Group, Results, Study, groups_of, ring_bytes

CODES = ("rice", "paper", "floor")
# Rows of the README's table: the models that are trained to their end, the worst case, and one that is not trained to its end.
SHORT = [
    ("mnist-dnn", "sgd"),
    ("mnist-cnn", "sgd"),
    ("cifar10-cnn", "sgd"),
    ("shakespeare-lstm", "sgd"),
    ("speech-dnn", "sgd"),
    ("shakespeare-transformer", "adam"),
]


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

    def behind(self, dense: float | None, adacomp: float | None) -> str:
        """Returns how far AdaComp is behind dense; too much is more than half a point, or 1.5% of a loss."""
        if dense is None or adacomp is None:
            return ""
        difference = adacomp - dense if self.unit else 100 * (adacomp / dense - 1)
        text = f"{difference:+.2f} points" if self.unit else f"{difference:+.1f}%"
        return text if difference <= (0.5 if self.unit else 1.5) else f"{text}, **too much**"


def measure_of(recipe: str) -> Measure:
    if recipe.startswith("shakespeare"):
        return Measure("test_loss", "test loss", 3, "")
    return Measure("test_error", "test error", 2, "%")


def markdown(header: list[str], rows: list[list[str]], numbers: set[str]) -> str:
    """Returns a table without the columns that are empty in all rows; those of numbers are aligned to the right."""
    filled = [at for at in range(len(header)) if at == 0 or any(row[at] for row in rows)]
    lines = [header, ["---:" if name in numbers else "---" for name in header], *rows]
    return "\n" + "".join(f"| {' | '.join(line[at] for at in filled)} |\n" for line in lines) + "\n"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


def frame_ratios(group: Group, kind: str, codes: tuple[str, ...] = CODES) -> str:
    return ", ".join(ratio(value) for code in codes if (value := group.frame_ratio(code, kind)) is not None)


def compared(study: Study, results: Results) -> list[tuple[Group, Group]]:
    """Returns dense and AdaComp of each model and optimiser, with the seeds that both have."""
    groups = groups_of(study, results)
    pairs = []
    for adacomp in (group for group in groups if group.run["scheme"] == "adacomp"):
        like = adacomp.run.without("seed", "scheme")
        for dense in groups:
            if dense.run["scheme"] == "dense" and dense.run.without("seed", "scheme") == like:
                pairs.append((dense.with_seeds_of(adacomp), adacomp.with_seeds_of(dense)))
    return [(dense, adacomp) for dense, adacomp in pairs if adacomp.results]


def main_table(study: Study, results: Results) -> str:
    """Returns dense against AdaComp, a row for each model and optimiser."""
    header = ["model, optimiser", "seeds", "steps", "dense", "AdaComp", "behind", "compression ratio"]
    header += ["frame ratio: `rice`, `paper`", "conv: `rice`, `paper`, floor", "matrix: `rice`, `paper`, floor"]
    rows = []
    for dense, adacomp in compared(study, results):
        measure = measure_of(adacomp.run["recipe"])
        rows.append(
            [
                f"{adacomp.run['recipe']}, {adacomp.run['optimizer']}",
                str(len(adacomp.results)),
                f"{adacomp.mean('steps') or 0:.0f}",
                measure.show(dense.values(measure.key)),
                measure.show(adacomp.values(measure.key)),
                measure.behind(dense.mean(measure.key), adacomp.mean(measure.key)),
                ratio(adacomp.compression_ratio()),
                frame_ratios(adacomp, "overall", ("rice", "paper")),
                frame_ratios(adacomp, "conv"),
                frame_ratios(adacomp, "matrix"),
            ]
        )
    return markdown(header, rows, {"seeds", "steps", "compression ratio"})


def short_table(study: Study, results: Results) -> str:
    """Returns a few rows of the main table, for the README."""
    rows = []
    for dense, adacomp in compared(study, results):
        recipe, optimizer = adacomp.run["recipe"], adacomp.run["optimizer"]
        if (recipe, optimizer) in SHORT:
            measure = measure_of(recipe)
            pair = [measure.show([group.mean(measure.key) or math.nan]) for group in (dense, adacomp)]
            ratios = [ratio(adacomp.compression_ratio()), ratio(adacomp.frame_ratio("rice"))]
            rows.append([f"{recipe}, {optimizer}", measure.name, *pair, *ratios])
    header = ["model, optimiser", "measure", "dense", "AdaComp", "compression ratio", "frame ratio"]
    return markdown(header, rows, set(header[2:]))


def study_table(study: Study, results: Results) -> str:
    """Returns a row for each setting of a study, with what differs between them."""
    groups = groups_of(study, results)
    if not groups:
        return "\nNot measured yet.\n\n"
    measure = measure_of(groups[0].run["recipe"])
    settings = sorted({key for run in study.runs for key in run.without("seed")})
    settings = [key for key in settings if len({str(run[key]) for run in study.runs}) > 1]
    header = [*settings, measure.name, "compression ratio", "frame ratio: `rice`, `paper`"]
    header += ["matrix: `rice`, `paper`, floor", "conv: `rice`, `paper`, floor", "bytes received in a step"]
    rows = []
    for group in groups:
        received = group.mean("bytes_received")
        rows.append(
            [
                *("" if group.run[key] is None else str(group.run[key]) for key in settings),
                measure.show(group.values(measure.key)),
                "1" if group.run["scheme"] == "dense" else ratio(group.compression_ratio()),
                frame_ratios(group, "overall", ("rice", "paper")),
                frame_ratios(group, "matrix"),
                frame_ratios(group, "conv"),
                "" if received is None else f"{received:,.0f}",
            ]
        )
    return markdown(header, rows, {"compression ratio", "bytes received in a step"})


def network_tables(results: NetworkResults) -> str:
    cases = [(workload, learners) for workload in WORKLOADS for learners in LEARNERS if results.links(workload, learners)]
    times = [network_times(results, workload, learners) for workload, learners in cases]
    costs = [network_costs(results, workload) for workload in WORKLOADS]
    return "\n" + "".join([*times, *costs])


def network_times(results: NetworkResults, workload: str, learners: int) -> str:
    """Returns step times by link, and their ratios to DDP's."""
    links = results.links(workload, learners)
    rows = []
    for method in METHODS:
        cells = []
        for link in links:
            line, relative = results.step(workload, learners, link, method), results.relative(workload, learners, link, method)
            if line is None or relative is None:
                cells.append("")
                continue
            chosen = f" *{'on' if line['compressing'] else 'off'}*" if "compressing" in line else ""
            cells.append(f"{seconds(line['step_seconds'])} **{two_digits(relative)}**{chosen}")
        rows.append([method, *cells])
    title = f"#### {workload}, {learners} learners: time of a step, and its ratio to DDP's\n"
    return title + markdown(["method", *links], rows, set(links))


def network_costs(results: NetworkResults, workload: str) -> str:
    """Returns bytes, processor time and memory, which hardly depend on the link."""
    link, builtin = "1gbit", results.peaks.get((workload, "builtin"))
    header = ["method", "learners", "bytes sent, by the interface", "compression ratio", "by `stats()`", "processor time"]
    header += ["most memory, first steps", "beyond DDP, in models", "later", "beyond DDP, in models "]
    rows = []
    for learners in LEARNERS:
        for method in METHODS:
            line = results.step(workload, learners, link, method)
            if line is None:
                continue
            said = line["said_bytes"]
            share = "" if not said else f"{size(said)} ({100 * (line['sent_bytes'] / said - 1):+.1f}%)"
            sent, compressed = line["sent_bytes"], "-"
            if method != "none":
                compressed = ratio(ring_bytes(line["parameters"], learners) / sent)
            row = [method, str(learners), size(sent), compressed, share, seconds(line["cpu_seconds"])]
            peak = results.peaks.get((workload, method))
            memory = [""] * 4
            if peak and builtin and peak["learners"] == learners:
                model = 4 * peak["parameters"]
                memory = []
                for key in ("peak_bytes", "later_peak_bytes"):
                    memory += [size(peak[key]), f"{(peak[key] - builtin[key]) / model:+.2f}"]
            rows.append(row + memory)
    if not rows:
        return ""
    title = f"#### {workload}, {link}: what a learner sends, computes and takes in a step\n"
    return title + markdown(header, rows, set(header[1:]))


def seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def two_digits(value: float) -> str:
    return f"{value:.3f}" if value < 0.0995 else f"{value:.2f}"


def size(value: float) -> str:
    for unit, factor, digits in (("MB", 1e6, 2), ("kB", 1e3, 1)):
        if value >= factor:
            return f"{value / factor:.{digits}f} {unit}"
    return f"{value:.0f} B"
