//! Tests of probing through a whole router; an HTTP server stands for the engine.

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
use crate::endpoints::{Endpoint, EndpointStatus, Origin};
use crate::upstream::{EngineAccess, UpstreamConfig};
use kvfleet_testkit::cluster::{Cluster, until};
use kvfleet_testkit::ports::unused_address;

/// Answers of the engine.
#[derive(Clone, Debug)]
struct EngineAnswers {
    metrics: String,
    status: StatusCode,
    health: StatusCode,
    is_endless: bool,
    /// Server info, and the paths at which it is available.
    info: String,
    info_at: &'static [&'static str],
    /// Requested paths other than /metrics and /health, in order.
    other_paths: Vec<String>,
}

/// Paths of the server info in newer and in older versions of SGLang; some versions have both.
const INFO: [&str; 2] = ["/server_info", "/get_server_info"];

impl Default for EngineAnswers {
    fn default() -> Self {
        EngineAnswers {
            metrics: load(0, 0, 1),
            status: StatusCode::OK,
            health: StatusCode::OK,
            is_endless: false,
            info: String::new(),
            info_at: &INFO,
            other_paths: Vec::new(),
        }
    }
}

fn load(running: u32, waiting: u32, started: u32) -> String {
    format!(
        "vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\nvllm:request_prompt_tokens_sum 300\n\
         vllm:request_prompt_tokens_count 3\nprocess_start_time_seconds {started}\n"
    )
}

/// A server in place of an engine, with its own runtime. Dropping it closes all connections, as the
/// end of a process does.
struct ProbedEngine {
    address: SocketAddr,
    answers: Arc<Mutex<EngineAnswers>>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl ProbedEngine {
    async fn start(address: &str) -> ProbedEngine {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a thread");
        let listener = std::net::TcpListener::bind(address).expect("a free port");
        listener.set_nonblocking(true).expect("a socket");
        let (address, says) =
            (listener.local_addr().expect("is bound"), Arc::new(Mutex::new(EngineAnswers::default())));
        let app = Router::new()
            .route("/metrics", get(metrics))
            .route("/health", get(async |State(says): State<Arc<Mutex<EngineAnswers>>>| says.lock().health))
            .fallback(other_path)
            .with_state(Arc::clone(&says));
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).expect("a socket");
            axum::serve(listener, app).await
        });
        ProbedEngine { address, answers: says, runtime: Some(runtime) }
    }

    fn set(&self, change: impl FnOnce(&mut EngineAnswers)) {
        change(&mut self.answers.lock());
    }
}

impl Drop for ProbedEngine {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn metrics(State(says): State<Arc<Mutex<EngineAnswers>>>) -> Response {
    let says = says.lock().clone();
    if says.is_endless {
        let line = bytes::Bytes::from("a 1\n".repeat(16_384));
        let lines = tokio_stream::iter(std::iter::repeat_with(move || Ok::<_, std::io::Error>(line.clone())));
        return Body::from_stream(lines).into_response();
    }
    (says.status, says.metrics).into_response()
}

/// Any other path, including misspelled ones.
async fn other_path(State(says): State<Arc<Mutex<EngineAnswers>>>, uri: Uri) -> Response {
    let mut says = says.lock();
    says.other_paths.push(uri.path().to_owned());
    match says.info_at.contains(&uri.path()) {
        true => says.info.clone().into_response(),
        false => StatusCode::NOT_FOUND.into_response(),
    }
}

/// A router, and endpoints that it probes.
struct ProbeFixture {
    cluster: Cluster,
    router: RouterHandle,
    endpoints: EndpointRegistry,
    registry: Registry,
    stop: CancellationToken,
}

const INSTANCE: InstanceId = InstanceId(4);

fn fast_config() -> LoadConfig {
    LoadConfig { every_ms: 20, health_every_ms: 20, ..LoadConfig::default() }
}

impl ProbeFixture {
    async fn start(config: &LoadConfig) -> ProbeFixture {
        let cluster = Cluster::start(1, |_| {}).await;
        cluster.leader().await;
        let desk = cluster.routers[0].as_ref().expect("the router runs").handle();
        let (endpoints, registry, stop) =
            (EndpointRegistry::default(), Registry::new(), CancellationToken::new());
        let metrics = EndpointMetrics::register(&registry).expect("a new registry");
        let access = EngineAccess::load(&UpstreamConfig::default()).expect("no file is named");
        let pool = ProberPool::new(config, &endpoints, desk.clone(), access, metrics);
        tokio::spawn(pool.run(stop.clone()));
        ProbeFixture { cluster, router: desk, endpoints, registry, stop }
    }

