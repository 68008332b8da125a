//! Which router to try next, and when. Pure: time comes in.

use std::collections::VecDeque;
use std::time::Duration;

/// First pause after all routers failed once.
const PAUSE_MIN: Duration = Duration::from_millis(50);

/// Longest pause between rounds: a new leader is found within a second of taking office.
const PAUSE_MAX: Duration = Duration::from_millis(800);

/// Leader hints followed in a row before a pause; two routers that point at each other end here.
const HINTS_MAX: u32 = 4;

/// A fence this soon after a join, or so soon after the pauses that both rivals keep, is hardly a machine
/// that lost its network again.
const FENCED_SOON: Duration = Duration::from_secs(5);

/// Fences in a row, each soon after its join, before somebody else with the same id is suspected.
const RIVALS_SUSPECTED: u32 = 3;

/// Pause before the join after the second fence in a row; it doubles from there.
const REJOIN_MIN: Duration = Duration::from_millis(100);

/// Longest pause before a join: two nodes with one id then cost the routers a few joins a minute.
const REJOIN_MAX: Duration = Duration::from_secs(20);

/// The order of tries.
#[derive(Debug)]
pub(crate) struct Seek {
    routers: VecDeque<String>,
    hint: Option<String>,
    hints_followed: u32,
    tried: usize,
    pause: Duration,
    fences: u32,
    /// Pause of the last fence, and what of it is still to be waited.
    backoff: Duration,
    rejoin: Duration,
}

impl Seek {
    pub(crate) fn new(routers: &[String]) -> Seek {
        Seek {
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

    /// Whom to try, after which pause. `None` without any router.
    pub(crate) fn next(&mut self) -> Option<(String, Duration)> {
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

    /// Someone named the leader.
    pub(crate) fn leader_is(&mut self, address: &str) {
        if !address.is_empty() && self.hints_followed < HINTS_MAX {
            self.hint = Some(address.to_owned());
        }
    }

    /// The routers ended the epoch, `lived` after its join. Soon and again and again means that two nodes
    /// take the same id from each other: the next join waits, and from some fences on their number comes
    /// back, to be told to a person.
    pub(crate) fn fenced(&mut self, lived: Duration) -> Option<u32> {
        if lived >= FENCED_SOON + self.backoff * 2 {
            (self.fences, self.backoff) = (0, Duration::ZERO);
            return None;
        }
        self.fences += 1;
        // The first may be the end of an epoch that an earlier process of this node had.
        let doublings = self.fences.checked_sub(2);
        self.backoff = doublings.map_or(Duration::ZERO, |doublings| {
            REJOIN_MIN.saturating_mul(1u32.checked_shl(doublings).unwrap_or(u32::MAX)).min(REJOIN_MAX)
        });
        self.rejoin = self.backoff;
        (self.fences >= RIVALS_SUSPECTED).then_some(self.fences)
    }

    /// It worked: the next trouble starts from the beginning, with the same router.
    pub(crate) fn worked(&mut self, address: &str) {
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

    fn seek() -> Seek {
        Seek::new(&["a:1".to_owned(), "b:1".to_owned()])
    }

    #[test]
    fn routers_are_tried_in_turn_with_growing_pauses() {
        let mut seek = seek();
        let tries: Vec<(String, u64)> =
            (0..6).map(|_| seek.next().map(|(who, wait)| (who, wait.as_millis() as u64)).unwrap()).collect();
        let expected = [("a:1", 0), ("b:1", 0), ("a:1", 50), ("b:1", 0), ("a:1", 100), ("b:1", 0)];
        assert_eq!(tries, expected.map(|(who, wait)| (who.to_owned(), wait)));
    }

    #[test]
    fn a_hint_goes_first_but_not_for_ever() {
        let mut seek = seek();
        for _ in 0..HINTS_MAX {
            seek.leader_is("c:1");
            assert_eq!(seek.next().unwrap(), ("c:1".to_owned(), Duration::ZERO));
        }
        seek.leader_is("c:1");
        assert_eq!(seek.next().unwrap().0, "a:1");
    }

    #[test]
    fn success_starts_anew_with_the_same_router() {
        let mut seek = seek();
        for _ in 0..5 {
            seek.next();
        }
        seek.worked("b:1");
        assert_eq!(seek.next().unwrap(), ("b:1".to_owned(), Duration::ZERO));
    }

    #[test]
    fn fences_soon_after_joins_make_growing_pauses_and_name_a_rival() {
        let mut seek = seek();
        let soon = Duration::from_millis(20);
        let mut waits = Vec::new();
        for round in 1..=12u32 {
            assert_eq!(seek.fenced(soon), (round >= RIVALS_SUSPECTED).then_some(round));
            seek.worked("a:1");
            seek.leader_is("a:1");
            waits.push(seek.next().unwrap().1);
        }
        assert_eq!(waits[..4], [0, 100, 200, 400].map(Duration::from_millis));
        assert_eq!(waits.last(), Some(&REJOIN_MAX));
        assert!(seek.fenced(REJOIN_MAX + FENCED_SOON).is_some(), "the rival only kept its own pause");
        assert_eq!(seek.fenced(REJOIN_MAX * 2 + FENCED_SOON), None);
        assert_eq!(seek.fenced(soon), None, "counted from the beginning");
    }

    #[test]
    fn without_routers_there_is_nobody_to_try() {
        assert_eq!(Seek::new(&[]).next(), None);
    }
}
