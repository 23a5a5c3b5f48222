//! Folders and files that are either whole or not there.

use anyhow::{Context, Result, bail};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// A folder that is being written. It gets its name only when it is whole.
pub(crate) struct Draft {
    partial: PathBuf,
    folder: PathBuf,
    kept: bool,
}

impl Draft {
    pub(crate) fn new(folder: &Path) -> Result<Self> {
        let mut name = folder.file_name().unwrap_or_default().to_owned();
        name.push(".partial");
        let partial = folder.with_file_name(name);
        // Left behind by a process that was killed.
        if partial.exists() {
            fs::remove_dir_all(&partial).with_context(|| format!("cannot remove {}", partial.display()))?;
        }
        fs::create_dir_all(&partial)
            .with_context(|| format!("cannot create the folder {}", partial.display()))?;
        Ok(Self { partial, folder: folder.to_owned(), kept: false })
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        write(&self.partial.join(name), bytes)
    }

    /// Gives the folder its name, in place of what had it.
    pub(crate) fn keep(mut self) -> Result<()> {
        let failed = || format!("cannot write {}", self.folder.display());
        let old = self.partial.with_extension("old");
        if self.folder.exists() {
            fs::rename(&self.folder, &old).with_context(failed)?;
        }
        fs::rename(&self.partial, &self.folder).with_context(failed)?;
        self.kept = true;
        sync_parent(&self.folder);
        if old.exists() {
            fs::remove_dir_all(&old).with_context(|| format!("cannot remove {}", old.display()))?;
        }
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
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    let partial = path.with_file_name(name);
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

/// Makes sure, before work begins, that its results can be written.
pub(crate) fn prepare_folder(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create the folder {}", folder.display()))?;
    let probe = folder.join(".probe");
    write(&probe, b"adacomp")?;
    fs::remove_file(&probe).with_context(|| format!("cannot remove {}", probe.display()))
}

/// That a folder holds nothing yet, so that nothing can be overwritten.
pub(crate) fn check_empty(folder: &Path) -> Result<()> {
    if fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some()) {
        bail!("{} is not empty: go on with it by --resume, or choose another --out", folder.display());
    }
    Ok(())
}
