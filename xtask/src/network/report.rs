//! The results as tables in `docs/results.md` and as a picture.

use super::picture;
use super::{LEARNERS, LINKS, METHODS, WORKLOADS, results};
use crate::document::{Written, with_parts};
use crate::shell::{Result, root};
use serde_json::Value;
use std::fs;

/// One method's line.
pub(super) struct Measured {
    pub(super) link: String,
    pub(super) workload: String,
    pub(super) learners: usize,
    pub(super) method: String,
    pub(super) seconds: f64,
    sent: f64,
    said: f64,
    cpu: f64,
    compressing: Option<bool>,
}

impl Measured {
    fn read(line: &Value) -> Option<Self> {
        let text = |key: &str| Some(line.get(key)?.as_str()?.to_owned());
        let number = |key: &str| line.get(key)?.as_f64();
        Some(Self {
            link: text("link")?,
            workload: text("workload")?,
            learners: number("learners")? as usize,
            method: text("method")?,
            seconds: number("step_seconds")?,
            sent: number("sent_bytes")?,
            said: number("said_bytes")?,
            cpu: number("cpu_seconds")?,
            compressing: line.get("compressing").and_then(Value::as_bool),
        })
    }
}

/// The most memory of a learner with one method, in its first steps and later.
struct Peak {
    workload: String,
    method: String,
    parameters: f64,
    first: f64,
    later: f64,
}

impl Peak {
    fn read(line: &Value) -> Option<Self> {
        Some(Self {
            workload: line.get("workload")?.as_str()?.to_owned(),
            method: line.get("method")?.as_str()?.to_owned(),
            parameters: line.get("parameters")?.as_f64()?,
            first: line.get("peak_bytes")?.as_f64()?,
            later: line.get("later_peak_bytes")?.as_f64()?,
        })
    }
}

/// All lines.
#[derive(Default)]
pub(super) struct Results {
    steps: Vec<Measured>,
    peaks: Vec<Peak>,
}

impl Results {
    /// Those that there are.
    pub(super) fn read() -> Result<Self> {
        let mut all = Self::default();
        for (number, line) in fs::read_to_string(results()).unwrap_or_default().lines().enumerate() {
            let value = serde_json::from_str(line).unwrap_or(Value::Null);
            match (Measured::read(&value), Peak::read(&value)) {
                (Some(measured), _) => all.steps.push(measured),
                (_, Some(peak)) => all.peaks.push(peak),
                _ => return Err(format!("{}, line {}: not a result", results().display(), number + 1)),
            }
        }
        Ok(all)
    }

    pub(super) fn has_peak(&self, workload: &str, method: &str) -> bool {
        self.peak(workload, method).is_some()
    }

    fn peak(&self, workload: &str, method: &str) -> Option<&Peak> {
        self.peaks.iter().find(|peak| peak.workload == workload && peak.method == method)
    }

    pub(super) fn get(&self, workload: &str, learners: usize, link: &str, method: &str) -> Option<&Measured> {
        self.steps.iter().find(|line| {
            (line.workload.as_str(), line.learners, line.link.as_str(), line.method.as_str())
                == (workload, learners, link, method)
        })
    }

    /// A method's step time as a multiple of that of DDP as it comes.
    pub(super) fn ratio(&self, workload: &str, learners: usize, link: &str, method: &str) -> Option<f64> {
        let builtin = self.get(workload, learners, link, "builtin")?;
        Some(self.get(workload, learners, link, method)?.seconds / builtin.seconds)
    }
}

/// Writes the tables and the picture.
pub(super) fn write() -> Result {
    if results().exists() { written()?.save() } else { Ok(()) }
}

/// Whether the tables and the picture are what the results give.
pub(super) fn check() -> Result {
    written()?.check()
}

fn written() -> Result<Written<'static>> {
    let (results, document) = (Results::read()?, root().join("docs/results.md"));
    let text = with_parts(&document, &[("network", tables(&results))])?;
    let picture = (root().join("docs/results/network.svg"), picture::draw(&results));
    Ok(Written { by: "cargo xtask bench network report", files: vec![(document, text), picture] })
}

