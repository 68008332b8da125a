//! Brings into the shards what the control group decided about nodes: epochs that are over end there too, so
//! that the memory of what they announced is swept.
//!
//! Readers need none of this: they ask the control replica who lives. Each router does it for the shards that
//! it leads. Not here: who is fenced (`crate::liveness`).

use std::time::Duration;

use kv_core::index::Index;
use kv_core::index::command::Command;
use tokio_util::sync::CancellationToken;

use crate::groups::{Group, Groups};

/// How often it is looked at besides every change in the control group: a shard may get a new leader, or a
/// command may be lost.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Looks until cancelled.
pub(crate) async fn run(groups: Groups, stop: CancellationToken) {
    let mut rules = groups.control().published.rules_changes();
    let mut tick = tokio::time::interval(LOOK_EVERY);
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
    // A control replica that is wrong about who lives must not tell the shards.
    if !shard.consensus.holds_office() || control.has_diverged() {
        return;
    }
    let due = due(&control.published.read().index, &shard.published.read().index);
    for command in due {
        if let Err(error) = shard.consensus.propose(&command).await {
            tracing::debug!(shard = shard.number(), ?command, %error, "an epoch was not ended; it will be");
            return;
        }
    }
}

/// What must be said in a shard so that it ends every epoch that is over.
fn due(control: &Index, shard: &Index) -> Vec<Command> {
    let over = shard.nodes().filter(|state| control.is_over(state.record.node, state.epoch));
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
    fn a_shard_ends_what_is_over_and_nothing_else() {
        let (mut control, mut shard) =
            (Index::new(IndexLimits::default()), Index::new(IndexLimits::default()));
        for node in 1..=4 {
            control.apply(&Command::Join(record(node)));
            shard.apply(&Command::Admit { record: record(node), epoch: Epoch(1) });
        }
        // The control replica may be behind: what it has not heard of is not over.
        shard.apply(&Command::Admit { record: record(5), epoch: Epoch(1) });
        assert_eq!(due(&control, &shard), []);
        let (fenced, rejoined, left) = (NodeId(1), 2, NodeId(3));
        control.apply(&Command::Fence { node: fenced, epoch: Epoch(1) });
        control.apply(&Command::Join(record(rejoined)));
        control.apply(&Command::Leave { node: left, epoch: Epoch(1) });
        let said = due(&control, &shard);
        let expected = [
            Command::Fence { node: fenced, epoch: Epoch(1) },
            Command::Fence { node: NodeId(rejoined), epoch: Epoch(1) },
            Command::Leave { node: left, epoch: Epoch(1) },
        ];
        assert_eq!(said, expected);
        said.iter().for_each(|command| drop(shard.apply(command)));
        assert_eq!(due(&control, &shard), [], "once is enough");
    }
}
