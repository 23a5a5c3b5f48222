//! The results as a picture: step times relative to DDP as it comes, over the speed of the link.

use super::report::Results;
use super::{LEARNERS, LINKS, WORKLOADS};

/// How a method is drawn.
struct Style {
    method: &'static str,
    color: &'static str,
    dashes: &'static str,
}

const fn style(method: &'static str, color: &'static str, dashes: &'static str) -> Style {
    Style { method, color, dashes }
}

/// AdaComp on top, so last.
const STYLES: [Style; 11] = [
    style("none", "#999999", "1 4"),
    style("fp16", "#bbbbbb", "none"),
    style("bf16", "#8a8a8a", "none"),
    style("top-k", "#c9a227", "none"),
    style("powersgd-4", "#e08a5a", "none"),
    style("powersgd-1", "#b5523b", "none"),
    style("builtin", "#222222", "none"),
    style("sharded", "#7fb3d5", "none"),
    style("reduce", "#2e86c1", "none"),
    style("gather", "#1b4f72", "none"),
    style("auto", "#1e8449", "6 4"),
];

const PANEL: (f64, f64) = (300.0, 220.0);
const GAP: (f64, f64) = (60.0, 56.0);
const LEGEND: f64 = 60.0;
const LEGEND_COLUMNS: usize = 6;

/// Ratios at the bottom and the top of a panel.
const RANGE: (f64, f64) = (0.003, 8.0);

pub(super) fn draw(results: &Results) -> String {
    let (columns, rows) = (WORKLOADS.len() as f64, LEARNERS.len() as f64);
    let (width, height) = (columns * (PANEL.0 + GAP.0) + 20.0, rows * (PANEL.1 + GAP.1) + LEGEND + 20.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (row, learners) in LEARNERS.into_iter().enumerate() {
        for (column, workload) in WORKLOADS.into_iter().enumerate() {
            let (x, y) = (GAP.0 + column as f64 * (PANEL.0 + GAP.0), 36.0 + row as f64 * (PANEL.1 + GAP.1));
            svg += &format!(
                "<g transform=\"translate({x} {y})\">\n{}</g>\n",
                panel(results, workload, learners)
            );
        }
    }
    svg += &legend(height - LEGEND);
    svg + "</svg>\n"
}

fn panel(results: &Results, workload: &str, learners: usize) -> String {
    let (width, height) = PANEL;
    let mut svg =
        format!("<text x=\"0\" y=\"-12\" font-weight=\"bold\">{workload}, {learners} learners</text>\n");
    for ratio in [0.01, 0.1, 1.0] {
        let y = position(ratio);
        let color = if ratio == 1.0 { "#888888" } else { "#dddddd" };
        svg += &format!("<line x1=\"0\" x2=\"{width}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"{color}\"/>\n");
        svg += &format!("<text x=\"-6\" y=\"{:.1}\" text-anchor=\"end\">{ratio}</text>\n", y + 4.0);
    }
    for (number, link) in LINKS.iter().enumerate() {
        let x = across(number);
        svg +=
            &format!("<text x=\"{x}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n", height + 16.0, link.name);
    }
    for Style { method, color, dashes } in STYLES {
        let points = LINKS.iter().enumerate().filter_map(|(number, link)| {
            let ratio = results.ratio(workload, learners, link.name, method)?;
            Some((across(number), position(ratio)))
        });
        let points: Vec<_> = points.collect();
        let places: Vec<_> = points.iter().map(|(x, y)| format!("{x},{y:.1}")).collect();
        let line =
            format!("fill=\"none\" stroke=\"{color}\" stroke-width=\"2\" stroke-dasharray=\"{dashes}\"");
        let places = places.join(" ");
        svg += &format!("<g><title>{method}</title><polyline points=\"{places}\" {line}/>");
        for (x, y) in points {
            svg += &format!("<circle cx=\"{x}\" cy=\"{y:.1}\" r=\"2.5\" fill=\"{color}\"/>");
        }
        svg += "</g>\n";
    }
    svg
}

fn across(link: usize) -> f64 {
    let step = PANEL.0 / LINKS.len() as f64;
    step * (link as f64 + 0.5)
}

fn position(ratio: f64) -> f64 {
    let (low, high) = RANGE;
    PANEL.1 * (high / ratio.clamp(low, high)).ln() / (high / low).ln()
}

fn legend(y: f64) -> String {
    let mut svg = format!(
        "<text x=\"{}\" y=\"{y}\">Time of a step, as a multiple of DDP's own (builtin):</text>\n",
        GAP.0
    );
    for (number, Style { method, color, dashes }) in STYLES.iter().enumerate() {
        let (column, row) = (number % LEGEND_COLUMNS, number / LEGEND_COLUMNS);
        let (x, y) = (GAP.0 + column as f64 * 160.0, y + 20.0 + row as f64 * 20.0);
        let line = format!("stroke=\"{color}\" stroke-width=\"3\" stroke-dasharray=\"{dashes}\"");
        svg += &format!("<line x1=\"{x}\" x2=\"{}\" y1=\"{y}\" y2=\"{y}\" {line}/>\n", x + 20.0);
        svg += &format!("<text x=\"{}\" y=\"{}\">{method}</text>\n", x + 25.0, y + 4.0);
    }
    svg
}
