//! One connection as a stream of plain bytes, one operation after another.
//!
//! Read bytes are opened in place and copied once, into their item. Written bytes are buffered
//! until they are worth a system call. They are then sealed record by record, the only copy at this
//! end, and sent in one call per batch. A cancelled future may leave half an item behind, so its
//! caller must drop the stream too. `server.rs` and `pool.rs` order the operations; `crate::stream`
//! defines the bytes.

use std::io::{ErrorKind, IoSlice};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{Buf, Bytes, BytesMut};
use rustls::crypto::cipher::OutboundChunks;
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::buffers::{BufferPool, BufferSize};
use super::record::{HEAD_BYTES, OpenedRecord, Opener, PLAIN_BYTES_MAX, RECORD_BYTES_MAX, Sealer};
use super::socket::{io_stream_error, try_read};
use crate::MissReason;
use crate::stream::{Source, Stream, StreamError, end_bytes};

/// Error text for a connection that the peer closed.
pub const CLOSED: &str = "the peer closed the connection";

/// Records sealed and sent at once: as many plain bytes as fit a reader's buffer.
const BATCH_RECORDS: usize = 8;

/// State that a connection shares with the others of its server or path.
#[derive(Clone, Debug)]
pub(super) struct StreamShared {
    pub(super) buffers: Arc<BufferPool>,
    /// Counts reads that received data from the peer.
    pub(super) received: Arc<AtomicU64>,
    /// Smallest buffer for a read of unknown length.
    pub(super) min_size: BufferSize,
}

/// A TLS connection after its handshake. Dropping it sends no close alert.
pub struct TlsStream {
    socket: Arc<TcpStream>,
    sealer: Sealer,
    opener: Opener,
    input: InputBuffer,
    output: Vec<Bytes>,
    output_bytes: usize,
    plain_bytes: u64,
    shared: StreamShared,
}

/// Received bytes: one opened record, then the unopened rest.
struct InputBuffer {
    buffer: Vec<u8>,
    plain: Range<usize>,
    sealed: Range<usize>,
}

impl TlsStream {
    /// `came` are the bytes received after the handshake.
    pub(super) fn new(
        socket: TcpStream,
        sealer: Sealer,
        opener: Opener,
        came: &[u8],
        shared: StreamShared,
    ) -> TlsStream {
        let mut buffer = if came.is_empty() { Vec::new() } else { shared.buffers.take(BufferSize::Large) };
        let room = buffer.len().max(came.len());
        buffer.resize(room, 0);
        buffer[..came.len()].copy_from_slice(came);
        TlsStream {
            socket: Arc::new(socket),
            sealer,
            opener,
            input: InputBuffer { buffer, plain: 0..0, sealed: 0..came.len() },
            output: Vec::new(),
            output_bytes: 0,
            plain_bytes: 0,
            shared,
        }
    }

    /// Total plain bytes received. If an operation has added none, its peer has not answered.
    pub(super) fn plain_bytes(&self) -> u64 {
        self.plain_bytes
    }

    /// Waits for the peer to send something. `Ok(false)` if it closed the connection instead.
    pub(super) async fn wait_for_data(&mut self) -> Result<bool, StreamError> {
        self.ensure_plain(self.shared.min_size).await
    }

    /// Frees empty buffers. For use between operations.
    pub(super) fn release_buffers(&mut self) {
        if self.input.plain.is_empty() && self.input.sealed.is_empty() {
            self.shared.buffers.put_back(std::mem::take(&mut self.input.buffer));
            (self.input.plain, self.input.sealed) = (0..0, 0..0);
        }
    }

    /// Whether the next operation may use this connection: there are no unread or unsent bytes, the
    /// peer did not close it, and its keys are not nearly used up.
    pub(super) fn is_usable(&self) -> bool {
        let is_empty = self.input.plain.is_empty() && self.input.sealed.is_empty() && self.output.is_empty();
        let is_worn = self.sealer.is_worn() || self.opener.is_retired();
        let is_quiet = || try_read(&self.socket, &mut [0]).is_err_and(|e| e.kind() == ErrorKind::WouldBlock);
        is_empty && !is_worn && is_quiet()
    }

    #[cfg(test)]
    pub(super) fn wear_out(&mut self) {
        self.sealer.wear_out();
    }

    /// Sends the close alert if that is possible without waiting.
    pub(super) fn close(mut self) {
        if let Ok(goodbye) = self.sealer.seal_close() {
            let _ = self.socket.try_write(&goodbye);
        }
    }

    /// Resets the connection: the peer notices even if it does not read, and unfinished transfers
    /// are discarded.
    pub(super) fn abort(self) {
        let _ = self.socket.set_zero_linger(); // without it, the close comes after the sent bytes
    }

    /// Ensures that there are plain bytes. `Ok(false)` if the peer closed the connection.
    async fn ensure_plain(&mut self, size: BufferSize) -> Result<bool, StreamError> {
        loop {
            if !self.input.plain.is_empty() {
                return Ok(true);
            }
            let InputBuffer { buffer, plain, sealed } = &mut self.input;
            match self.opener.open(&mut buffer[sealed.clone()])? {
                OpenedRecord::Data { plain: of_record, record } => {
                    *plain = sealed.start + of_record.start..sealed.start + of_record.end;
                    sealed.start += record;
                    self.plain_bytes += plain.len() as u64;
                }
                OpenedRecord::Incomplete => {
                    if !self.read(size).await? {
                        return Ok(false);
                    }
                }
                OpenedRecord::Closed => return Ok(false),
            }
        }
    }

