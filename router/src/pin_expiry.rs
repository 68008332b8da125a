//! Removes expired pins from the index: the leader of the control group proposes their unpin, as an
//! owner would.
//!
//! No correctness depends on the timing. Expired pins are left out of all answers, and nodes end
//! them on their own clocks. Not here: the decision when a pin expires (`server::admin`, when it
//! accepts the pin).

use std::sync::Arc;
use std::time::Duration;

use kv_core::id::PinId;
use kv_core::index::Index;
use kv_core::index::command::{Command, Pin};
use tokio_util::sync::CancellationToken;

use crate::clock::UnixClock;
use crate::groups::Group;

/// Interval between two checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Pins removed per check: each costs a log entry, and later proposals must not wait for all of
/// them.
const UNPINS_MAX: usize = 256;

/// Checks until cancelled.
pub(crate) async fn run(control: Arc<Group>, unix: UnixClock, stop: CancellationToken) {
    let mut tick = tokio::time::interval(CHECK_INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while stop.run_until_cancelled(tick.tick()).await.is_some() {
        // A diverged replica must not remove pins.
        if !control.consensus.holds_leader_lease() || control.has_diverged() {
            continue;
        }
        let due = expired_pins(&control.published.read().index, unix.now_ms());
        for command in due {
            let proposed = stop.run_until_cancelled(control.consensus.propose(&command)).await;
            if let Some(Err(error)) = proposed {
                tracing::debug!(?command, %error, "an expired pin was not removed; the next check retries");
                break;
            }
        }
    }
}

/// Commands that remove the pins expired at this Unix time in milliseconds.
fn expired_pins(index: &Index, now_ms: u64) -> Vec<Command> {
    index.pins().filter(|pin| pin.is_expired(now_ms)).take(UNPINS_MAX).map(unpin).collect()
}

/// The command that removes one pin; `None` while it is in force or unknown.
pub(crate) fn unpin_if_expired(index: &Index, number: PinId, now_ms: u64) -> Option<Command> {
    index.pins().find(|pin| pin.pin == number && pin.is_expired(now_ms)).map(unpin)
}

/// Removes the pin with this end only, so that a concurrent renewal survives.
fn unpin(pin: &Pin) -> Command {
    Command::Unpin { pin: pin.pin, owner: pin.owner.clone(), ends_ms: pin.ends_ms }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_core::id::BlockHash;
    use kv_core::index::IndexLimits;
    use kv_core::index::command::{Applied, PinKind};

    fn pin(number: u64, ends_ms: Option<u64>) -> Pin {
        let (pin, owner, blocks) = (PinId(number), "ops".to_owned(), vec![BlockHash([1; _])]);
        Pin { pin, owner, blocks, kind: PinKind::Soft, ends_ms }
    }

    #[test]
    fn only_expired_pins_are_removed() {
        let mut index = Index::new(IndexLimits::default());
        for (number, ends_ms) in [(1, Some(5)), (2, Some(9)), (3, None), (4, Some(5))] {
            index.apply(&Command::Pin(pin(number, ends_ms)));
        }
        assert_eq!(expired_pins(&index, 4), []);
        let said = expired_pins(&index, 5);
        assert_eq!(said, [unpin(&pin(1, Some(5))), unpin(&pin(4, Some(5)))]);
        assert_eq!(unpin_if_expired(&index, PinId(4), 5), Some(unpin(&pin(4, Some(5)))));
        assert_eq!([1, 2, 3].map(|number| unpin_if_expired(&index, PinId(number), 4)), [None, None, None]);
        index.apply(&Command::Pin(pin(1, Some(8))));
        let answers: Vec<Applied> = said.iter().map(|command| index.apply(command)).collect();
        assert_eq!(answers, [Applied::Ignored, Applied::Done]);
        assert_eq!(index.pins().map(|pin| pin.pin.0).collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn one_check_removes_a_bounded_number() {
        let mut index = Index::new(IndexLimits::default());
        (0..UNPINS_MAX as u64 + 10).for_each(|number| drop(index.apply(&Command::Pin(pin(number, Some(1))))));
        assert_eq!(expired_pins(&index, 1).len(), UNPINS_MAX);
    }
}
