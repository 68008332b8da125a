//! The content of one stream, on any transport: length-delimited messages, then frames back to
//! back.
//!
//! Reads request exactly the missing bytes, so no read goes beyond an item, and each byte is copied
//! once, into its item. Writes pass on the frame's own memory. Not here: the meaning of messages
//! (`wire.rs`), and the transport of bytes (`quic/stream.rs`, `tcp/stream.rs`).

use bytes::{BufMut, Bytes, BytesMut};
use kv_core::id::HASH_BYTES;
use kv_core::id::TrafficClass;
use kvfleet_proto::frame::{BytesNeeded, Frame, FrameError, parse_header};
use prost::Message;

use crate::{MissReason, PathError};

/// Largest message in bytes: a request for 65,536 blocks, and its other fields.
pub(crate) const MESSAGE_BYTES_MAX: usize = 65_536 * HASH_BYTES + 4096;

/// Marks the early end of the frames, followed by the number of the reason (0: none). Shorter than
/// any frame header.
const END_MAGIC: [u8; 7] = *b"KVFEND\0";

/// Length of the end mark with its reason.
pub(crate) const END_BYTES: usize = END_MAGIC.len() + 1;

/// Length of the prefix before a message.
const LENGTH_BYTES: usize = 4;

/// A source of bytes.
pub trait Source: Send {
    /// Extends `have` to `wanted` bytes. `Ok(false)` if the peer ended its side before.
    fn fill(
        &mut self,
        have: &mut BytesMut,
        wanted: usize,
    ) -> impl Future<Output = Result<bool, StreamError>> + Send;

    /// Fills all of `to`. `behind` is the number of bytes known to follow. `Ok(false)` if the peer
    /// ended its side before.
    fn read_into(
        &mut self,
        to: &mut [u8],
        behind: usize,
    ) -> impl Future<Output = Result<bool, StreamError>> + Send;
}

/// The bytes of one operation, both ways. If dropped before the operation is complete, it tells the
/// peer to stop.
pub trait Stream: Source {
    /// Sends bytes without copying them in this process. They may be buffered until
    /// [`Stream::flush`].
    fn write(&mut self, bytes: Bytes) -> impl Future<Output = Result<(), StreamError>> + Send;

    /// Sends all buffered bytes.
    fn flush(&mut self) -> impl Future<Output = Result<(), StreamError>> + Send;

    /// Ends the frames, with the reason if known. Flushes.
    fn end(&mut self, reason: Option<MissReason>) -> impl Future<Output = Result<(), StreamError>> + Send;

    /// Sets the operation's priority class, for a stream that shares its connection.
    fn set_class(&mut self, _class: TrafficClass) {}

    /// Returns once the peer has cancelled this operation.
    fn stopped(&self) -> impl Future<Output = ()> + Send + 'static;
}

/// Why a stream has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The peer could not be reached.
    #[error("{0}")]
    Unreachable(String),
    /// A certificate was refused.
    #[error("{0}")]
    Untrusted(String),
    /// The connection failed.
    #[error("{0}")]
    Broken(String),
    /// The peer violated the protocol.
    #[error("{0}")]
    Protocol(String),
}

impl StreamError {
    /// The same for a path to `peer`.
    #[must_use]
    pub fn at(self, peer: &str) -> PathError {
        let peer = peer.to_owned();
        match self {
            StreamError::Unreachable(cause) => PathError::Unreachable { peer, cause },
            StreamError::Untrusted(cause) => PathError::Untrusted { peer, cause },
            StreamError::Broken(cause) => PathError::Broken { peer, cause },
            StreamError::Protocol(what) => PathError::Protocol { peer, what },
        }
    }
}

