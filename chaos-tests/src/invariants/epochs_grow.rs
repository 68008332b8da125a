//! A node never gets an epoch twice or a smaller one, even if the leader changes.

use crate::invariants::Verdict;
use crate::oracle::Oracle;

/// Checks the order of all assigned epochs.
///
/// # Errors
/// If an epoch does not exceed the previous one.
pub fn check(oracle: &Oracle) -> Verdict {
    for (node, epochs) in &oracle.epochs {
        if let Some(pair) = epochs.windows(2).find(|pair| pair[1] <= pair[0]) {
            return Err(format!("node {node} was given epoch {} after epoch {}", pair[1], pair[0]));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_an_epoch_given_again() {
        let oracle = |epochs: &[u64]| Oracle { epochs: [(1, epochs.to_vec())].into(), ..Oracle::default() };
        assert!(check(&oracle(&[1, 2, 5])).is_ok());
        assert!(check(&oracle(&[1, 2, 2])).is_err());
        assert!(check(&oracle(&[3, 1])).is_err());
    }
}
