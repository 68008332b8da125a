//! Measured transfers by node, path and tier: engines report them, and routers estimate link costs
//! from them.
//!
//! Only transfers that a request waited for count: preloads have lower priority and do not show the
//! speed of a fetch. The first frame of a fetch gives the latency and the others the throughput, so
//! a fetch of one block is left out. Not here: estimates from samples (`kv_core::schedule`), and
//! sending them (`report.rs`, or the engine).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kv_core::id::{Epoch, NodeId, Tier};
use kv_core::schedule::{LinkPath, RATE_MIN};
use kvfleet_proto::pb;
use kvfleet_transport::pick::PathKind;
use tokio::time::Instant;

/// Maximum entries: 256 nodes by two paths and two tiers. Above it the least recently changed entry
/// is dropped.
const SUMS_MAX: usize = 1024;

/// Samples that a router accepts in one report.
const SAMPLES_MAX: usize = 256;

/// Key of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct LinkKey {
    node: NodeId,
    epoch: Epoch,
    /// Path number as in a report; 0 if unknown.
    path: u32,
    /// Tier number as in a report; 0 if blocks came from several tiers.
    tier: u32,
}

/// Totals since the entry was created.
#[derive(Clone, Copy, Debug, Default)]
struct LinkSums {
    /// Distinguishes it from a dropped entry with the same key.
    born: u64,
    changed: u64,
    fetches: u64,
    bytes: u64,
    latency: Duration,
    stream: Duration,
}

/// The measured transfers of a client. Clones share the table.
#[derive(Clone, Debug, Default)]
pub(crate) struct LinkStats {
    table: Arc<Mutex<LinkTable>>,
}

#[derive(Debug, Default)]
struct LinkTable {
    sums: BTreeMap<LinkKey, LinkSums>,
    changes: u64,
}

/// Timing of one running fetch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransferTiming {
    started: Instant,
    first: Option<Instant>,
    last: Instant,
    /// Bytes after the first frame.
    bytes: u64,
}

impl TransferTiming {
    pub(crate) fn begin() -> TransferTiming {
        let now = Instant::now();
        TransferTiming { started: now, first: None, last: now, bytes: 0 }
    }

    /// Records that `bytes` bytes of frames or slices arrived.
    pub(crate) fn record(&mut self, bytes: usize) {
        self.record_at(bytes, Instant::now());
    }

    fn record_at(&mut self, bytes: usize, now: Instant) {
        self.last = now;
        match self.first {
            None => self.first = Some(self.last),
            Some(_) => self.bytes = self.bytes.saturating_add(bytes as u64),
        }
    }

    /// Records a stall that lasted until now. The missing bytes are unknown, so the wait counts at
    /// the lowest rate that estimates accept. Otherwise a stalled node would look like an
    /// unmeasured one.
    pub(crate) fn record_stall(&mut self) {
        self.record_stall_at(Instant::now());
    }

    fn record_stall_at(&mut self, now: Instant) {
        self.first.get_or_insert(self.started);
        let waited = now.saturating_duration_since(self.last).as_secs_f64();
        self.bytes = self.bytes.saturating_add((waited * RATE_MIN) as u64);
        self.last = now;
    }
}

impl LinkStats {
    fn lock(&self) -> MutexGuard<'_, LinkTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Combined throughput of the nodes of these sources in bytes a second, from all fetches under
    /// their epoch, over any path. `None` if a node is unmeasured. Several sources on one node
    /// share its link and count once.
    pub(crate) fn rate(&self, sources: &[pb::Source]) -> Option<u64> {
        let known = self.lock();
        let mut nodes: BTreeMap<(NodeId, Epoch), BTreeSet<u32>> = BTreeMap::new();
        for source in sources {
            let tiers = nodes.entry((NodeId(source.node), Epoch(source.epoch))).or_default();
            // Transfers from several tiers include this one.
            tiers.extend([0, source.tier.saturating_add(1)]);
        }
        let of = |(node, tiers): (&(NodeId, Epoch), &BTreeSet<u32>)| {
            let is_it = |key: &LinkKey| (key.node, key.epoch) == *node && tiers.contains(&key.tier);
            let sums = known.sums.iter().filter(|(key, _)| is_it(key)).map(|(_, sums)| sums);
            let (bytes, seconds) = sums.fold((0.0, 0.0), |(bytes, seconds), sums| {
                (bytes + sums.bytes as f64, seconds + sums.stream.as_secs_f64())
            });
            (seconds > 0.0).then_some((bytes / seconds) as u64)
        };
        nodes.iter().map(of).try_fold(0u64, |sum, rate| Some(sum.saturating_add(rate?)))
    }

