"""Re-makes the paper's claim and this project's numbers.

Needs an environment with the package and requirements.txt: `pip install './python[torch]' -r reproduction/requirements.txt`, or
`target/python`, which `cargo xtask test python` makes. Run it from the folder of the repository.
"""

import argparse
import sys

from reproduction import documents, machines, network
from reproduction.studies import Results, all_studies


def make_runs(words: list[str]) -> int:
    """Makes what is missing of the chosen runs, then writes the documents."""
    from reproduction import runner

    studies = all_studies()
    names = [study.name for study in studies]
    chosen_studies = [word for word in words if word in names] or names
    values = [word for word in words if word not in names]
    chosen = [run for study in studies if study.name in chosen_studies for run in study.runs]
    # A run may be part of several studies.
    runs = {run.key: run for run in chosen if all(run.has(value) for value in values)}
    if not runs:
        print(f"this chooses no run; studies are {', '.join(names)}", file=sys.stderr)
        return 1
    failures = runner.make(list(runs.values()))
    print("\n".join(failures), file=sys.stderr)
    documents.write()
    return 1 if failures else 0


def list_runs() -> int:
    results = Results()
    for study in all_studies():
        missing = [run for run in study.runs if results.get(run) is None]
        print(f"{study.name}: {len(study.runs) - len(missing)} of {len(study.runs)} runs")
        for run in missing:
            print(f"  missing: {run.name}")
    return 0


def write_documents() -> int:
    documents.write()
    return 0


def check_documents() -> int:
    wrong = documents.check()
    print("\n".join(wrong) if wrong else "documents are what the results give")
    return 1 if wrong else 0


def bench_network(words: list[str]) -> int:
    wanted = network.read_words(words)
    if not machines.is_inside():
        status = machines.run_inside(["network", *words])
        if not status:
            documents.write()
        return status
    machines.set_up()
    network.bench(wanted)
    return 0


def check_clusters() -> int:
    from reproduction import clusters

    if not machines.is_inside():
        return machines.run_inside(["clusters"])
    machines.set_up()
    clusters.check()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser("python -m reproduction", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="make what is missing of the studies, one run a core, going on where it stopped")
    run.add_argument(
        "words", nargs="*", metavar="WORD", help="studies and values of settings to choose, as `main mnist-cnn adam`"
    )
    run.set_defaults(act=lambda options: make_runs(options.words))
    commands.add_parser("list", help="show what is missing").set_defaults(act=lambda _: list_runs())
    commands.add_parser("report", help="write tables and figures").set_defaults(act=lambda _: write_documents())
    check = commands.add_parser("check", help="tell whether tables and figures are what the results give")
    check.set_defaults(act=lambda _: check_documents())
    bench = commands.add_parser("network", help="measure step times over links of several speeds; as root")
    words = "what to measure, as `mlp 2 1gbit` or `memory`; with methods (`gather none`) results are printed only"
    bench.add_argument("words", nargs="*", metavar="WORD", help=words)
    bench.set_defaults(act=lambda options: bench_network(options.words))
    clusters = commands.add_parser("clusters", help="try docs/clusters.md on two machines that are network namespaces; as root")
    clusters.set_defaults(act=lambda _: check_clusters())
    options = parser.parse_args()
    status: int = options.act(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
