//! Whether work fits into the memory of this machine.

use std::path::Path;

use anyhow::{Result, bail};
use twofour::{
    DataType,
    file::{Reader, ValueFormat},
};

use crate::present::units;

/// Refuses work that takes more memory than the machine has, or than its container or the process may take: the
/// operating system would end it without a word. A machine that does not tell its memory refuses nothing. `what` takes
/// the bytes, and `remedy` says what to do.
///
/// # Errors
/// All of that in a line.
pub(crate) fn expect_room(needed: u64, what: &str, remedy: &str) -> Result<()> {
    match limit() {
        Some(total) => expect_within(needed, total, what, remedy),
        None => Ok(()),
    }
}

/// The memory that the machine has, or that its container or the process may take; nothing where the machine does not
/// tell.
pub(crate) fn limit() -> Option<u64> {
    let machine = std::fs::read_to_string("/proc/meminfo").ok().as_deref().and_then(total_of);
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let container = limit_of(&groups, Path::new("/sys/fs/cgroup"));
    machine.into_iter().chain(container).chain(limit_of_process()).min()
}

/// Refuses a model whose weights do not fit, as floats of `dtype` or as the integers that they are stored in.
///
/// # Errors
/// Those of [`expect_room`].
pub(crate) fn expect_room_for_weights(reader: &Reader, dtype: DataType) -> Result<()> {
    let what = format!("{}: the weights in {dtype} take", reader.path().display());
    expect_room(of_weights(reader, dtype), &what, "use a smaller model, or compute in bf16 where that was f32")
}

fn of_weights(reader: &Reader, dtype: DataType) -> u64 {
    let plain = reader.plain_tensors().map(|tensor| {
        let elements = tensor.shape.iter().fold(1, |product: u64, dim| product.saturating_mul(*dim as u64));
        elements.saturating_mul(dtype.bytes() as u64)
    });
    let compressed = reader.compressed_weights().map(|weight| match weight.format {
        // Half of the elements are kept.
        ValueFormat::Plain(_) => (weight.rows as u64).saturating_mul(weight.cols as u64) / 2 * dtype.bytes() as u64,
        _ => weight.bytes() as u64,
    });
    plain.chain(compressed).fold(0, u64::saturating_add)
}

/// The limit of the process's own memory, as `ulimit -v` sets it.
#[cfg(unix)]
fn limit_of_process() -> Option<u64> {
    use rustix::process::{Resource, getrlimit};
    getrlimit(Resource::As).current
}

#[cfg(not(unix))]
fn limit_of_process() -> Option<u64> {
    None
}

/// The least limit of the control groups of a process, of both versions, and of the groups that those are in. A
/// container often sees its own group as the root.
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

fn expect_within(needed: u64, total: u64, what: &str, remedy: &str) -> Result<()> {
    if needed > total {
        let (needed, total) = (units::bytes(needed), units::bytes(total));
        bail!("{what} about {needed}, but this machine has {total} of memory for it; {remedy}");
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
    fn work_beyond_the_machine_is_refused_with_both_numbers() {
        let within = |needed| expect_within(needed, 7 << 30, "the run takes", "train less");
        assert!(within(7 << 30).is_ok() && within(u64::MAX).is_err());
        let message = within((7 << 30) + 1).unwrap_err().to_string();
        let has = |words: &str| message.contains(words);
        assert!(has("the run takes about") && has(&units::bytes(7 << 30)) && has("; train less"), "{message}");
    }

    #[test]
    fn weights_take_the_bytes_of_the_type_that_they_are_computed_in() {
        use twofour::file::{CompressedInfo, Overwrite, Plan, PlannedTensor, StoredDType, Writer};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let mut plan = Plan::new();
        plan.tensor(PlannedTensor::new("bias", StoredDType::F32, [10]));
        plan.compressed(CompressedInfo::new("up", DataType::F32, 8, 16).unwrap());
        let mut writer = Writer::create(&path, Overwrite::No, plan, Default::default()).unwrap();
        writer.write_elements("bias", &[0f32; 10]).unwrap();
        let zeros = twofour::Compressed::from_dense(twofour::MatrixRef::new(8, 16, &[0f32; 128]).unwrap()).unwrap();
        writer.write_compressed("up", &zeros).unwrap();
        writer.finish().unwrap();
        let reader = Reader::open(&path).unwrap();
        assert_eq!([DataType::F32, DataType::BF16].map(|dtype| of_weights(&reader, dtype)), [4 * 74, 2 * 74]);
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
