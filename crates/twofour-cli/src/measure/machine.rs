//! The machine's description.

use std::fs;

use serde::{Deserialize, Serialize};
use twofour::kernel::Engine;

/// The machine that was measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Machine {
    /// The CPU's name, as the operating system reports it.
    pub cpu: String,
    /// Hardware threads.
    pub hardware_threads: usize,
    /// Threads in use.
    pub threads: usize,
    /// The kernels' engine.
    pub engine: String,
    /// Bytes of the last-level cache that a core sees; null where the operating system does not report it.
    pub last_level_cache_bytes: Option<u64>,
    /// The operating system.
    pub os: String,
}

/// Returns this machine's description, with the threads of the current rayon pool.
///
/// # Errors
/// Those of [`Engine::best`].
pub fn machine() -> twofour::Result<Machine> {
    Ok(Machine {
        cpu: cpu_name().unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
        hardware_threads: crate::threads::of_machine(),
        threads: rayon::current_num_threads(),
        engine: Engine::best()?.to_string(),
        last_level_cache_bytes: last_level_cache(),
        os: std::env::consts::OS.to_owned(),
    })
}

fn cpu_name() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Returns the load average of the last minute, or nothing where the operating system does not report it.
pub fn load_average() -> Option<f64> {
    fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

/// Returns the bytes of the largest cache of the first core, from sysfs.
pub(crate) fn last_level_cache() -> Option<u64> {
    let sizes = fs::read_dir("/sys/devices/system/cpu/cpu0/cache").ok()?.filter_map(|entry| {
        let text = fs::read_to_string(entry.ok()?.path().join("size")).ok()?;
        cache_size(text.trim())
    });
    sizes.max()
}

/// Parses `32768K` or `32M`.
fn cache_size(text: &str) -> Option<u64> {
    let (digits, unit) = match text.strip_suffix('K') {
        Some(digits) => (digits, 1 << 10),
        None => match text.strip_suffix('M') {
            Some(digits) => (digits, 1 << 20),
            None => (text, 1),
        },
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_sizes_are_read() {
        let sizes = ["32768K", "32M", "512", "x", ""].map(cache_size);
        assert_eq!(sizes, [Some(32 << 20), Some(32 << 20), Some(512), None, None]);
    }
}
