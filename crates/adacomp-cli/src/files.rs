//! Folders and files that appear complete or not at all.

use anyhow::{Context, Result, bail};
use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use tempfile::{Builder, TempDir};

/// The end of the name of a folder or file that is not complete yet.
pub(crate) const PARTIAL: &str = ".partial";

/// A folder that is being written. It gets its name when it is complete, and is removed if that never happens.
pub(crate) struct Draft {
    partial: TempDir,
    folder: PathBuf,
}

impl Draft {
    pub(crate) fn new(folder: &Path) -> Result<Self> {
        let (parent, name) = split(folder);
        let failed = || format!("cannot create the folder {}{PARTIAL}", folder.display());
        fs::create_dir_all(parent).with_context(failed)?;
        let partial = Builder::new().prefix(&name).suffix(PARTIAL).rand_bytes(0).tempdir_in(parent);
        Ok(Self { partial: partial.with_context(failed)?, folder: folder.to_owned() })
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        write(&self.partial.path().join(name), bytes)
    }

    /// Gives the folder its name, which nothing may have yet.
    pub(crate) fn keep(mut self) -> Result<()> {
        fs::rename(self.partial.path(), &self.folder)
            .with_context(|| format!("cannot write {}", self.folder.display()))?;
        self.partial.disable_cleanup(true);
        sync_parent(&self.folder);
        Ok(())
    }
}

/// Returns the folder that a path is in, and its name.
fn split(path: &Path) -> (&Path, String) {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    (parent, path.file_name().unwrap_or_default().to_string_lossy().into_owned())
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write {}: is there room, and may you write there?", path.display())
}

/// Writes a file that is either the old or the new one, whatever happens.
///
/// The crate tempfile would make one that only its owner may read.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    let (parent, name) = split(path);
    let partial = parent.join(name + PARTIAL);
    let written = write(&partial, bytes).and_then(|()| {
        fs::rename(&partial, path).with_context(|| format!("cannot write {}", path.display()))
    });
    if written.is_err() {
        let _ = fs::remove_file(&partial);
    }
    sync_parent(path);
    written
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let written =
        File::create(path).and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()));
    written.with_context(|| cannot_write(path))
}

/// Makes a new name outlive a power cut, where folders can be synced at all.
fn sync_parent(path: &Path) {
    if let Ok(parent) = File::open(split(path).0) {
        let _ = parent.sync_all();
    }
}

/// Makes the first of `runs/NAME-1`, `runs/NAME-2`, ... that is not there yet.
pub(crate) fn fresh_folder(name: &str) -> Result<PathBuf> {
    let runs = Path::new("runs");
    let failed =
        |folder: &Path| format!("cannot create the folder {}: choose another with --out", folder.display());
    fs::create_dir_all(runs).with_context(|| failed(runs))?;
    let mut number = 1;
    loop {
        let folder = runs.join(format!("{name}-{number}"));
        match fs::create_dir(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
            Err(error) => return Err(error).with_context(|| failed(&folder)),
        }
    }
}

/// The file that keeps other processes out of a folder.
const LOCK: &str = ".lock";

/// A folder that one process works in. Claiming it shows before work begins that it can be written.
pub(crate) struct Claim {
    lock: PathBuf,
    _file: File,
}

impl Claim {
    pub(crate) fn new(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create the folder {}", folder.display()))?;
        let lock = folder.join(LOCK);
        let mut file = File::create(&lock).with_context(|| cannot_write(&lock))?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => bail!("another process works in {}", folder.display()),
            // Where files cannot be locked, nobody is warned.
            Err(TryLockError::Error(_)) | Ok(()) => {}
        }
        file.write_all(b"adacomp").with_context(|| cannot_write(&lock))?;
        Ok(Self { lock, _file: file })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.lock);
    }
}

/// Checks that a folder holds nothing yet, so that nothing can be overwritten.
pub(crate) fn check_empty(folder: &Path) -> Result<()> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    // The lock of a process that was killed before it saved anything.
    if entries.filter(|entry| entry.file_name() != LOCK).count() > 0 {
        bail!("{} is not empty: go on with it by --resume, or choose another --out", folder.display());
    }
    Ok(())
}
