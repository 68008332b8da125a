//! Replicas that have applied the same entry hold the same state, at every moment of the run.
//!
//! This also detects a log store that breaks its contract: entries skipped by one replica give
//! another digest at the same position.

use std::collections::BTreeMap;

use crate::invariants::Verdict;
use crate::oracle::ReplicaStatus;

/// Compares every observed status with all others at the same entry.
///
/// # Errors
/// If two digests differ.
pub fn check(standings: &[ReplicaStatus]) -> Verdict {
    let mut seen: BTreeMap<(u32, u64), &ReplicaStatus> = BTreeMap::new();
    for standing in standings {
        let first = *seen.entry((standing.group, standing.applied)).or_insert(standing);
        if first.digest != standing.digest {
            return Err(format!(
                "routers {} and {} differ after entry {} of group {}: {:02x?} and {:02x?}",
                first.router,
                standing.router,
                standing.applied,
                standing.group,
                first.digest,
                standing.digest
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_replicas_that_differ() {
        let standing =
            |router, applied, digest| ReplicaStatus { router, group: 1, applied, digest: vec![digest] };
        assert!(check(&[standing(1, 5, 1), standing(2, 6, 2), standing(3, 5, 1)]).is_ok());
        assert!(check(&[standing(1, 5, 1), standing(2, 6, 2), standing(3, 5, 9)]).is_err());
        let elsewhere = ReplicaStatus { group: 2, ..standing(3, 5, 9) };
        assert!(check(&[standing(1, 5, 1), elsewhere]).is_ok());
    }
}
