//! Three etcd members on loopback with stock settings, and clients that speak its gRPC protocol.
//!
//! Not here: the measured loop (`load.rs`). All clients talk to the leader, the best case of etcd's
//! own benchmark: a follower would only forward puts.

use std::fs::File;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use tempfile::TempDir;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

use super::{Client, Cluster};

/// Debian's package of the server.
const PACKAGE: &str = "etcd-server";
/// Connections that clients share; fewer connections would limit throughput.
const CONNECTIONS: usize = 16;
/// Timeout for the leader election.
const ELECTION_MAX: Duration = Duration::from_secs(20);
/// Bytes of a value: the hashes of 16 blocks.
const VALUE_BYTES: usize = 256;
/// Keys per client; more keys would measure the growth of etcd's tree.
const CLIENT_KEYS: u64 = 1_000;

/// Returns the path of `etcd`, and installs it first if missing and allowed.
pub(super) fn program(install: bool) -> anyhow::Result<PathBuf> {
    if let Some(found) = find() {
        return Ok(found);
    }
    ensure!(install, "etcd is not installed: run `apt-get install {PACKAGE}`, or pass --install");
    let mut command = if rustix::process::geteuid().is_root() {
        Command::new("apt-get")
    } else {
        let mut sudo = Command::new("sudo");
        sudo.arg("apt-get");
        sudo
    };
    command.args(["install", "--yes", "--quiet", "--no-install-recommends", PACKAGE]);
    let status = command.stdout(Stdio::null()).status().context("cannot start apt-get")?;
    ensure!(status.success(), "apt-get install {PACKAGE} exited with {status}");
    find().context("etcd is installed but not on the PATH")
}

fn find() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join("etcd")).find(|file| file.is_file())
}

/// A running cluster; dropping it removes its members and their data.
pub(super) struct Etcd {
    name: String,
    /// Connections to the leader.
    connections: Vec<Channel>,
    _members: Vec<Member>,
    _data: TempDir,
}

/// A member's process, killed on drop.
struct Member(Child);

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Etcd {
    pub(super) async fn start(program: &Path, folder: &Path) -> anyhow::Result<Self> {
        let data = tempfile::Builder::new().prefix("peers-etcd.").tempdir_in(folder)?;
        let ports = free_ports()?;
        let address = |port: u16| format!("http://127.0.0.1:{port}");
        let cluster: Vec<_> =
            ports.iter().enumerate().map(|(n, pair)| format!("m{n}={}", address(pair[0]))).collect();
        let mut members = Vec::new();
        for (n, [peer, client]) in ports.iter().enumerate() {
            let log = File::create(data.path().join(format!("m{n}.log")))?;
            let mut command = Command::new(program);
            command.args(["--name", &format!("m{n}"), "--initial-cluster", &cluster.join(",")]);
            command.args(["--listen-peer-urls", &address(*peer)]);
            command.args(["--initial-advertise-peer-urls", &address(*peer)]);
            command.args(["--listen-client-urls", &address(*client)]);
            command.args(["--advertise-client-urls", &address(*client)]);
            command.arg("--data-dir").arg(data.path().join(format!("m{n}")));
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
            members.push(Member(command.spawn().context("cannot start etcd")?));
        }
        let endpoints = ports
            .iter()
            .map(|[_, port]| Endpoint::from_shared(address(*port)))
            .collect::<Result<Vec<_>, _>>()?;
        let (leader, version) = leader(&endpoints).await?;
        let name = format!("etcd {version}");
        // Connections open on first use.
        let connections = (0..CONNECTIONS).map(|_| leader.connect_lazy()).collect();
        Ok(Self { name, connections, _members: members, _data: data })
    }
}

/// A peer port and a client port for each of three members.
fn free_ports() -> anyhow::Result<[[u16; 2]; 3]> {
    let listeners =
        (0..6).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).collect::<Result<Vec<_>, _>>()?;
    let port = |n: usize| Ok::<_, std::io::Error>(listeners[n].local_addr()?.port());
    Ok([[port(0)?, port(1)?], [port(2)?, port(3)?], [port(4)?, port(5)?]])
}

/// Waits until a member reports itself as leader.
async fn leader(members: &[Endpoint]) -> anyhow::Result<(Endpoint, String)> {
    let start = Instant::now();
    while start.elapsed() < ELECTION_MAX {
        for member in members {
            let Ok(channel) = member.connect().await else { continue };
            let mut grpc = Grpc::new(channel);
            let asked = call(&mut grpc, "/etcdserverpb.Maintenance/Status", StatusRequest {});
            let Ok::<StatusReply, _>(status) = asked.await else { continue };
            let own = status.header.map_or(0, |header| header.member);
            if own != 0 && own == status.leader {
                return Ok((member.clone(), status.version));
            }
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    bail!("no etcd member became leader within {ELECTION_MAX:?}")
}

impl Cluster for Etcd {
    fn name(&self) -> &str {
        &self.name
    }

    fn client(&self, number: usize) -> impl Client {
        EtcdClient(Grpc::new(self.connections[number % CONNECTIONS].clone()))
    }
}

struct EtcdClient(Grpc<Channel>);

impl Client for EtcdClient {
    async fn put(&mut self, number: u64) -> anyhow::Result<()> {
        let (client, turn) = (number >> 32, number & u64::from(u32::MAX));
        let key = (client << 32) | (turn % CLIENT_KEYS);
        let request = PutRequest { key: key.to_be_bytes().to_vec(), value: vec![7; VALUE_BYTES] };
        call::<_, PutReply>(&mut self.0, "/etcdserverpb.KV/Put", request).await?;
        Ok(())
    }
}

async fn call<Q, A>(grpc: &mut Grpc<Channel>, method: &'static str, request: Q) -> anyhow::Result<A>
where
    Q: prost::Message + Send + Sync + 'static,
    A: prost::Message + Default + Send + Sync + 'static,
{
    grpc.ready().await?;
    let codec = ProstCodec::<Q, A>::default();
    let path = PathAndQuery::from_static(method);
    Ok(grpc.unary(tonic::Request::new(request), path, codec).await?.into_inner())
}

/// The used fields of etcd's `rpc.proto`, with their numbers.
#[derive(Clone, PartialEq, prost::Message)]
struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PutReply {}

#[derive(Clone, PartialEq, prost::Message)]
struct StatusRequest {}

#[derive(Clone, PartialEq, prost::Message)]
struct StatusReply {
    #[prost(message, optional, tag = "1")]
    header: Option<ReplyHeader>,
    #[prost(string, tag = "2")]
    version: String,
    #[prost(uint64, tag = "4")]
    leader: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ReplyHeader {
    #[prost(uint64, tag = "2")]
    member: u64,
}
