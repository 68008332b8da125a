//! Drain: before a node leaves, other nodes copy the blocks that only it holds, most valuable
//! first, as time permits.
//!
//! The node offers its blocks; routers know the other holders and choose the targets. Reads
//! continue. Not here: the order ([`kv_core::place::leaving`]), the copying (`copies`, at the
//! target) and leaving itself (`announce`).

use std::fmt::{Display, Formatter};
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::NodeId;
use kv_core::place::drain_order::{DrainRun, RunLimits, runs_by_worth};
use kv_core::tier::Holding;
use kvfleet_net::tls;
use kvfleet_proto::pb::router_client::RouterClient;
use kvfleet_proto::{convert, pb};
use tokio::sync::{Mutex, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::Channel;

use crate::announce::link::Registration;
use crate::announce::session::connect_lazily;
use crate::config::NodeConfig;
use crate::store::{StoreHandle, StoreRequest};

/// Maximum blocks considered: the most valuable ones. With 2 MiB blocks that is a quarter of a
/// terabyte.
const RANKED_BLOCKS_MAX: usize = 131_072;

/// Memory per considered block, in bytes: two copies of the holding while sorting, its hash, and
/// its part of a run.
const RANKED_BLOCK_BYTES: u64 = 2 * size_of::<Holding>() as u64 + 128;

/// Limits of one offered run.
const RUN: RunLimits = RunLimits { blocks: 512, bytes: 32 << 20 };

/// Concurrent offers, and so targets that copy at the same time.
const DRAIN_CALLS_MAX: usize = 8;

/// Interval at which routers are told that this node drains. They forget it after five seconds.
const ANNOUNCE_INTERVAL: Duration = Duration::from_secs(1);

/// Longest wait for one router, beyond the time of the copy itself.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// Minimum time for listing the node's blocks, even if no time is left to copy them.
const LISTING_TIME: Duration = Duration::from_secs(1);

/// Rounds over runs that found no target: space may have become free, or a source is no longer
/// busy.
const ROUNDS_MAX: usize = 3;

/// Bytes of memory that a drain of a node with `blocks` blocks takes.
pub(crate) fn memory_bytes_max(config: &NodeConfig, blocks: u64) -> u64 {
    let drains = config.drain_ms > 0 && config.drain_bytes > 0;
    if drains { blocks.min(RANKED_BLOCKS_MAX as u64) * RANKED_BLOCK_BYTES } else { 0 }
}

/// Result of a drain.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DrainReport {
    /// Blocks that other nodes held already.
    pub elsewhere_blocks: u64,
    /// Blocks that other nodes copied.
    pub copied_blocks: u64,
    /// Their size in bytes.
    pub copied_bytes: u64,
    /// Blocks that no other node holds.
    pub left_blocks: u64,
    /// Their size in bytes.
    pub left_bytes: u64,
    /// Share, 0 to 1, of the expected reuse of all blocks that these left blocks had.
    pub left_share: f64,
}

impl Display for DrainReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let DrainReport {
            elsewhere_blocks,
            copied_blocks,
            copied_bytes,
            left_blocks,
            left_bytes,
            left_share,
        } = self;
        write!(
            f,
            "{copied_blocks} blocks ({copied_bytes} bytes) were copied to other nodes, {elsewhere_blocks} \
             were there already, {left_blocks} ({left_bytes} bytes, {:.1} % of the value) are left behind",
            100.0 * left_share
        )
    }
}

/// Copies this node's blocks to other nodes.
#[derive(Debug)]
pub(crate) struct DrainWorker {
    node: NodeId,
    routers: Vec<String>,
    identity: tls::Identity,
    store: StoreHandle,
    registration: watch::Receiver<Option<Registration>>,
    drain: Duration,
    bytes_max: u64,
    done: Mutex<Option<DrainReport>>,
}

