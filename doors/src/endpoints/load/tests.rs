//! Engines that are asked, through a whole router: an HTTP server stands for the engine.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use kvfleet_errors_doc::says;
use kvfleet_proto::pb;
use parking_lot::Mutex;
use prometheus::Registry;

use super::*;
use crate::endpoints::{Endpoint, Origin, Standing};
use crate::harness::{Cluster, until};
use crate::ports::unused_address;

/// What an engine answers.
#[derive(Clone, Debug)]
struct Says {
    metrics: String,
    status: StatusCode,
    health: StatusCode,
    is_endless: bool,
    /// What it says of itself, and at which paths it does.
    info: String,
    info_at: &'static [&'static str],
    /// Paths that it was asked for besides its load and its health, in order.
    asked: Vec<String>,
}

/// Where an SGLang says where its events are, and where its releases before did; those of between know both.
const INFO: [&str; 2] = ["/server_info", "/get_server_info"];

impl Default for Says {
    fn default() -> Self {
        Says {
            metrics: load(0, 0, 1),
            status: StatusCode::OK,
            health: StatusCode::OK,
            is_endless: false,
            info: String::new(),
            info_at: &INFO,
            asked: Vec::new(),
        }
    }
}

fn load(running: u32, waiting: u32, started: u32) -> String {
    format!(
        "vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\nvllm:request_prompt_tokens_sum 300\n\
         vllm:request_prompt_tokens_count 3\nprocess_start_time_seconds {started}\n"
    )
}

