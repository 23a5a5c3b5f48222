//! Commands that do not train, and the first one that newcomers run.

use crate::support::{Folder, program, run, succeed, watch};
use std::path::Path;
use std::process::Stdio;

#[test]
fn without_a_command_digits_are_compared() {
    let folder = Folder::new();
    let ended = succeed(folder.path(), "");
    let table: Vec<_> = ended.stdout.lines().rev().take(4).collect();
    let row = |scheme: &str| {
        let line =
            table.iter().find(|line| line.starts_with(scheme)).unwrap_or_else(|| panic!("{}", ended.stdout));
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let error = |scheme| row(scheme)[1].trim_end_matches('%').parse::<f64>().unwrap();
    let number = |scheme, column: usize| row(scheme)[column].parse::<f64>().unwrap();
    let [ratio, matrix_frames] = [2, 7].map(|column| number("adacomp", column));
    assert!(error("dense") < 4.0 && error("adacomp") < 4.0, "{}", ended.stdout);
    assert!(matrix_frames > 200.0, "{}", ended.stdout);
    // The ratio that people read first is that of the bytes beside it.
    assert_eq!([row("dense")[4].as_str(), &row("adacomp")[4]], ["MB", "MB"]);
    let bytes = number("dense", 3) / number("adacomp", 3);
    assert!(ratio > 30.0 && (ratio / bytes - 1.0).abs() < 0.02, "{}", ended.stdout);
    assert!(ended.stderr.contains("What to try next"), "{}", ended.stderr);
    let report = std::fs::read_to_string(folder.path().join("runs/compare-digits-1/report.html")).unwrap();
    assert!(report.contains("adacomp") && !report.contains("{{"));
}

#[test]
fn every_command_explains_itself() {
    let folder = Folder::new();
    for (command, mentioned) in [
        ("--help", "adacomp compare mnist-cnn"),
        ("train --help", "Example"),
        ("compare --help", "--schemes"),
        ("data --help", "get"),
        ("recipes --help", "Example"),
        ("data get --help", "Example"),
        ("inspect --help", "checkpoint"),
        ("plan --help", "adacomp plan resnet18 --learners 8"),
        ("recipes", "shakespeare-transformer"),
        ("recipes", "sgd at 0.02 (cosine)"),
        ("data list", "by hand: input.txt"),
        ("data where", "cache"),
        ("data get image-folder", "nothing to fetch"),
    ] {
        let ended = succeed(folder.path(), command);
        assert!(ended.stdout.contains(mentioned), "{command}\n{}", ended.stdout);
    }
}

/// As after `| head`: the work is done all the same.
#[test]
fn nobody_has_to_read_to_the_end() {
    let folder = Folder::new();
    for arguments in ["recipes", "train digits --steps 20 --out run"] {
        let mut child =
            program(folder.path(), arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop((child.stdout.take(), child.stderr.take()));
        let watch = watch(child.id());
        let status = child.wait().unwrap();
        drop(watch);
        assert_eq!(status.code(), Some(0), "{arguments}");
    }
    assert!(succeed(folder.path(), "inspect run").stdout.contains("at step 20"));
}

#[test]
fn frames_and_checkpoints_can_be_looked_into() {
    let folder = Folder::new();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../adacomp/tests/golden");
    let frame =
        |name: &str| succeed(folder.path(), &format!("inspect {}", golden.join(name).display())).stdout;
    let adacomp = frame("adacomp.rice.frame");
    assert!(adacomp.starts_with("frame of learner 7, step 2, codec rice"), "{adacomp}");
    assert!(adacomp.lines().any(|line| line.starts_with('0') && line.contains("selected")), "{adacomp}");
    assert!(frame("half.paper.frame").contains("all, f16"));
    assert!(frame("non-finite.frame").contains("the learner's gradient is not finite"));

    succeed(folder.path(), "train digits --steps 20 --strategy sharded --out run");
    let checkpoint = succeed(folder.path(), "inspect run").stdout;
    for part in [
        "at step 20",
        "strategy        sharded",
        "weights.safetensors",
        "residuals-0003.safetensors",
        "owner-0000",
    ] {
        assert!(checkpoint.contains(part), "{part}\n{checkpoint}");
    }
    let residuals =
        succeed(folder.path(), "inspect run/checkpoint-00000020/residuals-0001.safetensors").stdout;
    assert!(residuals.starts_with("residuals of learner 1 of 4, before step 20"), "{residuals}");
    assert!(residuals.contains("Mlp.layers.0.weight"), "{residuals}");
    let half = br#"{"h":{"dtype":"F16","shape":[1],"data_offsets":[0,2]},"n":{"dtype":"F32","shape":[2],"data_offsets":[2,10]}}"#;
    let values = [&[0, 0x3c][..], &1f32.to_le_bytes(), &f32::NAN.to_le_bytes()].concat();
    folder.write("half", &[&(half.len() as u64).to_le_bytes(), &half[..], &values].concat());
    let tensors = succeed(folder.path(), "inspect half").stdout;
    let rows: Vec<Vec<_>> = tensors.lines().map(|line| line.split_whitespace().collect()).collect();
    for row in [["h", "F16", "[1]", "-", "-"], ["n", "F32", "[2]", "NaN", "NaN"]] {
        assert!(rows.contains(&row.to_vec()), "{tensors}");
    }
    folder.write("rubbish", b"rubbish");
    let ended = run(folder.path(), "inspect rubbish");
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("neither a safetensors file nor a frame"), "{}", ended.stderr);
}

/// A file of others can neither take the memory nor the terminal, and what has no end is not read.
#[test]
fn foreign_files_are_looked_at_with_care() {
    let folder = Folder::new();
    let names = (0..10_000).map(|number| match number {
        0 => "n".repeat(200_000),
        1 => "\u{1b}[2J".to_owned(),
        _ => number.to_string(),
    });
    let tensors: serde_json::Map<_, _> = names
        .map(|name| (name, serde_json::json!({ "dtype": "F32", "shape": [0], "data_offsets": [0, 0] })))
        .collect();
    let header = serde_json::Value::Object(tensors).to_string();
    let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
    folder.write("tensors.safetensors", &file);
    let ended = succeed(folder.path(), "inspect tensors.safetensors");
    assert!(ended.stdout.len() < 3_000_000, "{}", ended.stdout.len());
    assert!(!ended.stdout.contains('\u{1b}') && ended.stdout.contains("\\u{1b}[2J"));
    assert!(std::process::Command::new("mkfifo").arg(folder.path().join("pipe")).status().unwrap().success());
    for path in ["/dev/zero", "pipe"] {
        let ended = run(folder.path(), &format!("inspect {path}"));
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        assert!(ended.stderr.contains("it is not a regular file"), "{}", ended.stderr);
    }
}