    fn put(&self, authority: &str) {
        self.endpoints.put(Endpoint {
            instance: INSTANCE,
            authority: authority.to_owned(),
            is_tls: false,
            fetches: false,
            role: kv_core::schedule::InstanceRole::Both,
            place: String::new(),
            is_draining: false,
            origin: Origin::Configured,
        });
    }

    fn status(&self) -> EndpointStatus {
        self.endpoints.status(INSTANCE).expect("the instance is registered")
    }

    /// Candidate instances of the router, with their predicted queueing time.
    async fn candidates(&self) -> Vec<(u32, u64)> {
        let request =
            pb::RouteRequest { request: 1, block_tokens: 16, input_tokens: 16, ..Default::default() };
        match self.router.route(request).await.map(|reply| reply.answer) {
            Ok(Some(pb::route_reply::Answer::Decision(decision))) => {
                let waits = |one: &pb::Candidate| one.predicted.map_or(0, |predicted| predicted.queue_us);
                decision.candidates.iter().map(|one| (one.instance, waits(one))).collect()
            }
            _ => Vec::new(),
        }
    }

    async fn until_chosen(&self, is_chosen: bool) {
        let what = if is_chosen { "the engine to be a candidate" } else { "the engine to be excluded" };
        until(what, || async { (self.candidates().await.is_empty() != is_chosen).then_some(()) }).await;
    }

