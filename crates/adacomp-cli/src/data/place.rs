//! Where data lies.

use super::DataSet;
use anyhow::{Result, bail};
use std::path::{Path, PathBuf};

/// The file that is written last into a fetched set, with the checksum of what it was made from.
pub(super) const COMPLETE: &str = "adacomp-complete";

/// The folder that fetched data goes to: `$ADACOMP_DATA`, or `adacomp` in the user's cache folder.
pub(crate) fn cache_folder() -> Result<PathBuf> {
    let from =
        |variable: &str| std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = from("ADACOMP_DATA")
        .or_else(|| from("XDG_CACHE_HOME").map(|cache| cache.join("adacomp")))
        .or_else(|| from("HOME").map(|home| home.join(".cache/adacomp")))
        .or_else(|| from("LOCALAPPDATA").map(|local| local.join("adacomp")));
    match folder {
        Some(folder) => Ok(folder),
        None => bail!("no place for data: set ADACOMP_DATA to a folder"),
    }
}

/// The folder of one set.
pub(super) fn folder_of(data: DataSet) -> Result<PathBuf> {
    Ok(cache_folder()?.join(data.name()))
}

/// Whether a set has been fetched as a whole.
pub(crate) fn is_complete(data: DataSet) -> bool {
    folder_of(data).is_ok_and(|folder| folder.join(COMPLETE).is_file())
}

/// The first of these files that is in the folder, or in one of its folders.
pub(super) fn find(folder: &Path, names: &[&str]) -> Option<PathBuf> {
    let here = names.iter().map(|name| folder.join(name)).find(|path| path.is_file());
    here.or_else(|| folders_in(folder).iter().find_map(|inner| find(inner, names)))
}

/// The same, or an error that says what should be where.
pub(super) fn file(folder: &Path, names: &[&str]) -> Result<PathBuf> {
    if !folder.is_dir() {
        bail!("{}: no such folder: name one that has the file {}", folder.display(), names[0]);
    }
    match find(folder, names) {
        Some(path) => Ok(path),
        None => bail!("{}: put the file {} there", folder.display(), names.join(" or ")),
    }
}

/// The folders in a folder, in the order of their names.
pub(super) fn folders_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut folders: Vec<_> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}
