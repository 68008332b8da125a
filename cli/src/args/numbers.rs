//! Numbers of routers and nodes from the names that they are given elsewhere.
//!
//! Not here: what refuses two with one number (the routers, at the join).

/// Number of the router with this name: one more than the number it ends in, as replicas of a set that are counted from 0 are
/// called (`kvfleet-router-0` is router 1).
///
/// # Errors
/// Says what the name lacks.
pub(super) fn after_ordinal(name: &str) -> Result<u64, String> {
    let ordinal = name.rsplit_once('-').map(|(_, ordinal)| ordinal);
    let plain = |text: &&str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = ordinal.filter(plain).and_then(|ordinal| ordinal.parse::<u64>().ok()?.checked_add(1));
    number.ok_or_else(|| {
        format!("{name:?} does not end in a dash and a number from 0, as kvfleet-router-0 does")
    })
}

/// Number of the node on the host with this name: the same on every start and in every build, never 0. Two hosts of a
/// thousand share one with a chance of one in four thousand; routers refuse the second (`AlreadyExists`).
///
/// # Errors
/// Says what the name lacks.
pub(super) fn of_host(name: &str) -> Result<u32, String> {
    if name.trim().is_empty() {
        return Err("an empty name is no host's".to_owned());
    }
    // FNV-1a, folded to 31 bits: a number that people can read, and that stays when libraries change.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let folded = (hash ^ (hash >> 31) ^ (hash >> 62)) & 0x7fff_ffff;
    Ok(u32::try_from(folded).unwrap_or(1).max(1))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_router_counts_from_one_where_its_set_counts_from_zero() {
        assert_eq!(after_ordinal("kvfleet-router-0"), Ok(1));
        assert_eq!(after_ordinal("a-b-11"), Ok(12));
        for wrong in ["", "router", "router-", "router-x", "router-+1", "router-18446744073709551615", "0"] {
            assert!(after_ordinal(wrong).unwrap_err().contains("kvfleet-router-0"), "{wrong}");
        }
    }

    #[test]
    fn a_hosts_number_never_changes_and_neighbours_differ() {
        assert_eq!(of_host("worker-0"), Ok(1493537201));
        let names = (0..5_000).map(|number| format!("gke-pool-a-{number:04}"));
        let numbers: BTreeSet<u32> = names.map(|name| of_host(&name).unwrap()).collect();
        assert!(numbers.len() >= 4_990, "{} of 5000", numbers.len());
        assert!(!numbers.contains(&0));
        assert!(of_host(" ").is_err());
    }
}
