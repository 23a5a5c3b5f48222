//! Progress on the terminal, on stderr; nothing where that is not one.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar for something that takes a while.
pub(crate) fn bar(what: &str) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} {eta}").expect("the template is valid");
    ProgressBar::new(0).with_style(style).with_message(what.to_owned())
}

/// Moves it.
pub(crate) fn show(bar: &ProgressBar, done: usize, all: usize) {
    bar.set_length(all as u64);
    bar.set_position(done as u64);
}

/// A bar for bytes.
pub(crate) fn bytes(what: &str, all: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}");
    ProgressBar::new(all).with_style(style.expect("the template is valid")).with_message(what.to_owned())
}
