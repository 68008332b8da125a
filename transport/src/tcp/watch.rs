//! Notices that a peer is gone: one connection of each path does nothing but ask for signs of life.
//!
//! A process that died is told by its host, which ends its connections; one that hangs or is cut off ends nothing,
//! and TCP would wait for minutes. Whatever comes over any connection of the path is a sign of life too. Not here:
//! how silence is counted (`crate::silence`), what operations make of it (`pool.rs`).

use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvfleet_proto::data;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

use super::pool::Pool;
use super::stream::{Ends, TlsStream};
use crate::silence::{KEEP_ALIVE, Silence, TICK, Verdict};
use crate::stream::{ItemError, Loss, Stream, encode, read_message};
use crate::wire;

/// Asks once, and waits for the answer.
pub(super) async fn ask_alive(stream: &mut TlsStream) -> Result<data::Pong, ItemError> {
    let ping = encode(&wire::ping_to_pb()).expect("a ping is a few bytes");
    stream.write(ping).await?;
    stream.flush().await?;
    read_message(stream).await
}

/// Watches until the peer is gone, and then says so to every operation of the path.
pub(super) async fn watch(
    mut lifeline: TlsStream,
    ends: Ends,
    lost_after: Duration,
    pool: Weak<Pool>,
    lost: watch::Sender<Option<Loss>>,
) {
    let loss = tokio::select! {
        loss = ended(&mut lifeline) => loss,
        loss = silent(&ends, lost_after, &pool) => loss,
    };
    tracing::debug!(%loss, "peer is gone");
    lost.send_replace(Some(loss));
}

/// Keeps asking; returns once the connection ends.
async fn ended(lifeline: &mut TlsStream) -> Loss {
    loop {
        match ask_alive(lifeline).await {
            Ok(data::Pong { .. }) => lifeline.rest(),
            Err(ItemError::Lost(loss)) => return loss,
            Err(nonsense) => return Loss::Protocol(nonsense.to_string()),
        }
        let stopped = lifeline.stopped();
        tokio::select! {
            () = sleep(KEEP_ALIVE) => {}
            () = stopped => {}
        }
    }
}

/// Listens; returns once nothing came for too long.
async fn silent(ends: &Ends, lost_after: Duration, pool: &Weak<Pool>) -> Loss {
    let mut silence = Silence::new(Instant::now(), lost_after);
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Some(pool) = Weak::upgrade(pool) {
            pool.close_idle();
        }
        if silence.look(Instant::now(), ends.heard.load(Ordering::Relaxed)) == Verdict::Lost {
            return Loss::Unreachable("nothing comes from it any more".to_owned());
        }
    }
}
