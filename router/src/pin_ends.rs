//! Removes pins that are over from the index: the leader of the control group says so in the log, as their owner would.
//!
//! Nothing depends on when it does. A pin that is over is left out wherever pins are told or shown, and nodes end it on
//! their own clocks. Not here: when a pin is over (`server::admin`, once, when it is taken).

use std::sync::Arc;
use std::time::Duration;

use kv_core::id::PinId;
use kv_core::index::Index;
use kv_core::index::command::{Command, Pin};
use tokio_util::sync::CancellationToken;

use crate::clock::UnixClock;
use crate::groups::Group;

/// How often it is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Pins removed at one look: each costs an entry of the log, and those that come after must not wait for all of them.
const ENDS_MAX: usize = 256;

/// Looks until cancelled.
pub(crate) async fn run(control: Arc<Group>, unix: UnixClock, stop: CancellationToken) {
    let mut tick = tokio::time::interval(LOOK_EVERY);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while stop.run_until_cancelled(tick.tick()).await.is_some() {
        // A replica that is wrong about pins must not end any.
        if !control.consensus.holds_office() || control.has_diverged() {
            continue;
        }
        let due = due(&control.published.read().index, unix.now_ms());
        for command in due {
            let proposed = stop.run_until_cancelled(control.consensus.propose(&command)).await;
            if let Some(Err(error)) = proposed {
                tracing::debug!(?command, %error, "a pin that is over was not removed; it will be");
                break;
            }
        }
    }
}

/// What must be said so that pins that are over at this Unix time in milliseconds are gone.
fn due(index: &Index, now_ms: u64) -> Vec<Command> {
    index.pins().filter(|pin| pin.is_over(now_ms)).take(ENDS_MAX).map(end).collect()
}

/// The same of one pin; nothing while it is in force or unknown.
pub(crate) fn over(index: &Index, number: PinId, now_ms: u64) -> Option<Command> {
    index.pins().find(|pin| pin.pin == number && pin.is_over(now_ms)).map(end)
}

/// Ends the pin as it is here, and not one that its owner renews meanwhile.
fn end(pin: &Pin) -> Command {
    Command::Unpin { pin: pin.pin, owner: pin.owner.clone(), ends_ms: pin.ends_ms }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_core::id::BlockHash;
    use kv_core::index::IndexLimits;
    use kv_core::index::command::{Applied, PinKind};

    fn pin(number: u64, ends_ms: Option<u64>) -> Pin {
        let (pin, owner, blocks) = (PinId(number), "ops".to_owned(), vec![BlockHash([1; 16])]);
        Pin { pin, owner, blocks, kind: PinKind::Soft, ends_ms }
    }

    #[test]
    fn pins_that_are_over_are_removed_and_no_others_and_none_that_is_renewed() {
        let mut index = Index::new(IndexLimits::default());
        for (number, ends_ms) in [(1, Some(5)), (2, Some(9)), (3, None), (4, Some(5))] {
            index.apply(&Command::Pin(pin(number, ends_ms)));
        }
        assert_eq!(due(&index, 4), []);
        let said = due(&index, 5);
        assert_eq!(said, [end(&pin(1, Some(5))), end(&pin(4, Some(5)))]);
        assert_eq!(over(&index, PinId(4), 5), Some(end(&pin(4, Some(5)))));
        assert_eq!([1, 2, 3].map(|number| over(&index, PinId(number), 4)), [None, None, None]);
        index.apply(&Command::Pin(pin(1, Some(8))));
        let answers: Vec<Applied> = said.iter().map(|command| index.apply(command)).collect();
        assert_eq!(answers, [Applied::Ignored, Applied::Done]);
        assert_eq!(index.pins().map(|pin| pin.pin.0).collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn a_look_ends_a_bounded_number() {
        let mut index = Index::new(IndexLimits::default());
        (0..ENDS_MAX as u64 + 10).for_each(|number| drop(index.apply(&Command::Pin(pin(number, Some(1))))));
        assert_eq!(due(&index, 1).len(), ENDS_MAX);
    }
}
