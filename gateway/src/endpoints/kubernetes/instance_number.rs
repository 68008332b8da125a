//! Instance numbers of engines in Kubernetes, equal on every router without coordination.
//!
//! Pure. Not here: conflicts of two engines (`discovered.rs`).

use xxhash_rust::xxh3::xxh3_64;

/// Base of numbers derived from identifiers, far above configured ones.
const HASHED_BASE: u32 = 1 << 31;

/// Bits for ranks: an engine with a derived number owns the following numbers too.
const RANK_BITS: u32 = 4;

/// Instance number from an annotation.
///
/// # Errors
/// One line for the operator.
pub(super) fn from_annotation(name: &str, annotation: &str, value: &str) -> Result<u32, String> {
    value.trim().parse().map_err(|_| {
        let shown: String = value.chars().take(40).collect();
        format!(
            "{name} has the annotation {annotation}: {shown:?}, which is not an instance number from 0 to \
             4294967295"
        )
    })
}

/// Instance number of a StatefulSet's Pod; each Pod owns one number per rank. `None` if the name
/// has no ordinal.
///
/// # Errors
/// One line for the operator.
pub(super) fn from_ordinal(name: &str, base: u32, ranks: u16) -> Option<Result<u32, String>> {
    let (_, digits) = name.rsplit_once('-')?;
    let ordinal: u32 = digits.parse().ok().filter(|_| digits.bytes().all(|byte| byte.is_ascii_digit()))?;
    let number = ordinal.checked_mul(ranks.into()).and_then(|ordinal| base.checked_add(ordinal));
    Some(number.ok_or_else(|| {
        format!(
            "{name} would be instance {base} + {ordinal} x {ranks}, which is too large: lower \
             gateway.kubernetes.instance_base"
        )
    }))
}

/// Instance number derived from an identifier.
pub(super) fn from_identifier(identifier: &str) -> u32 {
    HASHED_BASE | ((xxh3_64(identifier.as_bytes()) as u32) << RANK_BITS) & (HASHED_BASE - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stateful_set_ordinals_count_from_the_base() {
        assert_eq!(from_ordinal("vllm-0", 10, 1), Some(Ok(10)));
        assert_eq!(from_ordinal("llama-3-70b-12", 10, 1), Some(Ok(22)));
        assert_eq!(
            [0, 1, 2].map(|nth| from_ordinal(&format!("dp-{nth}"), 10, 8)),
            [10, 18, 26].map(|n| Some(Ok(n)))
        );
        assert!(from_ordinal("dp-1073741824", 0, 4).is_some_and(|number| number.is_err()));
        assert_eq!(
            ["vllm", "vllm-", "vllm-+1", "a-x1"].map(|name| from_ordinal(name, 0, 1)),
            [const { None }; 4]
        );
        assert!(from_ordinal("vllm-1", u32::MAX, 1).is_some_and(|number| number.is_err()));
        assert!(from_ordinal("vllm-4294967296", 0, 1).is_none());
    }

    #[test]
    fn identifier_numbers_are_stable_and_separate() {
        assert_eq!(
            from_identifier("0b6f5d1e-93a4-4c39-8a52-0d0f1f0a7a11"),
            from_identifier("0b6f5d1e-93a4-4c39-8a52-0d0f1f0a7a11")
        );
        let all: std::collections::BTreeSet<_> =
            (0..200).map(|one| from_identifier(&format!("uid-{one}"))).collect();
        assert_eq!(all.len(), 200, "no collisions");
        assert!(all.iter().all(|number| *number >= HASHED_BASE && number % (1 << RANK_BITS) == 0));
    }

    #[test]
    fn parses_annotated_numbers() {
        assert_eq!(from_annotation("a", "b", " 7 "), Ok(7));
        for wrong in ["", "-1", "1.5", "4294967296", "seven"] {
            assert!(from_annotation("a", "b", wrong).is_err(), "{wrong}");
        }
    }
}
