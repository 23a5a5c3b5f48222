//! What the program says, and numbers and tables for people.

use std::fmt;
use std::io::{self, Write};

/// Prints, as `print!` does, which panics where nobody reads.
macro_rules! tell {
    ($($text:tt)*) => { $crate::show::write(format_args!($($text)*)) };
}

/// Prints a line, as `println!` does, which panics where nobody reads.
macro_rules! say {
    ($($text:tt)*) => { $crate::show::write(format_args!("{}\n", format_args!($($text)*))) };
}

/// Prints a line to standard error, and does not mind if nobody reads it.
macro_rules! note {
    ($($text:tt)*) => {{
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}

/// Writes to standard output. Where nobody reads on, as after `| head`, work goes on in silence; where it cannot be written, as
/// on a full disk, the program ends.
pub(crate) fn write(text: fmt::Arguments<'_>) {
    match io::stdout().write_fmt(text) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            note!("error: cannot write to standard output: {error}");
            std::process::exit(i32::from(crate::CANNOT));
        }
        _ => {}
    }
}

/// Rows of cells as columns: the first to the left, the others to the right.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width =
        |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| match column {
            0 => format!("{cell:<width$}"),
            _ => format!("  {cell:>width$}"),
        });
        cells.collect::<String>().trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

/// Cells of a row.
pub(crate) fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).to_vec()
}

pub(crate) fn bytes(bytes: f64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB"];
    let unit = units.iter().enumerate().rev().find(|(power, _)| bytes >= 1000f64.powi(*power as i32));
    let (power, unit) = unit.unwrap_or((0, &units[0]));
    let scaled = bytes / 1000f64.powi(power as i32);
    if power == 0 { format!("{scaled:.0} {unit}") } else { format!("{scaled:.1} {unit}") }
}

pub(crate) fn rate(rate: Option<f64>) -> String {
    match rate {
        None => "-".to_owned(),
        Some(rate) if rate < 10.0 => format!("{rate:.2}"),
        Some(rate) => format!("{rate:.0}"),
    }
}

pub(crate) fn seconds(seconds: f64) -> String {
    match seconds as u64 {
        0..100 => format!("{seconds:.1} s"),
        whole @ 100..6000 => format!("{}:{:02} min", whole / 60, whole % 60),
        whole => format!("{}:{:02} h", whole / 3600, whole / 60 % 60),
    }
}

/// The most memory that this process has had so far, where the system tells.
pub(crate) fn peak_memory() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<f64>().ok()? * 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!(
            [bytes(0.0), bytes(999.0), bytes(1000.0), bytes(2.5e9)],
            ["0 B", "999 B", "1.0 kB", "2.5 GB"]
        );
        assert_eq!([rate(None), rate(Some(2.0)), rate(Some(431.4))], ["-", "2.00", "431"]);
        assert_eq!([seconds(1.0), seconds(125.0), seconds(7260.0)], ["1.0 s", "2:05 min", "2:01 h"]);
    }

    #[test]
    fn columns_line_up() {
        let rows = [row(["", "a"]), row(["long name", "12"])];
        assert_eq!(table(&rows), "            a\nlong name  12\n");
    }
}
