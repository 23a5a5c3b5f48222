"""Results as figures: SVG with a transparent background and grey text, to be read on light and on dark pages."""

import io
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import matplotlib
import matplotlib.style
import numpy
from adacomp.research import Compressor, Frame, Layout
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from reproduction import HERE
from reproduction.network import METHODS, NetworkResults
from reproduction.studies import CODES, Group, Run, measure_of, ring_bytes

GREY, FAINT = "#7d8590", "#7d859040"
# Told apart also without colour vision, on white and on black.
COLORS = ["#8a8f98", "#2f81f7", "#d9603b", "#2da44e", "#bf8700", "#a371f7"]
DASHES = ["-", "--", ":"]
ADACOMP = "#2f81f7"

matplotlib.style.use(HERE / "plots.mplstyle")

TITLES = {
    "test_error": "test error, %",
    "test_loss": "test loss",
    "train_loss": "training loss",
    "residual_norm": "norm of residuals",
}

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One coordinate system with its lines, by name."""

    title: str
    lines: dict[str, Points]
    x: str = "steps"
    log_x: bool = False
    log_y: bool = True
    # Where ticks of a logarithmic axis of a few values are.
    x_ticks: Sequence[float] = ()


def svg(figure: Figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def subplots(rows: int, columns: int, cell: tuple[float, float], foot: float, left: float = 0.6) -> tuple[Figure, list[Axes]]:
    """Makes cells of this size, in inches, above a foot for the legend. All places are fixed, so that files are the same."""
    width, height = left - 0.6 + columns * cell[0], rows * cell[1] + foot
    figure = Figure(figsize=(width, height))
    axes_height = cell[1] - 0.95
    figure.subplots_adjust(
        left=left / width,
        right=1 - 0.15 / width,
        bottom=(foot + 0.5) / height,
        top=1 - 0.45 / height,
        wspace=0.75 / (cell[0] - 0.75),
        hspace=0.95 / axes_height,
    )
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def draw(panels: list[Panel]) -> str:
    """Draws panels in rows of two or three; lines of the same name look the same in all of them."""
    columns = 1 if len(panels) == 1 else 2 if len(panels) % 3 else 3
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    # Long names do not fit beside each other under one panel.
    names_in_row = 1 if columns == 1 and max(map(len, names)) > 24 else max(2, columns)
    foot = 0.2 * math.ceil(len(names) / names_in_row) + 0.1
    figure, grid = subplots(math.ceil(len(panels) / columns), columns, (3.2, 2.6), foot)
    for axes, panel in zip(grid, panels):
        fill(axes, panel, names)
    for axes in grid[len(panels) :]:
        axes.remove()
    handles = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    figure.legend([handles[name] for name in names], names, loc="lower center", ncols=names_in_row, fontsize=8.5)
    return svg(figure)


def fill(axes: Axes, panel: Panel, names: list[str]) -> None:
    for name, points in panel.lines.items():
        number = names.index(name)
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=name,
            color=COLORS[number % len(COLORS)],
            linestyle=DASHES[number // len(COLORS)],
            marker="o" if len(points) <= 12 else None,
        )
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_xscale("log" if panel.log_x else "linear")
    axes.set_yscale("log" if panel.log_y else "linear")
    for axis, logarithmic in ((axes.xaxis, panel.log_x), (axes.yaxis, panel.log_y)):
        if logarithmic:
            low, high = axis.get_data_interval()
            decades = math.log10(high / low) if low > 0 else 1.0
            axis.set_major_locator(LogLocator(subs=(1.0,) if decades > 2 else (1.0, 2.0, 5.0)))
            if decades < 0.5:
                axis.set_major_locator(MaxNLocator(4))
            axis.set_minor_locator(NullLocator())
            axis.set_minor_formatter(NullFormatter())
        else:
            axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    if panel.x_ticks:
        axes.set_xticks(list(panel.x_ticks))


def short(value: float) -> str:
    """Returns a number as people write it."""
    for limit, factor, unit in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / factor:g}{unit}"
    return f"{value:.4g}"


def two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def name_of(group: Group, settings: Sequence[str]) -> str:
    others = [f"{key} {group.run[key]}" for key in settings if group.run[key] is not None]
    return ", ".join([group.run["scheme"], *others])


def histories(groups: list[Group], title: str, measures: Sequence[str] = (), settings: Sequence[str] = ()) -> list[Panel]:
    """Returns what epochs ended with: a panel for each measure and each title that the runs' settings give, a line for each
    group, named by its scheme and these settings. Without measures it is what the model is judged by."""
    panels: dict[str, Panel] = {}
    for group in groups:
        for measure in measures or [measure_of(group.run["recipe"]).key]:
            epochs = [(step, value) for step, value in group.history(measure) if value > 0]
            if epochs:
                full_title = title.format_map(group.run.settings) + TITLES[measure]
                panels.setdefault(full_title, Panel(full_title, {})).lines[name_of(group, settings)] = epochs
    return list(panels.values())


def lines(groups: list[Group], x: str, value: Callable[[Group], float | None], by: str = "scheme") -> dict[str, Points]:
    """Returns a value over a setting, a line for each value of another setting."""
    found: dict[str, list[tuple[float, float]]] = {}
    for group in groups:
        y = value(group)
        if group.run[x] is not None and y is not None:
            found.setdefault(group.run[by], []).append((float(group.run[x]), y))
    return {name: sorted(points) for name, points in found.items()}


def error(group: Group) -> float | None:
    return group.mean("test_error")


def received(group: Group) -> float | None:
    return group.mean("bytes_received") or None


def sweep(groups: list[Group], setting: str, label: str, ratios: dict[str, tuple[str, str]], of: str = "") -> list[Panel]:
    """Returns the errors and the frame ratios over a setting; `ratios` has the code and the kind of layers of each line."""
    errors, frame_ratios = lines(groups, setting, error), {}
    for name, (code, kind) in ratios.items():
        frame_ratios[name] = lines(groups, setting, partial(Group.frame_ratio, code=code, kind=kind))["adacomp"]
    ticks = [x for x, _ in errors["adacomp"]]
    log_x, log_y = is_wide(ticks), is_wide([y for line in errors.values() for _, y in line])
    return [
        Panel("test error, %", errors, label, log_x, log_y, ticks),
        Panel(f"frame ratio{of}", frame_ratios, label, log_x, True, ticks),
    ]


def is_wide(values: list[float]) -> bool:
    """Tells whether values need a logarithmic axis."""
    return max(values) > 10 * min(values)


def codes(kind: str) -> dict[str, tuple[str, str]]:
    return {code: (code, kind) for code in CODES}


def learners(groups: list[Group]) -> list[Panel]:
    dense = next(group for group in groups if group.run["scheme"] == "dense")
    numbers = sorted({group.run["learners"] for group in groups})
    elements = dense.mean("parameters") or 0.0
    errors: dict[str, Points] = {"dense": [(number, error(dense) or 0.0) for number in (numbers[0], numbers[-1])]}
    bytes_: dict[str, Points] = {"dense": [(number, ring_bytes(elements, number)) for number in numbers if number > 1]}
    compressed = [group for group in groups if group is not dense]
    errors |= lines(compressed, "learners", error, "strategy")
    bytes_ |= lines(compressed, "learners", received, "strategy")
    return [
        Panel("test error, %", errors, "learners", True, False, numbers),
        Panel("bytes received in a step", bytes_, "learners", True, True, numbers[1:]),
    ]


def bins(groups: list[Group]) -> list[Panel]:
    conv = [group for group in groups if group.run["matrix-bin"] == 500]
    matrix = [group for group in groups if group.run["conv-bin"] == 50]
    panels = sweep(conv, "conv-bin", "elements of a bin, convolutions", codes("conv"), ", conv")
    return panels + sweep(matrix, "matrix-bin", "elements of a bin, matrices", codes("matrix"), ", matrix")


def flat(groups: list[Group]) -> list[Panel]:
    """Returns errors over steps, and over bytes."""
    settings = ("strategy", "owner-divisor")
    prices: dict[str, Points] = {}
    for group in groups:
        ring = ring_bytes(group.mean("parameters") or 0.0, group.run["learners"])
        prices[name_of(group, settings)] = [(received(group) or ring, error(group) or 0.0)]
    price = Panel("test error, %, over bytes", prices, "bytes received in a step", True, False)
    return [*histories(groups, "", ["test_error"], settings), price]


# Schemes that are not this project's.
OTHERS = {"powersgd", "dgc", "1-bit-adam", "demo", "top-k", "local-selection", "sparseloco"}


def scheme_name(group: Group) -> str:
    """Returns the scheme, what is special about its run, and the bins of local steps, of which a line goes over their number."""
    steps, matrix_bin = group.run["local-steps"], group.run["matrix-bin"]
    words = [group.run["scheme"]] + ["recipe"] * bool(group.run["bin-warm-up"]) + ["local steps"] * bool(steps)
    words += [f"bins of {matrix_bin}"] * bool(steps and matrix_bin) + ["outer momentum"] * bool(group.run["outer-momentum"])
    words += ["overlap"] * bool(group.run["delay"]) + ["decay"] * bool(steps and group.run["residual-decay"] and matrix_bin)
    return ", ".join(words)


def prices(groups: list[Group]) -> list[Panel]:
    """Returns what models are judged by, over bytes: a panel for each model with results of others' schemes, a line for each
    scheme. Of several learning rates it is the best."""
    found: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for group in groups:
        recipe, name = group.run["recipe"], scheme_name(group)
        sent = group.mean("bytes_sent") or ring_bytes(group.mean("parameters") or 0.0, group.run["learners"])
        value = group.mean(measure_of(recipe).key)
        if value is not None:
            points = found.setdefault((recipe, name), {})
            like = Run(group.run.without("seed", "learning-rate")).key
            points[like] = min(points.get(like, (sent, value)), (sent, value), key=lambda point: point[1])
    panels: dict[str, Panel] = {}
    for (recipe, name), points in found.items():
        title = f"{recipe}\n{TITLES[measure_of(recipe).key]}"
        panel = panels.setdefault(recipe, Panel(title, {}, "bytes sent in a step", True, False))
        panel.lines[name] = sorted(points.values())
    return [panel for panel in panels.values() if {name.split(",")[0] for name in panel.lines} & OTHERS]


def adam(groups: list[Group]) -> list[Panel]:
    return histories(groups, "learning rate {learning-rate}\n", ["test_loss"], ("compress", "second-moment", "matrix-bin"))


KINDS = {"all": ("rice", "overall"), "conv": ("rice", "conv"), "matrix": ("rice", "matrix")}
OUTLIERS = ("outlier-step", "local-clip", "scale")
THRESHOLD = "factor of the soft threshold"
PANELS: dict[str, Callable[[list[Group]], list[Panel]]] = {
    "adam": adam,
    "bins": bins,
    "flat": flat,
    "learners": learners,
    "local": prices,
    "main": lambda groups: histories(groups, "{recipe}, {optimizer}\n"),
    "minibatch": lambda groups: sweep(groups, "minibatch", "samples of a minibatch", KINDS),
    "outliers": lambda groups: histories(groups, "", ["test_error", "residual_norm"], OUTLIERS),
    "peers": prices,
    "schemes": lambda groups: histories(groups, "", ["test_loss", "residual_norm"]),
    "threshold": lambda groups: sweep(groups, "soft-threshold", THRESHOLD, codes("overall")),
    "traces": lambda groups: histories(groups, "{recipe}, {side}x{side}\n", ["train_loss"]),
    "transformer": adam,
}

MARKERS = {"unshaped": "o", "10gbit": "s", "1gbit": "D", "100mbit": "^", "10mbit": "v"}
SPEEDS = {"unshaped": "no limit", "10gbit": "10 Gbit/s", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s", "10mbit": "10 Mbit/s"}


def network_figure(results: NetworkResults) -> str:
    """Draws step times relative to DDP's, a panel for each workload and number of learners, a dot for each method."""
    cases = results.cases()
    methods = [method for method in METHODS if method != "builtin"]
    colors = {"gather": ADACOMP, "reduce": "#54aeff", "sharded": "#80ccff", "auto": "#0a5fd6"}
    figure, grid = subplots(math.ceil(len(cases) / 2), 2, (3.8, 3.0), 0.25, left=1.0)
    for at, (axes, (workload, number)) in enumerate(zip(grid, cases)):
        links = results.links(workload, number)
        for row, method in enumerate(reversed(methods)):
            values = [results.relative(workload, number, link, method) or math.nan for link in links]
            axes.plot(values, [row] * len(values), color=FAINT, linewidth=1.0)
            for link, value in zip(links, values):
                axes.plot(value, row, MARKERS[link], color=colors.get(method, GREY), markersize=5, linestyle="none")
        axes.set_xscale("log")
        axes.set_xlim(0.0004, 3)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.axvline(1.0, color=GREY, linewidth=1.0)
        axes.set_yticks(range(len(methods)), list(reversed(methods)) if at % 2 == 0 else [""] * len(methods))
        axes.set_title(f"{workload}, {number} learners")
        axes.set_xlabel("step time, DDP = 1")
        axes.grid(axis="x", color=FAINT, linewidth=0.6)
    handles = [
        figure.axes[0].plot([], [], marker, color=GREY, label=SPEEDS[link])[0]
        for link, marker in MARKERS.items()
        if any(link in results.links(*case) for case in cases)
    ]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles))
    return svg(figure)


