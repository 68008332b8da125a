//! The numbers of one engine's messages: which count, which are missing, and when it is another process that sends them.
//!
//! A publisher numbers its messages from 0, sends each once to whoever is connected, and keeps the last ones for who asks again. It does
//! not say which process it is. What is known of that:
//!
//! - Over one connection one process speaks, and its numbers rise. A live message that a replay has brought already is an old one.
//! - A connection may be to another process than the one before. So a replay is asked for *from the last message that counted*: only if
//!   that comes back as it was, is it the same process. A replay without it shows another one, or one that keeps too little to tell.
//! - A replay may have holes, where its sender does not wait for the receiver. What came before a hole counts, and the rest is asked for
//!   again.
//!
//! Pure: what to do is the answer. Not here: sockets, and what messages say (`engine_events.rs`).

use xxhash_rust::xxh3::xxh3_64;

/// What becomes of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// It is the next one.
    Next,
    /// It was here before.
    Before,
    /// Others are missing before it: ask for a replay from this number on, and do not count it yet.
    Gap {
        /// The last that counted, or 0 where none did.
        from: u64,
    },
    /// Numbers of one connection went back: what it said does not count, and then this is as said.
    Restarted,
}

/// What became of a message of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replayed {
    /// It is the next one.
    Next,
    /// It says nothing new.
    Before,
    /// Others are missing before it: what came counts, and the rest is to be asked for again.
    Hole,
    /// It shows that the engine began anew, or that what is missing is not kept any more: nothing it said counts, and a replay is to be
    /// asked for from the beginning.
    Anew,
}

/// Where the messages of one rank of one engine stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Feed {
    /// The last message that counted, and its digest.
    last: Option<(u64, u64)>,
    /// The last that came live over the connection that stands.
    live: Option<u64>,
    /// Whether the replay that runs has brought a message.
    is_replayed: bool,
}

impl Feed {
    /// Number of the last message that counted.
    pub fn last(&self) -> Option<u64> {
        self.last.map(|(number, _)| number)
    }

    /// Another connection stands: its numbers rise from anywhere.
    pub fn connected(&mut self) {
        self.live = None;
    }

    /// It is another process, of which nothing counts yet; the connection stays.
    pub fn forget(&mut self) {
        (self.last, self.is_replayed) = (None, false);
    }

    /// A message of the live stream. After [`Heard::Next`] it counts.
    pub fn hear(&mut self, number: u64, payload: &[u8]) -> Heard {
        let rises = self.live.is_none_or(|live| number > live);
        let is_again = self.live == Some(number) && self.last == Some((number, xxh3_64(payload)));
        if !rises && !is_again {
            (self.last, self.live) = (None, None);
            return Heard::Restarted;
        }
        let heard = match self.last {
            // A late subscriber: what was before is in a replay, if at all.
            None if number > 0 => return Heard::Gap { from: 0 },
            None => Heard::Next,
            Some((last, _)) if number <= last => Heard::Before,
            Some((last, _)) if number - 1 == last => Heard::Next,
            Some((last, _)) => return Heard::Gap { from: last },
        };
        self.live = Some(number);
        if heard == Heard::Next {
            self.last = Some((number, xxh3_64(payload)));
        }
        heard
    }

    /// A replay begins.
    pub fn ask(&mut self) {
        self.is_replayed = false;
    }

    /// Whether the replay that runs has brought a message.
    pub fn is_replayed(&self) -> bool {
        self.is_replayed
    }

    /// A message of a replay that was asked for from the last message that counted on. After [`Replayed::Next`] it counts.
    pub fn replay(&mut self, number: u64, payload: &[u8]) -> Replayed {
        let digest = xxh3_64(payload);
        let is_first = !std::mem::replace(&mut self.is_replayed, true);
        let replayed = match self.last {
            Some(last) if is_first && last == (number, digest) => Replayed::Before,
            Some(_) if is_first => Replayed::Anew,
            // Without one that counts, the first is the oldest that is kept.
            None => Replayed::Next,
            Some((last, _)) if number <= last => Replayed::Before,
            Some((last, _)) if number - 1 == last => Replayed::Next,
            Some(_) => Replayed::Hole,
        };
        if replayed == Replayed::Next {
            self.last = Some((number, digest));
        }
        replayed
    }

