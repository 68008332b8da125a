//! Which blocks the requests need that wait at instances, in the order in which they will be begun: what every node is told, so that it brings
//! them up in time and lets them go last (CachedAttention, USENIX ATC '24 §3.3).
//!
//! Of the requests that this router sent; every router tells of its own, and nodes put them together. Not here: what a node does with it (`kv_core::tier`),
//! and the telling (`tell.rs`).

pub(crate) mod tell;

use std::collections::BTreeMap;
use std::time::Duration;

use kv_core::id::{BlockHash, NodeId, TenantId, Timestamp};
use kv_core::schedule::{Decision, Prediction};
use kv_core::tier::{WINDOW_BLOCKS_MAX, WINDOW_REQUESTS_MAX};

/// A request that is begun sooner reads its blocks before a node could have done anything for it.
const WAIT_MIN: Duration = Duration::from_millis(20);

/// What was predicted to wait for so long may wait for twice that, and a moment more, before it is taken for begun.
const LATE_FACTOR: u32 = 2;
const LATE_MORE: Duration = Duration::from_millis(500);

/// Requests that are remembered at once, for all nodes.
const REQUESTS_MAX: usize = 4 * WINDOW_REQUESTS_MAX;

/// Blocks that are remembered at once, for all nodes: sixteen megabytes of hashes.
const BLOCKS_MAX: usize = 64 * WINDOW_BLOCKS_MAX;

/// What one request reads from one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// When its request is begun.
    pub(crate) starts: Timestamp,
    /// In prefix order.
    pub(crate) blocks: Vec<BlockHash>,
}

#[derive(Debug)]
struct Waiting {
    tenant: TenantId,
    until: Timestamp,
    by_node: Vec<(NodeId, Wanted)>,
}

/// The requests that wait. Every method takes the time.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    by_request: BTreeMap<u64, Waiting>,
    blocks: usize,
    /// Changes of what nodes would be told.
    version: u64,
}

impl Waits {
    /// A request of a tenant was sent by this decision: `hashes` are those of its prompt. Where as many wait as are remembered, it is not: those before it
    /// are nearer to their turns.
    pub(crate) fn sent(
        &mut self,
        tenant: TenantId,
        decision: &Decision,
        hashes: &[BlockHash],
        now: Timestamp,
    ) {
        let Prediction { queue_us, transfer_us, passed_us, .. } = decision.predicted;
        // Who waits no longer than its blocks take to come reads them at once.
        let turn_us = if queue_us == 0 { 0 } else { queue_us.saturating_add(transfer_us) };
        let wait = Duration::from_micros(turn_us.saturating_add(passed_us));
        if wait < WAIT_MIN || decision.sources.is_empty() {
            return;
        }
        let request = decision.request.0;
        // Numbers are their callers' to give; another tenant's stays.
        if self.by_request.get(&request).is_some_and(|known| known.tenant != tenant) {
            return;
        }
        self.begun(request);
        if self.by_request.len() >= REQUESTS_MAX || self.blocks >= BLOCKS_MAX {
            return;
        }
        let starts = now.after(wait);
        let mut by_node: Vec<(NodeId, Wanted)> = Vec::new();
        for source in &decision.sources {
            let (start, len) = (source.start_blocks as usize, source.len_blocks as usize);
            let read = hashes.get(start..start.saturating_add(len).min(hashes.len())).unwrap_or_default();
            match by_node.iter_mut().find(|(node, _)| *node == source.node) {
                Some((_, wanted)) => wanted.blocks.extend_from_slice(read),
                None => by_node.push((source.node, Wanted { starts, blocks: read.to_vec() })),
            }
        }
        self.blocks += count(&by_node);
        let until = now.after(wait.saturating_mul(LATE_FACTOR).saturating_add(LATE_MORE));
        self.by_request.insert(request, Waiting { tenant, until, by_node });
        self.version += 1;
    }

    /// A request waits no more.
    pub(crate) fn begun(&mut self, request: u64) {
        if let Some(gone) = self.by_request.remove(&request) {
            self.blocks -= count(&gone.by_node);
            self.version += 1;
        }
    }

    /// What each node is to be told, the earliest first; and a number that changes when that does.
    pub(crate) fn windows(&mut self, now: Timestamp) -> (BTreeMap<NodeId, Vec<Wanted>>, u64) {
        let over: Vec<u64> =
            self.by_request.iter().filter(|(_, one)| one.until < now).map(|(number, _)| *number).collect();
        over.into_iter().for_each(|request| self.begun(request));
        let mut windows: BTreeMap<NodeId, Vec<Wanted>> = BTreeMap::new();
        for (node, wanted) in self.by_request.values().flat_map(|one| &one.by_node) {
            windows.entry(*node).or_default().push(wanted.clone());
        }
        windows.values_mut().for_each(cut);
        (windows, self.version)
    }

    /// Whether nobody waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.by_request.is_empty()
    }
}

fn count(by_node: &[(NodeId, Wanted)]) -> usize {
    by_node.iter().map(|(_, wanted)| wanted.blocks.len()).sum()
}

/// In the order of starts, and no more than a node looks at.
fn cut(window: &mut Vec<Wanted>) {
    window.sort_by_key(|wanted| wanted.starts);
    let mut room = WINDOW_BLOCKS_MAX;
    let fit = window.iter().take(WINDOW_REQUESTS_MAX).take_while(|wanted| {
        let fits = room > 0;
        room = room.saturating_sub(wanted.blocks.len());
        fits
    });
    let fit = fit.count();
    window.truncate(fit);
}

