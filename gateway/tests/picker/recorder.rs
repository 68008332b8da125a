//! Records the messages that Envoy sends to a picker, extracted from HTTP/2 frames.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// A proxy between Envoy and the picker.
pub struct StreamRecorder {
    pub address: String,
    recorded: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl StreamRecorder {
    pub async fn start(to: String) -> StreamRecorder {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let heard = Arc::<Mutex<Vec<Vec<u8>>>>::default();
        let all = Arc::clone(&heard);
        tokio::spawn(async move {
            while let Ok((from, _)) = listener.accept().await {
                // The test stopped the picker: close Envoy's connection.
                let Ok(to) = TcpStream::connect(&to).await else { continue };
                [&from, &to].iter().for_each(|socket| socket.set_nodelay(true).unwrap());
                let number = all.lock().len();
                all.lock().push(Vec::new());
                tokio::spawn(copy(from, to, Arc::clone(&all), number));
            }
        });
        StreamRecorder { address, recorded: heard }
    }

    /// Messages of each stream, in the order of the streams, over all connections.
    pub fn streams(&self) -> Vec<Vec<Vec<u8>>> {
        self.recorded.lock().iter().flat_map(|bytes| messages(bytes)).collect()
    }
}

async fn copy(from: TcpStream, to: TcpStream, heard: Arc<Mutex<Vec<Vec<u8>>>>, number: usize) {
    let ((mut from, mut back), (mut answers, mut to)) = (from.into_split(), to.into_split());
    tokio::spawn(async move { tokio::io::copy(&mut answers, &mut back).await });
    let mut buffer = vec![0; 65_536];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        heard.lock()[number].extend_from_slice(&buffer[..read]);
        if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}

/// Parses one connection: the preface, then frames with length, type, flags and stream.
fn messages(bytes: &[u8]) -> Vec<Vec<Vec<u8>>> {
    let mut rest = bytes.strip_prefix(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").expect("HTTP/2");
    let mut data = BTreeMap::<u32, Vec<u8>>::new();
    while rest.len() >= 9 {
        let length = u32::from_be_bytes([0, rest[0], rest[1], rest[2]]) as usize;
        let stream = u32::from_be_bytes([rest[5], rest[6], rest[7], rest[8]]);
        let (kind, flags) = (rest[3], rest[4]);
        let Some(payload) = rest.get(9..9 + length) else { break };
        if kind == 0 {
            assert_eq!(flags & 8, 0, "padding");
            data.entry(stream).or_default().extend_from_slice(payload);
        }
        rest = &rest[9 + length..];
    }
    data.into_values().map(|data| split_messages(&data)).collect()
}

/// Splits a stream into gRPC messages, each after a prefix of five bytes.
fn split_messages(mut rest: &[u8]) -> Vec<Vec<u8>> {
    let mut messages = Vec::new();
    while rest.len() >= 5 {
        assert_eq!(rest[0], 0, "compressed");
        let length = u32::from_be_bytes([rest[1], rest[2], rest[3], rest[4]]) as usize;
        messages.push(rest[5..5 + length].to_vec());
        rest = &rest[5 + length..];
    }
    messages
}
