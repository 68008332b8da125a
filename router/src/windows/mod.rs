//! Prefetch windows: blocks that queued requests will read, per node and in order of their start.
//! Nodes prefetch them and evict them last (CachedAttention, USENIX ATC '24 §3.3).
//!
//! Covers the requests that this router sent; every router publishes its own, and nodes merge them.
//! Not here: how a node uses a window (`kv_core::tier`), and sending it (`publish.rs`).

pub(crate) mod publish;

use std::collections::BTreeMap;
use std::time::Duration;

use kv_core::id::{BlockHash, NodeId, TenantId, Timestamp};
use kv_core::schedule::{Decision, Prediction};
use kv_core::tier::{WINDOW_BLOCKS_MAX, WINDOW_REQUESTS_MAX};

/// Shortest useful wait: a request that starts earlier reads its blocks before a prefetch
/// completes.
const WAIT_MIN: Duration = Duration::from_millis(20);

/// A request counts as started after its predicted wait times this factor plus this extra time.
const OVERDUE_FACTOR: u32 = 2;
const OVERDUE_EXTRA: Duration = Duration::from_millis(500);

/// Limit on tracked requests, over all nodes.
const REQUESTS_MAX: usize = 4 * WINDOW_REQUESTS_MAX;

/// Limit on tracked blocks, over all nodes: sixteen megabytes of hashes.
const BLOCKS_MAX: usize = 64 * WINDOW_BLOCKS_MAX;

/// Blocks that one request reads from one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WindowEntry {
    /// Predicted start of the request.
    pub(crate) starts: Timestamp,
    /// In prefix order.
    pub(crate) blocks: Vec<BlockHash>,
}

#[derive(Debug)]
struct QueuedRequest {
    tenant: TenantId,
    until: Timestamp,
    by_node: Vec<(NodeId, WindowEntry)>,
}

/// Queued requests and their reads. Methods take the time as an argument.
#[derive(Debug, Default)]
pub(crate) struct QueuedRequests {
    by_request: BTreeMap<u64, QueuedRequest>,
    blocks: usize,
    /// Incremented with every change of a window.
    version: u64,
}

impl QueuedRequests {
    /// Records a request sent by this decision; `hashes` are those of its prompt. At the limit it
    /// is not tracked, since the tracked requests start earlier.
    pub(crate) fn record(
        &mut self,
        tenant: TenantId,
        decision: &Decision,
        hashes: &[BlockHash],
        now: Timestamp,
    ) {
        let Prediction { queue_us, transfer_us, overtaking_us: passed_us, .. } = decision.predicted;
        // A request that waits no longer than its transfer reads its blocks at once.
        let prefill_start_us = if queue_us == 0 { 0 } else { queue_us.saturating_add(transfer_us) };
        let wait = Duration::from_micros(prefill_start_us.saturating_add(passed_us));
        if wait < WAIT_MIN || decision.sources.is_empty() {
            return;
        }
        let request = decision.request.0;
        // Callers choose request numbers; a number in use by another tenant is kept.
        if self.by_request.get(&request).is_some_and(|known| known.tenant != tenant) {
            return;
        }
        self.remove(request);
        if self.by_request.len() >= REQUESTS_MAX || self.blocks >= BLOCKS_MAX {
            return;
        }
        let starts = now.after(wait);
        let mut by_node: Vec<(NodeId, WindowEntry)> = Vec::new();
        for source in &decision.sources {
            let (start, len) = (source.start_blocks as usize, source.len_blocks as usize);
            let read = hashes.get(start..start.saturating_add(len).min(hashes.len())).unwrap_or_default();
            match by_node.iter_mut().find(|(node, _)| *node == source.node) {
                Some((_, wanted)) => wanted.blocks.extend_from_slice(read),
                None => by_node.push((source.node, WindowEntry { starts, blocks: read.to_vec() })),
            }
        }
        self.blocks += count(&by_node);
        let until = now.after(wait.saturating_mul(OVERDUE_FACTOR).saturating_add(OVERDUE_EXTRA));
        self.by_request.insert(request, QueuedRequest { tenant, until, by_node });
        self.version += 1;
    }

    /// Stops tracking a request, because it started or ended.
    pub(crate) fn remove(&mut self, request: u64) {
        if let Some(gone) = self.by_request.remove(&request) {
            self.blocks -= count(&gone.by_node);
            self.version += 1;
        }
    }

    /// Windows per node, earliest start first, and the version, which changes with them.
    pub(crate) fn windows(&mut self, now: Timestamp) -> (BTreeMap<NodeId, Vec<WindowEntry>>, u64) {
        let over: Vec<u64> =
            self.by_request.iter().filter(|(_, one)| one.until < now).map(|(number, _)| *number).collect();
        over.into_iter().for_each(|request| self.remove(request));
        let mut windows: BTreeMap<NodeId, Vec<WindowEntry>> = BTreeMap::new();
        for (node, wanted) in self.by_request.values().flat_map(|one| &one.by_node) {
            windows.entry(*node).or_default().push(wanted.clone());
        }
        windows.values_mut().for_each(truncate);
        (windows, self.version)
    }

    /// Whether no request is tracked.
    pub(crate) fn is_empty(&self) -> bool {
        self.by_request.is_empty()
    }
}

