//! The load: nodes that announce and drop without a pause, some of which restart with nothing, and owners that
//! race for pins.
//!
//! Not here: questions (`ask.rs`). Everything acknowledged goes to the oracle (`crate::oracle`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use kvfleet_proto::{convert, pb};
use parking_lot::Mutex;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::Code;

use super::Shared;
use crate::cluster::{CALL_TIMEOUT, Contacts, Trouble};
use crate::oracle::{Oracle, PinFact};
use crate::pins::{self, until_one_does};
use crate::speaker::{Order, Speaker};
use crate::workload::{CHAIN_BLOCKS, chain, shard_of, shard_of_node};

/// Chains that are held from before the first strike until the end.
pub const STEADY_CHAINS: u32 = 4;

/// All chains; those above the steady ones come and go.
pub const CHAINS: u32 = 16;

/// Nodes, half of them at each shard.
pub const NODES: u32 = 6;

/// Nodes that hold the steady chains and never restart.
pub const STEADY_NODES: u32 = 2;

/// Orders between two restarts of a node that restarts with nothing.
const ORDERS_PER_LIFE: u32 = 40;

/// Blocks of a pin.
const PIN_BLOCKS: usize = 4;

/// A cluster with a majority does everything in this time.
const HANG: Duration = Duration::from_secs(60);

/// Between two pins: enough of them, and not a load of its own.
const PIN_EVERY: Duration = Duration::from_millis(20);

/// The running load.
pub struct Load {
    stop: CancellationToken,
    orders: Vec<mpsc::Sender<Order>>,
    nodes: Vec<JoinHandle<()>>,
    owners: JoinHandle<()>,
}

impl Load {
    pub(crate) async fn start(contacts: &Contacts, shared: &Arc<Shared>, seed: u64) -> Result<Load, Trouble> {
        let start = |node| Speaker::start(node, contacts.clone(), Arc::clone(&shared.oracle));
        let orders: Vec<_> = (1..=NODES).map(start).collect();
        let steady: Vec<_> = (0..STEADY_CHAINS).map(|chain| (chain, CHAIN_BLOCKS)).collect();
        for node in &orders[..STEADY_NODES as usize] {
            order(node, Order::Hold(steady.clone())).await?;
        }
        settle(&orders).await?;
        until_seen_by_all(contacts, &shared.oracle).await?;
        let stop = CancellationToken::new();
        let node = |(number, orders): (u32, &mpsc::Sender<Order>)| {
            let random = ChaCha8Rng::seed_from_u64(seed ^ u64::from(number) << 32);
            tokio::spawn(come_and_go(number, orders.clone(), random, Arc::clone(shared), stop.clone()))
        };
        let nodes = (1..).zip(&orders).map(node).collect();
        let random = ChaCha8Rng::seed_from_u64(seed ^ u64::MAX);
        let owners = tokio::spawn(race(contacts.clone(), random, Arc::clone(shared), stop.clone()));
        Ok(Load { stop, orders, nodes, owners })
    }

    /// Ends when everything that was sent is acknowledged, and counts pins.
    pub(crate) async fn stop(self, contacts: &Contacts, shared: &Shared) -> Result<(), Trouble> {
        self.stop.cancel();
        for node in self.nodes {
            node.await?;
        }
        self.owners.await?;
        settle(&self.orders).await?;
        count_pins(contacts, shared).await
    }
}

async fn order(node: &mpsc::Sender<Order>, order: Order) -> Result<(), Trouble> {
    let sent = timeout(HANG, node.send(order)).await;
    sent.map_err(|_| format!("a node got nothing acknowledged for {HANG:?}"))?
        .map_err(|_| "a node ended".into())
}

async fn settle(nodes: &[mpsc::Sender<Order>]) -> Result<(), Trouble> {
    for node in nodes {
        let (answer, settled) = oneshot::channel();
        order(node, Order::Settle(answer)).await?;
        timeout(HANG, settled).await.map_err(|_| format!("a node does not settle in {HANG:?}"))??;
    }
    Ok(())
}

/// Waits until every router has applied what was acknowledged so far: from here on none may forget it.
async fn until_seen_by_all(contacts: &Contacts, oracle: &Mutex<Oracle>) -> Result<(), Trouble> {
    let deadline = Instant::now() + HANG;
    for position in 0..contacts.count() {
        for number in 0..STEADY_CHAINS {
            let hashes = convert::hashes_to_bytes(&chain(number));
            let request = pb::LookupRequest { hashes, fresh: true, ..pb::LookupRequest::default() };
            while contacts.client(position).lookup(request.clone()).await.is_err() {
                if Instant::now() > deadline {
                    return Err(format!("router {position} is not level after {HANG:?}").into());
                }
                sleep(PIN_EVERY).await;
            }
        }
    }
    assert!(!oracle.lock().sure.is_empty());
    Ok(())
}

