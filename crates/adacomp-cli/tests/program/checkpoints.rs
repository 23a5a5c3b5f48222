//! Stopping and going on.

use crate::support::{
    Ended, Folder, files, means, paths, program, run, run_json, sealed, signal, succeed, tensor_files,
    wait_until, watch, write_idx,
};
use safetensors::SafeTensors;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

/// Starts it, sends it a signal once it has printed this number of lines, and waits for its end. Ctrl-C is `INT`.
fn interrupt(folder: &Path, arguments: &str, lines: usize, name: &str) -> Ended {
    let mut child = program(folder, arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut text = String::new();
    for _ in 0..lines {
        assert_ne!(stdout.read_line(&mut text).unwrap(), 0, "{text}");
    }
    signal(child.id(), name);
    let watch = watch(child.id());
    for line in stdout.lines() {
        text += &(line.unwrap() + "\n");
    }
    let output = child.wait_with_output().unwrap();
    drop(watch);
    Ended { code: output.status.code(), stdout: text, stderr: String::from_utf8(output.stderr).unwrap() }
}

/// After two interruptions the end is the same as without, to the bit.
#[test]
fn an_interrupted_run_ends_with_the_same_bits() {
    for settings in [
        "digits --strategy gather",
        "digits --strategy sharded --optimizer adam --learning-rate 0.001",
        "digits --scheme top-k --minibatch 64",
        "digits --optimizer adam --local-steps 1 --bin-warm-up 1300",
        "digits --scheme dense --learners 1",
    ] {
        let folder = Folder::new();
        let uninterrupted =
            succeed(folder.path(), &format!("train {settings} --epochs 30 --out uninterrupted"));
        let first = interrupt(
            folder.path(),
            &format!("train {settings} --epochs 30 --json=steps --out run"),
            100,
            "INT",
        );
        assert_eq!(first.code, Some(130), "{}", first.stderr);
        assert!(first.stderr.contains("go on with: adacomp train --resume run"), "{}", first.stderr);
        let second = interrupt(folder.path(), "train --resume run --json=steps", 200, "TERM");
        assert_eq!(second.code, Some(130), "{}", second.stderr);
        let last = succeed(folder.path(), "train --resume run");
        assert_eq!(uninterrupted.checksum(), last.checksum(), "{settings}");
        // All that is saved is the same but for times: residuals, the optimiser's moments, statistics.
        let saved = |name: &str| tensor_files(&folder.path().join(name));
        assert!(saved("uninterrupted") == saved("run"), "{settings}");
        assert_eq!(
            history(&folder.path().join("uninterrupted")),
            history(&folder.path().join("run")),
            "{settings}"
        );
    }
}

/// What a checkpoint tells of all epochs, without times.
fn history(run: &Path) -> serde_json::Value {
    let mut history = run_json(run).1["history"].take();
    for epoch in history["epochs"].as_array_mut().unwrap() {
        epoch["seconds"].take();
        epoch["total"]["seconds"].take();
    }
    history
}

/// Steps that were dropped in the epoch that is going on are told, too.
#[test]
fn an_interrupted_run_tells_of_all_dropped_steps() {
    let folder = Folder::new();
    let line = "train digits --learners 2 --minibatch 2 --local-steps 100 --learning-rate 1e30 --schedule constant \
                --epochs 9 --json=steps --out run";
    let ended = interrupt(folder.path(), line, 110, "INT");
    assert_eq!(ended.code, Some(130), "{}", ended.stderr);
    let steps = ended.json().iter().filter_map(|line| line["step"].as_u64()).max().unwrap();
    assert!(ended.stderr.contains(&format!("{steps} of {steps} steps were dropped")), "{}", ended.stderr);
}

/// What diverges is not to go on where somebody ended it.
#[test]
fn an_interrupted_run_that_diverges_keeps_the_checkpoint_from_before() {
    let folder = Folder::new();
    succeed(folder.path(), "train digits --epochs 1 --out run");
    let line = "train --resume run --epochs 9 --learning-rate 1e30 --schedule constant --json=steps";
    let ended = interrupt(folder.path(), line, 40, "INT");
    assert_eq!(ended.code, Some(3), "{}", ended.stderr);
    assert!(ended.stderr.contains("run keeps the checkpoint from before"), "{}", ended.stderr);
    assert!(!ended.stderr.contains("go on with"), "{}", ended.stderr);
}

/// Ctrl-C before the first epoch has ended; and a checkpoint's own folder can be named, too.
#[test]
fn a_run_that_was_interrupted_early_has_saved_what_it_has() {
    let folder = Folder::new();
    let first = interrupt(folder.path(), "train digits --epochs 3 --json=steps --out run", 5, "INT");
    assert_eq!(first.code, Some(130), "{}", first.stderr);
    assert!(first.stderr.contains("go on with: adacomp train --resume run"), "{}", first.stderr);
    let checkpoint = |run: &str| {
        let entries = std::fs::read_dir(folder.path().join(run)).unwrap().flatten();
        let names: Vec<_> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
        assert_eq!(names.len(), 1, "{names:?}");
        names[0].clone()
    };
    succeed(folder.path(), &format!("train --resume run/{}", checkpoint("run")));
    assert_eq!(checkpoint("run"), "checkpoint-00000138");
}

/// What `auto` stands for is fixed for a run, and chosen anew for other bins and another number of learners.
#[test]
fn as_many_learners_keep_the_strategy_that_was_chosen() {
    let folder = Folder::new();
    let strategy = |line: &str| {
        let lines = succeed(folder.path(), &format!("train {line} --json")).json();
        lines.last().unwrap()["adacomp"]["strategy"].as_str().unwrap().to_owned()
    };
    assert_eq!(strategy("digits --learners 2 --steps 5 --out two"), "gather");
    assert_eq!(strategy("digits --learners 8 --steps 5 --out run"), "reduce");
    // As if the version that began it had chosen otherwise.
    let (path, mut saved) = run_json(&folder.path().join("run"));
    assert_eq!((&saved["config"]["strategy"], &saved["strategy"]), (&"auto".into(), &"reduce".into()));
    saved["strategy"] = "gather".into();
    std::fs::write(&path, sealed(&saved)).unwrap();
    assert_eq!(strategy("--resume run --steps 10"), "gather");
    assert_eq!(strategy("--resume run --steps 15"), "gather");
    assert_eq!(strategy("--resume run --steps 18 --matrix-bin 400"), "reduce");
    assert_eq!(strategy("--resume run --steps 20 --learners 16"), "reduce");
}

/// One that was begun before sizes in other codes and the bytes of a ring were counted, and `run.json` had a checksum; with a folder
/// for digits, which was kept without being used.
#[test]
fn an_older_checkpoint_goes_on() {
    let folder = Folder::new();
    succeed(folder.path(), "train digits --steps 50 --out run");
    let (path, mut saved) = run_json(&folder.path().join("run"));
    saved["format"] = 1.into();
    saved["config"]["data"] = "nowhere".into();
    assert!(saved.as_object_mut().unwrap().remove("checksum").is_some());
    for sums in saved["epoch"].as_array_mut().unwrap() {
        let sums = sums.as_object_mut().unwrap();
        assert!(sums.remove("paper").is_some() && sums.remove("floor").is_some());
        assert!(sums.remove("ring_copies").is_some() && sums.remove("losses").is_some());
    }
    let before = saved["before"].as_object_mut().unwrap();
    assert!(before.remove("ring_copies").is_some() && before.remove("losses").is_some());
    // Before there was a compression ratio, the frame ratio was the rate.
    for epoch in saved["history"]["epochs"].as_array_mut().unwrap() {
        for sums in ["", "/total"] {
            let sums = epoch.pointer_mut(sums).and_then(|sums| sums.as_object_mut()).unwrap();
            assert!(sums.remove("compression_ratio").is_some());
        }
    }
    let old = saved.to_string().replace("_frame_ratio\"", "_rate\"").replace("frame_ratio\"", "rate\"");
    std::fs::write(path, old.replace("entropy_rate", "floor_rate")).unwrap();
    let lines = succeed(folder.path(), "train --resume run --steps 100 --json").json();
    // 50 steps that did not count it, and 50 that do: the ratio of the bytes of all of them.
    let (sent, ratio) = (&lines[1]["total"]["bytes_sent"], &lines[1]["total"]["compression_ratio"]);
    let weights = (64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10) as f64;
    let ring = 2.0 * 3.0 / 4.0 * 4.0 * weights * lines[1]["step"].as_f64().unwrap();
    assert!((sent.as_f64().unwrap() * ratio.as_f64().unwrap() / ring - 1.0).abs() < 1e-9, "{lines:?}");
}

#[test]
fn two_processes_do_not_work_in_one_folder() {
    let folder = Folder::new();
    succeed(folder.path(), "train digits --steps 1 --out run");
    let mut child = program(folder.path(), "train --resume run --epochs 100000")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("a lock", || folder.path().join("run/.lock").exists());
    std::thread::sleep(std::time::Duration::from_millis(200));
    let ended = run(folder.path(), "train --resume run");
    signal(child.id(), "KILL");
    child.wait().unwrap();
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("another process works in run"), "{}", ended.stderr);
    succeed(folder.path(), "inspect run");
}

