//! Drain order: the order in which a draining node hands over its blocks, most valuable first, and
//! a prefix before its continuation.
//!
//! Not here: the value of a block ([`crate::evict`], through [`crate::tier::Book::holdings`]), the
//! target (the routers), and the copying (`kvfleet-node`).

use std::collections::BTreeMap;

use super::copies::BlockRun;
use crate::id::BlockHash;
use crate::tier::Holding;

/// Blocks of one prefix that go to one target together.
#[derive(Clone, Debug, PartialEq)]
pub struct DrainRun {
    /// The first held block of the prefix: runs of one prefix share it, and go to the same target.
    pub root: BlockHash,
    /// The blocks.
    pub run: BlockRun,
    /// Total size, in bytes.
    pub bytes: u64,
    /// Expected uses of all blocks together.
    pub worth: f64,
}

impl DrainRun {
    fn of(first: &Holding, root: BlockHash) -> DrainRun {
        let run = BlockRun {
            parent: first.parent,
            first_offset_blocks: first.traits.offset_blocks,
            tenant: first.tenant,
            category: first.traits.category,
            ..BlockRun::default()
        };
        let mut leaving = DrainRun { root, run, bytes: 0, worth: 0.0 };
        leaving.push(first);
        leaving
    }

    fn push(&mut self, holding: &Holding) {
        let bytes = u64::from(holding.traits.bytes);
        self.run.hashes.push(holding.hash);
        self.run.frame_bytes = self.run.frame_bytes.max(bytes);
        self.bytes += bytes;
        self.worth += holding.reuse_prob;
    }

    fn continues_with(&self, next: &Holding, most: RunLimits) -> bool {
        let run = &self.run;
        let expected = u64::from(run.first_offset_blocks) + run.hashes.len() as u64;
        next.parent.is_some()
            && run.hashes.last().copied() == next.parent
            && (run.tenant, run.category) == (next.tenant, next.traits.category)
            && expected == u64::from(next.traits.offset_blocks)
            && run.hashes.len() < most.blocks
            && self.bytes + u64::from(next.traits.bytes) <= most.bytes
    }
}

/// Limits of one run; a run always holds at least one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunLimits {
    /// Most blocks.
    pub blocks: usize,
    /// Most bytes.
    pub bytes: u64,
}

