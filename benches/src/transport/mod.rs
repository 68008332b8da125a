//! The QUIC path against bare transports: quinn with stock settings, and TCP without encryption.
//!
//! Not here: stores. Every side serves bytes that lie ready in memory. Client and server share one
//! process, so a CPU-second counts both ends.

pub(crate) mod raw;

use std::cell::RefCell;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use anyhow::ensure;
use benches::{BenchRow, Better, measure_time, side_by_side};
use kv_core::id::BlockHash;
use kvfleet_net::tls::{Identity, Role};
use kvfleet_transport::quic::{QuicConfig, QuicDialer, QuicServer};
use kvfleet_transport::suite::{self, IDENTITY, MemoryService};
use kvfleet_transport::{Dialer, FetchAnswer, Path};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::runtime::Runtime;

use crate::Effort;
use raw::{RawQuic, RawTcp};

pub(crate) const ABOUT: &str = "fetches over loopback, one at a time, every frame verified (CRC32C, hash, \
    identity) on our side; against a bare stream loop on quinn with stock settings (same certificates, no \
    verification), and as the limit a bare TCP loop without encryption";

const QUINN: &str = "quinn 0.11.12, stock settings";
const TCP: &str = "limit: tokio TCP, no encryption";

/// Parameters of one fetch.
struct TransportShape {
    name: &'static str,
    block_bytes: u32,
    blocks: u32,
}

impl TransportShape {
    fn fetch_bytes(&self) -> u64 {
        u64::from(self.block_bytes) * u64::from(self.blocks)
    }
}

const SHAPES: &[TransportShape] = &[
    TransportShape { name: "fetch 1 x 64 KiB", block_bytes: 64 << 10, blocks: 1 },
    TransportShape { name: "fetch 16 x 64 KiB", block_bytes: 64 << 10, blocks: 16 },
    TransportShape { name: "fetch 8 x 1 MiB", block_bytes: 1 << 20, blocks: 8 },
];

/// Bytes fetched per run and side.
const RUN_BYTES: u64 = 256 << 20;

pub(crate) const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let (server, client) = identities()?;
    let mut rows = Vec::new();
    for shape in SHAPES {
        let sides = runtime.block_on(TransportSides::start(&server, &client, shape))?;
        rows.extend(compare(effort, &runtime, shape, &sides)?);
    }
    Ok(rows)
}

/// All three sides, connected.
struct TransportSides {
    ours: OwnQuicPath,
    quic: RawQuic,
    tcp: RawTcp,
}

impl TransportSides {
    async fn start(server: &Identity, client: &Identity, shape: &TransportShape) -> anyhow::Result<Self> {
        Ok(Self {
            ours: OwnQuicPath::start(server, client, shape).await?,
            quic: RawQuic::start(server, client).await?,
            tcp: RawTcp::start(1).await?,
        })
    }
}

fn compare(
    effort: &Effort,
    runtime: &Runtime,
    shape: &TransportShape,
    sides: &TransportSides,
) -> anyhow::Result<[BenchRow; 2]> {
    let bytes = shape.fetch_bytes();
    let fetches = effort.scaled(RUN_BYTES).div_ceil(bytes);
    // Reported after the measurement: a broken side must not look fast.
    let failed = RefCell::new(None);
    let rate = |fetch: &dyn Fn() -> anyhow::Result<()>| {
        let (outcome, spent) = measure_time(|| (0..fetches).try_for_each(|_| fetch()));
        if let Err(error) = outcome {
            failed.borrow_mut().get_or_insert(error);
        }
        spent.per_cpu_s(fetches * bytes) / 1e9
    };
    let ours = || rate(&|| runtime.block_on(sides.ours.fetch()));
    let quic = || rate(&|| runtime.block_on(sides.quic.fetch(bytes)));
    let tcp = || rate(&|| runtime.block_on(sides.tcp.fetch(bytes)));
    let row =
        |peer, outcome| BenchRow::new("transport", shape.name, "GB/CPU-s", peer, Better::Higher, outcome);
    let rows =
        [row(QUINN, side_by_side(effort.runs, ours, quic)), row(TCP, side_by_side(effort.runs, ours, tcp))];
    match failed.into_inner() {
        Some(error) => Err(error.context(format!("{} broke during the measurement", shape.name))),
        None => Ok(rows),
    }
}

/// A server's and a client's identity under one new authority.
pub(crate) fn identities() -> anyhow::Result<(Identity, Identity)> {
    let mut params = CertificateParams::new(vec![])?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    let member = || -> anyhow::Result<Identity> {
        let key = KeyPair::generate()?;
        let cert = CertificateParams::new(Role::Node(None).dns_names())?.signed_by(&key, &authority)?;
        let (ca, cert, key) = (authority.pem(), cert.pem(), key.serialize_pem());
        Ok(Identity::from_pem(ca.as_bytes(), cert.as_bytes(), key.as_bytes())?)
    };
    Ok((member()?, member()?))
}

/// Our path, and the blocks it serves.
struct OwnQuicPath {
    path: Arc<dyn Path>,
    hashes: Vec<BlockHash>,
    /// Dropping it stops both ends.
    _ends: (QuicServer, QuicDialer),
}

impl OwnQuicPath {
    async fn start(server: &Identity, client: &Identity, shape: &TransportShape) -> anyhow::Result<Self> {
        let service = MemoryService::default();
        let hashes = suite::hashes(shape.blocks);
        hashes.iter().for_each(|&hash| service.hold(suite::frame(hash, shape.block_bytes)));
        let server = QuicServer::bind(ANY, server, Arc::new(service))?;
        let dialer = QuicDialer::new(client, QuicConfig::default());
        let path = dialer.dial(server.local_addr().to_string()).await?;
        Ok(Self { path, hashes, _ends: (server, dialer) })
    }

    async fn fetch(&self) -> anyhow::Result<()> {
        let mut verified = 0;
        let mut sink = |frame: kvfleet_proto::frame::Frame| {
            let wanted = self.hashes.get(verified).copied().unwrap_or_default();
            verified += usize::from(frame.verify(IDENTITY, wanted).is_ok());
        };
        let answer = self.path.fetch(suite::fetch_request(&self.hashes), &mut sink).await?;
        ensure!(matches!(answer, FetchAnswer::Hit { .. }), "expected a hit, got {answer:?}");
        ensure!(verified == self.hashes.len(), "{verified} of {} blocks were verified", self.hashes.len());
        Ok(())
    }
}
