//! `cargo xtask bench`: the ratios that matter, in one table, beside those of a committed run.

use crate::step::{Job, root};
use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};
use xshell::cmd;

/// The ratios of a run, by the names below, and the processor that it was on.
const BASELINE: &str = "xtask/bench-baseline.json";

/// Time that varies little from run to run; time that varies more, because it is short or depends on a second thread; and bytes,
/// which do not vary. Three runs on a quiet machine differed by less.
const TIME: f64 = 0.10;
const ROUGH: f64 = 0.35;
const BYTES: f64 = 0.005;

/// Ratios of which less is better: what it is, the benchmark's line that has it, by some of its fields, the field, and by how much
/// it may grow.
const ROWS: &[(&str, &str, &str, f64)] = &[
    (
        "compress 25M, bins of 500 / R += dW",
        "op=compress kernel=avx2 bin=500 len=25000000",
        "ratio_to_limit",
        TIME,
    ),
    (
        "compress 25M, bins of 50 / R += dW",
        "op=compress kernel=avx2 bin=50 len=25000000",
        "ratio_to_limit",
        TIME,
    ),
    (
        "compress 1M, bins of 500 / R += dW",
        "op=compress kernel=avx2 bin=500 len=1000000",
        "ratio_to_limit",
        TIME,
    ),
    (
        "compress 1M, bins of 50 / R += dW",
        "op=compress kernel=avx2 bin=50 len=1000000",
        "ratio_to_limit",
        TIME,
    ),
    ("encode 25M / R += dW", "op=encode bin=500 len=25000000", "ratio_to_limit", TIME),
    ("average 1 frame of 25M / R += dW", "op=average bin=500 len=25000000", "ratio_to_limit", ROUGH),
    ("average 128 frames of 25M / R += dW", "op=average_128_frames len=25000000", "ratio_to_limit", TIME),
    ("the same, two threads / one", "op=average_128_frames len=25000000", "two_threads_over_one", ROUGH),
    (
        "read and write 1M, gather, 8 learners / R += dW",
        "model=layer strategy=gather learners=8",
        "decode_ratio_to_limit",
        ROUGH,
    ),
    (
        "read and write 1M, reduce, 8 learners / R += dW",
        "model=layer strategy=reduce learners=8",
        "decode_ratio_to_limit",
        ROUGH,
    ),
    (
        "bytes of rice, bins of 500 / entropy",
        "codec=rice positions=compressor bin=500",
        "ratio_to_floor",
        BYTES,
    ),
    (
        "bytes of rice, bins of 50 / entropy",
        "codec=rice positions=compressor bin=50",
        "ratio_to_floor",
        BYTES,
    ),
    ("bytes of 1M, 2 learners / ring", "model=layer auto=gather learners=2", "auto_over_ring", BYTES),
    ("bytes of 1M, 8 learners / ring", "model=layer auto=reduce learners=8", "auto_over_ring", BYTES),
    ("bytes of 1M, 128 learners / ring", "model=layer auto=reduce learners=128", "auto_over_ring", BYTES),
    (
        "bytes of mnist-cnn, 8 learners / ring",
        "model=mnist-cnn auto=reduce learners=8",
        "auto_over_ring",
        BYTES,
    ),
    (
        "bytes of mnist-cnn, 128 learners / ring",
        "model=mnist-cnn auto=reduce learners=128",
        "auto_over_ring",
        BYTES,
    ),
];

/// Runs the benchmarks, and fails if a ratio has grown. In the short form it only shows that they run. With `write`, the ratios
/// become the baseline.
pub(crate) fn run(job: &Job, quick: bool, write: bool) -> Result<()> {
    let mut lines = Vec::new();
    for (package, bench) in [("adacomp", "limit"), ("adacomp", "wire"), ("adacomp-exchange", "traffic")] {
        let short = quick.then_some("--quick");
        let text =
            job.output(cmd!(job.sh, "cargo bench --locked -p {package} --bench {bench} -- {short...}"))?;
        for line in text.lines().filter(|line| line.starts_with('{')) {
            job.say(line)?;
            let line: Map<String, Value> = serde_json::from_str(line).with_context(|| line.to_owned())?;
            lines.push(line);
        }
    }
    if quick {
        return Ok(());
    }
    let ratios = ROWS.iter().map(|(name, fields, field, _)| {
        let ratio =
            find(&lines, fields, field).with_context(|| format!("no benchmark prints {fields}: {field}"))?;
        Ok((*name, ratio))
    });
    let ratios: Vec<(&str, f64)> = ratios.collect::<Result<_>>()?;
    let processor = processor();
    let path = root().join(BASELINE);
    if write {
        let ratios: Map<String, Value> =
            ratios.iter().map(|(name, ratio)| ((*name).to_owned(), json!(ratio))).collect();
        let text = serde_json::to_string_pretty(&json!({ "processor": processor, "ratios": ratios }))?;
        return Ok(job.sh.write_file(path, text + "\n")?);
    }
    let baseline: Value = serde_json::from_str(&job.sh.read_file(path)?).context(BASELINE)?;
    let (table, mut grown) = compare(&ratios, &baseline["ratios"]);
    job.say(&table)?;
    if let Some(other) = baseline["processor"].as_str().filter(|other| *other != processor) {
        job.say(&format!("The baseline is of another processor ({other}; this is {processor}): only bytes need be the same."))?;
        grown.times = 0;
    }
    ensure!(
        grown == Grown::default(),
        "{} ratios of time and {} of bytes have grown; if that is meant, and the machine was quiet, `cargo xtask bench --write` makes them the baseline",
        grown.times,
        grown.bytes
    );
    Ok(())
}

