//! What goes over one stream, whatever carries it: length-delimited messages, then frames back to back.
//!
//! Reads ask for exactly what is still missing, so nothing is ever read beyond an item and each byte is
//! copied once, into the item it belongs to. Writes hand over the frame's own memory.
//! Not here: what a message means (`wire.rs`), and what moves the bytes (`quic/stream.rs`, `tcp/stream.rs`).

use bytes::{BufMut, Bytes, BytesMut};
use kv_core::id::Class;
use kvfleet_proto::frame::{Frame, FrameError, Need, parse_header};
use prost::Message;

use crate::{MissReason, PathError};

/// Largest message in bytes: a request over 65,536 blocks, 16 bytes each, and its other fields.
pub(crate) const MESSAGE_BYTES_MAX: usize = 65_536 * 16 + 4096;

/// What stands in place of a frame where no more come, before the number of the reason (0: none): shorter than any
/// frame's head.
const END_MAGIC: [u8; 7] = *b"KVFEND\0";

/// Bytes of the end with its reason.
pub(crate) const END_BYTES: usize = END_MAGIC.len() + 1;

/// Bytes of the length before a message.
const LENGTH_BYTES: usize = 4;

/// Where bytes come from.
pub(crate) trait Source: Send {
    /// Extends `have` to `wanted` bytes. `Ok(false)` when the peer ended its side before.
    fn fill(&mut self, have: &mut BytesMut, wanted: usize)
    -> impl Future<Output = Result<bool, Loss>> + Send;

    /// Fills all of `to`. `behind` is how much more is known to follow, in bytes. `Ok(false)` when the peer ended its side
    /// before.
    fn read_into(&mut self, to: &mut [u8], behind: usize) -> impl Future<Output = Result<bool, Loss>> + Send;
}

/// The bytes of one operation, both ways. Dropped before the operation is over, it tells the peer to stop.
pub(crate) trait Stream: Source {
    /// Sends bytes without copying them on our side. They may wait for more until [`Stream::flush`].
    fn write(&mut self, bytes: Bytes) -> impl Future<Output = Result<(), Loss>> + Send;

    /// Lets nothing wait that was written.
    fn flush(&mut self) -> impl Future<Output = Result<(), Loss>> + Send;

    /// Says that no more frames come, and why if that is known. Flushes.
    fn end(&mut self, reason: Option<MissReason>) -> impl Future<Output = Result<(), Loss>> + Send;

    /// Says what the operation is for, to a stream that shares its way with others.
    fn rank(&mut self, _class: Class) {}

    /// Returns once the peer wants nothing more of this operation.
    fn stopped(&self) -> impl Future<Output = ()> + Send + 'static;
}

/// Why a stream moves no more bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Loss {
    #[error("{0}")]
    Unreachable(String),
    #[error("{0}")]
    Untrusted(String),
    #[error("{0}")]
    Broken(String),
    #[error("{0}")]
    Protocol(String),
}

impl Loss {
    pub(crate) fn at(self, peer: &str) -> PathError {
        let peer = peer.to_owned();
        match self {
            Loss::Unreachable(cause) => PathError::Unreachable { peer, cause },
            Loss::Untrusted(cause) => PathError::Untrusted { peer, cause },
            Loss::Broken(cause) => PathError::Broken { peer, cause },
            Loss::Protocol(what) => PathError::Protocol { peer, what },
        }
    }
}

