//! Local steps: learners train alone, and exchange how far their weights have moved.

use crate::checkpoints::write_pictures;
use crate::support::{Folder, files, means, program, run, signal, succeed, tensor_files, watch, write_idx};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

/// However many learners a thread hosts, each has its own weights, and all come to the same shared ones.
#[test]
fn threads_do_not_matter() {
    let folder = Folder::new();
    for settings in [
        "--local-steps 5",
        "--local-steps 5 --optimizer adam --strategy sharded --outer-momentum 0.9 --outer-rate 0.7",
    ] {
        let line = format!("train digits --learners 4 --steps 33 {settings}");
        let checksum = |threads| succeed(folder.path(), &format!("{line} --threads {threads}")).checksum();
        let one = checksum(1);
        assert_eq!([checksum(2), checksum(4)], [one.clone(), one], "{settings}");
    }
}

#[test]
fn every_setting_matters() {
    let folder = Folder::new();
    let run =
        |settings: &str| succeed(folder.path(), &format!("train digits --steps 30 {settings}")).checksum();
    let settings = [
        "",
        "--local-steps 1",
        "--local-steps 3",
        "--local-steps 3 --outer-rate 0.5",
        "--local-steps 3 --outer-momentum 0.5",
        "--local-steps 3 --residual-decay 0.9",
        "--local-steps 3 --optimizer adam",
        "--local-steps 3 --warm-up 10",
        "--residual-decay 0.9",
        "--bin-warm-up 20",
        "--bin-warm-up 30",
        "--warm-up 10 --bin-warm-up 10",
        "--warm-up 10",
        "--local-steps 3 --bin-warm-up 20",
    ];
    let checksums: std::collections::HashSet<_> = settings.map(run).into_iter().collect();
    assert_eq!(checksums.len(), settings.len());
}

/// Moves of plain SGD are its gradients times the learning rate: sent dense, it does what averaging gradients does, but for rounding.
#[test]
fn one_local_step_of_sgd_sent_dense_is_a_step_on_the_average() {
    let folder = Folder::new();
    let losses = |settings: &str| {
        let line = format!(
            "train digits --scheme dense --momentum 0 --learning-rate 0.1 --epochs 2 --json {settings}"
        );
        let lines = succeed(folder.path(), &line).json();
        [lines[1]["test_loss"].as_f64().unwrap(), lines[2]["test_loss"].as_f64().unwrap()]
    };
    let (local, each) = (losses("--local-steps 1"), losses(""));
    for (local, each) in local.into_iter().zip(each) {
        assert!((local - each).abs() < 1e-4, "{local} {each}");
    }
}

/// Bytes are of all steps: with the same frames, ten times fewer.
#[test]
fn ratios_are_against_a_ring_in_every_step() {
    let folder = Folder::new();
    let last = |settings: &str| {
        let lines = succeed(folder.path(), &format!("train digits --steps 40 --json {settings}")).json();
        lines.last().unwrap().clone()
    };
    let ratio = |line: &serde_json::Value, scheme: &str| line[scheme]["compression_ratio"].as_f64().unwrap();
    let dense = last("--scheme dense --local-steps 10");
    assert!((ratio(&dense, "dense") / 10.0 - 1.0).abs() < 0.01, "{dense}");
    let local = last("--local-steps 10 --strategy gather");
    let frames = local["adacomp"]["frame_ratio"]["overall"].as_f64().unwrap();
    // Half a ring goes around where gather sends a frame to each of three others.
    assert!((ratio(&local, "adacomp") / (10.0 * frames * 1.5 / 3.0) - 1.0).abs() < 0.01, "{local}");
    // A last round that is shorter counts its steps.
    let short = last("--scheme dense --local-steps 15");
    assert!((ratio(&short, "dense") / (40.0 / 3.0) - 1.0).abs() < 0.01, "{short}");
}