    /// Adds a fetch; `tier` is the tier of all its blocks, or `None` if they came from several.
    pub(crate) fn record_fetch(
        &self,
        node: NodeId,
        epoch: Epoch,
        path: Option<PathKind>,
        tier: Option<Tier>,
        timed: &TransferTiming,
    ) {
        let Some(first) = timed.first.filter(|_| timed.bytes > 0) else { return };
        let tier = tier.map_or(0, |tier| tier as u32 + 1);
        let key = LinkKey { node, epoch, path: path.map_or(0, path_number), tier };
        let mut known = self.lock();
        known.changes += 1;
        let now = known.changes;
        if !known.sums.contains_key(&key) {
            // After a restart a node's older measurements do not apply.
            known.sums.retain(|of, _| of.node != node || of.epoch >= epoch);
            if known.sums.len() >= SUMS_MAX {
                let oldest = known.sums.iter().min_by_key(|(_, sums)| sums.changed).map(|(key, _)| *key);
                oldest.map(|key| known.sums.remove(&key));
            }
        }
        let sums = known.sums.entry(key).or_insert(LinkSums { born: now, ..LinkSums::default() });
        sums.changed = now;
        sums.fetches += 1;
        sums.bytes = sums.bytes.saturating_add(timed.bytes);
        sums.latency = sums.latency.saturating_add(first - timed.started);
        sums.stream = sums.stream.saturating_add(timed.last - first);
    }
}

/// The common tier of the received blocks. If fewer than `asked` arrived, it must equal the
/// `planned` tier, since the missing ones may be elsewhere.
pub(crate) fn common_tier(tiers: &[Tier], asked: usize, planned: Option<Tier>) -> Option<Tier> {
    let tier = tiers.first().copied().or(planned)?;
    let is_one = tiers.iter().all(|other| *other == tier);
    (is_one && (tiers.len() == asked || planned == Some(tier))).then_some(tier)
}

/// The number of a path in a report.
fn path_number(kind: PathKind) -> u32 {
    let path = match kind {
        PathKind::SharedMemory => LinkPath::SharedMemory,
        PathKind::Rdma => LinkPath::Rdma,
        PathKind::Quic => LinkPath::Quic,
        PathKind::Tcp => LinkPath::Tcp,
    };
    path as u32
}

/// Reader of a client's link measurements that returns each one once. Use one for each router.
#[derive(Debug)]
pub struct LinkReader {
    links: LinkStats,
    seen: BTreeMap<LinkKey, LinkSums>,
}

impl LinkReader {
    pub(crate) fn new(links: LinkStats) -> LinkReader {
        LinkReader { links, seen: BTreeMap::new() }
    }

    /// A reader that skips measurements before this moment.
    pub(crate) fn from_now(links: LinkStats) -> LinkReader {
        let seen = links.lock().sums.clone();
        LinkReader { links, seen }
    }

    /// Measurements since the last call, for a report: at most 256 samples, the most recently
    /// changed first; others follow in the next call. Those of a lost report are not repeated.
    pub fn take(&mut self) -> Vec<pb::LinkSample> {
        self.take_at_most(SAMPLES_MAX)
    }

    /// The same, with at most `most` samples.
    pub fn take_at_most(&mut self, most: usize) -> Vec<pb::LinkSample> {
        let (samples, told) = self.peek_at_most(most.min(SAMPLES_MAX));
        self.acknowledge(told);
        samples
    }

    /// The same without consuming: the next call repeats them unless
    /// [`acknowledge`](LinkReader::acknowledge) is called.
    pub(crate) fn peek(&self) -> (Vec<pb::LinkSample>, PeekedSums) {
        self.peek_at_most(SAMPLES_MAX)
    }

    fn peek_at_most(&self, most: usize) -> (Vec<pb::LinkSample>, PeekedSums) {
        let now = self.links.lock().sums.clone();
        let seen = |key: &LinkKey, sums: &LinkSums| {
            self.seen.get(key).filter(|seen| seen.born == sums.born).copied().unwrap_or_default()
        };
        let mut news: Vec<(LinkKey, LinkSums, LinkSums)> = now
            .iter()
            .map(|(key, sums)| (*key, *sums, seen(key, sums)))
            .filter(|(_, sums, seen)| sums.fetches > seen.fetches)
            .collect();
        if news.len() > most {
            news.sort_unstable_by_key(|(_, sums, _)| std::cmp::Reverse(sums.changed));
            news.truncate(most);
        }
        let told = news.iter().map(|(key, sums, _)| (*key, *sums)).collect();
        let known = now.into_keys().collect();
        let samples = news.into_iter().map(|(key, sums, seen)| sample(key, sums, seen)).collect();
        (samples, PeekedSums { sums: told, known })
    }

