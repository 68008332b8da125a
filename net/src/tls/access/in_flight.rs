//! Bytes of messages in flight of each caller: counted when the head of a message announces its
//! length, before memory is reserved for it, until the call ends or its next message begins.
//!
//! A caller that sends many large or half messages at once is refused, and others are served. Not
//! here: the longest message of a call (its server's limit), and how long one may take
//! (`Deadline`).

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::Buf;
use http_body::{Body, Frame, SizeHint};
use tonic::Status;
use tonic::codegen::StdError;

use super::super::RoleKind;
use super::super::callers::{Caller, CallerShare};

/// Bytes of messages that one caller may have in flight at a service. Routers have no limit: they
/// replicate to one another whatever callers may write.
pub const BYTES_IN_FLIGHT_MAX: usize = 64 << 20;

/// Bytes before each message of gRPC: a flag, and the length in network order.
const HEAD_BYTES: usize = 5;

/// Bytes in flight at a service, by caller. Callers without any are absent.
#[derive(Debug, Default)]
pub(super) struct BytesInFlight {
    by_caller: Mutex<HashMap<CallerShare, usize>>,
}

impl BytesInFlight {
    /// Changes the bytes of a caller from `before` to `after`.
    fn change(&self, caller: CallerShare, before: usize, after: usize) -> Result<(), Status> {
        let mut by_caller = self.by_caller.lock().unwrap_or_else(PoisonError::into_inner);
        let others = by_caller.get(&caller).map_or(0, |bytes| bytes.saturating_sub(before));
        let total = others.saturating_add(after);
        let is_refused = after > before && total > BYTES_IN_FLIGHT_MAX;
        let left = if is_refused { others + before } else { total };
        match left {
            0 => by_caller.remove(&caller),
            left => by_caller.insert(caller, left),
        };
        if is_refused {
            let text = format!(
                "this message has {after} bytes, and other messages in flight of this caller have {others}: together \
                 they may have {BYTES_IN_FLIGHT_MAX}. Wait for answers, or send less at once"
            );
            return Err(Status::resource_exhausted(text));
        }
        Ok(())
    }
}

/// The bytes in flight of one call. Dropping the last copy ends them.
#[derive(Debug)]
pub(super) struct CallBytes {
    service: Arc<BytesInFlight>,
    caller: CallerShare,
    /// Length of the current message.
    bytes: Mutex<usize>,
}

impl CallBytes {
    /// No bytes yet. `None` for a caller without a limit.
    pub(super) fn new(service: &Arc<BytesInFlight>, caller: &Caller) -> Option<Arc<CallBytes>> {
        if caller.role().kind() == RoleKind::Router {
            return None;
        }
        let (service, caller) = (Arc::clone(service), caller.share());
        Some(Arc::new(CallBytes { service, caller, bytes: Mutex::new(0) }))
    }

    /// A message of this length follows the one before.
    fn begin(&self, length: usize) -> Result<(), Status> {
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        self.service.change(self.caller, *bytes, length)?;
        *bytes = length;
        Ok(())
    }
}

impl Drop for CallBytes {
    fn drop(&mut self) {
        let bytes = *self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        // Fewer bytes are never refused.
        let _ = self.service.change(self.caller, bytes, 0);
    }
}

/// Position in a stream of messages.
#[derive(Debug, Default)]
struct MessageReader {
    head: [u8; HEAD_BYTES],
    head_bytes: usize,
    /// Bytes of the current message that are still to come.
    left: usize,
}

impl MessageReader {
    /// Reads on, and calls `begin` with the length of each message that begins.
    fn read(
        &mut self,
        mut bytes: &[u8],
        mut begin: impl FnMut(usize) -> Result<(), Status>,
    ) -> Result<(), Status> {
        while !bytes.is_empty() {
            if self.left > 0 {
                let read = self.left.min(bytes.len());
                self.left -= read;
                bytes = &bytes[read..];
                continue;
            }
            self.head[self.head_bytes] = bytes[0];
            self.head_bytes += 1;
            bytes = &bytes[1..];
            if self.head_bytes == HEAD_BYTES {
                let [_, length @ ..] = self.head;
                self.left = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
                self.head_bytes = 0;
                begin(self.left)?;
            }
        }
        Ok(())
    }
}

/// The body of a call, whose messages are counted.
#[derive(Debug)]
pub struct CountedBody<B> {
    inner: B,
    reader: MessageReader,
    /// `None` for a caller without a limit.
    call: Option<Arc<CallBytes>>,
}

impl<B> CountedBody<B> {
    pub(super) fn new(inner: B, call: Option<Arc<CallBytes>>) -> CountedBody<B> {
        CountedBody { inner, reader: MessageReader::default(), call }
    }
}

impl<B> Body for CountedBody<B>
where
    B: Body + Unpin,
    B::Error: Into<StdError>,
{
    type Data = B::Data;
    type Error = StdError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, StdError>>> {
        let body = &mut *self;
        let frame = match ready!(Pin::new(&mut body.inner).poll_frame(context)) {
            Some(Ok(frame)) => frame,
            Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
            None => return Poll::Ready(None),
        };
        if let (Some(call), Some(data)) = (&body.call, frame.data_ref()) {
            // The transport's frames are one piece.
            body.reader.read(data.chunk(), |length| call.begin(length))?;
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kv_core::id::TenantId;
    use kvfleet_errors_doc::says;

    use super::super::super::Role;
    use super::*;

    fn message(length: usize) -> Vec<u8> {
        let head = u32::try_from(length).unwrap().to_be_bytes();
        [&[0][..], &head, &vec![7; length]].concat()
    }

    #[test]
    fn finds_each_message_across_any_split() {
        let bytes = [message(0), message(3), message(300), message(1)].concat();
        for size in [1, 2, 5, 7, bytes.len()] {
            let (mut reader, mut lengths) = (MessageReader::default(), Vec::new());
            for piece in bytes.chunks(size) {
                let begin = |length| {
                    lengths.push(length);
                    Ok(())
                };
                reader.read(piece, begin).unwrap();
            }
            assert_eq!(lengths, [0, 3, 300, 1], "in pieces of {size}");
        }
    }

    #[test]
    fn one_caller_cannot_hold_the_bytes_of_another() {
        let service = Arc::<BytesInFlight>::default();
        let call = |role: &Role| CallBytes::new(&service, &Caller::new(role.clone())).unwrap();
        let (one, other) = (Role::tenant(TenantId(1)), Role::tenant(TenantId(2)));
        let held: Vec<_> = (0..8)
            .map(|_| {
                let half = call(&one);
                half.begin(8 << 20).unwrap();
                half
            })
            .collect();
        let more = call(&one);
        says("too many bytes in flight of a caller", &more.begin(1).unwrap_err().message(), &[]);
        call(&other).begin(8 << 20).unwrap();
        // The next message of a stream replaces the one before.
        held[0].begin(1 << 20).unwrap();
        more.begin(7 << 20).unwrap();
        assert!(more.begin(8 << 20).is_err() && more.begin(7 << 20).is_ok(), "a refusal changes no count");
        drop((held, more));
        assert!(service.by_caller.lock().unwrap().is_empty());
        assert!(CallBytes::new(&service, &Caller::new(Role::Router(None))).is_none());
    }
}
