//! The path over TLS 1.3 on TCP: certificates on both sides, one operation at a time on a
//! connection.
//!
//! On a connection, a length-delimited message asks, a length-delimited message answers, and block
//! frames follow; then the next operation begins. An unfinished operation closes its connection.
//!
//! This file holds the common parts of both ends: settings, limits, error mapping. The node's end
//! is `tcp/server.rs`; the client's is `tcp/dialer.rs`, `tcp/path.rs` and `tcp/pool.rs`. Bytes go
//! through `tcp/stream.rs` over `tcp/record.rs`, after `tcp/handshake.rs`. `tcp/watch.rs` detects
//! lost peers. Parts common to both network paths are `serve.rs`, `client_ops.rs` and `stream.rs`
//! beside this file.
//!
//! This path moves several times more bytes per CPU-second than QUIC. A connection delivers
//! everything in one order, hence many connections (`docs/adr/0036-tls-over-tcp.md`).

use std::time::Duration;

use rustls::AlertDescription;

use crate::quic::{FETCH_BYTES_IN_FLIGHT_MAX, SAVE_BYTES_IN_FLIGHT_MAX};
use crate::stream::StreamError;

mod buffers;
mod dialer;
mod handshake;
pub(crate) mod path;
pub(crate) mod pool;
mod record;
pub(crate) mod server;
mod socket;
pub(crate) mod stream;
mod watch;

pub use dialer::TcpDialer;
pub use server::{TcpBindError, TcpServer};

/// Connections that a server keeps; also at most half of the process's open-file limit. One client
/// has up to [`CONNECTIONS_PER_PEER`] and one more. Further connections are reset.
pub const CONNECTIONS_MAX: usize = 4096;

/// Concurrent operations of one path, each on its own connection. Further ones wait, within their
/// deadlines: more at once would only share the same processors.
pub const CONNECTIONS_PER_PEER: usize = 32;

/// How much longer the server waits for the next operation than the client does. So the client
/// closes idle connections; it knows whether it is about to send.
const IDLE_FACTOR: u32 = 3;

/// Settings of both ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpConfig {
    /// See [`CONNECTIONS_MAX`].
    pub connections_max: usize,
    /// See [`CONNECTIONS_PER_PEER`].
    pub connections_per_peer: usize,
    /// Time after which a client closes an unused connection. A server waits three times as long.
    pub idle_timeout: Duration,
    /// Silence after which a peer counts as lost, whatever its host reports. A dead process is
    /// noticed at once, because its host closes its connections.
    pub silence_max: Duration,
    /// Timeout for a connection with its handshake, at both ends. For a new path it includes the
    /// ping that confirms it.
    pub dial_timeout: Duration,
    /// Time without progress after which a save or release counts as lost.
    pub stall_timeout: Duration,
    /// Congestion control of the connections, by its system name. `None`, or a name unknown to the
    /// system, means the system's default.
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
            // As over QUIC: the peer will not return after a longer silence.
            silence_max: Duration::from_millis(750),
            dial_timeout: Duration::from_secs(1),
            stall_timeout: Duration::from_secs(10),
            // As over QUIC, so that both paths share a link fairly. BBR, a default of some systems,
            // paces each socket with timers, at a noticeable cost in CPU time.
            congestion_control: Some("cubic".to_owned()),
            fetch_bytes_in_flight_max: FETCH_BYTES_IN_FLIGHT_MAX,
            save_bytes_in_flight_max: SAVE_BYTES_IN_FLIGHT_MAX,
        }
    }
}

impl TcpConfig {
    fn server_idle_timeout(&self) -> Duration {
        self.idle_timeout.saturating_mul(IDLE_FACTOR)
    }
}

/// A rustls error as a stream error.
fn tls_stream_error(error: &rustls::Error) -> StreamError {
    use rustls::Error;
    match error {
        Error::InvalidCertificate(_) | Error::NoCertificatesPresented => {
            StreamError::Untrusted(error.to_string())
        }
        Error::NoApplicationProtocol => unsupported_protocol(),
        Error::AlertReceived(alert) => alert_stream_error(*alert),
        Error::InvalidMessage(_) | Error::InappropriateMessage { .. } => {
            StreamError::Protocol(format!("bytes that are not TLS 1.3: {error}"))
        }
        other => StreamError::Broken(other.to_string()),
    }
}

/// The meaning of a peer's alert: most alerts refuse us.
fn alert_stream_error(alert: AlertDescription) -> StreamError {
    use AlertDescription as Alert;
    match alert {
        Alert::NoApplicationProtocol => unsupported_protocol(),
        Alert::CloseNotify | Alert::UserCanceled | Alert::BadRecordMac | Alert::InternalError => {
            StreamError::Broken(format!("the peer closed the connection: {alert:?}"))
        }
        _ => StreamError::Untrusted(format!("the peer refused the handshake: {alert:?}")),
    }
}

fn unsupported_protocol() -> StreamError {
    StreamError::Protocol("no protocol that this release supports".to_owned())
}

#[cfg(test)]
pub(crate) mod tests;
