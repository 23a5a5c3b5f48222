//! The AVX-512 kernel on machines whose processor has none: in an emulator, so that it is never shipped unrun.

use crate::shell::{Result, cargo, command, install, output, root};

const PACKAGES: [&str; 10] = [
    "bochs",
    "bochs-term",
    "bochsbios",
    "vgabios",
    "isolinux",
    "syslinux-common",
    "xorriso",
    "cpio",
    "gcc",
    "libc6-dev",
];

/// Whether this machine's own tests have run it already.
pub(crate) fn native() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512f");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// Runs the kernel tests in the emulator.
pub(crate) fn emulated() -> Result {
    install("bochs", &PACKAGES)?;
    let test_binary = static_test_binary()?;
    let cache = root().join("target/avx512");
    let script = root().join("xtask/avx512/run.sh");
    let mut run = command("bash", &[]);
    run.arg(script).arg(cache).arg(test_binary);
    run.args(["kernel::", "--skip", "every_length", "--test-threads=1", "--nocapture"]);
    let text = output(&mut run)?;
    print!("{text}");
    // A test that does not find the instructions would pass without using them.
    match text.lines().find(|line| line.contains("kernels: ")) {
        Some(kernels) if kernels.ends_with("avx512") => Ok(()),
        found => Err(format!("the AVX-512 kernel did not run in the emulator: {found:?}")),
    }
}

/// The core crate's unit tests, linked statically: the emulated machine has no libraries.
fn static_test_binary() -> Result<String> {
    let target = "x86_64-unknown-linux-gnu";
    let folder = "target/static";
    let build = ["test", "-p", "adacomp", "--lib", "--no-run", "--message-format=json"];
    let mut build = cargo(&build);
    build.args(["--target", target, "--target-dir", folder]).env("RUSTFLAGS", "-Ctarget-feature=+crt-static");
    let messages = output(&mut build)?;
    let executable = messages.lines().rev().find_map(|line| line.split_once("\"executable\":\""));
    let path = executable.and_then(|(_, rest)| rest.split_once('"')).map(|(path, _)| path.to_owned());
    path.ok_or_else(|| "cargo named no test binary".to_owned())
}
