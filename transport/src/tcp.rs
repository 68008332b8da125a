//! The path of TLS 1.3 over TCP: certificates on both sides, one operation at a time on a connection.
//!
//! On a connection: a length-delimited message asks, a length-delimited message answers, block frames follow
//! one after another; then the next operation begins. What is not brought to its end closes its connection. This
//! file holds what both ends share: settings, limits, error mapping. The node's end is `tcp/server.rs`, the
//! client's `tcp/dialer.rs`, `tcp/path.rs` and `tcp/pool.rs`; bytes are `tcp/stream.rs` over `tcp/record.rs`, after
//! `tcp/handshake.rs`; lost peers are noticed in `tcp/watch.rs`. What both network paths share is `serve.rs`, `ask.rs`
//! and `stream.rs` beside this file.
//!
//! It moves several times the bytes of QUIC for a CPU-second, and a connection has one order for everything that
//! is on it: hence many connections (`docs/adr/0036-tls-over-tcp.md`).

use std::time::Duration;

use rustls::AlertDescription;

use crate::quic::{FETCH_BYTES_IN_FLIGHT_MAX, SAVE_BYTES_IN_FLIGHT_MAX};
use crate::stream::Loss;

mod buffers;
mod dialer;
mod handshake;
mod path;
mod pool;
mod record;
mod server;
mod socket;
mod stream;
mod watch;

pub use dialer::TcpDialer;
#[cfg(feature = "rdma")]
pub(crate) use path::TcpPath;
#[cfg(feature = "rdma")]
pub(crate) use pool::Occupied;
#[cfg(feature = "rdma")]
pub(crate) use server::RDMA_REFUSED;
pub use server::{BindError, TcpServer};
#[cfg(feature = "rdma")]
pub(crate) use stream::CLOSED;

/// Connections a server keeps, and half of the files that the process may have open at most. One client has up to
/// [`CONNECTIONS_PER_PEER`] and one more; above, new ones are reset.
pub const CONNECTIONS_MAX: usize = 4096;

/// Operations one path has under way at once, each on a connection of its own. Further ones wait, within their
/// deadlines: more at once would only share the same processors.
pub const CONNECTIONS_PER_PEER: usize = 32;

/// How much longer than a client the server waits for the next operation of a connection, so that it is the client
/// that closes what is idle: it knows what it is about to send.
const IDLE_FACTOR: u32 = 3;

/// Settings of both ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpConfig {
    /// See [`CONNECTIONS_MAX`].
    pub connections_max: usize,
    /// See [`CONNECTIONS_PER_PEER`].
    pub connections_per_peer: usize,
    /// Time after which a client closes a connection that no operation used. A server waits three times as long.
    pub idle_timeout: Duration,
    /// Silence after which a peer counts as lost, whatever its host says. A process that died is noticed at
    /// once, because its host ends its connections.
    pub silence_max: Duration,
    /// Time for a connection and its handshake, at both ends; for a new path also the ping that confirms it.
    pub dial_timeout: Duration,
    /// Time without progress after which a save or release counts as lost.
    pub stall_timeout: Duration,
    /// Congestion control of the connections, by the system's name for it; nothing for the system's default, which
    /// also rules where this one is not there.
    pub congestion_control: Option<String>,
    /// See [`FETCH_BYTES_IN_FLIGHT_MAX`].
    pub fetch_bytes_in_flight_max: u64,
    /// See [`SAVE_BYTES_IN_FLIGHT_MAX`].
    pub save_bytes_in_flight_max: u64,
}

impl Default for TcpConfig {
    fn default() -> TcpConfig {
        TcpConfig {
            connections_max: CONNECTIONS_MAX,
            connections_per_peer: CONNECTIONS_PER_PEER,
            idle_timeout: Duration::from_secs(20),
            // As over QUIC: behind a longer silence there is nothing to wait for.
            silence_max: Duration::from_millis(750),
            dial_timeout: Duration::from_secs(1),
            stall_timeout: Duration::from_secs(10),
            // As over QUIC, so that a link is shared alike whichever path is taken. A system whose default is BBR
            // paces each socket with timers of its own, at a fifth of the CPU time of a large block over loopback.
            congestion_control: Some("cubic".to_owned()),
            fetch_bytes_in_flight_max: FETCH_BYTES_IN_FLIGHT_MAX,
            save_bytes_in_flight_max: SAVE_BYTES_IN_FLIGHT_MAX,
        }
    }
}

impl TcpConfig {
    fn idle_timeout_of_server(&self) -> Duration {
        self.idle_timeout.saturating_mul(IDLE_FACTOR)
    }
}

/// What rustls says of a handshake, as a loss.
fn tls_loss(error: &rustls::Error) -> Loss {
    use rustls::Error;
    match error {
        Error::InvalidCertificate(_) | Error::NoCertificatesPresented => Loss::Untrusted(error.to_string()),
        Error::NoApplicationProtocol => no_protocol(),
        Error::AlertReceived(alert) => alert_loss(*alert),
        Error::InvalidMessage(_) | Error::InappropriateMessage { .. } => {
            Loss::Protocol(format!("bytes that are no TLS 1.3: {error}"))
        }
        other => Loss::Broken(other.to_string()),
    }
}

/// What an alert of the peer means: most say that it does not want us.
fn alert_loss(alert: AlertDescription) -> Loss {
    use AlertDescription as Alert;
    match alert {
        Alert::NoApplicationProtocol => no_protocol(),
        Alert::CloseNotify | Alert::UserCanceled | Alert::BadRecordMac | Alert::InternalError => {
            Loss::Broken(format!("the peer ended it: {alert:?}"))
        }
        _ => Loss::Untrusted(format!("the peer refused the handshake: {alert:?}")),
    }
}

fn no_protocol() -> Loss {
    Loss::Protocol("no protocol this release speaks".to_owned())
}

#[cfg(test)]
pub(crate) mod tests;
