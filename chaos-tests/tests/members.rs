//! Routers are added, replaced and removed while nodes announce, and no acknowledged announcement
//! is lost.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;

use chaos_tests::cluster::{Cluster, ROUTERS_COUNT, RouterClients, SHARDS_COUNT};
use chaos_tests::fake_node::{FakeNode, NodeCommand};
use chaos_tests::oracle::Oracle;
use chaos_tests::waiting::{HANG, until, until_equal};
use chaos_tests::workload::{CHAIN_BLOCKS, CHAINS_COUNT, NODES_COUNT, chain};
use kvfleet_client::{MembersError, MembershipClient, MembershipStep};
use kvfleet_errors_doc::says;
use kvfleet_net::tls::Role;
use kvfleet_proto::{convert, pb};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const PROGRAM: &str = env!("CARGO_BIN_EXE_chaos-router");

/// Nodes that grow and shrink their holdings continuously.
struct AnnounceLoad {
    stop: CancellationToken,
    nodes: Vec<JoinHandle<mpsc::Sender<NodeCommand>>>,
}

impl AnnounceLoad {
    fn start(contacts: &RouterClients, oracle: &Arc<Mutex<Oracle>>) -> AnnounceLoad {
        let stop = CancellationToken::new();
        let node = |node| {
            let orders = FakeNode::start(node, contacts.clone(), Arc::clone(oracle));
            let stop = stop.clone();
            tokio::spawn(async move {
                for round in 0.. {
                    let wanted =
                        (0..CHAINS_COUNT).map(|number| (number, (round + number * 5) % CHAIN_BLOCKS + 1));
                    if orders.send(NodeCommand::Hold(wanted.collect())).await.is_err() || stop.is_cancelled()
                    {
                        break;
                    }
                }
                orders
            })
        };
        AnnounceLoad { nodes: (1..=NODES_COUNT).map(node).collect(), stop }
    }

    /// Ends when everything sent is acknowledged. The nodes stay alive while the returned senders
    /// live.
    async fn settle(self) -> Vec<mpsc::Sender<NodeCommand>> {
        self.stop.cancel();
        let mut nodes = Vec::new();
        for node in self.nodes {
            let orders = node.await.expect("a node runs");
            let (answer, settled) = oneshot::channel();
            assert!(orders.send(NodeCommand::Settle(answer)).await.is_ok());
            assert!(tokio::time::timeout(HANG, settled).await.expect("in time").expect("an answer"));
            nodes.push(orders);
        }
        nodes
    }
}

fn acknowledged(oracle: &Mutex<Oracle>) -> u64 {
    oracle.lock().nodes.values().map(|fact| fact.seq).sum()
}

async fn progress(oracle: &Mutex<Oracle>) {
    let before = acknowledged(oracle);
    until("continuing announcements", || async { (acknowledged(oracle) > before + 20).then_some(()) }).await;
}

/// Voters and learners, equal in all groups.
async fn roles(members: &mut MembershipClient) -> (Vec<u64>, Vec<u64>) {
    let groups = members.list().await.expect("a router answers");
    assert_eq!(groups.len(), usize::from(SHARDS_COUNT) + 1);
    let of = |group: &pb::GroupStatus, learner| {
        let those = group.members.iter().filter(|member| member.learner == learner);
        those.map(|member| member.router).collect::<Vec<_>>()
    };
    let first = (of(&groups[0], false), of(&groups[0], true));
    assert!(groups.iter().all(|group| (of(group, false), of(group, true)) == first), "{groups:?}");
    first
}

