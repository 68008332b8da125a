//! Connections for control calls: made when first used, and again after every break.
//!
//! Not here: how long a call may take and what is done when it fails (whoever calls).

use hyper_util::client::legacy::connect::HttpConnector;
use tonic::transport::{Channel, Endpoint};

/// A channel that connects when a call first needs it. Every attempt ends after the endpoint's `connect_timeout`, the
/// TLS handshake included, and then the call is [`Code::Unknown`](tonic::Code::Unknown).
///
/// tonic's own lazy channel bounds only the TCP connection, and the deadline of a call begins when there is a
/// connection: on a peer that hangs while it should shake hands, calls would wait without an end. An accepted TCP
/// connection proves nothing, the kernel makes it for a process that is stopped.
#[must_use]
pub fn connect_lazily(endpoint: &Endpoint) -> Channel {
    let mut tcp = HttpConnector::new();
    // tonic asks for `https` and adds TLS itself.
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    endpoint.connect_with_connector_lazy(tcp)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::net::TcpListener;
    use std::time::Duration;

    use tonic::transport::ClientTlsConfig;

    use super::*;
    use crate::pb::router_client::RouterClient;
    use crate::pb::{StatusReply, StatusRequest};

    #[tokio::test]
    async fn a_peer_that_never_shakes_hands_is_an_error_and_no_wait() {
        // Nobody accepts: the kernel connects, and then there is silence.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = Endpoint::from_shared(format!("https://{}", silent.local_addr().unwrap())).unwrap();
        let endpoint = endpoint.connect_timeout(Duration::from_millis(20));
        let endpoint = endpoint.tls_config(ClientTlsConfig::new()).unwrap();
        let mut router = RouterClient::new(connect_lazily(&endpoint));
        for _ in 0..2 {
            let asked: Result<tonic::Response<StatusReply>, _> = router.status(StatusRequest {}).await;
            // How tonic names a connection that did not come in time; the next call tries anew.
            assert_eq!(asked.unwrap_err().code(), tonic::Code::Unknown);
        }
    }
}
