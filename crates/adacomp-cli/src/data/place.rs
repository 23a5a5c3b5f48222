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
    let marker = folder_of(data).and_then(|folder| Ok(std::fs::read_to_string(folder.join(COMPLETE))?));
    data.package().is_some_and(|package| marker.is_ok_and(|marker| marker == package.sha256))
}

/// How deep below a folder files are looked for.
const DEPTH: usize = 2;

/// The folder, or the one below it, that has one of these files: all files of a set lie beside each other.
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

/// The first of these files that is in the folder.
pub(super) fn file(folder: &Path, names: &[&str]) -> Result<PathBuf> {
    match names.iter().map(|name| folder.join(name)).find(|path| path.is_file()) {
        Some(path) => Ok(path),
        None => bail!("{}: put the file {} there", folder.display(), names.join(" or ")),
    }
}

/// The folders in a folder, in the order of their names.
pub(super) fn folders_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut folders: Vec<_> = entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| !kind.is_symlink()))
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect();
    folders.sort();
    folders
}
