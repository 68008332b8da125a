//! Detects a lost peer: one connection of each path carries only keepalive pings.
//!
//! The host of a dead process closes its connections. A hung or disconnected peer closes none, and
//! TCP would wait for minutes. Data on any connection of the path counts as a sign of life. Not
//! here: the measurement of silence (`crate::silence`), and the effect on operations (`pool.rs`).

use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvfleet_proto::data;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

use super::pool::ConnectionPool;
use super::stream::{StreamShared, TlsStream};
use crate::silence::{KEEP_ALIVE, Liveness, SilenceDetector, TICK};
use crate::stream::{ItemError, Stream, StreamError, encode, read_message};
use crate::wire;

/// Sends one ping and waits for the answer.
pub(super) async fn ping(stream: &mut TlsStream) -> Result<data::Pong, ItemError> {
    let ping = encode(&wire::ping_to_pb()).expect("a ping is a few bytes");
    stream.write(ping).await?;
    stream.flush().await?;
    read_message(stream).await
}

/// Watches until the peer is lost, or until `end`, when its certificate is no longer valid. Then
/// informs every operation of the path.
pub(super) async fn watch_peer(
    mut keepalive: TlsStream,
    ends: StreamShared,
    lost_after: Duration,
    pool: Weak<ConnectionPool>,
    lost: watch::Sender<Option<StreamError>>,
    end: impl Future<Output = rustls::Error>,
) {
    let loss = tokio::select! {
        loss = ping_until_closed(&mut keepalive) => loss,
        loss = wait_for_silence(&ends, lost_after, &pool) => loss,
        error = end => StreamError::Untrusted(error.to_string()),
    };
    tracing::debug!(%loss, "peer is gone");
    lost.send_replace(Some(loss));
}

/// Pings repeatedly; returns once the connection ends.
async fn ping_until_closed(keepalive: &mut TlsStream) -> StreamError {
    loop {
        match ping(keepalive).await {
            Ok(data::Pong { .. }) => keepalive.release_buffers(),
            Err(ItemError::Lost(loss)) => return loss,
            Err(nonsense) => return StreamError::Protocol(nonsense.to_string()),
        }
        let stopped = keepalive.stopped();
        tokio::select! {
            () = sleep(KEEP_ALIVE) => {}
            () = stopped => {}
        }
    }
}

/// Returns once no data arrived for too long.
async fn wait_for_silence(
    ends: &StreamShared,
    lost_after: Duration,
    pool: &Weak<ConnectionPool>,
) -> StreamError {
    let mut silence = SilenceDetector::new(Instant::now(), lost_after);
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Some(pool) = Weak::upgrade(pool) {
            pool.close_idle();
        }
        if silence.check(Instant::now(), ends.received.load(Ordering::Relaxed)) == Liveness::Lost {
            return StreamError::Unreachable("no data arrives from it any more".to_owned());
        }
    }
}
