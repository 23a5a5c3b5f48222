"""Documents of which parts are made of results: tables between marks, and figures."""

import math
from collections.abc import Container, Sequence
from pathlib import Path

from reproduction import HERE, ROOT, doors, front
from reproduction.models import SAMPLES
from reproduction.network import (
    LEARNERS,
    METHODS,
    NODE_CELLS,
    NODE_METHODS,
    SITE_LINK,
    SITE_METHODS,
    SITE_WORKLOADS,
    WORKLOADS,
    NetworkResults,
)
from reproduction.plots import PANELS, draw, network_figure, rule_figure, seconds, step_times_figure
from reproduction.studies import (
    CODES,
    Group,
    Result,
    Run,
    Study,
    all_studies,
    groups_of,
    mean,
    measure_of,
    read_results,
    ring_bytes,
)

# Rows of the README's table: one of each kind of model, and the worst case.
SHORT = ["mnist-dnn, sgd", "mnist-cnn, sgd", "cifar10-cnn, sgd", "resnet20, sgd", "speech-dnn, sgd", "shakespeare-lstm, sgd"]
SHORT += ["shakespeare-transformer, adam"]

# What learners do by each method of the benchmark of sites, as settings of a run of the study `local`; and the loss for which the
# time is told.
SITE_RUNS: dict[str, dict[str, object]] = {
    "builtin": {"scheme": "dense", "local-steps": None},
    "powersgd-1": {"scheme": "powersgd", "local-steps": None},
    "gather": {"scheme": "adacomp", "local-steps": None, "compress": None},
    "local-dense": {"scheme": "dense", "local-steps": 30},
    "local": {"scheme": "adacomp", "local-steps": 30, "delay": None},
    "local-ahead": {"scheme": "adacomp", "local-steps": 30, "delay": 15},
}
SITE_LOSS = 1.85

# A row's cells by the names of their columns.
Row = dict[str, str]


