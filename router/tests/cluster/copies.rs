//! A draining node gets no new saves, and the blocks that it alone holds are copied to other nodes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kv_core::id::NodeId;
use kv_core::place::copies::CopyOutcome;
use kvfleet_errors_doc::says;
use kvfleet_net::tls::Role;
use kvfleet_net::tls::listen::incoming;
use kvfleet_proto::pb;
use kvfleet_proto::pb::node_control_server::{NodeControl, NodeControlServer};
use parking_lot::Mutex;
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status};

use crate::residency::load;
use kv_core::id::HASH_BYTES;
use kvfleet_testkit::cluster::{Cluster, FakeNode, HashBytes, join_request, prefix, until};

/// A fake node that accepts a number of blocks per copy, records its requests, and returns a fixed
/// end.
#[derive(Clone)]
pub struct CopyTarget {
    accepts: u32,
    end: CopyOutcome,
    /// Bytes reported per block.
    pub block_bytes: u64,
    asked: Arc<Mutex<Vec<pb::CopyBlocksRequest>>>,
    /// Announces the copied blocks; `None` only confirms them.
    node: Arc<tokio::sync::Mutex<Option<FakeNode>>>,
}

#[tonic::async_trait]
impl NodeControl for CopyTarget {
    async fn node_status(
        &self,
        _: Request<pb::NodeStatusRequest>,
    ) -> Result<Response<pb::NodeStatusReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn flush(&self, _: Request<pb::FlushRequest>) -> Result<Response<pb::FlushReply>, Status> {
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
        let blocks = u32::try_from(hashes.len() / HASH_BYTES).unwrap();
        self.asked.lock().push(request);
        let stored_blocks = blocks.min(self.accepts);
        let taken: Vec<HashBytes> = hashes
            .chunks(HASH_BYTES)
            .take(stored_blocks as usize)
            .map(|hash| hash.try_into().unwrap())
            .collect();
        let visible_at = match &mut *self.node.lock().await {
            Some(node) if !taken.is_empty() => Some(node.store(&taken).await),
            _ => None,
        };
        let end = if stored_blocks < blocks { self.end } else { CopyOutcome::Copied };
        Ok(Response::new(pb::CopyBlocksReply {
            end: end as u32,
            stored_blocks,
            stored_bytes: self.block_bytes * u64::from(stored_blocks),
            visible_at,
            ..pb::CopyBlocksReply::default()
        }))
    }
}

impl CopyTarget {
    pub fn new(accepts: u32, end: CopyOutcome) -> CopyTarget {
        CopyTarget { accepts, end, block_bytes: 100, asked: Arc::default(), node: Arc::default() }
    }

    /// Announces accepted blocks from now on.
    pub async fn announces(&self, node: FakeNode) {
        *self.node.lock().await = Some(node);
    }

    /// The first block of each copy.
    pub fn heads(&self) -> Vec<Vec<u8>> {
        self.asked
            .lock()
            .iter()
            .map(|request| request.run.as_ref().unwrap().blocks[..HASH_BYTES].to_vec())
            .collect()
    }

    /// Offset of the first block and number of blocks, per copy.
    pub fn asked(&self) -> Vec<(u32, usize)> {
        let of = |request: &pb::CopyBlocksRequest| {
            let run = request.run.as_ref().unwrap();
            (run.first_offset_blocks, run.blocks.len() / HASH_BYTES)
        };
        self.asked.lock().iter().map(of).collect()
    }
}

/// Joins a fake node that serves its control calls.
pub async fn join(cluster: &Cluster, node: u32, target: &CopyTarget) -> FakeNode {
    let identity = cluster.certificates().identity(&Role::Node(Some(NodeId(node))));
    let socket = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let control_address = socket.local_addr().unwrap().to_string();
    let served = Server::builder().add_service(NodeControlServer::new(target.clone()));
    tokio::spawn(served.serve_with_incoming(incoming(socket, &identity)));
    let request = pb::JoinRequest { control_address, ..join_request(node) };
    let joined = cluster.on_leader(|mut client| {
        let request = request.clone();
        async move { client.join(request).await }
    });
    let epoch = joined.await.epoch;
    cluster.reconnect(node, epoch, 1).await
}

fn run(blocks: &[HashBytes]) -> pb::BlockRun {
    pb::BlockRun { blocks: blocks.concat(), frame_bytes: 100, ..pb::BlockRun::default() }
}

pub async fn evacuate(
    cluster: &Cluster,
    node: &FakeNode,
    run: Option<pb::BlockRun>,
) -> Result<pb::DrainReply, Status> {
    let root = run.as_ref().map(|run| run.blocks[..HASH_BYTES].to_vec()).unwrap_or_default();
    let request = pb::DrainRequest { node: node.node, epoch: node.epoch, run, root, within_ms: 20_000 };
    cluster.client(1).drain(request).await.map(Response::into_inner)
}

