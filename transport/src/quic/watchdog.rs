//! Notices that a peer is gone long before QUIC's own idle timeout would.
//!
//! A live peer answers keep-alives whatever its disk does, so a connection on which nothing arrives is a
//! peer that died, hangs or is cut off. A dead *process* can be told at once: its host refuses datagrams
//! to the closed port. quinn ignores such refusals, rightly, because anyone on the way could forge one; here
//! one counts only after silence, which a forger cannot make.
//!
//! QUIC's idle timeout cannot simply be short: it does not know that this process itself was held up, and
//! would end good connections before the datagrams that wait in the socket are read.
//!
//! Not here: how silence is counted (`crate::silence`), what an ended connection means to operations (`path.rs`) and
//! to other requests (the client).

use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use quinn::Connection;
use tokio::net::UdpSocket;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::CODE_SILENT;
use crate::silence::{Silence, TICK, Verdict};

/// Watches until the connection ends, and ends it when its peer is gone: every operation on it wakes.
pub(super) async fn watch(connection: Connection, lost_after: Duration) {
    let mut silence = Silence::new(Instant::now(), lost_after);
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = connection.closed() => return,
            _ = ticks.tick() => {}
        }
        let gone = match silence.look(Instant::now(), connection.stats().udp_rx.datagrams) {
            Verdict::Alive => false,
            Verdict::Doubtful => refuses(connection.remote_address(), TICK).await,
            Verdict::Lost => true,
        };
        if gone {
            tracing::debug!(peer = %connection.remote_address(), "peer is gone");
            connection.close(CODE_SILENT, b"silent");
            return;
        }
    }
}

/// Returns once the host of `peer` says that nothing listens there; never otherwise.
pub(super) async fn refused(peer: SocketAddr) {
    while !refuses(peer, 2 * TICK).await {}
}

/// Whether the host says within `wait` that nothing listens on the port. One byte is no QUIC packet: a
/// server that does listen drops it.
async fn refuses(peer: SocketAddr, wait: Duration) -> bool {
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
    // Without an answer, or without a socket to ask with, nothing is proven.
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
        assert!(!refuses(address, TICK).await);
        drop(open);
        assert!(refuses(address, Duration::from_secs(10)).await);
    }
}