#[test]
fn another_number_of_learners_goes_on_and_conserves_residuals() {
    let folder = Folder::new();
    succeed(folder.path(), "train digits --learners 4 --steps 50 --out run");
    let before = means(&folder.path().join("run"), "residuals-");
    // No steps are left, so only learners change.
    succeed(folder.path(), "train --resume run --learners 8");
    let after = means(&folder.path().join("run"), "residuals-");
    assert!(before.keys().eq(after.keys()) && !before.is_empty());
    for (before, after) in before.values().zip(after.values()) {
        let scale = before.iter().fold(0.0, |largest: f64, value| largest.max(value.abs()));
        assert!(scale > 0.0);
        assert!(before.iter().zip(after).all(|(before, after)| (before - after).abs() <= 1e-6 * scale));
    }
    let ended = succeed(folder.path(), "train --resume run --learners 2 --steps 100");
    assert!(ended.stdout.contains("test error"), "{}", ended.stdout);
    succeed(folder.path(), "inspect run");
}

/// Whether this file is in a checkpoint that has its name.
fn is_complete(path: &Path) -> bool {
    let folder = path.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
    folder.starts_with("checkpoint-") && !folder.ends_with(".partial")
}

/// Killed at any moment, a run has a complete last checkpoint.
#[test]
fn a_killed_run_can_be_resumed() {
    let folder = Folder::new();
    let run_folder = folder.path().join("run");
    for round in 0..6 {
        let line = match round {
            0 => "train digits --epochs 200 --save-every 3 --out run",
            _ => "train --resume run --save-every 3",
        };
        let mut child =
            program(folder.path(), line).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        wait_until("a checkpoint", || paths(&run_folder).iter().any(|path| is_complete(path)));
        std::thread::sleep(std::time::Duration::from_millis(130 + 37 * round));
        signal(child.id(), "KILL");
        child.wait().unwrap();
        succeed(folder.path(), "inspect run");
    }
}

