//! How much memory this process has used at most.

/// Peak resident memory in bytes, where the system tells.
#[cfg(target_os = "linux")]
pub(crate) fn peak_bytes() -> Option<u64> {
    // Not getrusage: there a program starts with the peak of the one that launched it.
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

/// Peak resident memory in bytes, where the system tells.
#[cfg(all(unix, not(target_os = "linux")))]
pub(crate) fn peak_bytes() -> Option<u64> {
    use nix::sys::resource::{UsageWho, getrusage};
    let peak = u64::try_from(getrusage(UsageWho::RUSAGE_SELF).ok()?.max_rss()).ok()?;
    // macOS counts bytes, the BSDs kilobytes.
    Some(if cfg!(target_vendor = "apple") { peak } else { peak * 1024 })
}

/// Peak resident memory in bytes, where the system tells.
#[cfg(not(unix))]
pub(crate) fn peak_bytes() -> Option<u64> {
    None
}
