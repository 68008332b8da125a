//! The table against the protocol files, and the checks before a call. Calls over connections are
//! tested where the servers are (`cli/tests/command/access.rs`).
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::future::{Pending, pending};
use std::path::Path;

use kv_core::id::{InstanceId, NodeId, RouterId, TenantId};
use kvfleet_errors_doc::says;

use super::*;

/// Paths of all RPCs in the protocol files.
fn proto_paths() -> BTreeSet<String> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../proto/proto");
    let mut paths = BTreeSet::new();
    for file in std::fs::read_dir(directory).unwrap() {
        let (mut package, mut service) = (String::new(), String::new());
        for line in std::fs::read_to_string(file.unwrap().path()).unwrap().lines() {
            let words: Vec<&str> = line.split([' ', '(', ';']).filter(|word| !word.is_empty()).collect();
            match words[..] {
                ["package", name, ..] => name.clone_into(&mut package),
                ["service", name, ..] => name.clone_into(&mut service),
                ["rpc", name, ..] => drop(paths.insert(format!("/{package}.{service}/{name}"))),
                _ => {}
            }
        }
    }
    paths
}

#[test]
fn every_call_has_one_row() {
    let rows: Vec<String> = TABLE.iter().map(|rule| rule.path.to_owned()).collect();
    let unique: BTreeSet<String> = rows.iter().cloned().collect();
    assert_eq!(rows.len(), unique.len(), "a call has two rows");
    let of_services: BTreeSet<String> = unique.into_iter().filter(|path| path.starts_with('/')).collect();
    let paths = proto_paths();
    assert!(paths.len() > 30, "{paths:?}");
    assert_eq!(of_services, paths, "calls and rows differ");
}

#[test]
fn refusals_name_the_roles_that_may_call() {
    let refusal = |path: &str, role: &Role| {
        let status = rule_of(path).unwrap().check(role).unwrap_err();
        assert_eq!(status.code(), tonic::Code::PermissionDenied);
        status.message().to_owned()
    };
    let instance = Role::Instance(Some(InstanceId(2)));
    let refused = refusal("/kvfleet.v1.Router/SetQuota", &instance);
    says("a call that is not for the caller's role", &refused, &[]);
    let refused = refusal("/kvfleet.v1.NodeControl/NodeStatus", &Role::Tenants([3, 5].map(TenantId).into()));
    assert!(refused.contains("tenant-3, tenant-5") && refused.contains("router or admin"), "{refused}");
    rule_of("/kvfleet.v1.Router/Report").unwrap().check(&instance).unwrap();
    assert!(rule_of("/kvfleet.v1.Router/Other").is_none());
}

#[test]
fn numbers_in_calls_are_those_of_certificates() {
    let node = Caller::new(Role::Node(Some(NodeId(3))));
    node.require_node(NodeId(3)).unwrap();
    let refused = node.require_node(NodeId(4)).unwrap_err();
    says("a call that names another node", &refused.message(), &[]);
    Caller::new(Role::Node(None)).require_node(NodeId(4)).unwrap();
    Caller::new(Role::Admin).require_node(NodeId(4)).unwrap();
    let router = Caller::new(Role::Router(Some(RouterId(1))));
    router.require_router(RouterId(1)).unwrap();
    router.require_router(RouterId(2)).unwrap_err();
    let instance = Caller::new(Role::Instance(Some(InstanceId(1))));
    instance.require_instance(InstanceId(1)).unwrap();
    instance.require_instance(InstanceId(2)).unwrap_err();
}

#[test]
fn a_service_without_an_access_check_has_no_callers() {
    let status = Caller::from_extensions(&tonic::Extensions::default()).unwrap_err();
    assert_eq!(status.code(), tonic::Code::PermissionDenied);
}

/// A service that never answers.
#[derive(Clone)]
struct Stuck;

impl Service<http::Request<CountedBody<()>>> for Stuck {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pending<Result<http::Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: http::Request<CountedBody<()>>) -> Self::Future {
        pending()
    }
}

#[tokio::test(start_paused = true)]
async fn only_calls_with_limits_of_their_own_may_take_longer() {
    let begun = tokio::time::Instant::now();
    let answer = within_timeout(pending::<Result<_, Infallible>>()).await.unwrap();
    assert_eq!(begun.elapsed(), CALL_TIMEOUT);
    assert_eq!(answer.headers()["grpc-status"], "4", "deadline exceeded");
    let own_limits = |path: &str| rule_of(path).unwrap().deadline == Deadline::OfHandler;
    assert!(own_limits("/kvfleet.v1.Router/Drain") && !own_limits("/kvfleet.v1.Router/Route"));
}

#[tokio::test]
async fn a_call_without_a_row_or_a_certificate_is_refused() {
    let mut service = AccessService::new(Stuck);
    for (path, code) in [("/kvfleet.v1.Router/Other", "12"), ("/kvfleet.v1.Router/Route", "7")] {
        let request = http::Request::builder().uri(path).body(()).unwrap();
        let answer = service.call(request).await.unwrap();
        assert_eq!(answer.headers()["grpc-status"], code, "{path}");
    }
}