/// Save target of an instance on node 1.
async fn save_target(cluster: &Cluster) -> Option<u32> {
    // It reports with every call, since a silent instance is not chosen.
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
async fn a_draining_node_gets_no_new_saves() {
    let cluster = Cluster::start(1, |_| {}).await;
    let takes_all = CopyTarget::new(u32::MAX, CopyOutcome::Full);
    let evacuation = join(&cluster, 1, &takes_all).await;
    let _other = join(&cluster, 2, &takes_all).await;
    until("it saves to its own node", || async { (save_target(&cluster).await == Some(1)).then_some(()) })
        .await;
    assert_eq!(evacuate(&cluster, &evacuation, None).await.unwrap(), pb::DrainReply::default());
    assert_eq!(save_target(&cluster).await, Some(2), "already with the next decision");
    let mut status = cluster.client(1);
    let live = status.status(pb::StatusRequest {}).await.unwrap().into_inner();
    assert!(live.nodes.iter().any(|node| node.node == 1 && node.live), "it continues to serve");
    // It reports the drain only once: after five seconds it no longer counts as draining.
    until("it is chosen again", || async { (save_target(&cluster).await == Some(1)).then_some(()) }).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sole_copies_go_to_the_parents_holder_then_to_others() {
    let cluster = Cluster::start(1, |_| {}).await;
    let (none, two, all) = (
        CopyTarget::new(0, CopyOutcome::Full),
        CopyTarget::new(2, CopyOutcome::Full),
        CopyTarget::new(u32::MAX, CopyOutcome::Full),
    );
    let mut evacuation = join(&cluster, 1, &none).await;
    let mut holder = join(&cluster, 2, &two).await;
    let mut other = join(&cluster, 3, &all).await;
    let held = prefix(5, 8);
    let seen =
        [evacuation.store(&held).await, holder.store(&held[..3]).await, other.store(&prefix(6, 1)).await];
    cluster.lookup(1, &held, seen.to_vec()).await;
    two.announces(holder).await;
    all.announces(other).await;
    let reply = evacuate(&cluster, &evacuation, Some(run(&held))).await.unwrap();
    assert_eq!((reply.elsewhere_blocks, reply.copied_blocks, reply.copied_bytes), (3, 5, 500));
    assert_eq!(reply.end, CopyOutcome::Copied as u32);
    assert_eq!(two.asked(), [(3, 5)], "the parent's holder is asked first");
    assert_eq!(all.asked(), [(5, 3)], "then another one gets the rest");
    assert_eq!(none.asked(), [], "a node does not copy from itself");
    let order = two.asked.lock()[0].clone();
    assert_eq!((order.source, order.source_epoch), (1, evacuation.epoch));
    assert_eq!(order.source_address, join_request(1).data_address);
    assert_eq!(order.identity, join_request(1).identity);
    assert_eq!(order.run.unwrap().parent, held[2]);
    // If the source fails, another target is not tried.
    let (gone, fresh) = (prefix(9, 4), CopyTarget::new(1, CopyOutcome::NotHeld));
    evacuation.store(&gone).await;
    let mut late = join(&cluster, 4, &fresh).await;
    let seen = late.store(&gone[..1]).await;
    cluster.lookup(1, &gone, vec![seen]).await;
    fresh.announces(late).await;
    let reply = evacuate(&cluster, &evacuation, Some(run(&gone))).await.unwrap();
    assert_eq!((reply.elsewhere_blocks, reply.copied_blocks), (1, 1));
    assert_eq!((reply.end, all.asked().len()), (CopyOutcome::NotHeld as u32, 1));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_counts_once_it_is_in_the_index() {
    let cluster = Cluster::start(1, |_| {}).await;
    // As if another process still writes these blocks, or the node was fenced during the copy.
    let (none, says_so) =
        (CopyTarget::new(0, CopyOutcome::Full), CopyTarget::new(u32::MAX, CopyOutcome::Copied));
    let mut evacuation = join(&cluster, 1, &none).await;
    let _other = join(&cluster, 2, &says_so).await;
    let held = prefix(5, 4);
    let seen = evacuation.store(&held).await;
    cluster.lookup(1, &held, vec![seen]).await;
    let reply = evacuate(&cluster, &evacuation, Some(run(&held))).await.unwrap();
    assert_eq!((reply.elsewhere_blocks, reply.copied_blocks), (0, 0), "{reply:?}");
    assert_eq!(says_so.asked(), [(0, 4)]);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_a_live_node_can_drain() {
    let cluster = Cluster::start(1, |_| {}).await;
    let evacuation = join(&cluster, 1, &CopyTarget::new(1, CopyOutcome::Full)).await;
    let call = |change: fn(&mut pb::DrainRequest)| {
        let mut request = pb::DrainRequest {
            node: 1,
            epoch: evacuation.epoch,
            run: Some(run(&prefix(1, 2))),
            root: prefix(1, 1).concat(),
            within_ms: 1_000,
        };
        change(&mut request);
        let mut client = cluster.client(1);
        async move { client.drain(request).await.unwrap_err() }
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
    let many = call(|request| request.run.as_mut().unwrap().blocks = vec![0; HASH_BYTES * 4_097]).await;
    assert_eq!(many.code(), Code::InvalidArgument);
    cluster.shutdown().await;
}
