//! Results as figures.

use super::results::Results;
use super::study::{Study, shown};
use super::tables::{Measure, Seeds};
use crate::chart::{Axis, Chart, Line, svg};

/// Bytes of a dense gradient that a learner receives in a step: twice what others have, through a ring.
fn ring(parameters: f64, learners: f64) -> f64 {
    8.0 * parameters * (learners - 1.0) / learners
}

const CODES: [&str; 3] = ["rice", "paper", "floor"];

/// The figure of a study, if it has one and something to show.
pub(super) fn draw(study: &Study, results: &Results) -> Option<String> {
    let groups = Seeds::of(study, results);
    if groups.is_empty() {
        return None;
    }
    let charts = match study.name.as_str() {
        "main" => curves(&groups),
        "learners" => learners(&groups),
        "bins" => [
            sweep(&groups, "conv-bin", "elements of a bin of convolutions", "conv", |group| {
                group.run.number("matrix-bin") == Some(500.0)
            }),
            sweep(&groups, "matrix-bin", "elements of a bin of matrices", "matrix", |group| {
                group.run.number("conv-bin") == Some(50.0)
            }),
        ]
        .into_iter()
        .flatten()
        .collect(),
        "threshold" => sweep(&groups, "soft-threshold", "factor of the soft threshold", "overall", |_| true),
        "minibatch" => minibatch(&groups),
        "adam" => adam(&groups),
        "transformer" => histories(&groups, &["compress", "learning-rate", "matrix-bin"], &["test_loss"]),
        "schemes" => histories(&groups, &[], &["test_loss", "residual_norm"]),
        "outliers" => {
            histories(&groups, &["outlier-step", "local-clip", "scale"], &["test_error", "residual_norm"])
        }
        "traces" => traces(&groups),
        "flat" => {
            let mut charts = histories(&groups, &["strategy", "owner-divisor"], &["test_error"]);
            charts.push(price(&groups));
            charts
        }
        _ => return None,
    };
    Some(svg(&charts, 3))
}

fn linear(label: &'static str) -> Axis {
    Axis { label, logarithmic: false }
}

fn logarithmic(label: &'static str) -> Axis {
    Axis { label, logarithmic: true }
}

/// What each model was judged by, over its steps: the first seed.
fn curves(groups: &[Seeds<'_>]) -> Vec<Chart> {
    let mut charts: Vec<Chart> = Vec::new();
    for group in groups {
        let (recipe, optimizer) = (group.run.text("recipe"), group.run.text("optimizer"));
        let (measure, title) = (Measure::of(recipe), format!("{recipe}, {optimizer}"));
        let line =
            Line { name: group.run.text("scheme").to_owned(), points: group.history(&measure.path[1..]) };
        match charts.iter_mut().find(|chart| chart.title == title) {
            Some(chart) => chart.lines.push(line),
            None => {
                charts.push(Chart {
                    title,
                    x: linear("steps"),
                    y: logarithmic(measure.name),
                    lines: vec![line],
                });
            }
        }
    }
    charts
}

/// What epochs ended with, a line for each group, called by its scheme and these settings.
fn histories<'a>(
    groups: impl IntoIterator<Item = &'a Seeds<'a>>,
    settings: &[&str],
    of: &[&'static str],
) -> Vec<Chart> {
    let groups: Vec<_> = groups.into_iter().collect();
    let name = |group: &Seeds<'_>| {
        let others =
            settings.iter().filter_map(|key| Some(format!("{key} {}", shown(group.run.0.get(*key)?))));
        std::iter::once(group.run.text("scheme").to_owned()).chain(others).collect::<Vec<_>>().join(", ")
    };
    let chart = |what: &'static str| {
        let lines = groups.iter().map(|group| Line { name: name(group), points: group.history(what) });
        let lines: Vec<_> = lines.filter(|line| line.points.iter().any(|point| point.1 > 0.0)).collect();
        Chart { title: what.replace('_', " "), x: linear("steps"), y: logarithmic(""), lines }
    };
    of.iter().copied().map(chart).collect()
}

