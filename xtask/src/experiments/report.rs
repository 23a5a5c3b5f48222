//! The documents made of results: tables in `docs/results.md` and `README.md`, figures, and one page with all of them.

use super::results::Results;
use super::study::Study;
use super::{figures, tables};
use crate::document::{Written, with_parts};
use crate::shell::{Result, root};

pub(super) fn written() -> Result<Written<'static>> {
    let (studies, results) = (Study::all()?, Results::read()?);
    let document = root().join("docs/results.md");
    let (mut parts, mut files, mut page) = (Vec::new(), Vec::new(), PAGE.to_owned());
    for study in &studies {
        let mut part = match study.name.as_str() {
            "main" => tables::main_table(study, &results),
            _ => tables::table(study, &results),
        };
        page += &format!("<h2>{}</h2>\n<p>{}</p>\n{}", study.name, study.about, html(&part));
        let path = root().join("docs/results").join(format!("{}.svg", study.name));
        if let Some(figure) = figures::draw(study, &results) {
            page += &figure;
            part += &format!("![{}](results/{}.svg)\n\n", study.about, study.name);
            files.push((path, figure));
        } else if path.exists() {
            return Err(format!("{}: there is nothing to draw any more, so remove it", path.display()));
        }
        if study.name != "main" {
            part = format!("\n{}\n{part}", study.about);
        }
        parts.push((study.name.as_str(), part));
    }
    files.push((document.clone(), with_parts(&document, &parts)?));
    let main = studies.iter().find(|study| study.name == "main").ok_or("there is no study `main`")?;
    let readme = root().join("README.md");
    files.push((readme.clone(), with_parts(&readme, &[("main", tables::short_table(main, &results))])?));
    files.push((root().join("docs/results/experiments.html"), page + "</body>\n</html>\n"));
    Ok(Written { by: "cargo xtask experiments report", files })
}

const PAGE: &str = "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
<title>adacomp: experiments</title>\n<style>\nbody { font-family: sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em }\n\
table { border-collapse: collapse; font-size: 14px } td, th { border: 1px solid #cccccc; padding: 4px 8px; text-align: left }\n\
svg { max-width: 100%; height: auto }\n</style>\n</head>\n<body>\n<h1>adacomp: experiments</h1>\n";

/// A table of the documents as HTML.
fn html(table: &str) -> String {
    let rows = table.lines().filter(|line| line.starts_with('|') && !line.starts_with("|---"));
    let row = |(number, line): (usize, &str)| {
        let cell = if number == 0 { "th" } else { "td" };
        let cells = line.trim_matches('|').split('|').map(|text| {
            let text = text.trim().replace("**", "").replace('`', "");
            format!("<{cell}>{text}</{cell}>")
        });
        format!("<tr>{}</tr>\n", cells.collect::<String>())
    };
    format!("<table>\n{}</table>\n", rows.enumerate().map(row).collect::<String>())
}
