//! A real Envoy with a real picker and mock engines; `scripts/envoy` installs Envoy and runs this.
//!
//! With `KVFLEET_ENVOY_RECORD=FILE`, Envoy's messages are recorded for the test without Envoy
//! (`recorded.rs`).

use std::fmt::Write as _;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::engine::EchoEngine;
use super::fixture::{PickerFixture, RESIDENT_PROMPT, completion};
use super::http::{HttpConnection, HttpMessage, request_once};
use super::recorder::StreamRecorder;
use kvfleet_testkit::cluster::until;
use kvfleet_testkit::ports::unused_address;

/// Listeners of Envoy: name, picker cluster, engine cluster, body mode, and whether failures of the
/// picker are allowed.
const LISTENERS: [(&str, &str, &str, &str, &str); 7] = [
    ("closed", "picker", "chosen", "FULL_DUPLEX_STREAMED", "false"),
    ("buffered", "picker", "chosen", "BUFFERED", "false"),
    ("open", "picker", "chosen", "FULL_DUPLEX_STREAMED", "true"),
    ("open_buffered", "picker", "chosen", "BUFFERED", "true"),
    ("lists", "picker_of_lists", "chosen_of_list", "FULL_DUPLEX_STREAMED", "false"),
    ("tls", "picker_tls", "chosen", "FULL_DUPLEX_STREAMED", "false"),
    ("direct", "", "any", "", ""),
];

struct EnvoyProcess {
    process: Child,
    _directory: tempfile::TempDir,
    addresses: Vec<String>,
}

impl EnvoyProcess {
    async fn start(program: &str, pickers: [&str; 3], engines: [&str; 2]) -> EnvoyProcess {
        let addresses: Vec<_> = LISTENERS.iter().map(|_| unused_address()).collect();
        let mut listeners = String::new();
        for ((name, cluster, chosen, mode, allow), address) in LISTENERS.iter().zip(&addresses) {
            let filter = include_str!("ext_proc.yaml");
            let filter = filter.replace("CLUSTER", cluster).replace("MODE", mode).replace("ALLOW", allow);
            let filter = if cluster.is_empty() { String::new() } else { filter };
            let port = address.rsplit(':').next().unwrap();
            let listener = include_str!("listener.yaml").replace("NAME", name).replace("PORT", port);
            listeners += &listener.replace("CHOSEN", chosen).replace("EXTPROC\n", &filter);
        }
        let mut text = include_str!("envoy.yaml").replace("LISTENERS\n", &listeners);
        let names = ["ENGINE_1", "ENGINE_2", "PICKER", "LISTS", "TLS"];
        for (name, address) in names.iter().zip(engines.iter().chain(&pickers)) {
            let (host, port) = address.rsplit_once(':').unwrap();
            text = text.replace(
                &format!("socket_address: {name}}}"),
                &format!("socket_address: {{address: {host}, port_value: {port}}}}}"),
            );
        }
        let directory = tempfile::TempDir::new().unwrap();
        let config = directory.path().join("envoy.yaml");
        std::fs::write(&config, text).unwrap();
        let process = Command::new(program)
            .args(["--concurrency", "1", "--use-dynamic-base-id", "--log-level", "error", "-c"])
            .arg(&config)
            .stdout(Stdio::inherit())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let envoy = EnvoyProcess { process, _directory: directory, addresses };
        for address in &envoy.addresses {
            until("Envoy", || async { tokio::net::TcpStream::connect(address).await.ok().map(drop) }).await;
        }
        envoy
    }

    fn at(&self, name: &str) -> &str {
        &self.addresses[LISTENERS.iter().position(|way| way.0 == name).unwrap()]
    }
}

impl Drop for EnvoyProcess {
    fn drop(&mut self) {
        let _ = self.process.kill(); // it may have ended
        let _ = self.process.wait();
    }
}

const COMPLETIONS: &str = "/v1/completions";

async fn post(address: &str, headers: &[(&str, &str)], body: &str) -> HttpMessage {
    request_once(address, "POST", COMPLETIONS, headers, body).await
}

