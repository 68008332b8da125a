//! A save at the node's end: the client writes frames into slots of its bounce buffer, and each is
//! copied and checked from there.
//!
//! The client can write its bounce buffer at any time, so only the checked copy counts. Not here:
//! that copy (the service), and fetches (`fetch_server.rs`).

use std::sync::Arc;

use kvfleet_proto::data;
use kvfleet_proto::frame::FRAME_BYTES_MAX;
use kvfleet_transport::upgrade::{
    ItemError, NextItem, Operations, RETRY_AFTER, ServeError, Stream, read_frame, read_message, wire,
};
use kvfleet_transport::{BlockService, SaveOffer, SaveRequest, SaveSession};

use super::memory::{ALIGN_BYTES, RdmaBounceFrame};
use super::server::ServerLink;

/// The slots of one save.
struct SaveSlots {
    count: u64,
    slot_bytes: u64,
    used: u64,
}

impl ServerLink {
    pub(super) async fn save(
        &mut self,
        request: SaveRequest,
        service: &dyn BlockService,
        operations: &Operations,
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        let frame_bytes = request.frame_bytes;
        let Some(mut room) = operations.reserve_save(&request) else {
            let busy = SaveOffer::Busy { retry_after: RETRY_AFTER };
            return operations.answer(stream, &wire::offer_to_pb(&busy)).await;
        };
        let limit = usize::try_from(frame_bytes).unwrap_or(usize::MAX).min(FRAME_BYTES_MAX);
        let (offer, session) = service.save(request).await;
        operations.answer(stream, &wire::offer_to_pb(&offer)).await?;
        let SaveOffer::Wanted(wanted) = offer else { return Ok(()) };
        let session = session.ok_or(ServeError::MissingSession)?;
        let wanted = wanted.iter().filter(|wanted| **wanted).count();
        room.shrink(wanted, frame_bytes);
        let slots = self.slots(wanted as u64, limit as u64);
        let said = data::Slots {
            slots: u32::try_from(slots.count).unwrap_or(u32::MAX),
            slot_bytes: u32::try_from(slots.slot_bytes).unwrap_or(u32::MAX),
        };
        operations.answer(stream, &said).await?;
        let stopped = stream.stopped();
        let session = tokio::select! {
            session = self.receive_frames(stream, session, wanted, limit, slots, operations) => session?,
            () = stopped => return Err(ServeError::GaveUp),
        };
        let done = session.finish().await;
        operations.answer(stream, &wire::done_to_pb(&done)).await
    }

    /// As many slots of the largest frame as fit into the bounce buffer, at most one for each
    /// frame.
    fn slots(&self, wanted: u64, frame_bytes: u64) -> SaveSlots {
        let slot_bytes = frame_bytes.max(1).next_multiple_of(ALIGN_BYTES);
        SaveSlots { count: (self.bounce.bytes / slot_bytes).min(wanted), slot_bytes, used: 0 }
    }

    /// Receives the frames of a save. If dropped midway, it drops the session, which releases the
    /// space of missing frames.
    async fn receive_frames(
        &self,
        stream: &mut impl Stream,
        mut session: Box<dyn SaveSession>,
        wanted: usize,
        limit: usize,
        mut slots: SaveSlots,
        operations: &Operations,
    ) -> Result<Box<dyn SaveSession>, ServeError> {
        for got in 0..wanted {
            let written: data::WriteDone = operations.with_stall_timeout(read_message(stream)).await??;
            if written.is_frame {
                match operations.with_stall_timeout(read_frame(stream, limit)).await?? {
                    NextItem::Frame(frame) => {
                        operations.traffic.received(frame.bytes.len());
                        session.put(frame).await;
                    }
                    NextItem::End(_) => return Err(ServeError::SaveTruncated { got, wanted }),
                }
                continue;
            }
            if slots.count == 0 || written.bytes as usize > limit {
                let bytes = written.bytes as usize;
                return Err(ItemError::Oversized { what: "a frame in a slot", bytes, limit }.into());
            }
            let at = (slots.used % slots.count) * slots.slot_bytes;
            let frame = RdmaBounceFrame { memory: Arc::clone(&self.bounce.memory), at, len: written.bytes };
            self.carried().received(written.bytes as usize);
            session.put_volatile(Arc::new(frame)).await;
            slots.used += 1;
            operations.answer(stream, &data::WriteAck {}).await?;
        }
        Ok(session)
    }
}
