//! Matches our rails with a node's rails.
//!
//! Multi-rail networks often connect only rails of equal number, or give each its own subnet. So
//! rails with a common address prefix are matched first, and among equals those of equal number.
//! Each rail is in one primary match; leftover rails go into spare matches. Not here: which rails
//! exist (`choose.rs`), and whether packets pass, which only a trial shows (`rail_pair.rs`).

use std::cmp::Reverse;
use std::net::Ipv6Addr;

use super::rail::Gid;

/// Maximum rails of one process that peers consider. Hosts have up to ten cards with two ports.
pub(super) const RAILS_MAX: usize = 20;

/// One of our rails, by position, and one of the node's, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RailMatch {
    pub(super) local: usize,
    pub(super) remote: u32,
    /// One of the two rails is already in a better match.
    pub(super) is_spare: bool,
}

/// Length in bytes of the common prefix of two addresses, as far as the prefix identifies the
/// network. The last bytes identify the host.
fn shared_prefix_bytes(ours: Gid, theirs: Gid) -> usize {
    let alike = |most: usize| {
        let equal = ours.0.iter().zip(&theirs.0).take_while(|(ours, theirs)| ours == theirs);
        equal.take(most).count()
    };
    let is_ipv4 = |gid: Gid| Ipv6Addr::from(gid.0).to_ipv4_mapped().is_some();
    match (is_ipv4(ours), is_ipv4(theirs)) {
        (true, true) => alike(15),
        // The first eight bytes identify the network; the card's vendor assigns the others.
        (false, false) => alike(8),
        _ => 0,
    }
}

/// Matches, the best first: primary ones in the order of our rails, then spares. A node that lists
/// no rails has one.
pub(super) fn match_rails(ours: &[Gid], theirs: &[Gid]) -> Vec<RailMatch> {
    let ours = &ours[..ours.len().min(RAILS_MAX)];
    let theirs: Vec<Option<Gid>> = if theirs.is_empty() {
        vec![None]
    } else {
        theirs.iter().take(RAILS_MAX).map(|gid| Some(*gid)).collect()
    };
    let mut all = Vec::new();
    for (local, our) in ours.iter().enumerate() {
        for (number, their) in theirs.iter().enumerate() {
            let alike = their.map_or(0, |their| shared_prefix_bytes(*our, their));
            all.push((Reverse(alike), local != number, local, number));
        }
    }
    all.sort_unstable();
    let (mut used_ours, mut used_theirs) = (vec![false; ours.len()], vec![false; theirs.len()]);
    let mut pairs = Vec::new();
    let pair = |local, number: usize, is_spare| RailMatch { local, remote: number as u32, is_spare };
    for (_, _, local, number) in &all {
        if !used_ours[*local] && !used_theirs[*number] {
            (used_ours[*local], used_theirs[*number]) = (true, true);
            pairs.push(pair(*local, *number, false));
        }
    }
    pairs.sort_unstable_by_key(|pair| pair.local);
    for (_, _, local, number) in &all {
        if !used_ours[*local] || !used_theirs[*number] {
            (used_ours[*local], used_theirs[*number]) = (true, true);
            pairs.push(pair(*local, *number, true));
        }
    }
    pairs
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    fn gids(addresses: &[&str]) -> Vec<Gid> {
        addresses.iter().map(|address| Gid(address.parse::<Ipv6Addr>().unwrap().octets())).collect()
    }

    /// Local and remote rail of each match; spares have 100 added to the local rail.
    fn matched(ours: &[&str], theirs: &[&str]) -> Vec<(usize, u32)> {
        let number = |pair: &RailMatch| (pair.local + if pair.is_spare { 100 } else { 0 }, pair.remote);
        match_rails(&gids(ours), &gids(theirs)).iter().map(number).collect()
    }

    #[test]
    fn rails_of_one_subnet_are_matched() {
        let ours = ["::ffff:10.0.0.1", "::ffff:10.0.1.1"];
        assert_eq!(matched(&ours, &["::ffff:10.0.1.9", "::ffff:10.0.0.9"]), [(0, 1), (1, 0)]);
        let infiniband = ["fec0:0:0:1::a:1", "fec0:0:0:2::a:2"];
        assert_eq!(matched(&infiniband, &["fec0:0:0:2::b:1", "fec0:0:0:1::b:2"]), [(0, 1), (1, 0)]);
    }

    #[test]
    fn rails_of_equal_number_are_matched_when_addresses_do_not_decide() {
        let flat = ["::ffff:10.0.0.1", "::ffff:10.0.0.2"];
        assert_eq!(matched(&flat, &["::ffff:10.0.0.3", "::ffff:10.0.0.4"]), [(0, 0), (1, 1)]);
        assert_eq!(
            matched(&flat, &["::ffff:10.0.0.2", "::ffff:10.0.0.1"]),
            [(0, 0), (1, 1)],
            "two rails of one host"
        );
        assert_eq!(matched(&["fe80::1", "fe80::2"], &["fe80::2:1", "fe80::1"]), [(0, 0), (1, 1)]);
    }

    #[test]
    fn leftover_rails_become_spares() {
        let [one, two] = ["::ffff:10.0.0.1", "::ffff:10.0.1.1"];
        assert_eq!(matched(&[one], &["::ffff:10.0.1.9", "::ffff:10.0.0.9"]), [(0, 1), (100, 0)]);
        assert_eq!(matched(&[one, two], &["::ffff:10.0.1.9"]), [(1, 0), (100, 0)]);
        assert_eq!(matched(&[one, two], &[]), [(0, 0), (101, 0)], "a node of an older release");
        assert_eq!(matched(&["fe80::1", one], &["::ffff:10.0.0.9"]), [(1, 0), (100, 0)]);
    }

    #[test]
    fn every_rail_is_matched_and_at_most_once_as_primary() {
        for seed in 0..200 {
            println!("seed {seed}");
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let mut some = || -> Vec<Gid> {
                let count = random.random_range(1..6);
                let one = |_| {
                    let address = [10, 0, random.random_range(0..4), random.random_range(1..9)];
                    Gid(std::net::Ipv4Addr::from(address).to_ipv6_mapped().octets())
                };
                (0..count).map(one).collect()
            };
            let (ours, theirs) = (some(), some());
            let pairs = match_rails(&ours, &theirs);
            let side_by_side: Vec<&RailMatch> = pairs.iter().filter(|pair| !pair.is_spare).collect();
            assert_eq!(side_by_side.len(), ours.len().min(theirs.len()), "seed {seed}");
            assert_eq!(pairs.len(), ours.len().max(theirs.len()), "seed {seed}");
            for local in 0..ours.len() {
                assert!(pairs.iter().any(|pair| pair.local == local), "seed {seed}");
                assert!(side_by_side.iter().filter(|pair| pair.local == local).count() <= 1, "seed {seed}");
            }
            for remote in 0..theirs.len() as u32 {
                assert!(pairs.iter().any(|pair| pair.remote == remote), "seed {seed}");
                assert!(side_by_side.iter().filter(|pair| pair.remote == remote).count() <= 1, "seed {seed}");
            }
        }
    }
}
