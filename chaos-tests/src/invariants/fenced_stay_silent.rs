//! No router names a holder with an ended epoch: one of a node that joined again or was silent too
//! long.

use std::collections::BTreeMap;

use crate::invariants::Verdict;
use crate::oracle::HolderAnswer;

/// Checks one answer. `live` has the current epoch of each live node; any other node is silent and
/// known to be fenced.
///
/// # Errors
/// If a holder is named under an ended epoch.
pub fn check(live: &BTreeMap<u32, u64>, answer: &HolderAnswer) -> Verdict {
    for &(node, epoch) in answer.holders.keys() {
        match live.get(&node) {
            Some(&current) if current == epoch => {}
            Some(current) => {
                return Err(format!(
                    "router {} names node {node} under epoch {epoch}, but its epoch is {current}",
                    answer.router
                ));
            }
            None => return Err(format!("router {} names node {node}, which was fenced", answer.router)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_holders_of_an_epoch_that_is_over() {
        let live = BTreeMap::from([(1, 4)]);
        let answer = |holder: (u32, u64)| HolderAnswer { router: 0, chain: 0, holders: [(holder, 3)].into() };
        assert!(check(&live, &answer((1, 4))).is_ok());
        assert!(check(&live, &answer((1, 3))).is_err(), "older epoch");
        assert!(check(&live, &answer((2, 1))).is_err(), "silent node");
    }
}
