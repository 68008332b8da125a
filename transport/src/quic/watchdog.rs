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
//! Not here: what an ended connection means to operations (`path.rs`) and to other requests (the client).

use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use quinn::Connection;
use tokio::net::UdpSocket;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::{CODE_SILENT, KEEP_ALIVE};

/// How often a connection is looked at.
const TICK: Duration = Duration::from_millis(50);

/// A look that comes this late means that this process was held up: what arrived meanwhile is not read yet.
const HELD_UP: Duration = Duration::from_millis(150);

/// Silence after which the peer's host is asked whether the port is closed: a keep-alive, its answer (a
/// peer may delay it by 25 ms) and as much again.
const ASK_AFTER: Duration = Duration::from_millis(300);

const _: () =
    assert!(ASK_AFTER.as_millis() > KEEP_ALIVE.as_millis() + 50, "an idle peer must not look silent");

/// What silence so far means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Alive,
    /// Long enough to ask the host.
    Doubtful,
    Lost,
}

/// How long nothing came from the peer, as far as this process could have noticed.
struct Silence {
    lost_after: Duration,
    heard: u64,
    since: Instant,
    looked: Instant,
}

impl Silence {
    fn new(now: Instant, lost_after: Duration) -> Silence {
        Silence { lost_after, heard: 0, since: now, looked: now }
    }

    /// Takes note of the datagrams received so far.
    fn look(&mut self, now: Instant, datagrams: u64) -> Verdict {
        let held_up = now.duration_since(self.looked) > HELD_UP;
        self.looked = now;
        if datagrams != self.heard || held_up {
            self.heard = datagrams;
            self.since = now;
        }
        match now.duration_since(self.since) {
            quiet if quiet >= self.lost_after => Verdict::Lost,
            quiet if quiet >= ASK_AFTER => Verdict::Doubtful,
            _ => Verdict::Alive,
        }
    }
}

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

    const LOST_AFTER: Duration = Duration::from_millis(750);

    fn millis(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    #[test]
    fn silence_is_doubted_and_then_believed() {
        let begun = Instant::now();
        let mut silence = Silence::new(begun, LOST_AFTER);
        // The first look hears the datagrams that came with the handshake.
        let verdicts: Vec<Verdict> = (0..=16).map(|tick| silence.look(begun + tick * TICK, 7)).collect();
        let first = |wanted| verdicts.iter().position(|verdict| *verdict == wanted);
        assert_eq!((first(Verdict::Doubtful), first(Verdict::Lost)), (Some(6), Some(15)));
    }

    #[test]
    fn any_datagram_is_a_sign_of_life() {
        let begun = Instant::now();
        let mut silence = Silence::new(begun, LOST_AFTER);
        for tick in 0..100 {
            let verdict = silence.look(begun + tick * TICK, u64::from(tick / 5));
            assert_eq!(verdict, Verdict::Alive, "tick {tick}");
        }
    }

    #[test]
    fn a_process_that_was_held_up_blames_itself() {
        let begun = Instant::now();
        let mut silence = Silence::new(begun, LOST_AFTER);
        assert_eq!(silence.look(begun + millis(50), 1), Verdict::Alive);
        assert_eq!(silence.look(begun + millis(5_000), 1), Verdict::Alive);
        for tick in 1..6 {
            assert_eq!(silence.look(begun + millis(5_000 + tick * 50), 1), Verdict::Alive);
        }
        assert_eq!(silence.look(begun + millis(5_300), 1), Verdict::Doubtful);
    }

    #[tokio::test]
    async fn a_closed_port_refuses_and_an_open_one_does_not() {
        let open = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = open.local_addr().unwrap();
        assert!(!refuses(address, TICK).await);
        drop(open);
        assert!(refuses(address, millis(10_000)).await);
    }
}