def step_times_figure(results: NetworkResults) -> str:
    """Draws how many times faster steps are than DDP's on slow links, for the README."""
    methods = {"builtin": "DDP", "top-k": "top-k, 0.1%", "powersgd-1": "PowerSGD, rank 1", "auto": "AdaComp"}
    with matplotlib.rc_context({"font.size": 10.5, "axes.titlesize": 12.0}):
        figure = Figure(figsize=(8.6, 2.5))
        figure.subplots_adjust(left=0.175, right=0.995, bottom=0.16, top=0.88, wspace=0.08)
        for axes, link in zip(figure.subplots(1, 3, sharey=True), ["10gbit", "1gbit", "100mbit"]):
            times = [results.steps["mlp", 2, link, method]["step_seconds"] for method in methods]
            faster = [times[0] / time for time in times]
            bars = axes.barh(list(methods.values()), faster, color=[GREY, "#bf8700", "#d9603b", ADACOMP], height=0.72)
            labels = [f"{two_digits(ratio)}x  ({seconds(time)})" for ratio, time in zip(faster, times)]
            axes.bar_label(bars, labels, padding=3)
            axes.set_xlim(0, max(faster) * 1.75)
            axes.set_title(SPEEDS[link], loc="left")
            axes.xaxis.set_visible(False)
            axes.spines["bottom"].set_visible(False)
            axes.tick_params(axis="y", length=0)
        about = "Speed of a training step relative to DDP (one scale a link): 25 million parameters, 2 learners"
        figure.text(0.5, 0.03, about, ha="center")
        return svg(figure)


