//! Tests of the admin API over TCP connections.

use std::time::Instant;

use kv_core::id::InstanceId;
use kvfleet_errors_doc::says;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::*;
use crate::endpoints::{Endpoint, EngineLoad, Origin};
use kvfleet_testkit::cluster::until;

/// A running admin API and its registry.
struct AdminFixture {
    endpoints: EndpointRegistry,
    address: SocketAddr,
    stop: CancellationToken,
    token: String,
}

async fn start_admin() -> AdminFixture {
    let (endpoints, stop) = (EndpointRegistry::default(), CancellationToken::new());
    let directory = tempfile::TempDir::new().expect("a directory");
    let config = AdminConfig { listen: "127.0.0.1:0".into(), token_file: directory.path().join("token") };
    let address = start(&config, &endpoints, &stop).await.expect("opens").expect("is somewhere");
    let token = std::fs::read_to_string(&config.token_file).expect("was made");
    AdminFixture { endpoints, address, stop, token: token.trim().to_owned() }
}

impl Drop for AdminFixture {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl AdminFixture {
    /// Sends raw bytes, and reads the status and the JSON of the answer.
    async fn send(&self, bytes: &[u8]) -> (u16, Value) {
        let mut stream = TcpStream::connect(self.address).await.expect("it listens");
        stream.write_all(bytes).await.expect("is sent");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.expect("it answers, and closes");
        let answer = String::from_utf8(answer).expect("text");
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        (status, serde_json::from_str(body).unwrap_or(Value::Null))
    }

    async fn call(&self, what: &str, body: &str) -> (u16, Value) {
        let header = format!("authorization: Bearer {}\r\nhost: localhost\r\n{JSON}", self.token);
        self.call_as(&header, what, body).await
    }

    async fn call_as(&self, header: &str, what: &str, body: &str) -> (u16, Value) {
        let length = body.len();
        let request =
            format!("{what} HTTP/1.1\r\nconnection: close\r\n{header}content-length: {length}\r\n\r\n{body}");
        self.send(request.as_bytes()).await
    }

