//! The QUIC path: TLS 1.3 with certificates on both sides, one bidirectional stream per operation.
//!
//! On a stream, a length-delimited message asks, a length-delimited message answers, and block
//! frames follow. This file holds the common parts of both ends: settings, limits, error mapping.
//! The node's end is `quic/server.rs`; the client's is `quic/dialer.rs` and `quic/path.rs`. Bytes
//! go through `quic/stream.rs`, and `quic/watchdog.rs` detects lost peers. Parts common to both
//! network paths are `serve.rs`, `client_ops.rs` and `stream.rs` beside this file.
//!
//! QUIC spends much CPU on encryption: it is the path that always works, not the fast one.

use std::sync::Arc;
use std::time::Duration;

use kvfleet_proto::frame::FRAME_BYTES_MAX;
use quinn::{ConnectionError, IdleTimeout, MtuDiscoveryConfig, TransportConfig, VarInt};

use crate::PathError;
use crate::silence::KEEP_ALIVE;
use crate::stream::StreamError;

mod dialer;
mod path;
mod server;
mod stream;
mod watchdog;

pub use dialer::QuicDialer;
pub use server::{QuicBindError, QuicServer};

/// Concurrent operations of one peer. Further ones wait at the peer, by QUIC's own flow control.
pub const STREAMS_MAX: u32 = 256;

/// Connections that a server keeps. A fleet has a few per instance; further ones are refused.
pub const CONNECTIONS_MAX: usize = 1024;

/// Unacknowledged bytes of one operation: two blocks of 8 MiB, so that one can be checked while the
/// next arrives.
pub const STREAM_WINDOW_BYTES: u32 = 16 << 20;

/// Unacknowledged bytes of one connection, in both windows: two full streams.
pub const CONNECTION_WINDOW_BYTES: u32 = 32 << 20;

/// Fetch answers in flight at a server, over all connections, in bytes, estimated from the largest
/// known frame. Above it the answer is `Busy`: more concurrent readers would only wait longer.
pub const FETCH_BYTES_IN_FLIGHT_MAX: u64 = 256 << 20;

/// Concurrent saves at a server. Each holds one frame in memory while it arrives, and up to a
/// stream's window behind it.
pub const SAVES_AT_ONCE_MAX: usize = 64;

/// Memory for arriving saves, over all connections, in bytes: enough for about twenty long ones.
/// Above it the answer is `Busy`.
pub const SAVE_BYTES_IN_FLIGHT_MAX: u64 = 512 << 20;

/// When a refused peer should ask again: about the time that a full window takes to drain.
pub const RETRY_AFTER: Duration = Duration::from_millis(50);

/// Largest UDP payload ever probed. quinn sends up to 10 datagrams in one call, which the kernel
/// limits to 64 KiB; above that limit its path discovery falls back to 1,200 bytes.
pub const MTU_MAX: u16 = 6500;

/// Datagrams quinn hands to the kernel in one segmented send.
const SEGMENTS_PER_SEND: u32 = 10;

const _: () = assert!(MTU_MAX as u32 * SEGMENTS_PER_SEND < 65_507, "a segmented send must fit one UDP call");

/// Smallest payload that every QUIC path carries, by the standard.
const MTU_MIN: u16 = 1200;

/// Stream error: the peer's request violated the protocol or a limit.
const CODE_REFUSED: VarInt = VarInt::from_u32(1);

/// The connection was closed by its owner.
const CODE_DONE: VarInt = VarInt::from_u32(0);

/// The connection was closed because the peer was silent.
const CODE_SILENT: VarInt = VarInt::from_u32(2);

/// Settings of both ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuicConfig {
    /// Largest UDP payload to probe for, in bytes: 1,200 to [`MTU_MAX`]. Large datagrams nearly
    /// double the throughput on loopback; discovery falls back on paths that carry less.
    pub mtu_max: u16,
    /// Silence after which a peer counts as lost, whatever its host reports. A dead process is
    /// noticed sooner, because its host refuses datagrams to the closed port.
    pub silence_max: Duration,
    /// Silence after which QUIC itself ends a connection, on either end: the fallback.
    pub idle_timeout: Duration,
    /// Timeout for a handshake and the ping that confirms it.
    pub dial_timeout: Duration,
    /// Time without progress after which a save or release counts as lost.
    pub stall_timeout: Duration,
    /// See [`FETCH_BYTES_IN_FLIGHT_MAX`].
    pub fetch_bytes_in_flight_max: u64,
    /// See [`SAVE_BYTES_IN_FLIGHT_MAX`].
    pub save_bytes_in_flight_max: u64,
}

