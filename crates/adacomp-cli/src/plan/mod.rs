//! `adacomp plan`: predicts the time of a step, dense and with each strategy, before anything is run.

mod cost;
mod machine;
mod model;

use crate::End;
use crate::args::PlanArguments;
use crate::show::{self, row, table};
use adacomp::Codec;
use adacomp_exchange::Strategy;
use anyhow::{Result, bail, ensure};
use cost::{BreakEven, Prediction, Setting, predict};
use machine::Machine;
use model::{Model, Ratios};
use serde_json::json;

/// Learners that a plan can be made for.
const MAX_LEARNERS: usize = 10_000;

/// Compression that saves less than this share of a step is not worth its delayed gradients.
const WORTH: f64 = 0.95;

/// Runs `adacomp plan`.
pub(crate) fn run(arguments: &PlanArguments) -> Result<End> {
    let machine = if arguments.calibrate {
        note!("measuring this machine, for some seconds");
        Some(Machine::calibrate()?)
    } else {
        Machine::measured()?
    };
    let used = machine.unwrap_or_default();
    let Some(model) = &arguments.model else {
        return show_machine(&used, arguments.json);
    };
    let (model, setting) = (Model::read(model, ratios(arguments)?)?, setting(arguments)?);
    let predictions = predict(&model, &setting, &used);
    let (best, reason) = recommend(&predictions, &setting);
    let auto = Strategy::choose(&model.layout, setting.learners, Codec::Rice);
    if arguments.json {
        let plan = json!({
            "model": model, "setting": setting, "machine": used, "calibrated": machine.is_some(),
            "predictions": predictions, "recommendation": best.strategy.to_string(),
            "recommended_local_steps": best.local_steps, "reason": reason, "auto": auto.to_string(),
        });
        say!("{plan}");
    } else {
        tell!("{}", text(&model, &setting, &predictions));
        say!("\n{}: {reason}", best.strategy);
        say!("The strategy auto takes {auto} here.");
        if machine.is_none() {
            say!(
                "This machine has not been measured, so costs of computing are those of another; see --calibrate."
            );
        }
    }
    Ok(End::Done)
}

fn ratios(arguments: &PlanArguments) -> Result<Ratios> {
    for ratio in [arguments.conv_ratio, arguments.matrix_ratio] {
        ensure!(ratio.is_finite() && ratio >= 1.0, "a ratio of {ratio}: choose a number from 1 on");
    }
    Ok(Ratios { conv: arguments.conv_ratio, matrix: arguments.matrix_ratio })
}

fn setting(arguments: &PlanArguments) -> Result<Setting> {
    let learners = arguments.learners;
    ensure!((1..=MAX_LEARNERS).contains(&learners), "{learners} learners: choose 1 to {MAX_LEARNERS}");
    let setting = Setting {
        learners,
        bandwidth: parse_bandwidth(&arguments.bandwidth)?,
        latency: parse_seconds(&arguments.latency)?,
        compute: parse_seconds(&arguments.compute)?,
        crowding: arguments.learners_per_core,
        local_steps: arguments.local_steps,
    };
    ensure!(setting.bandwidth > 0.0, "a link speed of {}: choose more than 0", arguments.bandwidth);
    ensure!(
        (1.0..=MAX_LEARNERS as f64).contains(&setting.crowding),
        "{} learners for each core: choose a number from 1 on, and at most {MAX_LEARNERS}",
        setting.crowding
    );
    ensure!(setting.compute > 0.0, "a step of {}: choose more than 0", arguments.compute);
    Ok(setting)
}

