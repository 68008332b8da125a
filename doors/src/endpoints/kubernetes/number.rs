//! Which instance an engine in Kubernetes is: the same number on every router, without asking each other.
//!
//! Pure. Not here: two engines with one number (`roster.rs`).

use xxhash_rust::xxh3::xxh3_64;

/// Where numbers made of identifiers begin: nobody counts up to here.
const HASHED: u32 = 1 << 31;

/// Ranks that an engine with such a number may have: the numbers behind it are its own.
const RANK_BITS: u32 = 4;

/// The number that an annotation gives.
///
/// # Errors
/// A line for a person.
pub(super) fn annotated(name: &str, annotation: &str, value: &str) -> Result<u32, String> {
    value.trim().parse().map_err(|_| {
        let shown: String = value.chars().take(40).collect();
        format!("{name} has the annotation {annotation}: {shown:?}, which is no instance number from 0 to 4294967295")
    })
}

/// The number of a Pod of a StatefulSet, each of which has so many ranks: the numbers behind it are theirs.
///
/// # Errors
/// A line for a person.
pub(super) fn ordinal(name: &str, base: u32, ranks: u16) -> Option<Result<u32, String>> {
    let (_, digits) = name.rsplit_once('-')?;
    let ordinal: u32 = digits.parse().ok().filter(|_| digits.bytes().all(|byte| byte.is_ascii_digit()))?;
    let number = ordinal.checked_mul(ranks.into()).and_then(|ordinal| base.checked_add(ordinal));
    Some(number.ok_or_else(|| {
        format!("{name} would be instance {base} + {ordinal} x {ranks}, which is no number: lower doors.kubernetes.instance_base")
    }))
}

/// The number that an identifier comes to.
pub(super) fn hashed(identifier: &str) -> u32 {
    HASHED | ((xxh3_64(identifier.as_bytes()) as u32) << RANK_BITS) & (HASHED - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_a_stateful_set_are_counted_from_the_base() {
        assert_eq!(ordinal("vllm-0", 10, 1), Some(Ok(10)));
        assert_eq!(ordinal("llama-3-70b-12", 10, 1), Some(Ok(22)));
        assert_eq!(
            [0, 1, 2].map(|nth| ordinal(&format!("dp-{nth}"), 10, 8)),
            [10, 18, 26].map(|n| Some(Ok(n)))
        );
        assert!(ordinal("dp-1073741824", 0, 4).is_some_and(|number| number.is_err()));
        assert_eq!(["vllm", "vllm-", "vllm-+1", "a-x1"].map(|name| ordinal(name, 0, 1)), [const { None }; 4]);
        assert!(ordinal("vllm-1", u32::MAX, 1).is_some_and(|number| number.is_err()));
        assert!(ordinal("vllm-4294967296", 0, 1).is_none());
    }

    #[test]
    fn numbers_of_identifiers_stay_and_are_far_from_those_that_people_give() {
        assert_eq!(
            hashed("0b6f5d1e-93a4-4c39-8a52-0d0f1f0a7a11"),
            hashed("0b6f5d1e-93a4-4c39-8a52-0d0f1f0a7a11")
        );
        let all: std::collections::BTreeSet<_> = (0..200).map(|one| hashed(&format!("uid-{one}"))).collect();
        assert_eq!(all.len(), 200, "these do not meet");
        assert!(all.iter().all(|number| *number >= HASHED && number % (1 << RANK_BITS) == 0));
    }

    #[test]
    fn an_annotation_is_a_number_or_wrong() {
        assert_eq!(annotated("a", "b", " 7 "), Ok(7));
        for wrong in ["", "-1", "1.5", "4294967296", "seven"] {
            assert!(annotated("a", "b", wrong).is_err(), "{wrong}");
        }
    }
}
