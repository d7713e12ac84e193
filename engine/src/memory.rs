//! How much memory this process may still take.

use std::fs;

/// Bytes that can be allocated without swapping or being killed, where the system says: on Linux the smaller of what is
/// available and what the control group leaves.
pub fn available() -> Option<u64> {
    let group = group_left();
    match (meminfo(&fs::read_to_string("/proc/meminfo").ok()?), group) {
        (Some(machine), Some(group)) => Some(machine.min(group)),
        (machine, group) => machine.or(group),
    }
}

fn meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn group_left() -> Option<u64> {
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limit = number("/sys/fs/cgroup/memory.max")?;
    Some(limit.saturating_sub(number("/sys/fs/cgroup/memory.current")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_available_line_is_read() {
        let text = "MemTotal:       24000000 kB\nMemFree:         1 kB\nMemAvailable:   20000000 kB\n";
        assert_eq!(meminfo(text), Some(20_000_000 * 1024));
        assert_eq!(meminfo("MemAvailable: many"), None);
    }
}
