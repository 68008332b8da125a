//! A node that drains: it is chosen for nothing new, and what it alone holds goes to whoever takes it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kv_core::place::copies::CopyEnd;
use kvfleet_errors_doc::says;
use kvfleet_proto::pb;
use kvfleet_proto::pb::node_control_server::{NodeControl, NodeControlServer};
use kvfleet_proto::tls::TlsFiles;
use kvfleet_proto::tls::listen::incoming;
use parking_lot::Mutex;
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status};

use crate::harness::{Cluster, Node, join_request, prefix, until};
use crate::residency::load;

/// A stand-in node that takes so many blocks of each copy, notes what it was asked, and says how it ended.
#[derive(Clone)]
pub struct Taker {
    takes: u32,
    end: CopyEnd,
    /// What a block counts as.
    pub block_bytes: u64,
    asked: Arc<Mutex<Vec<pb::CopyBlocksRequest>>>,
    /// Announces what is copied; without it, it only says that it took it.
    node: Arc<tokio::sync::Mutex<Option<Node>>>,
}

#[tonic::async_trait]
impl NodeControl for Taker {
    async fn node_status(
        &self,
        _: Request<pb::NodeStatusRequest>,
    ) -> Result<Response<pb::NodeStatusReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn settle(&self, _: Request<pb::SettleRequest>) -> Result<Response<pb::SettleReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn set_window(
        &self,
        _: Request<pb::SetWindowRequest>,
    ) -> Result<Response<pb::SetWindowReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn audit(&self, _: Request<pb::AuditRequest>) -> Result<Response<pb::AuditReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn copy_blocks(
        &self,
        request: Request<pb::CopyBlocksRequest>,
    ) -> Result<Response<pb::CopyBlocksReply>, Status> {
        let request = request.into_inner();
        let hashes = request.run.as_ref().unwrap().blocks.clone();
        let blocks = u32::try_from(hashes.len() / 16).unwrap();
        self.asked.lock().push(request);
        let stored_blocks = blocks.min(self.takes);
        let taken: Vec<[u8; 16]> =
            hashes.chunks(16).take(stored_blocks as usize).map(|hash| hash.try_into().unwrap()).collect();
        let visible_at = match &mut *self.node.lock().await {
            Some(node) if !taken.is_empty() => Some(node.store(&taken).await),
            _ => None,
        };
        let end = if stored_blocks < blocks { self.end } else { CopyEnd::Copied };
        Ok(Response::new(pb::CopyBlocksReply {
            end: end as u32,
            stored_blocks,
            stored_bytes: self.block_bytes * u64::from(stored_blocks),
            visible_at,
            ..pb::CopyBlocksReply::default()
        }))
    }
}

impl Taker {
    pub fn new(takes: u32, end: CopyEnd) -> Taker {
        Taker { takes, end, block_bytes: 100, asked: Arc::default(), node: Arc::default() }
    }

    /// From now on it announces what it takes.
    pub async fn announces(&self, node: Node) {
        *self.node.lock().await = Some(node);
    }

    /// The first block of each copy.
    pub fn heads(&self) -> Vec<Vec<u8>> {
        self.asked.lock().iter().map(|request| request.run.as_ref().unwrap().blocks[..16].to_vec()).collect()
    }

    /// Of each copy: the offset of the first block and how many there are.
    pub fn asked(&self) -> Vec<(u32, usize)> {
        let of = |request: &pb::CopyBlocksRequest| {
            let run = request.run.as_ref().unwrap();
            (run.first_offset_blocks, run.blocks.len() / 16)
        };
        self.asked.lock().iter().map(of).collect()
    }
}

