//! The bytes of one QUIC stream, behind the interface common to both network paths.
//!
//! Writes pass the frame's own memory to quinn, which decides when to send. Short writes are held
//! back for the bytes after them, and higher classes go first, since the streams of a connection
//! share it. quinn lets a low-priority stream wait forever and reads a priority only when the
//! stream is queued. So the others yield: while one stream has been stuck for
//! [`StreamPriorities::starved_after`], all streams of its connection write as the last class,
//! which takes turns. Bytes written before go first, at most one window. Not here: the meaning of
//! bytes (`crate::stream`).

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use kv_core::id::TrafficClass;
use quinn::{Connection, ReadError, RecvStream, SendStream, WriteError};
use tokio::time::timeout;

use super::{CODE_REFUSED, stream_error};
use crate::MissReason;
use crate::slot_queue::Slot;
use crate::stream::{Source, Stream, StreamError, end_bytes};

/// How long a stream waits behind higher classes before they yield. Most fetches take less.
const STARVED_AFTER: Duration = Duration::from_millis(100);

/// The same in round trips, for slow links: either end of a stream may be idle for one of them.
const STARVED_AFTER_ROUND_TRIPS: u32 = 4;

/// How long a finished stream waits for its last bytes to be sent, with the others yielding.
const FINISH_TIMEOUT: Duration = Duration::from_secs(5);

/// Shorter writes are held back for the next write or a flush: so a message with a frame behind it
/// wakes the connection once and needs no packet of its own.
const HELD_BYTES_MAX: usize = 1024;

/// The last class.
const LAST: TrafficClass = TrafficClass::Prefetch;

/// Priority state shared by the streams of one connection. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct StreamPriorities {
    connection: Connection,
    starved: Arc<AtomicUsize>,
}

impl StreamPriorities {
    pub(super) fn new(connection: &Connection) -> StreamPriorities {
        StreamPriorities { connection: connection.clone(), starved: Arc::default() }
    }

    /// How long a stream may wait behind others.
    fn starved_after(&self) -> Duration {
        STARVED_AFTER.max(self.connection.rtt().saturating_mul(STARVED_AFTER_ROUND_TRIPS))
    }

    /// Makes the other streams yield until the guard is dropped.
    fn mark_starved(&self) -> StarvedGuard {
        self.starved.fetch_add(1, Ordering::Relaxed);
        StarvedGuard(Arc::clone(&self.starved))
    }

    fn has_starved(&self) -> bool {
        self.starved.load(Ordering::Relaxed) > 0
    }
}

/// Marks a stream that has been stuck for long.
struct StarvedGuard(Arc<AtomicUsize>);

impl Drop for StarvedGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Both halves of one operation's stream.
pub(super) struct QuicStream {
    send: SendStream,
    recv: RecvStream,
    class: TrafficClass,
    /// Class that it currently sends as.
    send_class: TrafficClass,
    priorities: StreamPriorities,
    /// Present on the client's end, which reads the answer to all that it wrote.
    slot: Option<Slot>,
    /// Short bytes that were written and not passed to quinn.
    held: Bytes,
}

impl QuicStream {
    /// The answering end of a stream, in the first class.
    pub(super) fn accepted(send: SendStream, recv: RecvStream, mates: &StreamPriorities) -> QuicStream {
        let (class, priorities) = (TrafficClass::Fetch, mates.clone());
        QuicStream { send, recv, class, send_class: class, priorities, slot: None, held: Bytes::new() }
    }

    /// The requesting end of a stream, in the first class.
    pub(super) fn opened(
        send: SendStream,
        recv: RecvStream,
        place: Slot,
        mates: &StreamPriorities,
    ) -> QuicStream {
        QuicStream { slot: Some(place), ..QuicStream::accepted(send, recv, mates) }
    }

    /// Sets the priority of later writes: the stream's own class, or the last one while any stream
    /// is starved.
    fn update_priority(&mut self) {
        let class = if self.priorities.has_starved() { LAST } else { self.class };
        if class != self.send_class {
            self.send_class = class;
            // Fails only for a finished stream, which sends no more bytes.
            let _ = self.send.set_priority(-i32::try_from(class.rank()).unwrap_or(i32::MAX));
        }
    }

    /// Finishes the stream, and keeps its last bytes from starving in quinn.
    pub(super) async fn finish_and_drain(mut self) {
        debug_assert!(self.held.is_empty(), "an answer must be flushed");
        self.finish();
        if self.class == TrafficClass::Fetch
            || timeout(self.priorities.starved_after(), self.send.stopped()).await.is_ok()
        {
            return;
        }
        let _passed_over = self.priorities.mark_starved();
        let _ = timeout(FINISH_TIMEOUT, self.send.stopped()).await;
    }

