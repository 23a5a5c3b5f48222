//! A page that shows runs side by side, with everything in one file.

use crate::history::History;
use crate::recipes::Metric;
use anyhow::Result;
use serde_json::{Map, Value, json};

/// What a report shows.
pub(crate) struct Data<'a> {
    pub(crate) recipe: &'a str,
    pub(crate) about: &'a str,
    pub(crate) metric: Metric,
    /// Whether all runs have come to their end.
    pub(crate) finished: bool,
    pub(crate) command: String,
    pub(crate) configuration: Vec<(String, String)>,
    pub(crate) machine: String,
    /// A scheme and what it did.
    pub(crate) runs: Vec<(String, &'a History)>,
}

/// The page; its script reads the data and draws.
const TEMPLATE: &str = include_str!("report.html");

pub(crate) fn page(data: &Data<'_>) -> Result<String> {
    let configuration: Map<String, Value> =
        data.configuration.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
    let runs: Vec<Value> = data
        .runs
        .iter()
        .map(|(scheme, history)| json!({ "scheme": scheme, "label": scheme, "history": history }))
        .collect();
    let json = serde_json::to_string(&json!({
        "recipe": data.recipe,
        "about": data.about,
        "metric": data.metric,
        "finished": data.finished,
        "command": data.command,
        "configuration": configuration,
        "machine": data.machine,
        "runs": runs,
    }))?;
    // Within a script nothing may look like its end.
    let json = json.replace('<', "\\u003c");
    Ok(TEMPLATE.replace("{{TITLE}}", data.recipe).replace("{{DATA}}", &json))
}