fn tables(results: &Results) -> String {
    let mut text = String::new();
    for workload in WORKLOADS {
        for learners in LEARNERS {
            text += &times(results, workload, learners);
        }
    }
    for workload in WORKLOADS {
        text += &costs(results, workload);
        text += &peaks(results, workload);
    }
    text
}

/// The most memory, and how much more that is than DDP's, in copies of the model.
fn peaks(results: &Results, workload: &str) -> String {
    let Some(builtin) = results.peak(workload, "builtin") else { return String::new() };
    let mut text = format!(
        "\n### {workload}, 2 learners: the most memory of a learner\n\n\
         | | in the first steps | more than DDP | in copies of the model | later | more than DDP | in copies of the model |\n\
         |---|---:|---:|---:|---:|---:|---:|\n"
    );
    for peak in results.peaks.iter().filter(|peak| peak.workload == workload) {
        let beside = |peak_bytes: f64, builtin: f64| {
            let more = peak_bytes - builtin;
            format!(
                "{} | {:+.1} MB | {:+.2} |",
                bytes(peak_bytes),
                more / 1e6,
                more / (4.0 * peak.parameters)
            )
        };
        let (first, later) = (beside(peak.first, builtin.first), beside(peak.later, builtin.later));
        text += &format!("| {} | {first} {later}\n", peak.method);
    }
    text
}

/// Step times by link, and their ratios.
fn times(results: &Results, workload: &str, learners: usize) -> String {
    let links = LINKS.iter().filter(|link| results.get(workload, learners, link.name, "builtin").is_some());
    let links: Vec<&str> = links.map(|link| link.name).collect();
    if links.is_empty() {
        return String::new();
    }
    let mut text =
        format!("\n### {workload}, {learners} learners: time of a step, and its ratio to DDP's\n\n");
    text += &format!("| | {} |\n|---|{}\n", links.join(" | "), "---:|".repeat(links.len()));
    for method in METHODS {
        let cell = |link: &&str| {
            let (Some(line), Some(ratio)) = (
                results.get(workload, learners, link, method),
                results.ratio(workload, learners, link, method),
            ) else {
                return "-".to_owned();
            };
            let chosen = match line.compressing {
                Some(true) => " *on*",
                Some(false) => " *off*",
                None => "",
            };
            format!("{} **{}**{chosen}", seconds(line.seconds), short(ratio))
        };
        text += &format!("| {method} | {} |\n", links.iter().map(cell).collect::<Vec<_>>().join(" | "));
    }
    text
}

/// Bytes and processor time, which hardly depend on the link.
fn costs(results: &Results, workload: &str) -> String {
    let link = "1gbit";
    if LEARNERS.iter().all(|learners| results.get(workload, *learners, link, "builtin").is_none()) {
        return String::new();
    }
    let mut text = format!(
        "\n### {workload}, {link}: what a learner sends and computes in a step\n\n\
         | | learners | sent, by the interface | by `stats()` | difference | processor time |\n|---|---:|---:|---:|---:|---:|\n"
    );
    for learners in LEARNERS {
        for method in METHODS {
            let Some(line) = results.get(workload, learners, link, method) else { continue };
            let (said, difference) = match line.said {
                0.0 => ("-".to_owned(), "-".to_owned()),
                said => (bytes(said), format!("{:+.1}%", 100.0 * (line.sent / said - 1.0))),
            };
            text += &format!(
                "| {method} | {learners} | {} | {said} | {difference} | {} |\n",
                bytes(line.sent),
                seconds(line.cpu)
            );
        }
    }
    text
}

fn seconds(seconds: f64) -> String {
    if seconds < 1.0 { format!("{:.0} ms", 1000.0 * seconds) } else { format!("{seconds:.2} s") }
}

/// Two digits that count.
fn short(ratio: f64) -> String {
    match ratio {
        0.0..0.0995 => format!("{ratio:.3}"),
        _ => format!("{ratio:.2}"),
    }
}

fn bytes(bytes: f64) -> String {
    match bytes {
        0.0..1e3 => format!("{bytes:.0} B"),
        0.0..1e6 => format!("{:.1} kB", bytes / 1e3),
        _ => format!("{:.2} MB", bytes / 1e6),
    }
}
