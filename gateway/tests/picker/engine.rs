//! A mock engine: it answers with its number and the length of the request, as one body or as
//! server-sent events.

use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};

use super::http::HttpConnection;

pub struct EchoEngine {
    pub address: String,
    serving: JoinHandle<()>,
}

impl EchoEngine {
    pub async fn start(number: u32) -> EchoEngine {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let serving = tokio::spawn(async move {
            let mut clients = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                clients.spawn(serve(number, HttpConnection::new(stream)));
            }
        });
        EchoEngine { address, serving }
    }
}

impl Drop for EchoEngine {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn serve(number: u32, mut client: HttpConnection) {
    while let Some(request) = client.read().await {
        let sum: u64 = request.body.iter().map(|byte| u64::from(*byte)).sum();
        let answer = format!("{{\"engine\": {number}, \"bytes\": {}, \"sum\": {sum}}}", request.body.len());
        if !request.text().contains("\"stream\": true") {
            let head =
                format!("HTTP/1.1 200 OK\r\nx-engine: {number}\r\ncontent-length: {}\r\n\r\n", answer.len());
            client.write(format!("{head}{answer}").as_bytes()).await;
            continue;
        }
        let head = format!(
            "HTTP/1.1 200 OK\r\nx-engine: {number}\r\ncontent-type: text/event-stream\r\ntransfer-encoding: \
             chunked\r\n\r\n"
        );
        client.write(head.as_bytes()).await;
        for event in [answer.as_str(), "2", "3", "[DONE]"] {
            let event = format!("data: {event}\n\n");
            client.write(format!("{:x}\r\n{event}\r\n", event.len()).as_bytes()).await;
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        client.write(b"0\r\n\r\n").await;
    }
}
