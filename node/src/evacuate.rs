//! What a node does before it leaves: what it alone holds goes to other nodes, the most valuable first, as long as there is time.
//!
//! Routers know who holds what and choose where it goes; the node says only what it would be a pity to lose. Reads go on meanwhile.
//! Not here: the order ([`kv_core::place::leaving`]), the copying (`copies`, at whoever takes it) and leaving itself (`announce`).

use std::fmt::{Display, Formatter};
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::NodeId;
use kv_core::place::leaving::{LeavingRun, RunMost, runs_by_worth};
use kv_core::tier::Holding;
use kvfleet_proto::pb::router_client::RouterClient;
use kvfleet_proto::{convert, pb, tls};
use tokio::sync::{Mutex, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::Channel;

use crate::announce::link::Life;
use crate::announce::session::connect_lazily;
use crate::config::NodeConfig;
use crate::store::{Ask, StoreHandle};

/// Blocks that are looked at: the most valuable ones. As many of two megabytes are a quarter of a terabyte.
const HELD_MAX: usize = 131_072;

/// Memory for one of them, in bytes: twice as a holding while they are sorted out, by its hash, and in its run.
const HELD_BYTES: u64 = 2 * size_of::<Holding>() as u64 + 128;

/// What goes to one place with one call.
const RUN: RunMost = RunMost { blocks: 512, bytes: 32 << 20 };

/// Calls under way: as many targets take at the same time.
const CALLS_MAX: usize = 8;

/// How often routers are told that this node drains. They forget it after five seconds.
const SAY_EVERY: Duration = Duration::from_secs(1);

/// Longest that one router is waited for, beyond what the copy itself may take.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// So long a node may take to list what it holds, also where no time is left to give it away.
const LISTED_WITHIN: Duration = Duration::from_secs(1);

/// Rounds over what found no place: others may have made room meanwhile, and a busy source is one no more.
const ROUNDS_MAX: usize = 3;

/// Bytes that it takes to know what is held while a node of so many blocks drains.
pub(crate) fn memory_bytes_max(config: &NodeConfig, blocks: u64) -> u64 {
    let drains = config.drain_ms > 0 && config.drain_bytes > 0;
    if drains { blocks.min(HELD_MAX as u64) * HELD_BYTES } else { 0 }
}

/// What a node that drains gave to others, and what it left behind.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evacuated {
    /// Blocks that others had already.
    pub elsewhere_blocks: u64,
    /// Blocks that others have now.
    pub copied_blocks: u64,
    /// Their size in bytes.
    pub copied_bytes: u64,
    /// Blocks that nobody else has.
    pub left_blocks: u64,
    /// Their size in bytes.
    pub left_bytes: u64,
    /// Their share, 0 to 1, of the uses that are to be expected of all blocks that were held.
    pub left_share: f64,
}

impl Display for Evacuated {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let Evacuated { elsewhere_blocks, copied_blocks, copied_bytes, left_blocks, left_bytes, left_share } =
            self;
        write!(
            f,
            "{copied_blocks} blocks ({copied_bytes} bytes) went to other nodes, {elsewhere_blocks} were there already, \
             {left_blocks} ({left_bytes} bytes, {:.1} % of the value) are left behind",
            100.0 * left_share
        )
    }
}

/// Gives away what this node holds.
#[derive(Debug)]
pub(crate) struct Evacuator {
    node: NodeId,
    routers: Vec<String>,
    identity: tls::Identity,
    store: StoreHandle,
    life: watch::Receiver<Option<Life>>,
    drain: Duration,
    bytes_max: u64,
    done: Mutex<Option<Evacuated>>,
}

impl Evacuator {
    pub(crate) fn new(
        config: &NodeConfig,
        identity: tls::Identity,
        store: StoreHandle,
        life: watch::Receiver<Option<Life>>,
    ) -> Evacuator {
        Evacuator {
            node: NodeId(config.id),
            routers: config.routers.clone(),
            identity,
            store,
            life,
            drain: Duration::from_millis(config.drain_ms),
            bytes_max: config.drain_bytes,
            done: Mutex::default(),
        }
    }

    /// Whether there is anybody to offer something to.
    pub(crate) fn has_routers(&self) -> bool {
        !self.routers.is_empty()
    }

