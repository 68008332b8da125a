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
use rustix::net::sockopt::set_tcp_congestion;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::Mutex;

use super::ANY;

/// Bytes handed to the socket at once, and read at once over TCP.
pub(crate) const PIECE: usize = 256 << 10;

pub(crate) struct RawQuic {
    connection: Connection,
    _ends: (Endpoint, Endpoint),
}

impl RawQuic {
    pub(crate) async fn start(server: &Identity, client: &Identity) -> anyhow::Result<Self> {
        let crypto = QuicServerConfig::try_from(server.quic_server())?;
        let listening = Endpoint::server(ServerConfig::with_crypto(Arc::new(crypto)), ANY)?;
        tokio::spawn(serve_quic(listening.clone()));
        let mut dialing = Endpoint::client(ANY)?;
        let crypto = QuicClientConfig::try_from(client.quic_client())?;
        dialing.set_default_client_config(ClientConfig::new(Arc::new(crypto)));
        let connection = dialing.connect(listening.local_addr()?, SERVER_NAME)?.await?;
        Ok(Self { connection, _ends: (listening, dialing) })
    }

    pub(crate) async fn fetch(&self, bytes: u64) -> anyhow::Result<()> {
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

/// Both ends of connections. They are not paced, whatever the system's default is: a limit is what is possible.
pub(crate) async fn connected(connections: usize) -> anyhow::Result<Vec<(TcpStream, TcpStream)>> {
    let listening = TcpSocket::new_v4()?;
    set_tcp_congestion(&listening, "cubic")?;
    listening.bind(ANY)?;
    let listener = listening.listen(connections as u32)?;
    let mut both = Vec::new();
    for _ in 0..connections {
        let client = TcpSocket::new_v4()?;
        set_tcp_congestion(&client, "cubic")?;
        let client = client.connect(listener.local_addr()?).await?;
        let (server, _) = listener.accept().await?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        both.push((client, server));
    }
    Ok(both)
}

/// Connections of which each serves one fetch at a time.
pub(crate) struct RawTcp {
    streams: Vec<Mutex<(TcpStream, Vec<u8>)>>,
}

impl RawTcp {
    pub(crate) async fn start(connections: usize) -> anyhow::Result<Self> {
        let mut streams = Vec::new();
        for (client, server) in connected(connections).await? {
            tokio::spawn(serve_tcp(server));
            streams.push(Mutex::new((client, vec![0; PIECE])));
        }
        Ok(Self { streams })
    }

    pub(crate) async fn fetch(&self, bytes: u64) -> anyhow::Result<()> {
        self.fetch_as(0, bytes).await
    }

    /// Fetches on the connection of this fetch's number.
    pub(crate) async fn fetch_as(&self, at: u64, bytes: u64) -> anyhow::Result<()> {
        let (stream, buffer) = &mut *self.streams[at as usize % self.streams.len()].lock().await;
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
async fn serve_tcp(mut stream: TcpStream) -> anyhow::Result<()> {
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
