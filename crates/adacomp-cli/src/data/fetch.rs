//! Fetching data sets through package clients, so that nothing half-written is ever taken for whole.

use super::DataSet;
use super::place::{COMPLETE, folder_of, is_complete};
use super::sources::{Client, Package};
use crate::progress;
use anyhow::{Context, Result, anyhow, bail};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// The folder of a set; fetched first, if it is not there.
pub(crate) fn get(data: DataSet) -> Result<PathBuf> {
    let folder = folder_of(data)?;
    if is_complete(data) {
        return Ok(folder);
    }
    let by_hand = || {
        format!("cannot fetch {}: put {} into a folder and name it with --data", data.name(), data.files())
    };
    let package = data.package().with_context(by_hand)?;
    if folder.exists() {
        bail!(
            "{} is there, but was not fetched as a whole: remove it, or name it with --data",
            folder.display()
        );
    }
    remove_stale(&folder);
    let partial = Partial::new(&folder).with_context(by_hand)?;
    fetch(&package, &partial.0).with_context(by_hand)?;
    partial.keep(&package, &folder).with_context(by_hand)?;
    Ok(folder)
}

/// Removes what processes have left behind that were killed while they fetched this set.
fn remove_stale(folder: &Path) {
    let entries =
        folder.parent().and_then(|parent| fs::read_dir(parent).ok()).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()).filter(|path| path.file_stem() == folder.file_name()) {
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        let process = extension.strip_prefix("partial-").and_then(|process| process.parse::<u32>().ok());
        let is_gone = |process: u32| !Path::new("/proc").join(process.to_string()).exists();
        if Path::new("/proc/self").exists() && process.is_some_and(is_gone) {
            let _ = fs::remove_dir_all(path);
        }
    }
}

/// A folder to work in, which is removed when all is done.
struct Partial(PathBuf);

impl Partial {
    fn new(folder: &Path) -> Result<Self> {
        let path = folder.with_extension(format!("partial-{}", std::process::id()));
        fs::create_dir_all(&path).with_context(|| format!("cannot create the folder {}", path.display()))?;
        Ok(Self(path))
    }

    /// Moves what was unpacked to its place, once it is marked as whole.
    fn keep(self, package: &Package, folder: &Path) -> Result<()> {
        let unpacked = self.0.join("unpacked").join(package.keep);
        fs::write(unpacked.join(COMPLETE), package.sha256)?;
        match fs::rename(&unpacked, folder) {
            // Another process was faster.
            Err(_) if folder.join(COMPLETE).is_file() => Ok(()),
            result => result.with_context(|| format!("cannot write {}", folder.display())),
        }
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // What cannot be removed stays a folder that nobody reads.
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn fetch(package: &Package, folder: &Path) -> Result<()> {
    let bar = progress::bytes(&format!("fetching {}", package.name), package.bytes);
    let fetched = run_client(package, folder, || bar.set_position(size(folder)));
    bar.finish_and_clear();
    fetched?;
    let archive = archive_in(folder)?;
    check(&archive, package.sha256)?;
    let unpacked = folder.join("unpacked");
    unpack(package.client, &archive, &unpacked)
        .with_context(|| format!("cannot unpack {}", archive.display()))?;
    match unpacked.join(package.keep).is_dir() {
        true => Ok(()),
        false => bail!("{} has no folder {}", package.name, package.keep),
    }
}

/// Runs the package client to its end, or says why it cannot.
fn run_client(package: &Package, folder: &Path, show: impl Fn()) -> Result<()> {
    for words in package.client.commands(package.name) {
        let said = File::create(folder.join("said"))?;
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).current_dir(folder).stdin(Stdio::null()).env("TMPDIR", folder);
        let child = command.stdout(said.try_clone()?).stderr(said).spawn();
        let mut child = match child {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            child => child.with_context(|| format!("cannot run {}", words[0]))?,
        };
        let status = loop {
            match child.try_wait()? {
                Some(status) => break status,
                None => std::thread::sleep(Duration::from_millis(100)),
            }
            show();
        };
        if status.success() {
            return Ok(());
        }
        let said = fs::read_to_string(folder.join("said")).unwrap_or_default();
        let useful = |line: &&str| !line.is_empty() && !line.contains("complete log of this run");
        let reason = said.lines().map(str::trim).filter(useful).collect::<Vec<_>>().join("; ");
        // A Python without pip is as good as none.
        if !said.contains("No module named pip") {
            bail!(
                "`{}` failed: {}",
                words.join(" "),
                if reason.is_empty() { "it did not say why" } else { &reason }
            );
        }
    }
    bail!("{} is not installed", package.client.advice())
}

/// The bytes of all files below a folder.
fn size(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.metadata() {
        Ok(data) if data.is_dir() => size(&entry.path()),
        Ok(data) => data.len(),
        Err(_) => 0,
    });
    sizes.sum()
}

fn archive_in(folder: &Path) -> Result<PathBuf> {
    let is_archive = |path: &PathBuf| {
        path.extension()
            .is_some_and(|extension| ["tgz", "whl", "deb"].iter().any(|known| extension == *known))
    };
    let entries = fs::read_dir(folder)?.flatten().map(|entry| entry.path());
    entries.filter(|path| path.is_file()).find(is_archive).context("the package client left no archive")
}

fn check(archive: &Path, expected: &str) -> Result<()> {
    let mut file = File::open(archive)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            length => hash.update(&buffer[..length]),
        }
    }
    let actual: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    match actual == expected {
        true => Ok(()),
        false => bail!("the checksum of what came is {actual}, not {expected}; nothing was kept"),
    }
}

fn unpack(client: Client, archive: &Path, folder: &Path) -> Result<()> {
    match client {
        Client::Npm => {
            tar::Archive::new(flate2::read::GzDecoder::new(File::open(archive)?)).unpack(folder)?
        }
        Client::Pip => zip::ZipArchive::new(File::open(archive)?)?.extract(folder)?,
        Client::Apt => {
            let status = Command::new("dpkg-deb").arg("-x").args([archive, folder]).status()?;
            if !status.success() {
                return Err(anyhow!("dpkg-deb: {status}"));
            }
        }
    }
    Ok(())
}
