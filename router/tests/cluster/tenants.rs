//! Callers with tenant certificates: they route and look up for their tenants, and all other calls
//! are refused.

use std::collections::BTreeSet;

use kv_core::id::NodeId;
use kvfleet_errors_doc::says;
use kvfleet_net::tls::Role;
use kvfleet_proto::pb;
use kvfleet_proto::pb::raft_client::RaftClient;
use kvfleet_proto::pb::router_client::RouterClient;
use tempfile::TempDir;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

use kvfleet_router::RouterConfig;
use kvfleet_testkit::certificates::{Certificates, RoleChannel};
use kvfleet_testkit::cluster::{Cluster, heartbeat, join_request, prefix, start, tenants};

fn route_request(tenant: u32) -> pb::RouteRequest {
    pb::RouteRequest {
        request: 1,
        tenant,
        block_tokens: 16,
        input_tokens: 32,
        hashes: prefix(51, 2).concat(),
        ..Default::default()
    }
}

fn report() -> pb::ReportRequest {
    pb::ReportRequest { instance: 6, address: "i:6".into(), sequence: 1, started_us: 1, ..Default::default() }
}

fn as_tenant(cluster: &Cluster) -> RouterClient<RoleChannel> {
    cluster.client_as(1, tenants())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_certificate_routes_for_its_tenants_only() {
    let cluster = Cluster::start(1, |_| {}).await;
    cluster.leader().await;
    cluster.client(1).report(report()).await.unwrap();
    let mut tenant = as_tenant(&cluster);
    for own in [3, 5] {
        let reply = tenant.route(route_request(own)).await.unwrap().into_inner();
        let Some(pb::route_reply::Answer::Decision(decision)) = reply.answer else { panic!("{reply:?}") };
        assert_eq!(decision.instance, 6);
    }
    for other in [0, 1, 4, u32::MAX] {
        assert_eq!(
            tenant.route(route_request(other)).await.unwrap_err().code(),
            Code::PermissionDenied,
            "{other}"
        );
        assert!(
            cluster.client(1).route(route_request(other)).await.is_ok(),
            "a member may name every tenant"
        );
    }
    let status = tenant.route(route_request(4)).await.unwrap_err();
    says("a route for a tenant that the certificate does not name", &status.message(), &[]);
    let narrowed =
        pb::RouteRequest { candidates: Some(pb::CandidateSet { instances: vec![6] }), ..route_request(3) };
    let status = tenant.route(narrowed).await.unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied);
    says("instances named by a tenant", &status.message(), &[]);
    let lookup = pb::LookupRequest { hashes: prefix(51, 2).concat(), ..Default::default() };
    tenant.lookup(lookup).await.unwrap();
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tenant_calls_cannot_fill_queues_or_load_leaders() {
    let cluster = Cluster::start(1, |_| {}).await;
    cluster.leader().await;
    let mut tenant = as_tenant(&cluster);
    let unhashed = |input_tokens| pb::RouteRequest { input_tokens, hashes: Vec::new(), ..route_request(3) };
    let status = tenant.route(unhashed(u32::MAX)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    says("a prompt of more tokens than a queue holds", &status.message(), &[]);
    for (sequence, own) in (1..).zip([3, 5, 3, 5]) {
        cluster.client(1).report(pb::ReportRequest { sequence, ..report() }).await.unwrap();
        for _ in 0..4 {
            let request = pb::RouteRequest { tenant: own, ..unhashed(4 << 20) };
            let reply = tenant.route(request).await.unwrap().into_inner();
            assert!(matches!(reply.answer, Some(pb::route_reply::Answer::Decision(_))), "{reply:?}");
        }
    }
    let others = cluster.client(1).route(unhashed(4 << 20)).await.unwrap().into_inner();
    assert!(matches!(others.answer, Some(pb::route_reply::Answer::Decision(_))), "{others:?}");
    let fresh = || pb::LookupRequest { fresh: true, hashes: prefix(51, 2).concat(), ..Default::default() };
    // More than the limit for the test's duration in seconds.
    let asked = (0..1_000).map(|_| {
        let mut tenant = tenant.clone();
        async move { tenant.lookup(fresh()).await }
    });
    let answers = futures_util::future::join_all(asked).await;
    let status = answers.into_iter().find_map(Result::err).expect("there is a limit");
    assert_eq!(status.code(), Code::ResourceExhausted);
    let ms = status.message().split(' ').rev().find(|word| word.parse::<u32>().is_ok()).unwrap_or_default();
    says("more fresh reads of a tenant in a second than it has", &status.message(), &[&format!("{ms} ms")]);
    for _ in 0..60 {
        cluster.client(1).lookup(fresh()).await.unwrap();
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_does_not_see_the_load_of_other_instances() {
    let cluster = Cluster::start(1, |_| {}).await;
    cluster.leader().await;
    let busy = pb::ReportRequest { instance: 7, queue_tokens: 5_000_000, ..report() };
    for report in [report(), busy] {
        cluster.client(1).report(report).await.unwrap();
    }
    let candidates = async |mut router: RouterClient<RoleChannel>| {
        let reply = router.route(route_request(3)).await.unwrap().into_inner();
        let Some(pb::route_reply::Answer::Decision(decision)) = reply.answer else { panic!("{reply:?}") };
        let numbers: Vec<u32> = decision.candidates.iter().map(|candidate| candidate.instance).collect();
        (decision.instance, numbers)
    };
    assert_eq!(candidates(cluster.client(1)).await, (6, vec![6, 7]));
    assert_eq!(candidates(as_tenant(&cluster)).await, (6, vec![6]));
    cluster.shutdown().await;
}

/// Every member-only call of a router, made as a tenant.
async fn refusals(cluster: &Cluster) -> Vec<(&'static str, Status)> {
    let mut router = as_tenant(cluster);
    let (words, stream) = tokio::sync::mpsc::channel(1);
    words.send(heartbeat(4, 1, 0)).await.unwrap();
    let answers = [
        ("report", router.report(report()).await.map(drop)),
        ("report_residency", router.report_residency(pb::ResidencyRequest::default()).await.map(drop)),
        ("drain", router.drain(pb::DrainRequest::default()).await.map(drop)),
        ("admit_decode", router.admit_decode(pb::AdmitDecodeRequest::default()).await.map(drop)),
        ("why", router.why(pb::WhyRequest::default()).await.map(drop)),
        ("status", router.status(pb::StatusRequest {}).await.map(drop)),
        ("join", router.join(join_request(4)).await.map(drop)),
        ("announce", router.announce(ReceiverStream::new(stream)).await.map(drop)),
        ("pin", router.pin(pb::PinRequest::default()).await.map(drop)),
        ("unpin", router.unpin(pb::UnpinRequest::default()).await.map(drop)),
        (
            "set_quota",
            router.set_quota(pb::SetQuotaRequest { tenant: 3, clear: true, bytes: 0 }).await.map(drop),
        ),
        ("set_ttl", router.set_ttl(pb::SetTtlRequest::default()).await.map(drop)),
        ("set_generation", router.set_generation(pb::SetGenerationRequest { generation: 1 }).await.map(drop)),
        ("leave", router.leave(pb::LeaveRequest::default()).await.map(drop)),
        ("change_member", router.change_member(pb::ChangeMemberRequest::default()).await.map(drop)),
        ("transfer_lead", router.transfer_lead(pb::TransferLeadRequest::default()).await.map(drop)),
    ];
    let all = answers.into_iter().chain(raft_answers(cluster.raft_as(1, tenants())).await);
    all.map(|(call, answer)| (call, answer.err().unwrap_or_else(|| panic!("{call} was answered")))).collect()
}

/// The answers to every Raft call.
async fn raft_answers(mut raft: RaftClient<RoleChannel>) -> Vec<(&'static str, Result<(), Status>)> {
    let frames = || tokio_stream::iter(vec![pb::RaftFrame::default()]);
    vec![
        ("handshake", raft.handshake(pb::HandshakeRequest::default()).await.map(drop)),
        ("read_index", raft.read_index(pb::RaftFrame::default()).await.map(drop)),
        ("append", raft.append(pb::RaftFrame::default()).await.map(drop)),
        ("append_stream", raft.append_stream(frames()).await.map(drop)),
        ("vote", raft.vote(pb::RaftFrame::default()).await.map(drop)),
        ("pre_vote", raft.pre_vote(pb::RaftFrame::default()).await.map(drop)),
        ("transfer_leader", raft.transfer_leader(pb::RaftFrame::default()).await.map(drop)),
        ("snapshot", raft.snapshot(tokio_stream::iter(vec![pb::SnapshotPart::default()])).await.map(drop)),
        ("compare", raft.compare(pb::CompareRequest::default()).await.map(drop)),
        ("state", raft.state(pb::RaftFrame::default()).await.map(drop)),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn raft_calls_are_refused_to_processes_that_are_no_routers() {
    let cluster = Cluster::start(1, |_| {}).await;
    cluster.leader().await;
    let node = Role::Node(Some(NodeId(1)));
    for (call, answer) in raft_answers(cluster.raft_as(1, node.clone())).await {
        let status = answer.expect_err(call);
        assert_eq!(status.code(), Code::PermissionDenied, "{call}");
        assert!(status.message().contains("is not for node-1"), "{status}");
        if call == "handshake" {
            says("a Raft call of a process that is no router", &status.message(), &[]);
        }
    }
    // The same process may make other calls.
    let mut node = cluster.client_as(1, node);
    node.status(pb::StatusRequest {}).await.unwrap();
    cluster.shutdown().await;
}

/// Calls of a router's services, from their protobuf files.
fn described() -> BTreeSet<String> {
    let text = include_str!("../../../proto/proto/router.proto");
    let names = text.lines().filter_map(|line| line.trim().strip_prefix("rpc ")?.split('(').next());
    let snake = |name: &str| {
        let lower = |at: usize, letter: char| match letter.is_ascii_uppercase() && at > 0 {
            true => format!("_{}", letter.to_ascii_lowercase()),
            false => letter.to_ascii_lowercase().to_string(),
        };
        name.char_indices().map(|(at, letter)| lower(at, letter)).collect()
    };
    names.map(snake).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn member_calls_are_refused_to_a_tenant_certificate() {
    let cluster = Cluster::start(1, |_| {}).await;
    cluster.leader().await;
    let refusals = refusals(&cluster).await;
    let tried = refusals.iter().map(|(call, _)| (*call).to_owned());
    let all: BTreeSet<String> = tried.chain(["route", "route_stream", "lookup"].map(str::to_owned)).collect();
    assert_eq!(all, described(), "every call was tried, or is for tenants");
    for (call, status) in &refusals {
        assert_eq!(status.code(), Code::PermissionDenied, "{call}: {status}");
        assert!(status.message().contains("is not for tenant-3, tenant-5"), "{call}: {status}");
    }
    says("a call for the cluster's own with a tenant's certificate", &refusals[0].1.message(), &[]);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_rejects_a_tenant_certificate_of_its_own() {
    let directory = TempDir::new().unwrap();
    let tls = Certificates::open(directory.path()).config(&tenants());
    let address = kvfleet_testkit::ports::unused_address();
    let voters = vec![kvfleet_router::VoterConfig { id: 1, address: address.clone() }];
    let config = RouterConfig {
        id: 1,
        listen: address,
        voters,
        data_dir: directory.path().join("router"),
        tls,
        ..RouterConfig::default()
    };
    let error = start(config).await.err().unwrap();
    says("a router with a tenant's certificate", &error, &[&directory.path().display().to_string()]);
}