fn text(model: &Model, setting: &Setting, predictions: &[Prediction]) -> String {
    let mut text = format!(
        "{}: {:.1} million gradients, {} a step dense; {} learners, {} links, {} latency, {} to compute a step\n\n",
        model.name,
        model.elements / 1e6,
        show::bytes(4.0 * model.elements),
        setting.learners,
        show_bandwidth(setting.bandwidth),
        show_seconds(setting.latency),
        show_seconds(setting.compute)
    );
    let dense = predictions[0];
    let mut rows = vec![row(["", "step", "of dense", "sends", "computes", "keeps", "pays below"])];
    for prediction in predictions {
        let pays = match prediction.break_even {
            _ if is_every_step_dense(prediction) => "-".to_owned(),
            BreakEven::Never => "never".to_owned(),
            BreakEven::OnAnyLink => "any link".to_owned(),
            BreakEven::Below(bandwidth) => show_bandwidth(bandwidth),
        };
        rows.push(row([
            &label(prediction),
            &show_seconds(prediction.step),
            &format!("{:.3}", prediction.step / dense.step),
            &show::bytes(prediction.bytes),
            &show_seconds(prediction.processor),
            &show::bytes(prediction.memory),
            &pays,
        ]));
    }
    text += &table(&rows);
    text
}

/// Returns whether this is what the others are compared with.
fn is_every_step_dense(prediction: &Prediction) -> bool {
    prediction.strategy == Strategy::Dense && prediction.local_steps == 0
}

fn label(prediction: &Prediction) -> String {
    match prediction.local_steps {
        0 => prediction.strategy.to_string(),
        steps => format!("{}, {steps} local steps", prediction.strategy),
    }
}

/// Returns what to choose, and why.
fn recommend(predictions: &[Prediction], setting: &Setting) -> (Prediction, String) {
    let dense = predictions[0];
    if setting.learners == 1 {
        return (dense, "one learner has nobody to exchange with".to_owned());
    }
    let shortest = predictions.iter().map(|prediction| prediction.step).fold(f64::INFINITY, f64::min);
    // The first that is about as good as the best: each delays gradients more than those before it.
    let best = *predictions.iter().find(|prediction| WORTH * prediction.step <= shortest).unwrap_or(&dense);
    let sending = 100.0 * (dense.bytes / setting.bandwidth / dense.step).min(1.0);
    if is_every_step_dense(&best) {
        let saved = 100.0 * (1.0 - shortest / dense.step);
        let saved = if saved < 1.0 { "nothing".to_owned() } else { format!("{saved:.0}% at most") };
        let reason = format!("compression would save {saved}: sending is {sending:.0}% of a dense step");
        return (best, reason + &below(predictions));
    }
    let times = dense.step / best.step;
    let local =
        if best.local_steps > 0 { format!("with {} local steps ", best.local_steps) } else { String::new() };
    let why = match best.strategy {
        Strategy::Dense | Strategy::Gather => "",
        Strategy::Reduce => "; with gather traffic would grow with the number of learners",
        Strategy::Sharded => {
            "; with the others traffic would grow with the number of learners, but training may need more epochs"
        }
    };
    (
        best,
        format!(
            "{local}a step is {times:.1} times as fast as a dense one, of which sending is {sending:.0}%{why}"
        ),
    )
}

/// Says from which link on compression would pay.
fn below(predictions: &[Prediction]) -> String {
    if predictions.iter().any(|prediction| prediction.break_even == BreakEven::OnAnyLink) {
        return "; it pays clearly only on slower links".to_owned();
    }
    let links = predictions.iter().filter_map(|prediction| match prediction.break_even {
        BreakEven::Below(link) => Some(link),
        BreakEven::Never | BreakEven::OnAnyLink => None,
    });
    match links.max_by(f64::total_cmp) {
        Some(link) => format!("; it begins to be faster below {}", show_bandwidth(link)),
        None => String::new(),
    }
}

