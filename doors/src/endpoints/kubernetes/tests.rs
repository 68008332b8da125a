//! A server that speaks as a Kubernetes API server does, and what a router makes of it.

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
use crate::harness::{Cluster, until};

/// What the server has, and who watches.
#[derive(Default)]
struct Server {
    objects: Vec<Value>,
    /// Answers in place of lists, first to last.
    instead: VecDeque<(u16, Value)>,
    watches: Vec<mpsc::Sender<Bytes>>,
    /// It forgot what was before this version: who watches from there is told so, by the status of the answer or in it.
    forgotten: u64,
    tells_by_status: bool,
    /// Queries of lists and of watches.
    lists: Vec<String>,
    watched: Vec<String>,
}

type Shared = Arc<Mutex<Server>>;

async fn answer(State(server): State<Shared>, RawQuery(query): RawQuery) -> Response {
    let (query, mut server) = (query.unwrap_or_default(), server.lock());
    if query.contains("watch=true") {
        let from = query.split('&').find_map(|pair| pair.strip_prefix("resourceVersion="));
        let from: u64 = from.and_then(|from| from.parse().ok()).expect("a watch begins somewhere");
        server.watched.push(query);
        let (sender, receiver) = mpsc::channel(64);
        if from < server.forgotten {
            let gone = status(410, "too old resource version");
            if server.tells_by_status {
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
    if let Some((code, body)) = server.instead.pop_front() {
        return (StatusCode::from_u16(code).expect("a status"), body.to_string()).into_response();
    }
    let version = server.forgotten.max(100).to_string();
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
    json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message, "reason": reason, "code": code })
}

/// A Pod that takes requests.
fn made(name: &str, ip: &str) -> Value {
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

fn with(mut object: Value, path: &str, value: Value) -> Value {
    *object.pointer_mut(path).expect("is there") = value;
    object
}

fn annotated(object: Value, notes: Value) -> Value {
    with(object, "/metadata/annotations", notes)
}

/// A router that watches a server.
struct Scene {
    server: Shared,
    endpoints: Endpoints,
    registry: Registry,
    cluster: Cluster,
    stop: CancellationToken,
}

impl Scene {
    async fn start(
        objects: Vec<Value>,
        change: impl FnOnce(&mut KubernetesConfig, &mut Server, &Endpoints),
    ) -> Scene {
        let mut server = Server { objects, ..Server::default() };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let mut config = KubernetesConfig {
            enabled: true,
            server: format!("http://{}", listener.local_addr().expect("is bound")),
            namespace: "llm".into(),
            selector: "app=vllm".into(),
            service: "vllm".into(),
            ..KubernetesConfig::default()
        };
        let endpoints = Endpoints::default();
        change(&mut config, &mut server, &endpoints);
        assert_eq!(config.check(), Ok(()));
        let server = Arc::new(Mutex::new(server));
        let app = Router::new()
            .route("/api/v1/namespaces/llm/pods", get(answer))
            .route("/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices", get(answer))
            .with_state(Arc::clone(&server));
        tokio::spawn(async move { axum::serve(listener, app).await });
        let cluster = Cluster::start(1, |_| {}).await;
        let desk = cluster.routers[0].as_ref().expect("it runs").desk();
        let (registry, stop) = (Registry::new(), CancellationToken::new());
        let metrics = DiscoveryMetrics::register(&registry).expect("a new registry");
        open(&config, &endpoints, &desk, metrics, &stop).await.expect("a server is given");
        Scene { server, endpoints, registry, cluster, stop }
    }

    /// Engines as (instance, address, drains).
    fn known(&self) -> Vec<(u32, String, bool)> {
        let shown = |one: Arc<Endpoint>| (one.instance.0, one.authority.clone(), one.draining);
        self.endpoints.list().into_iter().map(shown).collect()
    }

    async fn comes_to(&self, expected: &[(u32, &str, bool)]) {
        let expected: Vec<_> =
            expected.iter().map(|(instance, at, drains)| (*instance, (*at).to_owned(), *drains)).collect();
        let what = format!("{expected:?}");
        until(&what, || async { (self.known() == expected).then_some(()) }).await;
    }

    /// Sends a line to the watch that is newest.
    async fn send(&self, line: &str) {
        let watch = until("a watch", || async {
            self.server.lock().watches.last().filter(|watch| !watch.is_closed()).cloned()
        })
        .await;
        watch.send(Bytes::from(format!("{line}\n"))).await.expect("it watches");
    }

    /// Tells nothing but how far the watch is, as a server does where nothing that is watched changes; but only who asked for that.
    async fn bookmark(&self, version: u64) {
        let asked = until("a watch", || async { self.server.lock().watched.last().cloned() }).await;
        if !asked.contains("allowWatchBookmarks=true") {
            return;
        }
        let metadata = json!({ "resourceVersion": version.to_string() });
        self.event("BOOKMARK", &json!({ "kind": "Pod", "apiVersion": "v1", "metadata": metadata })).await;
    }

    /// Cuts the connection behind what was sent, and waits until somebody watches again.
    async fn cut(&self) {
        let so_far = {
            let mut server = self.server.lock();
            server.watches.clear();
            server.watched.len()
        };
        until("another watch", || async { (self.server.lock().watched.len() > so_far).then_some(()) }).await;
    }

    /// From which versions watches began so far, and how often everything was listed.
    fn asked(&self) -> (Vec<String>, usize) {
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

    /// Waits until it is this: engines are known a moment before they are counted.
    async fn counts(&self, name: &str, value: f64) {
        until(name, || async { (self.count(name) == value).then_some(()) }).await;
    }

    async fn end(self) {
        self.stop.cancel();
        self.cluster.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_come_and_go_as_kubernetes_says() {
    let scene =
        Scene::start(vec![made("vllm-0", "10.0.0.1")], |config, _, _| config.instance_base = 20).await;
    scene.comes_to(&[(20, "10.0.0.1:8000", false)]).await;
    let query = scene.server.lock().lists[0].clone();
    assert!(query.contains("labelSelector=app%3Dvllm"), "{query}");
    let second = made("vllm-1", "10.0.0.2");
    scene.event("ADDED", &second).await;
    scene.comes_to(&[(20, "10.0.0.1:8000", false), (21, "10.0.0.2:8000", false)]).await;
    let query = scene.server.lock().watched[0].clone();
    assert!(query.contains("resourceVersion=100") && query.contains("allowWatchBookmarks=true"), "{query}");
    let not_ready = with(second.clone(), "/status/conditions/0/status", json!("False"));
    scene.event("MODIFIED", &not_ready).await;
    scene.comes_to(&[(20, "10.0.0.1:8000", false)]).await;
    scene.event("MODIFIED", &second).await;
    scene.comes_to(&[(20, "10.0.0.1:8000", false), (21, "10.0.0.2:8000", false)]).await;
    let mut ends = second.clone();
    ends["metadata"]["deletionTimestamp"] = json!("2026-01-01T01:00:00Z");
    scene.event("MODIFIED", &ends).await;
    scene.comes_to(&[(20, "10.0.0.1:8000", false), (21, "10.0.0.2:8000", true)]).await;
    scene.event("DELETED", &ends).await;
    scene.comes_to(&[(20, "10.0.0.1:8000", false)]).await;
    assert_eq!(scene.count("kvfleet_doors_discovery_up"), 1.0);
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_that_ends_goes_on_from_its_last_event_or_from_the_bookmark_behind_it() {
    let (first, second) = (made("vllm-0", "10.0.0.1"), made("vllm-1", "10.0.0.2"));
    let scene = Scene::start(vec![first], |_, _, _| {}).await;
    scene.comes_to(&[(0, "10.0.0.1:8000", false)]).await;
    scene.bookmark(250).await;
    scene.event("ADDED", &with(second, "/metadata/resourceVersion", json!("251"))).await;
    scene.comes_to(&[(0, "10.0.0.1:8000", false), (1, "10.0.0.2:8000", false)]).await;
    scene.cut().await;
    assert_eq!(scene.asked(), (vec!["100".into(), "251".into()], 1), "the event is later than the bookmark");
    // Hours pass without an event: the server forgets the last one, and has told how far the watch is.
    scene.bookmark(300).await;
    scene.server.lock().forgotten = 260;
    scene.cut().await;
    let expected = ["100", "251", "300"].map(str::to_owned).to_vec();
    assert_eq!(scene.asked(), (expected, 1), "nothing is listed again");
    assert_eq!(scene.known().len(), 2);
    // It goes on from there, and without a bookmark of its own it has none to begin again from but that.
    scene.event("ADDED", &made("vllm-2", "10.0.0.3")).await;
    scene
        .comes_to(&[(0, "10.0.0.1:8000", false), (1, "10.0.0.2:8000", false), (2, "10.0.0.3:8000", false)])
        .await;
    assert_eq!(scene.count("kvfleet_doors_discovery_failures_total"), 0.0);
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_the_server_has_forgotten_the_watch_everything_is_listed_again() {
    for tells_by_status in [false, true] {
        println!("told by the status of the answer: {tells_by_status}");
        let (first, second) = (made("vllm-0", "10.0.0.1"), made("vllm-1", "10.0.0.2"));
        let scene = Scene::start(vec![first.clone(), second.clone()], |_, server, _| {
            server.tells_by_status = tells_by_status;
        })
        .await;
        scene.comes_to(&[(0, "10.0.0.1:8000", false), (1, "10.0.0.2:8000", false)]).await;
        scene.bookmark(250).await;
        // While nobody watched, the first went and the second got another address.
        {
            let mut server = scene.server.lock();
            server.objects = vec![with(second, "/status/podIP", json!("10.0.0.9"))];
            server.forgotten = 400;
        }
        scene.cut().await;
        scene.comes_to(&[(1, "10.0.0.9:8000", false)]).await;
        scene.event("ADDED", &first).await;
        scene.comes_to(&[(0, "10.0.0.1:8000", false), (1, "10.0.0.9:8000", false)]).await;
        let expected = ["100", "250", "400"].map(str::to_owned).to_vec();
        assert_eq!(scene.asked(), (expected, 2));
        // A watch that stands may be told so too.
        scene.server.lock().objects = vec![first];
        scene.event("ERROR", &status(410, "too old resource version")).await;
        scene.comes_to(&[(0, "10.0.0.1:8000", false)]).await;
        assert_eq!(scene.asked().1, 3);
        scene.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_that_cannot_be_read_take_nobody_away() {
    let scene = Scene::start(vec![made("vllm-0", "10.0.0.1")], |_, _, _| {}).await;
    scene.comes_to(&[(0, "10.0.0.1:8000", false)]).await;
    let wrong_types = with(made("vllm-0", "10.0.0.1"), "/status/podIP", json!({ "a": 1 }));
    for line in ["{", "null", "{\"type\":\"RENAMED\",\"object\":{}}", "\u{0}\u{1}"] {
        scene.send(line).await;
    }
    scene.event("MODIFIED", &wrong_types).await;
    scene.event("ADDED", &made("vllm-5", "10.0.0.5")).await;
    scene.comes_to(&[(0, "10.0.0.1:8000", false), (5, "10.0.0.5:8000", false)]).await;
    assert!(scene.count("kvfleet_doors_discovery_failures_total") > 0.0);
    scene.counts("kvfleet_doors_discovery_up", 1.0).await;
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_refuses_is_asked_again() {
    let forbidden = status(
        403,
        "pods is forbidden: User \"system:serviceaccount:llm:router\" cannot list resource \"pods\"",
    );
    let garbage = json!({ "items": 7 });
    let scene = Scene::start(vec![made("vllm-0", "10.0.0.1")], |_, server, _| {
        server.instead = [(403, forbidden), (200, garbage), (500, status(500, "etcd is away"))].into();
    })
    .await;
    scene.comes_to(&[(0, "10.0.0.1:8000", false)]).await;
    assert_eq!(scene.count("kvfleet_doors_discovery_failures_total"), 3.0);
    assert_eq!(scene.server.lock().lists.len(), 4);
    scene.counts("kvfleet_doors_discovery_up", 1.0).await;
    scene.end().await;
}

#[test]
fn passing_failures_say_nothing_and_lasting_ones_do_until_they_are_over() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let mut failing = Failing::default();
    assert!(failing.failed(at(0)), "nothing was ever listed");
    failing.told();
    assert!(!failing.failed(at(10)) && !failing.is_over(at(20)));
    assert!(!failing.failed(at(35)));
    assert!(failing.failed(at(41)), "for half a minute");
    assert!(!failing.is_over(at(100)) && failing.is_over(at(120)), "it goes on without a word");
    assert!(!failing.is_over(at(130)), "once");
    for hour in 1..9 {
        assert!(!failing.failed(at(hour * 3_600)), "each is another one");
    }
    failing.told();
    assert_eq!(failing, Failing { since: None, has_listed: true });
}

#[test]
fn what_a_server_refuses_is_said_with_what_to_do() {
    let said = |code: u16, message: &str| {
        let status: kube::core::Status = serde_json::from_value(status(code, message)).expect("a status");
        words(&watcher::Error::InitialListFailed(kube::Error::Api(Box::new(status))), "pods", "llm")
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
async fn numbers_come_from_annotations_sets_and_identifiers_and_no_two_are_the_same() {
    let alone = |name: &str, ip: &str| with(made(name, ip), "/metadata/ownerReferences", json!([]));
    let late = with(made("vllm-9", "10.0.0.9"), "/metadata/creationTimestamp", json!("2026-02-01T00:00:00Z"));
    let objects = vec![
        annotated(late, json!({ "kvfleet.io/instance": "3" })),
        made("vllm-3", "10.0.0.3"),
        alone("vllm-a", "fd00::1"),
        annotated(alone("b", "10.0.0.4"), json!({ "kvfleet.io/instance": "four" })),
        with(made("vllm-5", "10.0.0.5"), "/spec/containers/0/ports/0/name", json!("web")),
        annotated(made("vllm-6", "10.0.0.6"), json!({ "kvfleet.io/fetches": "yes" })),
        made("vllm-7", "10.0.0.7"),
        with(made("vllm-8", "10.0.0.8"), "/status/phase", json!("Failed")),
        with(made("vllm-10", ""), "/status/phase", json!("Pending")),
    ];
    let scene = Scene::start(objects, |_, _, endpoints| {
        let (instance, authority) = (InstanceId(7), "10.9.9.9:1".to_owned());
        endpoints.put(Endpoint {
            instance,
            authority,
            fetches: false,
            role: kv_core::schedule::Role::Both,
            place: String::new(),
            draining: false,
            origin: super::super::Origin::Called,
        });
    })
    .await;
    let hashed = number::hashed("uid-vllm-a");
    scene
        .comes_to(&[(3, "10.0.0.3:8000", false), (7, "10.9.9.9:1", false), (hashed, "[fd00::1]:8000", false)])
        .await;
    scene.counts("kvfleet_doors_discovery_left_out", 5.0).await;
    // Whoever had its number goes, and it is taken in without a word of Kubernetes.
    scene.endpoints.remove(InstanceId(7));
    scene
        .comes_to(&[
            (3, "10.0.0.3:8000", false),
            (7, "10.0.0.7:8000", false),
            (hashed, "[fd00::1]:8000", false),
        ])
        .await;
    scene.counts("kvfleet_doors_discovery_left_out", 4.0).await;
    scene.end().await;
}

#[test]
fn ranks_with_ports_of_their_own_are_engines_of_their_own() {
    let read = |notes: Value| {
        let object: Pod =
            serde_json::from_value(annotated(made("vllm-3", "10.0.0.1"), notes)).expect("a Pod");
        let found = read::single(&object, &KubernetesConfig::default());
        found.into_iter().map(|found| (found.name, found.engine)).collect::<Vec<_>>()
    };
    let all = read(
        json!({ "kvfleet.io/events-port": "5557", "kvfleet.io/ranks": "3", "kvfleet.io/rank-ports": "true" }),
    );
    let at = |engine: &Result<read::Engine, String>| {
        let engine = engine.as_ref().expect("it is as it should be");
        (engine.instance, engine.authority.clone(), engine.events.as_ref().map(|events| events.ranks))
    };
    let at: Vec<_> = all.iter().map(|(_, engine)| at(engine)).collect();
    let expected = [(9, "10.0.0.1:8000", Some(3)), (10, "10.0.0.1:8001", None), (11, "10.0.0.1:8002", None)];
    assert_eq!(at, expected.map(|(instance, at, ranks)| (instance, at.to_owned(), ranks)));
    assert!(all[1].0.starts_with("rank 1 of Pod "), "{all:?}");
    assert_eq!(read(json!({ "kvfleet.io/ranks": "3" })).len(), 1, "one port takes requests for all of them");
    let wrong = read(json!({ "kvfleet.io/ranks": "3", "kvfleet.io/rank-ports": "maybe" }));
    assert!(wrong[0].1.is_ok() && wrong[1].1.is_err(), "{wrong:?}");
    let many = read(json!({ "kvfleet.io/ranks": "65000", "kvfleet.io/rank-ports": "true" }));
    assert!(many.len() <= 1_025 && many.iter().all(|(_, engine)| engine.is_ok()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_of_engines_are_followed_while_they_are_there() {
    let notes = json!({ "kvfleet.io/events-port": "5557", "kvfleet.io/replay-port": "5657", "kvfleet.io/ranks": "2" });
    let engine = annotated(made("vllm-4", "127.0.0.1"), notes);
    let scene = Scene::start(vec![engine.clone()], |_, _, _| {}).await;
    let desk = scene.cluster.routers[0].as_ref().expect("it runs").desk();
    until("its events", || async { desk.follows(8).then_some(()) }).await;
    scene.event("MODIFIED", &with(engine.clone(), "/status/conditions/0/status", json!("False"))).await;
    scene.comes_to(&[]).await;
    assert!(desk.follows(8), "it is there, though not ready");
    let other = annotated(made("vllm-9", "127.0.0.1"), json!({ "kvfleet.io/events-port": "5557" }));
    scene.event("ADDED", &other).await;
    scene.counts("kvfleet_doors_discovery_left_out", 1.0).await;
    assert!(!desk.follows(9));
    scene.event("DELETED", &engine).await;
    until("the other's events", || async { (desk.follows(9) && !desk.follows(8)).then_some(()) }).await;
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_wrong_with_an_object_is_said() {
    let cluster = Cluster::start(1, |_| {}).await;
    let desk = cluster.routers[0].as_ref().expect("it runs").desk();
    let mut roster = Roster::new(Endpoints::default(), Events::new(desk));
    let mut problem = |objects: &[Value]| {
        roster.begin();
        for object in objects {
            let object: Pod = serde_json::from_value(object.clone()).expect("a Pod");
            roster.begun_with(object.name_any(), read::single(&object, &KubernetesConfig::default()));
        }
        roster.done();
        roster.settle();
        roster.problems().join("; ")
    };
    let noted = |key: &str, value: &str| annotated(made("vllm-0", "10.0.0.1"), json!({ key: value }));
    says("a Pod with an instance that is no number", &problem(&[noted("kvfleet.io/instance", "first")]), &[]);
    says("a Pod with a port that is none", &problem(&[noted("kvfleet.io/events-port", "0")]), &[]);
    says("a Pod with a word for yes", &problem(&[noted("kvfleet.io/fetches", "yes")]), &[]);
    says("a Pod with a role that is none", &problem(&[noted("kvfleet.io/role", "prefiller")]), &[]);
    says("a Pod at a place that is none", &problem(&[noted("kvfleet.io/place", "a//b")]), &[]);
    says("a Pod with an unknown dialect", &problem(&[noted("kvfleet.io/dialect", "trtllm")]), &[]);
    let unnamed = with(made("vllm-0", "10.0.0.1"), "/spec/containers/0/ports/0/name", json!("web"));
    says("a Pod without the port", &problem(&[unnamed]), &[]);
    let same = [made("vllm-1", "10.0.0.1"), noted("kvfleet.io/instance", "1")];
    says("two Pods with one instance", &problem(&same), &[]);
    let ranks = json!({ "kvfleet.io/events-port": "65535", "kvfleet.io/ranks": "2" });
    let events = problem(&[annotated(made("vllm-0", "10.0.0.1"), ranks)]);
    says("a Pod whose events have no ports", &events, &[]);
    assert_eq!(problem(&[made("vllm-0", "10.0.0.1")]), "");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slices_of_a_service_are_engines_too() {
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": { "name": "vllm-x", "namespace": "llm", "resourceVersion": "7", "creationTimestamp": "2026-01-01T00:00:00Z" },
        "ports": [{ "name": "http", "port": 8000, "protocol": "TCP" }],
        "endpoints": [
            { "addresses": ["10.0.0.1"], "hostname": "vllm-4", "conditions": { "ready": true }, "targetRef": { "kind": "Pod", "name": "vllm-4", "uid": "u4" } },
            { "addresses": ["10.0.0.2"], "conditions": { "ready": true }, "targetRef": { "kind": "Pod", "name": "x", "uid": "ux" } },
            { "addresses": ["10.0.0.3"], "hostname": "vllm-6", "conditions": { "ready": false, "serving": true, "terminating": true } },
            { "addresses": ["10.0.0.4"], "hostname": "vllm-7", "conditions": { "ready": false } },
        ],
    });
    let mut other = with(slice.clone(), "/metadata/name", json!("vllm-z"));
    other["endpoints"] = json!([{ "addresses": ["fd00::2"], "hostname": "vllm-4", "targetRef": { "kind": "Pod", "name": "vllm-4", "uid": "u4" } }]);
    let scene =
        Scene::start(vec![slice.clone(), other], |config, _, _| config.kind = DiscoveredKind::EndpointSlices)
            .await;
    let hashed = number::hashed("ux");
    scene
        .comes_to(&[
            (4, "10.0.0.1:8000", false),
            (6, "10.0.0.3:8000", true),
            (hashed, "10.0.0.2:8000", false),
        ])
        .await;
    let query = scene.server.lock().lists[0].clone();
    assert!(query.contains("service-name%3Dvllm"), "{query}");
    assert_eq!(scene.count("kvfleet_doors_discovery_left_out"), 0.0, "one Pod in two slices is one");
    let fewer = with(slice, "/endpoints", json!([]));
    scene.event("MODIFIED", &fewer).await;
    scene.comes_to(&[(4, "[fd00::2]:8000", false)]).await;
    scene.end().await;
}

#[tokio::test]
async fn without_a_cluster_it_is_said_what_to_set() {
    let refused = |change: fn(&mut KubernetesConfig)| {
        let mut config =
            KubernetesConfig { enabled: true, selector: "a=b".into(), ..KubernetesConfig::default() };
        assert_eq!(config.check(), Ok(()));
        change(&mut config);
        config.check().expect_err("is refused").to_string()
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
        return println!("a cluster is configured here: what is said without one is not looked at");
    };
    let problem = error.to_string();
    let error = KubernetesError::NoCluster { problem: problem.clone() };
    says("Kubernetes where there is none", &error, &[&problem]);
}