/// Joins a stand-in node that serves its control calls.
pub async fn join(cluster: &Cluster, node: u32, taker: &Taker) -> Node {
    let tls = &cluster.configs[0].tls;
    let files = TlsFiles { ca: tls.ca.clone(), cert: tls.cert.clone(), key: tls.key.clone() };
    let socket = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let control_address = socket.local_addr().unwrap().to_string();
    let served = Server::builder().add_service(NodeControlServer::new(taker.clone()));
    tokio::spawn(served.serve_with_incoming(incoming(socket, &files.load().unwrap())));
    let request = pb::JoinRequest { control_address, ..join_request(node) };
    let joined = cluster.on_leader(|mut client| {
        let request = request.clone();
        async move { client.join(request).await }
    });
    let epoch = joined.await.epoch;
    cluster.reconnect(node, epoch, 1).await
}

fn run(blocks: &[[u8; 16]]) -> pb::BlockRun {
    pb::BlockRun { blocks: blocks.concat(), frame_bytes: 100, ..pb::BlockRun::default() }
}

pub async fn evacuate(
    cluster: &Cluster,
    node: &Node,
    run: Option<pb::BlockRun>,
) -> Result<pb::EvacuateReply, Status> {
    let root = run.as_ref().map(|run| run.blocks[..16].to_vec()).unwrap_or_default();
    let request = pb::EvacuateRequest { node: node.node, epoch: node.epoch, run, root, within_ms: 20_000 };
    cluster.client(1).evacuate(request).await.map(Response::into_inner)
}

