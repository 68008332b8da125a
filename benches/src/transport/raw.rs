//! The minimal byte transfer from server to client, over quinn and over TCP: a request of eight
//! bytes with the length, then the bytes.
//!
//! Not here: frames, checksums, answers, limits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use bytes::Bytes;
use kvfleet_net::tls::{Identity, SERVER_NAME};
use kvfleet_transport::quic::{CONNECTION_WINDOW_BYTES, STREAM_WINDOW_BYTES};
use quinn::congestion::BbrConfig;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{
    AckFrequencyConfig, ClientConfig, Connection, Endpoint, EndpointConfig, MtuDiscoveryConfig, ServerConfig,
    TransportConfig, VarInt,
};
use rustix::net::sockopt::set_tcp_congestion;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Mutex;

use super::ANY;

/// Bytes per socket write, and per TCP read.
pub(crate) const CHUNK_BYTES: usize = 256 << 10;

/// Bytes sent in turn if a loop moves memory: many more than a cache holds.
const MEMORY_BYTES: usize = 64 << 20;

/// Settings of both ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tuning {
    /// Largest packet to probe for, in bytes.
    pub(crate) mtu: u16,
    /// Whether windows are large enough to never block.
    pub(crate) windows: bool,
    /// Segmentation offload.
    pub(crate) segments: bool,
    pub(crate) bbr: bool,
    /// Packets per acknowledgement; `None` uses quinn's default.
    pub(crate) acks: Option<u32>,
    /// Connections that fetches rotate over.
    pub(crate) connections: usize,
    /// Whether each end has its own thread for its socket.
    pub(crate) own_threads: bool,
    /// Whether distinct bytes are sent from memory and reassembled in memory at the other end.
    /// Otherwise one cached piece is sent repeatedly, and dropped on arrival.
    pub(crate) moves_memory: bool,
}

impl Tuning {
    /// quinn's stock settings.
    pub(crate) const STOCK: Tuning = Tuning {
        mtu: 1452,
        windows: false,
        segments: true,
        bbr: false,
        acks: None,
        connections: 1,
        own_threads: false,
        moves_memory: false,
    };

    /// Our path's settings.
    pub(crate) const OURS: Tuning = Tuning { mtu: 6000, windows: true, ..Tuning::STOCK };

    fn transport(&self) -> Arc<TransportConfig> {
        let mut transport = TransportConfig::default();
        let mut discovery = MtuDiscoveryConfig::default();
        discovery.upper_bound(self.mtu);
        transport.mtu_discovery_config(Some(discovery)).enable_segmentation_offload(self.segments);
        // Other sides are measured meanwhile.
        transport.keep_alive_interval(Some(Duration::from_secs(5)));
        if self.windows {
            transport.stream_receive_window(VarInt::from_u32(STREAM_WINDOW_BYTES));
            transport.receive_window(VarInt::from_u32(CONNECTION_WINDOW_BYTES));
            transport.send_window(CONNECTION_WINDOW_BYTES.into());
        }
        if self.bbr {
            transport.congestion_controller_factory(Arc::new(BbrConfig::default()));
        }
        if let Some(packets) = self.acks {
            let mut acks = AckFrequencyConfig::default();
            acks.ack_eliciting_threshold(VarInt::from_u32(packets))
                .max_ack_delay(Some(Duration::from_millis(5)));
            transport.ack_frequency_config(Some(acks));
        }
        Arc::new(transport)
    }

    fn endpoint(&self) -> anyhow::Result<EndpointConfig> {
        let mut endpoint = EndpointConfig::default();
        endpoint.max_udp_payload_size(self.mtu)?;
        Ok(endpoint)
    }

    /// Opens a socket, with its own thread if configured.
    fn open(&self, server: Option<ServerConfig>) -> anyhow::Result<(Endpoint, Option<Runtime>)> {
        let own =
            self.own_threads.then(|| Builder::new_multi_thread().worker_threads(1).enable_all().build());
        let own = own.transpose()?;
        let entered = own.as_ref().map(Runtime::enter);
        let socket = std::net::UdpSocket::bind(ANY)?;
        let endpoint = Endpoint::new(self.endpoint()?, server, socket, Arc::new(quinn::TokioRuntime))?;
        drop(entered);
        Ok((endpoint, own))
    }
}

pub(crate) struct RawQuic {
    copies_to_memory: bool,
    connections: Vec<Connection>,
    next: AtomicUsize,
    _ends: (Endpoint, Endpoint),
    threads: [Option<Runtime>; 2],
}

