//! A real Envoy before a real picker and stand-ins for engines: `scripts/envoy` gets one and runs this.
//!
//! With `KVFLEET_ENVOY_RECORD=FILE` what Envoy says is written there, for the test that has no Envoy (`recorded.rs`).

use std::fmt::Write as _;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::door::{DRAWN, Door, completion};
use super::engine::Engine;
use super::http::{Http, Message, ask};
use super::tap::Tap;
use crate::harness::until;
use crate::ports::unused_address;

/// Ways into Envoy: a name, the cluster of its picker, where it sends what was picked, how bodies go, and whether it goes on without a picker.
const WAYS: [(&str, &str, &str, &str, &str); 7] = [
    ("closed", "picker", "chosen", "FULL_DUPLEX_STREAMED", "false"),
    ("buffered", "picker", "chosen", "BUFFERED", "false"),
    ("open", "picker", "chosen", "FULL_DUPLEX_STREAMED", "true"),
    ("open_buffered", "picker", "chosen", "BUFFERED", "true"),
    ("lists", "picker_of_lists", "chosen_of_list", "FULL_DUPLEX_STREAMED", "false"),
    ("tls", "picker_tls", "chosen", "FULL_DUPLEX_STREAMED", "false"),
    ("direct", "", "any", "", ""),
];

struct Envoy {
    process: Child,
    _directory: tempfile::TempDir,
    addresses: Vec<String>,
}

