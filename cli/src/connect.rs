//! How a command reaches a running cluster: addresses and certificates from flags or environment.

use std::path::Path;
use std::time::Duration;

use kvfleet_client::{Client, ClientConfig};
use kvfleet_proto::tls::{Identity, TlsFiles};
use kvfleet_transport::quic::QuicConfig;

use crate::args::ConnectArgs;
use crate::calls::RouterCalls;
use crate::certificates::files;
use crate::cluster::ADMIN_ROLE;

/// A running cluster as a command sees it.
#[derive(Clone, Debug)]
pub struct Connection {
    /// Addresses of the routers that were named.
    pub routers: Vec<String>,
    /// With which certificate they are called.
    pub identity: Identity,
}

impl Connection {
    /// Reads the certificates; no call is made yet.
    pub fn open(args: &ConnectArgs) -> anyhow::Result<Self> {
        if args.cluster.is_empty() {
            anyhow::bail!(
                "no cluster named: give --cluster HOST:PORT[,…] or set KVFLEET_CLUSTER (`kvfleet up` prints both)"
            );
        }
        let Some(directory) = &args.tls_dir else {
            anyhow::bail!(
                "no certificates named: give --tls-dir DIR or set KVFLEET_TLS_DIR (`kvfleet up` prints both)"
            );
        };
        Ok(Self { routers: args.cluster.clone(), identity: admin_identity(directory)? })
    }

    /// A handle to every router named.
    pub fn all(&self) -> anyhow::Result<Vec<RouterCalls>> {
        RouterCalls::all(&self.routers, &self.identity)
    }
}

fn admin_identity(directory: &Path) -> anyhow::Result<Identity> {
    let files = files(directory, ADMIN_ROLE);
    Ok(TlsFiles { ca: files.ca, cert: files.cert, key: files.key }.load()?)
}

/// Silence after which a connection to a node counts as broken. Routers fence a node after 800 ms of
/// silence, so behind a longer one there is nothing to wait for; a stalled machine gets some room.
const NODE_SILENCE_MAX: Duration = Duration::from_secs(2);

/// How often an idle connection to a node says something.
const KEEP_ALIVE: Duration = Duration::from_millis(400);

/// How long opening a connection to a node may take.
const DIAL_TIME_MAX: Duration = Duration::from_secs(1);

/// A client for route, fetch and save over these routers.
pub(crate) fn client(routers: &[String], identity: &Identity) -> anyhow::Result<Client> {
    let config = ClientConfig::new(routers.to_vec(), identity.clone());
    let quic = QuicConfig {
        idle_timeout: NODE_SILENCE_MAX,
        keep_alive: KEEP_ALIVE,
        dial_timeout: DIAL_TIME_MAX,
        ..config.quic
    };
    Ok(Client::new(ClientConfig { quic, ..config })?)
}
