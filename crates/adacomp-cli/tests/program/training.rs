//! What results depend on, and what not.

use crate::support::{Folder, files, run, succeed, write_idx};

#[test]
fn results_do_not_depend_on_threads() {
    let folder = Folder::new();
    for strategy in ["gather", "reduce", "sharded"] {
        let run = |threads| {
            let line =
                format!("train digits --learners 8 --steps 60 --strategy {strategy} --threads {threads}");
            succeed(folder.path(), &line).checksum()
        };
        let checksum = run(1);
        assert_eq!(checksum, run(2), "{strategy}");
        assert_eq!(checksum, run(8), "{strategy}");
    }
}

#[test]
fn results_depend_on_seed_scheme_and_settings() {
    let folder = Folder::new();
    let run =
        |arguments: &str| succeed(folder.path(), &format!("train digits --steps 30 {arguments}")).checksum();
    let settings = [
        "",
        "--seed 2",
        "--scheme dense",
        "--scheme local-selection",
        "--scheme top-k",
        "--scheme f16",
        "--strategy gather",
        "--strategy sharded",
        "--matrix-bin 50",
        "--soft-threshold 3",
        "--optimizer adam --learning-rate 0.001",
        "--weight-decay 0.1",
        "--clip 0.1",
        "--warm-up 10",
        "--schedule constant",
        "--momentum 0.5",
        "--minibatch 64",
        "--learners 2",
        "--learner-clip 1",
        "--scheme top-k --top-percent 1",
        "--matrix-bin 50 --scale clamped",
        "--scheme local-selection --matrix-bin 20",
        "--scheme local-selection --matrix-bin 20 --scale clamped",
    ];
    let checksums: std::collections::HashSet<_> = settings.map(run).into_iter().collect();
    assert_eq!(checksums.len(), settings.len());
    let gather = |codec: &str| run(&format!("--strategy gather --codec {codec}"));
    assert_eq!(gather("paper"), gather("rice"), "codecs carry the same");
    assert_eq!(run("--strategy reduce"), run("--strategy auto"), "four learners");
    assert_eq!(run("--warm-up 30"), run("--warm-up 1000"));
}

/// With nothing compressed, learners only share the work: what they come to together is what one comes to alone, but for
/// rounding.
#[test]
fn dense_learners_do_what_one_learner_does() {
    let folder = Folder::new();
    let last = |learners| {
        let line = format!("train digits --scheme dense --epochs 2 --learners {learners} --json");
        let lines = succeed(folder.path(), &line).json();
        (lines[2]["train_loss"].as_f64().unwrap(), lines[2]["test_loss"].as_f64().unwrap())
    };
    let (alone, together) = (last(1), last(8));
    assert!(
        (alone.0 - together.0).abs() < 1e-4 && (alone.1 - together.1).abs() < 1e-4,
        "{alone:?} {together:?}"
    );
}

#[test]
fn as_many_learners_as_are_allowed() {
    let folder = Folder::new();
    let line = "train digits --learners 1024 --minibatch 1024 --steps 2 --strategy sharded --test-samples 50 --out run";
    succeed(folder.path(), line);
}

/// Losses of the first ten steps, pinned: a change of data order, initial weights, models, compression or optimiser shows
/// here. Processors round differently, so they are compared to four digits.
#[test]
fn ten_steps_are_what_they_always_were() {
    let folder = Folder::new();
    let ended = succeed(folder.path(), "train digits --steps 10 --strategy gather --json=steps");
    let losses: Vec<f64> = ended.json().iter().filter_map(|line| line["loss"].as_f64()).collect();
    let pinned = [2.32785, 2.36239, 2.32099, 2.32035, 2.28419, 2.30855, 2.29637, 2.32435, 2.24731, 2.26960];
    assert_eq!(losses.len(), pinned.len());
    for (loss, pinned) in losses.iter().zip(pinned) {
        assert!((loss - pinned).abs() < 1e-4, "{losses:?}");
    }
}