/// Also where a thread hosts only a part of the learners: it needs what all of them kept as owners.
#[test]
fn another_strategy_goes_on_and_conserves_what_owners_kept() {
    let folder = Folder::new();
    let run = folder.path().join("run");
    succeed(folder.path(), "train digits --strategy sharded --steps 46 --threads 2 --out run");
    let (residuals, owners) = (means(&run, "residuals-"), tensor_files(&run));
    let owners = owners.iter().filter(|(name, _)| name.starts_with("owner-"));
    // The layer that owners keep in consecutive parts.
    let layer = "Mlp.layers.1.weight";
    let owned: Vec<f32> = owners
        .flat_map(|(_, bytes)| {
            let tensors = SafeTensors::deserialize(bytes).unwrap();
            let values = tensors.tensor(layer).unwrap().data().as_chunks().0.iter();
            values.map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<_>>()
        })
        .collect();
    assert!(owned.len() == residuals[layer].len() && owned.iter().any(|value| *value != 0.0));
    // An epoch has 46 steps, so that it is only loaded and saved.
    let (path, mut saved) = run_json(&run);
    saved["config"]["strategy"] = "gather".into();
    std::fs::write(path, sealed(&saved)).unwrap();
    succeed(folder.path(), "train --resume run --epochs 1 --threads 2");
    let after = means(&run, "residuals-");
    for ((before, owned), after) in residuals[layer].iter().zip(owned).zip(&after[layer]) {
        assert!((before + f64::from(owned) - after).abs() < 1e-6, "{before} {owned} {after}");
    }
    succeed(folder.path(), "train --resume run --strategy reduce --steps 60 --threads 2");
}

