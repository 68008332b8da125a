//! No acknowledged pin is lost, changed, or still in force after its acknowledged end.

use std::collections::BTreeMap;

use kv_core::id::BlockHash;

use crate::invariants::Verdict;
use crate::oracle::PinFact;

/// Compares the pins sent to nodes with the acknowledged ones.
///
/// # Errors
/// If they differ in any number or block.
pub fn check(facts: &BTreeMap<u64, PinFact>, told: &BTreeMap<u64, Vec<BlockHash>>) -> Verdict {
    for (pin, fact) in facts {
        match told.get(pin) {
            None => return Err(format!("pin {pin} of {} was acknowledged and is missing", fact.owner)),
            Some(blocks) if *blocks != fact.blocks => {
                return Err(format!("pin {pin} holds other blocks than requested"));
            }
            Some(_) => {}
        }
    }
    match told.keys().find(|pin| !facts.contains_key(pin)) {
        Some(pin) => Err(format!("pin {pin} is in force although its end was acknowledged")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_pins_that_differ() {
        let blocks = crate::workload::chain(1);
        let facts = BTreeMap::from([(7, PinFact { owner: "a".into(), blocks: blocks.clone() })]);
        assert!(check(&facts, &[(7, blocks.clone())].into()).is_ok());
        assert!(check(&facts, &BTreeMap::new()).is_err(), "lost");
        assert!(check(&facts, &[(7, blocks[1..].to_vec())].into()).is_err(), "changed");
        assert!(check(&facts, &[(7, blocks.clone()), (8, blocks)].into()).is_err(), "not ended");
    }
}