    /// Passes the held bytes and then these to quinn.
    async fn send_held(&mut self, bytes: Bytes) -> Result<(), StreamError> {
        let mut left = [std::mem::take(&mut self.held), bytes];
        if self.class == TrafficClass::Fetch {
            return self.send.write_all_chunks(&mut left).await.map_err(|error| write_error(&error));
        }
        let mut passed_over = None;
        while left.iter().any(|bytes| !bytes.is_empty()) {
            match timeout(self.priorities.starved_after(), self.send.write_chunks(&mut left)).await {
                Ok(written) => {
                    written.map_err(|error| write_error(&error))?;
                    passed_over = None;
                }
                Err(_) => passed_over = passed_over.or_else(|| Some(self.priorities.mark_starved())),
            }
        }
        Ok(())
    }

    /// Observes the peer's end if it arrived with its last bytes, as usual. If the end of a stream
    /// was not seen, quinn sends a packet to stop the peer.
    pub(super) fn observe_end(&mut self) {
        let mut context = Context::from_waker(Waker::noop());
        let _ = pin!(self.recv.read_chunk(1, true)).poll(&mut context);
    }

    /// Tells the peer that its operation is refused.
    pub(super) fn refuse(&mut self) {
        let _ = self.send.reset(CODE_REFUSED);
        let _ = self.recv.stop(CODE_REFUSED);
    }

    /// Ends our side. Fails only if the peer has stopped it, which the next read reports better.
    pub(super) fn finish(&mut self) {
        let _ = self.send.finish();
    }
}

impl Source for RecvStream {
    async fn fill(&mut self, have: &mut BytesMut, wanted: usize) -> Result<bool, StreamError> {
        while have.len() < wanted {
            match self.read_chunk(wanted - have.len(), true).await.map_err(|error| read_error(&error))? {
                Some(chunk) => have.extend_from_slice(&chunk.bytes),
                None => return Ok(false),
            }
        }
        Ok(true)
    }

    async fn read_into(&mut self, mut to: &mut [u8], _behind: usize) -> Result<bool, StreamError> {
        while !to.is_empty() {
            match self.read_chunk(to.len(), true).await.map_err(|error| read_error(&error))? {
                Some(chunk) => {
                    let (filled, rest) = std::mem::take(&mut to).split_at_mut(chunk.bytes.len());
                    filled.copy_from_slice(&chunk.bytes);
                    to = rest;
                }
                None => return Ok(false),
            }
        }
        Ok(true)
    }
}

impl Source for QuicStream {
    async fn fill(&mut self, have: &mut BytesMut, wanted: usize) -> Result<bool, StreamError> {
        if self.class == TrafficClass::Fetch || self.slot.is_none() {
            return self.recv.fill(have, wanted).await;
        }
        // The peer may be waiting for bytes that we wrote. Received bytes stay in `have`.
        if let Ok(filled) = timeout(self.priorities.starved_after(), self.recv.fill(have, wanted)).await {
            return filled;
        }
        let _passed_over = self.priorities.mark_starved();
        self.recv.fill(have, wanted).await
    }

    async fn read_into(&mut self, to: &mut [u8], behind: usize) -> Result<bool, StreamError> {
        self.recv.read_into(to, behind).await
    }
}

impl Stream for QuicStream {
    async fn write(&mut self, bytes: Bytes) -> Result<(), StreamError> {
        self.update_priority();
        if self.held.is_empty() && bytes.len() <= HELD_BYTES_MAX {
            self.held = bytes;
            return Ok(());
        }
        self.send_held(bytes).await
    }

    async fn flush(&mut self) -> Result<(), StreamError> {
        if self.held.is_empty() { Ok(()) } else { self.send_held(Bytes::new()).await }
    }

    /// Without a reason, the end of the stream suffices.
    async fn end(&mut self, reason: Option<MissReason>) -> Result<(), StreamError> {
        if reason.is_some() {
            self.write(end_bytes(reason)).await?;
        }
        self.flush().await?;
        self.finish();
        Ok(())
    }

    fn set_class(&mut self, class: TrafficClass) {
        self.class = class;
        self.update_priority();
    }

    fn stopped(&self) -> impl Future<Output = ()> + Send + 'static {
        let stopped = self.send.stopped();
        async move {
            let _ = stopped.await;
        }
    }
}

fn read_error(error: &ReadError) -> StreamError {
    match error {
        ReadError::ConnectionLost(error) => stream_error(error),
        ReadError::Reset(code) => StreamError::Protocol(format!("a refusal (code {code})")),
        other => StreamError::Broken(other.to_string()),
    }
}

fn write_error(error: &WriteError) -> StreamError {
    match error {
        WriteError::ConnectionLost(error) => stream_error(error),
        WriteError::Stopped(code) => StreamError::Protocol(format!("a stop (code {code})")),
        other => StreamError::Broken(other.to_string()),
    }
}

#[cfg(test)]
mod tests;