/// Starts it, and kills it once it has printed this number of lines.
fn kill(folder: &Path, arguments: &str, lines: usize) {
    let mut child = program(folder, arguments).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let _watch = watch(child.id());
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut text = String::new();
    for _ in 0..lines {
        assert_ne!(stdout.read_line(&mut text).unwrap(), 0, "{text}");
    }
    signal(child.id(), "KILL");
    child.wait().unwrap();
}

/// Returns the step of the checkpoint in a run's folder.
fn saved_step(run: &Path) -> u64 {
    let names =
        std::fs::read_dir(run).unwrap().flatten().map(|entry| entry.file_name().into_string().unwrap());
    let steps = names.filter_map(|name| name.strip_prefix("checkpoint-")?.parse().ok());
    steps.max().expect("a checkpoint")
}

#[test]
fn a_run_that_is_killed_between_exchanges_ends_with_the_same_bits() {
    for settings in [
        "digits --local-steps 37",
        "digits --local-steps 37 --optimizer adam --strategy sharded --outer-momentum 0.9 --outer-rate 0.7 --residual-decay 0.9",
        "digits --local-steps 37 --learners 1 --scheme dense",
    ] {
        let folder = Folder::new();
        let uninterrupted =
            succeed(folder.path(), &format!("train {settings} --epochs 10 --out uninterrupted"));
        kill(folder.path(), &format!("train {settings} --epochs 10 --json=steps --out run"), 120);
        let step = saved_step(&folder.path().join("run"));
        // An epoch has 46 steps.
        assert!(step > 0 && !step.is_multiple_of(37) && step < 460, "saved at step {step}");
        let last = succeed(folder.path(), "train --resume run");
        assert_eq!(uninterrupted.checksum(), last.checksum(), "{settings}, from step {step}");
        let saved = |name: &str| tensor_files(&folder.path().join(name));
        assert!(saved("uninterrupted") == saved("run"), "{settings}");
    }
}

/// Running statistics, too, which learners have of their own between exchanges.
#[test]
fn so_does_one_with_batch_norms() {
    let folder = Folder::new();
    write_pictures(&folder);
    let settings = "resnet18 --data pictures --image-folder --learners 2 --minibatch 4 --learning-rate 0.01 --local-steps 3 --steps 8 \
                    --strategy gather";
    let uninterrupted = succeed(folder.path(), &format!("train {settings} --threads 1"));
    // The configuration, an epoch of four steps, and one step more.
    kill(folder.path(), &format!("train {settings} --json=steps --out run"), 1 + 4 + 1 + 1);
    assert_eq!(saved_step(&folder.path().join("run")), 4);
    let of_learners: Vec<_> = files(&folder.path().join("run"))
        .into_iter()
        .filter(|(path, _)| path.to_string_lossy().contains("statistics-"))
        .collect();
    assert!(of_learners.len() == 2 && of_learners[0].1 != of_learners[1].1);
    let last = succeed(folder.path(), "train --resume run --json").json().pop().unwrap();
    assert_eq!(uninterrupted.checksum(), last["weights_checksum"].as_str().unwrap());
    let statistics = means(&folder.path().join("run"), "statistics-");
    let shared = means(&folder.path().join("run"), "weights.safetensors");
    assert!(statistics.iter().all(|(name, values)| shared[name] == *values), "the last step exchanges");
    // Of two learners, each sends a frame and its statistics in each of three exchanges; a ring sends all weights in eight steps.
    let number = |name: &str| last["adacomp"].pointer(name).and_then(serde_json::Value::as_f64).unwrap();
    let sent = number("/bytes_sent");
    let frames = 3.0 * sent * number("/compression_ratio") / 8.0 / number("/frame_ratio/overall");
    let of_statistics = 3 * 4 * statistics.values().map(Vec::len).sum::<usize>();
    assert!((sent - frames - of_statistics as f64).abs() < 1.0, "{sent} {frames} {of_statistics}");
}

