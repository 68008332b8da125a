//! Requests of OpenAI's clients through a whole cluster: hits of what others asked, and an instance that dies under load.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvfleet::cluster::{Cluster, NodeCapacity, OpenAiShape, Shape};
use kvfleet::process::Role;
use kvfleet_doors::{BreakerConfig, ModelConfig};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::support::{Place, shape};

/// Longest a request may take here; far above what it takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// An answer as far as it came.
#[derive(Debug)]
struct Answer {
    status: u16,
    instance: u64,
    /// Who computed the prompt, where another answered.
    prefill: u64,
    request: u64,
    body: String,
    /// The body has its end.
    is_whole: bool,
}

impl Answer {
    fn read(bytes: &[u8]) -> Option<Answer> {
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
        Some(Answer {
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

/// Asks a door, and reads what comes until nothing more does.
async fn ask(door: SocketAddr, path: &str, body: &Value) -> Answer {
    let body = body.to_string();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: door\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let asked = async {
        let mut stream = TcpStream::connect(door).await.unwrap();
        stream.write_all((head + &body).as_bytes()).await.unwrap();
        let mut bytes = Vec::new();
        // A connection that is cut has said what it said.
        let _ = stream.read_to_end(&mut bytes).await;
        Answer::read(&bytes).unwrap_or_else(|| panic!("no answer: {:?}", String::from_utf8_lossy(&bytes)))
    };
    tokio::time::timeout(PATIENCE, asked).await.expect("no request hangs")
}

fn door(cluster: &Cluster, router: u64) -> SocketAddr {
    let ready = cluster.child((Role::Router, router)).unwrap().ready().unwrap();
    ready.addresses["openai"].parse().unwrap()
}

async fn cluster(place: &Place, change: impl FnOnce(&mut Shape)) -> Cluster {
    let capacity = NodeCapacity { dram_blocks: 10_000, ssd_blocks: 0 };
    let openai = Some(OpenAiShape { port: 0, models: vec![] });
    let mut shape = Shape { block_tokens: 16, openai, ..shape(place, capacity) };
    change(&mut shape);
    Cluster::start(shape).await.unwrap()
}

fn chat(question: &str) -> Value {
    let system = "You are a helpful assistant. ".repeat(100);
    json!({"model": "any", "max_tokens": 3, "messages": [
        {"role": "system", "content": system}, {"role": "user", "content": question}
    ]})
}

/// What `kvfleet why` tells of a request.
fn why(place: &Place, cluster: &Cluster, request: u64) -> Value {
    let (routers, tls) = (cluster.router_addresses().join(","), cluster.certificates());
    let request = request.to_string();
    let words = ["why", &request, "--json", "--cluster", &routers, "--tls-dir", tls.to_str().unwrap()];
    serde_json::from_str(&tokio::task::block_in_place(|| place.run(&words)).ok()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_begins_as_another_is_fetched_and_why_tells_it() {
    let place = Place::new();
    let cluster = cluster(&place, |_| {}).await;
    let first = ask(door(&cluster, 1), "/v1/chat/completions", &chat("One?")).await;
    assert_eq!((first.status, first.is_whole), (200, true), "{first:?}");
    let usage = first.json()["usage"].clone();
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    let tokens = usage["prompt_tokens"].as_u64().unwrap();
    assert!(tokens > 600, "the prompt has {tokens} tokens");
    // The blocks are saved behind the answer and announced behind that; another door knows of them as well.
    let until = Instant::now() + PATIENCE;
    let second = loop {
        let second = ask(door(&cluster, 2), "/v1/chat/completions", &chat("Another question?")).await;
        let cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        // All whole blocks but the last, which has the question in it.
        if cached > tokens - 3 * 16 {
            break second;
        }
        assert!(Instant::now() < until, "{second:?}");
    };
    // The door's router has the story, and hears of the hits with the instance's next report.
    let story = loop {
        let story = why(&place, &cluster, second.request);
        if !story["hit_blocks"].is_null() {
            break story;
        }
        assert!(Instant::now() < until, "{story:#}");
    };
    assert_eq!(story["instance"], second.instance);
    assert!(story["predicted_tbt_us"].as_u64().unwrap() > 0, "{story:#}");
    assert!(story["hit_blocks"].as_u64().unwrap() * 16 > tokens - 3 * 16, "{story:#}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_prompts_that_are_hashed_under_another_identity_it_is_told_in_which_field_it_differs() {
    let place = Place::new();
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../doors/testdata/tokenizer.json");
    let cluster = cluster(&place, |shape| {
        let models = vec![ModelConfig { name: "m".to_owned(), tokenizer, ..ModelConfig::default() }];
        (shape.routers, shape.openai) = (1, Some(OpenAiShape { port: 0, models }));
        shape.overrides = vec!["router.engines.identity.dtype=fp8".to_owned()];
    })
    .await;
    let prompt: Vec<u32> = (1..100).collect();
    let body = json!({"model": "m", "max_tokens": 1, "prompt": prompt});
    let answer = ask(door(&cluster, 1), "/v1/completions", &body).await;
    assert_eq!(answer.status, 200, "a cache that is of no use turns nobody away: {answer:?}");
    // A node may be asked again after two seconds where it did not answer at once.
    let until = Instant::now() + PATIENCE;
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
    // The engine reads prompts itself and may find them; the router does not.
    let again = ask(door(&cluster, 1), "/v1/completions", &body).await;
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
async fn one_computes_and_another_answers_with_what_it_fetched() {
    let place = Place::new();
    let mut cluster = cluster(&place, |shape| {
        (shape.nodes, shape.instances, shape.prefill_instances) = (3, 3, 1);
    })
    .await;
    let door = door(&cluster, 1);
    for (number, stream) in [(1, false), (2, true), (3, false)] {
        let mut body = chat(&format!("{number}?"));
        body["messages"][0]["content"] = format!("{number} {}", "words of its own ".repeat(100)).into();
        body["stream"] = stream.into();
        body["stream_options"] = json!({"include_usage": true});
        let answer = ask(door, "/v1/chat/completions", &body).await;
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
        assert!(tokens > 400 && cached + 2 * 16 > tokens, "it computes no block again: {usage}");
        assert_eq!(usage["completion_tokens"], 3, "and says all that was asked for");
        if number == 2 {
            cluster.kill((Role::Instance, 2)).await.unwrap();
        }
    }
    // Nobody is left to go on.
    cluster.kill((Role::Instance, 3)).await.unwrap();
    let until = Instant::now() + PATIENCE;
    let refused = loop {
        let refused = ask(door, "/v1/chat/completions", &chat("Anybody?")).await;
        assert!(refused.status >= 500, "{refused:?}");
        if refused.body.contains("nobody that reports and is near enough to go on") {
            break refused;
        }
        assert!(Instant::now() < until, "{refused:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert_eq!(refused.status, 503, "{refused:?}");
    cluster.stop().await;
}

/// Who asks at once.
const CALLERS: u32 = 12;

/// Answers that the two that are left give in a second, at most: a prompt takes each of them a sixth of one or more, whatever else this machine does. An instance that
/// died is left out within a second (mostly within a tenth), told by their clock: where the machine stands still for a while, they do too.
const ANSWERS_IN_A_SECOND: usize = 12;

/// Callers of one door, each of whom asks again as soon as it has an answer.
struct Callers {
    is_over: Arc<AtomicBool>,
    /// Which instance gave each answer so far.
    seen: Arc<Mutex<Vec<u64>>>,
    asking: Vec<JoinHandle<Vec<(Instant, Answer)>>>,
}

impl Callers {
    fn start(door: SocketAddr) -> Callers {
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
                    let answer = ask(door, "/v1/chat/completions", &body).await;
                    seen.lock().push(answer.instance);
                    answers.push((begun, answer));
                }
                answers
            })
        });
        Callers { asking: asking.collect(), is_over, seen }
    }

    /// Waits until instances have answered as `enough` says; it is given the instance of each answer so far.
    async fn answered(&self, enough: impl Fn(&[u64]) -> bool) {
        let until = Instant::now() + PATIENCE;
        while !enough(&self.seen.lock()) {
            assert!(Instant::now() < until, "{:?}", self.seen.lock());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// How many have come so far.
    fn answers(&self) -> usize {
        self.seen.lock().len()
    }

    /// Waits for so many more answers.
    async fn answered_more(&self, more: usize) {
        let so_far = self.answers();
        self.answered(|seen| seen.len() >= so_far + more).await;
    }

    /// All answers, each with when it was asked for.
    async fn end(self) -> Vec<(Instant, Answer)> {
        self.is_over.store(true, Ordering::Relaxed);
        let mut all = Vec::new();
        for caller in self.asking {
            all.extend(caller.await.unwrap());
        }
        all
    }
}

/// Requests so far that an instance broke off before it answered them, or took no connection for.
async fn tried_in_vain(metrics: &str) -> f64 {
    let mut tried = 0.0;
    for cause in ["broken", "connect"] {
        tried += metric(metrics, &format!("kvfleet_doors_retries_total{{cause=\"{cause}\"}}")).await;
    }
    tried
}

/// How many answers broke off. Only what `dead` had begun to answer before it was killed may.
fn broken_off(answers: &[(Instant, Answer)], dead: u64, killed: Instant) -> u32 {
    let mut cut = 0;
    for (begun, answer) in answers {
        assert_eq!(answer.status, 200, "before its first byte it goes elsewhere: {answer:?}");
        if answer.is_whole {
            assert!(answer.body.contains("data: [DONE]"), "{answer:?}");
        } else {
            cut += 1;
            assert_eq!(answer.instance, dead, "only what it had begun to answer breaks off: {answer:?}");
            assert!(*begun < killed, "it was asked while it lived");
        }
    }
    cut
}

#[tokio::test(flavor = "multi_thread")]
async fn when_an_instance_dies_under_load_others_answer_and_nobody_hangs() {
    let place = Place::new();
    // Requests take about a tenth of a second, nearly all of it before their first byte, so that some are under way at every instance at any time.
    let mut cluster = cluster(&place, |shape| {
        shape.instances = 3;
        shape.time_scale = 0.2;
    })
    .await;
    let callers = Callers::start(door(&cluster, 1));
    let metrics = cluster.child((Role::Router, 1)).unwrap().ready().unwrap().addresses["metrics"].clone();
    // The one that dies has work.
    callers.answered(|seen| (1..=3).all(|instance| seen.contains(&instance))).await;
    let before = tried_in_vain(&metrics).await;
    cluster.kill((Role::Instance, 2)).await.unwrap();
    let (killed, answered) = (Instant::now(), callers.answers());
    while metric(&metrics, "kvfleet_doors_endpoint_up{instance=\"2\"}").await > 0.0 {
        assert!(killed.elapsed() < PATIENCE, "instance 2 is dead");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let (unrouted, meanwhile) = (killed.elapsed(), callers.answers() - answered);
    assert!(
        meanwhile <= ANSWERS_IN_A_SECOND,
        "{meanwhile} had answers before it was left out, in {unrouted:?}"
    );
    // Whoever had been sent there by then has been refused when so many others have answers; behind them, nothing goes there.
    callers.answered_more(2 * CALLERS as usize).await;
    let tried = tried_in_vain(&metrics).await - before;
    callers.answered_more(50).await;
    assert_eq!(tried_in_vain(&metrics).await - before, tried, "it was left out");
    let answers = callers.end().await;
    let cut = broken_off(&answers, 2, killed);
    let of_dead = answers.iter().filter(|(_, answer)| answer.instance == 2).count();
    println!(
        "unrouted after {} ms and {meanwhile} answers; {} answers, {of_dead} of instance 2, {cut} cut, {tried} tried elsewhere",
        unrouted.as_millis(),
        answers.len()
    );
    assert!(of_dead > 0, "it had work before it died");
    assert!(tried > 0.0, "what it had not begun to answer when it died was sent elsewhere");
    // So many open its breaker, and each caller may have one under way there as it opens. It is left out no later than that.
    let most = BreakerConfig::default().failures + CALLERS;
    assert!(tried + f64::from(cut) <= f64::from(most), "{tried} and {cut} went to a dead instance");
    assert_eq!(metric(&metrics, "kvfleet_doors_retries_exhausted_total").await, 0.0);
    cluster.stop().await;
}

/// A figure of a process; 0 where it is not there.
async fn metric(address: &str, name: &str) -> f64 {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.map_or(0.0, |value| value.trim().parse().unwrap())
}
