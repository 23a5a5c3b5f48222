//! Lines in a coordinate system, as SVG.

/// One coordinate system.
pub(crate) struct Chart {
    pub(crate) title: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) lines: Vec<Line>,
}

pub(crate) struct Axis {
    pub(crate) label: &'static str,
    /// Whether equal distances are equal ratios.
    pub(crate) logarithmic: bool,
}

pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Told apart also without colour vision; when they are used up, they come again with dashes.
const COLORS: [&str; 6] = ["#222222", "#1b6ca8", "#c0392b", "#1e8449", "#b9770e", "#7d3c98"];

const PLOT: (f64, f64) = (300.0, 200.0);
const MARGINS: (f64, f64) = (66.0, 34.0);
const FOOT: f64 = 46.0;
const LEGEND_LINE: f64 = 17.0;

/// Charts beside each other, in rows of so many.
pub(crate) fn svg(charts: &[Chart], columns: usize) -> String {
    let most_lines = charts.iter().map(|chart| chart.lines.len()).max().unwrap_or(0);
    let cell = (MARGINS.0 + PLOT.0 + 24.0, MARGINS.1 + PLOT.1 + FOOT + LEGEND_LINE * most_lines as f64 + 8.0);
    let (across, down) = (columns.min(charts.len()) as f64, charts.len().div_ceil(columns) as f64);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        across * cell.0,
        down * cell.1
    );
    for (number, chart) in charts.iter().enumerate() {
        let (x, y) = ((number % columns) as f64 * cell.0, (number / columns) as f64 * cell.1);
        svg += &format!(
            "<g transform=\"translate({:.0} {:.0})\">\n{}</g>\n",
            x + MARGINS.0,
            y + MARGINS.1,
            chart.panel()
        );
    }
    svg + "</svg>\n"
}

impl Chart {
    fn panel(&self) -> String {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let x = Scale::of(&self.x, points().map(|point| point.0), PLOT.0);
        let y = Scale::of(&self.y, points().map(|point| point.1), PLOT.1);
        let (width, height) = PLOT;
        let mut svg = format!(
            "<text x=\"{:.0}\" y=\"-12\" text-anchor=\"middle\" font-weight=\"bold\">{}</text>\n\
             <rect width=\"{width}\" height=\"{height}\" fill=\"none\" stroke=\"#888888\"/>\n",
            width / 2.0,
            self.title
        );
        for tick in x.ticks() {
            let at = x.place(tick);
            svg += &format!(
                "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y2=\"{height}\" stroke=\"#e4e4e4\"/>\
                 <text x=\"{at:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{}</text>\n",
                height + 16.0,
                short(tick)
            );
        }
        for tick in y.ticks() {
            let at = height - y.place(tick);
            svg += &format!(
                "<line y1=\"{at:.1}\" y2=\"{at:.1}\" x2=\"{width}\" stroke=\"#e4e4e4\"/>\
                 <text x=\"-6\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n",
                at + 4.0,
                short(tick)
            );
        }
        svg += &format!(
            "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"middle\">{}</text>\n\
             <text transform=\"translate(-50 {:.0}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n",
            width / 2.0,
            height + 34.0,
            self.x.label,
            height / 2.0,
            self.y.label
        );
        for (number, line) in self.lines.iter().enumerate() {
            let color = COLORS[number % COLORS.len()];
            let dashes = if number < COLORS.len() { "none" } else { "6 4" };
            let places: Vec<_> =
                line.points.iter().map(|point| (x.place(point.0), height - y.place(point.1))).collect();
            let path: Vec<_> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            svg += &format!(
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"1.8\" stroke-dasharray=\"{dashes}\"/>\n",
                path.join(" ")
            );
            if places.len() <= 12 {
                for (x, y) in places {
                    svg += &format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.6\" fill=\"{color}\"/>\n");
                }
            }
            let (left, top) = (0.0, height + FOOT + LEGEND_LINE * number as f64);
            svg += &format!(
                "<line x1=\"{left:.0}\" x2=\"{:.0}\" y1=\"{top:.0}\" y2=\"{top:.0}\" stroke=\"{color}\" stroke-width=\"3\" stroke-dasharray=\"{dashes}\"/>\
                 <text x=\"{:.0}\" y=\"{:.0}\">{}</text>\n",
                left + 18.0,
                left + 24.0,
                top + 4.0,
                line.name
            );
        }
        svg
    }
}

