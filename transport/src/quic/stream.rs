//! The bytes of one QUIC stream, as the code above both network paths wants them.
//!
//! Writes hand the frame's own memory to quinn, which sends when it sees fit: what is short together with what stands behind it, and
//! what is of a higher class first, as streams of one connection share its way. quinn lets a stream wait for ever behind others, and looks at its priority only when it comes
//! to the queue; so it is the others that yield: while one has moved nothing for [`Mates::patience`], all streams of its
//! connection write as the last class, where each has its turn. What was written before goes first, which is a window at
//! most. Not here: what the bytes are (`crate::stream`).

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use kv_core::id::Class;
use quinn::{Connection, ReadError, RecvStream, SendStream, WriteError};
use tokio::time::timeout;

use super::{CODE_REFUSED, loss};
use crate::MissReason;
use crate::stream::{Loss, Source, Stream, end_bytes};
use crate::turns::Place;

/// How long a stream stands behind those of higher classes before they yield. A fetch that waits lasts less, most often.
const PASSED_OVER_MAX: Duration = Duration::from_millis(100);

/// The same in round trips, over a long way: nothing moves for one of them at each end of a stream.
const PASSED_OVER_ROUND_TRIPS: u32 = 4;

/// How long a stream that is over waits for its last bytes to be sent, with others yielding.
const LEAVES_MAX: Duration = Duration::from_secs(5);

/// What is shorter waits for what is written next, or for a flush: a message with a frame behind it wakes the connection once and
/// needs no packet of its own.
const HELD_BYTES_MAX: usize = 1024;

/// The last class.
const LAST: Class = Class::Prefetch;

/// What the streams of one connection know of each other. Clones are the same.
#[derive(Clone, Debug)]
pub(super) struct Mates {
    connection: Connection,
    passed_over: Arc<AtomicUsize>,
}

impl Mates {
    pub(super) fn of(connection: &Connection) -> Mates {
        Mates { connection: connection.clone(), passed_over: Arc::default() }
    }

    /// How long a stream may stand behind others.
    fn patience(&self) -> Duration {
        PASSED_OVER_MAX.max(self.connection.rtt().saturating_mul(PASSED_OVER_ROUND_TRIPS))
    }

    /// Others yield until this is dropped.
    fn pass_over(&self) -> PassedOver {
        self.passed_over.fetch_add(1, Ordering::Relaxed);
        PassedOver(Arc::clone(&self.passed_over))
    }

    fn is_any_passed_over(&self) -> bool {
        self.passed_over.load(Ordering::Relaxed) > 0
    }
}

/// A stream that moved nothing for long.
struct PassedOver(Arc<AtomicUsize>);

impl Drop for PassedOver {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Both halves of one operation's stream.
pub(super) struct QuicStream {
    send: SendStream,
    recv: RecvStream,
    class: Class,
    /// As what it sends.
    as_class: Class,
    mates: Mates,
    /// At the end that asks, which so reads what answers all it wrote.
    place: Option<Place>,
    /// Short bytes that were written and not handed to quinn.
    held: Bytes,
}

impl QuicStream {
    /// A stream of the first class, at the end that answers.
    pub(super) fn accepted((send, recv): (SendStream, RecvStream), mates: &Mates) -> QuicStream {
        let (class, mates) = (Class::Fetch, mates.clone());
        QuicStream { send, recv, class, as_class: class, mates, place: None, held: Bytes::new() }
    }

    /// A stream of the first class, at the end that asks.
    pub(super) fn opened(both: (SendStream, RecvStream), place: Place, mates: &Mates) -> QuicStream {
        QuicStream { place: Some(place), ..QuicStream::accepted(both, mates) }
    }

    /// Sends what is written from now on among those of its class, or the last one where somebody is passed over.
    fn line_up(&mut self) {
        let class = if self.mates.is_any_passed_over() { LAST } else { self.class };
        if class != self.as_class {
            self.as_class = class;
            // Of a stream that is over nothing is sent.
            let _ = self.send.set_priority(-i32::try_from(class.rank()).unwrap_or(i32::MAX));
        }
    }

    /// Nothing more is written: what quinn has still to send is not passed over for long either.
    pub(super) async fn leave(mut self) {
        debug_assert!(self.held.is_empty(), "an answer is flushed");
        self.finish();
        if self.class == Class::Fetch || timeout(self.mates.patience(), self.send.stopped()).await.is_ok() {
            return;
        }
        let _passed_over = self.mates.pass_over();
        let _ = timeout(LEAVES_MAX, self.send.stopped()).await;
    }

