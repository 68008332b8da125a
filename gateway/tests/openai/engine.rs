//! A scripted engine: it writes exact bytes, and can fail at any point of an answer.
//!
//! It speaks a subset of HTTP/1.1. Not here: a model.

use std::collections::{BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// One step of an answer.
#[derive(Clone, Debug)]
pub enum Step {
    /// Writes bytes at once.
    Write(Vec<u8>),
    /// Waits until the test opens the gate.
    Gate,
    /// Closes the connection.
    Close,
    /// Waits until the client disconnects.
    Hang,
    /// Answers with `cached_tokens` as an engine with a prefix cache: all tokens of the prompt if an
    /// earlier request had the same messages and `cache_salt`, and else none.
    AnswerCached,
}

/// A received request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceivedRequest {
    pub head: String,
    pub body: Vec<u8>,
}

impl ReceivedRequest {
    pub fn header(&self, name: &str) -> Option<String> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
        })
    }
}

#[derive(Debug)]
pub struct ScriptedEngine {
    pub address: SocketAddr,
    shared: Arc<ScriptState>,
    listening: tokio::task::JoinHandle<()>,
}

#[derive(Debug)]
struct ScriptState {
    scripts: Mutex<VecDeque<Vec<Step>>>,
    default_script: Mutex<Vec<Step>>,
    received: Mutex<Vec<ReceivedRequest>>,
    health: AtomicUsize,
    disconnects: AtomicUsize,
    gate: Semaphore,
    /// Answer to model list requests; `None` answers 404.
    models: Mutex<Option<String>>,
    /// Prompts that are cached, each with its salt.
    cached: Mutex<BTreeSet<(String, String)>>,
}

impl ScriptedEngine {
    /// Starts an engine that answers with `usual` by default.
    pub async fn start(usual: Vec<Step>) -> ScriptedEngine {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(ScriptState {
            scripts: Mutex::default(),
            default_script: Mutex::new(usual),
            received: Mutex::default(),
            health: AtomicUsize::new(0),
            disconnects: AtomicUsize::new(0),
            gate: Semaphore::new(0),
            models: Mutex::default(),
            cached: Mutex::default(),
        });
        let shared_state = shared.clone();
        let listening = tokio::spawn(async move {
            let mut callers = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let shared = shared_state.clone();
                callers.spawn(async move { shared.serve(stream).await });
            }
        });
        ScriptedEngine { address, shared, listening }
    }

    /// Stops listening and closes all connections.
    pub async fn stop(self) {
        self.listening.abort();
        let _ = self.listening.await; // cancelled as requested
    }

    /// Script of the next answer.
    pub fn next_answer(&self, script: Vec<Step>) {
        self.shared.scripts.lock().push_back(script);
    }

    pub fn set_default(&self, script: Vec<Step>) {
        *self.shared.default_script.lock() = script;
    }

    /// Sets the answer to model list requests.
    pub fn set_models(&self, models: Option<String>) {
        *self.shared.models.lock() = models;
    }

    pub fn received(&self) -> Vec<ReceivedRequest> {
        self.shared.received.lock().clone()
    }

    /// Clients that disconnected before the end of an answer.
    pub fn disconnects(&self) -> usize {
        self.shared.disconnects.load(Ordering::SeqCst)
    }

    /// Number of health checks.
    pub fn health_checks(&self) -> usize {
        self.shared.health.load(Ordering::SeqCst)
    }

    /// Opens the gate once.
    pub fn open_gate(&self) {
        self.shared.gate.add_permits(1);
    }
}

