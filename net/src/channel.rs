//! Client channels for control calls. A channel connects on first use and reconnects after every
//! failure.
//!
//! Not here: deadlines of calls and the handling of failed calls (the callers).

use std::sync::Arc;
use std::task::{Context, Poll};

use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::codegen::http::Uri;
use tonic::codegen::{BoxFuture, Service};
use tonic::transport::{Channel, Endpoint};

use crate::tls::{ALPN_GRPC, EndingStream, Identity, Role, server_name};

/// The endpoint of control calls at `HOST:PORT`, for [`connect_lazily`].
///
/// # Errors
/// When `address` is not a valid address.
pub fn endpoint(address: &str) -> Result<Endpoint, tonic::transport::Error> {
    // tonic rejects `https` unless it does TLS itself, and its certificates cannot be renewed.
    Endpoint::from_shared(format!("http://{address}"))
}

/// A channel to an [`endpoint`] that connects on the first call, to a server of this role: a
/// connection to another one fails before a call is sent. Each connection presents the identity's
/// current certificate, and no TLS session is resumed. A connection attempt, handshake included,
/// ends after the endpoint's `connect_timeout`; the call then fails with
/// [`Code::Unknown`](tonic::Code::Unknown).
///
/// tonic's own lazy channel bounds only the TCP connect, and a call's deadline starts once a
/// connection exists. If a peer hangs in the handshake, calls would wait forever. An accepted TCP
/// connection proves little: the kernel accepts it even for a stopped process.
#[must_use]
pub fn connect_lazily(endpoint: &Endpoint, identity: &Identity, server: Role) -> Channel {
    endpoint.connect_with_connector_lazy(Connector::new(identity, server))
}

/// Connects now to a server of this role.
///
/// # Errors
/// If no connection comes about, or to another server.
pub async fn connect_to(
    endpoint: &Endpoint,
    identity: &Identity,
    server: Role,
) -> Result<Channel, tonic::transport::Error> {
    endpoint.connect_with_connector(Connector::new(identity, server)).await
}

/// Opens the TCP connection and performs the TLS handshake, which checks the server's role.
#[derive(Clone)]
struct Connector {
    tcp: HttpConnector,
    tls: TlsConnector,
    identity: Identity,
}

impl Connector {
    fn new(identity: &Identity, server: Role) -> Connector {
        let mut tcp = HttpConnector::new();
        tcp.set_nodelay(true);
        let tls = Arc::new(identity.grpc_client(server)).into();
        Connector { tcp, tls, identity: identity.clone() }
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<EndingStream<TlsStream<TcpStream>>>;
    type Error = Box<dyn std::error::Error + Send + Sync>;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.tcp.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, at: Uri) -> Self::Future {
        let (connecting, tls, identity) = (self.tcp.call(at), self.tls.clone(), self.identity.clone());
        Box::pin(async move {
            let stream = tls.connect(server_name(), connecting.await?.into_inner()).await?;
            let alpn = stream.get_ref().1.alpn_protocol();
            if alpn != Some(ALPN_GRPC) {
                return Err("the peer did not negotiate HTTP/2, which control calls need".into());
            }
            let chain = stream.get_ref().1.peer_certificates().unwrap_or_default().to_vec();
            Ok(TokioIo::new(EndingStream::new(stream, identity.server_end(chain))))
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::net::TcpListener;
    use std::time::Duration;

    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

    use super::*;
    use kvfleet_proto::pb::router_client::RouterClient;
    use kvfleet_proto::pb::{StatusReply, StatusRequest};

    fn identity() -> Identity {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(Role::Admin.dns_names()).unwrap();
        let cert = params.signed_by(&key, &authority).unwrap().pem();
        let pems = [authority.pem(), cert, key.serialize_pem()];
        let [ca, cert, key] = pems.each_ref().map(String::as_bytes);
        Identity::from_pem(ca, cert, key).unwrap()
    }

    #[tokio::test]
    async fn times_out_when_the_peer_never_shakes_hands() {
        // The listener never accepts: the kernel completes the TCP connection, and the peer stays
        // silent.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = endpoint(&silent.local_addr().unwrap().to_string()).unwrap();
        let endpoint = endpoint.connect_timeout(Duration::from_millis(20));
        let mut router = RouterClient::new(connect_lazily(&endpoint, &identity(), Role::Router(None)));
        for _ in 0..2 {
            let asked: Result<tonic::Response<StatusReply>, _> = router.status(StatusRequest {}).await;
            // tonic reports a connection timeout as `Unknown`; the next call tries again.
            assert_eq!(asked.unwrap_err().code(), tonic::Code::Unknown);
        }
    }
}
