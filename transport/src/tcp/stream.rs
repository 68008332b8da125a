//! One connection as a stream of plain bytes: an operation at a time, one after the other.
//!
//! What is read is opened where it lies and copied once, into the item it belongs to. What is written waits until
//! it is worth a system call, is sealed record by record (the one copy of this end), and all records of a batch
//! leave in one call. A future that is dropped between may leave half an item behind: whoever drops one drops
//! the stream too.
//! Not here: which operation is next (`server.rs`, `pool.rs`), what the bytes are (`crate::stream`).

use std::io::{ErrorKind, IoSlice};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{Buf, Bytes, BytesMut};
use rustls::crypto::cipher::OutboundChunks;
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::buffers::{Buffers, Size};
use super::record::{HEAD_BYTES, Opened, Opener, PLAIN_BYTES_MAX, RECORD_BYTES_MAX, Sealer};
use super::socket::{io_loss, try_read};
use crate::MissReason;
use crate::stream::{Loss, Source, Stream, end_bytes};

/// What is said of a connection that its peer ended.
pub(crate) const CLOSED: &str = "the peer closed the connection";

/// Records sealed and sent at once: as many plain bytes as a buffer of the reader takes.
const BATCH_RECORDS: usize = 8;

/// What a connection shares with the others of its server or its path.
#[derive(Clone, Debug)]
pub(super) struct Ends {
    pub(super) buffers: Arc<Buffers>,
    /// Counts what was heard of the peer.
    pub(super) heard: Arc<AtomicU64>,
    /// Which buffer a read needs that nothing is known of.
    pub(super) least: Size,
}

/// A TLS connection after its handshake. Dropped, it ends without a goodbye.
pub(super) struct TlsStream {
    socket: Arc<TcpStream>,
    sealer: Sealer,
    opener: Opener,
    came: Came,
    waiting: Vec<Bytes>,
    waiting_bytes: usize,
    plain_bytes: u64,
    ends: Ends,
}

/// Bytes that came: one opened record, then what was not opened yet.
struct Came {
    buffer: Vec<u8>,
    plain: Range<usize>,
    sealed: Range<usize>,
}

impl TlsStream {
    /// `came` are the bytes behind the handshake.
    pub(super) fn new(
        socket: TcpStream,
        sealer: Sealer,
        opener: Opener,
        came: &[u8],
        ends: Ends,
    ) -> TlsStream {
        let mut buffer = if came.is_empty() { Vec::new() } else { ends.buffers.take(Size::Large) };
        let room = buffer.len().max(came.len());
        buffer.resize(room, 0);
        buffer[..came.len()].copy_from_slice(came);
        TlsStream {
            socket: Arc::new(socket),
            sealer,
            opener,
            came: Came { buffer, plain: 0..0, sealed: 0..came.len() },
            waiting: Vec::new(),
            waiting_bytes: 0,
            plain_bytes: 0,
            ends,
        }
    }

    /// Plain bytes that came in all: as long as an operation added none, its peer has answered nothing.
    pub(super) fn plain_bytes(&self) -> u64 {
        self.plain_bytes
    }

    /// Waits for the peer to begin something. `Ok(false)` when it ended the connection instead.
    pub(super) async fn begun(&mut self) -> Result<bool, Loss> {
        self.more(self.ends.least).await
    }

    /// Gives back memory that holds nothing. Between operations.
    pub(super) fn rest(&mut self) {
        if self.came.plain.is_empty() && self.came.sealed.is_empty() {
            self.ends.buffers.give(std::mem::take(&mut self.came.buffer));
            (self.came.plain, self.came.sealed) = (0..0, 0..0);
        }
    }

    /// Whether the next operation may use this connection: nothing came that nobody asked for, the peer did not end
    /// it, and its keys are good for much more.
    pub(super) fn is_usable(&self) -> bool {
        let is_empty = self.came.plain.is_empty() && self.came.sealed.is_empty() && self.waiting.is_empty();
        let is_worn = self.sealer.is_worn() || self.opener.is_worn();
        let is_quiet = || try_read(&self.socket, &mut [0]).is_err_and(|e| e.kind() == ErrorKind::WouldBlock);
        is_empty && !is_worn && is_quiet()
    }

    #[cfg(test)]
    pub(super) fn wear_out(&mut self) {
        self.sealer.wear_out();
    }

    /// Says goodbye, as far as that needs no waiting.
    pub(super) fn close(mut self) {
        if let Ok(goodbye) = self.sealer.seal_close() {
            let _ = self.socket.try_write(&goodbye);
        }
    }

    /// Ends the connection at once: the peer is told even if it reads nothing, and nothing of what is under way
    /// counts.
    pub(super) fn abort(self) {
        let _ = self.socket.set_zero_linger(); // without it the end comes behind what was sent
    }

    /// Sees to it that there are plain bytes. `Ok(false)` when the peer ended the connection.
    async fn more(&mut self, size: Size) -> Result<bool, Loss> {
        loop {
            if !self.came.plain.is_empty() {
                return Ok(true);
            }
            let Came { buffer, plain, sealed } = &mut self.came;
            match self.opener.open(&mut buffer[sealed.clone()])? {
                Opened::Data { plain: of_record, record } => {
                    *plain = sealed.start + of_record.start..sealed.start + of_record.end;
                    sealed.start += record;
                    self.plain_bytes += plain.len() as u64;
                }
                Opened::Part => {
                    if !self.read(size).await? {
                        return Ok(false);
                    }
                }
                Opened::Closed => return Ok(false),
            }
        }
    }

