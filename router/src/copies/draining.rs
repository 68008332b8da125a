//! Which nodes said lately that they drain.
//!
//! Not here: what follows from it for decisions (`crate::background`).

use std::collections::BTreeMap;
use std::time::Duration;

use kv_core::id::{Epoch, NodeId, Timestamp};

/// A node that has not said so for longer drains no more: it says so every second.
pub(crate) const DRAINING_SPAN: Duration = Duration::from_secs(5);

/// Nodes that drain at once; more are nobody's wish.
const NODES_MAX: usize = 4_096;

/// See the module. Every method takes the time.
#[derive(Debug, Default)]
pub(crate) struct Draining {
    until: BTreeMap<(NodeId, Epoch), Timestamp>,
}

impl Draining {
    /// A node says that it drains under this epoch. `true` where that is news.
    pub(crate) fn say(&mut self, node: NodeId, epoch: Epoch, now: Timestamp) -> bool {
        self.until.retain(|_, until| *until > now);
        if self.until.len() >= NODES_MAX && !self.until.contains_key(&(node, epoch)) {
            return false;
        }
        self.until.insert((node, epoch), now.after(DRAINING_SPAN)).is_none()
    }

    /// Whether this epoch of a node drains.
    pub(crate) fn has(&self, node: NodeId, epoch: Epoch, now: Timestamp) -> bool {
        self.until.get(&(node, epoch)).is_some_and(|until| *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_drains_as_long_as_it_says_so_and_in_no_other_epoch() {
        let at = |ms: u64| Timestamp(ms * 1_000);
        let mut draining = Draining::default();
        assert!(draining.say(NodeId(1), Epoch(3), at(0)));
        assert!(!draining.say(NodeId(1), Epoch(3), at(1_000)), "known");
        let has = |draining: &Draining, epoch, ms| draining.has(NodeId(1), Epoch(epoch), at(ms));
        assert!(has(&draining, 3, 5_999) && !has(&draining, 3, 6_000));
        assert!(!has(&draining, 4, 1_000) && !draining.has(NodeId(2), Epoch(3), at(1_000)));
        assert!(draining.say(NodeId(1), Epoch(3), at(7_000)), "it began again");
        assert_eq!(draining.until.len(), 1);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut draining = Draining::default();
        for node in 0..10_000 {
            draining.say(NodeId(node), Epoch(1), Timestamp(1));
        }
        assert_eq!(draining.until.len(), NODES_MAX);
    }
}