    /// Nothing brings what is missing: this live message is the first that counts.
    pub fn begin_at(&mut self, number: u64, payload: &[u8]) {
        (self.last, self.live) = (Some((number, xxh3_64(payload))), Some(number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(numbers: impl IntoIterator<Item = u64>) -> Feed {
        let mut feed = Feed::default();
        for number in numbers {
            assert_eq!(feed.hear(number, &[number as u8]), Heard::Next);
        }
        feed
    }

    #[test]
    fn messages_in_order_count_once() {
        let mut feed = counted(0..5);
        assert_eq!(feed.last(), Some(4));
        assert_eq!(feed.hear(4, &[4]), Heard::Before);
        assert_eq!(feed.hear(5, &[5]), Heard::Next);
    }

    #[test]
    fn numbers_that_go_back_on_one_connection_are_a_restart_unless_it_is_the_same_message() {
        let mut feed = counted(0..5);
        assert_eq!(feed.hear(0, &[9]), Heard::Restarted);
        assert_eq!(feed.hear(0, &[9]), Heard::Next, "and then the first one");
        let mut same_number = counted(0..5);
        assert_eq!(same_number.hear(4, &[9]), Heard::Restarted);
        assert_eq!(same_number.hear(4, &[9]), Heard::Gap { from: 0 });
    }

    #[test]
    fn a_replay_may_overtake_what_is_on_its_way() {
        let mut feed = counted(0..5);
        assert_eq!(feed.hear(8, &[8]), Heard::Gap { from: 4 });
        feed.ask();
        assert_eq!(feed.replay(4, &[4]), Replayed::Before);
        for number in 5..12 {
            assert_eq!(feed.replay(number, &[number as u8]), Replayed::Next);
        }
        for number in 8..12 {
            assert_eq!(feed.hear(number, &[number as u8]), Heard::Before);
        }
        assert_eq!(feed.hear(12, &[12]), Heard::Next);
        assert_eq!(feed.hear(9, &[9]), Heard::Restarted, "numbers of one connection rise");
    }

    #[test]
    fn another_connection_may_begin_behind_what_was_replayed() {
        let mut feed = counted(0..5);
        feed.connected();
        feed.ask();
        let replayed: Vec<_> = (4..9).map(|number| feed.replay(number, &[number as u8])).collect();
        assert_eq!(replayed[0], Replayed::Before);
        assert_eq!(feed.hear(6, &[6]), Heard::Before);
        assert_eq!(feed.hear(9, &[9]), Heard::Next);
    }

    #[test]
    fn a_gap_that_hides_a_restart_is_no_gap() {
        let mut feed = counted(0..5);
        assert_eq!(feed.hear(8, &[18]), Heard::Gap { from: 4 });
        feed.ask();
        // The new process has a message 4 too.
        assert_eq!(feed.replay(4, &[14]), Replayed::Anew);
        feed.forget();
        feed.ask();
        for number in 0..9 {
            assert_eq!(feed.replay(number, &[10 + number as u8]), Replayed::Next);
        }
        assert_eq!(feed.hear(8, &[18]), Heard::Before);
    }

    #[test]
    fn what_came_before_a_hole_counts_and_the_rest_is_asked_for_again() {
        let mut feed = counted(0..5);
        feed.ask();
        assert_eq!(feed.replay(4, &[4]), Replayed::Before);
        assert_eq!(feed.replay(5, &[5]), Replayed::Next);
        assert_eq!(feed.replay(9, &[9]), Replayed::Hole);
        assert_eq!(feed.last(), Some(5));
        feed.ask();
        assert_eq!(feed.replay(5, &[5]), Replayed::Before);
        assert_eq!(feed.replay(6, &[6]), Replayed::Next);
    }

    #[test]
    fn a_replay_that_begins_too_late_cannot_tell() {
        let mut feed = counted(0..5);
        feed.ask();
        assert_eq!(feed.replay(7, &[7]), Replayed::Anew);
    }

    #[test]
    fn who_comes_late_takes_what_is_kept() {
        let mut feed = Feed::default();
        assert_eq!(feed.hear(3, &[3]), Heard::Gap { from: 0 });
        feed.ask();
        assert_eq!(feed.replay(2, &[2]), Replayed::Next);
        assert_eq!(feed.replay(3, &[3]), Replayed::Next);
        assert_eq!(feed.hear(3, &[3]), Heard::Before);
        let mut none = Feed::default();
        none.begin_at(3, &[3]);
        assert_eq!(none.hear(4, &[4]), Heard::Next);
    }
}
