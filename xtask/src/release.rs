//! Whether a release could be made: licences of what our crates depend on, and the crates as packages.

use crate::shell::{Result, cargo, output, run};
use std::collections::BTreeSet;

/// Licences that what we depend on may have. All let it be used in programs of any licence; MPL-2.0 asks for changes to its own
/// files only.
const LICENCES: [&str; 10] = [
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "MIT",
    "MPL-2.0",
    "Unicode-3.0",
    "Zlib",
];

const CRATES: [&str; 4] = ["adacomp", "adacomp-exchange", "adacomp-burn", "adacomp-cli"];

pub(crate) fn check() -> Result {
    licences()?;
    for name in CRATES {
        let files =
            output(&mut cargo(&["package", "--locked", "--allow-dirty", "--quiet", "--list", "-p", name]))?;
        for file in ["LICENSE-APACHE", "LICENSE-MIT", "README.md"] {
            if !files.lines().any(|line| line == file) {
                return Err(format!("the package {name} has no {file}"));
            }
        }
    }
    let package = ["package", "--locked", "--allow-dirty", "--quiet"];
    run(cargo(&package).arg("--no-verify").args(CRATES.iter().flat_map(|name| ["-p", name])))?;
    // Built from its package. The others would be built against packages of the same version that cargo keeps from earlier times.
    run(cargo(&package).args(["-p", CRATES[0]]))
}

/// All that users build, with all features and on all platforms.
fn licences() -> Result {
    let tree = ["tree", "--locked", "--workspace", "--exclude", "xtask", "--all-features", "--target", "all"];
    let format = ["--prefix", "none", "--edges", "normal,build", "--format", "{p}|{l}"];
    let text = output(cargo(&tree).args(format))?;
    let packages: BTreeSet<&str> =
        text.lines().map(|line| line.trim_end_matches(" (*)")).filter(|line| !line.is_empty()).collect();
    let is_bad = |package: &&&str| package.split_once('|').is_none_or(|(_, licence)| !is_allowed(licence));
    let bad: Vec<_> = packages.iter().filter(is_bad).copied().collect();
    if !bad.is_empty() {
        return Err(format!("licences that are not in xtask/src/release.rs:\n{}", bad.join("\n")));
    }
    println!("licences: {} packages, all of them allowed", packages.len());
    Ok(())
}

/// Whether a licence expression can be met with [`LICENCES`]. `AND` binds more than `OR`, and a slash is an old `OR`.
fn is_allowed(expression: &str) -> bool {
    let expression = expression.trim();
    let inner = |part: &str| match part.trim().strip_prefix('(').and_then(|part| part.strip_suffix(')')) {
        Some(inner) => is_allowed(inner),
        None => LICENCES.contains(&part.trim()),
    };
    let expression = expression.replace('/', " OR ");
    split(&expression, " OR ").into_iter().any(|choice| split(choice, " AND ").into_iter().all(inner))
}

/// The parts between a word that is not in parentheses.
fn split<'a>(expression: &'a str, word: &str) -> Vec<&'a str> {
    let (mut parts, mut start, mut depth) = (Vec::new(), 0, 0);
    for (at, character) in expression.char_indices() {
        match character {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ if depth == 0 && at >= start && expression[at..].starts_with(word) => {
                parts.push(&expression[start..at]);
                start = at + word.len();
            }
            _ => {}
        }
    }
    parts.push(&expression[start..]);
    parts
}

#[cfg(test)]
mod tests {
    use super::is_allowed;

    #[test]
    fn licences_are_weighed() {
        for good in
            ["MIT", "GPL-3.0 OR MIT", "(MIT OR GPL-3.0) AND Zlib", "Unlicense/MIT", "MIT / Apache-2.0"]
        {
            assert!(is_allowed(good), "{good}");
        }
        for bad in ["", "GPL-3.0", "MIT AND GPL-3.0", "(MIT OR Zlib) AND GPL-3.0", "GPL-3.0/AGPL-3.0", "MITX"]
        {
            assert!(!is_allowed(bad), "{bad}");
        }
    }
}
