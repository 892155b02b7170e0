//! Whether a run fits into the memory of this machine.

use anyhow::{Result, bail};
use twofour_nn::recipe::MemoryPlan;

use crate::{exit::Usage, present::units};

/// Refuses a run that takes more memory than the machine has: the operating system would end it without a word. A machine that does not tell its memory refuses nothing.
///
/// # Errors
/// [`Usage`] with both numbers.
pub(super) fn expect_room(plan: &MemoryPlan) -> Result<()> {
    match std::fs::read_to_string("/proc/meminfo").ok().as_deref().and_then(total_of) {
        Some(total) => expect_within(plan, total),
        None => Ok(()),
    }
}

fn expect_within(plan: &MemoryPlan, total: u64) -> Result<()> {
    let needed = plan.total();
    if needed > total {
        bail!(Usage(format!(
            "the run takes about {}, {} of it for activations, but this machine has {} of memory; lower model.width, model.layers, training.batch or training.micro_batch",
            units::bytes(needed),
            units::bytes(plan.activations),
            units::bytes(total)
        )));
    }
    Ok(())
}

/// The bytes of `MemTotal`, which the file gives in KiB.
fn total_of(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_beyond_the_machine_is_refused_with_both_numbers() {
        let plan =
            MemoryPlan { masters: 4 << 30, gradients: 0, moments: 0, copies: 0, packed: 0, activations: 3 << 30 };
        assert!(expect_within(&plan, 7 << 30).is_ok());
        let message = expect_within(&plan, (7 << 30) - 1).unwrap_err().to_string();
        let has = |words: &str| message.contains(words);
        assert!(has(&units::bytes(7 << 30)) && has(&units::bytes(3 << 30)) && has("training.micro_batch"), "{message}");
        let endless = MemoryPlan { activations: u64::MAX, ..plan };
        assert!(expect_within(&endless, 1 << 40).is_err());
    }

    #[test]
    fn the_total_is_read_in_kib() {
        assert_eq!(total_of("MemFree: 3 kB\nMemTotal:       24 kB\n"), Some(24 * 1024));
        assert_eq!(total_of("MemTotal: many kB"), None);
        assert_eq!(total_of(""), None);
    }
}