/// Sizes in other codes are those of frames; an epoch that a shorter run had begun is shown once, and whole.
#[test]
fn a_longer_run_counts_all_that_was_sent() {
    let folder = Folder::new();
    let last = |line: &str| succeed(folder.path(), &format!("train {line} --json")).json().remove(1);
    // An epoch has 46 steps.
    last("digits --strategy gather --steps 20 --out run");
    let whole = last("--resume run --steps 46 --matrix-bin 50");
    let paper = |epoch: &serde_json::Value| epoch["total"]["paper_frame_ratio"]["overall"].clone();
    assert!(paper(&whole).as_f64() > Some(1.0), "{whole}");
    assert_eq!(whole["bytes_sent"], whole["total"]["bytes_sent"]);
    let saved = run_json(&folder.path().join("run")).1;
    assert_eq!(saved["history"]["epochs"].as_array().unwrap().len(), 1);
    assert_eq!(saved["history"]["layers"][0]["treatment"], "bins of 50");
    let mixed = last("--resume run --strategy reduce --steps 60");
    assert!(paper(&mixed).is_null() && mixed["total"]["entropy_frame_ratio"]["overall"].is_null(), "{mixed}");
}

#[test]
fn a_comparison_goes_on_where_it_was_interrupted() {
    let folder = Folder::new();
    write_idx(&folder, 1024, 100);
    let settings = "mnist-dnn --data idx --epochs 6 --json=steps";
    let uninterrupted = succeed(folder.path(), &format!("compare {settings} --out uninterrupted"));
    // Within the second scheme: the first has 48 steps and 6 epochs.
    let first = interrupt(folder.path(), &format!("compare {settings} --out run"), 1 + 54 + 20, "INT");
    assert_eq!(first.code, Some(130), "{}", first.stderr);
    assert!(first.stderr.contains("go on with: adacomp compare --resume run"), "{}", first.stderr);
    let report = std::fs::read_to_string(folder.path().join("run/report.html")).unwrap();
    assert!(report.contains("\"finished\":false"));
    let last = succeed(folder.path(), "compare --resume run --json");
    let result = |ended: &Ended| {
        let mut line = ended.json().pop().unwrap();
        for scheme in ["dense", "adacomp"] {
            line[scheme]["seconds"].take();
        }
        line
    };
    assert_eq!(result(&uninterrupted), result(&last));
    let report = std::fs::read_to_string(folder.path().join("run/report.html")).unwrap();
    assert!(report.contains("\"finished\":true"));
}

/// Pictures of two classes in a folder.
pub(crate) fn write_pictures(folder: &Folder) {
    for number in 0..24u32 {
        let class = number % 2;
        let picture = image::RgbImage::from_fn(40, 36, |x, y| {
            image::Rgb([(class * 200) as u8, (x * 5 + number) as u8, (y * 7) as u8])
        });
        let path =
            folder.path().join(format!("pictures/{}/{class}", if number < 16 { "train" } else { "val" }));
        std::fs::create_dir_all(&path).unwrap();
        picture.save(path.join(format!("{number}.png"))).unwrap();
    }
}

/// A step that is dropped because a gradient is not finite leaves running statistics as they were.
#[test]
fn a_dropped_step_does_not_poison_statistics() {
    let folder = Folder::new();
    write_pictures(&folder);
    let line = "train resnet18 --data pictures --image-folder --learners 2 --minibatch 4 --learning-rate 1e30 \
                --steps 3 --json --out run";
    let lines = succeed(folder.path(), line).json();
    assert!(lines.iter().any(|line| line["dropped_steps"].as_u64() > Some(0)), "{lines:?}");
    let all = files(&folder.path().join("run"));
    let statistics: Vec<_> =
        all.iter().filter(|(path, _)| path.to_string_lossy().contains("statistics-")).collect();
    assert_eq!(statistics.len(), 2);
    for (path, bytes) in statistics {
        for (name, tensor) in SafeTensors::deserialize(bytes).unwrap().iter() {
            let mut values = tensor.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
            assert!(values.all(f32::is_finite), "{} {name}", path.display());
        }
    }
}

/// Running statistics of batch norms are kept for each learner. Pictures from a folder, so this covers these, too.
#[test]
fn statistics_of_learners_survive() {
    let folder = Folder::new();
    write_pictures(&folder);
    let settings = "resnet18 --data pictures --image-folder --learners 2 --minibatch 4 --learning-rate 0.01";
    let uninterrupted = succeed(
        folder.path(),
        &format!("train {settings} --steps 4 --schedule constant --out uninterrupted"),
    );
    succeed(folder.path(), &format!("train {settings} --steps 2 --schedule constant --out run"));
    let last = succeed(folder.path(), "train --resume run --steps 4");
    assert_eq!(uninterrupted.checksum(), last.checksum());
    let statistics: Vec<_> = files(&folder.path().join("run"))
        .into_iter()
        .filter(|(path, _)| path.to_string_lossy().contains("statistics-"))
        .collect();
    assert_eq!(statistics.len(), 2);
    assert_ne!(statistics[0].1, statistics[1].1);
}