/// A server in place of an engine, with threads of its own: dropped, it is gone with all its connections, like a process.
struct Engine {
    address: SocketAddr,
    says: Arc<Mutex<Says>>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Engine {
    async fn start(address: &str) -> Engine {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a thread");
        let listener = std::net::TcpListener::bind(address).expect("a free port");
        listener.set_nonblocking(true).expect("a socket");
        let (address, says) =
            (listener.local_addr().expect("is bound"), Arc::new(Mutex::new(Says::default())));
        let app = Router::new()
            .route("/metrics", get(metrics))
            .route("/health", get(async |State(says): State<Arc<Mutex<Says>>>| says.lock().health))
            .fallback(other)
            .with_state(Arc::clone(&says));
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).expect("a socket");
            axum::serve(listener, app).await
        });
        Engine { address, says, runtime: Some(runtime) }
    }

    fn say(&self, change: impl FnOnce(&mut Says)) {
        change(&mut self.says.lock());
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn metrics(State(says): State<Arc<Mutex<Says>>>) -> Response {
    let says = says.lock().clone();
    if says.is_endless {
        let line = bytes::Bytes::from("a 1\n".repeat(16_384));
        let lines = tokio_stream::iter(std::iter::repeat_with(move || Ok::<_, std::io::Error>(line.clone())));
        return Body::from_stream(lines).into_response();
    }
    (says.status, says.metrics).into_response()
}

/// Whatever else it is asked, a path that is misspelled too.
async fn other(State(says): State<Arc<Mutex<Says>>>, uri: Uri) -> Response {
    let mut says = says.lock();
    says.asked.push(uri.path().to_owned());
    match says.info_at.contains(&uri.path()) {
        true => says.info.clone().into_response(),
        false => StatusCode::NOT_FOUND.into_response(),
    }
}

/// A router, and endpoints whose load it hears.
struct Scene {
    cluster: Cluster,
    desk: Desk,
    endpoints: Endpoints,
    registry: Registry,
    stop: CancellationToken,
}

const INSTANCE: InstanceId = InstanceId(4);

fn quick() -> LoadConfig {
    LoadConfig { every_ms: 20, health_every_ms: 20, ..LoadConfig::default() }
}

impl Scene {
    async fn start(config: &LoadConfig) -> Scene {
        let cluster = Cluster::start(1, |_| {}).await;
        cluster.leader().await;
        let desk = cluster.routers[0].as_ref().expect("it runs").desk();
        let (endpoints, registry, stop) = (Endpoints::default(), Registry::new(), CancellationToken::new());
        let metrics = EndpointMetrics::register(&registry).expect("a new registry");
        tokio::spawn(Keeper::new(config, &endpoints, desk.clone(), metrics).run(stop.clone()));
        Scene { cluster, desk, endpoints, registry, stop }
    }

    fn put(&self, authority: &str) {
        self.endpoints.put(Endpoint {
            instance: INSTANCE,
            authority: authority.to_owned(),
            fetches: false,
            role: kv_core::schedule::Role::Both,
            place: String::new(),
            draining: false,
            origin: Origin::Configured,
        });
    }

    fn standing(&self) -> Standing {
        self.endpoints.standing(INSTANCE).expect("is known")
    }

    /// The instances that the router would choose among, with their predicted wait.
    async fn known(&self) -> Vec<(u32, u64)> {
        let request =
            pb::RouteRequest { request: 1, block_tokens: 16, input_tokens: 16, ..Default::default() };
        match self.desk.route(request).await.map(|reply| reply.answer) {
            Ok(Some(pb::route_reply::Answer::Decision(decision))) => {
                let waits = |one: &pb::Candidate| one.predicted.map_or(0, |predicted| predicted.queue_us);
                decision.candidates.iter().map(|one| (one.instance, waits(one))).collect()
            }
            _ => Vec::new(),
        }
    }

    async fn chosen(&self, is_chosen: bool) {
        let what = if is_chosen { "the engine to be chosen" } else { "the engine to be left out" };
        until(what, || async { (self.known().await.is_empty() != is_chosen).then_some(()) }).await;
    }

    async fn problem(&self) -> String {
        until("a problem", || async { self.standing().problem }).await
    }

    fn count(&self, name: &str, outcome: &str) -> f64 {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == name);
        let metrics = family.map(|family| family.get_metric().to_vec()).unwrap_or_default();
        let is_it = |metric: &&prometheus::proto::Metric| {
            outcome.is_empty() || metric.get_label().iter().any(|label| label.value() == outcome)
        };
        metrics
            .iter()
            .filter(is_it)
            .map(|metric| metric.get_counter().get_value() + metric.get_gauge().get_value())
            .sum()
    }

    async fn end(self) {
        self.stop.cancel();
        self.cluster.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_does_not_report_is_asked_and_chosen_by_its_load() {
    let scene = Scene::start(&quick()).await;
    let engine = Engine::start("127.0.0.1:0").await;
    scene.put(&format!("localhost:{}", engine.address.port()));
    scene.chosen(true).await;
    until("addresses", || async { (!scene.standing().addresses.is_empty()).then_some(()) }).await;
    assert!(scene.endpoints.at(&engine.address.to_string()).is_some(), "by number");
    let idle = scene.known().await[0];
    engine.say(|says| says.metrics = load(3, 200, 1));
    until("a longer wait", || async { (scene.known().await.first()?.1 > idle.1).then_some(()) }).await;
    let heard =
        until("the load", || async { scene.standing().load.filter(|(heard, _)| heard.waiting == 200) }).await;
    assert_eq!((heard.0.running, heard.0.queue_tokens), (3, 20_000), "as many as wait, 100 tokens each");
    assert_eq!(scene.count("kvfleet_doors_endpoint_waiting", ""), 200.0);
    scene.endpoints.remove(INSTANCE);
    scene.chosen(false).await;
    until("its numbers to go", || async {
        (scene.count("kvfleet_doors_endpoint_asked_total", "") == 0.0).then_some(())
    })
    .await;
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_is_gone_is_left_out_at_once_and_comes_back() {
    let slow = LoadConfig { failures_max: 1_000, ..quick() };
    let scene = Scene::start(&slow).await;
    let address = unused_address();
    scene.put(&address);
    says("an engine that does not listen", &scene.problem().await, &[&address]);
    assert!(!scene.endpoints.is_open(INSTANCE));
    let engine = Engine::start(&address).await;
    scene.chosen(true).await;
    until("it to be open", || async { scene.endpoints.is_open(INSTANCE).then_some(()) }).await;
    engine.say(|says| says.metrics = load(0, 0, 7));
    until("a restart", || async {
        (scene.count("kvfleet_doors_endpoint_restarts_total", "") == 1.0).then_some(())
    })
    .await;
    scene.chosen(true).await;
    drop(engine);
    // Nobody who waits for a thousand failures, or for a load that is two seconds old.
    let gone = std::time::Instant::now();
    scene.chosen(false).await;
    println!("left out {} ms after its end", gone.elapsed().as_millis());
    until("it to be known to be gone", || async { (!scene.endpoints.is_open(INSTANCE)).then_some(()) }).await;
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_at_which_a_request_failed_is_asked_at_once() {
    // When it would be time to, this test is over.
    let rare = LoadConfig { every_ms: 600_000, health_every_ms: 600_000, ..LoadConfig::default() };
    let scene = Scene::start(&rare).await;
    let engine = Engine::start("127.0.0.1:0").await;
    scene.put(&engine.address.to_string());
    let asked = |least: f64| {
        let scene = &scene;
        async move {
            let asked =
                || async { (scene.count("kvfleet_doors_endpoint_asked_total", "ok") >= least).then_some(()) };
            until("it to be asked", asked).await;
        }
    };
    asked(1.0).await;
    assert!(scene.endpoints.is_open(INSTANCE));
    scene.endpoints.doubt(INSTANCE);
    asked(2.0).await;
    assert!(scene.endpoints.is_open(INSTANCE), "it is well");
    let address = engine.address;
    drop(engine);
    // Its sockets close a while later, and until then it may answer.
    until("its end", || async { tokio::net::TcpStream::connect(address).await.is_err().then_some(()) }).await;
    scene.endpoints.doubt(INSTANCE);
    until("it to be known to be gone", || async { (!scene.endpoints.is_open(INSTANCE)).then_some(()) }).await;
    scene.endpoints.doubt(InstanceId(99));
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_is_not_well_is_left_out_and_says_why() {
    let scene = Scene::start(&quick()).await;
    let engine = Engine::start("127.0.0.1:0").await;
    let address = engine.address.to_string();
    scene.put(&address);
    scene.chosen(true).await;
    engine.say(|says| says.health = StatusCode::SERVICE_UNAVAILABLE);
    scene.chosen(false).await;
    says("an engine that says it is not well", &scene.problem().await, &[&address]);
    assert!(!scene.endpoints.is_open(INSTANCE));
    engine.say(|says| says.health = StatusCode::NOT_FOUND);
    scene.chosen(true).await;
    engine.say(|says| says.metrics = load(0, 0, 1).replace("running 0", "running NaN"));
    scene.chosen(false).await;
    says("an engine whose load is not believed", &scene.problem().await, &[&address]);
    assert!(scene.count("kvfleet_doors_endpoint_asked_total", "nonsense") >= 3.0);
    engine.say(|says| *says = Says { status: StatusCode::NOT_FOUND, ..Says::default() });
    until("the status", || async { scene.standing().problem.filter(|said| said.contains("status 404")) })
        .await;
    engine.say(|says| *says = Says::default());
    scene.chosen(true).await;
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_without_end_and_answers_that_do_not_come_are_bounded() {
    let scene = Scene::start(&LoadConfig { timeout_ms: 1_500, ..quick() }).await;
    let engine = Engine::start("127.0.0.1:0").await;
    let address = engine.address.to_string();
    engine.say(|says| says.is_endless = true);
    scene.put(&address);
    let endless =
        until("an end", || async { scene.standing().problem.filter(|said| said.contains("bytes")) }).await;
    says("an engine whose metrics do not end", &endless, &[&address]);
    assert!(scene.known().await.is_empty());
    // It takes connections, and answers none.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = silent.local_addr().expect("is bound").to_string();
    scene.put(&address);
    let late = until("a late answer", || async { scene.standing().problem }).await;
    says("an engine that does not answer", &late, &[&address]);
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_drains_is_not_chosen_and_one_that_reports_itself_is_not_asked() {
    let scene = Scene::start(&quick()).await;
    let engine = Engine::start("127.0.0.1:0").await;
    scene.put(&engine.address.to_string());
    scene.chosen(true).await;
    assert!(scene.endpoints.drain(INSTANCE));
    scene.chosen(false).await;
    engine.say(|says| says.metrics = load(2, 0, 1));
    until("its load all the same", || async {
        scene.standing().load.filter(|(heard, _)| heard.running == 2)
    })
    .await;
    let endpoint = scene.endpoints.get(INSTANCE).expect("is known");
    scene.endpoints.put_that_reports(Endpoint { draining: false, ..Endpoint::clone(&endpoint) }, true);
    until("nobody asks", || async {
        (scene.count("kvfleet_doors_endpoint_asked_total", "") == 0.0).then_some(())
    })
    .await;
    engine.say(|says| says.health = StatusCode::INTERNAL_SERVER_ERROR);
    until("it to be left out", || async { (!scene.endpoints.is_open(INSTANCE)).then_some(()) }).await;
    assert!(scene.known().await.is_empty(), "nobody reported it");
    scene.end().await;
}

/// Metrics of an SGLang that has ended so many requests.
fn sglang(ended: u32) -> String {
    format!(
        "sglang:num_running_reqs 0\nsglang:num_queue_reqs 0\nsglang:prompt_tokens_total 9\nsglang:num_requests_total {ended}\n"
    )
}

/// What one says that publishes its events at this port.
fn publishes_at(port: u16) -> String {
    let kv_events = serde_json::json!({ "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": port, "dp_size": 2 });
    serde_json::json!({ "kv_events": kv_events }).to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_sglang_that_says_where_its_events_are_is_followed_while_it_is_known() {
    let scene = Scene::start(&quick()).await;
    let engine = Engine::start("127.0.0.1:0").await;
    engine.say(|says| (says.metrics, says.info) = (sglang(5), publishes_at(5_557)));
    scene.put(&engine.address.to_string());
    until("its events", || async { scene.desk.follows(INSTANCE.0).then_some(()) }).await;
    // Another process at the same place publishes nothing.
    engine.say(|says| (says.metrics, says.info) = (sglang(1), "{}".into()));
    until("an end of its events", || async { (!scene.desk.follows(INSTANCE.0)).then_some(()) }).await;
    engine.say(|says| (says.metrics, says.info) = (sglang(0), publishes_at(5_557)));
    until("its events again", || async { scene.desk.follows(INSTANCE.0).then_some(()) }).await;
    scene.endpoints.remove(INSTANCE);
    until("nothing to follow", || async { (!scene.desk.follows(INSTANCE.0)).then_some(()) }).await;
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_events_are_is_asked_as_now_then_as_before_and_once_for_each_process() {
    let (new, old) = (INFO[0], INFO[1]);
    // Where it says so, whether it is followed, and what one of its processes is asked. The last knows neither.
    let engines: [(&[&str], bool, &[&str]); 4] = [
        (&INFO, true, &[new]),
        (&INFO[..1], true, &[new]),
        (&INFO[1..], true, &[new, old]),
        (&[], false, &[new, old]),
    ];
    for (info_at, is_followed, asked) in engines {
        let scene = Scene::start(&quick()).await;
        let engine = Engine::start("127.0.0.1:0").await;
        engine.say(|says| {
            (says.metrics, says.info, says.info_at) = (sglang(5), publishes_at(5_557), info_at);
        });
        scene.put(&engine.address.to_string());
        // Which models it serves is asked as well, and is nobody's concern here.
        let asked_so_far = || {
            let asked = engine.says.lock().asked.clone();
            asked.into_iter().filter(|path| !path.starts_with("/v1/")).collect::<Vec<_>>()
        };
        until("it to be asked", || async { (asked_so_far().len() >= asked.len()).then_some(()) }).await;
        // It is asked for its load, and how it is, in all rounds that come; and where its events are in none of them.
        let before = scene.count("kvfleet_doors_endpoint_asked_total", "ok");
        until("more rounds", || async {
            (scene.count("kvfleet_doors_endpoint_asked_total", "ok") >= before + 4.0).then_some(())
        })
        .await;
        assert_eq!(asked_so_far(), asked, "where it says so at {info_at:?}");
        assert_eq!(scene.desk.follows(INSTANCE.0), is_followed, "where it says so at {info_at:?}");
        // And its next process once more.
        engine.say(|says| says.metrics = sglang(1));
        let both = [asked, asked].concat();
        until("another process to be asked", || async { (asked_so_far() == both).then_some(()) }).await;
        scene.end().await;
    }
}

#[tokio::test]
async fn what_cannot_be_set_is_refused() {
    let refused = |change: fn(&mut LoadConfig)| {
        let mut config = crate::DoorsConfig::default();
        assert_eq!(config.validate(), Ok(()));
        change(&mut config.load);
        config.validate().expect_err("is refused").to_string()
    };
    says("engines asked for their load too rarely", &refused(|config| config.every_ms = 2_000), &[]);
    says("engines that never fail often enough", &refused(|config| config.failures_max = 0), &[]);
    says("engines asked for their models too often", &refused(|config| config.models_every_ms = 1), &[]);
    for change in [
        (|config| config.timeout_ms = 0) as fn(&mut LoadConfig),
        |config| config.health_every_ms = u64::MAX,
        |config| config.resolve_every_ms = 0,
        |config| config.prompt_tokens = 0,
    ] {
        refused(change);
    }
    assert_eq!(Duration::from_millis(200), LoadConfig::default().every());
}
