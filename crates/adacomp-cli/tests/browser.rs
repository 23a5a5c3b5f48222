//! The report in a real browser.

use std::process::Command;

/// Needs Chromium; `cargo xtask test` installs and uses it.
#[test]
#[ignore = "needs chromium: run by cargo xtask test"]
fn the_report_draws_all_charts() {
    let folder = tempfile::tempdir().unwrap();
    let program = Command::new(env!("CARGO_BIN_EXE_adacomp"))
        .args([
            "compare",
            "digits",
            "--epochs",
            "3",
            "--schemes",
            "dense,adacomp,local-selection",
            "--out",
            "run",
        ])
        .current_dir(folder.path())
        .output()
        .unwrap();
    assert!(program.status.success(), "{}", String::from_utf8_lossy(&program.stderr));
    let report = folder.path().join("run/report.html");
    let html = std::fs::read_to_string(&report).unwrap();
    for outside in ["http://", "https://", "src=", "@import"] {
        let found = html.replace("http://www.w3.org/", "").contains(outside);
        assert!(!found, "the report is in one file, but has {outside}");
    }
    let chromium = Command::new("timeout")
        .args([
            "60",
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
        ])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .arg(format!("--user-data-dir={}", folder.path().join("profile").display()))
        .args(["--virtual-time-budget=10000", "--dump-dom"])
        .arg(format!("file://{}", report.display()))
        .output()
        .unwrap();
    let page = String::from_utf8_lossy(&chromium.stdout).into_owned();
    assert!(page.contains("data-ready=\"true\""), "{page}\n{}", String::from_utf8_lossy(&chromium.stderr));
    let count = |part: &str| page.matches(part).count();
    assert!(count("<figure") >= 6 && count("<svg") >= 6, "{} figures", count("<figure"));
    for text in [
        "digits",
        "local-selection",
        "Mlp.layers.0.weight",
        "learning-rate",
        "compression ratio",
        "frame ratio",
    ] {
        assert!(page.contains(text), "{text}");
    }
    assert!(!page.contains(">NaN<") && !page.contains("undefined"));
    // Three schemes of three epochs each: every point is drawn.
    assert!(count("class=\"dot\"") >= 9, "{} points", count("class=\"dot\""));
}
