//! The least that moves bytes from a server to a client when asked: eight bytes of length there, that
//! many bytes back, over quinn and over TCP.
//!
//! Not here: frames, checksums, answers, limits.

use std::sync::Arc;

use anyhow::{Context, ensure};
use bytes::Bytes;
use kvfleet_proto::tls::{Identity, SERVER_NAME};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{ClientConfig, Connection, Endpoint, ServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Mutex;

use super::ANY;

/// Bytes handed to the socket at once, and read at once over TCP.
const PIECE: usize = 256 << 10;

pub(super) struct RawQuic {
    connection: Connection,
    _ends: (Endpoint, Endpoint),
}

impl RawQuic {
    pub(super) async fn start(server: &Identity, client: &Identity) -> anyhow::Result<Self> {
        let crypto = QuicServerConfig::try_from(server.quic_server())?;
        let listening = Endpoint::server(ServerConfig::with_crypto(Arc::new(crypto)), ANY)?;
        tokio::spawn(serve_quic(listening.clone()));
        let mut dialing = Endpoint::client(ANY)?;
        let crypto = QuicClientConfig::try_from(client.quic_client())?;
        dialing.set_default_client_config(ClientConfig::new(Arc::new(crypto)));
        let connection = dialing.connect(listening.local_addr()?, SERVER_NAME)?.await?;
        Ok(Self { connection, _ends: (listening, dialing) })
    }

    pub(super) async fn fetch(&self, bytes: u64) -> anyhow::Result<()> {
        let (mut ask, mut answer) = self.connection.open_bi().await?;
        ask.write_all(&bytes.to_le_bytes()).await?;
        ask.finish()?;
        let mut got = 0;
        while let Some(chunk) = answer.read_chunk(PIECE, true).await? {
            got += chunk.bytes.len() as u64;
        }
        ensure!(got == bytes, "{got} of {bytes} bytes came");
        Ok(())
    }
}

/// Serves until the client goes; what ends it is seen there.
async fn serve_quic(endpoint: Endpoint) -> anyhow::Result<()> {
    let connection = endpoint.accept().await.context("the endpoint closed")?.await?;
    let piece = Bytes::from(vec![0x5a; PIECE]);
    loop {
        let (mut answer, mut ask) = connection.accept_bi().await?;
        let mut length = [0; 8];
        ask.read_exact(&mut length).await?;
        let mut left = u64::from_le_bytes(length) as usize;
        while left > 0 {
            let part = piece.slice(..left.min(PIECE));
            left -= part.len();
            answer.write_chunk(part).await?;
        }
        answer.finish()?;
    }
}

pub(super) struct RawTcp {
    stream: Mutex<(TcpStream, Vec<u8>)>,
}

impl RawTcp {
    pub(super) async fn start() -> anyhow::Result<Self> {
        let listener = TcpListener::bind(ANY).await?;
        let address = listener.local_addr()?;
        tokio::spawn(serve_tcp(listener));
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream: Mutex::new((stream, vec![0; PIECE])) })
    }

    pub(super) async fn fetch(&self, bytes: u64) -> anyhow::Result<()> {
        let (stream, buffer) = &mut *self.stream.lock().await;
        stream.write_all(&bytes.to_le_bytes()).await?;
        let mut left = bytes as usize;
        while left > 0 {
            let room = left.min(PIECE);
            left -= stream.read_exact(&mut buffer[..room]).await?;
        }
        Ok(())
    }
}

/// Serves one client until it goes; what ends it is seen there.
async fn serve_tcp(listener: TcpListener) -> anyhow::Result<()> {
    let (mut stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    let piece = vec![0x5a; PIECE];
    loop {
        let mut left = stream.read_u64_le().await? as usize;
        while left > 0 {
            let part = &piece[..left.min(PIECE)];
            stream.write_all(part).await?;
            left -= part.len();
        }
    }
}
