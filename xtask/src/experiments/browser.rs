//! The page with all figures, in a real browser.

use crate::shell::{Result, command, root};
use std::fs;
use std::process::Stdio;

/// Counts the figures that the browser has really laid out, each with points or lines in it.
const COUNT: &str = "<script>
document.body.dataset.drawn = [...document.querySelectorAll('svg')].filter((figure) => {
  const box = figure.getBoundingClientRect();
  const marks = [...figure.querySelectorAll('circle, polyline')].map((mark) => mark.getBoundingClientRect());
  return box.width > 300 && box.height > 100 && marks.some((mark) => mark.width > 2);
}).length;
</script>
";

/// Whether Chromium draws every figure that there is.
pub(super) fn check() -> Result {
    let results = root().join("docs/results");
    let failed = |error: std::io::Error| format!("{}: {error}", results.display());
    let page = fs::read_to_string(results.join("experiments.html")).map_err(failed)?;
    let figures = page.matches("<svg").count();
    let folder = root().join("target/browser");
    fs::create_dir_all(&folder).map_err(failed)?;
    let copy = folder.join("experiments.html");
    fs::write(&copy, page.replace("</body>", &format!("{COUNT}</body>"))).map_err(failed)?;
    let mut chromium = command("timeout", &["60", "chromium", "--headless", "--no-sandbox", "--disable-gpu"]);
    chromium
        .args(["--no-first-run", "--disable-quic", "--disable-background-networking", "--disable-sync"])
        .arg("--disable-component-update")
        .arg(format!("--user-data-dir={}", folder.join("profile").display()))
        .args(["--virtual-time-budget=10000", "--dump-dom"])
        .arg(format!("file://{}", copy.display()));
    // It complains of all that a machine without a screen has not.
    let drawn = chromium.stderr(Stdio::null()).output().map_err(|error| format!("chromium: {error}"))?;
    let drawn = String::from_utf8_lossy(&drawn.stdout);
    if !drawn.contains(&format!("data-drawn=\"{figures}\"")) {
        let found = drawn.split("data-drawn=\"").nth(1).and_then(|rest| rest.split('"').next());
        return Err(format!("the browser draws {} of {figures} figures", found.unwrap_or("none")));
    }
    println!("the browser draws all {figures} figures of docs/results/experiments.html");
    Ok(())
}
