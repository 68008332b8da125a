//! Certificates of a test cluster, and a client over loopback nodes.

use std::sync::Arc;
use std::time::Duration;

use kvfleet_net::tls::{Identity, Role};
use kvfleet_transport::loopback::{Faults, Loopback};
use kvfleet_transport::suite::{MemoryService, frame, hash};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use crate::paths::Paths;
use crate::{Client, ClientConfig};

pub(super) struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub(super) fn new() -> Authority {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// The identity of a client and of a node.
    pub(super) fn member(&self) -> Identity {
        self.holder(&Role::Node(None))
    }

    /// The identity of a router.
    pub(super) fn router(&self) -> Identity {
        self.holder(&Role::Router(None))
    }

    fn holder(&self, role: &Role) -> Identity {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(role.dns_names()).unwrap();
        let cert = params.signed_by(&key, &self.0).unwrap();
        Identity::from_pem(self.0.pem().as_bytes(), cert.pem().as_bytes(), key.serialize_pem().as_bytes())
            .unwrap()
    }
}

pub(super) fn config(routers: Vec<String>, identity: Identity) -> ClientConfig {
    ClientConfig { seed: 1, ..ClientConfig::new(routers, identity) }
}

/// A client that reaches nodes over `network`. Its routers are never asked, and an unreachable
/// address is dialled again at once.
pub(super) fn client_on(network: &Loopback) -> Client {
    let config = config(vec!["127.0.0.1:1".to_owned()], Authority::new().member());
    let client = Client::with_dialer(config, Arc::new(network.clone())).unwrap();
    let paths = Paths::new(Arc::new(network.clone()), Duration::ZERO);
    Client { paths, ..client }
}

/// Content bytes of every block in these tests.
pub(super) const CONTENT_BYTES: u32 = 2000;

/// A network with `nodes` nodes `node:0` …, each holding blocks `0..blocks`.
pub(super) fn network(nodes: u32, blocks: u32) -> (Loopback, Vec<MemoryService>) {
    let network = Loopback::new(Faults::default());
    let mut services = Vec::new();
    for node in 0..nodes {
        let service = MemoryService::default();
        (0..blocks).for_each(|number| service.hold(frame(hash(number), CONTENT_BYTES)));
        network.serve(&format!("node:{node}"), Arc::new(service.clone()));
        services.push(service);
    }
    (network, services)
}
