//! OpenAI requests through a whole cluster: shared prefixes hit, and an instance dies under load.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvfleet::cluster::{ClusterShape, LocalCluster, NodeCapacity, OpenAiShape};
use kvfleet::process::Role;
use kvfleet_gateway::{BreakerConfig, ModelConfig};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::support::{Workspace, shape};

/// Timeout for each wait, far above the expected duration.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The received part of an answer.
#[derive(Debug)]
struct HttpAnswer {
    status: u16,
    instance: u64,
    /// Instance that computed the prompt, if a different one answered; otherwise 0.
    prefill: u64,
    request: u64,
    body: String,
    /// Whether the body is complete.
    is_whole: bool,
}

impl HttpAnswer {
    fn read(bytes: &[u8]) -> Option<HttpAnswer> {
        let text = String::from_utf8_lossy(bytes).into_owned();
        let (head, body) = text.split_once("\r\n\r\n")?;
        let header = |name: &str| {
            let line = head.lines().find(|line| line.to_lowercase().starts_with(name))?;
            line.split_once(':')?.1.trim().parse::<u64>().ok()
        };
        let is_whole = match header("content-length") {
            Some(length) => body.len() as u64 == length,
            None => body.ends_with("0\r\n\r\n"),
        };
        Some(HttpAnswer {
            status: head.split(' ').nth(1)?.parse().ok()?,
            instance: header("x-kvfleet-instance").unwrap_or_default(),
            prefill: header("x-kvfleet-prefill-instance").unwrap_or_default(),
            request: header("x-kvfleet-request").unwrap_or_default(),
            body: body.to_owned(),
            is_whole,
        })
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|cause| panic!("{cause}: {self:?}"))
    }
}

/// Sends a request to a gateway and reads the answer to the end of the connection.
async fn ask(gateway: SocketAddr, path: &str, body: &Value) -> HttpAnswer {
    let body = body.to_string();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let asked = async {
        let mut stream = TcpStream::connect(gateway).await.unwrap();
        stream.write_all((head + &body).as_bytes()).await.unwrap();
        let mut bytes = Vec::new();
        // A broken connection leaves a partial answer.
        let _ = stream.read_to_end(&mut bytes).await;
        HttpAnswer::read(&bytes).unwrap_or_else(|| panic!("no answer: {:?}", String::from_utf8_lossy(&bytes)))
    };
    tokio::time::timeout(TIMEOUT, asked).await.expect("the request finishes in time")
}

fn openai_address(cluster: &LocalCluster, router: u64) -> SocketAddr {
    let ready = cluster.child((Role::Router, router)).unwrap().ready().unwrap();
    ready.addresses["openai"].parse().unwrap()
}

async fn start_cluster(place: &Workspace, change: impl FnOnce(&mut ClusterShape)) -> LocalCluster {
    let capacity = NodeCapacity { dram_blocks: 10_000, ssd_blocks: 0 };
    let openai = Some(OpenAiShape { port: 0, open: false, models: vec![] });
    let mut shape = ClusterShape { block_tokens: 16, openai, ..shape(place, capacity) };
    change(&mut shape);
    LocalCluster::start(shape).await.unwrap()
}

fn chat(question: &str) -> Value {
    let system = "You are a helpful assistant. ".repeat(100);
    json!({"model": "any", "max_tokens": 3, "messages": [
        {"role": "system", "content": system}, {"role": "user", "content": question}
    ]})
}

