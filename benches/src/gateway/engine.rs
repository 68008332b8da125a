//! An engine that streams events at a fixed pace, and a client that reads them, with minimal HTTP.
//!
//! Not here: the components between them.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// One event, as long as a chat event.
const EVENT: &str = "data: {\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"crea\
    ted\":1700000000,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" \
    token\"},\"finish_reason\":null}]}\n\n";

/// Request header with the number of events.
const EVENTS_HEADER: &str = "x-pieces";

const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

/// Answer to health and metrics requests: no request waits.
const HEALTHY: &str = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n";

/// Serves until the runtime ends: the first event after `first`, the others at `pace`.
pub(crate) async fn serve(listener: TcpListener, first: Duration, pace: Duration) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(async move {
            // The client closed the connection.
            let _ = answer(stream, first, pace).await;
        });
    }
}

async fn answer(mut stream: TcpStream, first: Duration, pace: Duration) -> anyhow::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = vec![];
    let piece = format!("{:x}\r\n{EVENT}\r\n", EVENT.len());
    loop {
        let Some(pieces) = read_request(&mut stream, &mut buffer).await? else {
            let well = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{HEALTHY}", HEALTHY.len());
            stream.write_all(well.as_bytes()).await?;
            continue;
        };
        if !first.is_zero() {
            tokio::time::sleep(first).await;
        }
        stream.write_all(format!("{HEAD}{piece}").as_bytes()).await?;
        if pieces > 1 {
            let mut ticks = tokio::time::interval(pace);
            for _ in 1..pieces {
                ticks.tick().await;
                stream.write_all(piece.as_bytes()).await?;
            }
        }
        stream.write_all(b"0\r\n\r\n").await?;
    }
}

/// Reads a request and returns its number of events; `None` for a GET.
async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> anyhow::Result<Option<u64>> {
    loop {
        if let Some(end) = position(buffer, b"\r\n\r\n") {
            let head = std::str::from_utf8(&buffer[..end])?.to_ascii_lowercase();
            if head.starts_with("get ") {
                buffer.drain(..end + 4);
                return Ok(None);
            }
            let number = |name: &str| -> anyhow::Result<u64> {
                let line = head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
                Ok(line.with_context(|| format!("no {name} header"))?.trim().parse()?)
            };
            let (length, pieces) = (number("content-length")? as usize, number(EVENTS_HEADER)?);
            if buffer.len() >= end + 4 + length {
                buffer.drain(..end + 4 + length);
                return Ok(Some(pieces));
            }
        }
        ensure!(stream.read_buf(buffer).await? > 0, "the client closed the connection");
    }
}

fn position(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

/// A client with a persistent connection.
pub(crate) struct StreamClient {
    stream: TcpStream,
    buffer: Vec<u8>,
    request: Vec<u8>,
}

impl StreamClient {
    pub(crate) async fn connect(address: std::net::SocketAddr, body: &str) -> anyhow::Result<StreamClient> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: \
             application/json\r\ncontent-length: {}\r\n",
            body.len()
        );
        let request = format!("{head}{EVENTS_HEADER}: 00000001\r\n\r\n{body}").into_bytes();
        Ok(StreamClient { stream, buffer: vec![], request })
    }

    /// Requests `pieces` events, reads them, and returns the time to the first byte.
    pub(crate) async fn request_events(&mut self, pieces: u64) -> anyhow::Result<Duration> {
        let mut first = None;
        self.read_events(pieces, &mut first).await?;
        first.context("the answer is empty")
    }

    /// Like [`Self::request_events`], but also keeps the time to the first byte of an answer that
    /// breaks off later.
    pub(crate) async fn read_events(
        &mut self,
        pieces: u64,
        first: &mut Option<Duration>,
    ) -> anyhow::Result<()> {
        let at = position(&self.request, EVENTS_HEADER.as_bytes())
            .context("the request has no event count")?
            + EVENTS_HEADER.len()
            + 2;
        self.request[at..at + 8].copy_from_slice(format!("{pieces:08}").as_bytes());
        self.buffer.clear();
        let started = Instant::now();
        self.stream.write_all(&self.request).await?;
        let mut events = 0;
        loop {
            ensure!(self.stream.read_buf(&mut self.buffer).await? > 0, "the answer broke off");
            if first.is_none() {
                let text = String::from_utf8_lossy(&self.buffer);
                ensure!(text.starts_with("HTTP/1.1 200"), "no answer: {text}");
                *first = Some(started.elapsed());
            }
            // Complete events are counted and removed, so that long answers are not searched
            // repeatedly.
            while let Some(end) = position(&self.buffer, b"}\n\n") {
                self.buffer.drain(..end + 3);
                events += 1;
            }
            if position(&self.buffer, b"\r\n0\r\n\r\n").is_some() {
                ensure!(events == pieces, "{events} of {pieces} events came");
                return Ok(());
            }
        }
    }
}
