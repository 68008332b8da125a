//! An engine that streams pieces at a pace, and a caller that reads them: as little HTTP as both need.
//!
//! Not here: what is between them.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// One event, as long as those of a chat.
const EVENT: &str = "data: {\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"},\"finish_reason\":null}]}\n\n";

/// In the head of a request: how many events are wanted.
const PIECES: &str = "x-pieces";

const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

/// What it says to whoever asks for its health or its metrics: nothing waits.
const WELL: &str = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n";

/// Serves until the runtime ends: the first piece after so long, the others at this pace.
pub(crate) async fn serve(listener: TcpListener, first: Duration, pace: Duration) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(async move {
            // Who calls has gone: nothing is to be done for it.
            let _ = answer(stream, first, pace).await;
        });
    }
}

async fn answer(mut stream: TcpStream, first: Duration, pace: Duration) -> anyhow::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = vec![];
    let piece = format!("{:x}\r\n{EVENT}\r\n", EVENT.len());
    loop {
        let Some(pieces) = request(&mut stream, &mut buffer).await? else {
            let well = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{WELL}", WELL.len());
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

/// Reads a request, and says how many events it wants; a question how the engine is wants none.
async fn request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> anyhow::Result<Option<u64>> {
    loop {
        if let Some(end) = position(buffer, b"\r\n\r\n") {
            let head = std::str::from_utf8(&buffer[..end])?.to_ascii_lowercase();
            if head.starts_with("get ") {
                buffer.drain(..end + 4);
                return Ok(None);
            }
            let number = |name: &str| -> anyhow::Result<u64> {
                let line = head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
                Ok(line.with_context(|| format!("no {name}"))?.trim().parse()?)
            };
            let (length, pieces) = (number("content-length")? as usize, number(PIECES)?);
            if buffer.len() >= end + 4 + length {
                buffer.drain(..end + 4 + length);
                return Ok(Some(pieces));
            }
        }
        ensure!(stream.read_buf(buffer).await? > 0, "the caller has gone");
    }
}

fn position(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

/// A caller with a connection that stays.
pub(crate) struct Caller {
    stream: TcpStream,
    buffer: Vec<u8>,
    request: Vec<u8>,
}

impl Caller {
    pub(crate) async fn connect(address: std::net::SocketAddr, body: &str) -> anyhow::Result<Caller> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n",
            body.len()
        );
        let request = format!("{head}{PIECES}: 00000001\r\n\r\n{body}").into_bytes();
        Ok(Caller { stream, buffer: vec![], request })
    }

    /// Asks for so many events and reads them; gives back when the first byte came.
    pub(crate) async fn ask(&mut self, pieces: u64) -> anyhow::Result<Duration> {
        let mut first = None;
        self.read(pieces, &mut first).await?;
        first.context("there was a first byte")
    }

    /// The same, and notes when the first byte of a good answer came, also of one that breaks off.
    pub(crate) async fn read(&mut self, pieces: u64, first: &mut Option<Duration>) -> anyhow::Result<()> {
        let at =
            position(&self.request, PIECES.as_bytes()).context("the head has no number")? + PIECES.len() + 2;
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
            // Whole events are counted and forgotten, so that long answers are not searched again and again.
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