    /// Takes the next plain bytes: at least one, at most `at_most`. `expected` is the number of
    /// bytes still to come in all, which selects the buffer size.
    async fn take_plain(&mut self, at_most: usize, expected: usize) -> Result<&[u8], StreamError> {
        let size = if expected > PLAIN_BYTES_MAX { BufferSize::Large } else { BufferSize::Small };
        if !self.ensure_plain(size).await? {
            return Err(StreamError::Broken(CLOSED.to_owned()));
        }
        let InputBuffer { buffer, plain, .. } = &mut self.input;
        let taken = plain.start..plain.end.min(plain.start + at_most);
        plain.start = taken.end;
        Ok(&buffer[taken])
    }

    /// Reads more bytes behind the unopened ones.
    async fn read(&mut self, size: BufferSize) -> Result<bool, StreamError> {
        self.socket.readable().await.map_err(|error| io_stream_error(&error))?;
        loop {
            self.input.make_space(size.max(self.shared.min_size), &self.shared.buffers);
            let sealed = &mut self.input.sealed;
            match try_read(&self.socket, &mut self.input.buffer[sealed.end..]) {
                Ok(0) => return Ok(false),
                Ok(bytes) => {
                    sealed.end += bytes;
                    self.shared.received.fetch_add(1, Ordering::Relaxed);
                    return Ok(true);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.socket.readable().await.map_err(|error| io_stream_error(&error))?;
                }
                Err(error) => return Err(io_stream_error(&error)),
            }
        }
    }

    /// Seals the leading bytes of the output, at most one batch.
    fn seal_batch(&mut self) -> Result<Vec<Vec<u8>>, StreamError> {
        let mut records = Vec::with_capacity(BATCH_RECORDS);
        let slices: Vec<&[u8]> = self.output.iter().map(|bytes| &bytes[..]).collect();
        let mut rest = OutboundChunks::new(&slices);
        while !rest.is_empty() && records.len() < BATCH_RECORDS {
            let (record, behind) = rest.split_at(PLAIN_BYTES_MAX);
            records.push(self.sealer.seal(record)?);
            rest = behind;
        }
        let sealed = self.output_bytes - rest.len();
        self.drop_output(sealed);
        Ok(records)
    }

    fn drop_output(&mut self, mut bytes: usize) {
        self.output_bytes -= bytes;
        let whole = self.output.iter().take_while(|item| {
            let is_whole = item.len() <= bytes;
            bytes -= if is_whole { item.len() } else { 0 };
            is_whole
        });
        let whole = whole.count();
        self.output.drain(..whole);
        if let Some(item) = self.output.first_mut() {
            item.advance(bytes);
        }
    }

    async fn send(&self, records: &[Vec<u8>]) -> Result<(), StreamError> {
        let mut slices: Vec<IoSlice<'_>> = records.iter().map(|record| IoSlice::new(record)).collect();
        let mut left = &mut slices[..];
        while !left.is_empty() {
            match self.socket.try_write_vectored(left) {
                Ok(bytes) => IoSlice::advance_slices(&mut left, bytes),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.socket.writable().await.map_err(|error| io_stream_error(&error))?;
                }
                Err(error) => return Err(io_stream_error(&error)),
            }
        }
        Ok(())
    }
}

impl InputBuffer {
    /// Makes space for at least one record after the present bytes, in a buffer of at least this
    /// size.
    fn make_space(&mut self, size: BufferSize, buffers: &BufferPool) {
        let mut roomier = None;
        if self.buffer.is_empty()
            || (size == BufferSize::Large && self.buffer.len() < BufferSize::Large.bytes())
        {
            roomier = Some(buffers.take(size));
        }
        let there = self.sealed.len();
        match roomier {
            Some(mut buffer) => {
                buffer[..there].copy_from_slice(&self.buffer[self.sealed.clone()]);
                buffers.put_back(std::mem::replace(&mut self.buffer, buffer));
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
    /// A connection that ends within an operation counts as lost, even after a proper close.
    async fn fill(&mut self, have: &mut BytesMut, wanted: usize) -> Result<bool, StreamError> {
        while have.len() < wanted {
            let missing = wanted - have.len();
            have.extend_from_slice(self.take_plain(missing, missing).await?);
        }
        Ok(true)
    }

    async fn read_into(&mut self, to: &mut [u8], behind: usize) -> Result<bool, StreamError> {
        let mut filled = 0;
        while filled < to.len() {
            let missing = to.len() - filled;
            let plain = self.take_plain(missing, missing.saturating_add(behind)).await?;
            to[filled..filled + plain.len()].copy_from_slice(plain);
            filled += plain.len();
        }
        Ok(true)
    }
}

impl Stream for TlsStream {
    async fn write(&mut self, bytes: Bytes) -> Result<(), StreamError> {
        self.output_bytes += bytes.len();
        self.output.push(bytes);
        while self.output_bytes >= BATCH_RECORDS * PLAIN_BYTES_MAX {
            let records = self.seal_batch()?;
            self.send(&records).await?;
        }
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), StreamError> {
        while self.output_bytes > 0 {
            let records = self.seal_batch()?;
            self.send(&records).await?;
        }
        Ok(())
    }

    /// The connection goes on, so the end mark is always sent.
    async fn end(&mut self, reason: Option<MissReason>) -> Result<(), StreamError> {
        self.write(end_bytes(reason)).await?;
        self.flush().await
    }

    /// Within an operation a client sends no data before its answer; it can only close the
    /// connection.
    fn stopped(&self) -> impl Future<Output = ()> + Send + 'static {
        let socket = Arc::clone(&self.socket);
        async move {
            // No urgent data is ever sent, so this wakes only when the peer closes its side.
            let _ = socket.ready(Interest::PRIORITY).await;
        }
    }
}