impl ScriptState {
    async fn serve(&self, mut stream: TcpStream) {
        stream.set_nodelay(true).unwrap();
        let mut buffer = Vec::new();
        while let Some(request) = read_request(&mut stream, &mut buffer).await {
            // Health checks are answered, but are not part of scripts.
            if request.head.starts_with("GET /health ") {
                self.health.fetch_add(1, Ordering::SeqCst);
                if stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.is_err() {
                    break;
                }
                continue;
            }
            if request.head.starts_with("GET /v1/models ") {
                let models = self.models.lock().clone();
                let (status, text) = models.map_or((404, String::new()), |models| (200, models));
                let [Step::Write(answer)] = &json_answer(status, &text)[..] else { break };
                if stream.write_all(answer).await.is_err() {
                    break;
                }
                continue;
            }
            self.received.lock().push(request.clone());
            let script =
                self.scripts.lock().pop_front().unwrap_or_else(|| self.default_script.lock().clone());
            for step in script {
                let is_there = match step {
                    Step::Write(bytes) => stream.write_all(&bytes).await.is_ok(),
                    Step::AnswerCached => stream.write_all(&self.answer_cached(&request)).await.is_ok(),
                    Step::Gate => {
                        let mut byte = [0];
                        tokio::select! {
                            permit = self.gate.acquire() => { permit.unwrap().forget(); true }
                            read = stream.read(&mut byte) => { assert!(matches!(read, Ok(0) | Err(_))); false }
                        }
                    }
                    Step::Close => return,
                    Step::Hang => {
                        let read = stream.read(&mut [0]).await;
                        assert!(matches!(read, Ok(0) | Err(_)));
                        false
                    }
                };
                if !is_there {
                    self.disconnects.fetch_add(1, Ordering::SeqCst);
                    return;
                }
            }
        }
    }
}

impl ScriptState {
    fn answer_cached(&self, request: &ReceivedRequest) -> Vec<u8> {
        const PROMPT_TOKENS: u32 = 64;
        let body: serde_json::Value = serde_json::from_slice(&request.body).unwrap();
        let prompt = (body["messages"].to_string(), body["cache_salt"].to_string());
        let cached_tokens = if self.cached.lock().insert(prompt) { 0 } else { PROMPT_TOKENS };
        let usage = serde_json::json!({
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": 1,
            "prompt_tokens_details": { "cached_tokens": cached_tokens },
        });
        let text = serde_json::json!({ "choices": [], "usage": usage }).to_string();
        format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{text}",
            text.len()
        )
        .into_bytes()
    }
}

async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<ReceivedRequest> {
    loop {
        if let Some(end) = buffer.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = String::from_utf8(buffer[..end].to_vec()).unwrap();
            let mut request = ReceivedRequest { head, body: vec![] };
            let length: usize = request.header("content-length").map_or(0, |length| length.parse().unwrap());
            while buffer.len() < end + 4 + length {
                more(stream, buffer).await?;
            }
            request.body = buffer[end + 4..end + 4 + length].to_vec();
            buffer.drain(..end + 4 + length);
            return Some(request);
        }
        more(stream, buffer).await?;
    }
}

async fn more(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<()> {
    let read = stream.read_buf(buffer).await.ok()?;
    (read > 0).then_some(())
}

/// Head of an event stream.
pub fn stream_head() -> Step {
    Step::Write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nx-engine: \
         mine\r\n\r\n"
            .to_vec(),
    )
}

/// A chunk of a chunked body.
pub fn chunk(text: &str) -> Step {
    byte_chunk(text.as_bytes())
}

/// A chunk of arbitrary bytes.
pub fn byte_chunk(bytes: &[u8]) -> Step {
    Step::Write([format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat())
}

/// The last chunk.
pub fn last_chunk() -> Step {
    Step::Write(b"0\r\n\r\n".to_vec())
}

/// An answer in one piece.
pub fn json_answer(status: u16, text: &str) -> Vec<Step> {
    let head = format!(
        "HTTP/1.1 {status} Said\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        text.len()
    );
    vec![Step::Write(format!("{head}{text}").into_bytes())]
}

/// Events of an answer, with usage in the last one.
pub fn events(prompt_tokens: u32) -> Vec<String> {
    vec![
        "data: {\"choices\":[{\"delta\":{\"content\":\"Par\"}}]}\n\n".into(),
        "data: {\"choices\":[{\"delta\":{\"content\":\"is \u{e9}\\\"prompt_tokens\\\":1\"}}]}\n\n".into(),
        format!(
            "data: {{\"choices\":[],\"usage\":{{\"prompt_tokens\":{prompt_tokens},\"completion_tokens\":2}}}}\n\n"
        ),
        "data: [DONE]\n\n".into(),
    ]
}

/// A stream of these events.
pub fn event_stream(events: &[String]) -> Vec<Step> {
    let mut steps = vec![stream_head()];
    steps.extend(events.iter().map(|event| chunk(event)));
    steps.push(last_chunk());
    steps
}