impl DrainWorker {
    pub(crate) fn new(
        config: &NodeConfig,
        identity: tls::Identity,
        store: StoreHandle,
        registration: watch::Receiver<Option<Registration>>,
    ) -> DrainWorker {
        DrainWorker {
            node: NodeId(config.id),
            routers: config.routers.clone(),
            identity,
            store,
            registration,
            drain: Duration::from_millis(config.drain_ms),
            bytes_max: config.drain_bytes,
            done: Mutex::default(),
        }
    }

    /// Whether the node has routers to offer blocks to.
    pub(crate) fn has_routers(&self) -> bool {
        !self.routers.is_empty()
    }

    /// Tells routers that this node drains, so that they choose it for no new requests, until the
    /// returned handle is dropped.
    pub(crate) async fn announce(&self) -> Option<AbortOnDropHandle<()>> {
        let hello = self.request(None, Duration::ZERO)?;
        let routers = self.clients();
        announce_once(&routers, &hello).await;
        let saying = tokio::spawn(async move {
            let mut tick = interval(ANNOUNCE_INTERVAL);
            tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                tick.tick().await;
                announce_once(&routers, &hello).await;
            }
        });
        Some(AbortOnDropHandle::new(saying))
    }

    /// Copies out as much as possible within this time and the configured limits. A second call
    /// returns the first result.
    pub(crate) async fn copy_out(&self, within: Duration) -> DrainReport {
        let mut done = self.done.lock().await;
        if let Some(done) = *done {
            return done;
        }
        let until = Instant::now() + within.min(self.drain);
        // Without an epoch or time no copy can start; a later call may retry.
        let can_give = self.registration.borrow().is_some() && Instant::now() < until;
        let given = self.copy_rounds(until, can_give).await;
        tracing::info!(%given, "drain finished");
        if can_give {
            *done = Some(given);
        }
        given
    }

    async fn copy_rounds(&self, until: Instant, can_give: bool) -> DrainReport {
        let mut given = DrainReport::default();
        // The remaining blocks are reported in any case.
        let (held, beyond) = self.list_holdings(until.max(Instant::now() + LISTING_TIME)).await;
        let all = beyond.worth + held.iter().map(|holding| holding.reuse_prob).sum::<f64>();
        let sorted = tokio::task::spawn_blocking(move || runs_by_worth(&held, RUN)).await;
        let mut waiting = sorted.unwrap_or_default();
        let routers: Arc<[RouterClient<Channel>]> = self.clients().into();
        for _ in 0..if can_give { ROUNDS_MAX } else { 0 } {
            let before = given.copied_blocks;
            waiting = self.copy_round(&routers, waiting, until, &mut given).await;
            if waiting.is_empty() || Instant::now() >= until || given.copied_blocks == before {
                break;
            }
        }
        let mut worth = beyond.worth;
        (given.left_blocks, given.left_bytes) = (beyond.blocks, beyond.bytes);
        for run in &waiting {
            given.left_blocks += run.run.hashes.len() as u64;
            given.left_bytes += run.bytes;
            worth += run.worth;
        }
        given.left_share = if all > 0.0 { (worth / all).min(1.0) } else { 0.0 };
        given
    }

    /// Offers each run once and returns the remaining runs.
    async fn copy_round(
        &self,
        routers: &Arc<[RouterClient<Channel>]>,
        runs: Vec<DrainRun>,
        until: Instant,
        given: &mut DrainReport,
    ) -> Vec<DrainRun> {
        let (mut left, mut calls, mut under_way) = (Vec::new(), JoinSet::new(), 0);
        let mut runs = runs.into_iter().enumerate().peekable();
        loop {
            let room = self.bytes_max.saturating_sub(given.copied_bytes + under_way);
            let fits = |(_, run): &(usize, DrainRun)| run.bytes <= room && Instant::now() < until;
            if calls.len() < DRAIN_CALLS_MAX
                && let Some((number, run)) = runs.next_if(fits)
            {
                under_way += run.bytes;
                let request = self.request(Some(&run), until.saturating_duration_since(Instant::now()));
                calls.spawn(ask(Arc::clone(routers), number, request, until, run));
                continue;
            }
            let Some(ended) = calls.join_next().await else { break };
            let Ok((run, reply)) = ended else { continue };
            under_way -= run.bytes;
            given.elsewhere_blocks += u64::from(reply.elsewhere_blocks);
            given.copied_blocks += u64::from(reply.copied_blocks);
            given.copied_bytes += reply.copied_bytes;
            left.extend(remaining_run(&run, &reply));
        }
        // No time or budget for the next run: a less valuable one must not go first.
        left.extend(runs.map(|(_, run)| run));
        left
    }

    /// The most valuable blocks held, and totals of the others.
    async fn list_holdings(&self, until: Instant) -> (Vec<Holding>, UnrankedBlocks) {
        let (mut held, mut from, mut beyond) = (Vec::new(), Some(0), UnrankedBlocks::default());
        while let Some(place) = from.filter(|_| Instant::now() < until) {
            let Ok(step) = self.store.request(|reply| StoreRequest::Holdings { from: place, reply }).await
            else {
                break;
            };
            held.extend(step.blocks);
            from = step.next;
            if held.len() >= 2 * RANKED_BLOCKS_MAX - kv_core::tier::HOLDINGS_MAX {
                keep_best(&mut held, &mut beyond);
            }
        }
        keep_best(&mut held, &mut beyond);
        (held, beyond)
    }

    fn request(&self, run: Option<&DrainRun>, within: Duration) -> Option<pb::DrainRequest> {
        let life = (*self.registration.borrow())?;
        Some(pb::DrainRequest {
            node: self.node.0,
            epoch: life.epoch.0,
            run: run.map(|run| convert::run_to_pb(&run.run)),
            root: run.map(|run| run.root.0.to_vec()).unwrap_or_default(),
            within_ms: u64::try_from(within.as_millis()).unwrap_or(u64::MAX),
        })
    }

    /// Clients for all valid router addresses.
    fn clients(&self) -> Vec<RouterClient<Channel>> {
        self.routers.iter().filter_map(|address| connect_lazily(address, &self.identity).ok()).collect()
    }
}