    /// Hands what is held to quinn, and this behind it.
    async fn hand_over(&mut self, bytes: Bytes) -> Result<(), Loss> {
        let mut left = [std::mem::take(&mut self.held), bytes];
        if self.class == Class::Fetch {
            return self.send.write_all_chunks(&mut left).await.map_err(|error| write_loss(&error));
        }
        let mut passed_over = None;
        while left.iter().any(|bytes| !bytes.is_empty()) {
            match timeout(self.mates.patience(), self.send.write_chunks(&mut left)).await {
                Ok(written) => {
                    written.map_err(|error| write_loss(&error))?;
                    passed_over = None;
                }
                Err(_) => passed_over = passed_over.or_else(|| Some(self.mates.pass_over())),
            }
        }
        Ok(())
    }

    /// Takes note of the peer's end if it came with its last bytes, as it does most often: of a stream whose end was not seen quinn tells the
    /// peer to stop, in a packet more.
    pub(super) fn see_end(&mut self) {
        let mut context = Context::from_waker(Waker::noop());
        let _ = pin!(self.recv.read_chunk(1, true)).poll(&mut context);
    }

    /// Tells the peer that its operation is not served.
    pub(super) fn refuse(&mut self) {
        let _ = self.send.reset(CODE_REFUSED);
        let _ = self.recv.stop(CODE_REFUSED);
    }

    /// Nothing more is sent. Fails only when the peer has stopped it, which the next read reports better.
    pub(super) fn finish(&mut self) {
        let _ = self.send.finish();
    }
}

impl Source for RecvStream {
    async fn fill(&mut self, have: &mut BytesMut, wanted: usize) -> Result<bool, Loss> {
        while have.len() < wanted {
            match self.read_chunk(wanted - have.len(), true).await.map_err(|error| read_loss(&error))? {
                Some(chunk) => have.extend_from_slice(&chunk.bytes),
                None => return Ok(false),
            }
        }
        Ok(true)
    }

    async fn read_into(&mut self, mut to: &mut [u8], _behind: usize) -> Result<bool, Loss> {
        while !to.is_empty() {
            match self.read_chunk(to.len(), true).await.map_err(|error| read_loss(&error))? {
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
    async fn fill(&mut self, have: &mut BytesMut, wanted: usize) -> Result<bool, Loss> {
        if self.class == Class::Fetch || self.place.is_none() {
            return self.recv.fill(have, wanted).await;
        }
        // What was written before may be what the answer waits for. What came stays in `have`.
        if let Ok(filled) = timeout(self.mates.patience(), self.recv.fill(have, wanted)).await {
            return filled;
        }
        let _passed_over = self.mates.pass_over();
        self.recv.fill(have, wanted).await
    }

    async fn read_into(&mut self, to: &mut [u8], behind: usize) -> Result<bool, Loss> {
        self.recv.read_into(to, behind).await
    }
}

impl Stream for QuicStream {
    async fn write(&mut self, bytes: Bytes) -> Result<(), Loss> {
        self.line_up();
        if self.held.is_empty() && bytes.len() <= HELD_BYTES_MAX {
            self.held = bytes;
            return Ok(());
        }
        self.hand_over(bytes).await
    }

    async fn flush(&mut self) -> Result<(), Loss> {
        if self.held.is_empty() { Ok(()) } else { self.hand_over(Bytes::new()).await }
    }

    /// The end of the stream says it, without a reason.
    async fn end(&mut self, reason: Option<MissReason>) -> Result<(), Loss> {
        if reason.is_some() {
            self.write(end_bytes(reason)).await?;
        }
        self.flush().await?;
        self.finish();
        Ok(())
    }

    fn rank(&mut self, class: Class) {
        self.class = class;
        self.line_up();
    }

    fn stopped(&self) -> impl Future<Output = ()> + Send + 'static {
        let stopped = self.send.stopped();
        async move {
            let _ = stopped.await;
        }
    }
}

fn read_loss(error: &ReadError) -> Loss {
    match error {
        ReadError::ConnectionLost(error) => loss(error),
        ReadError::Reset(code) => Loss::Protocol(format!("a refusal (code {code})")),
        other => Loss::Broken(other.to_string()),
    }
}

fn write_loss(error: &WriteError) -> Loss {
    match error {
        WriteError::ConnectionLost(error) => loss(error),
        WriteError::Stopped(code) => Loss::Protocol(format!("a stop (code {code})")),
        other => Loss::Broken(other.to_string()),
    }
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
