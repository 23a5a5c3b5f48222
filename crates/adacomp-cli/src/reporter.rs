//! How a run goes, as people and programs want to see it.

use crate::args::JsonLines;
use crate::config::{Config, value_name};
use crate::history::Epoch;
use crate::meter::Sums;
use crate::recipes::Metric;
use crate::show;
use crate::train::Reporter;
use adacomp::Layout;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use std::time::Instant;

/// Progress on stderr; a line an epoch on stdout, as text or as JSON.
pub(crate) struct Terminal {
    config: Config,
    metric: Metric,
    json: Option<JsonLines>,
    bar: ProgressBar,
    start: Instant,
    first_step: Option<u64>,
    /// The last epoch's error or loss, for the bar.
    tested: String,
    headed: bool,
}

impl Terminal {
    /// For a run of so many steps.
    pub(crate) fn new(config: &Config, metric: Metric, json: Option<JsonLines>, steps: u64) -> Self {
        let style = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} steps, {msg}, {eta} left");
        let bar = ProgressBar::new(steps).with_style(style.expect("the template is valid"));
        bar.set_prefix(format!("{} {}", config.recipe, value_name(config.scheme)));
        let config = config.clone();
        Self {
            config,
            metric,
            json,
            bar,
            start: Instant::now(),
            first_step: None,
            tested: String::new(),
            headed: false,
        }
    }

    /// Prints without tearing the bar.
    fn print(&self, line: &str) {
        self.bar.suspend(|| say!("{line}"));
    }

    fn head(&mut self) {
        if !std::mem::replace(&mut self.headed, true) {
            self.print("epoch  test error  test loss  train loss    rate    conv  matrix  sent a learner        time");
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

impl Reporter for Terminal {
    fn step(&mut self, step: u64, loss: f64, sums: &Sums, layout: &Layout) {
        let first = *self.first_step.get_or_insert_with(|| {
            // What an earlier process has done says nothing on the time that is left.
            self.bar.set_position(step - 1);
            self.bar.reset_eta();
            step - 1
        });
        let samples = (step - first) as f64 * self.config.minibatch as f64;
        let rate = sums.rates(layout).overall;
        let speed = samples / self.start.elapsed().as_secs_f64();
        let (rate_text, tested) = (show::rate(rate), &self.tested);
        self.bar.set_message(format!("loss {loss:.3}{tested}, rate {rate_text}, {speed:.0} samples/s"));
        self.bar.set_position(step);
        if self.json == Some(JsonLines::Steps) {
            self.print(
                &json!({ "scheme": self.config.scheme, "step": step, "loss": loss, "rate": rate })
                    .to_string(),
            );
        }
    }

    fn epoch(&mut self, epoch: &Epoch) {
        self.tested = match self.metric {
            Metric::Error => format!(", error {:.2}%", epoch.test_error),
            Metric::Loss => format!(", test loss {:.3}", epoch.test_loss),
        };
        if self.json.is_some() {
            let mut line = json!({ "recipe": self.config.recipe, "scheme": self.config.scheme });
            let epoch = serde_json::to_value(epoch).unwrap_or_default();
            if let (Some(line), serde_json::Value::Object(epoch)) = (line.as_object_mut(), epoch) {
                line.extend(epoch);
            }
            return self.print(&line.to_string());
        }
        self.head();
        self.print(&format!(
            "{:>5}  {:>9.2}%  {:>9.4}  {:>10.4}  {:>6}  {:>6}  {:>6}  {:>14}  {:>10}",
            epoch.epoch,
            epoch.test_error,
            epoch.test_loss,
            epoch.train_loss,
            show::rate(epoch.rate.overall),
            show::rate(epoch.rate.conv),
            show::rate(epoch.rate.matrix),
            show::bytes(epoch.bytes_sent),
            show::seconds(epoch.total.seconds),
        ));
        if epoch.dropped_steps > 0 {
            self.print(&format!("       {} steps dropped: a gradient was not finite", epoch.dropped_steps));
        }
    }
}
