//! The project's one test command, and what needs set-up.

mod avx512;
mod chart;
mod clusters;
mod document;
mod experiments;
mod fuzz;
mod machines;
mod network;
mod python;
mod release;
mod shell;
mod test;

use std::process::ExitCode;

const HELP: &str = "\
cargo xtask COMMAND

  test                    everything that must hold: the one test command
  bench network [WORDS]   step times over links of several speeds, as root; WORDS such as `mlp 2 1gbit` or `memory` choose;
                          with methods (`gather none`) it prints only, and `report` writes the document anew
  experiments [WORDS]     makes what is missing of the studies in experiments/, a run a core, going on where it stopped, and
                          writes the documents; WORDS such as `main mnist-cnn adam` choose; `list` says what is missing, `report`
                          only writes, `--check` says whether the documents are what the results give, and `browser` whether
                          Chromium draws the page of figures
  fuzz TARGET [RUNS]      fuzz one target (decode, roundtrip, messages, verdicts, sums or state), 10000000 runs by
                          default
  python                  the Python package alone: style, source distribution, wheel, tests
  clusters                what docs/clusters.md says, on two machines that are network namespaces, as root
  release                 licences of the crates that are depended on, and our own as packages
  avx512                  the kernel tests on an emulated processor with AVX-512";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["test"] => test::all(),
        ["bench", "network", ref only @ ..] => network::bench(only),
        ["fuzz", target] => fuzz::run(target, 10_000_000),
        ["fuzz", target, runs] => match runs.parse() {
            Ok(runs) => fuzz::run(target, runs),
            Err(_) => Err(format!("`{runs}` is not a number of runs\n\n{HELP}")),
        },
        ["experiments", "list"] => experiments::list(),
        ["experiments", "report"] => experiments::report(),
        ["experiments", "--check"] => experiments::check(),
        ["experiments", "browser"] => experiments::check_in_browser(),
        ["experiments", ref studies @ ..] => experiments::run(studies),
        ["clusters"] => clusters::check(),
        ["python"] => python::test(),
        ["release"] => release::check(),
        ["avx512"] => avx512::emulated(),
        ["help" | "--help" | "-h"] => {
            println!("{HELP}");
            Ok(())
        }
        _ => Err(HELP.to_owned()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
