//! Chooses the router to try next, and the pause before it. Pure: time is passed in.

use std::collections::VecDeque;
use std::time::Duration;

/// First pause after all routers failed once.
const PAUSE_MIN: Duration = Duration::from_millis(50);

/// Longest pause between rounds: a new leader is found within a second of its election.
const PAUSE_MAX: Duration = Duration::from_millis(800);

/// Leader hints followed in a row before a pause; two routers that name each other end here.
const HINTS_MAX: u32 = 4;

/// A fence this soon after a join counts as quick, even with the pauses of a rival process. A
/// machine that lost its network again would take longer.
const QUICK_FENCE: Duration = Duration::from_secs(5);

/// Quick fences in a row before another process with the same id is suspected.
const DUPLICATE_ID_FENCES: u32 = 3;

/// Pause before the join after the second quick fence in a row; it doubles from there.
const REJOIN_MIN: Duration = Duration::from_millis(100);

/// Longest pause before a join: two nodes with one id then cost the routers a few joins a minute.
const REJOIN_MAX: Duration = Duration::from_secs(20);

/// Order of attempts.
#[derive(Debug)]
pub(crate) struct RouterSelector {
    routers: VecDeque<String>,
    hint: Option<String>,
    hints_followed: u32,
    tried: usize,
    pause: Duration,
    fences: u32,
    /// Pause after the last fence, and the part still to be waited.
    backoff: Duration,
    rejoin: Duration,
}

impl RouterSelector {
    pub(crate) fn new(routers: &[String]) -> RouterSelector {
        RouterSelector {
            routers: routers.iter().cloned().collect(),
            hint: None,
            hints_followed: 0,
            tried: 0,
            pause: PAUSE_MIN,
            fences: 0,
            backoff: Duration::ZERO,
            rejoin: Duration::ZERO,
        }
    }

    /// The next router, and the pause before it. `None` if there are no routers.
    pub(crate) fn next_router(&mut self) -> Option<(String, Duration)> {
        let rejoin = std::mem::take(&mut self.rejoin);
        if let Some(hint) = self.hint.take() {
            self.hints_followed += 1;
            return Some((hint, rejoin));
        }
        let address = self.routers.front()?.clone();
        self.routers.rotate_left(1);
        let mut wait = rejoin;
        if self.tried >= self.routers.len() {
            wait = wait.max(self.pause);
            self.pause = (self.pause * 2).min(PAUSE_MAX);
            self.tried = 0;
            self.hints_followed = 0;
        }
        self.tried += 1;
        Some((address, wait))
    }

    /// Sets a hint at the leader.
    pub(crate) fn set_leader_hint(&mut self, address: &str) {
        if !address.is_empty() && self.hints_followed < HINTS_MAX {
            self.hint = Some(address.to_owned());
        }
    }

    /// Records a fence, `epoch_age` after the join. Repeated quick fences mean that two nodes use
    /// the same id. The next join then waits, and from [`DUPLICATE_ID_FENCES`] on the number of
    /// fences is returned for the log.
    pub(crate) fn fenced(&mut self, epoch_age: Duration) -> Option<u32> {
        if epoch_age >= QUICK_FENCE + self.backoff * 2 {
            (self.fences, self.backoff) = (0, Duration::ZERO);
            return None;
        }
        self.fences += 1;
        // The first fence may end the epoch of an earlier process of this node.
        let doublings = self.fences.checked_sub(2);
        self.backoff = doublings.map_or(Duration::ZERO, |doublings| {
            REJOIN_MIN.saturating_mul(1u32.checked_shl(doublings).unwrap_or(u32::MAX)).min(REJOIN_MAX)
        });
        self.rejoin = self.backoff;
        (self.fences >= DUPLICATE_ID_FENCES).then_some(self.fences)
    }

    /// Records success: the next attempt starts with the same router and without a pause.
    pub(crate) fn succeeded(&mut self, address: &str) {
        if let Some(position) = self.routers.iter().position(|router| router == address) {
            self.routers.rotate_left(position);
        }
        (self.tried, self.hints_followed, self.pause) = (0, 0, PAUSE_MIN);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn seek() -> RouterSelector {
        RouterSelector::new(&["a:1".to_owned(), "b:1".to_owned()])
    }

    #[test]
    fn routers_are_tried_round_robin_with_growing_pauses() {
        let mut seek = seek();
        let tries: Vec<(String, u64)> = (0..6)
            .map(|_| seek.next_router().map(|(who, wait)| (who, wait.as_millis() as u64)).unwrap())
            .collect();
        let expected = [("a:1", 0), ("b:1", 0), ("a:1", 50), ("b:1", 0), ("a:1", 100), ("b:1", 0)];
        assert_eq!(tries, expected.map(|(who, wait)| (who.to_owned(), wait)));
    }

    #[test]
    fn leader_hint_is_tried_first_a_limited_number_of_times() {
        let mut seek = seek();
        for _ in 0..HINTS_MAX {
            seek.set_leader_hint("c:1");
            assert_eq!(seek.next_router().unwrap(), ("c:1".to_owned(), Duration::ZERO));
        }
        seek.set_leader_hint("c:1");
        assert_eq!(seek.next_router().unwrap().0, "a:1");
    }

    #[test]
    fn success_resets_pauses_and_keeps_the_router() {
        let mut seek = seek();
        for _ in 0..5 {
            seek.next_router();
        }
        seek.succeeded("b:1");
        assert_eq!(seek.next_router().unwrap(), ("b:1".to_owned(), Duration::ZERO));
    }

    #[test]
    fn quick_fences_grow_the_pause_and_report_a_duplicate_id() {
        let mut seek = seek();
        let soon = Duration::from_millis(20);
        let mut waits = Vec::new();
        for round in 1..=12u32 {
            assert_eq!(seek.fenced(soon), (round >= DUPLICATE_ID_FENCES).then_some(round));
            seek.succeeded("a:1");
            seek.set_leader_hint("a:1");
            waits.push(seek.next_router().unwrap().1);
        }
        assert_eq!(waits[..4], [0, 100, 200, 400].map(Duration::from_millis));
        assert_eq!(waits.last(), Some(&REJOIN_MAX));
        assert!(seek.fenced(REJOIN_MAX + QUICK_FENCE).is_some(), "the rival only kept its own pause");
        assert_eq!(seek.fenced(REJOIN_MAX * 2 + QUICK_FENCE), None);
        assert_eq!(seek.fenced(soon), None, "the count starts again");
    }

    #[test]
    fn no_routers_gives_no_router() {
        assert_eq!(RouterSelector::new(&[]).next_router(), None);
    }
}