impl Drop for RawQuic {
    fn drop(&mut self) {
        self.threads.iter_mut().filter_map(Option::take).for_each(Runtime::shutdown_background);
    }
}

impl RawQuic {
    pub(crate) async fn start(server: &Identity, client: &Identity) -> anyhow::Result<Self> {
        Self::tuned(server, client, &Tuning::STOCK).await
    }

    pub(crate) async fn tuned(server: &Identity, client: &Identity, tuning: &Tuning) -> anyhow::Result<Self> {
        let crypto = QuicServerConfig::try_from(server.quic_server())?;
        let mut config = ServerConfig::with_crypto(Arc::new(crypto));
        config.transport_config(tuning.transport());
        let (listening, serving) = tuning.open(Some(config))?;
        for _ in 0..tuning.connections {
            tokio::spawn(serve_quic(listening.clone(), tuning.moves_memory));
        }
        let (mut dialing, asking) = tuning.open(None)?;
        let crypto = QuicClientConfig::try_from(client.quic_client())?;
        let mut config = ClientConfig::new(Arc::new(crypto));
        config.transport_config(tuning.transport());
        dialing.set_default_client_config(config);
        let mut connections = Vec::new();
        for _ in 0..tuning.connections {
            connections.push(dialing.connect(listening.local_addr()?, SERVER_NAME)?.await?);
        }
        let (next, threads) = (AtomicUsize::new(0), [serving, asking]);
        let keeps = tuning.moves_memory;
        Ok(Self { copies_to_memory: keeps, connections, next, _ends: (listening, dialing), threads })
    }

    pub(crate) async fn fetch(&self, bytes: u64) -> anyhow::Result<()> {
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        let (mut ask, mut answer) = self.connections[turn % self.connections.len()].open_bi().await?;
        ask.write_all(&bytes.to_le_bytes()).await?;
        ask.finish()?;
        let mut got = 0;
        let mut kept = Vec::with_capacity(if self.copies_to_memory { bytes as usize } else { 0 });
        while let Some(chunk) = answer.read_chunk(CHUNK_BYTES, true).await? {
            got += chunk.bytes.len() as u64;
            if self.copies_to_memory {
                kept.extend_from_slice(&chunk.bytes);
            }
        }
        std::hint::black_box(&kept);
        ensure!(got == bytes, "{got} of {bytes} bytes came");
        Ok(())
    }
}

/// Serves until the client disconnects; the client sees the reason.
async fn serve_quic(endpoint: Endpoint, moves_memory: bool) -> anyhow::Result<()> {
    let connection = endpoint.accept().await.context("the endpoint closed")?.await?;
    let memory = Bytes::from(vec![0x5a; if moves_memory { MEMORY_BYTES } else { CHUNK_BYTES }]);
    let mut at = 0;
    loop {
        let (mut answer, mut ask) = connection.accept_bi().await?;
        let mut length = [0; 8];
        ask.read_exact(&mut length).await?;
        let mut left = u64::from_le_bytes(length) as usize;
        while left > 0 {
            let part = memory.slice(at..at + left.min(CHUNK_BYTES).min(memory.len() - at));
            at = if moves_memory { (at + part.len()) % memory.len() } else { 0 };
            left -= part.len();
            answer.write_chunk(part).await?;
        }
        answer.finish()?;
    }
}

/// Both ends of connections. They are not paced, independent of the system's default, because a
/// limit shows the maximum.
pub(crate) async fn connected_pairs(connections: usize) -> anyhow::Result<Vec<(TcpStream, TcpStream)>> {
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

/// Connections that each serve one fetch at a time.
pub(crate) struct RawTcp {
    streams: Vec<Mutex<(TcpStream, Vec<u8>)>>,
}

impl RawTcp {
    pub(crate) async fn start(connections: usize) -> anyhow::Result<Self> {
        let mut streams = Vec::new();
        for (client, server) in connected_pairs(connections).await? {
            tokio::spawn(serve_tcp(server));
            streams.push(Mutex::new((client, vec![0; CHUNK_BYTES])));
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
            let room = left.min(CHUNK_BYTES);
            left -= stream.read_exact(&mut buffer[..room]).await?;
        }
        Ok(())
    }
}

/// Serves one client until it disconnects; the client sees the reason.
async fn serve_tcp(mut stream: TcpStream) -> anyhow::Result<()> {
    let piece = vec![0x5a; CHUNK_BYTES];
    loop {
        let mut left = stream.read_u64_le().await? as usize;
        while left > 0 {
            let part = &piece[..left.min(CHUNK_BYTES)];
            stream.write_all(part).await?;
            left -= part.len();
        }
    }
}
