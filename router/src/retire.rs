//! Applies the control group's decisions about nodes to the shards: epochs that are over end there
//! too, so that the memory of their announcements is reclaimed.
//!
//! Readers do not depend on it: they ask the control replica which nodes live. Each router does it
//! for the shards that it leads. Not here: the decision to fence (`crate::liveness`).

use std::time::Duration;

use kv_core::index::Index;
use kv_core::index::command::Command;
use tokio_util::sync::CancellationToken;

use crate::groups::{Group, Groups};

/// Check interval in addition to every change of the control group: a shard may get a new leader,
/// or a command may be lost.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Checks until cancelled.
pub(crate) async fn run(groups: Groups, stop: CancellationToken) {
    let mut rules = groups.control().published.watch_rules();
    let mut tick = tokio::time::interval(CHECK_INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while !stop.is_cancelled() {
        let looked = stop.run_until_cancelled(async {
            for shard in groups.shards() {
                retire(groups.control(), shard).await;
            }
        });
        if looked.await.is_none() {
            return;
        }
        tokio::select! {
            _ = rules.changed() => {}
            _ = tick.tick() => {}
            () = stop.cancelled() => return,
        }
    }
}

async fn retire(control: &Group, shard: &Group) {
    // A diverged control replica must not change the shards.
    if !shard.consensus.holds_leader_lease() || control.has_diverged() {
        return;
    }
    let due = ended_epochs(&control.published.read().index, &shard.published.read().index);
    for command in due {
        if let Err(error) = shard.consensus.propose(&command).await {
            tracing::debug!(shard = shard.number(), ?command, %error, "an epoch was not ended in a shard; \
                the next check retries");
            return;
        }
    }
}

/// Commands that end every epoch of a shard that is over in the control group.
fn ended_epochs(control: &Index, shard: &Index) -> Vec<Command> {
    let over = shard.nodes().filter(|state| control.is_epoch_over(state.record.node, state.epoch));
    let command = |state: &kv_core::index::NodeState| {
        let (node, epoch) = (state.record.node, state.epoch);
        match control.node(node) {
            None => Some(Command::Leave { node, epoch }),
            Some(_) => state.live.then_some(Command::Fence { node, epoch }),
        }
    };
    over.filter_map(command).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::holders::tests::record;
    use kv_core::id::{Epoch, NodeId};
    use kv_core::index::IndexLimits;

    #[test]
    fn a_shard_ends_only_epochs_that_are_over() {
        let (mut control, mut shard) =
            (Index::new(IndexLimits::default()), Index::new(IndexLimits::default()));
        for node in 1..=4 {
            control.apply(&Command::Join(record(node)));
            shard.apply(&Command::Admit { record: record(node), epoch: Epoch(1) });
        }
        // The control replica may lag: an epoch unknown to it is not over.
        shard.apply(&Command::Admit { record: record(5), epoch: Epoch(1) });
        assert_eq!(ended_epochs(&control, &shard), []);
        let (fenced, rejoined, left) = (NodeId(1), 2, NodeId(3));
        control.apply(&Command::Fence { node: fenced, epoch: Epoch(1) });
        control.apply(&Command::Join(record(rejoined)));
        control.apply(&Command::Leave { node: left, epoch: Epoch(1) });
        let said = ended_epochs(&control, &shard);
        let expected = [
            Command::Fence { node: fenced, epoch: Epoch(1) },
            Command::Fence { node: NodeId(rejoined), epoch: Epoch(1) },
            Command::Leave { node: left, epoch: Epoch(1) },
        ];
        assert_eq!(said, expected);
        said.iter().for_each(|command| drop(shard.apply(command)));
        assert_eq!(ended_epochs(&control, &shard), [], "once is enough");
    }
}
