//! Tests of discovery against a fake Kubernetes API server.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use k8s_openapi::api::core::v1::Pod;
use kv_core::id::InstanceId;
use kvfleet_errors_doc::says;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::*;
use crate::endpoints::Endpoint;
use kvfleet_testkit::cluster::{Cluster, until};

/// State of the fake server.
#[derive(Default)]
struct ApiServer {
    objects: Vec<Value>,
    /// Answers that replace lists, in order.
    replies: VecDeque<(u16, Value)>,
    watches: Vec<mpsc::Sender<Bytes>>,
    /// Versions below this one are expired. Watches from there fail by status or by event.
    expired_below: u64,
    expires_by_status: bool,
    /// Queries of lists and of watches.
    lists: Vec<String>,
    watched: Vec<String>,
}

type SharedServer = Arc<Mutex<ApiServer>>;

async fn answer(State(server): State<SharedServer>, RawQuery(query): RawQuery) -> Response {
    let (query, mut server) = (query.unwrap_or_default(), server.lock());
    if query.contains("watch=true") {
        let from = query.split('&').find_map(|pair| pair.strip_prefix("resourceVersion="));
        let from: u64 = from.and_then(|from| from.parse().ok()).expect("a watch has a version");
        server.watched.push(query);
        let (sender, receiver) = mpsc::channel(64);
        if from < server.expired_below {
            let gone = status(410, "too old resource version");
            if server.expires_by_status {
                return (StatusCode::GONE, gone.to_string()).into_response();
            }
            let line = json!({ "type": "ERROR", "object": gone }).to_string() + "\n";
            sender.try_send(line.into()).expect("there is room");
        } else {
            server.watches.push(sender);
        }
        let lines = ReceiverStream::new(receiver).map(Ok::<_, std::io::Error>);
        return Body::from_stream(lines).into_response();
    }
    server.lists.push(query);
    if let Some((code, body)) = server.replies.pop_front() {
        return (StatusCode::from_u16(code).expect("a status"), body.to_string()).into_response();
    }
    let version = server.expired_below.max(100).to_string();
    let list = json!({
        "kind": "List", "apiVersion": "v1", "metadata": { "resourceVersion": version }, "items": server.objects,
    });
    ([("content-type", "application/json")], list.to_string()).into_response()
}

fn status(code: u16, message: &str) -> Value {
    let reason = match code {
        403 => "Forbidden",
        410 => "Expired",
        _ => "Unknown",
    };
    json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
         "message": message, "reason": reason, "code": code })
}

/// A ready Pod.
fn pod(name: &str, ip: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "namespace": "llm", "uid": format!("uid-{name}"), "resourceVersion": "7",
            "creationTimestamp": "2026-01-01T00:00:00Z", "annotations": {},
            "ownerReferences": [{ "apiVersion": "apps/v1", "kind": "StatefulSet", "name": "vllm", "uid": "s" }],
        },
        "spec": { "containers": [{ "name": "engine", "ports": [{ "name": "http", "containerPort": 8000 }] }] },
        "status": { "phase": "Running", "podIP": ip, "conditions": [{ "type": "Ready", "status": "True" }] },
    })
}

fn with_value(mut object: Value, path: &str, value: Value) -> Value {
    *object.pointer_mut(path).expect("the path exists") = value;
    object
}

fn annotated(object: Value, notes: Value) -> Value {
    with_value(object, "/metadata/annotations", notes)
}

/// A router that watches a fake server.
struct DiscoveryFixture {
    server: SharedServer,
    endpoints: EndpointRegistry,
    registry: Registry,
    cluster: Cluster,
    stop: CancellationToken,
}

