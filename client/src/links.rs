//! What fetches came to, by node, path and tier: what an engine reports of its links, and routers price by.
//!
//! Only what a request waited for counts: what is loaded before its turn goes behind others, and says nothing of how fast a
//! fetch is. The first frame of a fetch is its latency, the others are its stream, so a fetch of one block says too
//! little and is left out. Not here: how samples become an estimate (`kv_core::schedule`), and when they are reported
//! (`report.rs`, or the engine).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kv_core::id::{Epoch, NodeId, Tier};
use kv_core::schedule::{LinkPath, RATE_MIN};
use kvfleet_proto::pb;
use kvfleet_transport::pick::PathKind;
use tokio::time::Instant;

/// Sums at once: those of 256 nodes by two paths and two tiers. Above it what changed least lately is forgotten.
const SUMS_MAX: usize = 1024;

/// Samples that a router takes in one report.
const SAMPLES_MAX: usize = 256;

/// What is summed up by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    node: NodeId,
    epoch: Epoch,
    /// As a report numbers it; 0 where it is not known.
    path: u32,
    /// As a report numbers it; 0 where blocks came out of several.
    tier: u32,
}

/// Everything since a key was first heard of.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    /// Tells it from one of the same key that was forgotten.
    born: u64,
    changed: u64,
    fetches: u64,
    bytes: u64,
    latency: Duration,
    stream: Duration,
}

/// What fetches came to. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct Links {
    known: Arc<Mutex<Known>>,
}

#[derive(Debug, Default)]
struct Known {
    sums: BTreeMap<Key, Sums>,
    changes: u64,
}

/// One fetch under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timed {
    begun: Instant,
    first: Option<Instant>,
    last: Instant,
    /// Behind the first frame.
    bytes: u64,
}

impl Timed {
    pub(crate) fn begin() -> Timed {
        let now = Instant::now();
        Timed { begun: now, first: None, last: now, bytes: 0 }
    }

    /// A frame, or slices, of so many bytes came.
    pub(crate) fn came(&mut self, bytes: usize) {
        self.came_at(bytes, Instant::now());
    }

    fn came_at(&mut self, bytes: usize, now: Instant) {
        self.last = now;
        match self.first {
            None => self.first = Some(self.last),
            Some(_) => self.bytes = self.bytes.saturating_add(bytes as u64),
        }
    }

    /// What was to come did not, up to now. Nobody knows what it would have been, so the wait counts at the slowest rate that is
    /// believed: who brings nothing in time is not to look like one of whom nothing is known.
    pub(crate) fn held_up(&mut self) {
        self.held_up_at(Instant::now());
    }

    fn held_up_at(&mut self, now: Instant) {
        self.first.get_or_insert(self.begun);
        let waited = now.saturating_duration_since(self.last).as_secs_f64();
        self.bytes = self.bytes.saturating_add((waited * RATE_MIN) as u64);
        self.last = now;
    }
}

impl Links {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes a second that came of the nodes of these sources together, each as in all fetches since its start, whatever the path; nothing
    /// where one of them is not known. What several sources bring from one node comes over one link.
    pub(crate) fn rate(&self, sources: &[pb::Source]) -> Option<u64> {
        let known = self.known();
        let mut nodes: BTreeMap<(NodeId, Epoch), BTreeSet<u32>> = BTreeMap::new();
        for source in sources {
            let tiers = nodes.entry((NodeId(source.node), Epoch(source.epoch))).or_default();
            // Blocks that came out of several tiers were of it too.
            tiers.extend([0, source.tier.saturating_add(1)]);
        }
        let of = |(node, tiers): (&(NodeId, Epoch), &BTreeSet<u32>)| {
            let is_it = |key: &Key| (key.node, key.epoch) == *node && tiers.contains(&key.tier);
            let sums = known.sums.iter().filter(|(key, _)| is_it(key)).map(|(_, sums)| sums);
            let (bytes, seconds) = sums.fold((0.0, 0.0), |(bytes, seconds), sums| {
                (bytes + sums.bytes as f64, seconds + sums.stream.as_secs_f64())
            });
            (seconds > 0.0).then_some((bytes / seconds) as u64)
        };
        nodes.iter().map(of).try_fold(0u64, |sum, rate| Some(sum.saturating_add(rate?)))
    }

    /// Counts a fetch whose blocks came out of this tier, if all did.
    pub(crate) fn fetched(
        &self,
        (node, epoch): (NodeId, Epoch),
        path: Option<PathKind>,
        tier: Option<Tier>,
        timed: &Timed,
    ) {
        let Some(first) = timed.first.filter(|_| timed.bytes > 0) else { return };
        let tier = tier.map_or(0, |tier| tier as u32 + 1);
        let key = Key { node, epoch, path: path.map_or(0, path_number), tier };
        let mut known = self.known();
        known.changes += 1;
        let now = known.changes;
        if !known.sums.contains_key(&key) {
            // A node that was started anew is another one.
            known.sums.retain(|of, _| of.node != node || of.epoch >= epoch);
            if known.sums.len() >= SUMS_MAX {
                let oldest = known.sums.iter().min_by_key(|(_, sums)| sums.changed).map(|(key, _)| *key);
                oldest.map(|key| known.sums.remove(&key));
            }
        }
        let sums = known.sums.entry(key).or_insert(Sums { born: now, ..Sums::default() });
        sums.changed = now;
        sums.fetches += 1;
        sums.bytes = sums.bytes.saturating_add(timed.bytes);
        sums.latency = sums.latency.saturating_add(first - timed.begun);
        sums.stream = sums.stream.saturating_add(timed.last - first);
    }
}

