//! Which router to try next, and when. Pure: time comes in.

use std::collections::VecDeque;
use std::time::Duration;

/// First pause after all routers failed once.
const PAUSE_MIN: Duration = Duration::from_millis(50);

/// Longest pause between rounds: a new leader is found within a second of taking office.
const PAUSE_MAX: Duration = Duration::from_millis(800);

/// Leader hints followed in a row before a pause; two routers that point at each other end here.
const HINTS_MAX: u32 = 4;

/// The order of tries.
#[derive(Debug)]
pub(crate) struct Seek {
    routers: VecDeque<String>,
    hint: Option<String>,
    hints_followed: u32,
    tried: usize,
    pause: Duration,
}

impl Seek {
    pub(crate) fn new(routers: &[String]) -> Seek {
        Seek {
            routers: routers.iter().cloned().collect(),
            hint: None,
            hints_followed: 0,
            tried: 0,
            pause: PAUSE_MIN,
        }
    }

    /// Whom to try, after which pause. `None` without any router.
    pub(crate) fn next(&mut self) -> Option<(String, Duration)> {
        if let Some(hint) = self.hint.take() {
            self.hints_followed += 1;
            return Some((hint, Duration::ZERO));
        }
        let address = self.routers.front()?.clone();
        self.routers.rotate_left(1);
        let mut wait = Duration::ZERO;
        if self.tried >= self.routers.len() {
            wait = self.pause;
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
    fn without_routers_there_is_nobody_to_try() {
        assert_eq!(Seek::new(&[]).next(), None);
    }
}
