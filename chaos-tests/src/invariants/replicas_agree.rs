//! Replicas that have applied the same entry hold the same state, at every moment of the run.
//!
//! This is also what finds a log store that breaks its contract: entries that one replica skipped show
//! as another digest at the same position.

use std::collections::BTreeMap;

use crate::invariants::Verdict;
use crate::oracle::Standing;

/// Compares every standing that was seen with every other at the same entry.
///
/// # Errors
/// When two differ.
pub fn check(standings: &[Standing]) -> Verdict {
    let mut seen: BTreeMap<(u32, u64), &Standing> = BTreeMap::new();
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
    fn refuses_replicas_that_part() {
        let standing = |router, applied, digest| Standing { router, group: 1, applied, digest: vec![digest] };
        assert!(check(&[standing(1, 5, 1), standing(2, 6, 2), standing(3, 5, 1)]).is_ok());
        assert!(check(&[standing(1, 5, 1), standing(2, 6, 2), standing(3, 5, 9)]).is_err());
        let elsewhere = Standing { group: 2, ..standing(3, 5, 9) };
        assert!(check(&[standing(1, 5, 1), elsewhere]).is_ok());
    }
}
