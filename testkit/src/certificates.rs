//! Certificates of a test's cluster for every role, and a channel that makes each call with a role
//! that may make it.
//!
//! Not here: tests of access, which choose their role themselves.

use std::future::poll_fn;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use kvfleet_net::certificates::{Authority, CertificateFiles};
use kvfleet_net::tls::access::{Access, rule_of};
use kvfleet_net::tls::{Identity, Role, TlsFiles};
use kvfleet_router::TlsConfig;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::transport::{Channel, Endpoint, Error};

use crate::cluster::HANG;

/// Connect timeout: a stopped process must not hold a call for long.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// An authority in a directory, and the certificates that it issues.
#[derive(Clone, Debug)]
pub struct Certificates {
    directory: PathBuf,
}

impl Certificates {
    /// Uses the authority in this directory, and creates it if absent.
    pub fn open(directory: &Path) -> Certificates {
        drop(Authority::open(directory).unwrap());
        Certificates { directory: directory.to_owned() }
    }

    /// Certificate files of a role, created if absent.
    pub fn files(&self, role: &Role) -> TlsFiles {
        let CertificateFiles { ca, cert, key } =
            Authority::open(&self.directory).unwrap().issue(role).unwrap();
        TlsFiles { ca, cert, key }
    }

    /// The same, for a router's configuration or for `channel`.
    pub fn config(&self, role: &Role) -> TlsConfig {
        let TlsFiles { ca, cert, key } = self.files(role);
        TlsConfig { ca, cert, key }
    }

    /// The identity of a role.
    pub fn identity(&self, role: &Role) -> Identity {
        self.files(role).load().unwrap()
    }

    /// A channel to a server at this address that makes each call with a role that may make it.
    pub fn callers(&self, address: &str) -> RoleChannel {
        // Roles without numbers, so that a test may speak for any process.
        let roles = [Role::Admin, Role::Frontend, Role::Instance(None), Role::Node(None), Role::Router(None)];
        RoleChannel { callers: roles.map(|role| self.role_caller(address, role)).into() }
    }

    /// A channel to a server at this address that makes each call with this role.
    pub fn caller(&self, address: &str, role: Role) -> RoleChannel {
        RoleChannel { callers: vec![self.role_caller(address, role)] }
    }

    fn role_caller(&self, address: &str, role: Role) -> RoleCaller {
        let endpoint = Endpoint::from_shared(format!("https://{address}")).unwrap();
        let endpoint = endpoint.tls_config(self.identity(&role).client_tls()).unwrap();
        let endpoint = endpoint.connect_timeout(CONNECT_TIMEOUT).timeout(HANG);
        RoleCaller { role, channel: endpoint.connect_lazy() }
    }
}

#[derive(Clone, Debug)]
struct RoleCaller {
    role: Role,
    channel: Channel,
}

/// A channel that makes each call with a role that may make it.
#[derive(Clone, Debug)]
pub struct RoleChannel {
    callers: Vec<RoleCaller>,
}

impl RoleChannel {
    /// The channel of the role with most access to a call.
    fn channel(&self, path: &str) -> Channel {
        let access = |caller: &RoleCaller| rule_of(path).map(|rule| rule.access(caller.role.kind()));
        let with = |wanted: Access| self.callers.iter().find(|caller| access(caller) == Some(wanted));
        let caller = with(Access::Allow).or_else(|| with(Access::Own));
        caller.unwrap_or(&self.callers[0]).channel.clone()
    }
}

type Answer = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Error>> + Send>>;

impl Service<http::Request<Body>> for RoleChannel {
    type Response = http::Response<Body>;
    type Error = Error;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Answer {
        let mut channel = self.channel(request.uri().path());
        Box::pin(async move {
            poll_fn(|context| channel.poll_ready(context)).await?;
            channel.call(request).await
        })
    }
}