/// Prints what was measured of this machine.
fn show_machine(machine: &Machine, as_json: bool) -> Result<End> {
    if as_json {
        say!("{}", serde_json::to_string(machine)?);
        return Ok(End::Done);
    }
    let nanoseconds = |seconds: f64| format!("{:.2} ns", 1e9 * seconds);
    tell!(
        "{}",
        table(&[
            row(["to copy an element", &nanoseconds(machine.copy)]),
            row(["to compress one in bins of 500", &nanoseconds(machine.large_bins)]),
            row(["to compress one in bins of 50", &nanoseconds(machine.small_bins)]),
            row(["to write one of the average", &nanoseconds(machine.write)]),
            row(["to encode or decode one that is selected", &nanoseconds(machine.code)]),
            row(["to send or receive a byte", &nanoseconds(machine.byte)]),
            row(["to start and end a collective call", &show_seconds(machine.transport)]),
        ])
    );
    say!("kept in {}", Machine::file()?.display());
    Ok(End::Done)
}

/// Parses bytes a second from `10mbit`, `1gbit` or `2.5Gbit/s`.
fn parse_bandwidth(text: &str) -> Result<f64> {
    let lower = text.to_lowercase();
    let lower = lower.strip_suffix("/s").unwrap_or(&lower);
    match parse(lower, &[("kbit", 125.0), ("mbit", 125e3), ("gbit", 125e6)]) {
        Some(bandwidth) => Ok(bandwidth),
        None => bail!("a link speed of `{text}`: write it like 100mbit, 1gbit or 2.5gbit"),
    }
}

/// Parses seconds from `0.3s`, `200ms` or `50us`.
fn parse_seconds(text: &str) -> Result<f64> {
    match parse(text, &[("us", 1e-6), ("ms", 1e-3), ("s", 1.0)]) {
        Some(seconds) => Ok(seconds),
        None => bail!("a time of `{text}`: write it like 0.3s, 20ms or 50us"),
    }
}

/// Parses a number and one of these units, also with a fraction, which crates for durations do not take.
fn parse(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let (number, factor) =
        units.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, factor)))?;
    let value = factor * number.trim().parse::<f64>().ok()?;
    // Far beyond what there is, and sums and ratios of them stay finite.
    (value == 0.0 || (1e-18..=1e18).contains(&value)).then_some(value)
}

/// Formats bytes a second as `parse_bandwidth` takes them.
fn show_bandwidth(bytes: f64) -> String {
    let bits = 8.0 * bytes;
    match bits {
        0.0..1e6 => format!("{:.0} kbit", bits / 1e3),
        0.0..1e9 => format!("{:.0} Mbit", bits / 1e6),
        0.0..1e10 => format!("{:.1} Gbit", bits / 1e9),
        _ => format!("{:.0} Gbit", bits / 1e9),
    }
}

/// Formats seconds.
fn show_seconds(seconds: f64) -> String {
    match seconds {
        0.0..0.01 => format!("{:.2} ms", 1e3 * seconds),
        0.0..1.0 => format!("{:.0} ms", 1e3 * seconds),
        0.0..100.0 => format!("{seconds:.2} s"),
        _ => format!("{seconds:.0} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_and_shown() {
        for (text, expected) in [("10mbit", 1.25e6), ("2.5Gbit/s", 3.125e8), ("64 kbit", 8e3)] {
            assert_eq!(parse_bandwidth(text).unwrap(), expected, "{text}");
        }
        for (text, expected) in [("0.3s", 0.3), ("200ms", 0.2), ("50us", 5e-5), ("1 s", 1.0)] {
            assert!((parse_seconds(text).unwrap() - expected).abs() < 1e-12, "{text}");
        }
        for text in ["", "1", "gbit", "-1gbit", "NaNgbit", "1gbyte", "infgbit"] {
            assert!(parse_bandwidth(text).is_err(), "{text}");
        }
        for text in ["", "1", "s", "-1s", "1h"] {
            assert!(parse_seconds(text).is_err(), "{text}");
        }
        assert_eq!([show_bandwidth(1.25e6), show_bandwidth(1.25e8)], ["10 Mbit", "1.0 Gbit"]);
        assert_eq!(
            [show_seconds(0.0002), show_seconds(0.14), show_seconds(8.2)],
            ["0.20 ms", "140 ms", "8.20 s"]
        );
    }
}