    /// From here on routers choose this node for nothing new, as long as what is returned is kept.
    pub(crate) async fn say(&self) -> Option<AbortOnDropHandle<()>> {
        let hello = self.request(None, Duration::ZERO)?;
        let routers = self.clients();
        say_once(&routers, &hello).await;
        let saying = tokio::spawn(async move {
            let mut tick = interval(SAY_EVERY);
            tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                tick.tick().await;
                say_once(&routers, &hello).await;
            }
        });
        Some(AbortOnDropHandle::new(saying))
    }

    /// Gives away what it can within this time and what is configured. Said again, it answers what came of it.
    pub(crate) async fn give_away(&self, within: Duration) -> Evacuated {
        let mut done = self.done.lock().await;
        if let Some(done) = *done {
            return done;
        }
        let until = Instant::now() + within.min(self.drain);
        // Without an epoch or time nothing can be given, and it may be asked again.
        let can_give = self.life.borrow().is_some() && Instant::now() < until;
        let given = self.rounds(until, can_give).await;
        tracing::info!(%given, "what this node held alone was given to others");
        if can_give {
            *done = Some(given);
        }
        given
    }

    async fn rounds(&self, until: Instant, can_give: bool) -> Evacuated {
        let mut given = Evacuated::default();
        // What is left is said in any case.
        let (held, beyond) = self.held(until.max(Instant::now() + LISTED_WITHIN)).await;
        let all = beyond.worth + held.iter().map(|holding| holding.worth).sum::<f64>();
        let sorted = tokio::task::spawn_blocking(move || runs_by_worth(&held, RUN)).await;
        let mut waiting = sorted.unwrap_or_default();
        let routers: Arc<[RouterClient<Channel>]> = self.clients().into();
        for _ in 0..if can_give { ROUNDS_MAX } else { 0 } {
            let before = given.copied_blocks;
            waiting = self.round(&routers, waiting, until, &mut given).await;
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

    /// Offers each run once; what is left of them comes back.
    async fn round(
        &self,
        routers: &Arc<[RouterClient<Channel>]>,
        runs: Vec<LeavingRun>,
        until: Instant,
        given: &mut Evacuated,
    ) -> Vec<LeavingRun> {
        let (mut left, mut calls, mut under_way) = (Vec::new(), JoinSet::new(), 0);
        let mut runs = runs.into_iter().enumerate().peekable();
        loop {
            let room = self.bytes_max.saturating_sub(given.copied_bytes + under_way);
            let fits = |(_, run): &(usize, LeavingRun)| run.bytes <= room && Instant::now() < until;
            if calls.len() < CALLS_MAX
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
            left.extend(rest(&run, &reply));
        }
        // Without time or room for the next one: what is worth less does not go before it.
        left.extend(runs.map(|(_, run)| run));
        left
    }

    /// The most valuable of what is held, and what there is beyond.
    async fn held(&self, until: Instant) -> (Vec<Holding>, Beyond) {
        let (mut held, mut from, mut beyond) = (Vec::new(), Some(0), Beyond::default());
        while let Some(place) = from.filter(|_| Instant::now() < until) {
            let Ok(step) = self.store.ask(|reply| Ask::Holdings { from: place, reply }).await else { break };
            held.extend(step.blocks);
            from = step.next;
            if held.len() >= 2 * HELD_MAX - kv_core::tier::HOLDINGS_MAX {
                keep_best(&mut held, &mut beyond);
            }
        }
        keep_best(&mut held, &mut beyond);
        (held, beyond)
    }

    fn request(&self, run: Option<&LeavingRun>, within: Duration) -> Option<pb::EvacuateRequest> {
        let life = (*self.life.borrow())?;
        Some(pb::EvacuateRequest {
            node: self.node.0,
            epoch: life.epoch.0,
            run: run.map(|run| convert::run_to_pb(&run.run)),
            root: run.map(|run| run.root.0.to_vec()).unwrap_or_default(),
            within_ms: u64::try_from(within.as_millis()).unwrap_or(u64::MAX),
        })
    }

    /// Those whose addresses are some.
    fn clients(&self) -> Vec<RouterClient<Channel>> {
        self.routers.iter().filter_map(|address| connect_lazily(address, &self.identity).ok()).collect()
    }
}

/// Tells every router, and waits for their answers as long as for one.
async fn say_once(routers: &[RouterClient<Channel>], hello: &pb::EvacuateRequest) {
    let mut calls = JoinSet::new();
    for router in routers {
        let (mut router, hello) = (router.clone(), hello.clone());
        calls.spawn(async move {
            // One that does not hear it chooses this node until it has left.
            let _ = timeout(SAY_EVERY, router.evacuate(hello)).await;
        });
    }
    while calls.join_next().await.is_some() {}
}

/// Asks one router after the other, each run another one first.
async fn ask(
    routers: Arc<[RouterClient<Channel>]>,
    number: usize,
    request: Option<pb::EvacuateRequest>,
    until: Instant,
    run: LeavingRun,
) -> (LeavingRun, pb::EvacuateReply) {
    let Some(request) = request else { return (run, pb::EvacuateReply::default()) };
    for turn in 0..routers.len() {
        let mut router = routers[(number + turn) % routers.len()].clone();
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        match timeout(left + ANSWER_MAX, router.evacuate(request.clone())).await {
            Ok(Ok(reply)) => return (run, reply.into_inner()),
            Ok(Err(status)) => tracing::debug!(%status, "a router gives a run to nobody"),
            Err(_) => tracing::debug!("a router does not answer what became of a run"),
        }
    }
    (run, pb::EvacuateReply::default())
}

/// What of a run nobody else has, as far as the answer says: those at its end.
fn rest(run: &LeavingRun, reply: &pb::EvacuateReply) -> Option<LeavingRun> {
    let blocks = run.run.hashes.len();
    let done = (reply.elsewhere_blocks as usize).saturating_add(reply.copied_blocks as usize).min(blocks);
    let share = |of: f64| of * (blocks - done) as f64 / blocks.max(1) as f64;
    (done < blocks).then(|| LeavingRun {
        root: run.root,
        bytes: share(run.bytes as f64) as u64,
        worth: share(run.worth),
        run: run.run.part(done, blocks),
    })
}

/// What is held beyond what is looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Beyond {
    blocks: u64,
    bytes: u64,
    worth: f64,
}

