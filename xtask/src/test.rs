//! Everything that must hold, one step after the other; the first that fails ends it.

use crate::shell::{Result, cargo, command, install, output, root, run};
use crate::{avx512, clusters, experiments, fuzz, network, python, release};
use std::time::Instant;

/// All crates with the same features in all steps, because others would have everything built again.
const WORKSPACE: [&str; 4] =
    ["--workspace", "--features", "adacomp-exchange/mpi,adacomp-cli/mpi", "--locked"];

type Step = (&'static str, fn() -> Result);

const STEPS: [Step; 14] = [
    ("format", format),
    ("lints", lints),
    ("tests", tests),
    ("first command", first_command),
    ("browser", browser),
    ("MPI", mpi),
    ("Python", python::test),
    ("clusters", clusters::check),
    ("documentation", documentation),
    ("release", release::check),
    ("memory checks", memory_checks),
    ("AVX-512", avx512_kernel),
    ("fuzzing, briefly", fuzzing),
    ("benchmarks, briefly", benchmarks),
];

pub(crate) fn all() -> Result {
    python::fetch_ahead()?;
    let mut times = Vec::new();
    for (name, step) in STEPS {
        println!("\n== {name}");
        let start = Instant::now();
        if let Err(error) = step() {
            python::stop_fetching();
            return Err(format!("{error}\n\nfailed: {name}"));
        }
        times.push((name, start.elapsed().as_secs()));
    }
    println!();
    times.iter().for_each(|(name, seconds)| println!("{name:<20} {seconds:>4} s"));
    println!("all {} steps passed", times.len());
    Ok(())
}

fn format() -> Result {
    install_component("fmt", "rustfmt")?;
    run(&mut cargo(&["fmt", "--all", "--check"]))?;
    run(&mut cargo(&["fmt", "--manifest-path", "fuzz/Cargo.toml", "--check"]))
}

fn lints() -> Result {
    install_component("clippy", "clippy")?;
    install_mpi()?;
    run(cargo(&["clippy"]).args(WORKSPACE).args(["--all-targets", "--", "-D", "warnings"]))
}

fn install_component(subcommand: &str, component: &str) -> Result {
    match output(&mut cargo(&[subcommand, "--version"])) {
        Ok(_) => Ok(()),
        Err(_) => run(&mut command("rustup", &["component", "add", component])),
    }
}

fn tests() -> Result {
    run(cargo(&["test"]).args(WORKSPACE))
}

fn install_mpi() -> Result {
    install("mpicc", &["openmpi-bin", "libopenmpi-dev", "libclang-dev"])
}

/// Learners in processes of their own, also on two machines that are network namespaces.
fn mpi() -> Result {
    install("ip", &["iproute2"])?;
    // The tests end learners by their process ids.
    install("pgrep", &["procps"])?;
    // The tests run the example, one after the other: they measure time limits, and each starts several processes.
    run(cargo(&["build"]).args(WORKSPACE).args(["--example", "steps"]))?;
    run(cargo(&["test"]).args(WORKSPACE).args(["--test", "mpi", "--", "--ignored", "--test-threads=1"]))
}

/// The report and the results in a real browser.
fn browser() -> Result {
    install("chromium", &["chromium"])?;
    run(cargo(&["test"]).args(WORKSPACE).args(["--test", "browser", "--", "--ignored"]))?;
    experiments::check_in_browser()
}

/// The README's first command, in a folder of its own: a program without MPI.
fn first_command() -> Result {
    let command = ["--release", "--locked", "--manifest-path"];
    let manifest = root().join("Cargo.toml");
    run(cargo(&["build"]).args(command).arg(&manifest))?;
    let folder = root().join("target/first-command");
    let failed = |error| format!("{}: {error}", folder.display());
    if folder.exists() {
        std::fs::remove_dir_all(&folder).map_err(failed)?;
    }
    std::fs::create_dir_all(&folder).map_err(failed)?;
    let start = Instant::now();
    run(cargo(&["run"]).args(command).arg(&manifest).current_dir(&folder))?;
    let seconds = start.elapsed().as_secs();
    if seconds >= 120 {
        return Err(format!("it took {seconds} s, and should take less than two minutes"));
    }
    match folder.join("runs/compare-digits-1/report.html").is_file() {
        true => Ok(()),
        false => Err("it wrote no report".to_owned()),
    }
}

fn documentation() -> Result {
    run(cargo(&["doc"]).args(WORKSPACE).arg("--no-deps").env("RUSTDOCFLAGS", "-D warnings"))?;
    readme_commands()?;
    network::check().and_then(|()| experiments::check())
}

/// Commands of the README that other steps run, each with what it needs.
const RUN_ELSEWHERE: [&str; 4] = [
    "cargo run --release",
    "cargo xtask test",
    "pip install './python[torch]'",
    "torchrun --nproc-per-node 2 python/examples/ddp_mnist.py",
];

/// Runs all others.
fn readme_commands() -> Result {
    let readme = root().join("README.md");
    let text = std::fs::read_to_string(&readme).map_err(|error| format!("{}: {error}", readme.display()))?;
    let shell = text.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next());
    let commands: Vec<&str> = shell.flat_map(str::lines).collect();
    if let Some(missing) = RUN_ELSEWHERE.iter().find(|command| !commands.contains(command)) {
        return Err(format!("the README does not have `{missing}` any more"));
    }
    for line in commands.iter().filter(|command| !RUN_ELSEWHERE.contains(command)) {
        run(&mut command("sh", &["-c", line]))?;
    }
    Ok(())
}

/// The unsafe kernels and the decoder under valgrind.
fn memory_checks() -> Result {
    install("valgrind", &["valgrind"])?;
    let valgrind = "valgrind --quiet --error-exitcode=9 --leak-check=full \
        --show-leak-kinds=definite --errors-for-leak-kinds=definite";
    let mut test = cargo(&["test", "-p", "adacomp", "--lib", "--test", "rules", "--locked", "--"]);
    // All but those that try very many cases.
    test.args(["--skip", "every_length", "--skip", "properties::", "--test-threads=2"]);
    run(test.env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER", valgrind))
}

fn avx512_kernel() -> Result {
    if avx512::native() {
        println!("this processor has AVX-512, so the tests above have run that kernel");
        return Ok(());
    }
    avx512::emulated()
}

fn fuzzing() -> Result {
    fuzz::run("decode", 300_000)?;
    fuzz::run("roundtrip", 50_000)?;
    ["messages", "verdicts", "sums", "state"].into_iter().try_for_each(|target| fuzz::run(target, 50_000))
}

/// That the benchmarks run and say what they promise; their numbers mean nothing in this short form.
fn benchmarks() -> Result {
    for (package, bench, keys) in [
        ("adacomp", "limit", &["op", "kernel", "bin", "len", "ratio_to_limit"][..]),
        ("adacomp", "wire", &["codec", "density", "bytes", "floor_bytes", "ratio_to_floor"]),
        ("adacomp-exchange", "traffic", &["strategy", "learners", "bytes_sent", "bytes_received"]),
    ] {
        let text = output(
            cargo(&["bench", "--locked", "-p", package, "--bench", bench]).args(["--", "--json", "--quick"]),
        )?;
        let lines: Vec<_> = text.lines().filter(|line| line.starts_with('{')).collect();
        let complete = |line: &str| keys.iter().all(|key| line.contains(&format!("\"{key}\": ")));
        if lines.is_empty() || !lines.iter().all(|line| complete(line)) {
            return Err(format!("bench {bench} does not print all of {keys:?}:\n{text}"));
        }
        println!("bench {bench}: {} results", lines.len());
    }
    Ok(())
}
