//! Numbers of routers and nodes, derived from names of replicas and hosts.
//!
//! Not here: conflicts of two equal numbers, which routers refuse at the join.

/// Number of the router with this name: the ordinal at its end plus one, since ordinals count from
/// 0 (`kvfleet-router-0` is router 1).
///
/// # Errors
/// If the name does not end in an ordinal.
pub(super) fn router_from_ordinal(name: &str) -> Result<u64, String> {
    let ordinal = name.rsplit_once('-').map(|(_, ordinal)| ordinal);
    let plain = |text: &&str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = ordinal.filter(plain).and_then(|ordinal| ordinal.parse::<u64>().ok()?.checked_add(1));
    number.ok_or_else(|| {
        format!("{name:?} does not end in a dash and a number from 0, as kvfleet-router-0 does")
    })
}

/// Number of the node on this host: stable over restarts and builds, never 0. Numbers of different
/// hosts can collide, with a chance of about one in four thousand for a thousand hosts; routers
/// refuse the second node (`AlreadyExists`).
///
/// # Errors
/// If the name is empty.
pub(super) fn node_from_host(name: &str) -> Result<u32, String> {
    if name.trim().is_empty() {
        return Err("the host name is empty".to_owned());
    }
    // FNV-1a, folded to 31 bits: short enough to read, and independent of libraries.
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
    fn router_numbers_are_ordinals_plus_one() {
        assert_eq!(router_from_ordinal("kvfleet-router-0"), Ok(1));
        assert_eq!(router_from_ordinal("a-b-11"), Ok(12));
        for wrong in ["", "router", "router-", "router-x", "router-+1", "router-18446744073709551615", "0"] {
            assert!(router_from_ordinal(wrong).unwrap_err().contains("kvfleet-router-0"), "{wrong}");
        }
    }

    #[test]
    fn host_numbers_are_stable_and_distinct() {
        assert_eq!(node_from_host("worker-0"), Ok(1493537201));
        let names = (0..5_000).map(|number| format!("gke-pool-a-{number:04}"));
        let numbers: BTreeSet<u32> = names.map(|name| node_from_host(&name).unwrap()).collect();
        assert!(numbers.len() >= 4_990, "{} of 5000", numbers.len());
        assert!(!numbers.contains(&0));
        assert!(node_from_host(" ").is_err());
    }
}
