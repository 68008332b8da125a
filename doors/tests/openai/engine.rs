//! An engine that writes what a test says, byte for byte, and can fail at every point of an answer.
//!
//! It speaks just enough HTTP/1.1. Not here: a model.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// What happens in an answer.
#[derive(Clone, Debug)]
pub enum Step {
    /// Bytes go out at once.
    Write(Vec<u8>),
    /// Nothing, until the test lets one more go.
    Gate,
    /// The connection ends.
    Close,
    /// Nothing more, until the caller leaves.
    Hang,
}

/// A request as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    pub head: String,
    pub body: Vec<u8>,
}

impl Received {
    pub fn header(&self, name: &str) -> Option<String> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
        })
    }
}

#[derive(Debug)]
pub struct Engine {
    pub address: SocketAddr,
    shared: Arc<Shared>,
    listening: tokio::task::JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    scripts: Mutex<VecDeque<Vec<Step>>>,
    usual: Mutex<Vec<Step>>,
    received: Mutex<Vec<Received>>,
    health: AtomicUsize,
    left: AtomicUsize,
    gate: Semaphore,
    /// Which models it says that it serves; without a word it knows no such question.
    models: Mutex<Option<String>>,
}

impl Engine {
    /// Every answer is `usual`, unless another one was said for it.
    pub async fn start(usual: Vec<Step>) -> Engine {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            scripts: Mutex::default(),
            usual: Mutex::new(usual),
            received: Mutex::default(),
            health: AtomicUsize::new(0),
            left: AtomicUsize::new(0),
            gate: Semaphore::new(0),
            models: Mutex::default(),
        });
        let own = shared.clone();
        let listening = tokio::spawn(async move {
            let mut callers = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let shared = own.clone();
                callers.spawn(async move { shared.serve(stream).await });
            }
        });
        Engine { address, shared, listening }
    }

    /// Takes no more connections, and ends those that there are.
    pub async fn gone(self) {
        self.listening.abort();
        let _ = self.listening.await; // as asked
    }

    /// The next answer.
    pub fn once(&self, script: Vec<Step>) {
        self.shared.scripts.lock().push_back(script);
    }

    pub fn usually(&self, script: Vec<Step>) {
        *self.shared.usual.lock() = script;
    }

    /// What it answers who asks for its models.
    pub fn lists(&self, models: Option<String>) {
        *self.shared.models.lock() = models;
    }

    pub fn received(&self) -> Vec<Received> {
        self.shared.received.lock().clone()
    }

    /// Callers that left before the end of an answer.
    pub fn left(&self) -> usize {
        self.shared.left.load(Ordering::SeqCst)
    }

    /// How often it was asked whether it is well.
    pub fn asked_whether_well(&self) -> usize {
        self.shared.health.load(Ordering::SeqCst)
    }

    /// Lets one gate open.
    pub fn go_on(&self) {
        self.shared.gate.add_permits(1);
    }
}

impl Shared {
    async fn serve(&self, mut stream: TcpStream) {
        stream.set_nodelay(true).unwrap();
        let mut buffer = Vec::new();
        while let Some(request) = read_request(&mut stream, &mut buffer).await {
            // Whether it is there is asked besides, and no part of a test.
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
                let [Step::Write(answer)] = &plain(status, &text)[..] else { break };
                if stream.write_all(answer).await.is_err() {
                    break;
                }
                continue;
            }
            self.received.lock().push(request);
            let script = self.scripts.lock().pop_front().unwrap_or_else(|| self.usual.lock().clone());
            for step in script {
                let is_there = match step {
                    Step::Write(bytes) => stream.write_all(&bytes).await.is_ok(),
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
                    self.left.fetch_add(1, Ordering::SeqCst);
                    return;
                }
            }
        }
    }
}

async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<Received> {
    loop {
        if let Some(end) = buffer.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = String::from_utf8(buffer[..end].to_vec()).unwrap();
            let mut request = Received { head, body: vec![] };
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

/// The head of a stream of events.
pub fn stream_head() -> Step {
    Step::Write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nx-engine: mine\r\n\r\n".to_vec())
}

/// A piece of a chunked body.
pub fn piece(text: &str) -> Step {
    piece_of_bytes(text.as_bytes())
}

/// The same, of what need not be text.
pub fn piece_of_bytes(bytes: &[u8]) -> Step {
    Step::Write([format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat())
}

/// The end of a chunked body.
pub fn end() -> Step {
    Step::Write(b"0\r\n\r\n".to_vec())
}

/// A whole answer.
pub fn plain(status: u16, text: &str) -> Vec<Step> {
    let head = format!(
        "HTTP/1.1 {status} Said\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        text.len()
    );
    vec![Step::Write(format!("{head}{text}").into_bytes())]
}

/// Events of an answer with its usage in the last one.
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

/// A stream of them.
pub fn streamed(events: &[String]) -> Vec<Step> {
    let mut steps = vec![stream_head()];
    steps.extend(events.iter().map(|event| piece(event)));
    steps.push(end());
    steps
}
