//! Sequence numbers of one engine's messages: which messages count, which are missing, and when the
//! engine restarted.
//!
//! A publisher numbers its messages from 0 and sends each once to its connected subscribers. It
//! keeps the last messages for replay. It does not identify its process, so this module infers it:
//!
//! - Within one connection a single process sends, and its numbers rise. A live message that a
//!   replay delivered earlier is a duplicate.
//! - A new connection may reach another process. A replay is therefore requested from the last
//!   message that counted. Only if that message returns unchanged is it the same process. Otherwise
//!   the process is another one, or it keeps too few messages to tell.
//! - A replay may have holes if its sender does not wait for the receiver. Messages before a hole
//!   count, and the rest is requested again.
//!
//! Pure: the caller acts on the outcome. Not here: sockets, and the content of messages
//! (`engine_events.rs`).

use xxhash_rust::xxh3::xxh3_64;

/// Outcome of a live message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LiveOutcome {
    /// The next message in sequence.
    Next,
    /// A message received before.
    Duplicate,
    /// Earlier messages are missing: request a replay from `from`. The message does not count yet.
    Gap {
        /// Number of the last message that counted, or 0 if none did.
        from: u64,
    },
    /// The numbers on one connection went back: the engine restarted. Its earlier messages are
    /// void, and so is this one until it is passed in again.
    Restarted,
}

/// Outcome of a replayed message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayOutcome {
    /// The next message in sequence.
    Next,
    /// A message received before.
    Duplicate,
    /// Earlier messages are missing. Those received count; request the rest again.
    Hole,
    /// The engine restarted, or no longer keeps the missing messages. All its earlier messages are
    /// void; request a replay from the beginning.
    Restarted,
}

/// Sequence state of one rank of one engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventSequence {
    /// Number and digest of the last message that counted.
    last: Option<(u64, u64)>,
    /// Number of the last live message on the current connection.
    last_live: Option<u64>,
    /// Whether the current replay has delivered a message.
    has_replayed: bool,
}

impl EventSequence {
    /// Number of the last message that counted.
    pub fn last(&self) -> Option<u64> {
        self.last.map(|(number, _)| number)
    }

    /// Records a new connection. Its sequence numbers may start anywhere.
    pub fn reset_connection(&mut self) {
        self.last_live = None;
    }

    /// Discards the sequence: another process sends now. The connection stays.
    pub fn reset(&mut self) {
        (self.last, self.has_replayed) = (None, false);
    }

    /// Takes a live message. It counts if the outcome is [`LiveOutcome::Next`].
    pub fn receive_live(&mut self, number: u64, payload: &[u8]) -> LiveOutcome {
        let rises = self.last_live.is_none_or(|live| number > live);
        let is_repeat = self.last_live == Some(number) && self.last == Some((number, xxh3_64(payload)));
        if !rises && !is_repeat {
            (self.last, self.last_live) = (None, None);
            return LiveOutcome::Restarted;
        }
        let heard = match self.last {
            // A late subscriber: only a replay can bring the earlier messages.
            None if number > 0 => return LiveOutcome::Gap { from: 0 },
            None => LiveOutcome::Next,
            Some((last, _)) if number <= last => LiveOutcome::Duplicate,
            Some((last, _)) if number - 1 == last => LiveOutcome::Next,
            Some((last, _)) => return LiveOutcome::Gap { from: last },
        };
        self.last_live = Some(number);
        if heard == LiveOutcome::Next {
            self.last = Some((number, xxh3_64(payload)));
        }
        heard
    }

    /// Starts a replay.
    pub fn begin_replay(&mut self) {
        self.has_replayed = false;
    }

    /// Whether the current replay has delivered a message.
    pub fn has_replayed(&self) -> bool {
        self.has_replayed
    }

    /// Takes a message of a replay requested from the last counted message on. It counts if the
    /// outcome is [`ReplayOutcome::Next`].
    pub fn receive_replay(&mut self, number: u64, payload: &[u8]) -> ReplayOutcome {
        let digest = xxh3_64(payload);
        let is_first = !std::mem::replace(&mut self.has_replayed, true);
        let replayed = match self.last {
            Some(last) if is_first && last == (number, digest) => ReplayOutcome::Duplicate,
            Some(_) if is_first => ReplayOutcome::Restarted,
            // If no message counts yet, the first one is the oldest that the engine keeps.
            None => ReplayOutcome::Next,
            Some((last, _)) if number <= last => ReplayOutcome::Duplicate,
            Some((last, _)) if number - 1 == last => ReplayOutcome::Next,
            Some(_) => ReplayOutcome::Hole,
        };
        if replayed == ReplayOutcome::Next {
            self.last = Some((number, digest));
        }
        replayed
    }