impl DiscoveryFixture {
    async fn start(
        objects: Vec<Value>,
        change: impl FnOnce(&mut KubernetesConfig, &mut ApiServer, &EndpointRegistry),
    ) -> DiscoveryFixture {
        let mut server = ApiServer { objects, ..ApiServer::default() };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let mut config = KubernetesConfig {
            enabled: true,
            server: format!("http://{}", listener.local_addr().expect("is bound")),
            namespace: "llm".into(),
            selector: "app=vllm".into(),
            service: "vllm".into(),
            ..KubernetesConfig::default()
        };
        let endpoints = EndpointRegistry::default();
        change(&mut config, &mut server, &endpoints);
        assert_eq!(config.check(), Ok(()));
        let server = Arc::new(Mutex::new(server));
        let app = Router::new()
            .route("/api/v1/namespaces/llm/pods", get(answer))
            .route("/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices", get(answer))
            .with_state(Arc::clone(&server));
        tokio::spawn(async move { axum::serve(listener, app).await });
        let cluster = Cluster::start(1, |_| {}).await;
        let desk = cluster.routers[0].as_ref().expect("the router runs").handle();
        let (registry, stop) = (Registry::new(), CancellationToken::new());
        let metrics = DiscoveryMetrics::register(&registry).expect("a new registry");
        start(&config, &endpoints, &desk, metrics, &stop).await.expect("a server is configured");
        DiscoveryFixture { server, endpoints, registry, cluster, stop }
    }

    /// Endpoints as (instance, address, draining).
    fn known(&self) -> Vec<(u32, String, bool)> {
        let shown = |one: Arc<Endpoint>| (one.instance.0, one.authority.clone(), one.is_draining);
        self.endpoints.list().into_iter().map(shown).collect()
    }

    async fn until_known(&self, expected: &[(u32, &str, bool)]) {
        let expected: Vec<_> =
            expected.iter().map(|(instance, at, drains)| (*instance, (*at).to_owned(), *drains)).collect();
        let what = format!("{expected:?}");
        until(&what, || async { (self.known() == expected).then_some(()) }).await;
    }

    /// Sends a line to the newest watch.
    async fn send(&self, line: &str) {
        let watch = until("a watch", || async {
            self.server.lock().watches.last().filter(|watch| !watch.is_closed()).cloned()
        })
        .await;
        watch.send(Bytes::from(format!("{line}\n"))).await.expect("the watch is open");
    }

    /// Sends a bookmark, if the watch asked for bookmarks.
    async fn bookmark(&self, version: u64) {
        let asked = until("a watch", || async { self.server.lock().watched.last().cloned() }).await;
        if !asked.contains("allowWatchBookmarks=true") {
            return;
        }
        let metadata = json!({ "resourceVersion": version.to_string() });
        self.event("BOOKMARK", &json!({ "kind": "Pod", "apiVersion": "v1", "metadata": metadata })).await;
    }

    /// Cuts the watch, and waits for the next one.
    async fn cut_watch(&self) {
        let so_far = {
            let mut server = self.server.lock();
            server.watches.clear();
            server.watched.len()
        };
        until("another watch", || async { (self.server.lock().watched.len() > so_far).then_some(()) }).await;
    }

    /// Start versions of all watches, and the number of lists.
    fn requests(&self) -> (Vec<String>, usize) {
        let server = self.server.lock();
        let from = |query: &String| {
            let from = query.split('&').find_map(|pair| pair.strip_prefix("resourceVersion="));
            from.unwrap_or_default().to_owned()
        };
        (server.watched.iter().map(from).collect(), server.lists.len())
    }

    async fn event(&self, kind: &str, object: &Value) {
        self.send(&json!({ "type": kind, "object": object }).to_string()).await;
    }

    fn count(&self, name: &str) -> f64 {
        let families = self.registry.gather();
        let metric =
            families.iter().find(|family| family.name() == name).map(|family| family.get_metric()[0].clone());
        metric.map_or(0.0, |metric| metric.get_gauge().get_value() + metric.get_counter().get_value())
    }