fn keep_best(held: &mut Vec<Holding>, beyond: &mut Beyond) {
    if held.len() > HELD_MAX {
        held.select_nth_unstable_by(HELD_MAX, |left, right| {
            right.worth.total_cmp(&left.worth).then(right.stamp.cmp(&left.stamp))
        });
        for left in held.drain(HELD_MAX..) {
            beyond.blocks += 1;
            beyond.bytes += u64::from(left.traits.bytes);
            beyond.worth += left.worth;
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
            let mut hash = [0; 16];
            hash[..8].copy_from_slice(&(number as u64).to_le_bytes());
            let traits = BlockTraits { bytes: 10, ..BlockTraits::default() };
            let (worth, stamp) = ((number % 10) as f64, number as u64);
            Holding { hash: BlockHash(hash), parent: None, tenant: TenantId(0), traits, worth, stamp }
        };
        (0..blocks).map(holding).collect()
    }

    #[test]
    fn of_more_than_are_looked_at_the_most_valuable_are() {
        let mut all = held(2 * HELD_MAX);
        let mut beyond = Beyond::default();
        let worth = |all: &[Holding]| all.iter().map(|one| one.worth).sum::<f64>();
        let before = worth(&all);
        keep_best(&mut all, &mut beyond);
        assert_eq!(all.len(), HELD_MAX);
        assert_eq!((beyond.blocks, beyond.bytes), (HELD_MAX as u64, 10 * HELD_MAX as u64));
        assert!((worth(&all) + beyond.worth - before).abs() < 1e-3, "nothing is forgotten");
        assert!(all.iter().all(|one| one.worth >= 4.0));
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
                Holding { parent, traits, worth: 1.0, stamp: 0, ..*one }
            })
            .collect();
        let run = runs_by_worth(&chain, RUN).remove(0);
        let reply = |elsewhere_blocks, copied_blocks| pb::EvacuateReply {
            elsewhere_blocks,
            copied_blocks,
            ..pb::EvacuateReply::default()
        };
        let left = rest(&run, &reply(1, 2)).unwrap();
        assert_eq!((left.run.hashes.len(), left.run.first_offset_blocks, left.bytes), (1, 3, 10));
        assert!((left.worth - 1.0).abs() < 1e-9);
        assert_eq!(rest(&run, &reply(0, 4)), None);
        assert_eq!(rest(&run, &reply(u32::MAX, 9)), None, "whatever is claimed");
        assert_eq!(rest(&run, &pb::EvacuateReply::default()), Some(run));
    }
}
