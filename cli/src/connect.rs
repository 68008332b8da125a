//! Connection of a command to a running cluster: addresses and certificates from flags or
//! environment. Commands call with the administrator's certificate of the directory.

use std::path::Path;

use kvfleet_client::{Client, ClientConfig, Transport};
use kvfleet_net::tls::{Identity, Role, TlsFiles};

use crate::args::ConnectArgs;
use crate::calls::RouterCalls;
use kvfleet_net::certificates::files;
use kvfleet_net::fleet_certificates::files_in;

/// Connection to a running cluster.
#[derive(Clone, Debug)]
pub struct Connection {
    /// Addresses of the named routers.
    pub routers: Vec<String>,
    /// Certificate for calls.
    pub identity: Identity,
}

impl Connection {
    /// Reads the certificates; makes no call yet.
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

    /// Clients of all named routers.
    pub fn all(&self) -> anyhow::Result<Vec<RouterCalls>> {
        RouterCalls::all(&self.routers, &self.identity)
    }
}

/// The administrator's certificate in a directory that `kvfleet up` made, or in its own one that
/// `kvfleet certs issue admin` made.
fn admin_identity(directory: &Path) -> anyhow::Result<Identity> {
    let own = files_in(directory);
    let files = if own.cert.exists() { own } else { files(directory, &Role::Admin) };
    Ok(TlsFiles { ca: files.ca, cert: files.cert, key: files.key }.load()?)
}

/// A client for route, fetch and save through these routers.
pub(crate) fn client(
    routers: &[String],
    identity: &Identity,
    transport: Transport,
) -> anyhow::Result<Client> {
    let config = ClientConfig::new(routers.to_vec(), identity.clone());
    Ok(Client::new(ClientConfig { transport, ..config })?)
}
