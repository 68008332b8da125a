//! The load: nodes that announce and drop continuously, some with empty restarts, and owners that
//! race for pins.
//!
//! Not here: queries (`deciders.rs`). Everything acknowledged goes to the oracle (`crate::oracle`).

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

use super::ExperimentState;
use crate::cluster::{CALL_TIMEOUT, RouterClients, SuiteError};
use crate::fake_node::{FakeNode, NodeCommand};
use crate::oracle::{Oracle, PinFact};
use crate::pins::{self, call_any_router};
use crate::workload::{CHAIN_BLOCKS, chain, shard_of, shard_of_node};

/// Chains that are held from before the first fault until the end.
pub const STEADY_CHAINS: u32 = 4;

/// All chains; those above the steady ones change.
pub const CHAINS: u32 = 16;

/// Nodes, half of them at each shard.
pub const NODES: u32 = 6;

/// Nodes that hold the steady chains and never restart.
pub const STEADY_NODES: u32 = 2;

/// Commands between two empty restarts of a node.
const COMMANDS_PER_RESTART: u32 = 40;

/// Blocks of a pin.
const PIN_BLOCKS: usize = 4;

/// Time limit for a cluster with a majority.
const HANG: Duration = Duration::from_secs(60);

/// Interval between pins: enough of them, without becoming a load.
const PIN_EVERY: Duration = Duration::from_millis(20);

/// The running load.
pub struct IndexLoad {
    stop: CancellationToken,
    commands: Vec<mpsc::Sender<NodeCommand>>,
    nodes: Vec<JoinHandle<()>>,
    owners: JoinHandle<()>,
}

impl IndexLoad {
    pub(crate) async fn start(
        contacts: &RouterClients,
        shared: &Arc<ExperimentState>,
        seed: u64,
    ) -> Result<IndexLoad, SuiteError> {
        let start = |node| FakeNode::start(node, contacts.clone(), Arc::clone(&shared.oracle));
        let orders: Vec<_> = (1..=NODES).map(start).collect();
        let steady: Vec<_> = (0..STEADY_CHAINS).map(|chain| (chain, CHAIN_BLOCKS)).collect();
        for node in &orders[..STEADY_NODES as usize] {
            send_command(node, NodeCommand::Hold(steady.clone())).await?;
        }
        settle(&orders).await?;
        wait_until_applied_everywhere(contacts, &shared.oracle).await?;
        let stop = CancellationToken::new();
        let node = |(number, orders): (u32, &mpsc::Sender<NodeCommand>)| {
            let random = ChaCha8Rng::seed_from_u64(seed ^ u64::from(number) << 32);
            tokio::spawn(run_node_load(number, orders.clone(), random, Arc::clone(shared), stop.clone()))
        };
        let nodes = (1..).zip(&orders).map(node).collect();
        let random = ChaCha8Rng::seed_from_u64(seed ^ u64::MAX);
        let owners = tokio::spawn(race_for_pins(contacts.clone(), random, Arc::clone(shared), stop.clone()));
        Ok(IndexLoad { stop, commands: orders, nodes, owners })
    }

    /// Ends when everything sent is acknowledged, and counts pins.
    pub(crate) async fn stop(
        self,
        contacts: &RouterClients,
        shared: &ExperimentState,
    ) -> Result<(), SuiteError> {
        self.stop.cancel();
        for node in self.nodes {
            node.await?;
        }
        self.owners.await?;
        settle(&self.commands).await?;
        count_pins(contacts, shared).await
    }
}

async fn send_command(node: &mpsc::Sender<NodeCommand>, order: NodeCommand) -> Result<(), SuiteError> {
    let sent = timeout(HANG, node.send(order)).await;
    sent.map_err(|_| format!("no batch of a node was acknowledged for {HANG:?}"))?
        .map_err(|_| "a node ended".into())
}

async fn settle(nodes: &[mpsc::Sender<NodeCommand>]) -> Result<(), SuiteError> {
    for node in nodes {
        let (answer, settled) = oneshot::channel();
        send_command(node, NodeCommand::Settle(answer)).await?;
        timeout(HANG, settled).await.map_err(|_| format!("a node does not settle in {HANG:?}"))??;
    }
    Ok(())
}