/// Where an instance whose own node is number 1 is told to save to.
async fn save_target(cluster: &Cluster) -> Option<u32> {
    // It reports as often as it is asked for: one that is silent is not chosen.
    static REPORTS: AtomicU64 = AtomicU64::new(1);
    let sequence = REPORTS.fetch_add(1, Ordering::Relaxed);
    let own = pb::ReportRequest { node: 1, has_node: true, ..load(1, sequence) };
    cluster.client(1).report(own).await.unwrap();
    let asked = pb::RouteRequest {
        request: 1,
        hashes: prefix(77, 4).concat(),
        block_tokens: 16,
        input_tokens: 64,
        ..Default::default()
    };
    let reply = cluster.client(1).route(asked).await.unwrap().into_inner();
    let Some(pb::route_reply::Answer::Decision(decision)) = reply.answer else { panic!("{reply:?}") };
    decision.save_to.map(|holder| holder.node)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_drains_is_chosen_for_nothing_new_from_its_word_on() {
    let cluster = Cluster::start(1, |_| {}).await;
    let takes_all = Taker::new(u32::MAX, CopyEnd::Full);
    let leaver = join(&cluster, 1, &takes_all).await;
    let _other = join(&cluster, 2, &takes_all).await;
    until("its own node is where it saves to", || async {
        (save_target(&cluster).await == Some(1)).then_some(())
    })
    .await;
    assert_eq!(evacuate(&cluster, &leaver, None).await.unwrap(), pb::EvacuateReply::default());
    assert_eq!(save_target(&cluster).await, Some(2), "with the very next decision");
    let mut status = cluster.client(1);
    let live = status.status(pb::StatusRequest {}).await.unwrap().into_inner();
    assert!(live.nodes.iter().any(|node| node.node == 1 && node.live), "it goes on serving");
    // It says so once and not again: after five seconds it is taken for one that stays.
    until("it is chosen again", || async { (save_target(&cluster).await == Some(1)).then_some(()) }).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_nobody_else_holds_goes_on_behind_its_prefix_and_then_to_whoever_has_room() {
    let cluster = Cluster::start(1, |_| {}).await;
    let (none, two, all) =
        (Taker::new(0, CopyEnd::Full), Taker::new(2, CopyEnd::Full), Taker::new(u32::MAX, CopyEnd::Full));
    let mut leaver = join(&cluster, 1, &none).await;
    let mut holder = join(&cluster, 2, &two).await;
    let mut other = join(&cluster, 3, &all).await;
    let held = prefix(5, 8);
    let seen = [leaver.store(&held).await, holder.store(&held[..3]).await, other.store(&prefix(6, 1)).await];
    cluster.lookup(1, &held, seen.to_vec()).await;
    two.announces(holder).await;
    all.announces(other).await;
    let reply = evacuate(&cluster, &leaver, Some(run(&held))).await.unwrap();
    assert_eq!((reply.elsewhere_blocks, reply.copied_blocks, reply.copied_bytes), (3, 5, 500));
    assert_eq!(reply.end, CopyEnd::Copied as u32);
    assert_eq!(two.asked(), [(3, 5)], "whoever has what comes before it is asked first");
    assert_eq!(all.asked(), [(5, 3)], "and the next takes what it did not");
    assert_eq!(none.asked(), [], "nobody copies from itself");
    let order = two.asked.lock()[0].clone();
    assert_eq!((order.source, order.source_epoch), (1, leaver.epoch));
    assert_eq!(order.source_address, join_request(1).data_address);
    assert_eq!(order.identity, join_request(1).identity);
    assert_eq!(order.run.unwrap().parent, held[2]);
    // Where the source is at fault, another target has no better luck.
    let (gone, fresh) = (prefix(9, 4), Taker::new(1, CopyEnd::NotHeld));
    leaver.store(&gone).await;
    let mut late = join(&cluster, 4, &fresh).await;
    let seen = late.store(&gone[..1]).await;
    cluster.lookup(1, &gone, vec![seen]).await;
    fresh.announces(late).await;
    let reply = evacuate(&cluster, &leaver, Some(run(&gone))).await.unwrap();
    assert_eq!((reply.elsewhere_blocks, reply.copied_blocks), (1, 1));
    assert_eq!((reply.end, all.asked().len()), (CopyEnd::NotHeld as u32, 1));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_node_says_that_it_took_counts_when_it_is_in_the_index() {
    let cluster = Cluster::start(1, |_| {}).await;
    // As one does where another only writes these blocks, or that was left out while it copied.
    let (none, says_so) = (Taker::new(0, CopyEnd::Full), Taker::new(u32::MAX, CopyEnd::Copied));
    let mut leaver = join(&cluster, 1, &none).await;
    let _other = join(&cluster, 2, &says_so).await;
    let held = prefix(5, 4);
    let seen = leaver.store(&held).await;
    cluster.lookup(1, &held, vec![seen]).await;
    let reply = evacuate(&cluster, &leaver, Some(run(&held))).await.unwrap();
    assert_eq!((reply.elsewhere_blocks, reply.copied_blocks), (0, 0), "{reply:?}");
    assert_eq!(says_so.asked(), [(0, 4)]);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_no_live_node_gives_nothing_away() {
    let cluster = Cluster::start(1, |_| {}).await;
    let leaver = join(&cluster, 1, &Taker::new(1, CopyEnd::Full)).await;
    let call = |change: fn(&mut pb::EvacuateRequest)| {
        let mut request = pb::EvacuateRequest {
            node: 1,
            epoch: leaver.epoch,
            run: Some(run(&prefix(1, 2))),
            root: prefix(1, 1).concat(),
            within_ms: 1_000,
        };
        change(&mut request);
        let mut client = cluster.client(1);
        async move { client.evacuate(request).await.unwrap_err() }
    };
    let stale = call(|request| request.epoch += 7).await;
    assert_eq!(stale.code(), Code::FailedPrecondition);
    says("a node that drains under an epoch that is none", &stale.message(), &["8"]);
    assert_eq!(call(|request| request.node = 9).await.code(), Code::FailedPrecondition);
    assert_eq!(call(|request| request.root = vec![1]).await.code(), Code::InvalidArgument);
    assert_eq!(
        call(|request| request.run.as_mut().unwrap().blocks.truncate(3)).await.code(),
        Code::InvalidArgument
    );
    let many = call(|request| request.run.as_mut().unwrap().blocks = vec![0; 16 * 4_097]).await;
    assert_eq!(many.code(), Code::InvalidArgument);
    cluster.shutdown().await;
}
