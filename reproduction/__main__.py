"""Re-makes the paper's claim and this project's numbers.

Needs an environment with the package and requirements.txt: `pip install './python[torch]' -r reproduction/requirements.txt`, or
`target/python`, which `cargo xtask test python` makes. Run it from the folder of the repository.
"""

import argparse
import os
import sys

from reproduction import clusters, documents, doors, faults, front, machines, network, runner
from reproduction.studies import all_studies, read_results


def run(words: list[str]) -> int:
    """Makes what is missing of the chosen runs, then writes the documents."""
    at_once = next((int(word.removeprefix("at-once=")) for word in words if word.startswith("at-once=")), os.cpu_count() or 1)
    words = [word for word in words if not word.startswith("at-once=")]
    studies = all_studies()
    names = [study.name for study in studies]
    chosen_studies = [word for word in words if word in names] or names
    values = {word for word in words if word not in names}
    chosen = [run for study in studies if study.name in chosen_studies for run in study.runs]
    # A run may be part of several studies.
    runs = {run.key: run for run in chosen if values <= set(map(str, run.settings.values()))}
    if not runs:
        print(f"this chooses no run; studies are {', '.join(names)}", file=sys.stderr)
        return 1
    failures = runner.make(list(runs.values()), at_once)
    print("\n".join(failures), file=sys.stderr)
    documents.write()
    return 1 if failures else 0


def list_runs(_: list[str]) -> int:
    results = read_results()
    for study in all_studies():
        missing = [run for run in study.runs if run.key not in results]
        print(f"{study.name}: {len(study.runs) - len(missing)} of {len(study.runs)} runs")
        for run in missing:
            print(f"  missing: {run.name}")
    return 0


def report(_: list[str]) -> int:
    documents.write()
    return 0


def check(_: list[str]) -> int:
    wrong = documents.check()
    print("\n".join(wrong) if wrong else "documents are what the results give")
    return 1 if wrong else 0


def bench_network(words: list[str]) -> int:
    network.read_words(words)
    status = machines.run_inside(["network", *words], lambda: network.bench(words))
    if not status:
        documents.write()
    return status


def try_doors(_: list[str]) -> int:
    front.make()
    doors.make()
    documents.write()
    return 0


def check_clusters(_: list[str]) -> int:
    return machines.run_inside(["clusters"], clusters.check)


def try_faults(_: list[str]) -> int:
    return machines.run_inside(["faults"], faults.check)


CHOICE = "studies and values of settings to choose, as `main mnist-cnn adam`; `at-once=1` for one run at a time"
MEASURED = "what to measure, as `mlp 2 1gbit` or `memory`; with methods (`gather none`) results are printed only"
COMMANDS = {
    "run": (run, "make what is missing of the studies, one run a core, going on where it stopped", CHOICE),
    "list": (list_runs, "show what is missing", None),
    "report": (report, "write tables and figures", None),
    "check": (check, "tell whether tables and figures are what the results give", None),
    "network": (bench_network, "measure step times over links of several speeds; as root", MEASURED),
    "doors": (try_doors, "train in real processes as users do, by DDP and by HSDP, beside the trainer of the studies", None),
    "clusters": (check_clusters, "try docs/clusters.md on two machines that are network namespaces; as root", None),
    "faults": (try_faults, "try links that fail, between three such machines; as root", None),
}


def main() -> int:
    parser = argparse.ArgumentParser("python -m reproduction", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, (_, about, words) in COMMANDS.items():
        command = commands.add_parser(name, help=about)
        if words:
            command.add_argument("words", nargs="*", metavar="WORD", help=words)
    options = parser.parse_args()
    return COMMANDS[options.command][0](getattr(options, "words", []))


if __name__ == "__main__":
    sys.exit(main())
