//! Route calls with tokens instead of hashes: the router hashes them as a client would.

use kv_core::prefix::{IdentityManifest, PrefixHasher};
use kvfleet_errors_doc::says;
use kvfleet_proto::identity::IdentitySection;
use kvfleet_proto::pb;
use kvfleet_router::{EngineTenantConfig, EnginesConfig};
use pb::route_reply::Answer;
use tonic::{Code, Status};

use crate::residency::load;
use kvfleet_testkit::cluster::{Cluster, HashBytes, tenants, until};
use kvfleet_testkit::write_secret;

/// Secret of requests without a salt, and of those with the salt `tenant-a`.
const SECRETS: [[u8; 32]; 2] = [[0x0b; 32], [0x0a; 32]];

/// Whole blocks of sixteen.
const TOKENS: u32 = 8 * 16;

fn manifest(adapter: &str) -> IdentityManifest {
    IdentityManifest { block_tokens: 16, adapter: adapter.to_owned(), ..IdentityManifest::default() }
}

async fn cluster() -> Cluster {
    let secrets = tempfile::TempDir::new().unwrap();
    let [default, tenant] = ["default", "tenant-a"].map(|name| secrets.path().join(name));
    write_secret(&default, &"0b".repeat(32));
    write_secret(&tenant, &"0a".repeat(32));
    let cluster = Cluster::start(1, |config| {
        config.engines = EnginesConfig {
            identity: IdentitySection::from(&manifest("")),
            secret_file: default.clone(),
            tenants: vec![EngineTenantConfig {
                salt: "tenant-a".into(),
                secret_file: tenant.clone(),
                tenant: 0,
            }],
            ..EnginesConfig::default()
        };
    })
    .await;
    cluster.leader().await;
    cluster
}

fn hashes(adapter: &str, secret: &[u8; 32]) -> Vec<HashBytes> {
    let hasher = PrefixHasher::new(&manifest(adapter), secret);
    hasher.blocks(&(0..TOKENS).collect::<Vec<_>>()).iter().map(|block| block.0).collect()
}

fn request(cache_salt: &str, adapter: &str) -> pb::RouteRequest {
    let (cache_salt, adapter) = (cache_salt.to_owned(), adapter.to_owned());
    pb::RouteRequest { request: 1, tokens: (0..TOKENS).collect(), cache_salt, adapter, ..Default::default() }
}

async fn fetched(cluster: &Cluster, request: pb::RouteRequest) -> u32 {
    match cluster.client(1).route(request).await.unwrap().into_inner().answer {
        Some(Answer::Decision(decision)) => decision.fetch_blocks,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_find_the_blocks_of_their_tenant_and_adapter() {
    let cluster = cluster().await;
    let mut node = cluster.node(1).await;
    let kinds = [("", "", 8), ("tenant-a", "", 5), ("", "lora", 3), ("tenant-a", "lora", 0)];
    for (salt, adapter, blocks) in kinds {
        let secret = &SECRETS[usize::from(!salt.is_empty())];
        if blocks > 0 {
            node.store(&hashes(adapter, secret)[..blocks]).await;
        }
    }
    let full = pb::ReportRequest { node: 1, has_node: true, ..load(1, 1) };
    cluster.client(1).report(full).await.unwrap();
    for (salt, adapter, blocks) in kinds {
        until("the blocks to be known", || async {
            (fetched(&cluster, request(salt, adapter)).await == blocks as u32).then_some(())
        })
        .await;
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_that_cannot_be_hashed_are_refused() {
    let cluster = cluster().await;
    let refusal =
        async |request: pb::RouteRequest| -> Status { cluster.client(1).route(request).await.unwrap_err() };
    let both = pb::RouteRequest { hashes: vec![7; 19], ..request("", "") };
    says("a route call with tokens and hashes", &refusal(both).await.message(), &[]);
    let unknown = refusal(request("tenant-b", "")).await;
    assert_eq!(unknown.code(), Code::InvalidArgument);
    says("a route call with tokens of an unknown salt", &unknown.message(), &[]);
    let many = pb::RouteRequest { tokens: vec![0; 16 * 65_536 + 1], ..request("", "") };
    assert_eq!(refusal(many).await.code(), Code::InvalidArgument);
    // A salt is only a name: with it a tenant would have blocks of others looked up.
    let mut tenant = cluster.client_as(1, tenants());
    for salt in ["", "tenant-a"] {
        let of_tenant = pb::RouteRequest { tenant: 3, ..request(salt, "") };
        let refused = tenant.route(of_tenant).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied);
        says("a route call with tokens by a tenant", &refused.message(), &[]);
    }
    cluster.shutdown().await;
    let keyless = Cluster::start(1, |_| {}).await;
    keyless.leader().await;
    let status = keyless.client(1).route(request("", "")).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    says("a route call with tokens to a router without a key", &status.message(), &[]);
    keyless.shutdown().await;
}