    /// Text of the error, which must have this status.
    async fn refused(&self, what: &str, body: &str, expected: u16) -> String {
        let (status, answer) = self.call(what, body).await;
        assert_eq!(status, expected, "{what}: {answer}");
        answer["error"].as_str().expect("an error").to_owned()
    }
}

const JSON: &str = "content-type: application/json\r\n";

const NAMED: &str = r#"{"instance": 3, "url": "http://10.0.0.3:8000/", "fetches": true}"#;

#[tokio::test]
async fn adds_lists_drains_and_removes_engines() {
    let scene = start_admin().await;
    assert_eq!(scene.call("GET /instances", "").await, (200, serde_json::json!([])));
    let (status, added) = scene.call("POST /instances", NAMED).await;
    assert_eq!((status, &added["origin"], &added["fetches"]), (201, &"called".into(), &true.into()));
    let known = scene.endpoints.get(InstanceId(3)).expect("is known");
    assert_eq!(
        (known.authority.as_str(), known.origin, known.is_draining),
        ("10.0.0.3:8000", Origin::Admin, false)
    );
    let heard = EngineLoad { running: 2, waiting: 1, queue_tokens: 9, ..EngineLoad::default() };
    scene.endpoints.update_status(InstanceId(3), "10.0.0.3:8000", |standing| {
        standing.load = Some((heard, Instant::now()));
    });
    assert_eq!(scene.call("POST /instances", NAMED).await.0, 200, "repeated");
    let (_, listed) = scene.call("GET /instances", "").await;
    assert_eq!((&listed[0]["load"]["running"], &listed[0]["open"]), (&2.into(), &true.into()), "{listed}");
    assert!(listed[0]["load"]["age_ms"].as_u64().is_some_and(|age| age < 60_000), "{listed}");
    let (_, drains) = scene.call("POST /instances/3/drain", "").await;
    assert_eq!((&drains["draining"], &drains["open"]), (&true.into(), &false.into()));
    let (_, resumed) = scene.call("POST /instances/3/resume", "").await;
    assert_eq!(resumed["open"], true);
    assert_eq!(scene.call("DELETE /instances/3", "").await.0, 200);
    assert!(scene.endpoints.list().is_empty());
}

#[tokio::test]
async fn removes_an_engine_after_it_drained() {
    let scene = start_admin().await;
    scene.call("POST /instances", NAMED).await;
    let heard = |running| {
        let heard = EngineLoad { running, ..EngineLoad::default() };
        scene
            .endpoints
            .update_status(InstanceId(3), "10.0.0.3:8000", |one| one.load = Some((heard, Instant::now())));
    };
    heard(1);
    let (status, answer) = scene.call("DELETE /instances/3?drain_s=3600", "").await;
    assert_eq!((status, &answer["removed"]), (202, &false.into()));
    assert!(scene.endpoints.get(InstanceId(3)).is_some_and(|one| one.is_draining));
    until("its removal", || async {
        heard(0);
        scene.endpoints.get(InstanceId(3)).is_none().then_some(())
    })
    .await;
    scene.call("POST /instances", NAMED).await;
    scene.call("DELETE /instances/3?drain_s=3600", "").await;
    scene.call("POST /instances", NAMED).await;
    assert!(scene.endpoints.is_open(InstanceId(3)), "re-added, it stays");
    heard(5);
    scene.call("DELETE /instances/3?drain_s=1", "").await;
    until("removal of a busy engine", || async {
        heard(5);
        scene.endpoints.get(InstanceId(3)).is_none().then_some(())
    })
    .await;
}

#[tokio::test]
async fn requires_the_secret() {
    let scene = start_admin().await;
    let other = format!("{}0", &scene.token[..scene.token.len() - 1]);
    let wrong =
        [String::new(), "Bearer ".into(), format!("Bearer {other}x"), format!("Basic {}", scene.token)];
    for what in [
        "GET /instances",
        "POST /instances",
        "DELETE /instances/3",
        "POST /instances/3/drain",
        "GET /nothing",
    ] {
        for wrong in &wrong {
            let header = format!("host: localhost\r\n{JSON}authorization: {wrong}\r\n");
            assert_eq!(scene.call_as(&header, what, NAMED).await.0, 401, "{what} {header}");
        }
        let (_, answer) = scene.call_as("host: localhost\r\n", what, NAMED).await;
        says("a call without the secret", &answer["error"].as_str().unwrap_or_default(), &[]);
    }
    let header = format!("host: 127.0.0.1:80\r\n{JSON}authorization: bearer {}\r\n", scene.token);
    assert_eq!(scene.call_as(&header, "POST /instances", NAMED).await.0, 201);
}

#[tokio::test]
async fn web_pages_cannot_call() {
    let scene = start_admin().await;
    let secret = format!("authorization: Bearer {}\r\n", scene.token);
    let refused = async |header: String| {
        let (status, answer) = scene.call_as(&format!("{secret}{header}"), "POST /instances", NAMED).await;
        (status, answer["error"].as_str().unwrap_or_default().to_owned())
    };
    for origin in ["http://evil.example", "null", "http://localhost:3000"] {
        let (status, error) = refused(format!("host: localhost\r\n{JSON}origin: {origin}\r\n")).await;
        assert_eq!(status, 403, "{origin}");
        says("a call of a web page to the admin API", &error, &[]);
    }
    for host in ["evil.example", "evil.example:7480", "10.0.0.1", "", "localhost.evil.example"] {
        let (status, error) = refused(format!("host: {host}\r\n{JSON}")).await;
        assert_eq!(status, 403, "{host}");
        says("a call under another name to the admin API", &error, &[]);
    }
    for kind in ["", "content-type: text/plain\r\n", "content-type: application/x-www-form-urlencoded\r\n"] {
        let (status, error) = refused(format!("host: localhost\r\n{kind}")).await;
        assert_eq!(status, 415, "{kind}");
        says("a body of another type for the admin API", &error, &[]);
    }
    assert!(scene.endpoints.list().is_empty());
    for host in ["localhost", "LOCALHOST:7480", "127.0.0.1", "127.0.0.1:7480", "[::1]:7480"] {
        assert!(
            refused(format!("host: {host}\r\ncontent-type: application/json; charset=utf-8\r\n")).await.0
                < 300
        );
    }
}

#[tokio::test]
async fn explains_invalid_calls() {
    let scene = start_admin().await;
    for (instance, origin) in [(1, Origin::Configured), (2, Origin::Discovered)] {
        let (instance, authority) = (InstanceId(instance), "a:1".to_owned());
        scene.endpoints.put(Endpoint {
            instance,
            authority,
            is_tls: false,
            fetches: false,
            role: kv_core::schedule::InstanceRole::Both,
            place: String::new(),
            is_draining: false,
            origin,
        });
    }
    let named = |instance: &str, url: &str| format!(r#"{{"instance": {instance}, "url": "{url}"}}"#);
    let refused = async |body: &str, status| scene.refused("POST /instances", body, status).await;
    says("a call that names no engine", &refused(r#"{"instance": 3}"#, 400).await, &[]);
    says(
        "a call with a key too many",
        &refused(r#"{"instance": 3, "url": "", "weight": 1}"#, 400).await,
        &[],
    );
    let parted = |part: &str| format!(r#"{{"instance": 3, "url": "http://a:1", {part}}}"#);
    let refusal = refused(&parted(r#""role": "prefiller""#), 400).await;
    says("a call with a role that is none", &refusal, &[]);
    let refusal = refused(&parted(r#""place": "a/b/c/d/e""#), 400).await;
    says("a call with a place that is none", &refusal, &[]);
    says("a call with a URL that is none", &refused(&named("3", "engine-3"), 400).await, &[]);
    says("a call that changes what is configured", &refused(&named("1", "http://a:1"), 409).await, &[]);
    says("a call that changes what was found", &refused(&named("2", "http://a:1"), 409).await, &[]);
    for body in [
        "",
        "\u{0}",
        "[]",
        "{",
        &named("-1", "http://a:1"),
        &named("4294967296", "http://a:1"),
        &named("1e9", ""),
    ] {
        refused(body, 400).await;
    }
    says("a call with a body too long", &refused(&" ".repeat(20_000), 413).await, &[]);
    says("a call for an instance that is no number", &scene.refused("GET /instances/x", "", 400).await, &[]);
    says(
        "a call for an instance that is not known",
        &scene.refused("DELETE /instances/9", "", 404).await,
        &[],
    );
    scene.refused("DELETE /instances/1", "", 409).await;
    scene.refused("POST /instances/2/drain", "", 409).await;
    says("a call for something else", &scene.refused("GET /", "", 404).await, &[]);
    assert_eq!(scene.call("POST /instances", NAMED).await.0, 201);
    says(
        "a call that waits without end",
        &scene.refused("DELETE /instances/3?drain_s=9999", "", 400).await,
        &[],
    );
    assert_eq!(scene.endpoints.list().len(), 3);
    let cut = b"POST /instances HTTP/1.1\r\nconnection: close\r\ncontent-length: 9\r\n\r\n{\"inst";
    let mut stream = TcpStream::connect(scene.address).await.expect("it listens");
    stream.write_all(cut).await.expect("is sent");
    drop(stream);
    assert_eq!(scene.call("GET /instances/3", "").await.0, 200, "other calls are answered");
}

#[tokio::test]
async fn limits_the_number_of_engines() {
    let scene = start_admin().await;
    for instance in 0..4_096 {
        let (instance, authority) = (InstanceId(instance), format!("a:{}", instance + 1));
        let origin = Origin::Admin;
        scene.endpoints.put(Endpoint {
            instance,
            authority,
            is_tls: false,
            fetches: false,
            role: kv_core::schedule::InstanceRole::Both,
            place: String::new(),
            is_draining: false,
            origin,
        });
    }
    let body = r#"{"instance": 9000, "url": "http://a:1"}"#;
    says("a call that names an engine too many", &scene.refused("POST /instances", body, 507).await, &[]);
    assert_eq!(scene.call("POST /instances", NAMED).await.0, 200, "a known instance may be replaced");
}

#[tokio::test]
async fn explains_start_failures() {
    let refused = |listen: &str| {
        let config = AdminConfig { listen: listen.into(), ..AdminConfig::default() };
        config.check().expect_err("must be refused").to_string()
    };
    says("an admin API at no address", &refused("localhost"), &[]);
    says("an admin API without a secret", &refused("0.0.0.0:7480"), &[]);
    let directory = tempfile::TempDir::new().expect("a directory");
    let token_file = directory.path().join("token");
    let config = AdminConfig { listen: "0.0.0.0:0".into(), token_file };
    assert_eq!(config.check(), Ok(()));
    let (endpoints, stop) = (EndpointRegistry::default(), CancellationToken::new());
    let path = config.token_file.display().to_string();
    let nowhere = AdminConfig { token_file: directory.path().join("none/token"), ..config.clone() };
    let failed = start(&nowhere, &endpoints, &stop).await.expect_err("there is no directory").to_string();
    says("a secret of calls that cannot be made", &failed, &[&directory.path().display().to_string()]);
    std::fs::write(&config.token_file, "short\n").expect("is written");
    let failed = start(&config, &endpoints, &stop).await.expect_err("all can read it").to_string();
    says("a secret of calls that all users can read", &failed, &[&path]);
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&config.token_file, private).expect("is ours");
    let failed = start(&config, &endpoints, &stop).await.expect_err("is no secret").to_string();
    says("a secret of calls that is none", &failed, &[&path]);
    let taken = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let listen = taken.local_addr().expect("is bound").to_string();
    let config = AdminConfig { listen: listen.clone(), token_file: directory.path().join("other") };
    let failed = start(&config, &endpoints, &stop).await.expect_err("is in use").to_string();
    says("an admin API at a port in use", &failed, &[&listen]);
}