def rule_figure() -> str:
    """Draws what becomes of a gradient: three short bins in one step, after some others, by the library itself."""
    length, bins = 20, 3
    layout = Layout([("w", (bins, length), None)], matrix=length, min_elements=1)
    learner, source = Compressor(layout), random.Random(3)
    # Each has a part that stays, and one that is noise.
    steady = [source.uniform(-0.15, 0.15) for _ in range(bins * length)]
    for step in range(20):
        residual = numpy.zeros(bins * length, "f") if step == 0 else learner.residual("w")
        gradient = numpy.array([part + source.uniform(-0.1, 0.1) for part in steady], "f")
        learner.compress({"w": gradient})
        frame = learner.encode(0, step)
        learner.commit()
    selected, sent = Frame(frame, layout).packets()["w"]
    total, at = residual + gradient, numpy.arange(bins * length)
    soft, limits = total + gradient, numpy.abs(total).reshape(bins, length).max(1)
    waits, limit, step_ = "#bf8700", "#d9603b", GREY
    figure = Figure(figsize=(8.6, 5.4))
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.05, top=0.87, hspace=0.32)
    first, second, third = rows = figure.subplots(3, 1, sharex=True, sharey=True)
    first.set_title("1. Add the gradient to what waits. Select where G + dW reaches the largest |G| of the bin.", loc="left")
    first.bar(at, residual, color=waits, width=0.7, label="R: what waits")
    first.bar(at, gradient, bottom=residual, color=step_, width=0.3, label="dW: the gradient; G = R + dW")
    first.plot(at, soft, "o", color=ADACOMP, markersize=4, fillstyle="none", label="G + dW")
    first.plot(selected, soft[selected], "o", color=ADACOMP, markersize=6, label="G + dW, selected")
    edges = [(number * length - 0.4, (number + 1) * length - 0.6) for number in range(bins)]
    for (left, right), most in zip(edges, limits):
        first.hlines([most, -most], left, right, color=limit, linewidth=1.2)
    first.plot([], [], color=limit, linewidth=1.2, label="largest |G| of the bin")
    figure.legend(*first.get_legend_handles_labels(), ncols=5, loc="upper center", fontsize=9)
    about = f"{len(selected)} of {len(at)} elements here"
    second.set_title(f"2. Send their places and signs, and one scale, the mean of the limits: {about}.", loc="left")
    second.bar(selected, sent, color=ADACOMP, width=0.7)
    third.set_title("3. Subtract what was sent, and keep the rest for the next step: nothing is lost.", loc="left")
    third.bar(at, learner.residual("w"), color=waits, width=0.7)
    for axes in rows:
        axes.set_ylim(*(1.15 * sign * abs(soft).max() for sign in (-1, 1)))
        axes.axhline(0.0, color=FAINT, linewidth=0.8)
        for left, _ in edges[1:]:
            axes.axvline(left - 0.1, color=FAINT, linewidth=1.0, linestyle="--")
        axes.set_xticks([sum(edge) / 2 for edge in edges], [f"bin {number}" for number in range(1, bins + 1)])
        axes.tick_params(length=0)
        axes.set_yticks([])
        for side in axes.spines.values():
            side.set_visible(False)
    return svg(figure)