impl Envoy {
    async fn start(program: &str, pickers: [&str; 3], engines: [&str; 2]) -> Envoy {
        let addresses: Vec<_> = WAYS.iter().map(|_| unused_address()).collect();
        let mut listeners = String::new();
        for ((name, cluster, chosen, mode, allow), address) in WAYS.iter().zip(&addresses) {
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
        let envoy = Envoy { process, _directory: directory, addresses };
        for address in &envoy.addresses {
            until("Envoy", || async { tokio::net::TcpStream::connect(address).await.ok().map(drop) }).await;
        }
        envoy
    }

    fn at(&self, name: &str) -> &str {
        &self.addresses[WAYS.iter().position(|way| way.0 == name).unwrap()]
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        let _ = self.process.kill(); // it may have ended
        let _ = self.process.wait();
    }
}

const COMPLETIONS: &str = "/v1/completions";

async fn post(address: &str, headers: &[(&str, &str)], body: &str) -> Message {
    ask(address, "POST", COMPLETIONS, headers, body).await
}

fn engine(message: &Message) -> &str {
    assert_eq!(message.status(), 200, "{message:?}");
    message.header("x-engine").unwrap()
}

/// What an engine says that got this body whole.
fn whole(number: u32, body: &str) -> String {
    let sum: u64 = body.bytes().map(u64::from).sum();
    format!("{{\"engine\": {number}, \"bytes\": {}, \"sum\": {sum}}}", body.len())
}

/// Median and 99th percentile of requests one after the other.
async fn timed(address: &str, body: &str) -> (Duration, Duration) {
    let mut client = Http::connect(address).await;
    let mut took = Vec::new();
    for round in 0..1_200 {
        let began = Instant::now();
        let answer = client.ask("POST", COMPLETIONS, &[], body).await;
        assert_eq!(answer.status(), 200);
        if round >= 200 {
            took.push(began.elapsed());
        }
    }
    took.sort();
    (took[took.len() / 2], took[took.len() * 99 / 100])
}

fn record(tap: &Tap, names: &[&str]) {
    let Ok(file) = std::env::var("KVFLEET_ENVOY_RECORD") else { return };
    let streams = tap.streams();
    assert_eq!(streams.len(), names.len());
    let mut text = String::from(
        "# What Envoy 1.40.0 says to an endpoint picker: each line one ProcessingRequest, as it was on the wire, in hexadecimal.\n",
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
#[ignore = "needs an Envoy: scripts/envoy installs one and runs this"]
async fn a_real_envoy_sends_requests_where_it_is_told() {
    let program = std::env::var("KVFLEET_ENVOY").expect("KVFLEET_ENVOY names an Envoy");
    let engines = [Engine::start(1).await, Engine::start(2).await];
    let [first, second] = [engines[0].address.clone(), engines[1].address.clone()];
    let door = Door::start([first.clone(), second.clone()]).await;
    let opened = door.open(|config| config.endpoints_max = 1).await;
    let lists = door.open(|_| {}).await;
    let tls = door.open(|config| (config.endpoints_max, config.tls) = (1, true)).await;
    let tap = Tap::start(opened.address.clone()).await;
    let taped = if std::env::var("KVFLEET_ENVOY_RECORD").is_ok() { &tap.address } else { &opened.address };
    let envoy = Envoy::start(&program, [taped, &lists.address, &tls.address], [&first, &second]).await;

    // What is drawn to the second goes there; forged words of clients count for nothing.
    let drawn = completion(DRAWN, false);
    let forged = [("x-gateway-destination-endpoint", first.as_str())];
    let answer = post(envoy.at("closed"), &forged, &drawn).await;
    assert_eq!((engine(&answer), answer.text()), ("2", whole(2, &drawn)));
    // A body of several messages, with events that pass through.
    let long = format!("{}{}", completion(DRAWN, true), " ".repeat(20_000));
    let mut client = Http::connect(envoy.at("closed")).await;
    let head =
        format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: engines\r\ncontent-length: {}\r\n\r\n", long.len());
    client.write(head.as_bytes()).await;
    for piece in long.as_bytes().chunks(9_000) {
        client.write(piece).await;
        // So that Envoy reads them one by one.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let answer = client.read().await.unwrap();
    assert_eq!(engine(&answer), "2");
    let events = format!("data: {}\n\ndata: 2\n\ndata: 3\n\ndata: [DONE]\n\n", whole(2, &long));
    assert_eq!((answer.text(), answer.chunks >= 2), (events, true), "{} chunks", answer.chunks);
    // Without a body.
    let answer = ask(envoy.at("closed"), "GET", "/v1/models", &[], "").await;
    assert_eq!(answer.status(), 200);
    // Only where it may go, and nowhere.
    let answer = post(envoy.at("closed"), &[("x-subset", &first)], &drawn).await;
    assert_eq!(engine(&answer), "1");
    let answer = post(envoy.at("closed"), &[("x-subset", "10.0.0.1:1")], &drawn).await;
    assert_eq!(answer.status(), 503);
    println!("refused: {}", answer.text());
    // In one piece.
    let answer = post(envoy.at("buffered"), &[], &drawn).await;
    assert_eq!((engine(&answer), answer.text()), ("2", whole(2, &drawn)));
    record(
        &tap,
        &["a prompt", "several pieces", "no body", "a subset", "a subset of strangers", "in one piece"],
    );

    // A body of 180 kB arrives whole, by either way.
    let large = format!("{}{}", drawn, "\n".repeat(180_013 - drawn.len()));
    for way in ["closed", "lists", "tls", "open", "buffered"] {
        let answer = post(envoy.at(way), &[], &large).await;
        assert_eq!((engine(&answer), answer.text()), ("2", whole(2, &large)), "{way}");
    }
    println!("180013 bytes arrived whole by every way, TLS among them");
    assert_eq!(opened.counted("kvfleet_doors_picker_served_elsewhere_total"), 0);

    // Full queues.
    door.waiting.store(u64::MAX / 4, Ordering::Relaxed);
    let answer = until("a refusal", || async {
        let answer = post(envoy.at("closed"), &[], &drawn).await;
        (answer.status() == 429).then_some(answer)
    })
    .await;
    assert!(
        answer.header("retry-after").is_some() && answer.header("x-llm-d-request-dropped-reason").is_some()
    );
    println!("full: {} {}", answer.status(), answer.text());
    door.waiting.store(0, Ordering::Relaxed);
    until("an answer", || async {
        (post(envoy.at("closed"), &[], &drawn).await.status() == 200).then_some(())
    })
    .await;

    // What it costs.
    let small = completion(0..64, false);
    for (what, body) in [("small", &small), ("180 kB", &large)] {
        if std::env::var("KVFLEET_ENVOY_RECORD").is_ok() {
            break;
        }
        for way in ["direct", "closed", "buffered", "direct", "closed", "buffered"] {
            let (median, high) = timed(envoy.at(way), body).await;
            println!("{what}, {way}: median {} us, p99 {} us", median.as_micros(), high.as_micros());
        }
    }

    // The first of a list is gone: the next one answers, and that is counted.
    let [_one, two] = engines;
    drop(two);
    let answer = until("an answer of the other", || async {
        let answer = post(envoy.at("lists"), &[], &drawn).await;
        (answer.status() == 200).then_some(answer)
    })
    .await;
    assert_eq!(engine(&answer), "1");
    assert!(lists.counted("kvfleet_doors_picker_served_elsewhere_total") > 0);

    // No picker.
    opened.doors.shutdown().await;
    let closed = until("a refusal", || async {
        let answer = post(envoy.at("closed"), &[], &small).await;
        (answer.status() != 200).then_some(answer)
    })
    .await;
    assert!(closed.status() >= 500, "{closed:?}");
    // Envoy goes on by itself where it has the body, or there is none; what it sent away it cannot take back.
    for (way, method, body) in [("open_buffered", "POST", small.as_str()), ("open", "GET", "")] {
        until("the engine that is left", || async {
            let answer = ask(envoy.at(way), method, COMPLETIONS, &[], body).await;
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
    lists.doors.shutdown().await;
    tls.doors.shutdown().await;
    door.shutdown().await;
}
