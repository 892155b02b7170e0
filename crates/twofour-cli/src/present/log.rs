//! Logs of internal events, on stderr; off by default.

use tracing_subscriber::EnvFilter;

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
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(anstream::AutoStream::choice(&std::io::stderr()) != anstream::ColorChoice::Never)
        .init();
}
