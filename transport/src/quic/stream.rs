//! Bytes of one QUIC stream: length-delimited messages, then frames back to back.
//!
//! Reads ask for exactly what is still missing, so nothing is ever read beyond an item and each byte is
//! copied once, into the item it belongs to. Writes hand the frame's own memory to quinn.
//! Not here: what a message means (`wire.rs`).

use bytes::{BufMut, Bytes, BytesMut};
use kvfleet_proto::frame::{Frame, FrameError, Need, parse_header};
use prost::Message;
use quinn::{ReadError, RecvStream, SendStream, WriteError};

use super::path_error;
use crate::{MissReason, PathError};

/// Largest message in bytes: a request over 65,536 blocks, 16 bytes each, and its other fields.
pub(crate) const MESSAGE_BYTES_MAX: usize = 65_536 * 16 + 4096;

/// What stands in place of a frame where no more come, before the number of the reason: shorter than any frame's head.
const END_MAGIC: [u8; 7] = *b"KVFEND\0";

/// Bytes of the length before a message.
const LENGTH_BYTES: usize = 4;

/// Why an item could not be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum ItemError {
    #[error("connection or stream broke: {0}")]
    Read(#[from] ReadError),
    #[error("an end of stream in the middle of an item")]
    Cut,
    #[error("{what} of {bytes} bytes, the limit is {limit}")]
    Oversized { what: &'static str, bytes: usize, limit: usize },
    #[error("a message that cannot be decoded: {0}")]
    Decode(#[from] prost::DecodeError),
    #[error("a bad frame: {0}")]
    Frame(#[from] FrameError),
}

impl ItemError {
    /// Whether the peer is gone, in contrast to talking nonsense.
    pub(super) fn is_loss(&self) -> bool {
        matches!(self, ItemError::Read(_) | ItemError::Cut)
    }

    pub(super) fn at(&self, peer: &str) -> PathError {
        match self {
            ItemError::Read(ReadError::ConnectionLost(error)) => path_error(peer, error),
            ItemError::Read(ReadError::Reset(code)) => {
                PathError::Protocol { peer: peer.to_owned(), what: format!("a refusal (code {code})") }
            }
            ItemError::Read(error) => PathError::Broken { peer: peer.to_owned(), cause: error.to_string() },
            other => PathError::Protocol { peer: peer.to_owned(), what: other.to_string() },
        }
    }
}

/// Extends `have` to `wanted` bytes. `Ok(false)` when the stream ended before.
async fn fill(recv: &mut RecvStream, have: &mut BytesMut, wanted: usize) -> Result<bool, ReadError> {
    while have.len() < wanted {
        match recv.read_chunk(wanted - have.len(), true).await? {
            Some(chunk) => have.extend_from_slice(&chunk.bytes),
            None => return Ok(false),
        }
    }
    Ok(true)
}

/// Reads one message.
pub(super) async fn read_message<M: Message + Default>(recv: &mut RecvStream) -> Result<M, ItemError> {
    let mut length = BytesMut::with_capacity(LENGTH_BYTES);
    if !fill(recv, &mut length, LENGTH_BYTES).await? {
        return Err(ItemError::Cut);
    }
    let bytes = u32::from_le_bytes([length[0], length[1], length[2], length[3]]) as usize;
    if bytes > MESSAGE_BYTES_MAX {
        return Err(ItemError::Oversized { what: "a message", bytes, limit: MESSAGE_BYTES_MAX });
    }
    let mut body = BytesMut::new(); // grows with what arrives, not with what was announced
    if !fill(recv, &mut body, bytes).await? {
        return Err(ItemError::Cut);
    }
    Ok(M::decode(body.freeze())?)
}

/// What comes next of a fetch.
#[derive(Debug)]
pub(super) enum Next {
    Frame(Frame),
    /// The stream ended cleanly, perhaps with a word why.
    End(Option<MissReason>),
}

/// Reads one frame of at most `limit` bytes.
pub(super) async fn read_frame(recv: &mut RecvStream, limit: usize) -> Result<Next, ItemError> {
    let mut have = BytesMut::new();
    loop {
        let (wanted, whole) = match parse_header(&have)? {
            Need::Header(wanted) => (wanted, false),
            Need::Frame(total) => (total, true),
        };
        if wanted > limit {
            return Err(ItemError::Oversized { what: "a frame", bytes: wanted, limit });
        }
        have.reserve(wanted - have.len());
        if !fill(recv, &mut have, wanted).await? {
            return if have.is_empty() { Ok(Next::End(None)) } else { end(&have) };
        }
        if whole {
            return Ok(Next::Frame(Frame::parse(have.freeze())?));
        }
    }
}

/// What stands behind the last frame. A reason that only a later release knows is none.
fn end(have: &[u8]) -> Result<Next, ItemError> {
    match have.strip_prefix(&END_MAGIC) {
        Some(&[number]) => Ok(Next::End(MissReason::ALL.into_iter().find(|reason| *reason as u8 == number))),
        _ => Err(ItemError::Cut),
    }
}

/// Says why no more frames come.
pub(super) async fn write_end(send: &mut SendStream, reason: MissReason) -> Result<(), WriteError> {
    let end = [&END_MAGIC[..], &[reason as u8]].concat();
    send.write_chunk(Bytes::from(end)).await
}

/// A message with its length in front; an error when no peer would take it.
pub(super) fn encode<M: Message>(message: &M) -> Result<Bytes, PathError> {
    let bytes = message.encoded_len();
    if bytes > MESSAGE_BYTES_MAX {
        return Err(PathError::TooLarge { bytes, limit: MESSAGE_BYTES_MAX });
    }
    let mut buffer = BytesMut::with_capacity(LENGTH_BYTES + bytes);
    buffer.put_u32_le(u32::try_from(bytes).expect("checked against MESSAGE_BYTES_MAX"));
    message.encode(&mut buffer).expect("the buffer grows");
    Ok(buffer.freeze())
}

/// Writes one encoded message.
pub(super) async fn write_message(send: &mut SendStream, message: Bytes) -> Result<(), WriteError> {
    send.write_chunk(message).await
}

/// Writes one frame without copying it.
pub(super) async fn write_frame(send: &mut SendStream, frame: &Frame) -> Result<(), WriteError> {
    send.write_chunk(frame.bytes.clone()).await
}

/// A write error as an error of a path.
pub(super) fn write_error(peer: &str, error: &WriteError) -> PathError {
    match error {
        WriteError::ConnectionLost(error) => path_error(peer, error),
        WriteError::Stopped(code) => {
            PathError::Protocol { peer: peer.to_owned(), what: format!("a stop (code {code})") }
        }
        other => PathError::Broken { peer: peer.to_owned(), cause: other.to_string() },
    }
}
