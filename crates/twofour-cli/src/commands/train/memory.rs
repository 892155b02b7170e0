//! Whether a run fits into the memory of this machine.

use std::path::Path;

use anyhow::{Result, bail};
use twofour_nn::recipe::MemoryPlan;

use crate::{exit::Usage, present::units};

/// Refuses a run that takes more memory than the machine has, or than its container may take: the operating system would end it without a word. A machine that does not tell its memory refuses nothing.
///
/// # Errors
/// [`Usage`] with both numbers.
pub(super) fn expect_room(plan: &MemoryPlan) -> Result<()> {
    let machine = std::fs::read_to_string("/proc/meminfo").ok().as_deref().and_then(total_of);
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    match machine.into_iter().chain(limit_of(&groups, Path::new("/sys/fs/cgroup"))).min() {
        Some(total) => expect_within(plan, total),
        None => Ok(()),
    }
}

/// The least limit of the control groups of a process, of both versions, and of the groups that those are in. A container often sees its own group as the root.
fn limit_of(groups: &str, root: &Path) -> Option<u64> {
    let limits = groups.lines().filter_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let (root, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => (root.join("memory"), "memory.limit_in_bytes"),
            _ => return None,
        };
        let group = root.join(path.trim_start_matches('/'));
        let inside = group.ancestors().take_while(|group| group.starts_with(&root));
        inside.filter_map(|group| std::fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok()).min()
    });
    limits.min()
}

fn expect_within(plan: &MemoryPlan, total: u64) -> Result<()> {
    let needed = plan.total();
    if needed > total {
        bail!(Usage(format!(
            "the run takes about {}, {} of it for activations, but this machine has {} of memory for it; lower model.width, model.layers, training.batch or training.micro_batch",
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
    fn the_least_limit_of_nested_groups_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("a/memory.max", "4096\n");
        write("a/b/memory.max", "max\n");
        write("a/b/c/memory.max", "8192\n");
        write("memory/x/memory.limit_in_bytes", "2048\n");
        write("memory/x/y/memory.limit_in_bytes", "9223372036854771712\n");
        let limit = |groups: &str| limit_of(groups, root.path());
        assert_eq!(limit("0::/a/b/c\n"), Some(4096));
        assert_eq!(limit("5:cpu:/a\n4:hugetlb,memory:/x/y\n0::/\n"), Some(2048));
        assert_eq!((limit("0::/\n"), limit("5:cpu:/a\n"), limit("nonsense")), (None, None, None));
        write("memory.max", "1024\n");
        assert_eq!(limit("0::/elsewhere/of/the/host\n"), Some(1024));
    }

    #[test]
    fn the_total_is_read_in_kib() {
        assert_eq!(total_of("MemFree: 3 kB\nMemTotal:       24 kB\n"), Some(24 * 1024));
        assert_eq!(total_of("MemTotal: many kB"), None);
        assert_eq!(total_of(""), None);
    }
}
