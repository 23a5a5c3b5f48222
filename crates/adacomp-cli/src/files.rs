//! Folders and files that are either whole or not there.

use anyhow::{Context, Result, bail};
use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// A folder that is being written. It gets its name only when it is whole.
pub(crate) struct Draft {
    partial: PathBuf,
    folder: PathBuf,
    kept: bool,
}

/// What a name has behind it while its folder or file is not whole.
pub(crate) const PARTIAL: &str = ".partial";

fn partial(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(PARTIAL);
    path.with_file_name(name)
}

impl Draft {
    pub(crate) fn new(folder: &Path) -> Result<Self> {
        let partial = partial(folder);
        fs::create_dir_all(&partial)
            .with_context(|| format!("cannot create the folder {}", partial.display()))?;
        Ok(Self { partial, folder: folder.to_owned(), kept: false })
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        write(&self.partial.join(name), bytes)
    }

    /// Gives the folder its name, which nothing may have yet.
    pub(crate) fn keep(mut self) -> Result<()> {
        fs::rename(&self.partial, &self.folder)
            .with_context(|| format!("cannot write {}", self.folder.display()))?;
        self.kept = true;
        sync_parent(&self.folder);
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.kept {
            // What cannot be removed keeps a name that nobody reads.
            let _ = fs::remove_dir_all(&self.partial);
        }
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let written =
        File::create(path).and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()));
    written
        .with_context(|| format!("cannot write {}: is there room, and may you write there?", path.display()))
}

/// Writes a file that is either the old or the new one, whatever happens.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    let partial = partial(path);
    let written = write(&partial, bytes).and_then(|()| {
        fs::rename(&partial, path).with_context(|| format!("cannot write {}", path.display()))
    });
    if written.is_err() {
        let _ = fs::remove_file(&partial);
    }
    sync_parent(path);
    written
}

/// Makes a new name outlive a power cut, where folders can be synced at all.
fn sync_parent(path: &Path) {
    if let Some(parent) = path.parent().and_then(|parent| File::open(parent).ok()) {
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

/// A folder that one process works in, which shows before work begins that it can be written.
pub(crate) struct Claim {
    lock: PathBuf,
    _file: File,
}

impl Claim {
    pub(crate) fn new(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create the folder {}", folder.display()))?;
        let lock = folder.join(LOCK);
        let failed = || format!("cannot write {}: is there room, and may you write there?", lock.display());
        let mut file = File::create(&lock).with_context(failed)?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => bail!("another process works in {}", folder.display()),
            // Where files cannot be locked, nobody is warned.
            Err(TryLockError::Error(_)) | Ok(()) => {}
        }
        file.write_all(b"adacomp").with_context(failed)?;
        Ok(Self { lock, _file: file })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.lock);
    }
}

/// That a folder holds nothing yet, so that nothing can be overwritten.
pub(crate) fn check_empty(folder: &Path) -> Result<()> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    // The lock of a process that was killed before it saved anything.
    if entries.filter(|entry| entry.file_name() != LOCK).count() > 0 {
        bail!("{} is not empty: go on with it by --resume, or choose another --out", folder.display());
    }
    Ok(())
}
