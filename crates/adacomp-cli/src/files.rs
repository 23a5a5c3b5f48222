//! Folders and files that appear complete or not at all.

use anyhow::{Context, Result, bail, ensure};
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
    // Left behind by a process that was killed; of a link, the link itself.
    let _ = fs::remove_file(&partial);
    let written = write(&partial, bytes).and_then(|()| {
        fs::rename(&partial, path).with_context(|| format!("cannot write {}", path.display()))
    });
    if written.is_err() {
        let _ = fs::remove_file(&partial);
    }
    sync_parent(path);
    written
}

/// Writes a file that is not there yet, so that no link is followed to another.
fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let written =
        File::create_new(path).and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()));
    written.with_context(|| cannot_write(path))
}

/// Reads a regular file. Devices and pipes may have no end.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    let failed = || format!("cannot read {}", path.display());
    let is_file = fs::metadata(path).with_context(failed)?.is_file();
    ensure!(is_file, "cannot read {}: it is not a regular file", path.display());
    fs::read(path).with_context(failed)
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
    file: File,
}

impl Claim {
    pub(crate) fn new(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create the folder {}", folder.display()))?;
        let lock = folder.join(LOCK);
        for _ in 0..10 {
            let (file, is_new) = Self::open(&lock)?;
            match file.try_lock() {
                Err(TryLockError::WouldBlock) => bail!("another process works in {}", folder.display()),
                // Where files cannot be locked, nobody is warned.
                Err(TryLockError::Error(_)) | Ok(()) => {}
            }
            let mut claim = Self { lock: lock.clone(), file };
            if is_new {
                claim.file.write_all(b"adacomp").with_context(|| cannot_write(&lock))?;
            }
            // One that its process has removed meanwhile keeps nobody out.
            if claim.is_in_place() {
                return Ok(claim);
            }
        }
        bail!("another process keeps replacing {}", lock.display())
    }

    /// Makes the lock, or opens one that was left behind. What is there already is never written to, and no link is followed.
    fn open(lock: &Path) -> Result<(File, bool)> {
        match File::create_new(lock) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            file => return Ok((file.with_context(|| cannot_write(lock))?, true)),
        }
        let is_file = fs::symlink_metadata(lock).map_or(true, |metadata| metadata.is_file());
        ensure!(is_file, "{} is not a file of this program: remove it", lock.display());
        match File::open(lock) {
            Err(error) if error.kind() == ErrorKind::NotFound => Self::open(lock),
            file => Ok((file.with_context(|| format!("cannot read {}", lock.display()))?, false)),
        }
    }

    /// Returns whether the file that is locked here is the one that others would find.
    #[cfg(unix)]
    fn is_in_place(&self) -> bool {
        use std::os::unix::fs::MetadataExt;
        match (fs::symlink_metadata(&self.lock), self.file.metadata()) {
            (Ok(found), Ok(own)) => (found.dev(), found.ino()) == (own.dev(), own.ino()),
            _ => false,
        }
    }

    #[cfg(not(unix))]
    fn is_in_place(&self) -> bool {
        self.lock.is_file()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.is_in_place() {
            let _ = fs::remove_file(&self.lock);
        }
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

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let [precious, lock, partial, report] =
            ["precious", LOCK, "report.partial", "report"].map(|name| folder.path().join(name));
        fs::write(&precious, "precious").unwrap();
        symlink(&precious, &lock).unwrap();
        symlink(&precious, &partial).unwrap();
        let error = Claim::new(folder.path()).err().unwrap().to_string();
        assert!(error.ends_with(".lock is not a file of this program: remove it"), "{error}");
        write_atomically(&report, b"new").unwrap();
        assert_eq!([fs::read(&precious).unwrap(), fs::read(&report).unwrap()], [&b"precious"[..], b"new"]);
        assert!(!partial.exists());
    }

    #[test]
    fn only_the_own_lock_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let lock = folder.path().join(LOCK);
        let first = Claim::new(folder.path()).unwrap();
        assert!(Claim::new(folder.path()).is_err());
        // Somebody tidies up, and another process begins.
        fs::remove_file(&lock).unwrap();
        let second = Claim::new(folder.path()).unwrap();
        drop(first);
        assert!(lock.exists() && Claim::new(folder.path()).is_err());
        drop(second);
        assert!(!lock.exists());
        // Left behind by a process that was killed.
        fs::write(&lock, "adacomp").unwrap();
        drop(Claim::new(folder.path()).unwrap());
        assert!(!lock.exists());
    }
}