def markdown(rows: list[Row], numbers: Container[str]) -> str:
    """Returns a table without the columns that are empty in all rows; those of numbers are aligned to the right."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    lines = [names, ["---:" if name in numbers else "---" for name in names], *([row[name] for name in names] for row in rows)]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


def ratios(group: Group, *kinds: str) -> Row:
    """Returns the compression ratio and the frame ratios, overall and of these kinds of layers."""
    row = {"compression ratio": "1" if group.run.is_plain else ratio(group.compression_ratio())}
    for kind in ("overall", *kinds):
        codes, name = CODES, f"{kind}: `rice`, `paper`, floor"
        if kind == "overall":
            codes, name = CODES[:2], "frame ratio: `rice`, `paper`"
        row[name] = ", ".join(ratio(value) for code in codes if (value := group.frame_ratio(code, kind)) is not None)
    return row


def compared(groups: list[Group]) -> list[tuple[Group, Group]]:
    """Returns dense and AdaComp of each model and optimiser, with the seeds that both have."""
    pairs = []
    for adacomp in (group for group in groups if group.run["scheme"] == "adacomp"):
        like = adacomp.run.without("seed", "scheme")
        for dense in groups:
            if dense.run["scheme"] == "dense" and dense.run.without("seed", "scheme") == like:
                pairs.append((dense.with_seeds_of(adacomp), adacomp.with_seeds_of(dense)))
    return [(dense, adacomp) for dense, adacomp in pairs if adacomp.results]


def main_table(groups: list[Group]) -> str:
    """Returns dense against AdaComp, a row for each model and optimiser."""
    rows = []
    for dense, adacomp in compared(groups):
        measure = measure_of(adacomp.run["recipe"])
        row = {
            "model, optimiser": f"{adacomp.run['recipe']}, {adacomp.run['optimizer']}",
            "seeds": str(len(adacomp.results)),
            "steps": f"{adacomp.mean('steps') or 0:.0f}",
            "dense": measure.show(dense.values(measure.key)),
            "AdaComp": measure.show(adacomp.values(measure.key)),
            "behind": measure.behind(*(means := (dense.mean(measure.key), adacomp.mean(measure.key)))),
        }
        if measure.is_too_much(*means):
            row["behind"] += ", **too much**"
        rows.append(row | ratios(adacomp, "conv", "matrix"))
    return markdown(rows, {"seeds", "steps", "compression ratio"})


def short_table(groups: list[Group]) -> str:
    """Returns a few rows of the main table, for the README."""
    rows = []
    for dense, adacomp in compared(groups):
        name, measure = f"{adacomp.run['recipe']}, {adacomp.run['optimizer']}", measure_of(adacomp.run["recipe"])
        if name in SHORT:
            row = {"model, optimiser": name, "measure": measure.name}
            for scheme, group in (("dense", dense), ("AdaComp", adacomp)):
                row[scheme] = measure.show([group.mean(measure.key) or math.nan])
            row |= {"compression ratio": ratio(adacomp.compression_ratio()), "frame ratio": ratio(adacomp.frame_ratio("rice"))}
            rows.append(row)
    return markdown(rows, {"dense", "AdaComp", "compression ratio", "frame ratio"})


def study_table(study: Study, groups: list[Group]) -> str:
    """Returns a row for each setting of a study, with what differs between them."""
    if not groups:
        return "\nNot measured yet.\n\n"
    column = " or ".join(sorted({measure_of(group.run["recipe"]).name for group in groups}))
    settings = sorted({key for run in study.runs for key in run.without("seed")})
    models = {run["recipe"] for run in study.runs}
    settings = [key for key in settings if any(varies(key, study, model) for model in models)]
    settings = ["recipe"] * (len(models) > 1) + settings
    rows = []
    for group in groups:
        measure, received = measure_of(group.run["recipe"]), group.mean("bytes_received")
        row = {key: "" if group.run[key] is None else str(group.run[key]) for key in settings}
        row[column] = measure.show(group.values(measure.key))
        dense = best_dense(group, groups, measure.key, study.runs) if not group.run.is_plain else None
        row["behind dense"] = measure.behind(dense, group.mean(measure.key))
        row |= ratios(group, "matrix", "conv")
        row["bytes received in a step"] = "" if received is None else f"{received:,.0f}"
        rows.append(row)
    return markdown(rows, {"compression ratio", "bytes received in a step"})


def varies(setting: str, study: Study, model: str) -> bool:
    """Tells whether runs of a model differ in a setting."""
    return len({str(run[setting]) for run in study.runs if run["recipe"] == model}) > 1


def best_dense(group: Group, groups: list[Group], key: str, planned: Sequence[Run]) -> float | None:
    """Returns the lowest result of dense training of the same model, with the same seeds and samples; with fewer epochs, if none
    with as many is planned."""
    alike = ("recipe", "side", "steps", "minibatch", "outlier-step")

    def is_dense_of(run: Run) -> bool:
        return run.is_plain and run["compress"] is None and all(run[x] == group.run[x] for x in alike)

    if any(is_dense_of(run) and run["epochs"] == group.run["epochs"] for run in planned):
        dense = [other for other in groups if is_dense_of(other.run) and other.run["epochs"] == group.run["epochs"]]
    else:
        dense = [o for o in groups if is_dense_of(o.run) and (o.run["epochs"] or 0) < (group.run["epochs"] or 0)]
    results = [other.with_seeds_of(group).mean(key) for other in dense]
    return min((value for value in results if value is not None), default=None)


def open_runs(studies: list[Study], results: Container[str]) -> str:
    """Returns how many runs have no result yet, a line for each study."""
    counts = [(study, sum(run.key not in results for run in study.runs)) for study in studies]
    lines = [f"- `{study.name}`: {count} of {len(study.runs)} runs\n" for study, count in counts if count]
    return "\n" + "".join(lines or ["None.\n"]) + "\n"


def network_times(results: NetworkResults, workload: str, learners: int) -> str:
    """Returns step times by link, and their ratios to DDP's."""
    links = results.links(workload, learners)
    rows = [{"method": method} | dict.fromkeys(links, "") for method in METHODS]
    for row in rows:
        for link in links:
            line = results.step(workload, learners, link, row["method"])
            relative = results.relative(workload, learners, link, row["method"])
            if line and relative:
                chosen = f" *{'on' if line['compressing'] else 'off'}*" if "compressing" in line else ""
                row[link] = timed(line["step_seconds"], line["step_seconds"] / relative) + chosen
    title = f"#### {workload}, {learners} learners: time of a step, and its ratio to DDP's\n"
    return title + markdown(rows, links)