/// Tells every router, and waits for all answers in parallel.
async fn announce_once(routers: &[RouterClient<Channel>], hello: &pb::DrainRequest) {
    let mut calls = JoinSet::new();
    for router in routers {
        let (mut router, hello) = (router.clone(), hello.clone());
        calls.spawn(async move {
            // A router that misses it still chooses this node until it has left.
            let _ = timeout(ANNOUNCE_INTERVAL, router.drain(hello)).await;
        });
    }
    while calls.join_next().await.is_some() {}
}

/// Asks one router after the other; each run starts at a different router.
async fn ask(
    routers: Arc<[RouterClient<Channel>]>,
    number: usize,
    request: Option<pb::DrainRequest>,
    until: Instant,
    run: DrainRun,
) -> (DrainRun, pb::DrainReply) {
    let Some(request) = request else { return (run, pb::DrainReply::default()) };
    for turn in 0..routers.len() {
        let mut router = routers[(number + turn) % routers.len()].clone();
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        match timeout(left + ANSWER_MAX, router.drain(request.clone())).await {
            Ok(Ok(reply)) => return (run, reply.into_inner()),
            Ok(Err(status)) => tracing::debug!(%status, "no router took the run"),
            Err(_) => tracing::debug!("a router did not answer an offered run"),
        }
    }
    (run, pb::DrainReply::default())
}

/// The blocks at the end of the run that the reply leaves without another holder.
fn remaining_run(run: &DrainRun, reply: &pb::DrainReply) -> Option<DrainRun> {
    let blocks = run.run.hashes.len();
    let done = (reply.elsewhere_blocks as usize).saturating_add(reply.copied_blocks as usize).min(blocks);
    let share = |of: f64| of * (blocks - done) as f64 / blocks.max(1) as f64;
    (done < blocks).then(|| DrainRun {
        root: run.root,
        bytes: share(run.bytes as f64) as u64,
        worth: share(run.worth),
        run: run.run.part(done, blocks),
    })
}

