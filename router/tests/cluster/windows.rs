//! Prefetch windows at nodes: blocks of queued requests, in time, and their removal.

use std::sync::Arc;

use kv_core::id::{InstanceId, NodeId};
use kvfleet_net::tls::Role;
use kvfleet_net::tls::listen::incoming;
use kvfleet_proto::pb;
use kvfleet_proto::pb::node_control_server::{NodeControl, NodeControlServer};
use parking_lot::Mutex;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::residency::load;
use kvfleet_testkit::cluster::{Cluster, FakeNode, join_request, prefix, until};

/// A fake node that records received windows.
#[derive(Clone, Default)]
struct WindowNode {
    windows: Arc<Mutex<Vec<pb::SetWindowRequest>>>,
}

#[tonic::async_trait]
impl NodeControl for WindowNode {
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
        request: Request<pb::SetWindowRequest>,
    ) -> Result<Response<pb::SetWindowReply>, Status> {
        self.windows.lock().push(request.into_inner());
        Ok(Response::new(pb::SetWindowReply::default()))
    }

    async fn copy_blocks(
        &self,
        _: Request<pb::CopyBlocksRequest>,
    ) -> Result<Response<pb::CopyBlocksReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn audit(&self, _: Request<pb::AuditRequest>) -> Result<Response<pb::AuditReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }
}

impl WindowNode {
    async fn last(&self, what: &str, is_it: impl Fn(&pb::SetWindowRequest) -> bool) -> pb::SetWindowRequest {
        until(what, || async { self.windows.lock().last().filter(|window| is_it(window)).cloned() }).await
    }
}

/// One router, and one node that records windows.
async fn world() -> (Cluster, WindowNode, FakeNode) {
    let cluster = Cluster::start(1, |_| {}).await;
    let listener = WindowNode::default();
    let identity = cluster.certificates().identity(&Role::Node(Some(NodeId(1))));
    let socket = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let control_address = socket.local_addr().unwrap().to_string();
    let served = Server::builder().add_service(NodeControlServer::new(listener.clone()));
    tokio::spawn(served.serve_with_incoming(incoming(socket, &identity)));
    let request = pb::JoinRequest { control_address, ..join_request(1) };
    let joined = cluster.on_leader(|mut client| {
        let request = request.clone();
        async move { client.join(request).await }
    });
    let epoch = joined.await.epoch;
    let node = cluster.reconnect(1, epoch, 1).await;
    (cluster, listener, node)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_get_prefetch_windows_of_queued_requests() {
    let (cluster, listener, mut node) = world().await;
    let held = prefix(5, 8);
    node.store(&held).await;
    // Four seconds of queued work.
    let busy = pb::ReportRequest { queue_tokens: 4_000, node: 1, has_node: true, ..load(1, 1) };
    cluster.client(1).report(busy.clone()).await.unwrap();
    let route = async |request: u64| {
        let asked = pb::RouteRequest {
            request,
            hashes: held.concat(),
            block_tokens: 16,
            input_tokens: 16 * 8 + 3,
            ..Default::default()
        };
        let reply = cluster.client(1).route(asked).await.unwrap().into_inner();
        let Some(pb::route_reply::Answer::Decision(decision)) = reply.answer else { panic!("{reply:?}") };
        assert_eq!(decision.fetch_blocks, 8);
    };
    until("the held blocks are known", || async {
        let lookup = pb::LookupRequest { hashes: held.concat(), ..Default::default() };
        let reply = cluster.client(1).lookup(lookup).await.unwrap().into_inner();
        (!reply.runs.is_empty()).then_some(())
    })
    .await;
    route(7).await;
    let window = listener.last("the window", |window| !window.waiting.is_empty()).await;
    assert_eq!((window.router, window.waiting.len()), (1, 1));
    assert_eq!(window.waiting[0].blocks, held.concat());
    assert!((3_000..=4_200).contains(&window.waiting[0].starts_after_ms), "{:?}", window.waiting[0]);
    route(8).await;
    listener.last("both requests", |window| window.waiting.len() == 2).await;
    // It is sent again while the request waits, since a node forgets it.
    let said = listener.windows.lock().len();
    until("the window is sent again", || async { (listener.windows.lock().len() > said).then_some(()) })
        .await;
    let outcomes = [7, 8].map(|request| pb::Outcome { request, ttft_us: 1_000, ..pb::Outcome::default() });
    let begun =
        pb::ReportRequest { outcomes: outcomes.to_vec(), ..pb::ReportRequest { sequence: 2, ..busy } };
    cluster.client(1).report(begun).await.unwrap();
    listener.last("an empty window", |window| window.waiting.is_empty()).await;
    // An aborted or answered request, as the gateway reports, leaves the window too.
    let handle = cluster.routers[0].as_ref().unwrap().handle();
    for (request, is_left) in [(9, true), (10, false)] {
        route(request).await;
        listener.last("one queued request", |window| window.waiting.len() == 1).await;
        match is_left {
            true => handle.record_abort(request),
            false => handle.record_end(request, InstanceId(1), 0, None),
        }
        listener.last("an empty window", |window| window.waiting.is_empty()).await;
    }
    cluster.shutdown().await;
}
