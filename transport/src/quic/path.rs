//! The client's end of a connection: the four operations, one stream each.
//!
//! Not here: checking what the bytes are (the caller verifies every frame), retrying, choosing.

use std::time::Duration;

use kv_core::id::LeaseId;
use kvfleet_proto::data;
use kvfleet_proto::frame::{FRAME_BYTES_MAX, Frame};
use quinn::{Connection, RecvStream, SendStream};
use tokio::time::{Instant, timeout_at};

use super::dialer::within;
use super::stream::{
    ItemError, Next, encode, read_frame, read_message, write_error, write_frame, write_message,
};
use super::{CODE_DONE, path_error};
use crate::wire;
use crate::{
    BoxFuture, FetchAnswer, FetchRequest, MissReason, Path, PathError, SaveAnswer, SaveOffer, SaveRequest,
};

/// Longest deadline a fetch can have; more is the same as none, and would overflow the clock.
const DEADLINE_MAX: Duration = Duration::from_secs(3600);

/// One connection to one node.
#[derive(Debug)]
pub(super) struct QuicPath {
    connection: Connection,
    peer: String,
    stall_timeout: Duration,
}

impl Drop for QuicPath {
    fn drop(&mut self) {
        self.connection.close(CODE_DONE, b"path dropped");
    }
}

impl QuicPath {
    pub(super) fn new(connection: Connection, peer: String, stall_timeout: Duration) -> QuicPath {
        QuicPath { connection, peer, stall_timeout }
    }

    /// Opens a stream and asks.
    async fn ask(&self, request: &data::DataRequest) -> Result<(SendStream, RecvStream), PathError> {
        let message = encode(request)?;
        let (mut send, recv) =
            self.connection.open_bi().await.map_err(|error| path_error(&self.peer, &error))?;
        write_message(&mut send, message).await.map_err(|error| write_error(&self.peer, &error))?;
        Ok((send, recv))
    }

    /// Asks and reads the one message that answers.
    async fn call<M: prost::Message + Default>(
        &self,
        request: &data::DataRequest,
    ) -> Result<(M, RecvStream), PathError> {
        let (mut send, mut recv) = self.ask(request).await?;
        let _ = send.finish(); // fails only when the peer has stopped it, which the read reports better
        let answer = read_message(&mut recv).await.map_err(|error| error.at(&self.peer))?;
        Ok((answer, recv))
    }

    fn protocol(&self, what: &dyn std::fmt::Display) -> PathError {
        PathError::Protocol {
            peer: self.peer.clone(),
            what: format!("a message that makes no sense: {what}"),
        }
    }

    async fn fetch_all(
        &self,
        request: &FetchRequest,
        sink: &mut (dyn FnMut(Frame) + Send),
    ) -> Result<FetchAnswer, PathError> {
        let deadline = Instant::now() + request.deadline.min(DEADLINE_MAX);
        let wire = wire::fetch_to_pb(request);
        let Ok(called) = timeout_at(deadline, self.call::<data::FetchHead>(&wire)).await else {
            return Ok(FetchAnswer::Miss { reason: MissReason::TooLate });
        };
        let (head, mut recv) = called?;
        let (answer, epoch) =
            wire::head_from_pb(&head, request.hashes.len()).map_err(|error| self.protocol(&error))?;
        if epoch != request.epoch && !answer.tiers().is_empty() {
            return Ok(FetchAnswer::Miss { reason: MissReason::StaleEpoch });
        }
        let wanted = answer.tiers().len();
        let (delivered, reason) = receive(&mut recv, wanted, deadline, sink).await;
        Ok(answer.cut_short(delivered, reason))
    }

    async fn save_all(
        &self,
        request: &SaveRequest,
        source: &(dyn Fn(usize) -> Frame + Send + Sync),
    ) -> Result<SaveAnswer, PathError> {
        let wire = wire::save_to_pb(request);
        let (mut send, mut recv) = self.timed(self.ask(&wire)).await?;
        let offer = self.timed(self.message::<data::SaveOffer>(&mut recv)).await?;
        let offer =
            wire::offer_from_pb(&offer, request.hashes.len()).map_err(|error| self.protocol(&error))?;
        let wanted = match offer {
            SaveOffer::Wanted(wanted) => wanted,
            SaveOffer::Busy { retry_after } => return Ok(SaveAnswer::Busy { retry_after }),
            SaveOffer::Refused(refusal) => return Ok(SaveAnswer::Refused(refusal)),
        };
        for (position, _) in wanted.iter().enumerate().filter(|(_, wanted)| **wanted) {
            self.timed(self.put(&mut send, &source(position))).await?;
        }
        let _ = send.finish(); // as in `call`
        let done = self.timed(self.message::<data::SaveDone>(&mut recv)).await?;
        Ok(wire::done_from_pb(&done))
    }

    async fn put(&self, send: &mut SendStream, frame: &Frame) -> Result<(), PathError> {
        write_frame(send, frame).await.map_err(|error| write_error(&self.peer, &error))
    }

    async fn message<M: prost::Message + Default>(&self, recv: &mut RecvStream) -> Result<M, PathError> {
        read_message(recv).await.map_err(|error: ItemError| error.at(&self.peer))
    }

    async fn timed<T>(&self, work: impl Future<Output = Result<T, PathError>>) -> Result<T, PathError> {
        within(&self.peer, self.stall_timeout, work).await
    }
}

/// Hands up to `wanted` frames to `sink`: how many came, and why not more.
async fn receive(
    recv: &mut RecvStream,
    wanted: usize,
    deadline: Instant,
    sink: &mut (dyn FnMut(Frame) + Send),
) -> (usize, MissReason) {
    for delivered in 0..wanted {
        match timeout_at(deadline, read_frame(recv, FRAME_BYTES_MAX)).await {
            Ok(Ok(Next::Frame(frame))) => sink(frame),
            // A node that says nothing more had no bytes.
            Ok(Ok(Next::End(reason))) => return (delivered, reason.unwrap_or(MissReason::MediumFailed)),
            Ok(Err(error)) if error.is_loss() => return (delivered, MissReason::NodeLost),
            Ok(Err(_)) => return (delivered, MissReason::Corrupt),
            Err(_) => return (delivered, MissReason::TooLate),
        }
    }
    (wanted, MissReason::NotHeld)
}

impl Path for QuicPath {
    fn fetch<'a>(
        &'a self,
        request: FetchRequest,
        sink: &'a mut (dyn FnMut(Frame) + Send),
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move { self.fetch_all(&request, sink).await })
    }

    fn save<'a>(
        &'a self,
        request: SaveRequest,
        source: &'a (dyn Fn(usize) -> Frame + Send + Sync),
    ) -> BoxFuture<'a, Result<SaveAnswer, PathError>> {
        Box::pin(async move { self.save_all(&request, source).await })
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), PathError>> {
        Box::pin(async move {
            let request = wire::release_to_pb(lease);
            self.timed(self.call::<data::Pong>(&request)).await.map(|_| ())
        })
    }

    fn failure(&self) -> Option<PathError> {
        self.connection.close_reason().map(|error| path_error(&self.peer, &error))
    }

    fn ping(&self) -> BoxFuture<'_, Result<Duration, PathError>> {
        Box::pin(async move {
            let asked = Instant::now();
            let (pong, _) = self.timed(self.call::<data::Pong>(&wire::ping_to_pb())).await?;
            if pong.version != wire::PROTOCOL_VERSION {
                return Err(self.protocol(&format_args!("protocol version {}", pong.version)));
            }
            Ok(asked.elapsed())
        })
    }
}
