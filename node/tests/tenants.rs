//! Callers with tenant certificates at a whole node: over both network paths, and at its control
//! calls.

use std::sync::Arc;

use crate::world::*;
use kv_core::id::{Epoch, TenantId, Tier};
use kvfleet_errors_doc::says;
use kvfleet_net::tls::Role;
use kvfleet_node::{Node, NodeConfig};
use kvfleet_proto::pb::{AuditRequest, FlushRequest, NodeStatusRequest, SetWindowRequest};
use kvfleet_transport::quic::{QuicConfig, QuicDialer};
use kvfleet_transport::tcp::{TcpConfig, TcpDialer};
use kvfleet_transport::{Dialer, FetchAnswer, MissReason, Path, SaveAnswer, SaveRefusal};
use prometheus::Registry;
use tonic::Code;

async fn saved(path: &dyn Path, tenant: u32, numbers: std::ops::Range<u64>) -> SaveAnswer {
    let (first, all) = (numbers.start, hashes(numbers));
    let mut request = save_request(u64::from(tenant) + 100, first, &all);
    (request.context.tenant, request.parent) = (TenantId(tenant), None);
    path.save(request, &|position| frame(all[position])).await.unwrap()
}

async fn fetched(path: &dyn Path, tenant: u32, numbers: std::ops::Range<u64>) -> FetchAnswer {
    let mut request = fetch_request(u64::from(tenant) + 200, Epoch(0), &hashes(numbers));
    request.context.tenant = TenantId(tenant);
    path.fetch(request, &mut |_| {}).await.unwrap()
}

#[tokio::test]
async fn tenant_certificate_reads_and_saves_only_its_tenant_on_both_paths() {
    let world = TestCluster::new();
    let node = start(&world.config(&[])).await;
    let address = node.data_addr().to_string();
    let quic = |identity| QuicDialer::new(identity, QuicConfig::default());
    let tcp = |identity| TcpDialer::new(identity, TcpConfig::default());
    let member: Arc<dyn Path> = quic(&world.identity).dial(address.clone()).await.unwrap();
    let paths: [Arc<dyn Path>; 2] = [
        quic(&world.tenant).dial(address.clone()).await.unwrap(),
        tcp(&world.tenant).dial(address).await.unwrap(),
    ];
    let hit = || FetchAnswer::Hit { tiers: vec![Tier::Dram; 2] };
    let stored = |answer| matches!(answer, SaveAnswer::Done(done) if done.stored_blocks == 2);
    assert!(stored(saved(&*member, 4, 0..2).await));
    for (path, first) in paths.iter().zip([10, 20]) {
        let theirs = fetched(&**path, 4, 0..2).await;
        assert_eq!(theirs, FetchAnswer::Miss { reason: MissReason::NotHeld }, "a block of tenant 4");
        assert_eq!(saved(&**path, 4, 30..32).await, SaveAnswer::Refused(SaveRefusal::IdentityDiffers));
        let as_ours = fetched(&**path, 3, 0..2).await;
        assert_eq!(
            as_ours,
            FetchAnswer::Miss { reason: MissReason::NotHeld },
            "the same hash under another tenant"
        );
        assert!(stored(saved(&**path, 3, first..first + 2).await));
        assert_eq!(fetched(&**path, 3, first..first + 2).await, hit());
        assert_eq!(
            fetched(&*member, 3, first..first + 2).await,
            hit(),
            "a cluster member may name every tenant"
        );
    }
    assert_eq!(fetched(&*member, 4, 0..2).await, hit());
    node.shutdown().await;
}

#[tokio::test]
async fn control_calls_refuse_tenant_certificates() {
    let world = TestCluster::new();
    let node = start(&world.config(&[])).await;
    let mut control = control_as(&world.tenant, node.control_addr()).await;
    let status = control.node_status(NodeStatusRequest::default()).await.unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied);
    says("a control call of a node with a tenant's certificate", &status.message(), &[]);
    let others = [
        control.flush(FlushRequest::default()).await.map(drop),
        control.audit(AuditRequest::default()).await.map(drop),
        control.set_window(SetWindowRequest::default()).await.map(drop),
    ];
    for answer in others {
        assert!(answer.unwrap_err().message().contains("is not for tenant-3"));
    }
    let mut control = control_as(&world.admin, node.control_addr()).await;
    assert!(control.node_status(NodeStatusRequest::default()).await.is_ok());
    node.shutdown().await;
}

#[tokio::test]
async fn node_refuses_to_start_with_a_tenant_certificate() {
    let world = TestCluster::new();
    let mut config: NodeConfig = world.config(&[]);
    let files = files(world.dir.path(), &Role::tenant(TenantId(3)));
    (config.tls.cert, config.tls.key) = (files.cert, files.key);
    let error = Node::start(config, &Registry::new()).await.unwrap_err();
    let here = world.dir.path().display().to_string();
    says("a node with a tenant's certificate", &error, &[&here]);
}