/// Residuals, and between exchanges local weights and moments, too.
#[test]
fn another_number_of_learners_conserves_what_all_have() {
    let folder = Folder::new();
    let settings = "digits --local-steps 30 --optimizer adam --strategy gather --minibatch 48 --epochs 20 --schedule constant";
    kill(folder.path(), &format!("train {settings} --json=steps --out run"), 60);
    let (run, step) = (folder.path().join("run"), saved_step(&folder.path().join("run")));
    // An epoch has 31 steps.
    assert!(step > 0 && step % 30 != 0 && step < 620, "saved at step {step}");
    // The one before may not have been removed yet.
    let newest = run.join(format!("checkpoint-{step:08}"));
    let before = ["residuals-", "local-"].map(|what| means(&newest, what));
    assert!(before.iter().all(|means| !means.is_empty()));
    // Nothing is done, so that it is only loaded and saved.
    succeed(folder.path(), &format!("train --resume run --learners 3 --steps {step}"));
    let after = ["residuals-", "local-"].map(|what| means(&run, what));
    for (before, after) in before.iter().zip(&after) {
        for (name, values) in before {
            for (before, after) in values.iter().zip(&after[name]) {
                assert!((before - after).abs() <= 1e-6 * (1.0 + before.abs()), "{name} {before} {after}");
            }
        }
    }
    succeed(folder.path(), "train --resume run --learners 6");
}

#[test]
fn a_gradient_that_is_not_finite_drops_the_round_and_training_goes_on() {
    let folder = Folder::new();
    let line =
        "train digits --local-steps 5 --learning-rate 1e30 --schedule constant --epochs 2 --json --out run";
    let lines = succeed(folder.path(), line).json();
    let dropped: u64 = lines.iter().filter_map(|line| line["dropped_steps"].as_u64()).sum();
    assert_eq!(dropped, 92, "{lines:?}");
    assert!(lines[2]["test_loss"].as_f64().is_some(), "shared weights stay finite: {lines:?}");
    // A hundred steps are enough to give up, but not one long round.
    let ended = run(folder.path(), "train --resume run --epochs 9 --json");
    assert_eq!(ended.code, Some(3), "{}", ended.stderr);
    assert!(ended.stderr.contains("given up at step 192: the last 192 steps"), "{}", ended.stderr);
    succeed(folder.path(), &line.replace("--local-steps 5", "--local-steps 80").replace("run", "long"));
    // The same run can go on, and with a sensible learning rate it learns.
    let lines = succeed(folder.path(), "train --resume run --epochs 6 --learning-rate 0.05 --json").json();
    let error = lines.last().unwrap()["adacomp"]["test_error"].as_f64().unwrap();
    assert!(error < 50.0, "{error}");
}

#[test]
fn whether_steps_are_local_cannot_change() {
    let folder = Folder::new();
    succeed(folder.path(), "train digits --local-steps 5 --steps 5 --out run");
    let ended = run(folder.path(), "train --resume run --steps 10 --local-steps 0");
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("whether it takes local steps cannot change"), "{}", ended.stderr);
    // How many can.
    succeed(folder.path(), "train --resume run --steps 10 --local-steps 3");
}

#[test]
fn schemes_are_compared_with_local_steps() {
    let folder = Folder::new();
    write_idx(&folder, 256, 64);
    let line = "compare mnist-cnn --data idx --learners 4 --minibatch 32 --steps 16 --local-steps 8 --json --out run";
    let lines = succeed(folder.path(), line).json();
    let last = lines.last().unwrap();
    let ratio = |scheme: &str| last[scheme]["compression_ratio"].as_f64().unwrap();
    assert!((ratio("dense") / 8.0 - 1.0).abs() < 0.01 && ratio("adacomp") > 50.0, "{last}");
    let report = std::fs::read_to_string(folder.path().join("run/report.html")).unwrap();
    assert!(report.contains("\"local-steps\":\"8\""));
}