/// Why an item could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ItemError {
    /// The stream failed.
    #[error("connection or stream broke: {0}")]
    Lost(#[from] StreamError),
    /// The stream ended within an item.
    #[error("an end of stream in the middle of an item")]
    Truncated,
    /// An item is longer than its limit.
    #[error("{what} of {bytes} bytes, the limit is {limit}")]
    Oversized {
        /// The item.
        what: &'static str,
        /// Its length in bytes.
        bytes: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// A message cannot be decoded.
    #[error("a message that cannot be decoded: {0}")]
    Decode(#[from] prost::DecodeError),
    /// A frame is malformed.
    #[error("a bad frame: {0}")]
    Frame(#[from] FrameError),
    /// A slice is not the next one of its block.
    #[error("layer {layer} of block {position} of a fetch out of order")]
    Piece {
        /// Position of the block.
        position: usize,
        /// The slice's layer.
        layer: usize,
    },
}

impl ItemError {
    /// Whether the peer is gone, in contrast to a protocol violation.
    #[must_use]
    pub fn is_loss(&self) -> bool {
        matches!(self, ItemError::Lost(_) | ItemError::Truncated)
    }

    /// The same for a path to `peer`.
    #[must_use]
    pub fn at(self, peer: &str) -> PathError {
        match self {
            ItemError::Lost(loss) => loss.at(peer),
            other => PathError::Protocol { peer: peer.to_owned(), what: other.to_string() },
        }
    }
}

/// Reads one message.
///
/// # Errors
/// If the stream fails, or carries no valid message.
pub async fn read_message<M: Message + Default>(source: &mut impl Source) -> Result<M, ItemError> {
    let mut length = BytesMut::with_capacity(LENGTH_BYTES);
    if !source.fill(&mut length, LENGTH_BYTES).await? {
        return Err(ItemError::Truncated);
    }
    let bytes = u32::from_le_bytes([length[0], length[1], length[2], length[3]]) as usize;
    if bytes > MESSAGE_BYTES_MAX {
        return Err(ItemError::Oversized { what: "a message", bytes, limit: MESSAGE_BYTES_MAX });
    }
    let mut body = BytesMut::new(); // grows with the received bytes, not with the announced length
    if !source.fill(&mut body, bytes).await? {
        return Err(ItemError::Truncated);
    }
    Ok(M::decode(body.freeze())?)
}

/// The next item of a fetch or a save.
#[derive(Debug)]
pub enum NextItem {
    /// A frame.
    Frame(Frame),
    /// No more frames, perhaps with a reason.
    End(Option<MissReason>),
}

/// Reads one frame of at most `limit` bytes.
///
/// # Errors
/// If the stream fails, or carries no valid frame within the limit.
pub async fn read_frame(source: &mut impl Source, limit: usize) -> Result<NextItem, ItemError> {
    let mut have = BytesMut::new();
    if !source.fill(&mut have, END_BYTES).await? {
        return if have.is_empty() { Ok(NextItem::End(None)) } else { Err(ItemError::Truncated) };
    }
    if let Some(reason) = end_reason(&have) {
        return Ok(NextItem::End(reason));
    }
    loop {
        let (wanted, whole) = match parse_header(&have)? {
            BytesNeeded::Header(wanted) => (wanted, false),
            BytesNeeded::Frame(total) => (total, true),
        };
        if wanted > limit {
            return Err(ItemError::Oversized { what: "a frame", bytes: wanted, limit });
        }
        have.reserve(wanted - have.len());
        if !source.fill(&mut have, wanted).await? {
            return Err(ItemError::Truncated);
        }
        if whole {
            return Ok(NextItem::Frame(Frame::parse(have.freeze())?));
        }
    }
}

/// The reason in an end mark; the outer `None` means that this is not an end mark. A reason unknown
/// to this release counts as none.
fn end_reason(have: &[u8]) -> Option<Option<MissReason>> {
    match have.strip_prefix(&END_MAGIC) {
        Some(&[number]) => Some(MissReason::ALL.into_iter().find(|reason| *reason as u8 == number)),
        _ => None,
    }
}

/// An end mark, with the reason if known.
pub(crate) fn end_bytes(reason: Option<MissReason>) -> Bytes {
    let number = reason.map_or(0, |reason| reason as u8);
    Bytes::from([&END_MAGIC[..], &[number]].concat())
}

/// A message with its length prefix.
///
/// # Errors
/// When no peer would accept its length.
pub fn encode<M: Message>(message: &M) -> Result<Bytes, PathError> {
    let bytes = message.encoded_len();
    if bytes > MESSAGE_BYTES_MAX {
        return Err(PathError::TooLarge { bytes, limit: MESSAGE_BYTES_MAX });
    }
    let mut buffer = BytesMut::with_capacity(LENGTH_BYTES + bytes);
    buffer.put_u32_le(u32::try_from(bytes).expect("checked against MESSAGE_BYTES_MAX"));
    message.encode(&mut buffer).expect("the buffer grows");
    Ok(buffer.freeze())
}