/// Totals of blocks beyond the considered ones.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct UnrankedBlocks {
    blocks: u64,
    bytes: u64,
    worth: f64,
}

fn keep_best(held: &mut Vec<Holding>, beyond: &mut UnrankedBlocks) {
    if held.len() > RANKED_BLOCKS_MAX {
        held.select_nth_unstable_by(RANKED_BLOCKS_MAX, |left, right| {
            right.reuse_prob.total_cmp(&left.reuse_prob).then(right.stamp.cmp(&left.stamp))
        });
        for left in held.drain(RANKED_BLOCKS_MAX..) {
            beyond.blocks += 1;
            beyond.bytes += u64::from(left.traits.bytes);
            beyond.worth += left.reuse_prob;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kv_core::evict::BlockTraits;
    use kv_core::id::{BlockHash, TenantId};

    use super::*;

    fn held(blocks: usize) -> Vec<Holding> {
        let holding = |number: usize| {
            let traits = BlockTraits { bytes: 10, ..BlockTraits::default() };
            let (worth, stamp) = ((number % 10) as f64, number as u64);
            Holding {
                hash: BlockHash::from_words(number as u64, 0),
                parent: None,
                tenant: TenantId(0),
                traits,
                reuse_prob: worth,
                stamp,
            }
        };
        (0..blocks).map(holding).collect()
    }

    #[test]
    fn of_more_than_are_looked_at_the_most_valuable_are() {
        let mut all = held(2 * RANKED_BLOCKS_MAX);
        let mut beyond = UnrankedBlocks::default();
        let worth = |all: &[Holding]| all.iter().map(|one| one.reuse_prob).sum::<f64>();
        let before = worth(&all);
        keep_best(&mut all, &mut beyond);
        assert_eq!(all.len(), RANKED_BLOCKS_MAX);
        assert_eq!((beyond.blocks, beyond.bytes), (RANKED_BLOCKS_MAX as u64, 10 * RANKED_BLOCKS_MAX as u64));
        assert!((worth(&all) + beyond.worth - before).abs() < 1e-3, "every block is counted");
        assert!(all.iter().all(|one| one.reuse_prob >= 4.0));
        let few = held(3);
        let mut kept = few.clone();
        keep_best(&mut kept, &mut beyond);
        assert_eq!(kept, few);
    }

    #[test]
    fn what_an_answer_leaves_of_a_run_is_its_end() {
        let chain: Vec<Holding> = held(4)
            .iter()
            .enumerate()
            .map(|(at, one)| {
                let parent = at.checked_sub(1).map(|before| held(4)[before].hash);
                let traits = BlockTraits { offset_blocks: u32::try_from(at).unwrap(), ..one.traits };
                Holding { parent, traits, reuse_prob: 1.0, stamp: 0, ..*one }
            })
            .collect();
        let run = runs_by_worth(&chain, RUN).remove(0);
        let reply = |elsewhere_blocks, copied_blocks| pb::DrainReply {
            elsewhere_blocks,
            copied_blocks,
            ..pb::DrainReply::default()
        };
        let left = remaining_run(&run, &reply(1, 2)).unwrap();
        assert_eq!((left.run.hashes.len(), left.run.first_offset_blocks, left.bytes), (1, 3, 10));
        assert!((left.worth - 1.0).abs() < 1e-9);
        assert_eq!(remaining_run(&run, &reply(0, 4)), None);
        assert_eq!(remaining_run(&run, &reply(u32::MAX, 9)), None, "inflated counts in the reply");
        assert_eq!(remaining_run(&run, &pb::DrainReply::default()), Some(run));
    }
}