/// From values to places.
struct Scale {
    logarithmic: bool,
    /// Of the values, or of their logarithms.
    low: f64,
    high: f64,
    length: f64,
}

impl Scale {
    fn of(axis: &Axis, values: impl Iterator<Item = f64>, length: f64) -> Self {
        let values = values.filter(|value| !axis.logarithmic || *value > 0.0);
        let values = values.map(|value| if axis.logarithmic { value.log10() } else { value });
        let (low, high) = values
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        if low > high {
            return Self { logarithmic: axis.logarithmic, low: 0.0, high: 1.0, length };
        }
        let space = if high > low { 0.05 * (high - low) } else { 0.5 };
        Self { logarithmic: axis.logarithmic, low: low - space, high: high + space, length }
    }

    fn place(&self, value: f64) -> f64 {
        let value = if self.logarithmic { value.max(f64::MIN_POSITIVE).log10() } else { value };
        (value - self.low) / (self.high - self.low) * self.length
    }

    /// Round values within.
    fn ticks(&self) -> Vec<f64> {
        if self.logarithmic && self.high - self.low > 0.8 {
            let decades = self.low.floor() as i32..=self.high.ceil() as i32;
            let steps: &[f64] = match self.high - self.low {
                0.0..1.5 => &[1.0, 2.0, 5.0],
                _ => &[1.0],
            };
            let all = decades.flat_map(|decade| steps.iter().map(move |step| step * 10f64.powi(decade)));
            return all.filter(|value| (self.low..=self.high).contains(&value.log10())).collect();
        }
        let (low, high) = match self.logarithmic {
            true => (10f64.powf(self.low), 10f64.powf(self.high)),
            false => (self.low, self.high),
        };
        let rough = (high - low) / 4.0;
        let decade = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|times| times * decade);
        let step = step.into_iter().find(|step| *step >= rough).unwrap_or(rough);
        let first = (low / step).ceil() as i64;
        (first..).map(|number| number as f64 * step).take_while(|value| *value <= high).collect()
    }
}

/// A number as people write it.
fn short(value: f64) -> String {
    match value.abs() {
        1e6.. => format!("{}M", trimmed(value / 1e6, 1)),
        1e4.. => format!("{}k", trimmed(value / 1e3, 0)),
        0.1.. => trimmed(value, 3),
        _ => trimmed(value, 5),
    }
}

/// Without zeros at the end.
fn trimmed(value: f64, digits: usize) -> String {
    let text = format!("{value:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_within() {
        let axis = |logarithmic| Axis { label: "", logarithmic };
        let scale = Scale::of(&axis(false), [0.0, 10.0].into_iter(), 100.0);
        assert_eq!(scale.ticks(), [0.0, 5.0, 10.0]);
        assert!((scale.place(10.0) - 100.0 * 10.5 / 11.0).abs() < 1e-9);
        let scale = Scale::of(&axis(true), [1.0, 128.0].into_iter(), 100.0);
        assert_eq!(scale.ticks(), [1.0, 10.0, 100.0]);
        assert_eq!([0.5, 12.0, 25_000.0, 1.5e6, 0.0].map(short), ["0.5", "12", "25k", "1.5M", "0"]);
    }

    #[test]
    fn every_line_is_drawn() {
        let line = Line { name: "one".to_owned(), points: vec![(1.0, 2.0), (2.0, 3.0)] };
        let axis = || Axis { label: "steps", logarithmic: false };
        let svg = svg(&[Chart { title: "a title".to_owned(), x: axis(), y: axis(), lines: vec![line] }], 2);
        assert_eq!(svg.matches("<polyline").count(), 1);
        assert_eq!(svg.matches("<circle").count(), 2);
        assert!(svg.contains(">a title<") && svg.contains(">one<"));
    }
}