/// The tier that blocks came out of, if all of `asked` came, or those that did not are `planned` to be in the one that the others
/// came out of: what was waited for in vain may have been in another one.
pub(crate) fn one_tier(tiers: &[Tier], asked: usize, planned: Option<Tier>) -> Option<Tier> {
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

/// What one reader of a client's links has not seen yet: one for each router that is reported to.
#[derive(Debug)]
pub struct LinkReader {
    links: Links,
    seen: BTreeMap<Key, Sums>,
}

impl LinkReader {
    pub(crate) fn new(links: Links) -> LinkReader {
        LinkReader { links, seen: BTreeMap::new() }
    }

    /// One that hears of nothing before this moment.
    pub(crate) fn from_now(links: Links) -> LinkReader {
        let seen = links.known().sums.clone();
        LinkReader { links, seen }
    }

    /// What fetches came to since this was called last, for a report: 256 samples at most, of what changed last; others
    /// wait for the next. What a report that was lost said is not said again: the next one says as much.
    pub fn take(&mut self) -> Vec<pb::LinkSample> {
        self.take_most(SAMPLES_MAX)
    }

    /// The same, so many samples at most.
    pub fn take_most(&mut self, most: usize) -> Vec<pb::LinkSample> {
        let (samples, told) = self.look_at_most(most.min(SAMPLES_MAX));
        self.told(told);
        samples
    }

    /// The same, said again by the next look unless [`told`](LinkReader::told) hears of it.
    pub(crate) fn look(&self) -> (Vec<pb::LinkSample>, Told) {
        self.look_at_most(SAMPLES_MAX)
    }

    fn look_at_most(&self, most: usize) -> (Vec<pb::LinkSample>, Told) {
        let now = self.links.known().sums.clone();
        let seen = |key: &Key, sums: &Sums| {
            self.seen.get(key).filter(|seen| seen.born == sums.born).copied().unwrap_or_default()
        };
        let mut news: Vec<(Key, Sums, Sums)> = now
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
        (news.into_iter().map(sample).collect(), Told { told, known })
    }

    /// What a look gave was heard.
    pub(crate) fn told(&mut self, Told { told, known }: Told) {
        self.seen.retain(|key, _| known.contains(key));
        self.seen.extend(told);
    }
}

/// What a look gave, and all that was known then.
#[derive(Debug)]
pub(crate) struct Told {
    told: Vec<(Key, Sums)>,
    known: BTreeSet<Key>,
}

/// What came between two states of a sum.
fn sample((key, sums, seen): (Key, Sums, Sums)) -> pb::LinkSample {
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

    const NODE: (NodeId, Epoch) = (NodeId(1), Epoch(2));

    /// A fetch of frames of 1,000 bytes, the first after 5 ms and each other after one more.
    fn timed(frames: u64) -> Timed {
        let begun = Instant::now();
        let at = |frame: u64| begun + Duration::from_millis(4 + frame);
        let behind = frames.saturating_sub(1);
        Timed { begun, first: (frames > 0).then(|| at(1)), last: at(frames), bytes: 1_000 * behind }
    }

    #[test]
    fn each_reader_hears_of_each_fetch_once_by_tier_and_path() {
        let links = Links::default();
        let mut readers = [LinkReader::new(links.clone()), LinkReader::new(links.clone())];
        links.fetched(NODE, Some(PathKind::Tcp), Some(Tier::Dram), &timed(4));
        links.fetched(NODE, Some(PathKind::Tcp), None, &timed(2));
        links.fetched(NODE, Some(PathKind::Tcp), Some(Tier::Dram), &timed(1));
        links.fetched(NODE, Some(PathKind::Tcp), None, &timed(0));
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
        // A block alone says nothing of how fast others come behind it; blocks of several tiers count for none.
        assert_eq!(readers[0].take(), [sample(1, 1_000, 1_000, 4, 0), sample(1, 3_000, 3_000, 4, 2)]);
        assert_eq!(readers[0].take(), []);
        links.fetched(NODE, Some(PathKind::Tcp), Some(Tier::Dram), &timed(3));
        links.fetched(NODE, None, Some(Tier::Ssd), &timed(2));
        assert_eq!(readers[0].take(), [sample(1, 1_000, 1_000, 0, 1), sample(1, 2_000, 2_000, 4, 2)]);
        let all = readers[1].take();
        assert_eq!(all.iter().map(|sample| sample.fetches).collect::<Vec<_>>(), [1, 1, 2]);
    }

    #[test]
    fn what_was_not_heard_is_said_again_with_what_came_since() {
        let links = Links::default();
        let mut reader = LinkReader::new(links.clone());
        links.fetched(NODE, Some(PathKind::Tcp), Some(Tier::Dram), &timed(4));
        let lost = reader.look();
        assert_eq!(lost.0.len(), 1);
        links.fetched(NODE, Some(PathKind::Tcp), Some(Tier::Dram), &timed(3));
        let (again, told) = reader.look();
        assert_eq!(
            again.iter().map(|sample| (sample.fetches, sample.bytes)).collect::<Vec<_>>(),
            [(2, 5_000)]
        );
        links.fetched(NODE, Some(PathKind::Tcp), Some(Tier::Dram), &timed(2));
        reader.told(told);
        let rest = reader.take();
        assert_eq!(
            rest.iter().map(|sample| (sample.fetches, sample.bytes)).collect::<Vec<_>>(),
            [(1, 1_000)]
        );
    }

    #[test]
    fn what_is_known_is_bounded_and_an_older_start_of_a_node_is_forgotten() {
        let links = Links::default();
        let mut reader = LinkReader::new(links.clone());
        let two = timed(2);
        for node in 0..3_000 {
            links.fetched((NodeId(node), Epoch(1)), None, Some(Tier::Dram), &two);
        }
        assert_eq!(links.known().sums.len(), SUMS_MAX);
        let told: Vec<u32> = (0..5).flat_map(|_| reader.take()).map(|sample| sample.node).collect();
        assert!(told[..SAMPLES_MAX].iter().all(|node| *node >= 3_000 - 256), "what changed last comes first");
        let each: BTreeSet<u32> = told.iter().copied().collect();
        assert_eq!((told.len(), each.len()), (SUMS_MAX, SUMS_MAX), "and all others later, each once");
        // Forgotten and heard of again, it counts from there.
        links.fetched((NodeId(0), Epoch(1)), None, Some(Tier::Dram), &two);
        links.fetched((NodeId(2999), Epoch(2)), None, Some(Tier::Dram), &two);
        links.fetched((NodeId(2999), Epoch(1)), None, Some(Tier::Dram), &two);
        let said: Vec<_> =
            reader.take().iter().map(|sample| (sample.node, sample.epoch, sample.fetches)).collect();
        assert_eq!(said, [(0, 1, 1), (2999, 1, 1), (2999, 2, 1)]);
        links.fetched((NodeId(2999), Epoch(3)), None, Some(Tier::Dram), &two);
        assert!(links.known().sums.keys().all(|key| key.node != NodeId(2999) || key.epoch == Epoch(3)));
    }

    #[test]
    fn what_comes_of_one_node_counts_once_however_many_sources_it_is() {
        let links = Links::default();
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
        links.fetched(NODE, None, Some(Tier::Dram), &timed(11));
        let one = Some(1_000_000);
        assert_eq!(links.rate(&[dram.clone(), dram.clone()]), one);
        assert_eq!(links.rate(&[dram.clone(), ssd.clone()]), one, "its other tier is as good as known");
        assert_eq!(links.rate(std::slice::from_ref(&ssd)), None);
        links.fetched((NodeId(3), Epoch(2)), None, Some(Tier::Dram), &timed(11));
        let apart = [dram.clone(), source(3, Tier::Dram), ssd, dram];
        assert_eq!(links.rate(&apart), Some(2_000_000), "two nodes bring twice as much");
    }

    #[test]
    fn a_tier_is_known_where_no_block_may_have_been_in_another() {
        let (dram, ssd) = (Tier::Dram, Tier::Ssd);
        assert_eq!(one_tier(&[dram; 3], 3, None), Some(dram));
        assert_eq!(one_tier(&[dram; 3], 3, Some(ssd)), Some(dram), "the node knows better than the plan");
        assert_eq!(one_tier(&[dram, ssd], 2, Some(dram)), None);
        assert_eq!(one_tier(&[dram; 3], 8, Some(ssd)), None, "what did not come was planned to be elsewhere");
        assert_eq!(one_tier(&[ssd; 3], 8, Some(ssd)), Some(ssd));
        assert_eq!(one_tier(&[], 8, Some(ssd)), Some(ssd));
        assert_eq!([one_tier(&[], 0, None), one_tier(&[dram], 2, None)], [None, None]);
    }

    #[test]
    fn a_wait_in_vain_counts_at_the_slowest_rate_that_is_believed() {
        let mut nothing = Timed::begin();
        let begun = nothing.begun;
        let after = |ms| begun + Duration::from_millis(ms);
        nothing.held_up_at(after(200));
        assert_eq!((nothing.bytes, nothing.first), (200_000, Some(begun)));
        let mut some = Timed { begun, ..timed(0) };
        some.came_at(9_000, after(5));
        some.came_at(70_000, after(5));
        some.held_up_at(after(55));
        assert_eq!((some.bytes, some.first, some.last), (120_000, Some(after(5)), after(55)));
    }
}