    /// Starts the sequence at this live message, if the missing ones cannot be replayed.
    pub fn start_at(&mut self, number: u64, payload: &[u8]) {
        (self.last, self.last_live) = (Some((number, xxh3_64(payload))), Some(number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(numbers: impl IntoIterator<Item = u64>) -> EventSequence {
        let mut feed = EventSequence::default();
        for number in numbers {
            assert_eq!(feed.receive_live(number, &[number as u8]), LiveOutcome::Next);
        }
        feed
    }

    #[test]
    fn messages_in_order_count_once() {
        let mut feed = counted(0..5);
        assert_eq!(feed.last(), Some(4));
        assert_eq!(feed.receive_live(4, &[4]), LiveOutcome::Duplicate);
        assert_eq!(feed.receive_live(5, &[5]), LiveOutcome::Next);
    }

    #[test]
    fn decreasing_numbers_on_one_connection_mean_a_restart() {
        let mut feed = counted(0..5);
        assert_eq!(feed.receive_live(0, &[9]), LiveOutcome::Restarted);
        assert_eq!(
            feed.receive_live(0, &[9]),
            LiveOutcome::Next,
            "the message counts as the first one after the restart"
        );
        let mut same_number = counted(0..5);
        assert_eq!(same_number.receive_live(4, &[9]), LiveOutcome::Restarted);
        assert_eq!(same_number.receive_live(4, &[9]), LiveOutcome::Gap { from: 0 });
    }

    #[test]
    fn a_replay_may_overtake_live_messages() {
        let mut feed = counted(0..5);
        assert_eq!(feed.receive_live(8, &[8]), LiveOutcome::Gap { from: 4 });
        feed.begin_replay();
        assert_eq!(feed.receive_replay(4, &[4]), ReplayOutcome::Duplicate);
        for number in 5..12 {
            assert_eq!(feed.receive_replay(number, &[number as u8]), ReplayOutcome::Next);
        }
        for number in 8..12 {
            assert_eq!(feed.receive_live(number, &[number as u8]), LiveOutcome::Duplicate);
        }
        assert_eq!(feed.receive_live(12, &[12]), LiveOutcome::Next);
        assert_eq!(feed.receive_live(9, &[9]), LiveOutcome::Restarted, "numbers of one connection must rise");
    }

    #[test]
    fn a_new_connection_may_start_before_the_replayed_messages() {
        let mut feed = counted(0..5);
        feed.reset_connection();
        feed.begin_replay();
        let replayed: Vec<_> = (4..9).map(|number| feed.receive_replay(number, &[number as u8])).collect();
        assert_eq!(replayed[0], ReplayOutcome::Duplicate);
        assert_eq!(feed.receive_live(6, &[6]), LiveOutcome::Duplicate);
        assert_eq!(feed.receive_live(9, &[9]), LiveOutcome::Next);
    }

    #[test]
    fn a_replay_reveals_a_restart_behind_a_gap() {
        let mut feed = counted(0..5);
        assert_eq!(feed.receive_live(8, &[18]), LiveOutcome::Gap { from: 4 });
        feed.begin_replay();
        // The new process has a message 4 too.
        assert_eq!(feed.receive_replay(4, &[14]), ReplayOutcome::Restarted);
        feed.reset();
        feed.begin_replay();
        for number in 0..9 {
            assert_eq!(feed.receive_replay(number, &[10 + number as u8]), ReplayOutcome::Next);
        }
        assert_eq!(feed.receive_live(8, &[18]), LiveOutcome::Duplicate);
    }

    #[test]
    fn messages_before_a_replay_hole_count() {
        let mut feed = counted(0..5);
        feed.begin_replay();
        assert_eq!(feed.receive_replay(4, &[4]), ReplayOutcome::Duplicate);
        assert_eq!(feed.receive_replay(5, &[5]), ReplayOutcome::Next);
        assert_eq!(feed.receive_replay(9, &[9]), ReplayOutcome::Hole);
        assert_eq!(feed.last(), Some(5));
        feed.begin_replay();
        assert_eq!(feed.receive_replay(5, &[5]), ReplayOutcome::Duplicate);
        assert_eq!(feed.receive_replay(6, &[6]), ReplayOutcome::Next);
    }

    #[test]
    fn a_replay_without_the_last_message_means_a_restart() {
        let mut feed = counted(0..5);
        feed.begin_replay();
        assert_eq!(feed.receive_replay(7, &[7]), ReplayOutcome::Restarted);
    }

    #[test]
    fn a_late_subscriber_starts_at_the_oldest_kept_message() {
        let mut feed = EventSequence::default();
        assert_eq!(feed.receive_live(3, &[3]), LiveOutcome::Gap { from: 0 });
        feed.begin_replay();
        assert_eq!(feed.receive_replay(2, &[2]), ReplayOutcome::Next);
        assert_eq!(feed.receive_replay(3, &[3]), ReplayOutcome::Next);
        assert_eq!(feed.receive_live(3, &[3]), LiveOutcome::Duplicate);
        let mut none = EventSequence::default();
        none.start_at(3, &[3]);
        assert_eq!(none.receive_live(4, &[4]), LiveOutcome::Next);
    }
}
