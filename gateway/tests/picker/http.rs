//! The part of HTTP/1.1 that mock engines and their clients need.

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

/// A complete request or answer.
#[derive(Clone, Debug, Default)]
pub struct HttpMessage {
    pub first: String,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Number of chunks of its body.
    pub chunks: usize,
}

impl HttpMessage {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub fn status(&self) -> u16 {
        self.first.split(' ').nth(1).unwrap().parse().unwrap()
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

pub struct HttpConnection {
    stream: BufReader<TcpStream>,
}

impl HttpConnection {
    pub fn new(stream: TcpStream) -> HttpConnection {
        stream.set_nodelay(true).unwrap();
        HttpConnection { stream: BufReader::new(stream) }
    }

    pub async fn connect(address: &str) -> HttpConnection {
        HttpConnection::new(TcpStream::connect(address).await.unwrap())
    }

    async fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        let read = self.stream.read_line(&mut line).await.ok()?;
        (read > 0).then(|| line.trim_end().to_owned())
    }

    /// The next message; `None` at the end of the connection.
    pub async fn read(&mut self) -> Option<HttpMessage> {
        let mut message = HttpMessage { first: self.line().await?, ..HttpMessage::default() };
        loop {
            let line = self.line().await?;
            let Some((key, value)) = line.split_once(':') else { break };
            message.headers.push((key.to_ascii_lowercase(), value.trim().to_owned()));
        }
        if message.header("transfer-encoding") == Some("chunked") {
            loop {
                let length = usize::from_str_radix(&self.line().await?, 16).unwrap();
                let mut chunk = vec![0; length + 2];
                self.stream.read_exact(&mut chunk).await.ok()?;
                if length == 0 {
                    break;
                }
                message.body.extend_from_slice(&chunk[..length]);
                message.chunks += 1;
            }
        } else if let Some(length) = message.header("content-length") {
            message.body = vec![0; length.parse().unwrap()];
            self.stream.read_exact(&mut message.body).await.ok()?;
        }
        Some(message)
    }

    pub async fn write(&mut self, bytes: &[u8]) {
        let _ = self.stream.get_mut().write_all(bytes).await; // the other end may have closed
    }

    /// Sends a request, and waits for the whole answer.
    pub async fn request(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> HttpMessage {
        let mut text = format!("{method} {path} HTTP/1.1\r\nhost: engines\r\n");
        for (key, value) in headers {
            text.push_str(&format!("{key}: {value}\r\n"));
        }
        if !body.is_empty() {
            text.push_str(&format!("content-type: application/json\r\ncontent-length: {}\r\n", body.len()));
        }
        self.write(format!("{text}\r\n{body}").as_bytes()).await;
        self.read().await.expect("an answer")
    }
}

/// Sends one request on a new connection.
pub async fn request_once(
    address: &str,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> HttpMessage {
    HttpConnection::connect(address).await.request(method, path, headers, body).await
}
