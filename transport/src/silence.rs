//! Detects a silent peer.
//!
//! A live peer sends something every [`KEEP_ALIVE`], whatever its disk does, so a silent one died,
//! hangs or is cut off. Not here: the observers and the consequences (`quic/watchdog.rs`,
//! `tcp/watch.rs`).

use std::time::Duration;

use tokio::time::Instant;

/// Interval at which an idle connection sends something, so that silence is a sign.
pub(crate) const KEEP_ALIVE: Duration = Duration::from_millis(200);

/// Interval between two checks of a connection.
pub(crate) const TICK: Duration = Duration::from_millis(50);

/// A check that is this late means that this process itself stalled, and data that arrived
/// meanwhile is unread.
const STALL_MIN: Duration = Duration::from_millis(150);

/// Silence after which the peer's host is probed: a keep-alive, its answer (which may be delayed by
/// 25 ms), and as much again.
const SUSPECT_AFTER: Duration = Duration::from_millis(300);

const _: () =
    assert!(SUSPECT_AFTER.as_millis() > KEEP_ALIVE.as_millis() + 50, "an idle peer must not be suspect");

/// State of the peer, judged by its silence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Liveness {
    Alive,
    /// Silent long enough to probe its host.
    Suspect,
    Lost,
}

/// Duration of the peer's silence, as far as this process could notice.
pub(crate) struct SilenceDetector {
    lost_after: Duration,
    signs: u64,
    since: Instant,
    last_check: Instant,
}

impl SilenceDetector {
    pub(crate) fn new(now: Instant, lost_after: Duration) -> SilenceDetector {
        SilenceDetector { lost_after, signs: 0, since: now, last_check: now }
    }

    /// Judges the peer by `signs`, a counter of any received data.
    pub(crate) fn check(&mut self, now: Instant, signs: u64) -> Liveness {
        let held_up = now.duration_since(self.last_check) > STALL_MIN;
        self.last_check = now;
        if signs != self.signs || held_up {
            self.signs = signs;
            self.since = now;
        }
        match now.duration_since(self.since) {
            quiet if quiet >= self.lost_after => Liveness::Lost,
            quiet if quiet >= SUSPECT_AFTER => Liveness::Suspect,
            _ => Liveness::Alive,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOST_AFTER: Duration = Duration::from_millis(750);

    fn millis(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    #[test]
    fn silence_makes_a_peer_suspect_and_then_lost() {
        let begun = Instant::now();
        let mut silence = SilenceDetector::new(begun, LOST_AFTER);
        // The first check counts the signs of the handshake.
        let verdicts: Vec<Liveness> = (0..=16).map(|tick| silence.check(begun + tick * TICK, 7)).collect();
        let first = |wanted| verdicts.iter().position(|verdict| *verdict == wanted);
        assert_eq!((first(Liveness::Suspect), first(Liveness::Lost)), (Some(6), Some(15)));
    }

    #[test]
    fn any_received_data_is_a_sign_of_life() {
        let begun = Instant::now();
        let mut silence = SilenceDetector::new(begun, LOST_AFTER);
        for tick in 0..100 {
            let verdict = silence.check(begun + tick * TICK, u64::from(tick / 5));
            assert_eq!(verdict, Liveness::Alive, "tick {tick}");
        }
    }

    #[test]
    fn a_stalled_process_does_not_blame_its_peer() {
        let begun = Instant::now();
        let mut silence = SilenceDetector::new(begun, LOST_AFTER);
        assert_eq!(silence.check(begun + millis(50), 1), Liveness::Alive);
        assert_eq!(silence.check(begun + millis(5_000), 1), Liveness::Alive);
        for tick in 1..6 {
            assert_eq!(silence.check(begun + millis(5_000 + tick * 50), 1), Liveness::Alive);
        }
        assert_eq!(silence.check(begun + millis(5_300), 1), Liveness::Suspect);
    }
}
