//! Quantities as people write them: `1gbit`, `0.2ms`.

use anyhow::{Result, bail};

/// Bytes a second from `10mbit`, `1gbit` or `2.5Gbit/s`.
pub(crate) fn bandwidth(text: &str) -> Result<f64> {
    let lower = text.to_lowercase();
    let lower = lower.strip_suffix("/s").unwrap_or(&lower);
    match read(lower, &[("kbit", 125.0), ("mbit", 125e3), ("gbit", 125e6)]) {
        Some(bandwidth) => Ok(bandwidth),
        None => bail!("a link speed of `{text}`: write it like 100mbit, 1gbit or 2.5gbit"),
    }
}

/// Seconds from `0.3s`, `200ms` or `50us`.
pub(crate) fn seconds(text: &str) -> Result<f64> {
    match read(text, &[("us", 1e-6), ("ms", 1e-3), ("s", 1.0)]) {
        Some(seconds) => Ok(seconds),
        None => bail!("a time of `{text}`: write it like 0.3s, 20ms or 50us"),
    }
}

/// A number and one of these units.
fn read(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let (number, factor) =
        units.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, factor)))?;
    let number: f64 = number.trim().parse().ok()?;
    (number.is_finite() && number >= 0.0).then_some(number * factor)
}

/// The reverse of `bandwidth`.
pub(crate) fn show_bandwidth(bytes: f64) -> String {
    let bits = 8.0 * bytes;
    match bits {
        _ if bits.is_infinite() => "any".to_owned(),
        0.0..1e6 => format!("{:.0} kbit", bits / 1e3),
        0.0..1e9 => format!("{:.0} Mbit", bits / 1e6),
        0.0..1e10 => format!("{:.1} Gbit", bits / 1e9),
        _ => format!("{:.0} Gbit", bits / 1e9),
    }
}

/// The reverse of `seconds`.
pub(crate) fn show_seconds(seconds: f64) -> String {
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
            assert_eq!(bandwidth(text).unwrap(), expected, "{text}");
        }
        for (text, expected) in [("0.3s", 0.3), ("200ms", 0.2), ("50us", 5e-5), ("1 s", 1.0)] {
            assert!((seconds(text).unwrap() - expected).abs() < 1e-12, "{text}");
        }
        for text in ["", "1", "gbit", "-1gbit", "NaNgbit", "1gbyte", "infgbit"] {
            assert!(bandwidth(text).is_err(), "{text}");
        }
        for text in ["", "1", "s", "-1s", "1h"] {
            assert!(seconds(text).is_err(), "{text}");
        }
        assert_eq!([show_bandwidth(1.25e6), show_bandwidth(1.25e8)], ["10 Mbit", "1.0 Gbit"]);
        assert_eq!(
            [show_seconds(0.0002), show_seconds(0.14), show_seconds(8.2)],
            ["0.20 ms", "140 ms", "8.20 s"]
        );
    }
}