/// Why an item could not be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ItemError {
    #[error("connection or stream broke: {0}")]
    Lost(#[from] Loss),
    #[error("an end of stream in the middle of an item")]
    Cut,
    #[error("{what} of {bytes} bytes, the limit is {limit}")]
    Oversized { what: &'static str, bytes: usize, limit: usize },
    #[error("a message that cannot be decoded: {0}")]
    Decode(#[from] prost::DecodeError),
    #[error("a bad frame: {0}")]
    Frame(#[from] FrameError),
    #[error("layer {layer} of block {position} of a fetch, whose turn it is not")]
    Piece { position: usize, layer: usize },
}

impl ItemError {
    /// Whether the peer is gone, in contrast to talking nonsense.
    pub(crate) fn is_loss(&self) -> bool {
        matches!(self, ItemError::Lost(_) | ItemError::Cut)
    }

    pub(crate) fn at(self, peer: &str) -> PathError {
        match self {
            ItemError::Lost(loss) => loss.at(peer),
            other => PathError::Protocol { peer: peer.to_owned(), what: other.to_string() },
        }
    }
}

/// Reads one message.
pub(crate) async fn read_message<M: Message + Default>(source: &mut impl Source) -> Result<M, ItemError> {
    let mut length = BytesMut::with_capacity(LENGTH_BYTES);
    if !source.fill(&mut length, LENGTH_BYTES).await? {
        return Err(ItemError::Cut);
    }
    let bytes = u32::from_le_bytes([length[0], length[1], length[2], length[3]]) as usize;
    if bytes > MESSAGE_BYTES_MAX {
        return Err(ItemError::Oversized { what: "a message", bytes, limit: MESSAGE_BYTES_MAX });
    }
    let mut body = BytesMut::new(); // grows with what arrives, not with what was announced
    if !source.fill(&mut body, bytes).await? {
        return Err(ItemError::Cut);
    }
    Ok(M::decode(body.freeze())?)
}

/// What comes next of a fetch or a save.
#[derive(Debug)]
pub(crate) enum Next {
    Frame(Frame),
    /// No more frames, perhaps with a word why.
    End(Option<MissReason>),
}

/// Reads one frame of at most `limit` bytes.
pub(crate) async fn read_frame(source: &mut impl Source, limit: usize) -> Result<Next, ItemError> {
    let mut have = BytesMut::new();
    if !source.fill(&mut have, END_BYTES).await? {
        return if have.is_empty() { Ok(Next::End(None)) } else { Err(ItemError::Cut) };
    }
    if let Some(reason) = end_reason(&have) {
        return Ok(Next::End(reason));
    }
    loop {
        let (wanted, whole) = match parse_header(&have)? {
            Need::Header(wanted) => (wanted, false),
            Need::Frame(total) => (total, true),
        };
        if wanted > limit {
            return Err(ItemError::Oversized { what: "a frame", bytes: wanted, limit });
        }
        have.reserve(wanted - have.len());
        if !source.fill(&mut have, wanted).await? {
            return Err(ItemError::Cut);
        }
        if whole {
            return Ok(Next::Frame(Frame::parse(have.freeze())?));
        }
    }
}

/// What stands behind the last frame, where it does. A reason that only a later release knows is none.
fn end_reason(have: &[u8]) -> Option<Option<MissReason>> {
    match have.strip_prefix(&END_MAGIC) {
        Some(&[number]) => Some(MissReason::ALL.into_iter().find(|reason| *reason as u8 == number)),
        _ => None,
    }
}

/// The end of the frames, with why if that is known.
pub(crate) fn end_bytes(reason: Option<MissReason>) -> Bytes {
    let number = reason.map_or(0, |reason| reason as u8);
    Bytes::from([&END_MAGIC[..], &[number]].concat())
}

/// A message with its length in front; an error when no peer would take it.
pub(crate) fn encode<M: Message>(message: &M) -> Result<Bytes, PathError> {
    let bytes = message.encoded_len();
    if bytes > MESSAGE_BYTES_MAX {
        return Err(PathError::TooLarge { bytes, limit: MESSAGE_BYTES_MAX });
    }
    let mut buffer = BytesMut::with_capacity(LENGTH_BYTES + bytes);
    buffer.put_u32_le(u32::try_from(bytes).expect("checked against MESSAGE_BYTES_MAX"));
    message.encode(&mut buffer).expect("the buffer grows");
    Ok(buffer.freeze())
}