impl Default for QuicConfig {
    fn default() -> QuicConfig {
        QuicConfig {
            mtu_max: 6000,
            // Routers fence a node after 0.8 s of silence, so a longer wait has no use. Three
            // keep-alives fit into it.
            silence_max: Duration::from_millis(750),
            idle_timeout: Duration::from_millis(1_500),
            dial_timeout: Duration::from_secs(1),
            stall_timeout: Duration::from_secs(10),
            fetch_bytes_in_flight_max: FETCH_BYTES_IN_FLIGHT_MAX,
            save_bytes_in_flight_max: SAVE_BYTES_IN_FLIGHT_MAX,
        }
    }
}

/// Memory that a save of this many frames may fill while it arrives: its stream's window, and the
/// frame being assembled.
#[must_use]
pub fn save_bytes_in_flight(frames: usize, frame_bytes: u64) -> u64 {
    let frame = frame_bytes.min(FRAME_BYTES_MAX as u64);
    frame.saturating_mul(frames as u64).min(STREAM_WINDOW_BYTES.into()).saturating_add(frame)
}

impl QuicConfig {
    fn mtu(&self) -> u16 {
        self.mtu_max.clamp(MTU_MIN, MTU_MAX)
    }

    fn transport(&self) -> Arc<TransportConfig> {
        let mut discovery = MtuDiscoveryConfig::default();
        discovery.upper_bound(self.mtu());
        let mut transport = TransportConfig::default();
        transport
            .max_concurrent_bidi_streams(VarInt::from_u32(STREAMS_MAX))
            .max_concurrent_uni_streams(VarInt::from_u32(0))
            .datagram_receive_buffer_size(None)
            .stream_receive_window(VarInt::from_u32(STREAM_WINDOW_BYTES))
            .receive_window(VarInt::from_u32(CONNECTION_WINDOW_BYTES))
            .send_window(u64::from(CONNECTION_WINDOW_BYTES))
            // Five small datagrams a second, and their answers.
            .keep_alive_interval(Some(KEEP_ALIVE))
            .max_idle_timeout(IdleTimeout::try_from(self.idle_timeout).ok())
            .mtu_discovery_config(Some(discovery));
        Arc::new(transport)
    }

    /// An endpoint must accept the largest payload that its peers may probe.
    fn endpoint(&self) -> quinn::EndpointConfig {
        let mut endpoint = quinn::EndpointConfig::default();
        endpoint.max_udp_payload_size(self.mtu()).expect("the size is clamped to QUIC's own range");
        endpoint
    }
}

/// A connection error as a path error.
fn path_error(peer: &str, error: &ConnectionError) -> PathError {
    stream_error(error).at(peer)
}

/// A connection error as a stream error.
fn stream_error(error: &ConnectionError) -> StreamError {
    let cause = error.to_string();
    let code = match error {
        ConnectionError::TransportError(error) => u64::from(error.code),
        ConnectionError::ConnectionClosed(close) => u64::from(close.error_code),
        // Silence, not a close: the peer is dead or cut off, and a redial would only wait longer.
        // At this end only the watchdog closes a path in use.
        ConnectionError::TimedOut | ConnectionError::LocallyClosed => {
            return StreamError::Unreachable("no data arrives from it any more".to_owned());
        }
        _ => return StreamError::Broken(cause),
    };
    match code {
        ALERT_NO_PROTOCOL => StreamError::Protocol("no protocol that this release supports".to_owned()),
        ALERT_FIRST..=ALERT_LAST => StreamError::Untrusted(cause),
        _ => StreamError::Broken(cause),
    }
}

/// QUIC carries TLS alerts as error codes 0x100 to 0x1ff (RFC 9001 §4.8).
const ALERT_FIRST: u64 = 0x100;
const ALERT_LAST: u64 = 0x1ff;
/// TLS alert 120: no common application protocol.
const ALERT_NO_PROTOCOL: u64 = 0x178;

#[cfg(test)]
pub(crate) mod tests;
