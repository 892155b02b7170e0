//! Whether the CPU has AMX tiles for bf16 and int8, and the kernel lets this process use them.

use std::sync::OnceLock;

/// Asks once; Linux grants the tile state to a process that requests it (`arch_prctl(2)`, `ARCH_REQ_XCOMP_PERM`).
pub(super) fn granted() -> bool {
    static GRANTED: OnceLock<bool> = OnceLock::new();
    *GRANTED.get_or_init(|| cpu_has_tiles() && request())
}

fn cpu_has_tiles() -> bool {
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    const AMX_INT8: u32 = 1 << 25;
    const ALL: u32 = AMX_BF16 | AMX_TILE | AMX_INT8;
    std::arch::x86_64::__cpuid(0).eax >= 7 && std::arch::x86_64::__cpuid_count(7, 0).edx & ALL == ALL
}

#[cfg(target_os = "linux")]
fn request() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call reads two integers and writes no memory of ours; it only widens what state the process may use.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn request() -> bool {
    false
}