/// Waits until every router has applied the acknowledged state: from here on no router may lose it.
async fn wait_until_applied_everywhere(
    contacts: &RouterClients,
    oracle: &Mutex<Oracle>,
) -> Result<(), SuiteError> {
    let deadline = Instant::now() + HANG;
    for position in 0..contacts.count() {
        for number in 0..STEADY_CHAINS {
            let hashes = convert::hashes_to_bytes(&chain(number));
            let request = pb::LookupRequest { hashes, fresh: true, ..pb::LookupRequest::default() };
            while contacts.client(position).lookup(request.clone()).await.is_err() {
                if Instant::now() > deadline {
                    return Err(format!("router {position} has not caught up after {HANG:?}").into());
                }
                sleep(PIN_EVERY).await;
            }
        }
    }
    assert!(!oracle.lock().certain.is_empty());
    Ok(())
}

/// Load of one node: stores and drops at random; some nodes also restart empty from time to time.
async fn run_node_load(
    node: u32,
    orders: mpsc::Sender<NodeCommand>,
    mut random: ChaCha8Rng,
    shared: Arc<ExperimentState>,
    stop: CancellationToken,
) {
    let own: Vec<u32> =
        (STEADY_CHAINS..CHAINS).filter(|chain| shard_of(*chain) == shard_of_node(node)).collect();
    let restarts = node > NODES - 2;
    for number in 1u32.. {
        let next = if restarts && number.is_multiple_of(COMMANDS_PER_RESTART) {
            shared.row.lock().empty_restarts += 1;
            NodeCommand::RestartEmpty
        } else {
            let chain = own[random.random_range(0..own.len())];
            NodeCommand::Hold(vec![(chain, random.random_range(0..=CHAIN_BLOCKS))])
        };
        if stop.is_cancelled() || orders.send(next).await.is_err() {
            return;
        }
    }
}

/// Two owners race for every pin, with different blocks; the winner ends three of four.
async fn race_for_pins(
    contacts: RouterClients,
    mut random: ChaCha8Rng,
    shared: Arc<ExperimentState>,
    stop: CancellationToken,
) {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    while !stop.is_cancelled() {
        let pin = u64::from(NEXT.fetch_add(1, Ordering::Relaxed));
        let facts = [0, 1]
            .map(|who| PinFact { owner: format!("owner-{who}"), blocks: chain(who)[..PIN_BLOCKS].to_vec() });
        let first = random.random_range(0..contacts.count());
        let won = tokio::join!(
            try_pin(&contacts, first, pin, &facts[0]),
            try_pin(&contacts, first + 1, pin, &facts[1])
        );
        shared.row.lock().double_owners += u64::from(won.0 && won.1);
        let winner = if won.0 { &facts[0] } else { &facts[1] };
        shared.oracle.lock().pins.insert(pin, winner.clone());
        if random.random_range(0..4) > 0 {
            let unpin = pb::UnpinRequest { pin, owner: winner.owner.clone() };
            let ended = call_any_router(&contacts, |mut client| {
                let unpin = unpin.clone();
                async move { client.unpin(unpin).await.map(drop) }
            });
            match ended.await {
                Ok(()) => drop(shared.oracle.lock().pins.remove(&pin)),
                // The pin belongs to an owner that was not granted it.
                Err(_) => shared.row.lock().double_owners += 1,
            }
        }
        sleep(PIN_EVERY).await;
    }
}

/// Whether this owner was granted the pin; retries until a router accepts or refuses.
async fn try_pin(contacts: &RouterClients, first: usize, pin: u64, fact: &PinFact) -> bool {
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

/// Compares the pins sent to a joining node with the acknowledged ones. A leader distributes a pin
/// shortly after its commit, so the comparison retries for a limited time.
async fn count_pins(contacts: &RouterClients, shared: &ExperimentState) -> Result<(), SuiteError> {
    let deadline = Instant::now() + CALL_TIMEOUT;
    loop {
        let told = pins::announced_pins(contacts, &shared.oracle).await?;
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