def node_times(results: NetworkResults, workload: str) -> str:
    """Returns step times of two machines of two processes each, and what a machine sends."""
    links = [link for one, link in NODE_CELLS if one == workload]
    rows: list[Row] = []
    if not any((workload, link, "builtin") in results.nodes for link in links):
        return ""
    for method in NODE_METHODS:
        row = {"method": method}
        for link in links:
            line, builtin = (results.nodes.get((workload, link, one)) for one in (method, "builtin"))
            row[link] = timed(line["step_seconds"], builtin["step_seconds"]) if line and builtin else ""
        line = results.nodes.get((workload, links[0], method))
        row["bytes that a machine sends in a step"] = size(line["sent_bytes"]) if line else ""
        rows.append(row)
    title = f"#### {workload}, 2 machines of 2 processes: time of a step, and its ratio to DDP's\n"
    return title + markdown(rows, set(rows[0]) - {"method"})


def site_times(results: NetworkResults, workload: str, groups: list[Group]) -> str:
    """Returns how fast four sites train, and what a loss takes them."""
    lines = {method: results.step(workload, 4, SITE_LINK, method) for method in SITE_METHODS}
    alone, builtin = lines["none"], lines["builtin"]
    if alone is None or builtin is None:
        return ""
    rows: list[Row] = []
    for method, line in lines.items():
        if line is None:
            continue
        step, sent = line["step_seconds"], line["sent_bytes"]
        steps = next((steps_to(SITE_LOSS, group) for group in groups if is_like(group, SITE_RUNS.get(method))), None)
        rows.append(
            {
                "method": method,
                "time of a step": timed(step, builtin["step_seconds"]),
                "samples a second": f"{4 * SAMPLES / step:.1f}",
                "of those without communication": f"{100 * alone['step_seconds'] / step:.1f}%",
                "bytes sent in a step": size(sent),
                "compression ratio": "-" if method == "none" else ratio(ring_bytes(line["parameters"], 4) / sent),
                f"steps to a loss of {SITE_LOSS}": "" if steps is None else f"{steps:.0f}",
                "time to it": "" if steps is None else duration(steps * step),
            }
        )
    title = f"#### {workload}, 4 sites, {SITE_LINK} of round trip\n"
    return title + markdown(rows, set(rows[0]) - {"method"})


def is_like(group: Group, settings: dict[str, object] | None) -> bool:
    """Tells whether runs have these settings, and are of the model of the benchmark of sites."""
    wanted = {"recipe": "shakespeare-transformer"} | (settings or {})
    return settings is not None and all(group.run[key] == value for key, value in wanted.items())


def steps_to(loss: float, group: Group) -> float | None:
    """Returns the steps after which the test loss is reached, between epochs by a straight line."""
    before: tuple[int, float] | None = None
    for step, value in group.history("test_loss"):
        if value <= loss:
            return float(step) if before is None else before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - value)
        before = step, value
    return None


def timed(own: float, builtin: float) -> str:
    """Returns a time, and its ratio to that of DDP."""
    relative = own / builtin
    return f"{seconds(own)} **{relative:.{3 if relative < 0.0995 else 2}f}**"


def duration(value: float) -> str:
    return f"{value / 60:.1f} min"


def door_table(results: dict[tuple[str, str, int], Result]) -> str:
    """Returns the results of the same training by DDP and by HSDP, with the same samples."""
    if not results:
        return "\nNot measured yet.\n\n"
    rows: list[Row] = []
    for door, mode in ((door, mode) for mode in doors.MODES for door in doors.DOORS):
        lines = [results[key] for seed in doors.SEEDS if (key := (door, mode, seed)) in results]
        row = {"by": doors.TITLES[door], "mode": mode, "seeds": str(len(lines))}
        row["test loss"] = measure_of("shakespeare").show([line["test_loss"] for line in lines])
        row["compression ratio"] = ratio(mean([line["ratio"] for line in lines])) if mode == "on" else ""
        rows.append(row)
    return markdown(rows, {"seeds", "compression ratio"})


def front_table(results: dict[tuple[str, str], Result]) -> str:
    """Returns the results of real processes and those of the trainer, with the same samples."""
    if len(results) < len(front.ROWS) * len(front.WAYS):
        return "\nNot measured yet.\n\n"
    rows: list[Row] = []
    for recipe in front.ROWS:
        measure, lines = measure_of(recipe), [results[recipe, way] for way in front.WAYS]
        row = {"row": recipe, "steps": str(lines[0]["step"])}
        row |= {title: measure.show([line[measure.key]]) for title, line in zip(("real processes", "the trainer"), lines)}
        rows.append(row | {"weights": "the same bits" if lines[0]["weights"] == lines[1]["weights"] else "differ"})
    return markdown(rows, {"steps"})