    /// The next plain bytes, `at_most` so many, of which there is one at least. So many are `expected` in all.
    async fn take(&mut self, at_most: usize, expected: usize) -> Result<&[u8], Loss> {
        let size = if expected > PLAIN_BYTES_MAX { Size::Large } else { Size::Small };
        if !self.more(size).await? {
            return Err(Loss::Broken(CLOSED.to_owned()));
        }
        let Came { buffer, plain, .. } = &mut self.came;
        let taken = plain.start..plain.end.min(plain.start + at_most);
        plain.start = taken.end;
        Ok(&buffer[taken])
    }

    /// Reads behind what came and was not opened.
    async fn read(&mut self, size: Size) -> Result<bool, Loss> {
        self.socket.readable().await.map_err(|error| io_loss(&error))?;
        loop {
            self.came.make_room(size.max(self.ends.least), &self.ends.buffers);
            let sealed = &mut self.came.sealed;
            match try_read(&self.socket, &mut self.came.buffer[sealed.end..]) {
                Ok(0) => return Ok(false),
                Ok(bytes) => {
                    sealed.end += bytes;
                    self.ends.heard.fetch_add(1, Ordering::Relaxed);
                    return Ok(true);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.socket.readable().await.map_err(|error| io_loss(&error))?;
                }
                Err(error) => return Err(io_loss(&error)),
            }
        }
    }

    /// Seals the leading plain bytes that wait, at most a batch.
    fn seal_batch(&mut self) -> Result<Vec<Vec<u8>>, Loss> {
        let mut records = Vec::with_capacity(BATCH_RECORDS);
        let slices: Vec<&[u8]> = self.waiting.iter().map(|bytes| &bytes[..]).collect();
        let mut rest = OutboundChunks::new(&slices);
        while !rest.is_empty() && records.len() < BATCH_RECORDS {
            let (record, behind) = rest.split_at(PLAIN_BYTES_MAX);
            records.push(self.sealer.seal(record)?);
            rest = behind;
        }
        let sealed = self.waiting_bytes - rest.len();
        self.drop_waiting(sealed);
        Ok(records)
    }

    fn drop_waiting(&mut self, mut bytes: usize) {
        self.waiting_bytes -= bytes;
        let whole = self.waiting.iter().take_while(|item| {
            let is_whole = item.len() <= bytes;
            bytes -= if is_whole { item.len() } else { 0 };
            is_whole
        });
        let whole = whole.count();
        self.waiting.drain(..whole);
        if let Some(item) = self.waiting.first_mut() {
            item.advance(bytes);
        }
    }

    async fn send(&self, records: &[Vec<u8>]) -> Result<(), Loss> {
        let mut slices: Vec<IoSlice<'_>> = records.iter().map(|record| IoSlice::new(record)).collect();
        let mut left = &mut slices[..];
        while !left.is_empty() {
            match self.socket.try_write_vectored(left) {
                Ok(bytes) => IoSlice::advance_slices(&mut left, bytes),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.socket.writable().await.map_err(|error| io_loss(&error))?;
                }
                Err(error) => return Err(io_loss(&error)),
            }
        }
        Ok(())
    }
}

impl Came {
    /// Room for at least one record behind what is there, in a buffer of this size or a larger one.
    fn make_room(&mut self, size: Size, buffers: &Buffers) {
        let mut roomier = None;
        if self.buffer.is_empty() || (size == Size::Large && self.buffer.len() < Size::Large.bytes()) {
            roomier = Some(buffers.take(size));
        }
        let there = self.sealed.len();
        match roomier {
            Some(mut buffer) => {
                buffer[..there].copy_from_slice(&self.buffer[self.sealed.clone()]);
                buffers.give(std::mem::replace(&mut self.buffer, buffer));
            }
            None if self.buffer.len() - self.sealed.end < RECORD_BYTES_MAX - HEAD_BYTES || there == 0 => {
                self.buffer.copy_within(self.sealed.clone(), 0);
            }
            None => return,
        }
        self.sealed = 0..there;
    }
}

impl Source for TlsStream {
    /// A connection that ends within an operation was lost, whatever the peer said before.
    async fn fill(&mut self, have: &mut BytesMut, wanted: usize) -> Result<bool, Loss> {
        while have.len() < wanted {
            let missing = wanted - have.len();
            have.extend_from_slice(self.take(missing, missing).await?);
        }
        Ok(true)
    }

    async fn read_into(&mut self, to: &mut [u8], behind: usize) -> Result<bool, Loss> {
        let mut filled = 0;
        while filled < to.len() {
            let missing = to.len() - filled;
            let plain = self.take(missing, missing.saturating_add(behind)).await?;
            to[filled..filled + plain.len()].copy_from_slice(plain);
            filled += plain.len();
        }
        Ok(true)
    }
}

impl Stream for TlsStream {
    async fn write(&mut self, bytes: Bytes) -> Result<(), Loss> {
        self.waiting_bytes += bytes.len();
        self.waiting.push(bytes);
        while self.waiting_bytes >= BATCH_RECORDS * PLAIN_BYTES_MAX {
            let records = self.seal_batch()?;
            self.send(&records).await?;
        }
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), Loss> {
        while self.waiting_bytes > 0 {
            let records = self.seal_batch()?;
            self.send(&records).await?;
        }
        Ok(())
    }

    /// The connection goes on, so the end is always said.
    async fn end(&mut self, reason: Option<MissReason>) -> Result<(), Loss> {
        self.write(end_bytes(reason)).await?;
        self.flush().await
    }

    /// Within an operation a client says nothing more before its answer, or ends the connection.
    fn stopped(&self) -> impl Future<Output = ()> + Send + 'static {
        let socket = Arc::clone(&self.socket);
        async move {
            // No urgent data is ever sent: what this wakes for is the end of what the peer sends.
            let _ = socket.ready(Interest::PRIORITY).await;
        }
    }
}
