//! Logs of internal events, on stderr; off by default.

use std::io;

use tracing_subscriber::EnvFilter;

use super::escape;

/// The environment variable that holds a filter of `tracing_subscriber`; it wins over `--verbose`.
const VARIABLE: &str = "TWOFOUR_LOG";

/// Starts logging. `verbosity` counts the `--verbose` flags.
pub(crate) fn start(verbosity: u8) {
    let level = match verbosity {
        0 => "warn",
        1 => "twofour=info",
        _ => "twofour=debug",
    };
    let filter = EnvFilter::try_from_env(VARIABLE).unwrap_or_else(|_| EnvFilter::new(level));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| Escaped).with_ansi(false).init();
}

/// Stderr, for whole lines of the log with names from files in them.
struct Escaped;

impl io::Write for Escaped {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        let text = escape::line(text.strip_suffix('\n').unwrap_or(&text));
        io::stderr().write_all(format!("{text}\n").as_bytes())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
