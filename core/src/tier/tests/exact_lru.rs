//! DRAM alone, and DRAM with SSD, hit exactly like one LRU of the summed capacity.

use super::*;
use proptest::prelude::*;

/// One LRU over block numbers. Blocks of the running request are never victims; within a request
/// the tail is older than the head.
struct ReferenceLru {
    capacity: usize,
    clock: u64,
    stamps: BTreeMap<u64, u64>,
}

impl ReferenceLru {
    fn request(&mut self, numbers: &[u64]) -> usize {
        let hits = numbers.iter().take_while(|number| self.stamps.contains_key(number)).count();
        for number in numbers {
            if self.stamps.contains_key(number) || !self.make_room(numbers) {
                continue;
            }
            self.stamps.insert(*number, u64::MAX);
        }
        for number in numbers.iter().rev() {
            self.clock += 1;
            if let Some(stamp) = self.stamps.get_mut(number) {
                *stamp = self.clock;
            }
        }
        hits
    }

    fn make_room(&mut self, running: &[u64]) -> bool {
        if self.stamps.len() < self.capacity {
            return true;
        }
        let oldest = self.stamps.iter().filter(|(number, _)| !running.contains(number));
        let Some(victim) = oldest.min_by_key(|(_, stamp)| **stamp).map(|(number, _)| *number) else {
            return false;
        };
        self.stamps.remove(&victim);
        true
    }
}

/// Requests as prefixes of a tree: a block's number depends on its parent, like real hashes.
fn trace() -> impl Strategy<Value = Vec<Vec<u64>>> {
    let request = prop::collection::vec(0u64..3, 1..9).prop_map(|steps| {
        let mut number = 0;
        steps
            .iter()
            .map(|step| {
                number = number * 4 + step + 1;
                number
            })
            .collect::<Vec<_>>()
    });
    prop::collection::vec(request, 1..120)
}

fn same_hits(dram: u64, ssd: u64, trace: &[Vec<u64>]) -> Result<(), TestCaseError> {
    let mut book = blocks(dram, ssd);
    let capacity = usize::try_from(dram + ssd).unwrap();
    let mut reference = ReferenceLru { capacity, clock: 0, stamps: BTreeMap::new() };
    for (now, numbers) in trace.iter().enumerate() {
        let expected = reference.request(numbers);
        let hits = request(&mut book, numbers, now as u64);
        prop_assert_eq!(hits, expected, "request {} of {:?}", now, trace);
        for number in numbers {
            let held = book.tier_of(&hash(*number)).is_some();
            prop_assert_eq!(held, reference.stamps.contains_key(number));
        }
    }
    let total = book.stats(Tier::Dram).blocks + book.stats(Tier::Ssd).blocks;
    prop_assert_eq!(total, reference.stamps.len() as u64);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn dram_alone_is_an_exact_lru(capacity in 1u64..40, trace in trace()) {
        same_hits(capacity, 0, &trace)?;
    }

    #[test]
    fn dram_and_ssd_are_one_exact_lru(dram in 1u64..20, ssd in 1u64..20, trace in trace()) {
        same_hits(dram, ssd, &trace)?;
    }
}

#[test]
fn ssd_alone_is_an_exact_lru_too() {
    let trace: Vec<Vec<u64>> = (0..200u64).map(|n| (0..3).map(|i| (n * n % 17) * 10 + i).collect()).collect();
    same_hits(0, 12, &trace).unwrap();
}