/// All of these blocks in runs, most valuable first, but no block before held blocks of its prefix.
/// Ties go to the most recently used block, then to the one nearest to the start of its prefix.
#[must_use]
pub fn runs_by_worth(holdings: &[Holding], most: RunLimits) -> Vec<DrainRun> {
    let by_hash: BTreeMap<BlockHash, usize> =
        holdings.iter().enumerate().map(|(at, holding)| (holding.hash, at)).collect();
    let before = |at: usize| {
        let above = *by_hash.get(&holdings[at].parent?)?;
        (holdings[above].tenant == holdings[at].tenant).then_some(above)
    };
    let mut order: Vec<usize> = (0..holdings.len()).collect();
    order.sort_unstable_by(|left, right| {
        let (left, right) = (&holdings[*left], &holdings[*right]);
        let by_worth = right.reuse_prob.total_cmp(&left.reuse_prob).then(right.stamp.cmp(&left.stamp));
        let by_offset = left.traits.offset_blocks.cmp(&right.traits.offset_blocks);
        by_worth.then(by_offset).then(left.hash.cmp(&right.hash))
    });
    let mut roots: Vec<Option<BlockHash>> = vec![None; holdings.len()];
    let mut is_placed = vec![false; holdings.len()];
    let mut runs: Vec<DrainRun> = Vec::new();
    let mut path = Vec::new();
    for at in order {
        let mut next = Some(at);
        // Callers supply the parents: a cycle ends at the first block seen twice.
        while let Some(at) = next.filter(|at| !is_placed[*at]) {
            is_placed[at] = true;
            path.push(at);
            next = before(at);
        }
        for at in path.drain(..).rev() {
            let holding = &holdings[at];
            let root = before(at).and_then(|above| roots[above]).unwrap_or(holding.hash);
            roots[at] = Some(root);
            match runs.last_mut() {
                Some(run) if run.continues_with(holding, most) => run.push(holding),
                _ => runs.push(DrainRun::of(holding, root)),
            }
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::evict::BlockTraits;
    use crate::id::TenantId;

    fn hash(number: u8) -> BlockHash {
        BlockHash([number; _])
    }

    fn holding(number: u8, parent: Option<u8>, offset_blocks: u32, worth: f64) -> Holding {
        let traits = BlockTraits { offset_blocks, bytes: 10, ..BlockTraits::default() };
        let parent = parent.map(hash);
        Holding {
            hash: hash(number),
            parent,
            tenant: TenantId(0),
            traits,
            reuse_prob: worth,
            stamp: u64::from(number),
        }
    }

    fn summary(runs: &[DrainRun]) -> Vec<(u8, Vec<u8>)> {
        let number = |hash: &BlockHash| hash.0[0];
        runs.iter().map(|run| (number(&run.root), run.run.hashes.iter().map(number).collect())).collect()
    }

    const MOST: RunLimits = RunLimits { blocks: 8, bytes: 1_000 };

    #[test]
    fn most_valuable_block_goes_first_with_its_prefix() {
        let all = [
            holding(1, None, 0, 0.1),
            holding(2, Some(1), 1, 0.1),
            holding(3, Some(2), 2, 0.9),
            holding(4, Some(3), 3, 0.2),
            holding(9, None, 0, 0.5),
        ];
        let runs = runs_by_worth(&all, MOST);
        assert_eq!(summary(&runs), [(1, vec![1, 2, 3]), (9, vec![9]), (1, vec![4])]);
        assert_eq!((runs[0].bytes, runs[0].run.frame_bytes, runs[2].run.first_offset_blocks), (30, 10, 3));
        assert_eq!(runs[2].run.parent, Some(hash(3)));
        assert!((runs[0].worth - 1.1).abs() < 1e-9);
    }

    #[test]
    fn ties_go_to_recent_use_and_runs_are_bounded() {
        let all = [holding(1, None, 0, 1.0), holding(2, None, 0, 1.0), holding(3, None, 0, 1.0)];
        assert_eq!(summary(&runs_by_worth(&all, MOST)), [(3, vec![3]), (2, vec![2]), (1, vec![1])]);
        let chain: Vec<Holding> =
            (0..6).map(|at| holding(at, at.checked_sub(1), u32::from(at), 1.0)).collect();
        let short = RunLimits { blocks: 4, bytes: 1_000 };
        assert_eq!(summary(&runs_by_worth(&chain, short)), [(0, vec![0, 1, 2, 3]), (0, vec![4, 5])]);
        let small = RunLimits { blocks: 4, bytes: 5 };
        assert_eq!(runs_by_worth(&chain, small).len(), 6, "a run holds at least one block");
    }

    #[test]
    fn chain_without_its_head_begins_at_first_held_block() {
        let all = [holding(5, Some(4), 4, 0.5), holding(6, Some(5), 5, 0.5)];
        let runs = runs_by_worth(&all, MOST);
        assert_eq!(summary(&runs), [(5, vec![5, 6])]);
        assert_eq!((runs[0].run.parent, runs[0].run.first_offset_blocks), (Some(hash(4)), 4));
    }

    #[test]
    fn block_of_another_tenant_is_no_parent() {
        let other = Holding { tenant: TenantId(7), ..holding(2, Some(1), 1, 0.9) };
        assert_eq!(
            summary(&runs_by_worth(&[holding(1, None, 0, 0.1), other], MOST)),
            [(2, vec![2]), (1, vec![1])]
        );
    }

    proptest! {
        #[test]
        fn every_block_goes_once_and_after_its_parent(
            parents in prop::collection::vec((any::<u8>(), 0u32..4, 0u8..3), 0..60),
        ) {
            let all: Vec<Holding> = parents.iter().zip(0u8..).map(|((parent, offset, worth), number)| {
                // Any block may name any other as its parent, even itself.
                let parent = (*parent < 200).then_some(parent % 64);
                holding(number, parent, *offset, f64::from(*worth))
            }).collect();
            let runs = runs_by_worth(&all, RunLimits { blocks: 5, bytes: 40 });
            let mut seen = std::collections::BTreeSet::new();
            for run in &runs {
                let blocks = run.run.hashes.len();
                prop_assert!(blocks <= 5 && run.bytes <= 40 && run.bytes == 10 * blocks as u64);
                for hash in &run.run.hashes {
                    prop_assert!(seen.insert(*hash), "twice");
                }
            }
            prop_assert_eq!(seen.len(), all.len());
            // Without cycles, each parent comes before its child.
            let place: BTreeMap<BlockHash, usize> =
                runs.iter().flat_map(|run| &run.run.hashes).enumerate().map(|(at, hash)| (*hash, at)).collect();
            for holding in all.iter().filter(|one| one.parent.is_some_and(|parent| parent.0[0] < one.hash.0[0])) {
                let mut above = holding.parent;
                let mut steps = 0;
                while let Some(parent) = above.filter(|_| steps < 64) {
                    steps += 1;
                    above = all.iter().find(|one| one.hash == parent).and_then(|one| one.parent);
                }
                if steps < 64 && let Some(parent) = holding.parent.and_then(|parent| place.get(&parent)) {
                    prop_assert!(*parent < place[&holding.hash]);
                }
            }
        }
    }
}