    async fn problem(&self) -> String {
        until("a problem", || async { self.status().problem }).await
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
async fn probes_engines_and_routes_by_their_load() {
    let scene = ProbeFixture::start(&fast_config()).await;
    let engine = ProbedEngine::start("127.0.0.1:0").await;
    scene.put(&format!("localhost:{}", engine.address.port()));
    scene.until_chosen(true).await;
    until("addresses", || async { (!scene.status().addresses.is_empty()).then_some(()) }).await;
    assert!(scene.endpoints.by_address(&engine.address.to_string()).is_some(), "found by its address");
    let idle = scene.candidates().await[0];
    engine.set(|says| says.metrics = load(3, 200, 1));
    until("a longer wait", || async { (scene.candidates().await.first()?.1 > idle.1).then_some(()) }).await;
    let heard =
        until("the load", || async { scene.status().load.filter(|(heard, _)| heard.waiting == 200) }).await;
    assert_eq!(
        (heard.0.running, heard.0.queue_tokens),
        (3, 20_000),
        "200 waiting requests of 100 tokens each"
    );
    assert_eq!(scene.count("kvfleet_gateway_endpoint_waiting", ""), 200.0);
    scene.endpoints.remove(INSTANCE);
    scene.until_chosen(false).await;
    until("its series to be removed", || async {
        (scene.count("kvfleet_gateway_endpoint_probes_total", "") == 0.0).then_some(())
    })
    .await;
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn excludes_a_stopped_engine_until_it_returns() {
    let slow = LoadConfig { failures_max: 1_000, ..fast_config() };
    let scene = ProbeFixture::start(&slow).await;
    let address = unused_address();
    scene.put(&address);
    says("an engine that does not listen", &scene.problem().await, &[&address]);
    assert!(!scene.endpoints.is_open(INSTANCE));
    let engine = ProbedEngine::start(&address).await;
    scene.until_chosen(true).await;
    until("it to be open", || async { scene.endpoints.is_open(INSTANCE).then_some(()) }).await;
    engine.set(|says| says.metrics = load(0, 0, 7));
    until("a restart", || async {
        (scene.count("kvfleet_gateway_endpoint_restarts_total", "") == 1.0).then_some(())
    })
    .await;
    scene.until_chosen(true).await;
    drop(engine);
    // Much sooner than a thousand failures, or the two seconds until a load expires.
    let gone = std::time::Instant::now();
    scene.until_chosen(false).await;
    println!("excluded {} ms after its end", gone.elapsed().as_millis());
    until("it to be marked as stopped", || async { (!scene.endpoints.is_open(INSTANCE)).then_some(()) })
        .await;
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_request_triggers_a_probe() {
    // No regular probe is due during the test.
    let rare = LoadConfig { every_ms: 600_000, health_every_ms: 600_000, ..LoadConfig::default() };
    let scene = ProbeFixture::start(&rare).await;
    let engine = ProbedEngine::start("127.0.0.1:0").await;
    scene.put(&engine.address.to_string());
    let asked = |least: f64| {
        let scene = &scene;
        async move {
            let asked = || async {
                (scene.count("kvfleet_gateway_endpoint_probes_total", "ok") >= least).then_some(())
            };
            until("a probe", asked).await;
        }
    };
    asked(1.0).await;
    assert!(scene.endpoints.is_open(INSTANCE));
    scene.endpoints.request_probe(INSTANCE);
    asked(2.0).await;
    assert!(scene.endpoints.is_open(INSTANCE), "it is healthy");
    let address = engine.address;
    drop(engine);
    // Its sockets close asynchronously and may answer until then.
    until("its end", || async { tokio::net::TcpStream::connect(address).await.is_err().then_some(()) }).await;
    scene.endpoints.request_probe(INSTANCE);
    until("it to be marked as stopped", || async { (!scene.endpoints.is_open(INSTANCE)).then_some(()) })
        .await;
    scene.endpoints.request_probe(InstanceId(99));
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn excludes_an_unhealthy_engine_with_its_problem() {
    let scene = ProbeFixture::start(&fast_config()).await;
    let engine = ProbedEngine::start("127.0.0.1:0").await;
    let address = engine.address.to_string();
    scene.put(&address);
    scene.until_chosen(true).await;
    engine.set(|says| says.health = StatusCode::SERVICE_UNAVAILABLE);
    scene.until_chosen(false).await;
    says("an engine that says it is not well", &scene.problem().await, &[&address]);
    assert!(!scene.endpoints.is_open(INSTANCE));
    engine.set(|says| says.health = StatusCode::NOT_FOUND);
    scene.until_chosen(true).await;
    engine.set(|says| says.metrics = load(0, 0, 1).replace("running 0", "running NaN"));
    scene.until_chosen(false).await;
    says("an engine whose load is not believed", &scene.problem().await, &[&address]);
    assert!(scene.count("kvfleet_gateway_endpoint_probes_total", "nonsense") >= 3.0);
    engine.set(|says| *says = EngineAnswers { status: StatusCode::NOT_FOUND, ..EngineAnswers::default() });
    until("the status", || async { scene.status().problem.filter(|said| said.contains("status 404")) }).await;
    engine.set(|says| *says = EngineAnswers::default());
    scene.until_chosen(true).await;
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bounds_endless_and_silent_answers() {
    let scene = ProbeFixture::start(&LoadConfig { timeout_ms: 1_500, ..fast_config() }).await;
    let engine = ProbedEngine::start("127.0.0.1:0").await;
    let address = engine.address.to_string();
    engine.set(|says| says.is_endless = true);
    scene.put(&address);
    let endless = until("the size limit to apply", || async {
        scene.status().problem.filter(|said| said.contains("bytes"))
    })
    .await;
    says("an engine whose metrics do not end", &endless, &[&address]);
    assert!(scene.candidates().await.is_empty());
    // It accepts connections but never answers.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = silent.local_addr().expect("is bound").to_string();
    scene.put(&address);
    let late = until("a timeout", || async { scene.status().problem }).await;
    says("an engine that does not answer", &late, &[&address]);
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn draining_engines_get_no_requests_and_reporting_ones_no_probes() {
    let scene = ProbeFixture::start(&fast_config()).await;
    let engine = ProbedEngine::start("127.0.0.1:0").await;
    scene.put(&engine.address.to_string());
    scene.until_chosen(true).await;
    assert!(scene.endpoints.drain(INSTANCE));
    scene.until_chosen(false).await;
    engine.set(|says| says.metrics = load(2, 0, 1));
    until("its load, although it drains", || async {
        scene.status().load.filter(|(heard, _)| heard.running == 2)
    })
    .await;
    let endpoint = scene.endpoints.get(INSTANCE).expect("the instance is registered");
    scene.endpoints.put_reporting(Endpoint { is_draining: false, ..Endpoint::clone(&endpoint) }, true);
    until("no probes", || async {
        (scene.count("kvfleet_gateway_endpoint_probes_total", "") == 0.0).then_some(())
    })
    .await;
    engine.set(|says| says.health = StatusCode::INTERNAL_SERVER_ERROR);
    until("it to be excluded", || async { (!scene.endpoints.is_open(INSTANCE)).then_some(()) }).await;
    assert!(scene.candidates().await.is_empty(), "the engine did not report");
    scene.end().await;
}

/// Metrics of an SGLang engine with this number of finished requests.
fn sglang(ended: u32) -> String {
    format!(
        "sglang:num_running_reqs 0\nsglang:num_queue_reqs 0\nsglang:prompt_tokens_total \
         9\nsglang:num_requests_total {ended}\n"
    )
}

/// Server info of an engine that publishes its events at this port.
fn publishes_at(port: u16) -> String {
    let kv_events = serde_json::json!({
        "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": port, "dp_size": 2
    });
    serde_json::json!({ "kv_events": kv_events }).to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn follows_events_of_sglang_while_registered() {
    let scene = ProbeFixture::start(&fast_config()).await;
    let engine = ProbedEngine::start("127.0.0.1:0").await;
    engine.set(|says| (says.metrics, says.info) = (sglang(5), publishes_at(5_557)));
    scene.put(&engine.address.to_string());
    until("its events", || async { scene.router.follows(INSTANCE.0).then_some(()) }).await;
    // Another process at the same address publishes no events.
    engine.set(|says| (says.metrics, says.info) = (sglang(1), "{}".into()));
    until("the end of its events", || async { (!scene.router.follows(INSTANCE.0)).then_some(()) }).await;
    engine.set(|says| (says.metrics, says.info) = (sglang(0), publishes_at(5_557)));
    until("its events again", || async { scene.router.follows(INSTANCE.0).then_some(()) }).await;
    scene.endpoints.remove(INSTANCE);
    until("no followed events", || async { (!scene.router.follows(INSTANCE.0)).then_some(()) }).await;
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn asks_each_process_once_for_its_events() {
    let (new, old) = (INFO[0], INFO[1]);
    // Available paths, whether events are followed, and the requests of one process. The last
    // engine has no server info.
    let engines: [(&[&str], bool, &[&str]); 4] = [
        (&INFO, true, &[new]),
        (&INFO[..1], true, &[new]),
        (&INFO[1..], true, &[new, old]),
        (&[], false, &[new, old]),
    ];
    for (info_at, is_followed, asked) in engines {
        let scene = ProbeFixture::start(&fast_config()).await;
        let engine = ProbedEngine::start("127.0.0.1:0").await;
        engine.set(|says| {
            (says.metrics, says.info, says.info_at) = (sglang(5), publishes_at(5_557), info_at);
        });
        scene.put(&engine.address.to_string());
        // Ignore model list requests.
        let asked_so_far = || {
            let asked = engine.answers.lock().other_paths.clone();
            asked.into_iter().filter(|path| !path.starts_with("/v1/")).collect::<Vec<_>>()
        };
        until("the requests", || async { (asked_so_far().len() >= asked.len()).then_some(()) }).await;
        // Later rounds probe load and health only.
        let before = scene.count("kvfleet_gateway_endpoint_probes_total", "ok");
        until("more rounds", || async {
            (scene.count("kvfleet_gateway_endpoint_probes_total", "ok") >= before + 4.0).then_some(())
        })
        .await;
        assert_eq!(asked_so_far(), asked, "available at {info_at:?}");
        assert_eq!(scene.router.follows(INSTANCE.0), is_followed, "available at {info_at:?}");
        // The next process is asked again.
        engine.set(|says| says.metrics = sglang(1));
        let both = [asked, asked].concat();
        until("requests to the next process", || async { (asked_so_far() == both).then_some(()) }).await;
        scene.end().await;
    }
}

#[tokio::test]
async fn refuses_invalid_values() {
    let refused = |change: fn(&mut LoadConfig)| {
        let mut config = crate::GatewayConfig::default();
        assert_eq!(config.validate(), Ok(()));
        change(&mut config.load);
        config.validate().expect_err("must be refused").to_string()
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
    assert_eq!(Duration::from_millis(200), LoadConfig::default().load_interval());
}
