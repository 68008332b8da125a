//! The bytes of one QUIC stream, as the code above both network paths wants them.
//!
//! Writes hand the frame's own memory to quinn, which sends when it sees fit. Not here: what the bytes are
//! (`crate::stream`).

use bytes::{Bytes, BytesMut};
use quinn::{ReadError, RecvStream, SendStream, WriteError};

use super::{CODE_REFUSED, loss};
use crate::MissReason;
use crate::stream::{Loss, Source, Stream, end_bytes};

/// Both halves of one operation's stream.
pub(super) struct QuicStream {
    pub(super) send: SendStream,
    pub(super) recv: RecvStream,
}

impl QuicStream {
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
        self.recv.fill(have, wanted).await
    }

    async fn read_into(&mut self, to: &mut [u8], behind: usize) -> Result<bool, Loss> {
        self.recv.read_into(to, behind).await
    }
}

impl Stream for QuicStream {
    async fn write(&mut self, bytes: Bytes) -> Result<(), Loss> {
        self.send.write_chunk(bytes).await.map_err(|error| write_loss(&error))
    }

    async fn flush(&mut self) -> Result<(), Loss> {
        Ok(())
    }

    /// The end of the stream says it, without a reason.
    async fn end(&mut self, reason: Option<MissReason>) -> Result<(), Loss> {
        if reason.is_some() {
            self.write(end_bytes(reason)).await?;
        }
        self.finish();
        Ok(())
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
