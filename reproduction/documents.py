"""Documents of which parts are made of results: tables between marks, and figures."""

from pathlib import Path

from reproduction import HERE, ROOT
from reproduction.network import NetworkResults
from reproduction.studies import Results, all_studies
from reproduction.tables import main_table, network_tables, short_table, study_table


def replaced(text: str, name: str, part: str) -> str:
    """Replaces what is between `<!-- NAME: ... -->` and `<!-- end of NAME -->`."""
    start = text.index(f"<!-- {name}: ")
    begin = text.index("-->\n", start) + len("-->\n")
    end = text.index(f"<!-- end of {name} -->", begin)
    return text[:begin] + part + text[end:]


def written() -> dict[Path, str]:
    """Returns all files that are made of results, with what they must have in them."""
    # Drawing needs matplotlib, which nothing else here does.
    from reproduction.plots import network_figure, step_times_figure, study_figure

    results, network = Results(), NetworkResults()
    report = (HERE / "README.md").read_text()
    readme = (ROOT / "README.md").read_text()
    files = {}
    for study in all_studies():
        part = main_table(study, results) if study.name == "main" else f"\n{study.about}\n{study_table(study, results)}"
        figure = study_figure(study, results)
        if figure:
            files[HERE / "figures" / f"{study.name}.svg"] = figure
            part += f"![Figure of the study {study.name}](figures/{study.name}.svg)\n\n"
        report = replaced(report, study.name, part)
        if study.name == "main":
            readme = replaced(readme, "main", short_table(study, results))
    report = replaced(report, "network", network_tables(network))
    files[HERE / "figures" / "network.svg"] = network_figure(network)
    files[ROOT / "docs" / "step-times.svg"] = step_times_figure(network)
    return files | {HERE / "README.md": report, ROOT / "README.md": readme}


def write() -> None:
    for path, text in written().items():
        path.write_text(text)


def check() -> list[str]:
    """Returns what is wrong: files that are not what the results give, and figures of nothing."""
    files = written()
    wrong = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    texts = [f"{path.relative_to(ROOT)} is not what the results give: run `python -m reproduction report`" for path in wrong]
    unknown = [path for path in (HERE / "figures").glob("*") if path not in files]
    return texts + [f"{path.relative_to(ROOT)} is made by nothing: remove it" for path in unknown]
