//! What the program prints: lines, tables, numbers for people, and the progress of a run.

use crate::args::JsonLines;
use crate::config::{Config, value_name};
use crate::history::{Epoch, Sums};
use crate::recipes::Metric;
use adacomp::Layout;
use indicatif::{DecimalBytes, ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use std::fmt;
use std::io::{self, Write};
use std::time::Instant;

/// The exit code where something cannot be done as asked.
pub(crate) const CANNOT: u8 = 2;

/// Prints, as `print!` does, but does not panic where nobody reads.
macro_rules! tell {
    ($($text:tt)*) => { $crate::show::write(format_args!($($text)*)) };
}

/// Prints a line, as `println!` does, but does not panic where nobody reads.
macro_rules! say {
    ($($text:tt)*) => { $crate::show::write(format_args!("{}\n", format_args!($($text)*))) };
}

/// Prints a line to standard error, whether or not somebody reads it.
macro_rules! note {
    ($($text:tt)*) => {{
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}

/// Writes to standard output. Where nobody reads on, as after `| head`, work goes on in silence; where it cannot be written, as
/// on a full disk, the program ends.
pub(crate) fn write(text: fmt::Arguments<'_>) {
    match io::stdout().write_fmt(text) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            note!("error: cannot write to standard output: {error}");
            std::process::exit(i32::from(CANNOT));
        }
        _ => {}
    }
}

/// Returns text of unknown origin without control characters, which a terminal would obey.
pub(crate) fn escaped(text: &str) -> String {
    let escape = |character: char| match character.is_control() {
        true => character.escape_default().collect(),
        false => String::from(character),
    };
    text.chars().map(escape).collect()
}

/// Returns the same, and no more of it than a column of a table can show.
pub(crate) fn short(text: &str) -> String {
    const MOST: usize = 100;
    match text.char_indices().nth(MOST) {
        None => escaped(text),
        Some((end, _)) => escaped(&text[..end]) + "...",
    }
}

/// Returns a flat list of a configuration's values, named as on the command line.
pub(crate) fn flat(configuration: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => escaped(text),
        Value::Object(object) => {
            object.iter().map(|(name, value)| format!("{value} {name}")).collect::<Vec<_>>().join(", ")
        }
        other => other.to_string(),
    };
    let entries = configuration.as_object().into_iter().flatten();
    entries.map(|(name, value)| (name.replace('_', "-"), text(value))).collect()
}

/// Returns rows of cells as columns: the first aligned to the left, the others to the right.
///
/// A crate for tables would need as many lines of settings to draw no borders.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width =
        |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| match column {
            0 => format!("{cell:<width$}"),
            _ => format!("  {cell:>width$}"),
        });
        cells.collect::<String>().trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

/// Returns the cells of a row.
pub(crate) fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).to_vec()
}

pub(crate) fn bytes(bytes: f64) -> String {
    DecimalBytes(bytes.round() as u64).to_string()
}

pub(crate) fn ratio(ratio: Option<f64>) -> String {
    match ratio {
        None => "-".to_owned(),
        Some(ratio) if ratio < 10.0 => format!("{ratio:.2}"),
        Some(ratio) => format!("{ratio:.0}"),
    }
}

/// Unlike indicatif's, which has one unit only, `2:05 min` is as exact as a comparison of runs needs it.
pub(crate) fn seconds(seconds: f64) -> String {
    match seconds as u64 {
        0..100 => format!("{seconds:.1} s"),
        rounded @ 100..6000 => format!("{}:{:02} min", rounded / 60, rounded % 60),
        rounded => format!("{}:{:02} h", rounded / 3600, rounded / 60 % 60),
    }
}

/// Returns the most memory that this process has had so far, where the system tells.
pub(crate) fn peak_memory() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<f64>().ok()? * 1024.0)
}

/// Returns a bar on stderr for something that takes a while. It is not drawn where stderr is no terminal.
pub(crate) fn bar(what: &str) -> ProgressBar {
    styled(0, "{msg} {wide_bar} {pos}/{len} {eta}").with_message(what.to_owned())
}

/// Returns a bar for bytes.
pub(crate) fn bytes_bar(what: &str, all: u64) -> ProgressBar {
    styled(all, "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}").with_message(what.to_owned())
}

fn styled(length: u64, template: &str) -> ProgressBar {
    ProgressBar::new(length)
        .with_style(ProgressStyle::with_template(template).expect("the template is valid"))
}