/// Output of `kvfleet why` for a request.
fn why(place: &Workspace, cluster: &LocalCluster, request: u64) -> Value {
    let (routers, tls) = (cluster.router_addresses().join(","), cluster.certificates());
    let request = request.to_string();
    let words = ["why", &request, "--json", "--cluster", &routers, "--tls-dir", tls.to_str().unwrap()];
    serde_json::from_str(&tokio::task::block_in_place(|| place.run(&words)).ok()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn shared_prefixes_are_fetched_and_explained() {
    let place = Workspace::new();
    let cluster = start_cluster(&place, |_| {}).await;
    let first = ask(openai_address(&cluster, 1), "/v1/chat/completions", &chat("One?")).await;
    assert_eq!((first.status, first.is_whole), (200, true), "{first:?}");
    let usage = first.json()["usage"].clone();
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    let tokens = usage["prompt_tokens"].as_u64().unwrap();
    assert!(tokens > 600, "the prompt has {tokens} tokens");
    // Saving follows the answer, and the announcement follows saving. The other gateway learns of
    // the blocks too.
    let until = Instant::now() + TIMEOUT;
    let second = loop {
        let second =
            ask(openai_address(&cluster, 2), "/v1/chat/completions", &chat("Another question?")).await;
        let cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        // All full blocks except the last, which contains the question.
        if cached > tokens - 3 * 16 {
            break second;
        }
        assert!(Instant::now() < until, "{second:?}");
    };
    // The gateway's router has the explanation; the hits arrive with the instance's next report.
    let explanation = loop {
        let story = why(&place, &cluster, second.request);
        if !story["hit_blocks"].is_null() {
            break story;
        }
        assert!(Instant::now() < until, "{story:#}");
    };
    assert_eq!(explanation["instance"], second.instance);
    assert!(explanation["predicted_tbt_us"].as_u64().unwrap() > 0, "{explanation:#}");
    assert!(explanation["hit_blocks"].as_u64().unwrap() * 16 > tokens - 3 * 16, "{explanation:#}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn explains_in_which_field_identities_differ() {
    let place = Workspace::new();
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../gateway/testdata/tokenizer.json");
    let cluster = start_cluster(&place, |shape| {
        let models = vec![ModelConfig { name: "m".to_owned(), tokenizer, ..ModelConfig::default() }];
        (shape.routers, shape.openai) = (1, Some(OpenAiShape { port: 0, open: false, models }));
        shape.overrides = vec!["router.engines.identity.dtype=fp8".to_owned()];
    })
    .await;
    let prompt: Vec<u32> = (1..100).collect();
    let body = json!({"model": "m", "max_tokens": 1, "prompt": prompt});
    let answer = ask(openai_address(&cluster, 1), "/v1/completions", &body).await;
    assert_eq!(answer.status, 200, "a useless cache rejects no request: {answer:?}");
    // A node that did not answer at once is asked again after two seconds.
    let until = Instant::now() + TIMEOUT;
    let story = loop {
        let story = why(&place, &cluster, answer.request);
        assert_eq!(story["missing"][0]["reason"], "identity_differs", "{story:#}");
        if story["missing"][0]["text"].as_str().unwrap().contains("it differs in") {
            break story;
        }
        assert!(Instant::now() < until, "{story:#}");
    };
    let text =
        "hashed under another identity than the nodes': it differs in dtype (\"fp8\" and not \"bf16\")";
    assert_eq!(story["missing"][0]["text"], text, "{story:#}");
    // The engine hashes prompts itself and may hit; the router cannot.
    let again = ask(openai_address(&cluster, 1), "/v1/completions", &body).await;
    let story = why(&place, &cluster, again.request);
    assert_eq!(
        (&story["fetch_blocks"], &story["missing"][0]["text"]),
        (&json!(0), &json!(text)),
        "{story:#}"
    );
    let log = cluster.directory().join("logs").join("router-1.log");
    let log = std::fs::read_to_string(log).unwrap();
    let warnings = log.lines().filter(|line| line.contains("prompts are hashed under another identity"));
    assert_eq!(warnings.count(), 1, "{log}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn prefills_on_one_instance_and_decodes_on_another() {
    let place = Workspace::new();
    let mut cluster = start_cluster(&place, |shape| {
        (shape.nodes, shape.instances, shape.prefill_instances) = (3, 3, 1);
    })
    .await;
    let gateway = openai_address(&cluster, 1);
    for (number, stream) in [(1, false), (2, true), (3, false)] {
        let mut body = chat(&format!("{number}?"));
        body["messages"][0]["content"] = format!("{number} {}", "unique words ".repeat(150)).into();
        body["stream"] = stream.into();
        body["stream_options"] = json!({"include_usage": true});
        let answer = ask(gateway, "/v1/chat/completions", &body).await;
        assert_eq!((answer.status, answer.is_whole, answer.prefill), (200, true, 1), "{answer:?}");
        assert!([2, 3].contains(&answer.instance), "{answer:?}");
        let usage = match stream {
            false => answer.json()["usage"].clone(),
            true => answer
                .body
                .lines()
                .filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok())
                .find_map(|piece| piece.get("usage").cloned().filter(Value::is_object))
                .unwrap_or_else(|| panic!("no usage: {answer:?}")),
        };
        let [cached, tokens] = ["/prompt_tokens_details/cached_tokens", "/prompt_tokens"]
            .map(|path| usage.pointer(path).and_then(Value::as_u64).unwrap());
        assert!(tokens > 400 && cached + 2 * 16 > tokens, "no full block is recomputed: {usage}");
        assert_eq!(usage["completion_tokens"], 3, "the answer has all requested tokens");
        if number == 2 {
            cluster.kill((Role::Instance, 2)).await.unwrap();
        }
    }
    // No decode instance remains.
    cluster.kill((Role::Instance, 3)).await.unwrap();
    let until = Instant::now() + TIMEOUT;
    let refused = loop {
        let refused = ask(gateway, "/v1/chat/completions", &chat("Anybody?")).await;
        assert!(refused.status >= 500, "{refused:?}");
        if refused.body.contains("no prefill instance has a reporting decode partner near enough") {
            break refused;
        }
        assert!(Instant::now() < until, "{refused:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert_eq!(refused.status, 503, "{refused:?}");
    cluster.stop().await;
}

/// Number of concurrent callers.
const CALLERS: u32 = 12;

/// Upper bound on answers per second from the two remaining instances: each prompt takes at least a
/// sixth of a second on one of them. A dead instance must be removed within a second. Both figures
/// use the instances' clock, so a stalled machine does not matter.
const ANSWERS_PER_SECOND_MAX: usize = 12;

/// Callers of one gateway; each sends its next request after the previous answer.
struct LoadCallers {
    is_over: Arc<AtomicBool>,
    /// Instance of each answer so far.
    seen: Arc<Mutex<Vec<u64>>>,
    tasks: Vec<JoinHandle<Vec<(Instant, HttpAnswer)>>>,
}

impl LoadCallers {
    fn start(gateway: SocketAddr) -> LoadCallers {
        let (is_over, seen) = (Arc::new(AtomicBool::new(false)), Arc::<Mutex<Vec<u64>>>::default());
        let asking = (0..CALLERS).map(|caller| {
            let (is_over, seen) = (Arc::clone(&is_over), Arc::clone(&seen));
            tokio::spawn(async move {
                let mut answers = Vec::new();
                while !is_over.load(Ordering::Relaxed) {
                    let number = answers.len();
                    let mut body = chat(&format!("{caller} {number}?"));
                    let words = format!("{caller} {number} {}", "words ".repeat(200));
                    body["messages"][0]["content"] = words.into();
                    body["stream"] = true.into();
                    let begun = Instant::now();
                    let answer = ask(gateway, "/v1/chat/completions", &body).await;
                    seen.lock().push(answer.instance);
                    answers.push((begun, answer));
                }
                answers
            })
        });
        LoadCallers { tasks: asking.collect(), is_over, seen }
    }

    /// Waits until `enough` accepts the instances of all answers so far.
    async fn until_answered(&self, enough: impl Fn(&[u64]) -> bool) {
        let until = Instant::now() + TIMEOUT;
        while !enough(&self.seen.lock()) {
            assert!(Instant::now() < until, "{:?}", self.seen.lock());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Number of answers so far.
    fn answer_count(&self) -> usize {
        self.seen.lock().len()
    }

    /// Waits for `more` further answers.
    async fn until_more_answers(&self, more: usize) {
        let so_far = self.answer_count();
        self.until_answered(|seen| seen.len() >= so_far + more).await;
    }

    /// Stops the callers and returns all answers with their start times.
    async fn end(self) -> Vec<(Instant, HttpAnswer)> {
        self.is_over.store(true, Ordering::Relaxed);
        let mut all = Vec::new();
        for caller in self.tasks {
            all.extend(caller.await.unwrap());
        }
        all
    }
}

/// Requests that an instance broke off before answering, or refused a connection for.
async fn failed_attempts(metrics: &str) -> f64 {
    let mut attempts = 0.0;
    for cause in ["broken", "connect"] {
        attempts += metric(metrics, &format!("kvfleet_gateway_retries_total{{cause=\"{cause}\"}}")).await;
    }
    attempts
}

/// Counts the answers that broke off. Only `dead` may break off, and only answers that it began
/// before it was killed.
fn count_broken(answers: &[(Instant, HttpAnswer)], dead: u64, killed: Instant) -> u32 {
    let mut broken = 0;
    for (begun, answer) in answers {
        assert_eq!(answer.status, 200, "a failure before the first byte is retried elsewhere: {answer:?}");
        if answer.is_whole {
            assert!(answer.body.contains("data: [DONE]"), "{answer:?}");
        } else {
            broken += 1;
            assert_eq!(answer.instance, dead, "only the dead instance breaks answers off: {answer:?}");
            assert!(*begun < killed, "the request started before the kill");
        }
    }
    broken
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_instance_under_load_loses_no_request() {
    let place = Workspace::new();
    // Requests take about a tenth of a second, nearly all before the first byte. Every instance
    // therefore always has some in flight.
    let mut cluster = start_cluster(&place, |shape| {
        shape.instances = 3;
        shape.time_scale = 0.2;
    })
    .await;
    let callers = LoadCallers::start(openai_address(&cluster, 1));
    let metrics = cluster.child((Role::Router, 1)).unwrap().ready().unwrap().addresses["metrics"].clone();
    // The instance to be killed has work.
    callers.until_answered(|seen| (1..=3).all(|instance| seen.contains(&instance))).await;
    let before = failed_attempts(&metrics).await;
    cluster.kill((Role::Instance, 2)).await.unwrap();
    let (killed, answered) = (Instant::now(), callers.answer_count());
    while metric(&metrics, "kvfleet_gateway_endpoint_up{instance=\"2\"}").await > 0.0 {
        assert!(killed.elapsed() < TIMEOUT, "instance 2 is still up");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let (unrouted, meanwhile) = (killed.elapsed(), callers.answer_count() - answered);
    assert!(
        meanwhile <= ANSWERS_PER_SECOND_MAX,
        "{meanwhile} answers came before the dead instance was removed, in {unrouted:?}"
    );
    // Requests that were sent to the dead instance have failed by the time this many answers
    // arrive. No later request goes there.
    callers.until_more_answers(2 * CALLERS as usize).await;
    let tried = failed_attempts(&metrics).await - before;
    callers.until_more_answers(50).await;
    assert_eq!(failed_attempts(&metrics).await - before, tried, "the dead instance got another request");
    let answers = callers.end().await;
    let cut = count_broken(&answers, 2, killed);
    let of_dead = answers.iter().filter(|(_, answer)| answer.instance == 2).count();
    println!(
        "removed after {} ms and {meanwhile} answers; {} answers, {of_dead} of instance 2, {cut} broken off, \
         {tried} retried elsewhere",
        unrouted.as_millis(),
        answers.len()
    );
    assert!(of_dead > 0, "the instance had no work before the kill");
    assert!(tried > 0.0, "no unanswered request was retried elsewhere");
    // This many failures open the circuit breaker, and each caller may have one more in flight. The
    // instance is removed by then.
    let most = BreakerConfig::default().failures + CALLERS;
    assert!(
        tried + f64::from(cut) <= f64::from(most),
        "{tried} retried and {cut} broken off: too many requests went to a dead instance"
    );
    assert_eq!(metric(&metrics, "kvfleet_gateway_retries_exhausted_total").await, 0.0);
    cluster.stop().await;
}

/// A metric of a process; 0 if absent.
async fn metric(address: &str, name: &str) -> f64 {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.map_or(0.0, |value| value.trim().parse().unwrap())
}