#[cfg(test)]
mod tests {
    use kv_core::id::{Epoch, InstanceId, RequestId, Tier};
    use kv_core::schedule::{Pacing, Source};

    use super::*;

    fn hashes(count: u8) -> Vec<BlockHash> {
        (0..count).map(|number| BlockHash([number; 16])).collect()
    }

    /// A decision by which a request waits so long and then reads from these nodes: (node, start, len).
    fn decision(request: u64, wait_ms: u64, sources: &[(u32, u32, u32)]) -> Decision {
        let source = |&(node, start_blocks, len_blocks): &(u32, u32, u32)| Source {
            node: NodeId(node),
            epoch: Epoch(1),
            tier: Tier::Ssd,
            start_blocks,
            len_blocks,
        };
        let predicted = Prediction { queue_us: wait_ms * 1_000, ..Prediction::default() };
        Decision {
            request: RequestId(request),
            instance: InstanceId(1),
            resident_blocks: 0,
            sources: sources.iter().map(source).collect(),
            fetch_blocks: 0,
            recompute_blocks: 0,
            recompute_tokens: 0,
            save_to: None,
            parts: predicted,
            predicted,
            handover: None,
            pacing: Pacing::default(),
            turn: Timestamp(0),
            candidates: vec![],
            reasons: vec![],
        }
    }

    fn at(ms: u64) -> Timestamp {
        Timestamp(ms * 1_000)
    }

    /// Of each node, by request: start in milliseconds and how many blocks.
    fn told(waits: &mut Waits, ms: u64) -> Vec<(u32, Vec<(u64, usize)>)> {
        let window =
            |all: Vec<Wanted>| all.iter().map(|one| (one.starts.0 / 1_000, one.blocks.len())).collect();
        waits.windows(at(ms)).0.into_iter().map(|(node, all)| (node.0, window(all))).collect()
    }

    #[test]
    fn nodes_are_told_of_their_own_blocks_the_next_request_first() {
        let mut waits = Waits::default();
        waits.sent(TenantId(0), &decision(1, 900, &[(4, 0, 3), (5, 3, 2), (4, 5, 1)]), &hashes(6), at(0));
        waits.sent(TenantId(0), &decision(2, 300, &[(4, 1, 2)]), &hashes(6), at(100));
        assert_eq!(told(&mut waits, 100), [(4, vec![(400, 2), (900, 4)]), (5, vec![(900, 2)])]);
        let (windows, version) = waits.windows(at(100));
        assert_eq!(windows[&NodeId(4)][0].blocks, hashes(3)[1..]);
        assert_eq!(waits.windows(at(110)).1, version, "nothing has changed");
        waits.begun(2);
        waits.begun(2);
        assert_eq!(told(&mut waits, 110), [(4, vec![(900, 4)]), (5, vec![(900, 2)])]);
        assert_ne!(waits.windows(at(110)).1, version);
    }

    #[test]
    fn a_request_of_which_nothing_is_heard_counts_as_begun_in_the_end() {
        let mut waits = Waits::default();
        waits.sent(TenantId(0), &decision(1, 900, &[(4, 0, 3)]), &hashes(6), at(0));
        assert_eq!(told(&mut waits, 2_300).len(), 1);
        assert!(told(&mut waits, 2_301).is_empty() && waits.is_empty());
        assert_eq!(waits.blocks, 0);
    }

    #[test]
    fn what_a_node_can_do_nothing_for_is_not_told() {
        let mut waits = Waits::default();
        waits.sent(TenantId(0), &decision(1, 19, &[(4, 0, 3)]), &hashes(6), at(0));
        waits.sent(TenantId(0), &decision(2, 900, &[]), &hashes(6), at(0));
        assert!(waits.is_empty());
        // Sources behind the hashes are nobody's blocks.
        waits.sent(
            TenantId(0),
            &decision(3, 900, &[(4, 5, 9), (5, 7, 1), (6, u32::MAX, u32::MAX)]),
            &hashes(6),
            at(0),
        );
        assert_eq!(told(&mut waits, 0)[0], (4, vec![(900, 1)]));
    }

    #[test]
    fn what_is_remembered_and_told_is_bounded() {
        let mut waits = Waits::default();
        let all = hashes(200);
        for request in 0..30_000 {
            waits.sent(TenantId(0), &decision(request, 1_000_000, &[(4, 0, 200)]), &all, at(request));
        }
        assert!(
            waits.blocks < BLOCKS_MAX + 200 && waits.by_request.len() <= REQUESTS_MAX,
            "{}",
            waits.blocks
        );
        assert!(waits.by_request.contains_key(&0), "those before are nearer to their turns");
        let (windows, _) = waits.windows(at(30_000));
        let blocks: usize = windows[&NodeId(4)].iter().map(|wanted| wanted.blocks.len()).sum();
        assert!((WINDOW_BLOCKS_MAX..WINDOW_BLOCKS_MAX + 200).contains(&blocks), "{blocks}");
        // The same request again takes its own place.
        waits.sent(TenantId(0), &decision(5, 500, &[(4, 0, 1)]), &all, at(30_000));
        assert_eq!(waits.by_request[&5].by_node[0].1.blocks.len(), 1);
        waits.sent(TenantId(1), &decision(5, 500, &[(4, 0, 2)]), &all, at(30_000));
        assert_eq!(waits.by_request[&5].by_node[0].1.blocks.len(), 1, "another tenant has the number");
    }
}
