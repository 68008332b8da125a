//! Two clocks: wall time, and CPU time of the whole process.
//!
//! Not here: repetition of measurements (`measure.rs`).

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Wall and CPU time of an action.
#[derive(Clone, Copy, Debug)]
pub struct TimeSpent {
    /// Wall time.
    pub wall: Duration,
    /// CPU time of all threads of this process, user and kernel. Steadier than wall time on a
    /// shared machine.
    pub cpu: Duration,
}

impl TimeSpent {
    /// CPU microseconds per operation, for `count` operations.
    #[must_use]
    pub fn cpu_us_per(&self, count: u64) -> f64 {
        self.cpu.as_secs_f64() * 1e6 / count as f64
    }

    /// Operations per CPU-second.
    #[must_use]
    pub fn per_cpu_s(&self, count: u64) -> f64 {
        count as f64 / self.cpu.as_secs_f64()
    }

    /// Operations per second of wall time.
    #[must_use]
    pub fn per_wall_s(&self, count: u64) -> f64 {
        count as f64 / self.wall.as_secs_f64()
    }
}

impl std::ops::AddAssign for TimeSpent {
    fn add_assign(&mut self, other: TimeSpent) {
        self.wall += other.wall;
        self.cpu += other.cpu;
    }
}

/// Runs an action and measures its time.
pub fn measure_time<T>(action: impl FnOnce() -> T) -> (T, TimeSpent) {
    let (wall, cpu) = (Instant::now(), cpu_time());
    let result = action();
    (result, TimeSpent { wall: wall.elapsed(), cpu: cpu_time().saturating_sub(cpu) })
}

fn cpu_time() -> Duration {
    read(ClockId::ProcessCPUTime)
}

/// CPU time of the calling thread alone, to exclude the work of other threads.
#[must_use]
pub fn thread_cpu_time() -> Duration {
    read(ClockId::ThreadCPUTime)
}

fn read(clock: ClockId) -> Duration {
    let now = clock_gettime(clock);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn separates_cpu_and_wall_time() {
        let (sum, busy) = measure_time(|| (0..20_000_000u64).map(std::hint::black_box).sum::<u64>());
        assert_eq!(sum, 199_999_990_000_000);
        assert!(busy.cpu > Duration::ZERO);
        let (_, idle) =
            measure_time(|| std::sync::mpsc::channel::<()>().1.recv_timeout(Duration::from_millis(1)));
        assert!(idle.wall >= Duration::from_millis(1));
    }

    #[test]
    fn thread_cpu_time_excludes_other_threads() {
        let before = thread_cpu_time();
        let busy = || measure_time(|| (0..20_000_000u64).map(std::hint::black_box).sum::<u64>()).1.cpu;
        let other = std::thread::spawn(busy).join().expect("adding does not fail");
        assert!(thread_cpu_time() - before < other);
    }

    #[test]
    fn rates_are_counts_over_seconds() {
        let spent = TimeSpent { wall: Duration::from_secs(4), cpu: Duration::from_secs(2) };
        assert_eq!(spent.per_cpu_s(10), 5.0);
        assert_eq!(spent.per_wall_s(10), 2.5);
        assert_eq!(spent.cpu_us_per(4), 500_000.0);
    }
}
