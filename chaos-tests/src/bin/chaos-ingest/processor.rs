//! Processor time of processes, as the system accounts it.

/// Microseconds of one accounting tick: Linux reports a hundred a second on every machine.
const TICK_US: u64 = 10_000;

/// Processor time of a process, user and system, in microseconds; 0 if it is gone.
pub(crate) fn process_us(process: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The process name may contain anything, but the fields follow its last parenthesis.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_ascii_whitespace();
    let ticks: u64 = fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
    ticks * TICK_US
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::process_us;

    #[test]
    fn work_is_counted() {
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(200) {}
        assert!(process_us(std::process::id()) >= 50_000);
        assert_eq!(process_us(u32::MAX), 0);
    }
}