fn engine_of(message: &HttpMessage) -> &str {
    assert_eq!(message.status(), 200, "{message:?}");
    message.header("x-engine").unwrap()
}

/// Answer of an engine that received the whole body.
fn expected_answer(number: u32, body: &str) -> String {
    let sum: u64 = body.bytes().map(u64::from).sum();
    format!("{{\"engine\": {number}, \"bytes\": {}, \"sum\": {sum}}}", body.len())
}

/// Median and 99th percentile of sequential requests.
async fn latency(address: &str, body: &str) -> (Duration, Duration) {
    let mut client = HttpConnection::connect(address).await;
    let mut took = Vec::new();
    for round in 0..1_200 {
        let began = Instant::now();
        let answer = client.request("POST", COMPLETIONS, &[], body).await;
        assert_eq!(answer.status(), 200);
        if round >= 200 {
            took.push(began.elapsed());
        }
    }
    took.sort();
    (took[took.len() / 2], took[took.len() * 99 / 100])
}

fn record(tap: &StreamRecorder, names: &[&str]) {
    let Ok(file) = std::env::var("KVFLEET_ENVOY_RECORD") else { return };
    let streams = tap.streams();
    assert_eq!(streams.len(), names.len());
    let mut text = String::from(
        "# What Envoy 1.40.0 says to an endpoint picker: each line one ProcessingRequest, as it was on the \
         wire, in hexadecimal.\n",
    );
    for (name, messages) in names.iter().zip(streams) {
        writeln!(text, "# {name}").unwrap();
        for message in messages {
            message.iter().for_each(|byte| write!(text, "{byte:02x}").unwrap());
            text.push('\n');
        }
    }
    std::fs::write(file, text).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs Envoy: scripts/envoy installs it and runs this"]
async fn envoy_forwards_requests_as_picked() {
    let program = std::env::var("KVFLEET_ENVOY").expect("KVFLEET_ENVOY must name the Envoy program");
    let engines = [EchoEngine::start(1).await, EchoEngine::start(2).await];
    let [first, second] = [engines[0].address.clone(), engines[1].address.clone()];
    let gateway = PickerFixture::start([first.clone(), second.clone()]).await;
    let opened = gateway.open(|config| config.endpoints_max = 1).await;
    let lists = gateway.open(|_| {}).await;
    let tls = gateway.open(|config| (config.endpoints_max, config.tls) = (1, true)).await;
    let tap = StreamRecorder::start(opened.address.clone()).await;
    let taped = if std::env::var("KVFLEET_ENVOY_RECORD").is_ok() { &tap.address } else { &opened.address };
    let envoy = EnvoyProcess::start(&program, [taped, &lists.address, &tls.address], [&first, &second]).await;

    // The resident prefix decides; the client's own destination header is ignored.
    let drawn = completion(RESIDENT_PROMPT, false);
    let forged = [("x-gateway-destination-endpoint", first.as_str())];
    let answer = post(envoy.at("closed"), &forged, &drawn).await;
    assert_eq!((engine_of(&answer), answer.text()), ("2", expected_answer(2, &drawn)));
    // A body in several messages, and an event stream as the answer.
    let long = format!("{}{}", completion(RESIDENT_PROMPT, true), " ".repeat(20_000));
    let mut client = HttpConnection::connect(envoy.at("closed")).await;
    let head =
        format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: engines\r\ncontent-length: {}\r\n\r\n", long.len());
    client.write(head.as_bytes()).await;
    for piece in long.as_bytes().chunks(9_000) {
        client.write(piece).await;
        // So that Envoy reads them one by one.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let answer = client.read().await.unwrap();
    assert_eq!(engine_of(&answer), "2");
    let events = format!("data: {}\n\ndata: 2\n\ndata: 3\n\ndata: [DONE]\n\n", expected_answer(2, &long));
    assert_eq!((answer.text(), answer.chunks >= 2), (events, true), "{} chunks", answer.chunks);
    // Without a body.
    let answer = request_once(envoy.at("closed"), "GET", "/v1/models", &[], "").await;
    assert_eq!(answer.status(), 200);
    // With a subset, and with a subset of unknown endpoints.
    let answer = post(envoy.at("closed"), &[("x-subset", &first)], &drawn).await;
    assert_eq!(engine_of(&answer), "1");
    let answer = post(envoy.at("closed"), &[("x-subset", "10.0.0.1:1")], &drawn).await;
    assert_eq!(answer.status(), 503);
    println!("refused: {}", answer.text());
    // Buffered.
    let answer = post(envoy.at("buffered"), &[], &drawn).await;
    assert_eq!((engine_of(&answer), answer.text()), ("2", expected_answer(2, &drawn)));
    record(
        &tap,
        &["a prompt", "several pieces", "no body", "a subset", "a subset of strangers", "in one piece"],
    );

    // A large body arrives complete through every listener.
    let large = format!("{}{}", drawn, "\n".repeat(180_013 - drawn.len()));
    for way in ["closed", "lists", "tls", "open", "buffered"] {
        let answer = post(envoy.at(way), &[], &large).await;
        assert_eq!((engine_of(&answer), answer.text()), ("2", expected_answer(2, &large)), "{way}");
    }
    println!("180013 bytes arrived complete through every listener, including TLS");
    assert_eq!(opened.metric("kvfleet_gateway_picker_served_elsewhere_total"), 0);

    // Full queues.
    gateway.queue_tokens.store(u64::MAX / 4, Ordering::Relaxed);
    let answer = until("a refusal", || async {
        let answer = post(envoy.at("closed"), &[], &drawn).await;
        (answer.status() == 429).then_some(answer)
    })
    .await;
    assert!(
        answer.header("retry-after").is_some() && answer.header("x-llm-d-request-dropped-reason").is_some()
    );
    println!("full: {} {}", answer.status(), answer.text());
    gateway.queue_tokens.store(0, Ordering::Relaxed);
    until("an answer", || async {
        (post(envoy.at("closed"), &[], &drawn).await.status() == 200).then_some(())
    })
    .await;

    // Measures the added latency.
    let small = completion(0..64, false);
    for (what, body) in [("small", &small), ("180 kB", &large)] {
        if std::env::var("KVFLEET_ENVOY_RECORD").is_ok() {
            break;
        }
        for way in ["direct", "closed", "buffered", "direct", "closed", "buffered"] {
            let (median, high) = latency(envoy.at(way), body).await;
            println!("{what}, {way}: median {} us, p99 {} us", median.as_micros(), high.as_micros());
        }
    }

    // The first endpoint of a list is down: Envoy tries the next one, which is counted.
    let [_one, two] = engines;
    drop(two);
    let answer = until("an answer of the other engine", || async {
        let answer = post(envoy.at("lists"), &[], &drawn).await;
        (answer.status() == 200).then_some(answer)
    })
    .await;
    assert_eq!(engine_of(&answer), "1");
    assert!(lists.metric("kvfleet_gateway_picker_served_elsewhere_total") > 0);

    // Without a picker.
    opened.gateway.shutdown().await;
    let closed = until("a refusal", || async {
        let answer = post(envoy.at("closed"), &[], &small).await;
        (answer.status() != 200).then_some(answer)
    })
    .await;
    assert!(closed.status() >= 500, "{closed:?}");
    // Envoy continues on its own if it holds the body or there is none; a body already sent to the
    // picker is lost.
    for (way, method, body) in [("open_buffered", "POST", small.as_str()), ("open", "GET", "")] {
        until("the remaining engine", || async {
            let answer = request_once(envoy.at(way), method, COMPLETIONS, &[], body).await;
            (answer.status() == 200).then_some(())
        })
        .await;
    }
    let lost = post(envoy.at("open"), &[], &small).await;
    assert_eq!(lost.status(), 500);
    println!(
        "without a picker: closed {}; open 200 if buffered or without a body, else {}",
        closed.status(),
        lost.status()
    );
    lists.gateway.shutdown().await;
    tls.gateway.shutdown().await;
    gateway.shutdown().await;
}