/// Shows how a run goes: a bar on stderr, and a line for each epoch on stdout, as text or as JSON.
pub(crate) struct Progress {
    config: Config,
    metric: Metric,
    json: Option<JsonLines>,
    bar: ProgressBar,
    start: Instant,
    first_step: Option<u64>,
    /// The last epoch's error or loss, for the bar.
    tested: String,
    has_header: bool,
}

impl Progress {
    pub(crate) fn new(config: &Config, metric: Metric, json: Option<JsonLines>, steps: u64) -> Self {
        let bar = styled(steps, "{prefix} {wide_bar} {pos}/{len} steps, {msg}, {eta} left");
        bar.set_prefix(format!("{} {}", config.recipe, value_name(config.scheme)));
        Self {
            config: config.clone(),
            metric,
            json,
            bar,
            start: Instant::now(),
            first_step: None,
            tested: String::new(),
            has_header: false,
        }
    }

    /// Shows a step: the loss over all learners, and learner 0's sums of the epoch so far.
    pub(crate) fn step(&mut self, step: u64, loss: f64, sums: &Sums, layout: &Layout) {
        let first = *self.first_step.get_or_insert_with(|| {
            // What an earlier process has done says nothing on the time that is left.
            self.bar.set_position(step - 1);
            self.bar.reset_eta();
            step - 1
        });
        let samples = (step - first) as f64 * self.config.minibatch as f64;
        let compression = sums.compression_ratio(layout);
        let speed = samples / self.start.elapsed().as_secs_f64();
        let (shown, tested) = (ratio(compression), &self.tested);
        let message = format!("loss {loss:.3}{tested}, compression ratio {shown}, {speed:.0} samples/s");
        self.bar.set_message(message);
        self.bar.set_position(step);
        if self.json == Some(JsonLines::Steps) {
            let frame_ratio = sums.frame_ratios(layout).overall;
            let line = json!({ "scheme": self.config.scheme, "step": step, "loss": loss,
                "compression_ratio": compression, "frame_ratio": frame_ratio });
            self.print(&line.to_string());
        }
    }

    /// Shows an epoch that has ended.
    pub(crate) fn epoch(&mut self, epoch: &Epoch) {
        self.tested = format!(", {} {}", self.metric.name(), self.metric.show(epoch));
        if self.json.is_some() {
            let mut line = json!({ "recipe": self.config.recipe, "scheme": self.config.scheme });
            let epoch = serde_json::to_value(epoch).unwrap_or_default();
            if let (Some(line), Value::Object(epoch)) = (line.as_object_mut(), epoch) {
                line.extend(epoch);
            }
            return self.print(&line.to_string());
        }
        if !std::mem::replace(&mut self.has_header, true) {
            self.print(
                "epoch  test error  test loss  train loss  compression ratio  sent per learner  \
                 frame ratio    conv  matrix  time so far",
            );
        }
        self.print(&format!(
            "{:>5}  {:>9.2}%  {:>9.4}  {:>10.4}  {:>17}  {:>16}  {:>11}  {:>6}  {:>6}  {:>11}",
            epoch.epoch,
            epoch.test_error,
            epoch.test_loss,
            epoch.train_loss,
            ratio(epoch.compression_ratio),
            bytes(epoch.bytes_sent),
            ratio(epoch.frame_ratio.overall),
            ratio(epoch.frame_ratio.conv),
            ratio(epoch.frame_ratio.matrix),
            seconds(epoch.total.seconds),
        ));
        if epoch.dropped_steps > 0 {
            self.print(&format!("       {} steps dropped: a gradient was not finite", epoch.dropped_steps));
        }
    }

    /// Prints a line without tearing the bar.
    fn print(&self, line: &str) {
        self.bar.suspend(|| say!("{line}"));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!(
            [bytes(0.0), bytes(999.0), bytes(1000.0), bytes(2.5e9)],
            ["0 B", "999 B", "1.00 kB", "2.50 GB"]
        );
        assert_eq!([ratio(None), ratio(Some(2.0)), ratio(Some(431.4))], ["-", "2.00", "431"]);
        assert_eq!([seconds(1.0), seconds(125.0), seconds(7260.0)], ["1.0 s", "2:05 min", "2:01 h"]);
    }

    #[test]
    fn foreign_text_is_short_and_harmless() {
        assert_eq!(short("\u{1b}[2Jw\u{9b}1m\u{e4}"), "\\u{1b}[2Jw\\u{9b}1m\u{e4}");
        assert_eq!(short(&"\u{e4}".repeat(70_000)), "\u{e4}".repeat(100) + "...");
    }

    #[test]
    fn columns_line_up() {
        let rows = [row(["", "a"]), row(["long name", "12"])];
        assert_eq!(table(&rows), "            a\nlong name  12\n");
    }
}