/// The loss of each model in its first steps.
fn traces(groups: &[Seeds<'_>]) -> Vec<Chart> {
    let mut models: Vec<_> = groups.iter().map(|group| group.run.without(&["scheme", "seed"])).collect();
    models.dedup();
    let chart = |model| {
        let own: Vec<_> =
            groups.iter().filter(|group| group.run.without(&["scheme", "seed"]) == model).collect();
        let run = own[0].run;
        let title = format!(
            "{}, {} pixels a side, training loss",
            run.text("recipe"),
            run.number("side").unwrap_or_default()
        );
        histories(own, &[], &["train_loss"])
            .into_iter()
            .map(move |chart| Chart { title: title.clone(), ..chart })
    };
    models.into_iter().flat_map(chart).collect()
}

/// A chart for each learning rate.
fn adam(groups: &[Seeds<'_>]) -> Vec<Chart> {
    let mut rates: Vec<f64> = groups.iter().filter_map(|group| group.run.number("learning-rate")).collect();
    rates.sort_by(f64::total_cmp);
    rates.dedup();
    let chart = |&rate: &f64| {
        let own = groups.iter().filter(|group| group.run.number("learning-rate") == Some(rate));
        let mut charts = histories(own, &["compress", "second-moment"], &["test_loss"]);
        charts.iter_mut().for_each(|chart| chart.title = format!("test loss, learning rate {rate}"));
        charts
    };
    rates.iter().flat_map(chart).collect()
}

/// Error over bytes: a point for each run, those of a strategy connected.
fn price(groups: &[Seeds<'_>]) -> Chart {
    let strategies = ["", "gather", "reduce", "sharded"].into_iter().map(|strategy| {
        let own = groups.iter().filter(|group| group.run.text("strategy") == strategy);
        let point = |group: &Seeds<'_>| {
            let dense = || Some(ring(group.mean("/parameters")?, group.run.number("learners")?));
            Some((group.mean("/received").or_else(dense)?, group.mean("/test_error")?))
        };
        let name = if strategy.is_empty() { "dense, ring" } else { strategy };
        Line { name: name.to_owned(), points: own.filter_map(point).collect() }
    });
    Chart {
        title: "test error, %, over bytes".to_owned(),
        x: logarithmic("bytes that a learner receives in a step"),
        y: linear("test error, %"),
        lines: strategies.collect(),
    }
}

/// A line over a setting for each strategy, of the runs with AdaComp.
fn by_strategy(groups: &[Seeds<'_>], path: &str) -> Vec<Line> {
    let strategies = ["gather", "reduce", "sharded"].into_iter().map(|strategy| {
        let own = groups.iter().filter(|group| group.run.text("strategy") == strategy);
        let point = |group: &Seeds<'_>| Some((group.run.number("learners")?, group.mean(path)?));
        Line { name: strategy.to_owned(), points: own.filter_map(point).collect() }
    });
    strategies.collect()
}

fn learners(groups: &[Seeds<'_>]) -> Vec<Chart> {
    let numbers: Vec<f64> = groups.iter().filter_map(|group| group.run.number("learners")).collect();
    let (first, last) =
        numbers.iter().fold((f64::INFINITY, 0.0f64), |(low, high), &n| (low.min(n), high.max(n)));
    let dense = groups.iter().find(|group| group.run.text("scheme") == "dense");
    let mut errors = by_strategy(groups, "/test_error");
    if let Some(error) = dense.and_then(|group| group.mean("/test_error")) {
        errors.insert(0, Line { name: "dense".to_owned(), points: vec![(first, error), (last, error)] });
    }
    let more_than_one =
        |line: Line| Line { points: line.points.into_iter().filter(|point| point.0 > 1.0).collect(), ..line };
    let mut received: Vec<_> = by_strategy(groups, "/received").into_iter().map(more_than_one).collect();
    if let Some(parameters) = groups[0].mean("/parameters") {
        let mut points: Vec<_> =
            numbers.iter().filter(|n| **n > 1.0).map(|&n| (n, ring(parameters, n))).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        points.dedup();
        received.insert(0, Line { name: "dense, ring".to_owned(), points });
    }
    vec![
        Chart {
            title: "test error, %".to_owned(),
            x: logarithmic("learners"),
            y: linear("test error, %"),
            lines: errors,
        },
        Chart {
            title: "bytes that a learner receives in a step".to_owned(),
            x: logarithmic("learners"),
            y: logarithmic("bytes"),
            lines: received,
        },
    ]
}

/// Error and rates over a setting.
fn sweep(
    groups: &[Seeds<'_>],
    setting: &str,
    label: &'static str,
    kind: &str,
    wanted: impl Fn(&Seeds<'_>) -> bool,
) -> Vec<Chart> {
    let mut groups: Vec<_> = groups.iter().filter(|group| wanted(group)).collect();
    groups.sort_by(|a, b| {
        a.run.number(setting).partial_cmp(&b.run.number(setting)).unwrap_or(std::cmp::Ordering::Equal)
    });
    let points = |value: &dyn Fn(&Seeds<'_>) -> Option<f64>| {
        groups.iter().filter_map(|group| Some((group.run.number(setting)?, value(group)?))).collect()
    };
    let rates = CODES.map(|code| Line {
        name: code.to_owned(),
        points: points(&|group| group.compressed_rate(code, kind)),
    });
    let axis = || match setting {
        "soft-threshold" => linear(label),
        _ => logarithmic(label),
    };
    vec![
        Chart {
            title: "test error, %".to_owned(),
            x: axis(),
            y: linear("test error, %"),
            lines: vec![Line {
                name: "AdaComp".to_owned(),
                points: points(&|group| group.mean("/test_error")),
            }],
        },
        Chart {
            title: format!("how many times smaller: {kind}"),
            x: axis(),
            y: logarithmic("times"),
            lines: rates.into(),
        },
    ]
}

fn minibatch(groups: &[Seeds<'_>]) -> Vec<Chart> {
    let of = |scheme: &str, value: &dyn Fn(&Seeds<'_>) -> Option<f64>| {
        let own = groups.iter().filter(|group| group.run.text("scheme") == scheme);
        own.filter_map(|group| Some((group.run.number("minibatch")?, value(group)?))).collect()
    };
    let errors = ["dense", "adacomp"].map(|scheme| Line {
        name: scheme.to_owned(),
        points: of(scheme, &|group| group.mean("/test_error")),
    });
    let rates = ["conv", "matrix", "overall"].map(|kind| Line {
        name: kind.to_owned(),
        points: of("adacomp", &|group| group.compressed_rate("rice", kind)),
    });
    vec![
        Chart {
            title: "test error, %".to_owned(),
            x: logarithmic("samples of a minibatch"),
            y: linear("test error, %"),
            lines: errors.into(),
        },
        Chart {
            title: "how many times smaller, rice".to_owned(),
            x: logarithmic("samples of a minibatch"),
            y: logarithmic("times"),
            lines: rates.into(),
        },
    ]
}