/// One node's life: stores and drops at random, and now and then restarts with nothing if it is one of those.
async fn come_and_go(
    node: u32,
    orders: mpsc::Sender<Order>,
    mut random: ChaCha8Rng,
    shared: Arc<Shared>,
    stop: CancellationToken,
) {
    let own: Vec<u32> =
        (STEADY_CHAINS..CHAINS).filter(|chain| shard_of(*chain) == shard_of_node(node)).collect();
    let restarts = node > NODES - 2;
    for number in 1u32.. {
        let next = if restarts && number.is_multiple_of(ORDERS_PER_LIFE) {
            shared.row.lock().empty_restarts += 1;
            Order::RestartEmpty
        } else {
            let chain = own[random.random_range(0..own.len())];
            Order::Hold(vec![(chain, random.random_range(0..=CHAIN_BLOCKS))])
        };
        if stop.is_cancelled() || orders.send(next).await.is_err() {
            return;
        }
    }
}

/// Two owners race for every pin, with blocks of their own; the winner ends three of four.
async fn race(contacts: Contacts, mut random: ChaCha8Rng, shared: Arc<Shared>, stop: CancellationToken) {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    while !stop.is_cancelled() {
        let pin = u64::from(NEXT.fetch_add(1, Ordering::Relaxed));
        let facts = [0, 1]
            .map(|who| PinFact { owner: format!("owner-{who}"), blocks: chain(who)[..PIN_BLOCKS].to_vec() });
        let first = random.random_range(0..contacts.count());
        let won = tokio::join!(
            contend(&contacts, first, pin, &facts[0]),
            contend(&contacts, first + 1, pin, &facts[1])
        );
        shared.row.lock().double_owners += u64::from(won.0 && won.1);
        let winner = if won.0 { &facts[0] } else { &facts[1] };
        shared.oracle.lock().pins.insert(pin, winner.clone());
        if random.random_range(0..4) > 0 {
            let unpin = pb::UnpinRequest { pin, owner: winner.owner.clone() };
            let ended = until_one_does(&contacts, |mut client| {
                let unpin = unpin.clone();
                async move { client.unpin(unpin).await.map(drop) }
            });
            match ended.await {
                Ok(()) => drop(shared.oracle.lock().pins.remove(&pin)),
                // It is somebody else's, who was not given it.
                Err(_) => shared.row.lock().double_owners += 1,
            }
        }
        sleep(PIN_EVERY).await;
    }
}

/// Whether this owner was given the pin; asks until someone says yes or no.
async fn contend(contacts: &Contacts, first: usize, pin: u64, fact: &PinFact) -> bool {
    let request = pb::PinRequest {
        pin,
        owner: fact.owner.clone(),
        blocks: convert::hashes_to_bytes(&fact.blocks),
        ..pb::PinRequest::default()
    };
    for position in first.. {
        match timeout(CALL_TIMEOUT, contacts.client(position).pin(request.clone())).await {
            Ok(Ok(_)) => return true,
            Ok(Err(status)) if matches!(status.code(), Code::AlreadyExists | Code::PermissionDenied) => break,
            _ => sleep(PIN_EVERY).await,
        }
    }
    false
}

/// Compares the pins that a joining node is told with those acknowledged. A leader tells of a pin a moment after
/// it is committed, so the comparison waits until they are alike, and not for ever.
async fn count_pins(contacts: &Contacts, shared: &Shared) -> Result<(), Trouble> {
    let deadline = Instant::now() + CALL_TIMEOUT;
    loop {
        let told = pins::told(contacts, &shared.oracle).await?;
        let facts = shared.oracle.lock().pins.clone();
        let lost = facts.iter().filter(|(pin, fact)| told.get(pin) != Some(&fact.blocks)).count();
        let undead = told.keys().filter(|pin| !facts.contains_key(pin)).count();
        if lost + undead == 0 || Instant::now() > deadline {
            let mut row = shared.row.lock();
            (row.pins, row.pins_lost) = (facts.len() as u64, (lost + undead) as u64);
            return Ok(());
        }
        sleep(PIN_EVERY).await;
    }
}
