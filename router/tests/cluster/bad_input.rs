//! Invalid configurations, certificates and calls: each gets an error that names the problem.

use kv_core::id::HASH_BYTES;
use kvfleet_errors_doc::says;
use kvfleet_net::tls::Role;
use kvfleet_proto::pb;
use kvfleet_proto::pb::announce_reply::Body as Reply;
use kvfleet_router::{StartError, TlsConfig};
use tempfile::TempDir;
use tonic::Code;

use kvfleet_testkit::cluster::{
    Cluster, HANG, certificates, channel, join_request, prefix, start, stored, until,
};
use kvfleet_testkit::ports::unused_address;

fn route_request() -> pb::RouteRequest {
    pb::RouteRequest {
        request: 1,
        block_tokens: 16,
        input_tokens: 32,
        hashes: prefix(41, 2).concat(),
        ..Default::default()
    }
}

fn report(instance: u32, sequence: u64) -> pb::ReportRequest {
    pb::ReportRequest { instance, address: "i:1".into(), sequence, started_us: 1, ..Default::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_calls_are_answered_with_the_limit() {
    let cluster = Cluster::start(1, |_| {}).await;
    cluster.leader().await;
    let mut client = cluster.client(1);
    let mut refused = async |request: pb::RouteRequest| {
        let status = client.route(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        status.message().to_owned()
    };
    let request = pb::RouteRequest { hashes: vec![1; 17], ..route_request() };
    says("hashes that are cut", &refused(request).await, &[]);
    let request = pb::RouteRequest { hashes: vec![1; HASH_BYTES * 65_537], ..route_request() };
    says("more blocks than a call may name", &refused(request).await, &[]);
    let request = pb::RouteRequest { block_tokens: 0, ..route_request() };
    says("blocks of no tokens", &refused(request).await, &[]);
    let request = pb::RouteRequest { block_tokens: 5_000, ..route_request() };
    says("blocks of too many tokens", &refused(request).await, &[]);
    let request = pb::RouteRequest { identity: vec![1; 3], ..route_request() };
    says("an identity that is cut", &refused(request).await, &[]);
    let request = pb::RouteRequest { traceparent: "0".repeat(513), ..route_request() };
    says("a trace's name without end", &refused(request).await, &[]);
    let request = pb::RouteRequest { after: vec![pb::AnnouncePosition::default(); 4_097], ..route_request() };
    says("more points to wait for than a call may name", &refused(request).await, &[]);

    let huge = pb::RouteRequest { hashes: vec![1; 9 << 20], ..route_request() };
    let status = client.route(huge).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange, "{status}");
    says("a control message above the limit", &status.message(), &[]);
    let nobody = pb::PinRequest {
        pin: 1,
        owner: String::new(),
        blocks: prefix(41, 1).concat(),
        ..pb::PinRequest::default()
    };
    let status = client.pin(nobody).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    says("a pin without an owner", &status.message(), &[]);
    let span = async |for_ms| {
        let (owner, blocks) = ("me".to_owned(), prefix(41, 1).concat());
        let pin = pb::PinRequest { pin: 1, owner, blocks, soft: true, for_ms: Some(for_ms) };
        let status = client.clone().pin(pin).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        status
    };
    says("a pin that is over at once", &span(0).await.message(), &[]);
    says("a pin that ends after all times", &span(u64::MAX).await.message(), &[]);
    let nowhere = pb::JoinRequest { data_address: String::new(), ..join_request(1) };
    let status = client.join(nowhere).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    says("a node without an address", &status.message(), &[]);
    let nameless = pb::ReportRequest { address: String::new(), ..report(1, 1) };
    let status = client.report(nameless).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    says("an instance without an address", &status.message(), &[]);
    let mut no_part = async |report: pb::ReportRequest| {
        let status = client.report(report).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        status.message().to_owned()
    };
    let role = no_part(pb::ReportRequest { role: 3, ..report(1, 1) }).await;
    says("an instance with a role that is none", &role, &[]);
    let place = no_part(pb::ReportRequest { topology: "a//b".into(), ..report(1, 1) }).await;
    says("an instance at a place that is none", &place, &[]);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routing_rejects_without_instances_and_chooses_with_one() {
    let cluster = Cluster::start(1, |_| {}).await;
    cluster.leader().await;
    let mut client = cluster.client(1);
    let reply = client.route(route_request()).await.unwrap().into_inner();
    let Some(pb::route_reply::Answer::Rejected(rejected)) = reply.answer else { panic!("{reply:?}") };
    assert!(rejected.retry_after_ms > 0, "{rejected:?}");
    says("a request before any instance has reported", &rejected.reason, &[]);

    let mut node = cluster.node(4).await;
    let seen = node.store(&prefix(41, 1)).await;
    let own = pb::ReportRequest { node: 4, has_node: true, ..report(4, 1) };
    client.report(own).await.unwrap();
    let request = pb::RouteRequest { after: vec![seen], identity: vec![7; 16], ..route_request() };
    let reply = client.route(request).await.unwrap().into_inner();
    let Some(pb::route_reply::Answer::Decision(decision)) = reply.answer else { panic!("{reply:?}") };
    assert_eq!((decision.instance, decision.instance_address.as_str()), (4, "i:1"));
    assert_eq!(decision.fetch_blocks + decision.recompute_blocks, 2);
    let save_to = decision.save_to.unwrap();
    assert_eq!((save_to.node, save_to.epoch, save_to.address.as_str()), (4, node.epoch, "127.0.0.1:9004"));
    assert!(!decision.reasons.is_empty() && decision.candidates.len() == 1);

    // The remaining instances do not prefill.
    let going_on = pb::ReportRequest { role: 2, node: 4, has_node: true, ..report(4, 2) };
    client.report(going_on).await.unwrap();
    let reply = client.route(route_request()).await.unwrap().into_inner();
    let Some(pb::route_reply::Answer::Rejected(rejected)) = reply.answer else { panic!("{reply:?}") };
    assert!(rejected.no_instance);
    says("a request where no instance does prefill", &rejected.reason, &[]);
    client.report(pb::ReportRequest { role: 1, topology: "z/r".into(), ..report(5, 1) }).await.unwrap();
    let reply = client.route(route_request()).await.unwrap().into_inner();
    let Some(pb::route_reply::Answer::Decision(decision)) = reply.answer else { panic!("{reply:?}") };
    let handover = decision.handover.unwrap();
    assert_eq!((decision.instance, handover.instance, handover.address.as_str()), (5, 4, "i:1"));
    assert!(handover.us > 0);

    let mut other_weights = vec![7; 16];
    other_weights[12] ^= 1;
    let request = pb::RouteRequest { identity: other_weights, ..route_request() };
    assert!(client.route(request).await.is_ok(), "nodes check the loaded weights");
    let foreign = pb::RouteRequest { identity: vec![8; 16], ..route_request() };
    let status = client.route(foreign).await.unwrap_err();
    says("a request of another identity", &status.message(), &[&"08".repeat(16), &"07".repeat(16)]);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_of_another_identity_is_refused() {
    let cluster = Cluster::start(1, |_| {}).await;
    let _node = cluster.node(1).await;
    let other = pb::JoinRequest { identity: vec![8; 16], ..join_request(2) };
    let status = cluster.client(1).join(other).await.unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied);
    says("a node of another identity", &status.message(), &[&"08".repeat(16), &"07".repeat(16)]);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_with_the_number_of_another_host_is_refused_until_that_one_is_silent() {
    let cluster = Cluster::start(1, |_| {}).await;
    let node = cluster.node(1).await;
    let other = pb::JoinRequest { host: "there".into(), ..join_request(1) };
    let status = cluster.client(1).join(other.clone()).await.unwrap_err();
    assert_eq!(status.code(), Code::AlreadyExists);
    says("a node with another host's number", &status.message(), &[]);
    let again = cluster.join(1).await;
    assert!(again > node.epoch, "the same host may always come back");
    drop(node);
    // The old host is silent: the node moved.
    let moved = until("the other host is admitted", || async {
        let reply = cluster.client(1).join(other.clone()).await.ok()?;
        Some(reply.into_inner().epoch)
    });
    assert!(moved.await > again);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_invalid_stream_message_ends_it_with_a_reason() {
    let cluster = Cluster::start(1, |config| config.announce.blocks_max = 8).await;
    let broken = async |changes: Vec<pb::Change>| {
        let mut node = cluster.node(1).await;
        node.send(1, changes).await;
        loop {
            match tokio::time::timeout(HANG, node.replies.message()).await.unwrap() {
                Ok(Some(reply)) if matches!(reply.body, Some(Reply::Directives(_))) => {}
                Ok(other) => panic!("{other:?}"),
                Err(status) => return status,
            }
        }
    };
    let status = broken(vec![stored(&prefix(42, 9))]).await;
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    says("an announcement above its limit", &status.message(), &[]);
    let status = broken(vec![stored(&[]); 10]).await;
    assert!(
        status.code() == Code::InvalidArgument && status.message().contains("is 9, the limit is 8"),
        "{status}"
    );
    let status = broken(vec![pb::Change { change: None }]).await;
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    says("an announcement of an empty change", &status.message(), &[]);
    // The cluster still works.
    cluster.node(1).await.store(&prefix(42, 8)).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_are_not_served() {
    let cluster = Cluster::start(1, |_| {}).await;
    cluster.leader().await;
    let elsewhere = TempDir::new().unwrap();
    let address = cluster.configs[0].listen.clone();
    let foreign = channel(&certificates(elsewhere.path()), &address);
    let mut client = pb::router_client::RouterClient::new(foreign);
    client.status(pb::StatusRequest {}).await.expect_err("another authority");
    let plain = tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap().connect_lazy();
    let mut client = pb::router_client::RouterClient::new(plain);
    client.status(pb::StatusRequest {}).await.expect_err("no TLS");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_start_gives_the_reason() {
    let mut cluster = Cluster::start(1, |_| {}).await;
    let config = cluster.configs[0].clone();
    let taken = start(config.clone()).await.err().unwrap();
    assert!(matches!(taken, StartError::PortInUse { .. }), "{taken}");
    says("a port in use, of a router", &taken, &[&config.listen]);
    let here = cluster.directory.path().display().to_string();

    let mut same_data = config.clone();
    same_data.listen = unused_address();
    let in_use = start(same_data).await.err().unwrap();
    says("a Raft log that another process has open", &in_use, &[&here]);

    let mut no_certificates = config.clone();
    no_certificates.listen = unused_address();
    no_certificates.tls = TlsConfig { ca: "/nowhere/ca.pem".into(), ..config.tls.clone() };
    let absent = start(no_certificates).await.err().unwrap();
    assert!(matches!(absent, StartError::Tls(_)), "{absent}");
    says("a router without certificate files", &absent, &[]);

    let mut no_voters = config.clone();
    no_voters.voters.clear();
    assert!(matches!(start(no_voters).await.err().unwrap(), StartError::Config(_)));

    cluster.take(1).shutdown().await;
    let mut other_router = config.clone();
    other_router.id = 2;
    other_router.voters[0].id = 2;
    other_router.tls = cluster.certificates().config(&Role::Router(None));
    let wrong = start(other_router).await.err().unwrap();
    says("a Raft log of another router", &wrong, &[&here]);
    start(config).await.unwrap().shutdown().await;
}

/// A replica that stored such a term would refuse every later leader, also after a restart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_term_that_no_election_reaches_is_refused_and_changes_nothing() {
    let cluster = Cluster::start(3, |_| {}).await;
    let leader = cluster.leader().await;
    let before = cluster.status(leader).await.unwrap();
    let vote = ((u64::MAX, 1_u64), true);
    let none = None::<((u64, u64), u64)>;
    let append = rmp_serde::to_vec(&(vote, none, none, Vec::<()>::new())).unwrap();
    let ballot = rmp_serde::to_vec(&(vote, none, false)).unwrap();
    let transfer = rmp_serde::to_vec(&(vote, leader, none)).unwrap();
    for id in 1..=3 {
        let address = &cluster.configs[usize::try_from(id - 1).unwrap()].listen;
        let mut raft = pb::raft_client::RaftClient::new(channel(&cluster.configs[0].tls, address));
        for group in [0, 1] {
            let frame = |payload: &Vec<u8>| pb::RaftFrame {
                group,
                payload: payload.clone().into(),
                cluster: cluster.configs[0].cluster.clone(),
                shards: 1,
                commands: Vec::new(),
            };
            let stream = tokio_stream::iter(vec![frame(&append)]);
            for answer in [
                raft.append(frame(&append)).await.map(drop),
                raft.append_stream(stream).await.map(drop),
                raft.vote(frame(&ballot)).await.map(drop),
                raft.pre_vote(frame(&ballot)).await.map(drop),
                raft.transfer_leader(frame(&transfer)).await.map(drop),
            ] {
                let status = answer.unwrap_err();
                assert_eq!(status.code(), Code::InvalidArgument, "{status}");
                says("a Raft message with a term far ahead", &status.message(), &[]);
            }
        }
    }
    let after = cluster.status(leader).await.unwrap();
    assert_eq!((after.leader, after.term), (before.leader, before.term));
    cluster.client(leader).set_generation(pb::SetGenerationRequest { generation: 1 }).await.unwrap();
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_of_another_cluster_are_refused() {
    let cluster = Cluster::start(1, |config| config.cluster = "ours".into()).await;
    cluster.leader().await;
    let address = cluster.configs[0].listen.clone();
    let mut raft = pb::raft_client::RaftClient::new(channel(&cluster.configs[0].tls, &address));
    let frame = |cluster: &str, shards, group| pb::RaftFrame {
        group,
        payload: vec![1, 2, 3].into(),
        cluster: cluster.into(),
        shards,
        commands: Vec::new(),
    };
    let status = raft.vote(frame("theirs", 1, 0)).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    says("a Raft message of another cluster", &status.message(), &[]);
    let status = raft.append(frame("ours", 4, 0)).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    says("a Raft message with other shards", &status.message(), &[]);
    let status = raft.append(frame("ours", 1, 2)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    says("a Raft message of no group", &status.message(), &[]);
    let status = raft.append(frame("ours", 1, 1)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().starts_with("raft frame does not decode"), "{status}");
    for (frames, code) in [
        (vec![frame("theirs", 1, 0)], Code::FailedPrecondition),
        (vec![frame("ours", 1, 2)], Code::InvalidArgument),
        (vec![frame("ours", 1, 1)], Code::InvalidArgument),
        (vec![], Code::InvalidArgument),
    ] {
        let mut stream = raft.clone();
        let status = stream.append_stream(tokio_stream::iter(frames)).await.unwrap_err();
        assert_eq!(status.code(), code, "{status}");
    }
    let part = pb::SnapshotPart { cluster: "ours".into(), shards: 1, head: vec![1], ..Default::default() };
    let status = raft.snapshot(tokio_stream::iter([part])).await.unwrap_err();
    assert_eq!(status.code(), Code::DataLoss, "{status}");
    let hello = raft.handshake(pb::HandshakeRequest {}).await.unwrap().into_inner();
    assert_eq!(hello, pb::HandshakeReply { cluster: "ours".into(), shards: 1, router: 1 });
    cluster.shutdown().await;
}