fn count(by_node: &[(NodeId, WindowEntry)]) -> usize {
    by_node.iter().map(|(_, wanted)| wanted.blocks.len()).sum()
}

/// Sorts by start and truncates to a node's limits.
fn truncate(window: &mut Vec<WindowEntry>) {
    window.sort_by_key(|entry| entry.starts);
    let mut room = WINDOW_BLOCKS_MAX;
    let fit = window.iter().take(WINDOW_REQUESTS_MAX).take_while(|entry| {
        let table = room > 0;
        room = room.saturating_sub(entry.blocks.len());
        table
    });
    let fit = fit.count();
    window.truncate(fit);
}

#[cfg(test)]
mod tests {
    use kv_core::id::{Epoch, InstanceId, RequestId, Tier};
    use kv_core::schedule::{DecodePrediction, Source};

    use super::*;

    fn hashes(count: u8) -> Vec<BlockHash> {
        (0..count).map(|number| BlockHash([number; _])).collect()
    }

    /// A decision with this wait, then reads from these nodes: (node, start, len).
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
            uncorrected: predicted,
            predicted,
            handover: None,
            decode: DecodePrediction::default(),
            priority_deadline: Timestamp(0),
            candidates: vec![],
            reasons: vec![],
        }
    }

    fn at(ms: u64) -> Timestamp {
        Timestamp(ms * 1_000)
    }

    /// Per node and request: start in milliseconds, and number of blocks.
    fn windows_of(queued: &mut QueuedRequests, ms: u64) -> Vec<(u32, Vec<(u64, usize)>)> {
        let window =
            |all: Vec<WindowEntry>| all.iter().map(|one| (one.starts.0 / 1_000, one.blocks.len())).collect();
        queued.windows(at(ms)).0.into_iter().map(|(node, all)| (node.0, window(all))).collect()
    }

    #[test]
    fn windows_hold_a_nodes_own_blocks_in_start_order() {
        let mut queued = QueuedRequests::default();
        queued.record(TenantId(0), &decision(1, 900, &[(4, 0, 3), (5, 3, 2), (4, 5, 1)]), &hashes(6), at(0));
        queued.record(TenantId(0), &decision(2, 300, &[(4, 1, 2)]), &hashes(6), at(100));
        assert_eq!(windows_of(&mut queued, 100), [(4, vec![(400, 2), (900, 4)]), (5, vec![(900, 2)])]);
        let (windows, version) = queued.windows(at(100));
        assert_eq!(windows[&NodeId(4)][0].blocks, hashes(3)[1..]);
        assert_eq!(queued.windows(at(110)).1, version, "no change");
        queued.remove(2);
        queued.remove(2);
        assert_eq!(windows_of(&mut queued, 110), [(4, vec![(900, 4)]), (5, vec![(900, 2)])]);
        assert_ne!(queued.windows(at(110)).1, version);
    }

    #[test]
    fn an_overdue_request_is_dropped() {
        let mut queued = QueuedRequests::default();
        queued.record(TenantId(0), &decision(1, 900, &[(4, 0, 3)]), &hashes(6), at(0));
        assert_eq!(windows_of(&mut queued, 2_300).len(), 1);
        assert!(windows_of(&mut queued, 2_301).is_empty() && queued.is_empty());
        assert_eq!(queued.blocks, 0);
    }

    #[test]
    fn short_waits_and_empty_reads_are_left_out() {
        let mut queued = QueuedRequests::default();
        queued.record(TenantId(0), &decision(1, 19, &[(4, 0, 3)]), &hashes(6), at(0));
        queued.record(TenantId(0), &decision(2, 900, &[]), &hashes(6), at(0));
        assert!(queued.is_empty());
        // Sources beyond the prompt's hashes have no blocks.
        queued.record(
            TenantId(0),
            &decision(3, 900, &[(4, 5, 9), (5, 7, 1), (6, u32::MAX, u32::MAX)]),
            &hashes(6),
            at(0),
        );
        assert_eq!(windows_of(&mut queued, 0)[0], (4, vec![(900, 1)]));
    }

    #[test]
    fn requests_and_windows_are_bounded() {
        let mut queued = QueuedRequests::default();
        let all = hashes(200);
        for request in 0..30_000 {
            queued.record(TenantId(0), &decision(request, 1_000_000, &[(4, 0, 200)]), &all, at(request));
        }
        assert!(
            queued.blocks < BLOCKS_MAX + 200 && queued.by_request.len() <= REQUESTS_MAX,
            "{}",
            queued.blocks
        );
        assert!(queued.by_request.contains_key(&0), "earlier requests start sooner");
        let (windows, _) = queued.windows(at(30_000));
        let blocks: usize = windows[&NodeId(4)].iter().map(|entry| entry.blocks.len()).sum();
        assert!((WINDOW_BLOCKS_MAX..WINDOW_BLOCKS_MAX + 200).contains(&blocks), "{blocks}");
        // A repeated request replaces its own entry.
        queued.record(TenantId(0), &decision(5, 500, &[(4, 0, 1)]), &all, at(30_000));
        assert_eq!(queued.by_request[&5].by_node[0].1.blocks.len(), 1);
        queued.record(TenantId(1), &decision(5, 500, &[(4, 0, 2)]), &all, at(30_000));
        assert_eq!(queued.by_request[&5].by_node[0].1.blocks.len(), 1, "another tenant has the number");
    }
}
