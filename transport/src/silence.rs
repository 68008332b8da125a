//! How long nothing came from a peer, and what that means.
//!
//! A live peer says something every [`KEEP_ALIVE`], whatever its disk does, so one that is silent died, hangs or is
//! cut off. Not here: who listens, and what is done about it (`quic/watchdog.rs`, `tcp/watch.rs`).

use std::time::Duration;

use tokio::time::Instant;

/// How often an idle connection says something, so that silence means something.
pub(crate) const KEEP_ALIVE: Duration = Duration::from_millis(200);

/// How often a connection is looked at.
pub(crate) const TICK: Duration = Duration::from_millis(50);

/// A look that comes this late means that this process was held up: what arrived meanwhile is not read yet.
const HELD_UP: Duration = Duration::from_millis(150);

/// Silence after which the peer's host is asked whether the port is closed: a keep-alive, its answer (a
/// peer may delay it by 25 ms) and as much again.
const ASK_AFTER: Duration = Duration::from_millis(300);

const _: () =
    assert!(ASK_AFTER.as_millis() > KEEP_ALIVE.as_millis() + 50, "an idle peer must not look silent");

/// What silence so far means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Alive,
    /// Long enough to ask the host.
    Doubtful,
    Lost,
}

/// How long nothing came from the peer, as far as this process could have noticed.
pub(crate) struct Silence {
    lost_after: Duration,
    heard: u64,
    since: Instant,
    looked: Instant,
}

impl Silence {
    pub(crate) fn new(now: Instant, lost_after: Duration) -> Silence {
        Silence { lost_after, heard: 0, since: now, looked: now }
    }

    /// Takes note of what was heard so far, as a count of anything.
    pub(crate) fn look(&mut self, now: Instant, signs: u64) -> Verdict {
        let held_up = now.duration_since(self.looked) > HELD_UP;
        self.looked = now;
        if signs != self.heard || held_up {
            self.heard = signs;
            self.since = now;
        }
        match now.duration_since(self.since) {
            quiet if quiet >= self.lost_after => Verdict::Lost,
            quiet if quiet >= ASK_AFTER => Verdict::Doubtful,
            _ => Verdict::Alive,
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
    fn silence_is_doubted_and_then_believed() {
        let begun = Instant::now();
        let mut silence = Silence::new(begun, LOST_AFTER);
        // The first look hears the signs that came with the handshake.
        let verdicts: Vec<Verdict> = (0..=16).map(|tick| silence.look(begun + tick * TICK, 7)).collect();
        let first = |wanted| verdicts.iter().position(|verdict| *verdict == wanted);
        assert_eq!((first(Verdict::Doubtful), first(Verdict::Lost)), (Some(6), Some(15)));
    }

    #[test]
    fn any_word_is_a_sign_of_life() {
        let begun = Instant::now();
        let mut silence = Silence::new(begun, LOST_AFTER);
        for tick in 0..100 {
            let verdict = silence.look(begun + tick * TICK, u64::from(tick / 5));
            assert_eq!(verdict, Verdict::Alive, "tick {tick}");
        }
    }

    #[test]
    fn a_process_that_was_held_up_blames_itself() {
        let begun = Instant::now();
        let mut silence = Silence::new(begun, LOST_AFTER);
        assert_eq!(silence.look(begun + millis(50), 1), Verdict::Alive);
        assert_eq!(silence.look(begun + millis(5_000), 1), Verdict::Alive);
        for tick in 1..6 {
            assert_eq!(silence.look(begun + millis(5_000 + tick * 50), 1), Verdict::Alive);
        }
        assert_eq!(silence.look(begun + millis(5_300), 1), Verdict::Doubtful);
    }
}
