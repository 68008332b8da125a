//! No acknowledged announcement is lost, and none is invented: every router reports exactly the
//! state that was last acknowledged to a live node.

use crate::invariants::Verdict;
use crate::oracle::{AcknowledgedState, HolderAnswer};

/// Compares one answer with the state acknowledged to one live node.
///
/// # Errors
/// If the answer names more or fewer blocks than were acknowledged.
pub fn check(node: u32, fact: &AcknowledgedState, answer: &HolderAnswer) -> Verdict {
    let held = fact.holdings.get(&answer.chain).copied().unwrap_or(0);
    let said = answer.holders.get(&(node, fact.epoch)).copied().unwrap_or(0);
    if held == said {
        return Ok(());
    }
    Err(format!(
        "router {} reports that node {node} (epoch {}, after batch {}) holds {said} blocks of chain {}; \
         {held} are acknowledged",
        answer.router, fact.epoch, fact.seq, answer.chain
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_lost_and_invented_blocks() {
        let fact = AcknowledgedState { epoch: 2, seq: 5, holdings: [(0, 4)].into() };
        let answer = |holders: &[((u32, u64), u32)]| HolderAnswer {
            router: 0,
            chain: 0,
            holders: holders.iter().copied().collect(),
        };
        assert!(check(1, &fact, &answer(&[((1, 2), 4)])).is_ok());
        assert!(check(1, &fact, &answer(&[((1, 2), 3)])).is_err(), "lost one");
        assert!(check(1, &fact, &answer(&[((1, 2), 5)])).is_err(), "invented one");
        assert!(check(1, &fact, &answer(&[((1, 1), 4)])).is_err(), "under another epoch");
        assert!(check(1, &fact, &answer(&[])).is_err(), "lost all");
    }
}