def network_costs(results: NetworkResults, workload: str) -> str:
    """Returns bytes, processor time and memory, which hardly depend on the link."""
    link, builtin = "1gbit", results.peaks.get((workload, "builtin"))
    rows: list[Row] = []
    for learners, method in ((learners, method) for learners in LEARNERS for method in METHODS):
        line, peak = results.step(workload, learners, link, method), results.peaks.get((workload, method))
        if line is None:
            continue
        sent, said = line["sent_bytes"], line["said_bytes"]
        row = {
            "method": method,
            "learners": str(learners),
            "bytes sent, by the interface": size(sent),
            "compression ratio": "-" if method == "none" else ratio(ring_bytes(line["parameters"], learners) / sent),
            "by `stats()`": f"{size(said)} ({100 * (sent / said - 1):+.1f}%)" if said else "",
            "processor time": seconds(line["cpu_seconds"]),
        }
        # Columns of the same name are told apart by a space.
        for name, beyond, key in (
            ("most memory, first steps", "beyond DDP, in models", "peak_bytes"),
            ("later", "beyond DDP, in models ", "later_peak_bytes"),
        ):
            row |= {name: "", beyond: ""}
            if peak and builtin and peak["learners"] == learners:
                row |= {name: size(peak[key]), beyond: f"{(peak[key] - builtin[key]) / (4 * peak['parameters']):+.2f}"}
        rows.append(row)
    if not rows:
        return ""
    title = f"#### {workload}, {link}: what a learner sends, computes and takes in a step\n"
    return title + markdown(rows, set(rows[0]) - {"method"})


def size(value: float) -> str:
    for unit, factor, digits in (("MB", 1e6, 2), ("kB", 1e3, 1)):
        if value >= factor:
            return f"{value / factor:.{digits}f} {unit}"
    return f"{value:.0f} B"


def replaced(text: str, name: str, part: str) -> str:
    """Replaces what is between `<!-- NAME: ... -->` and `<!-- end of NAME -->`."""
    start = text.index(f"<!-- {name}: ")
    begin = text.index("-->\n", start) + len("-->\n")
    end = text.index(f"<!-- end of {name} -->", begin)
    return text[:begin] + part + text[end:]


def made() -> dict[Path, str]:
    """Returns all files that are made of results, with what they must have in them."""
    results, network = read_results(), NetworkResults()
    report = (HERE / "README.md").read_text()
    readme = (ROOT / "README.md").read_text()
    files = {
        HERE / "figures" / "network.svg": network_figure(network),
        ROOT / "docs" / "step-times.svg": step_times_figure(network),
        ROOT / "docs" / "rule.svg": rule_figure(),
    }
    studies = all_studies()
    report = replaced(report, "open", open_runs(studies, results))
    for study in studies:
        groups = groups_of(study, results)
        if study.name == "main":
            part = main_table(groups)
            readme = replaced(readme, "main", short_table(groups))
        else:
            part = f"\n{study.about}\n{study_table(study, groups)}"
        panels = PANELS[study.name](groups) if groups and study.name in PANELS else []
        if panels:
            files[HERE / "figures" / f"{study.name}.svg"] = draw(panels)
            part += f"![Figure of the study {study.name}](figures/{study.name}.svg)\n\n"
        report = replaced(report, study.name, part)
    times = [network_times(network, workload, learners) for workload, learners in network.cases()]
    costs = [network_costs(network, workload) for workload in WORKLOADS]
    report = replaced(report, "network", "\n" + "".join(times + costs))
    nodes = [node_times(network, workload) for workload in dict.fromkeys(workload for workload, _ in NODE_CELLS)]
    report = replaced(report, "nodes", "\n" + "".join(nodes))
    local = next(groups_of(study, results) for study in studies if study.name == "local")
    report = replaced(report, "sites", "\n" + "".join(site_times(network, workload, local) for workload in SITE_WORKLOADS))
    report = replaced(report, "front", front_table(front.results()))
    report = replaced(report, "doors", door_table(doors.results()))
    return files | {HERE / "README.md": report, ROOT / "README.md": readme}


def write() -> None:
    for path, text in made().items():
        path.write_text(text)


def check() -> list[str]:
    """Returns what is wrong: files that are not what the results give, and figures of nothing."""
    files = made()
    wrong = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    texts = [f"{path.relative_to(ROOT)} is not what the results give: run `python -m reproduction report`" for path in wrong]
    unknown = [path for path in (HERE / "figures").glob("*") if path not in files]
    return texts + [f"{path.relative_to(ROOT)} is made by nothing: remove it" for path in unknown]