/// Waits until the routers at these positions have applied the same entry, and compares their
/// states and their answers for every chain.
async fn check_replicas(contacts: &RouterClients, positions: &[usize], oracle: &Mutex<Oracle>) {
    until_equal(contacts, positions).await;
    let facts = oracle.lock().nodes.clone();
    for position in positions {
        for number in 0..CHAINS_COUNT {
            let request = pb::LookupRequest {
                hashes: convert::hashes_to_bytes(&chain(number)),
                fresh: true,
                ..pb::LookupRequest::default()
            };
            let reply = contacts.client(*position).lookup(request).await.expect("an answer").into_inner();
            for (node, fact) in &facts {
                let held = fact.holdings.get(&number).copied().unwrap_or(0);
                let runs = reply.runs.iter().filter(|run| {
                    run.holders.iter().any(|holder| (holder.node, holder.epoch) == (*node, fact.epoch))
                });
                let said: u32 = runs.map(|run| run.len_blocks).sum();
                assert_eq!(said, held, "chain {number}, node {node}, at position {position}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routers_are_added_replaced_and_removed_under_load() {
    let mut cluster = Cluster::start(Path::new(PROGRAM)).unwrap();
    let oracle = Arc::new(Mutex::new(Oracle::default()));
    let mut members = MembershipClient::new(cluster.addresses(), &cluster.identity(&Role::Admin)).unwrap();
    // It waits to be added, and the nodes know its address.
    let (four, address) = cluster.start_unjoined_router(|_| {}).unwrap();
    let load = AnnounceLoad::start(&cluster.router_clients(), &oracle);
    progress(&oracle).await;

    // A learner follows and answers reads, without a vote.
    members.add(four, &address, true, |_| {}).await.unwrap();
    assert_eq!(roles(&mut members).await, (vec![1, 2, 3], vec![four]));
    let contacts = cluster.router_clients();
    let request = || pb::LookupRequest {
        hashes: convert::hashes_to_bytes(&chain(0)),
        fresh: true,
        ..Default::default()
    };
    until("an answer of the learner", || async {
        contacts.client(ROUTERS_COUNT).lookup(request()).await.ok()
    })
    .await;
    progress(&oracle).await;

    // It becomes a voter; a second call has no effect.
    let mut steps = Vec::new();
    members.add(four, &address, false, |step| steps.push(step)).await.unwrap();
    assert_eq!(roles(&mut members).await, (vec![1, 2, 3, four], vec![]));
    assert!(steps.contains(&MembershipStep::VoterPromoted(u32::from(SHARDS_COUNT))));
    members.add(four, &address, false, |_| {}).await.unwrap();
    progress(&oracle).await;

    // The first router leaves, after its leaderships were transferred.
    members.transfer_all(1, |_| {}).await.unwrap();
    members.remove(1, |_| {}).await.unwrap();
    members.remove(1, |_| {}).await.unwrap();
    assert_eq!(roles(&mut members).await, (vec![2, 3, four], vec![]));
    cluster.kill(0).unwrap();
    progress(&oracle).await;

    // The new router counts: with one other it forms a majority.
    cluster.kill(1).unwrap();
    progress(&oracle).await;
    cluster.start_router(1).unwrap();
    let nodes = load.settle().await;
    check_replicas(&contacts, &[1, 2, 3], &oracle).await;
    drop(nodes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn incompatible_router_is_refused_with_a_remedy() {
    let mut cluster = Cluster::start(Path::new(PROGRAM)).unwrap();
    let mut members = MembershipClient::new(cluster.addresses(), &cluster.identity(&Role::Admin)).unwrap();
    let refused = |answer: Result<(), MembersError>| answer.expect_err("must be refused").to_string();

    let (foreign, address) =
        cluster.start_unjoined_router(|config| config.cluster = "elsewhere".into()).unwrap();
    says("a router of another cluster", &refused(members.add(foreign, &address, false, |_| {}).await), &[]);
    let (other, address) = cluster.start_unjoined_router(|config| config.shards = SHARDS_COUNT + 1).unwrap();
    says("a router with other shards", &refused(members.add(other, &address, false, |_| {}).await), &[]);
    let wrong = members.add(9, &address, false, |_| {}).await;
    says("a router with another number", &refused(wrong), &[&address]);
    let absent = refused(members.add(9, "127.0.0.1:1", false, |_| {}).await);
    let (_, why) = absent.split_once("does not answer: ").unwrap();
    let why = why.split(';').next().unwrap();
    says("a router that does not answer", &absent, &[why]);
    says("a leader that is no voter", &refused(members.transfer(0, 9).await), &[]);
    assert_eq!(roles(&mut members).await, (vec![1, 2, 3], vec![]));

    members.remove(3, |_| {}).await.unwrap();
    members.remove(2, |_| {}).await.unwrap();
    says("the last voter", &refused(members.remove(1, |_| {}).await), &[]);
    let mut nobody =
        MembershipClient::new(&["127.0.0.1:1".to_owned()], &cluster.identity(&Role::Admin)).unwrap();
    says("a cluster that does not answer", &nobody.list().await.unwrap_err(), &[]);
}
