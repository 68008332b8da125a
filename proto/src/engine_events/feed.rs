//! The numbers of one engine's messages: which count, which are missing, and when it is another process that sends them.
//!
//! A publisher numbers its messages from 0, sends each once to whoever is connected, and keeps the last ones for who asks again. It does
//! not say which process it is. So a number that was here before is a restart, unless it is the same message; and a gap may hide one: the
//! engine ended, another began, and its numbers have passed ours. A replay is therefore asked for *from the last message that counted*: if
//! that comes back as it was, the gap is one, and if not, everything is another process's.
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
    /// The engine began anew: nothing it said counts, and then this is as said.
    Restarted,
}

/// What became of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replayed {
    /// This message is the next one.
    Next,
    /// It says nothing new.
    Before,
    /// It shows that the engine began anew, or that what is missing is not kept any more: nothing it said counts. This message is the first
    /// one then.
    Anew,
}

/// Where the messages of one rank of one engine stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Feed {
    /// The last message that counted, and its digest.
    last: Option<(u64, u64)>,
    /// Whether the replay that runs has brought a message.
    is_replayed: bool,
}

impl Feed {
    /// Number of the last message that counted.
    pub fn last(&self) -> Option<u64> {
        self.last.map(|(number, _)| number)
    }

    /// A message of the live stream. After [`Heard::Next`] it counts.
    pub fn hear(&mut self, number: u64, payload: &[u8]) -> Heard {
        let digest = xxh3_64(payload);
        match self.last {
            // A late subscriber: what was before is in a replay, if at all.
            None if number > 0 => Heard::Gap { from: 0 },
            None => self.count(number, digest),
            Some((last, _)) if number == last.wrapping_add(1) => self.count(number, digest),
            Some((last, before)) if number == last && digest == before => Heard::Before,
            Some((last, _)) if number <= last => {
                self.last = None;
                Heard::Restarted
            }
            Some((last, _)) => Heard::Gap { from: last },
        }
    }

    fn count(&mut self, number: u64, digest: u64) -> Heard {
        self.last = Some((number, digest));
        Heard::Next
    }

    /// A replay begins.
    pub fn ask(&mut self) {
        self.is_replayed = false;
    }

    /// A message of a replay that was asked for from the last message that counted on. After [`Replayed::Next`] and
    /// [`Replayed::Anew`] it counts.
    pub fn replay(&mut self, number: u64, payload: &[u8]) -> Replayed {
        let digest = xxh3_64(payload);
        let is_first = !std::mem::replace(&mut self.is_replayed, true);
        let replayed = match self.last {
            Some(last) if is_first && last == (number, digest) => return Replayed::Before,
            // Without a message before it, there is nothing that could be another process's.
            None if is_first && number == 0 => Replayed::Next,
            _ if is_first => Replayed::Anew,
            Some((last, _)) if number == last.wrapping_add(1) => Replayed::Next,
            Some((last, _)) if number <= last => return Replayed::Before,
            // A replay with a hole lies: what follows is all there is.
            _ => Replayed::Anew,
        };
        self.last = Some((number, digest));
        replayed
    }

    /// A replay brought nothing, or nobody keeps one: this live message is the first that counts.
    pub fn begin_at(&mut self, number: u64, payload: &[u8]) {
        self.last = Some((number, xxh3_64(payload)));
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
    fn a_number_that_was_here_before_is_a_restart_unless_it_is_the_same_message() {
        let mut feed = counted(0..5);
        assert_eq!(feed.hear(0, &[9]), Heard::Restarted);
        assert_eq!(feed.hear(0, &[9]), Heard::Next, "and then the first one");
        let mut same_number = counted(0..5);
        assert_eq!(same_number.hear(4, &[9]), Heard::Restarted);
        assert_eq!(same_number.hear(4, &[9]), Heard::Gap { from: 0 });
    }

    #[test]
    fn a_gap_is_filled_from_the_last_message_that_counted() {
        let mut feed = counted(0..5);
        assert_eq!(feed.hear(8, &[8]), Heard::Gap { from: 4 });
        feed.ask();
        assert_eq!(feed.replay(4, &[4]), Replayed::Before);
        for number in 5..9 {
            assert_eq!(feed.replay(number, &[number as u8]), Replayed::Next);
        }
        assert_eq!(feed.hear(8, &[8]), Heard::Before);
        assert_eq!(feed.hear(9, &[9]), Heard::Next);
    }

    #[test]
    fn a_gap_that_hides_a_restart_is_no_gap() {
        let mut feed = counted(0..5);
        assert_eq!(feed.hear(8, &[18]), Heard::Gap { from: 4 });
        feed.ask();
        // The new process has a message 4 too.
        assert_eq!(feed.replay(4, &[14]), Replayed::Anew);
        assert_eq!(feed.replay(5, &[15]), Replayed::Next);
    }

    #[test]
    fn a_replay_that_begins_too_late_or_has_a_hole_begins_anew() {
        let mut feed = counted(0..5);
        feed.ask();
        assert_eq!(feed.replay(7, &[7]), Replayed::Anew);
        assert_eq!(feed.replay(9, &[9]), Replayed::Anew);
        assert_eq!(feed.replay(10, &[10]), Replayed::Next);
        assert_eq!(feed.replay(9, &[9]), Replayed::Before);
    }

    #[test]
    fn who_comes_late_asks_for_all() {
        let mut feed = Feed::default();
        assert_eq!(feed.hear(3, &[3]), Heard::Gap { from: 0 });
        feed.ask();
        assert_eq!(feed.replay(0, &[0]), Replayed::Next);
        let mut short = Feed::default();
        short.ask();
        assert_eq!(short.replay(2, &[2]), Replayed::Anew);
        let mut none = Feed::default();
        none.begin_at(3, &[3]);
        assert_eq!(none.hear(4, &[4]), Heard::Next);
    }
}
