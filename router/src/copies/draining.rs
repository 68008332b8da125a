//! Nodes that recently reported that they drain.
//!
//! Not here: the effect on decisions (`crate::background`).

use std::collections::BTreeMap;
use std::time::Duration;

use kv_core::id::{Epoch, NodeId, Timestamp};

/// Time after its last report at which a node no longer counts as draining; it reports every
/// second.
pub(crate) const DRAINING_TTL: Duration = Duration::from_secs(5);

/// Limit on draining nodes; more is no realistic use.
const NODES_MAX: usize = 4_096;

/// Draining epochs of nodes and their expiry. Methods take the time as an argument.
#[derive(Debug, Default)]
pub(crate) struct DrainingNodes {
    until: BTreeMap<(NodeId, Epoch), Timestamp>,
}

impl DrainingNodes {
    /// Records that a node drains under this epoch. Returns `true` if that is new.
    pub(crate) fn record(&mut self, node: NodeId, epoch: Epoch, now: Timestamp) -> bool {
        self.until.retain(|_, until| *until > now);
        if self.until.len() >= NODES_MAX && !self.until.contains_key(&(node, epoch)) {
            return false;
        }
        self.until.insert((node, epoch), now.after(DRAINING_TTL)).is_none()
    }

    /// Whether this epoch of a node is draining.
    pub(crate) fn is_draining(&self, node: NodeId, epoch: Epoch, now: Timestamp) -> bool {
        self.until.get(&(node, epoch)).is_some_and(|until| *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_drains_per_epoch_until_its_reports_stop() {
        let at = |ms: u64| Timestamp(ms * 1_000);
        let mut draining = DrainingNodes::default();
        assert!(draining.record(NodeId(1), Epoch(3), at(0)));
        assert!(!draining.record(NodeId(1), Epoch(3), at(1_000)), "known");
        let has = |draining: &DrainingNodes, epoch, ms| draining.is_draining(NodeId(1), Epoch(epoch), at(ms));
        assert!(has(&draining, 3, 5_999) && !has(&draining, 3, 6_000));
        assert!(!has(&draining, 4, 1_000) && !draining.is_draining(NodeId(2), Epoch(3), at(1_000)));
        assert!(draining.record(NodeId(1), Epoch(3), at(7_000)), "it began again");
        assert_eq!(draining.until.len(), 1);
    }

    #[test]
    fn draining_nodes_are_bounded() {
        let mut draining = DrainingNodes::default();
        for node in 0..10_000 {
            draining.record(NodeId(node), Epoch(1), Timestamp(1));
        }
        assert_eq!(draining.until.len(), NODES_MAX);
    }
}
