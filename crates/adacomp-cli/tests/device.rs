//! Training on a GPU comes to what training on the processor comes to, but for rounding. A driver that computes on the processor
//! will do.

#![cfg(feature = "wgpu")]

use serde_json::Value;
use std::process::Command;
use tempfile::tempdir;

/// Returns the lines of `--json=steps`.
fn train(arguments: &str) -> Vec<Value> {
    let folder = tempdir().unwrap();
    let mut program = Command::new(env!("CARGO_BIN_EXE_adacomp"));
    let output =
        program.args(arguments.split_whitespace()).arg("--json=steps").current_dir(&folder).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the losses of steps, which come before the line of the epoch.
fn losses(arguments: &str) -> Vec<f64> {
    train(arguments).iter().filter_map(|line| line["loss"].as_f64()).collect()
}

#[test]
fn a_gpu_trains_as_the_processor_does() {
    let run = "train digits --steps 20 --seed 3";
    let (flex, wgpu) = (losses(run), losses(&format!("{run} --device wgpu")));
    assert_eq!((flex.len(), wgpu.len()), (20, 20));
    assert!(flex[0] - flex[19] > 0.1, "{flex:?}");
    for (flex, wgpu) in flex.iter().zip(&wgpu) {
        // Selections can differ by rounding, and then losses do.
        assert!((flex - wgpu).abs() < 1e-3 * flex, "{flex} {wgpu}");
    }
}