/// How many ratios have grown by more than they may.
#[derive(Debug, PartialEq, Default)]
struct Grown {
    times: usize,
    bytes: usize,
}

/// Returns a field of the line that has these fields.
fn find(lines: &[Map<String, Value>], fields: &str, field: &str) -> Option<f64> {
    let text =
        |value: &Value| value.as_str().map_or_else(|| value.to_string(), |text| text.replace(' ', "_"));
    let fits = |line: &&Map<String, Value>| {
        let mut fields = fields.split(' ').filter_map(|field| field.split_once('='));
        fields.all(|(key, value)| line.get(key).is_some_and(|found| text(found) == value))
    };
    lines.iter().filter(fits).find_map(|line| line.get(field)?.as_f64())
}

/// Returns a table of ratios beside those of the baseline, and which have grown.
fn compare(ratios: &[(&str, f64)], baseline: &Value) -> (String, Grown) {
    let mut table =
        format!("{:<52} {:>9} {:>9} {:>7}\n", "ratio, less is better", "now", "baseline", "change");
    let mut grown = Grown::default();
    for ((name, now), (.., tolerance)) in ratios.iter().zip(ROWS) {
        let (before, change, word) = match baseline[name].as_f64() {
            None => ("-".to_owned(), String::new(), "  not in the baseline"),
            Some(before) => {
                let change = now / before - 1.0;
                let kind = if *tolerance == BYTES { &mut grown.bytes } else { &mut grown.times };
                *kind += usize::from(change > *tolerance);
                let word = match change {
                    _ if change > *tolerance => "  GROWN",
                    _ if change < -tolerance => "  better",
                    _ => "",
                };
                (format!("{before:.4}"), format!("{:+.1}%", 100.0 * change), word)
            }
        };
        table += &format!("{name:<52} {now:>9.4} {before:>9} {change:>7}{word}\n");
    }
    (table, grown)
}

/// Returns what tells processors apart whose names are the same.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name))?;
        Some(line.split(':').nth(1)?.trim().to_owned())
    };
    let fields = [("model name", ""), ("cpu family", "family "), ("model", "model ")];
    let known = fields.iter().filter_map(|(name, word)| Some(format!("{word}{}", field(name)?)));
    known.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_that_has_grown_is_marked_and_counted() {
        let mut ratios = vec![(ROWS[0].0, 1.2), (ROWS[1].0, 1.05), (ROWS[2].0, 0.8), (ROWS[3].0, 1.0)];
        let baseline = json!({ ROWS[0].0: 1.0, ROWS[1].0: 1.0, ROWS[2].0: 1.0 });
        let (table, grown) = compare(&ratios, &baseline);
        let rows: Vec<&str> = table.lines().skip(1).collect();
        assert_eq!(grown, Grown { times: 1, bytes: 0 });
        assert!(rows[0].ends_with("+20.0%  GROWN") && rows[1].ends_with("+5.0%"), "{table}");
        assert!(rows[2].ends_with("better") && rows[3].ends_with("not in the baseline"), "{table}");
        // Bytes are counted apart, because they are the same on any processor.
        ratios.extend(ROWS[4..].iter().map(|(name, ..)| (*name, 1.2)));
        let baseline = json!({ ROWS.last().unwrap().0: 1.0 });
        assert_eq!(compare(&ratios, &baseline).1, Grown { times: 0, bytes: 1 });
    }

    #[test]
    fn lines_are_found_by_their_fields() {
        let line = |text: &str| serde_json::from_str(text).unwrap();
        let lines =
            [line(r#"{"op": "a b", "len": 10, "x": 1.5}"#), line(r#"{"op": "c", "len": 10, "x": 2.5}"#)];
        assert_eq!(find(&lines, "op=a_b len=10", "x"), Some(1.5));
        assert_eq!(find(&lines, "op=c", "x"), Some(2.5));
        assert_eq!(find(&lines, "op=c len=11", "x"), None);
    }

    /// Every row is in the committed baseline.
    #[test]
    fn the_baseline_has_all_rows() {
        let text = std::fs::read_to_string(root().join(BASELINE)).unwrap();
        let baseline: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(baseline["ratios"].as_object().unwrap().len(), ROWS.len());
        assert!(ROWS.iter().all(|(name, ..)| baseline["ratios"][name].is_f64()));
    }
}
