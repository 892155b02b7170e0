//! Bytes, times and shares in words that people read.

use std::time::Duration;

/// Bytes with a binary unit, three significant digits: `512 B`, `4.00 KiB`, `56.0 MiB`.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1023.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{} {}", significant(value), UNITS[unit])
}

/// A time with a unit, three significant digits: `730 ns`, `15.2 us`, `1.25 ms`, `90.0 s`, `3 min 20 s`.
pub fn time(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    match seconds {
        s if s < 1e-6 => format!("{} ns", significant(s * 1e9)),
        s if s < 1e-3 => format!("{} us", significant(s * 1e6)),
        s if s < 1.0 => format!("{} ms", significant(s * 1e3)),
        s if s < 120.0 => format!("{} s", significant(s)),
        s => format!("{} min {:02} s", (s / 60.0) as u64, (s % 60.0) as u64),
    }
}

/// A time in microseconds with a unit, as [`time`] writes it.
pub fn microseconds(us: f64) -> String {
    time(Duration::from_secs_f64(us * 1e-6))
}

/// A share in percent, with one decimal.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// How many times as much: `1.74x`.
pub fn factor(value: f64) -> String {
    format!("{value:.2}x")
}

/// A ratio in words: `1.74x faster`, or for one below 1 its inverse, `1.30x slower`.
pub fn factor_of(ratio: f64, above: &str, below: &str) -> String {
    if ratio >= 1.0 { format!("{} {above}", factor(ratio)) } else { format!("{} {below}", factor(1.0 / ratio)) }
}

/// A shape as in `4096x14336`; a scalar is `scalar`.
pub fn shape(dims: &[usize]) -> String {
    if dims.is_empty() {
        return "scalar".to_owned();
    }
    dims.iter().map(ToString::to_string).collect::<Vec<_>>().join("x")
}

/// A whole number with thin groups of three: `12 345`.
pub fn count(value: usize) -> String {
    let digits = value.to_string();
    let groups: Vec<&str> = digits.as_bytes().rchunks(3).rev().filter_map(|g| std::str::from_utf8(g).ok()).collect();
    groups.join(" ")
}

/// The right noun: `1 tensor`, `2 tensors`.
pub fn plural(value: usize, noun: &str) -> String {
    format!("{} {noun}{}", count(value), if value == 1 { "" } else { "s" })
}

/// Three significant digits.
fn significant(value: f64) -> String {
    match value {
        v if v < 9.995 => format!("{v:.2}"),
        v if v < 99.95 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_the_unit_that_leaves_few_digits() {
        let texts = [0, 1023, 1024, 10_240, 1 << 20, (1 << 30) - 1, u64::MAX].map(bytes);
        assert_eq!(texts, ["0 B", "1023 B", "1.00 KiB", "10.0 KiB", "1.00 MiB", "1.00 GiB", "16.0 EiB"]);
    }

    #[test]
    fn times_have_a_unit() {
        let texts = [730e-9, 15.24e-6, 1.25e-3, 2.0, 90.0, 200.0].map(|s| time(Duration::from_secs_f64(s)));
        assert_eq!(texts, ["730 ns", "15.2 us", "1.25 ms", "2.00 s", "90.0 s", "3 min 20 s"]);
    }

    #[test]
    fn numbers_are_grouped() {
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1 000", "1 234 567"]);
        assert_eq!([plural(1, "tensor"), plural(2, "tensor")], ["1 tensor", "2 tensors"]);
        assert_eq!([2.0, 0.5].map(|r| factor_of(r, "faster", "slower")), ["2.00x faster", "2.00x slower"]);
        assert_eq!([shape(&[]), shape(&[2, 3])], ["scalar", "2x3"]);
    }
}