    /// Marks the samples of a `peek` as delivered.
    pub(crate) fn acknowledge(&mut self, PeekedSums { sums: told, known }: PeekedSums) {
        self.seen.retain(|key, _| known.contains(key));
        self.seen.extend(told);
    }
}

/// The samples of a `peek`, and all keys known then.
#[derive(Debug)]
pub(crate) struct PeekedSums {
    sums: Vec<(LinkKey, LinkSums)>,
    known: BTreeSet<LinkKey>,
}

/// Difference between two states of an entry.
fn sample(key: LinkKey, sums: LinkSums, seen: LinkSums) -> pb::LinkSample {
    let micros = |span: Duration| u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
    pb::LinkSample {
        node: key.node.0,
        epoch: key.epoch.0,
        fetches: u32::try_from(sums.fetches - seen.fetches).unwrap_or(u32::MAX),
        latency_us: micros(sums.latency - seen.latency),
        bytes: sums.bytes - seen.bytes,
        stream_us: micros(sums.stream - seen.stream),
        path: key.path,
        tier: key.tier,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const NODE: NodeId = NodeId(1);
    const EPOCH: Epoch = Epoch(2);

    /// A fetch of frames of 1,000 bytes, the first after 5 ms and each further one after 1 ms.
    fn timed(frames: u64) -> TransferTiming {
        let begun = Instant::now();
        let at = |frame: u64| begun + Duration::from_millis(4 + frame);
        let behind = frames.saturating_sub(1);
        TransferTiming {
            started: begun,
            first: (frames > 0).then(|| at(1)),
            last: at(frames),
            bytes: 1_000 * behind,
        }
    }

    #[test]
    fn every_reader_gets_each_fetch_once_per_tier_and_path() {
        let links = LinkStats::default();
        let mut readers = [LinkReader::new(links.clone()), LinkReader::new(links.clone())];
        links.record_fetch(NODE, EPOCH, Some(PathKind::Tcp), Some(Tier::Dram), &timed(4));
        links.record_fetch(NODE, EPOCH, Some(PathKind::Tcp), None, &timed(2));
        links.record_fetch(NODE, EPOCH, Some(PathKind::Tcp), Some(Tier::Dram), &timed(1));
        links.record_fetch(NODE, EPOCH, Some(PathKind::Tcp), None, &timed(0));
        let sample = |fetches: u32, bytes, stream_us, path, tier| pb::LinkSample {
            node: 1,
            epoch: 2,
            fetches,
            latency_us: 5_000 * u64::from(fetches),
            bytes,
            stream_us,
            path,
            tier,
        };
        // A single block gives no throughput; blocks of several tiers count for none of them.
        assert_eq!(readers[0].take(), [sample(1, 1_000, 1_000, 4, 0), sample(1, 3_000, 3_000, 4, 2)]);
        assert_eq!(readers[0].take(), []);
        links.record_fetch(NODE, EPOCH, Some(PathKind::Tcp), Some(Tier::Dram), &timed(3));
        links.record_fetch(NODE, EPOCH, None, Some(Tier::Ssd), &timed(2));
        assert_eq!(readers[0].take(), [sample(1, 1_000, 1_000, 0, 1), sample(1, 2_000, 2_000, 4, 2)]);
        let all = readers[1].take();
        assert_eq!(all.iter().map(|sample| sample.fetches).collect::<Vec<_>>(), [1, 1, 2]);
    }

    #[test]
    fn unacknowledged_samples_are_resent_with_newer_ones() {
        let links = LinkStats::default();
        let mut reader = LinkReader::new(links.clone());
        links.record_fetch(NODE, EPOCH, Some(PathKind::Tcp), Some(Tier::Dram), &timed(4));
        let lost = reader.peek();
        assert_eq!(lost.0.len(), 1);
        links.record_fetch(NODE, EPOCH, Some(PathKind::Tcp), Some(Tier::Dram), &timed(3));
        let (again, told) = reader.peek();
        assert_eq!(
            again.iter().map(|sample| (sample.fetches, sample.bytes)).collect::<Vec<_>>(),
            [(2, 5_000)]
        );
        links.record_fetch(NODE, EPOCH, Some(PathKind::Tcp), Some(Tier::Dram), &timed(2));
        reader.acknowledge(told);
        let rest = reader.take();
        assert_eq!(
            rest.iter().map(|sample| (sample.fetches, sample.bytes)).collect::<Vec<_>>(),
            [(1, 1_000)]
        );
    }

    #[test]
    fn link_table_is_bounded_and_drops_older_epochs() {
        let links = LinkStats::default();
        let mut reader = LinkReader::new(links.clone());
        let two = timed(2);
        for node in 0..3_000 {
            links.record_fetch(NodeId(node), Epoch(1), None, Some(Tier::Dram), &two);
        }
        assert_eq!(links.lock().sums.len(), SUMS_MAX);
        let told: Vec<u32> = (0..5).flat_map(|_| reader.take()).map(|sample| sample.node).collect();
        assert!(
            told[..SAMPLES_MAX].iter().all(|node| *node >= 3_000 - 256),
            "the most recently changed samples come first"
        );
        let each: BTreeSet<u32> = told.iter().copied().collect();
        assert_eq!((told.len(), each.len()), (SUMS_MAX, SUMS_MAX), "all others follow later, once each");
        // A dropped entry that reappears counts from there.
        links.record_fetch(NodeId(0), Epoch(1), None, Some(Tier::Dram), &two);
        links.record_fetch(NodeId(2999), Epoch(2), None, Some(Tier::Dram), &two);
        links.record_fetch(NodeId(2999), Epoch(1), None, Some(Tier::Dram), &two);
        let said: Vec<_> =
            reader.take().iter().map(|sample| (sample.node, sample.epoch, sample.fetches)).collect();
        assert_eq!(said, [(0, 1, 1), (2999, 1, 1), (2999, 2, 1)]);
        links.record_fetch(NodeId(2999), Epoch(3), None, Some(Tier::Dram), &two);
        assert!(links.lock().sums.keys().all(|key| key.node != NodeId(2999) || key.epoch == Epoch(3)));
    }

    #[test]
    fn sources_on_one_node_share_its_rate() {
        let links = LinkStats::default();
        let source = |node, tier: Tier| pb::Source {
            node,
            epoch: 2,
            address: format!("node:{node}"),
            start_blocks: 0,
            len_blocks: 1,
            tier: tier as u32,
        };
        let (dram, ssd) = (source(1, Tier::Dram), source(1, Tier::Ssd));
        assert_eq!((links.rate(&[]), links.rate(std::slice::from_ref(&dram))), (Some(0), None));
        links.record_fetch(NODE, EPOCH, None, Some(Tier::Dram), &timed(11));
        let one = Some(1_000_000);
        assert_eq!(links.rate(&[dram.clone(), dram.clone()]), one);
        assert_eq!(
            links.rate(&[dram.clone(), ssd.clone()]),
            one,
            "the node's link is known from its other tier"
        );
        assert_eq!(links.rate(std::slice::from_ref(&ssd)), None);
        links.record_fetch(NodeId(3), Epoch(2), None, Some(Tier::Dram), &timed(11));
        let apart = [dram.clone(), source(3, Tier::Dram), ssd, dram];
        assert_eq!(links.rate(&apart), Some(2_000_000), "two nodes have twice the throughput");
    }

    #[test]
    fn tier_is_known_only_if_all_blocks_share_it() {
        let (dram, ssd) = (Tier::Dram, Tier::Ssd);
        assert_eq!(common_tier(&[dram; 3], 3, None), Some(dram));
        assert_eq!(common_tier(&[dram; 3], 3, Some(ssd)), Some(dram), "the node's tiers override the plan");
        assert_eq!(common_tier(&[dram, ssd], 2, Some(dram)), None);
        assert_eq!(
            common_tier(&[dram; 3], 8, Some(ssd)),
            None,
            "the missing blocks were planned in another tier"
        );
        assert_eq!(common_tier(&[ssd; 3], 8, Some(ssd)), Some(ssd));
        assert_eq!(common_tier(&[], 8, Some(ssd)), Some(ssd));
        assert_eq!([common_tier(&[], 0, None), common_tier(&[dram], 2, None)], [None, None]);
    }

    #[test]
    fn stall_counts_at_minimum_rate() {
        let mut nothing = TransferTiming::begin();
        let begun = nothing.started;
        let after = |ms| begun + Duration::from_millis(ms);
        nothing.record_stall_at(after(200));
        assert_eq!((nothing.bytes, nothing.first), (200_000, Some(begun)));
        let mut some = TransferTiming { started: begun, ..timed(0) };
        some.record_at(9_000, after(5));
        some.record_at(70_000, after(5));
        some.record_stall_at(after(55));
        assert_eq!((some.bytes, some.first, some.last), (120_000, Some(after(5)), after(55)));
    }
}