    /// Waits for a value: endpoints are registered shortly before they are counted.
    async fn until_count(&self, name: &str, value: f64) {
        until(name, || async { (self.count(name) == value).then_some(()) }).await;
    }

    async fn end(self) {
        self.stop.cancel();
        self.cluster.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn follows_pod_changes() {
    let scene =
        DiscoveryFixture::start(vec![pod("vllm-0", "10.0.0.1")], |config, _, _| config.instance_base = 20)
            .await;
    scene.until_known(&[(20, "10.0.0.1:8000", false)]).await;
    let query = scene.server.lock().lists[0].clone();
    assert!(query.contains("labelSelector=app%3Dvllm"), "{query}");
    let second = pod("vllm-1", "10.0.0.2");
    scene.event("ADDED", &second).await;
    scene.until_known(&[(20, "10.0.0.1:8000", false), (21, "10.0.0.2:8000", false)]).await;
    let query = scene.server.lock().watched[0].clone();
    assert!(query.contains("resourceVersion=100") && query.contains("allowWatchBookmarks=true"), "{query}");
    let not_ready = with_value(second.clone(), "/status/conditions/0/status", json!("False"));
    scene.event("MODIFIED", &not_ready).await;
    scene.until_known(&[(20, "10.0.0.1:8000", false)]).await;
    scene.event("MODIFIED", &second).await;
    scene.until_known(&[(20, "10.0.0.1:8000", false), (21, "10.0.0.2:8000", false)]).await;
    let mut ends = second.clone();
    ends["metadata"]["deletionTimestamp"] = json!("2026-01-01T01:00:00Z");
    scene.event("MODIFIED", &ends).await;
    scene.until_known(&[(20, "10.0.0.1:8000", false), (21, "10.0.0.2:8000", true)]).await;
    scene.event("DELETED", &ends).await;
    scene.until_known(&[(20, "10.0.0.1:8000", false)]).await;
    assert_eq!(scene.count("kvfleet_gateway_discovery_up"), 1.0);
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resumes_a_watch_from_the_last_event_or_bookmark() {
    let (first, second) = (pod("vllm-0", "10.0.0.1"), pod("vllm-1", "10.0.0.2"));
    let scene = DiscoveryFixture::start(vec![first], |_, _, _| {}).await;
    scene.until_known(&[(0, "10.0.0.1:8000", false)]).await;
    scene.bookmark(250).await;
    scene.event("ADDED", &with_value(second, "/metadata/resourceVersion", json!("251"))).await;
    scene.until_known(&[(0, "10.0.0.1:8000", false), (1, "10.0.0.2:8000", false)]).await;
    scene.cut_watch().await;
    assert_eq!(
        scene.requests(),
        (vec!["100".into(), "251".into()], 1),
        "the event is later than the bookmark"
    );
    // The server expires the last event, but a bookmark has advanced the version.
    scene.bookmark(300).await;
    scene.server.lock().expired_below = 260;
    scene.cut_watch().await;
    let expected = ["100", "251", "300"].map(str::to_owned).to_vec();
    assert_eq!(scene.requests(), (expected, 1), "no second list");
    assert_eq!(scene.known().len(), 2);
    // The watch continues from the bookmark.
    scene.event("ADDED", &pod("vllm-2", "10.0.0.3")).await;
    scene
        .until_known(&[(0, "10.0.0.1:8000", false), (1, "10.0.0.2:8000", false), (2, "10.0.0.3:8000", false)])
        .await;
    assert_eq!(scene.count("kvfleet_gateway_discovery_failures_total"), 0.0);
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn relists_after_an_expired_watch() {
    for tells_by_status in [false, true] {
        println!("expired by status: {tells_by_status}");
        let (first, second) = (pod("vllm-0", "10.0.0.1"), pod("vllm-1", "10.0.0.2"));
        let scene = DiscoveryFixture::start(vec![first.clone(), second.clone()], |_, server, _| {
            server.expires_by_status = tells_by_status;
        })
        .await;
        scene.until_known(&[(0, "10.0.0.1:8000", false), (1, "10.0.0.2:8000", false)]).await;
        scene.bookmark(250).await;
        // While no watch was open, the first Pod was deleted and the second one changed its
        // address.
        {
            let mut server = scene.server.lock();
            server.objects = vec![with_value(second, "/status/podIP", json!("10.0.0.9"))];
            server.expired_below = 400;
        }
        scene.cut_watch().await;
        scene.until_known(&[(1, "10.0.0.9:8000", false)]).await;
        scene.event("ADDED", &first).await;
        scene.until_known(&[(0, "10.0.0.1:8000", false), (1, "10.0.0.9:8000", false)]).await;
        let expected = ["100", "250", "400"].map(str::to_owned).to_vec();
        assert_eq!(scene.requests(), (expected, 2));
        // An open watch may receive the error as well.
        scene.server.lock().objects = vec![first];
        scene.event("ERROR", &status(410, "too old resource version")).await;
        scene.until_known(&[(0, "10.0.0.1:8000", false)]).await;
        assert_eq!(scene.requests().1, 3);
        scene.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_events_remove_no_engine() {
    let scene = DiscoveryFixture::start(vec![pod("vllm-0", "10.0.0.1")], |_, _, _| {}).await;
    scene.until_known(&[(0, "10.0.0.1:8000", false)]).await;
    let wrong_types = with_value(pod("vllm-0", "10.0.0.1"), "/status/podIP", json!({ "a": 1 }));
    for line in ["{", "null", "{\"type\":\"RENAMED\",\"object\":{}}", "\u{0}\u{1}"] {
        scene.send(line).await;
    }
    scene.event("MODIFIED", &wrong_types).await;
    scene.event("ADDED", &pod("vllm-5", "10.0.0.5")).await;
    scene.until_known(&[(0, "10.0.0.1:8000", false), (5, "10.0.0.5:8000", false)]).await;
    assert!(scene.count("kvfleet_gateway_discovery_failures_total") > 0.0);
    scene.until_count("kvfleet_gateway_discovery_up", 1.0).await;
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retries_after_errors() {
    let forbidden = status(
        403,
        "pods is forbidden: User \"system:serviceaccount:llm:router\" cannot list resource \"pods\"",
    );
    let garbage = json!({ "items": 7 });
    let scene = DiscoveryFixture::start(vec![pod("vllm-0", "10.0.0.1")], |_, server, _| {
        server.replies = [(403, forbidden), (200, garbage), (500, status(500, "etcd is away"))].into();
    })
    .await;
    scene.until_known(&[(0, "10.0.0.1:8000", false)]).await;
    assert_eq!(scene.count("kvfleet_gateway_discovery_failures_total"), 3.0);
    assert_eq!(scene.server.lock().lists.len(), 4);
    scene.until_count("kvfleet_gateway_discovery_up", 1.0).await;
    scene.end().await;
}

#[test]
fn reports_lasting_outages_only() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let mut failing = OutageTracker::default();
    assert!(failing.record_failure(at(0)), "no list has succeeded");
    failing.record_success();
    assert!(!failing.record_failure(at(10)) && !failing.has_passed(at(20)));
    assert!(!failing.record_failure(at(35)));
    assert!(failing.record_failure(at(41)), "an outage of half a minute");
    assert!(!failing.has_passed(at(100)) && failing.has_passed(at(120)), "it passes silently");
    assert!(!failing.has_passed(at(130)), "once");
    for hour in 1..9 {
        assert!(!failing.record_failure(at(hour * 3_600)), "a separate failure");
    }
    failing.record_success();
    assert_eq!(failing, OutageTracker { outage: None, has_listed: true });
}

#[test]
fn explains_server_errors() {
    let said = |code: u16, message: &str| {
        let status: kube::core::Status = serde_json::from_value(status(code, message)).expect("a status");
        describe_error(&watcher::Error::InitialListFailed(kube::Error::Api(Box::new(status))), "pods", "llm")
    };
    let message =
        "pods is forbidden: User \"system:serviceaccount:llm:router\" cannot list resource \"pods\"";
    says("a cluster that forbids to list Pods", &said(403, message), &[]);
    says("a cluster that does not know who asks", &said(401, "Unauthorized"), &[]);
    says(
        "a cluster without the namespace",
        &said(404, "the server could not find the requested resource"),
        &[],
    );
    says("a cluster that has forgotten the watch", &said(410, "too old resource version: 1 (9)"), &[]);
    says("a cluster that fails", &said(500, "etcdserver: request timed out"), &[]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn assigns_unique_instance_numbers() {
    let alone = |name: &str, ip: &str| with_value(pod(name, ip), "/metadata/ownerReferences", json!([]));
    let late =
        with_value(pod("vllm-9", "10.0.0.9"), "/metadata/creationTimestamp", json!("2026-02-01T00:00:00Z"));
    let objects = vec![
        annotated(late, json!({ "kvfleet.io/instance": "3" })),
        pod("vllm-3", "10.0.0.3"),
        alone("vllm-a", "fd00::1"),
        annotated(alone("b", "10.0.0.4"), json!({ "kvfleet.io/instance": "four" })),
        with_value(pod("vllm-5", "10.0.0.5"), "/spec/containers/0/ports/0/name", json!("web")),
        annotated(pod("vllm-6", "10.0.0.6"), json!({ "kvfleet.io/fetches": "yes" })),
        pod("vllm-7", "10.0.0.7"),
        with_value(pod("vllm-8", "10.0.0.8"), "/status/phase", json!("Failed")),
        with_value(pod("vllm-10", ""), "/status/phase", json!("Pending")),
    ];
    let scene = DiscoveryFixture::start(objects, |_, _, endpoints| {
        let (instance, authority) = (InstanceId(7), "10.9.9.9:1".to_owned());
        endpoints.put(Endpoint {
            instance,
            authority,
            is_tls: false,
            fetches: false,
            role: kv_core::schedule::InstanceRole::Both,
            place: String::new(),
            is_draining: false,
            origin: super::super::Origin::Admin,
        });
    })
    .await;
    let hashed = instance_number::from_identifier("uid-vllm-a");
    scene
        .until_known(&[
            (3, "10.0.0.3:8000", false),
            (7, "10.9.9.9:1", false),
            (hashed, "[fd00::1]:8000", false),
        ])
        .await;
    scene.until_count("kvfleet_gateway_discovery_skipped", 5.0).await;
    // After the conflicting endpoint is removed, the engine is registered without a new event.
    scene.endpoints.remove(InstanceId(7));
    scene
        .until_known(&[
            (3, "10.0.0.3:8000", false),
            (7, "10.0.0.7:8000", false),
            (hashed, "[fd00::1]:8000", false),
        ])
        .await;
    scene.until_count("kvfleet_gateway_discovery_skipped", 4.0).await;
    scene.end().await;
}

#[test]
fn ranks_with_own_ports_are_engines() {
    let read = |notes: Value| {
        let object: Pod = serde_json::from_value(annotated(pod("vllm-3", "10.0.0.1"), notes)).expect("a Pod");
        let found = objects::read_pod(&object, &KubernetesConfig::default());
        found.into_iter().map(|found| (found.name, found.engine)).collect::<Vec<_>>()
    };
    let all = read(
        json!({ "kvfleet.io/events-port": "5557", "kvfleet.io/ranks": "3", "kvfleet.io/rank-ports": "true" }),
    );
    let at = |engine: &Result<objects::EngineSpec, String>| {
        let engine = engine.as_ref().expect("the engine is valid");
        (engine.instance, engine.authority.clone(), engine.events.as_ref().map(|events| events.ranks))
    };
    let at: Vec<_> = all.iter().map(|(_, engine)| at(engine)).collect();
    let expected = [(9, "10.0.0.1:8000", Some(3)), (10, "10.0.0.1:8001", None), (11, "10.0.0.1:8002", None)];
    assert_eq!(at, expected.map(|(instance, at, ranks)| (instance, at.to_owned(), ranks)));
    assert!(all[1].0.starts_with("rank 1 of Pod "), "{all:?}");
    assert_eq!(read(json!({ "kvfleet.io/ranks": "3" })).len(), 1, "one port serves all ranks");
    let wrong = read(json!({ "kvfleet.io/ranks": "3", "kvfleet.io/rank-ports": "maybe" }));
    assert!(wrong[0].1.is_ok() && wrong[1].1.is_err(), "{wrong:?}");
    let many = read(json!({ "kvfleet.io/ranks": "65000", "kvfleet.io/rank-ports": "true" }));
    assert!(many.len() <= 1_025 && many.iter().all(|(_, engine)| engine.is_ok()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn follows_events_while_the_pod_exists() {
    let notes = json!({ "kvfleet.io/events-port": "5557", "kvfleet.io/replay-port": "5657", "kvfleet.io/ranks": "2" });
    let engine = annotated(pod("vllm-4", "127.0.0.1"), notes);
    let scene = DiscoveryFixture::start(vec![engine.clone()], |_, _, _| {}).await;
    let desk = scene.cluster.routers[0].as_ref().expect("the router runs").handle();
    until("its events", || async { desk.follows(8).then_some(()) }).await;
    scene.event("MODIFIED", &with_value(engine.clone(), "/status/conditions/0/status", json!("False"))).await;
    scene.until_known(&[]).await;
    assert!(desk.follows(8), "it exists, although it is not ready");
    let other = annotated(pod("vllm-9", "127.0.0.1"), json!({ "kvfleet.io/events-port": "5557" }));
    scene.event("ADDED", &other).await;
    scene.until_count("kvfleet_gateway_discovery_skipped", 1.0).await;
    assert!(!desk.follows(9));
    scene.event("DELETED", &engine).await;
    until("the other's events", || async { (desk.follows(9) && !desk.follows(8)).then_some(()) }).await;
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn explains_invalid_objects() {
    let cluster = Cluster::start(1, |_| {}).await;
    let desk = cluster.routers[0].as_ref().expect("the router runs").handle();
    let mut roster = DiscoveredEndpoints::new(EndpointRegistry::default(), EngineEvents::new(desk));
    let mut problem = |objects: &[Value]| {
        roster.start_list();
        for object in objects {
            let object: Pod = serde_json::from_value(object.clone()).expect("a Pod");
            roster.add_to_list(object.name_any(), objects::read_pod(&object, &KubernetesConfig::default()));
        }
        roster.finish_list();
        roster.reconcile();
        roster.problems().join("; ")
    };
    let noted = |key: &str, value: &str| annotated(pod("vllm-0", "10.0.0.1"), json!({ key: value }));
    says("a Pod with an instance that is no number", &problem(&[noted("kvfleet.io/instance", "first")]), &[]);
    says("a Pod with a port that is none", &problem(&[noted("kvfleet.io/events-port", "0")]), &[]);
    says("a Pod with a word for yes", &problem(&[noted("kvfleet.io/fetches", "yes")]), &[]);
    says("a Pod with a role that is none", &problem(&[noted("kvfleet.io/role", "prefiller")]), &[]);
    says("a Pod at a place that is none", &problem(&[noted("kvfleet.io/place", "a//b")]), &[]);
    says("a Pod with an unknown dialect", &problem(&[noted("kvfleet.io/dialect", "trtllm")]), &[]);
    let unnamed = with_value(pod("vllm-0", "10.0.0.1"), "/spec/containers/0/ports/0/name", json!("web"));
    says("a Pod without the port", &problem(&[unnamed]), &[]);
    let same = [pod("vllm-1", "10.0.0.1"), noted("kvfleet.io/instance", "1")];
    says("two Pods with one instance", &problem(&same), &[]);
    let ranks = json!({ "kvfleet.io/events-port": "65535", "kvfleet.io/ranks": "2" });
    let events = problem(&[annotated(pod("vllm-0", "10.0.0.1"), ranks)]);
    says("a Pod whose events have no ports", &events, &[]);
    assert_eq!(problem(&[pod("vllm-0", "10.0.0.1")]), "");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_endpoint_slices() {
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": { "name": "vllm-x", "namespace": "llm", "resourceVersion": "7",
           "creationTimestamp": "2026-01-01T00:00:00Z" },
        "ports": [{ "name": "http", "port": 8000, "protocol": "TCP" }],
        "endpoints": [
            { "addresses": ["10.0.0.1"], "hostname": "vllm-4", "conditions": { "ready": true },
               "targetRef": { "kind": "Pod", "name": "vllm-4", "uid": "u4" } },
            { "addresses": ["10.0.0.2"], "conditions": { "ready": true },
               "targetRef": { "kind": "Pod", "name": "x", "uid": "ux" } },
            { "addresses": ["10.0.0.3"], "hostname": "vllm-6",
               "conditions": { "ready": false, "serving": true, "terminating": true } },
            { "addresses": ["10.0.0.4"], "hostname": "vllm-7", "conditions": { "ready": false } },
        ],
    });
    let mut other = with_value(slice.clone(), "/metadata/name", json!("vllm-z"));
    other["endpoints"] = json!([{
            "addresses": ["fd00::2"], "hostname": "vllm-4",
            "targetRef": { "kind": "Pod", "name": "vllm-4", "uid": "u4" } }]);
    let scene = DiscoveryFixture::start(vec![slice.clone(), other], |config, _, _| {
        config.kind = DiscoveredKind::EndpointSlices;
    })
    .await;
    let hashed = instance_number::from_identifier("ux");
    scene
        .until_known(&[
            (4, "10.0.0.1:8000", false),
            (6, "10.0.0.3:8000", true),
            (hashed, "10.0.0.2:8000", false),
        ])
        .await;
    let query = scene.server.lock().lists[0].clone();
    assert!(query.contains("service-name%3Dvllm"), "{query}");
    assert_eq!(scene.count("kvfleet_gateway_discovery_skipped"), 0.0, "a Pod in two slices counts once");
    let fewer = with_value(slice, "/endpoints", json!([]));
    scene.event("MODIFIED", &fewer).await;
    scene.until_known(&[(4, "[fd00::2]:8000", false)]).await;
    scene.end().await;
}

#[tokio::test]
async fn explains_a_missing_cluster() {
    let refused = |change: fn(&mut KubernetesConfig)| {
        let mut config =
            KubernetesConfig { enabled: true, selector: "a=b".into(), ..KubernetesConfig::default() };
        assert_eq!(config.check(), Ok(()));
        change(&mut config);
        config.check().expect_err("must be refused").to_string()
    };
    says("Kubernetes without a selector", &refused(|config| config.selector.clear()), &[]);
    says(
        "Kubernetes without a Service",
        &refused(|config| config.kind = DiscoveredKind::EndpointSlices),
        &[],
    );
    says("Kubernetes without a port's name", &refused(|config| config.port_name.clear()), &[]);
    says("Kubernetes at no URL", &refused(|config| config.server = "https://10.0.0.1:6443".into()), &[]);
    let found = Config::infer().await;
    let Err(error) = found else {
        return println!("a cluster is configured here: the error without one is not tested");
    };
    let problem = error.to_string();
    let error = KubernetesError::NoCluster { problem: problem.clone() };
    says("Kubernetes where there is none", &error, &[&problem]);
}