#[test]
fn json_lines_are_complete() {
    let folder = Folder::new();
    write_idx(&folder, 512, 128);
    let line = "compare mnist-cnn --data idx --learners 8 --epochs 2 --schemes dense,adacomp,top-k,f16 --json --out run";
    let lines = succeed(folder.path(), line).json();
    assert_eq!(lines[0]["configuration"]["learners"], 8);
    assert_eq!(lines.len(), 1 + 4 * 2 + 1);
    let last = lines.last().unwrap();
    assert_eq!(last["recipe"], "mnist-cnn");
    for scheme in ["dense", "adacomp", "top-k", "f16"] {
        for number in ["test_error", "bytes_sent", "seconds"] {
            assert!(last[scheme][number].is_f64(), "{scheme} {number} {last}");
        }
        for kind in ["overall", "conv", "matrix"] {
            assert!(last[scheme]["frame_ratio"][kind].as_f64().unwrap() > 0.9, "{scheme} {kind} {last}");
        }
    }
    let frames = |scheme: &str| last[scheme]["frame_ratio"]["overall"].as_f64().unwrap();
    assert!((frames("dense") - 1.0).abs() < 0.01 && (frames("f16") - 2.0).abs() < 0.01, "{last}");
    assert!(frames("adacomp") > 10.0 && frames("top-k") > 10.0, "{last}");
    // A dense exchange of n weights sends 2 (N - 1) / N * 4 n bytes.
    let weights = (800 + 32 + 51_200 + 64 + 131_072 + 128 + 1_280 + 10) as f64;
    let expected = 2.0 * 7.0 / 8.0 * 4.0 * weights * 8.0;
    let sent = last["dense"]["bytes_sent"].as_f64().unwrap();
    assert!((sent / expected - 1.0).abs() < 0.01, "{sent} {expected}");
    // The headline is what can be checked by hand: the bytes of that ring over the bytes sent.
    for scheme in ["dense", "adacomp", "top-k", "f16"] {
        let number = |name: &str| last[scheme][name].as_f64().unwrap();
        let by_hand = expected / number("bytes_sent");
        assert!((number("compression_ratio") / by_hand - 1.0).abs() < 1e-9, "{scheme} {last}");
    }
}

/// Gradients that are not finite are dropped and counted, and training goes on.
#[test]
fn a_diverging_run_ends_and_can_be_resumed() {
    let folder = Folder::new();
    let line = "train digits --learning-rate 1e30 --schedule constant --epochs 2 --json --out run";
    let lines = succeed(folder.path(), line).json();
    assert!(lines.iter().any(|line| line["dropped_steps"].as_u64() > Some(0)), "{lines:?}");
    // Of steps whose loss is finite there is a mean.
    assert!(lines[1]["dropped_steps"].as_u64() > Some(0) && lines[1]["train_loss"].is_f64(), "{lines:?}");
    succeed(folder.path(), "train --resume run --epochs 3 --json");
}

#[test]
fn weights_that_are_not_finite_are_never_saved() {
    let folder = Folder::new();
    let ended =
        run(folder.path(), "train digits --steps 1 --learning-rate 1e30 --weight-decay 1e30 --out run");
    assert_eq!(ended.code, Some(3), "{}", ended.stderr);
    assert!(ended.stderr.contains("are not finite after 1 steps; nothing is saved"), "{}", ended.stderr);
    assert!(!ended.stderr.contains("saved in") && files(&folder.path().join("run")).is_empty());
}

/// Nothing is compressed by not being sent.
#[test]
fn dropped_steps_do_not_count_as_compressed() {
    let folder = Folder::new();
    let line = "train digits --scheme dense --learning-rate 1e30 --schedule constant --epochs 2 --json";
    let ended = succeed(folder.path(), line);
    let lines = ended.json();
    let ratio = |line: usize, name: &str| lines[line]["total"][name].as_f64().unwrap();
    assert!((ratio(2, "compression_ratio") - 1.0).abs() < 0.01, "{lines:?}");
    assert_eq!(lines[2]["dropped_steps"], 46);
    assert!(lines[2]["compression_ratio"].is_null() && lines[2]["frame_ratio"]["overall"].is_null());
    let last = ended.stderr.lines().last().unwrap();
    assert!(last.contains(" of 92 steps were dropped: a gradient was not finite"), "{last}");
}

#[test]
fn a_run_that_cannot_recover_is_given_up_and_keeps_its_last_good_checkpoint() {
    let folder = Folder::new();
    let given_up = |arguments: &str| {
        let ended = run(folder.path(), arguments);
        assert_eq!(ended.code, Some(3), "{}{}", ended.stdout, ended.stderr);
        let last = ended.stderr.lines().last().unwrap().to_owned();
        assert!(
            last.contains("the last 100 steps were dropped, because gradients were not finite"),
            "{last}"
        );
        last
    };
    given_up("compare digits --learning-rate 1e30 --out compared");
    // What was done is shown.
    let ended = run(folder.path(), "compare digits --learning-rate 1e30 --out again");
    assert!(ended.stdout.trim_end().lines().last().unwrap().starts_with("dense "), "{}", ended.stdout);
    assert!(ended.stderr.starts_with("report: again/report.html"), "{}", ended.stderr);
    let report = std::fs::read_to_string(folder.path().join("again/report.html")).unwrap();
    assert!(report.contains("\"diverged\":true"));
    succeed(folder.path(), "train digits --epochs 1 --out run");
    let before = files(&folder.path().join("run"));
    let last = given_up("train --resume run --epochs 10 --learning-rate 1e30");
    assert!(last.contains("run keeps the checkpoint from before"), "{last}");
    assert!(files(&folder.path().join("run")) == before);
    succeed(folder.path(), "train --resume run --epochs 2");
}
