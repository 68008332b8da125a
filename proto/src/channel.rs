//! Connections for control calls: made when first used, and again after every break.
//!
//! Not here: how long a call may take and what is done when it fails (whoever calls).

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

use crate::tls::{ALPN_GRPC, Identity, server_name};

/// Where control calls go, `HOST:PORT`, for [`connect_lazily`].
///
/// # Errors
/// When it is no address.
pub fn endpoint(address: &str) -> Result<Endpoint, tonic::transport::Error> {
    // tonic refuses `https` without TLS of its own, which cannot be renewed.
    Endpoint::from_shared(format!("http://{address}"))
}

/// A channel to an [`endpoint`] that connects when a call first needs it, and shows what the identity shows then. No session is
/// resumed. Every attempt ends after the endpoint's `connect_timeout`, the TLS handshake included, and then the call is
/// [`Code::Unknown`](tonic::Code::Unknown).
///
/// tonic's own lazy channel bounds only the TCP connection, and the deadline of a call begins when there is a
/// connection: on a peer that hangs while it should shake hands, calls would wait without an end. An accepted TCP
/// connection proves nothing, the kernel makes it for a process that is stopped.
#[must_use]
pub fn connect_lazily(endpoint: &Endpoint, identity: &Identity) -> Channel {
    let mut tcp = HttpConnector::new();
    tcp.set_nodelay(true);
    endpoint.connect_with_connector_lazy(Connector { tcp, tls: Arc::new(identity.grpc_client()).into() })
}

/// Connects, and shakes hands.
#[derive(Clone)]
struct Connector {
    tcp: HttpConnector,
    tls: TlsConnector,
}

impl Service<Uri> for Connector {
    type Response = TokioIo<TlsStream<TcpStream>>;
    type Error = Box<dyn std::error::Error + Send + Sync>;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.tcp.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, at: Uri) -> Self::Future {
        let (connecting, tls) = (self.tcp.call(at), self.tls.clone());
        Box::pin(async move {
            let stream = tls.connect(server_name(), connecting.await?.into_inner()).await?;
            let spoken = stream.get_ref().1.alpn_protocol();
            if spoken != Some(ALPN_GRPC) {
                return Err("the peer does not speak HTTP/2: no control calls are taken there".into());
            }
            Ok(TokioIo::new(stream))
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
    use crate::pb::router_client::RouterClient;
    use crate::pb::{StatusReply, StatusRequest};
    use crate::tls::SERVER_NAME;

    fn identity() -> Identity {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![SERVER_NAME.to_owned()]).unwrap();
        let cert = params.signed_by(&key, &authority).unwrap().pem();
        let pems = [authority.pem(), cert, key.serialize_pem()];
        let [ca, cert, key] = pems.each_ref().map(String::as_bytes);
        Identity::from_pem(ca, cert, key).unwrap()
    }

    #[tokio::test]
    async fn a_peer_that_never_shakes_hands_is_an_error_and_no_wait() {
        // Nobody accepts: the kernel connects, and then there is silence.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = endpoint(&silent.local_addr().unwrap().to_string()).unwrap();
        let endpoint = endpoint.connect_timeout(Duration::from_millis(20));
        let mut router = RouterClient::new(connect_lazily(&endpoint, &identity()));
        for _ in 0..2 {
            let asked: Result<tonic::Response<StatusReply>, _> = router.status(StatusRequest {}).await;
            // How tonic names a connection that did not come in time; the next call tries anew.
            assert_eq!(asked.unwrap_err().code(), tonic::Code::Unknown);
        }
    }
}
