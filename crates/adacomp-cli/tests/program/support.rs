//! Running the program, and small data in the published formats.

use safetensors::SafeTensors;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A folder of one test, removed at its end.
pub(crate) struct Folder(TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Writes a file in it.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }
}

/// How a run of the program ended.
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Self { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }
}

impl Ended {
    /// Returns the checksum of the weights.
    pub(crate) fn checksum(&self) -> String {
        let line = self.stdout.lines().find_map(|line| line.strip_prefix("weights checksum: "));
        line.unwrap_or_else(|| panic!("{}{}", self.stdout, self.stderr)).to_owned()
    }

    /// Returns the lines of `--json`.
    pub(crate) fn json(&self) -> Vec<Value> {
        let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        self.stdout.lines().map(parse).collect()
    }
}

/// Returns the program, to run in this folder, with data kept away from the user's.
pub(crate) fn program(folder: &Path, arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_adacomp"));
    command.args(arguments.split_whitespace()).current_dir(folder).stdin(Stdio::null());
    command.env("ADACOMP_DATA", folder.join("cache"));
    command
}

/// Runs it to its end, and no longer than three minutes.
pub(crate) fn run(folder: &Path, arguments: &str) -> Ended {
    finish(program(folder, arguments))
}

pub(crate) fn finish(mut command: Command) -> Ended {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let watch = watch(child.id());
    let output = child.wait_with_output().unwrap();
    drop(watch);
    output.into()
}

/// Kills a process after three minutes, unless what this returns is dropped before.
pub(crate) fn watch(process: u32) -> Sender<()> {
    let (dropped, waits) = channel::<()>();
    std::thread::spawn(move || {
        if waits.recv_timeout(Duration::from_secs(180)) == Err(RecvTimeoutError::Timeout) {
            signal(process, "KILL");
        }
    });
    dropped
}

/// Runs it, which must succeed.
pub(crate) fn succeed(folder: &Path, arguments: &str) -> Ended {
    let ended = run(folder, arguments);
    assert_eq!(ended.code, Some(0), "{arguments}\n{}{}", ended.stdout, ended.stderr);
    ended
}

pub(crate) fn signal(process: u32, name: &str) {
    let _ = Command::new("kill").args([format!("-{name}"), process.to_string()]).status();
}

/// Waits until this holds, for a minute at most.
pub(crate) fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "{what} did not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Writes idx files of pictures to train and test with: bright squares whose place is their class.
pub(crate) fn write_idx(folder: &Folder, train: usize, test: usize) {
    for (name, count) in [("train", train), ("t10k", test)] {
        let header = |magic: u32, dimensions: &[usize]| {
            let numbers = dimensions.iter().map(|&dimension| dimension as u32);
            std::iter::once(magic).chain(numbers).flat_map(u32::to_be_bytes).collect::<Vec<u8>>()
        };
        let mut pictures = header(0x0803, &[count, 28, 28]);
        let mut labels = header(0x0801, &[count]);
        for number in 0..count {
            let class = number * 7 % 10;
            labels.push(class as u8);
            pictures.extend((0..784).map(|pixel| {
                let (row, column) = (pixel / 28, pixel % 28);
                let bright = row / 6 == class / 4 && column / 6 == class % 4;
                if bright { 200 + (number % 50) as u8 } else { (number * 31 + pixel * 17) as u8 % 60 }
            }));
        }
        folder.write(&format!("idx/{name}-images-idx3-ubyte"), &pictures);
        folder.write(&format!("idx/{name}-labels-idx1-ubyte"), &labels);
    }
}

/// Returns a `run.json` with these values, and the checksum that belongs to them.
pub(crate) fn sealed(run: &Value) -> String {
    let mut run = run.clone();
    run.as_object_mut().unwrap().remove("checksum");
    let rest = run.to_string().split_off(1);
    format!("{{\n  \"checksum\": \"{:08x}\",{rest}", crc32fast::hash(rest.as_bytes()))
}

/// Returns all files below a folder.
pub(crate) fn paths(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.path() {
                path if path.is_dir() => folders.push(path),
                path => found.push(path),
            }
        }
    }
    found.sort();
    found
}

/// Returns the safetensors files of a run, by their names.
pub(crate) fn tensor_files(run: &Path) -> Vec<(String, Vec<u8>)> {
    let files = files(run).into_iter();
    let tensors = files.filter(|(path, _)| path.extension().is_some_and(|end| end == "safetensors"));
    tensors.map(|(path, bytes)| (path.file_name().unwrap().to_string_lossy().into_owned(), bytes)).collect()
}

/// Returns the mean over all files of a run whose names begin so, for each tensor.
pub(crate) fn means(run: &Path, what: &str) -> BTreeMap<String, Vec<f64>> {
    let mut found = tensor_files(run);
    found.retain(|(name, _)| name.starts_with(what));
    let mut means: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for (_, bytes) in &found {
        for (name, tensor) in SafeTensors::deserialize(bytes).unwrap().iter() {
            let values = tensor.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
            let values: Vec<f64> = values.map(|value| f64::from(value) / found.len() as f64).collect();
            let mean = means.entry(name.to_owned()).or_insert_with(|| vec![0.0; values.len()]);
            mean.iter_mut().zip(values).for_each(|(mean, value)| *mean += value);
        }
    }
    means
}

/// Returns the `run.json` of a run's checkpoint, and where it is.
pub(crate) fn run_json(run: &Path) -> (PathBuf, Value) {
    let path = paths(run).into_iter().find(|path| path.ends_with("run.json")).expect("a checkpoint");
    let saved = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    (path, saved)
}

/// Returns all files below a folder in which nothing is going on, with their contents.
pub(crate) fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    paths(folder).into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}
