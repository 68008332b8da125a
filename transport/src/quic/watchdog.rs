//! Detects a lost peer long before QUIC's own idle timeout.
//!
//! A live peer answers keep-alives whatever its disk does. So if no data arrives, the peer died,
//! hangs or is cut off. The host of a dead *process* refuses datagrams to the closed port. quinn
//! rightly ignores such refusals, because anyone on the network could forge one. Here a refusal
//! counts only after silence, which a forger cannot cause.
//!
//! QUIC's idle timeout cannot simply be short. It does not notice that this process itself stalled,
//! and would end good connections before the datagrams in the socket are read.
//!
//! Not here: the measurement of silence (`crate::silence`), and the effect of a lost connection on
//! operations (`path.rs`) and on other requests (the client).

use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::pin;
use std::time::Duration;

use quinn::Connection;
use tokio::net::UdpSocket;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::{CODE_DONE, CODE_SILENT};
use crate::silence::{Liveness, SilenceDetector, TICK};

/// Watches until the connection ends, and closes it if its peer is lost, which wakes every
/// operation on it. Also closes it at `end`, when the certificate of the peer is no longer valid.
pub(super) async fn watch_peer(
    connection: Connection,
    lost_after: Duration,
    end: impl Future<Output = rustls::Error>,
) {
    let mut end = pin!(end);
    let mut silence = SilenceDetector::new(Instant::now(), lost_after);
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = connection.closed() => return,
            error = &mut end => {
                tracing::debug!(%error, "a connection ends with the certificate of its node");
                return connection.close(CODE_DONE, b"the certificate is no longer valid");
            }
            _ = ticks.tick() => {}
        }
        let gone = match silence.check(Instant::now(), connection.stats().udp_rx.datagrams) {
            Liveness::Alive => false,
            Liveness::Suspect => is_port_closed(connection.remote_address(), TICK).await,
            Liveness::Lost => true,
        };
        if gone {
            tracing::debug!(peer = %connection.remote_address(), "peer is gone");
            connection.close(CODE_SILENT, b"silent");
            return;
        }
    }
}

/// Returns once the host of `peer` refuses datagrams to the port; never otherwise.
pub(super) async fn wait_until_refused(peer: SocketAddr) {
    while !is_port_closed(peer, 2 * TICK).await {}
}

/// Whether the host reports within `wait` that the port is closed. One byte is not a QUIC packet,
/// so a listening server drops it.
async fn is_port_closed(peer: SocketAddr, wait: Duration) -> bool {
    let asked = async {
        let any = match peer {
            SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
            SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
        };
        let socket = UdpSocket::bind(any).await?;
        socket.connect(peer).await?;
        socket.send(&[0]).await?;
        socket.recv(&mut [0]).await
    };
    // Without an answer, or without a socket, the port counts as open.
    let begun = Instant::now();
    match timeout(wait, asked).await {
        Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused => true,
        Ok(_) => {
            tokio::time::sleep(wait.saturating_sub(begun.elapsed())).await;
            false
        }
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[tokio::test]
    async fn a_closed_port_refuses_and_an_open_one_does_not() {
        let open = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = open.local_addr().unwrap();
        assert!(!is_port_closed(address, TICK).await);
        drop(open);
        assert!(is_port_closed(address, Duration::from_secs(10)).await);
    }
}
