//! `adacomp plan`

use crate::End;
use crate::args::PlanArguments;
use crate::plan::check::{Checked, check};
use crate::plan::model::Rates;
use crate::plan::units::{self, show_bandwidth, show_seconds};
use crate::plan::{BreakEven, Machine, Model, Prediction, Setting, Way, predict};
use crate::show::{self, row, table};
use anyhow::{Result, bail};
use serde_json::json;
use std::path::Path;

/// Learners that a plan can be made for.
const MAX_LEARNERS: usize = 10_000;

/// Compression that saves less than this share of a step is not worth its delayed gradients.
const WORTH: f64 = 0.95;

pub(crate) fn run(arguments: &PlanArguments) -> Result<End> {
    let machine = if arguments.calibrate {
        note!("measuring this machine, for some seconds");
        Some(Machine::calibrate()?)
    } else {
        Machine::measured()?
    };
    if let Some(path) = &arguments.check {
        return compare(path, machine, arguments.json);
    }
    let Some(model) = &arguments.model else {
        return show_machine(machine, arguments.json);
    };
    let (model, setting) = (Model::read(model, rates(arguments)?)?, setting(arguments)?);
    let used = machine.unwrap_or_default();
    let predictions = predict(&model, &setting, &used);
    let (best, reason) = recommend(&predictions, &setting);
    if arguments.json {
        let plan = json!({
            "model": model, "setting": setting, "machine": used, "calibrated": machine.is_some(),
            "predictions": predictions, "recommendation": best.name(), "reason": reason,
        });
        say!("{plan}");
    } else {
        tell!("{}", text(&model, &setting, &predictions));
        say!("\n{}: {reason}", best.name());
        if machine.is_none() {
            say!(
                "This machine has not been measured, so costs of computing are those of another; see --calibrate."
            );
        }
    }
    Ok(End::Done)
}

fn rates(arguments: &PlanArguments) -> Result<Rates> {
    for rate in [arguments.conv_rate, arguments.matrix_rate] {
        if !(rate.is_finite() && rate >= 1.0) {
            bail!("a rate of {rate}: choose a number from 1 on");
        }
    }
    Ok(Rates { conv: arguments.conv_rate, matrix: arguments.matrix_rate })
}

fn setting(arguments: &PlanArguments) -> Result<Setting> {
    let learners = arguments.learners;
    if !(1..=MAX_LEARNERS).contains(&learners) {
        bail!("{learners} learners: choose 1 to {MAX_LEARNERS}");
    }
    let setting = Setting {
        learners,
        bandwidth: units::bandwidth(&arguments.bandwidth)?,
        latency: units::seconds(&arguments.latency)?,
        compute: units::seconds(&arguments.compute)?,
        crowding: 1.0,
    };
    if setting.bandwidth == 0.0 {
        bail!("a link speed of {}: choose more than 0", arguments.bandwidth);
    }
    if setting.compute == 0.0 {
        bail!("a step of {}: choose more than 0", arguments.compute);
    }
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
            _ if prediction.way == Way::Dense => "-".to_owned(),
            BreakEven::Never => "never".to_owned(),
            BreakEven::OnAnyLink => "any link".to_owned(),
            BreakEven::Below(bandwidth) => show_bandwidth(bandwidth),
        };
        rows.push(row([
            prediction.way.name(),
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

/// The way to choose, and why.
fn recommend(predictions: &[Prediction], setting: &Setting) -> (Way, String) {
    let dense = predictions[0];
    if setting.learners == 1 {
        return (Way::Dense, "one learner has nobody to exchange with".to_owned());
    }
    let shortest = predictions.iter().map(|prediction| prediction.step).fold(f64::INFINITY, f64::min);
    // The first that is about as good as the best: each delays gradients more than those before it.
    let best = predictions.iter().find(|prediction| WORTH * prediction.step <= shortest).unwrap_or(&dense);
    let sending = 100.0 * (dense.bytes / setting.bandwidth / dense.step).min(1.0);
    if best.way == Way::Dense {
        let saved = 100.0 * (1.0 - shortest / dense.step);
        let saved = if saved < 1.0 { "nothing".to_owned() } else { format!("{saved:.0}% at most") };
        let reason = format!("compression would save {saved}: sending is {sending:.0}% of a dense step");
        return (Way::Dense, reason + &below(predictions));
    }
    let times = dense.step / best.step;
    let why = match best.way {
        Way::Dense | Way::Gather => "",
        Way::Reduce => "; with gather traffic would grow with the number of learners",
        Way::Sharded => {
            "; with the others traffic would grow with the number of learners, but training may need more epochs"
        }
    };
    (
        best.way,
        format!("a step is {times:.1} times as fast as a dense one, of which sending is {sending:.0}%{why}"),
    )
}

/// From which link on compression would pay.
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

/// What was measured of this machine.
fn show_machine(machine: Option<Machine>, as_json: bool) -> Result<End> {
    let machine = machine.unwrap_or_default();
    if as_json {
        say!("{}", serde_json::to_string(&machine)?);
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
            row(["to start and end a transport", &show_seconds(machine.transport)]),
        ])
    );
    say!("kept in {}", Machine::file()?.display());
    Ok(End::Done)
}

/// Predictions beside measurements.
fn compare(path: &Path, machine: Option<Machine>, as_json: bool) -> Result<End> {
    let checked = check(path, &machine.unwrap_or_default())?;
    if as_json {
        for checked in &checked {
            say!("{}", serde_json::to_string(checked)?);
        }
        return Ok(End::Done);
    }
    let mut rows = vec![row(["", "measured", "predicted", "error", "of dense", "predicted"])];
    for checked in &checked {
        let Checked { workload, learners, link, way, measured, predicted, .. } = checked;
        let wrong = if checked.wrong_side { " wrong side" } else { "" };
        rows.push(row([
            &format!("{workload}, {learners} learners, {link}, {}", way.name()),
            &show_seconds(*measured),
            &show_seconds(*predicted),
            &format!("{:+.0}%", 100.0 * checked.error),
            &format!("{:.3}", checked.measured_ratio),
            &format!("{:.3}{wrong}", checked.predicted_ratio),
        ]));
    }
    tell!("{}", table(&rows));
    let largest = |slow: bool| {
        let errors = checked.iter().filter(|checked| checked.slow == slow).map(|checked| checked.error.abs());
        100.0 * errors.fold(0.0, f64::max)
    };
    let wrong = checked.iter().filter(|checked| checked.wrong_side).count();
    say!(
        "\nlargest error at 1 Gbit and below: {:.0}%, above: {:.0}%; on the wrong side of break-even by more than 10%: {wrong} of {}",
        largest(true),
        largest(false),
        checked.len()
    );
    Ok(End::Done)
}
