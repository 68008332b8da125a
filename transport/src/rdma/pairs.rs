//! Which of our rails goes with which of a node's.
//!
//! Networks of several rails often join only rails of one number, or have a subnet for each: rails whose addresses begin alike go
//! together, and among equals those of one number. Each rail is in one pair first; what is left over is in a spare pair. Not here:
//! which rails there are (`choose.rs`), and whether packets pass, which only a trial shows (`lane.rs`).

use std::cmp::Reverse;
use std::net::Ipv6Addr;

use super::rail::Gid;

/// Rails of one process that others look at. Hosts have up to ten cards with two ports.
pub(super) const RAILS_MAX: usize = 20;

/// One of our rails, by position, and one of the node's, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pair {
    pub(super) local: usize,
    pub(super) remote: u32,
    /// One of both is in a better pair already.
    pub(super) is_spare: bool,
}

/// Bytes in which two addresses begin alike, as far as they tell networks apart; the last ones tell hosts apart.
fn kinship(ours: Gid, theirs: Gid) -> usize {
    let alike = |most: usize| {
        let equal = ours.0.iter().zip(&theirs.0).take_while(|(ours, theirs)| ours == theirs);
        equal.take(most).count()
    };
    let is_ipv4 = |gid: Gid| Ipv6Addr::from(gid.0).to_ipv4_mapped().is_some();
    match (is_ipv4(ours), is_ipv4(theirs)) {
        (true, true) => alike(15),
        // Behind eight bytes of network stands what the card's maker gave.
        (false, false) => alike(8),
        _ => 0,
    }
}

/// Pairs, the best first: those that are used side by side, in the order of our rails, then spares. A node that says nothing of its
/// rails has one.
pub(super) fn pairs(ours: &[Gid], theirs: &[Gid]) -> Vec<Pair> {
    let ours = &ours[..ours.len().min(RAILS_MAX)];
    let theirs: Vec<Option<Gid>> = if theirs.is_empty() {
        vec![None]
    } else {
        theirs.iter().take(RAILS_MAX).map(|gid| Some(*gid)).collect()
    };
    let mut all = Vec::new();
    for (local, our) in ours.iter().enumerate() {
        for (number, their) in theirs.iter().enumerate() {
            let alike = their.map_or(0, |their| kinship(*our, their));
            all.push((Reverse(alike), local != number, local, number));
        }
    }
    all.sort_unstable();
    let (mut used_ours, mut used_theirs) = (vec![false; ours.len()], vec![false; theirs.len()]);
    let mut pairs = Vec::new();
    let pair = |local, number: usize, is_spare| Pair { local, remote: number as u32, is_spare };
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

    /// Local and remote of each pair, those of spares behind 100.
    fn paired(ours: &[&str], theirs: &[&str]) -> Vec<(usize, u32)> {
        let number = |pair: &Pair| (pair.local + if pair.is_spare { 100 } else { 0 }, pair.remote);
        pairs(&gids(ours), &gids(theirs)).iter().map(number).collect()
    }

    #[test]
    fn rails_of_one_subnet_go_together() {
        let ours = ["::ffff:10.0.0.1", "::ffff:10.0.1.1"];
        assert_eq!(paired(&ours, &["::ffff:10.0.1.9", "::ffff:10.0.0.9"]), [(0, 1), (1, 0)]);
        let infiniband = ["fec0:0:0:1::a:1", "fec0:0:0:2::a:2"];
        assert_eq!(paired(&infiniband, &["fec0:0:0:2::b:1", "fec0:0:0:1::b:2"]), [(0, 1), (1, 0)]);
    }

    #[test]
    fn rails_of_one_number_go_together_where_addresses_say_nothing() {
        let flat = ["::ffff:10.0.0.1", "::ffff:10.0.0.2"];
        assert_eq!(paired(&flat, &["::ffff:10.0.0.3", "::ffff:10.0.0.4"]), [(0, 0), (1, 1)]);
        assert_eq!(paired(&flat, &["::ffff:10.0.0.2", "::ffff:10.0.0.1"]), [(0, 0), (1, 1)], "of one host");
        assert_eq!(paired(&["fe80::1", "fe80::2"], &["fe80::2:1", "fe80::1"]), [(0, 0), (1, 1)]);
    }

    #[test]
    fn what_is_left_over_is_spare() {
        let [one, two] = ["::ffff:10.0.0.1", "::ffff:10.0.1.1"];
        assert_eq!(paired(&[one], &["::ffff:10.0.1.9", "::ffff:10.0.0.9"]), [(0, 1), (100, 0)]);
        assert_eq!(paired(&[one, two], &["::ffff:10.0.1.9"]), [(1, 0), (100, 0)]);
        assert_eq!(paired(&[one, two], &[]), [(0, 0), (101, 0)], "a node of an older release");
        assert_eq!(paired(&["fe80::1", one], &["::ffff:10.0.0.9"]), [(1, 0), (100, 0)]);
    }

    #[test]
    fn every_rail_is_in_a_pair_and_none_twice_side_by_side() {
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
            let pairs = pairs(&ours, &theirs);
            let side_by_side: Vec<&Pair> = pairs.iter().filter(|pair| !pair.is_spare).collect();
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
