//! A save at the client's end: writes frames into the node's bounce buffer, then tells the node
//! their lengths.
//!
//! The node says how many slots the bounce buffer has, and they are used in turn. A slot is used
//! again only after the node has taken its frame. Not here: the choice of the link (`path.rs`).

use std::collections::VecDeque;

use bytes::Bytes;
use kvfleet_proto::data;
use kvfleet_proto::frame::Frame;
use kvfleet_transport::upgrade::{
    CLOSED, ItemError, Stream, StreamError, encode, read_message, wire, within,
};
use kvfleet_transport::{PathError, SaveAnswer, SaveOffer, SaveRequest};
use prost::Message;

use super::link::RdmaLink;
use super::memory::ALIGN_BYTES;
use super::messages;
use super::transfers::{PendingTransfer, TransferError};

/// A save in progress.
pub(super) struct SaveOperation<'a> {
    pub(super) link: &'a mut RdmaLink,
    pub(super) peer: &'a str,
    pub(super) stall_timeout: std::time::Duration,
    /// Whether the node sent any message.
    pub(super) is_answered: bool,
}

/// Progress of a save through the slots.
struct SlotWindow {
    slots: u64,
    slot_bytes: u64,
    written: u64,
    taken: u64,
}

impl SlotWindow {
    fn fits(&self, frame: &Bytes) -> bool {
        self.slots > 0 && frame.len() as u64 <= self.slot_bytes
    }

    /// Slots that may be written before the node takes another frame.
    fn free(&self) -> u64 {
        self.slots - (self.written - self.taken)
    }
}

impl SaveOperation<'_> {
    /// Runs the save; when it returns `Ok`, none of its transfers is in flight.
    pub(super) async fn run(
        &mut self,
        request: &SaveRequest,
        source: &(dyn Fn(usize) -> Frame + Send + Sync),
    ) -> Result<SaveAnswer, PathError> {
        self.send_message(&wire::save_to_pb(request)).await?;
        self.flush().await?;
        let offer: data::SaveOffer = self.receive().await?;
        let offer = wire::offer_from_pb(&offer, request.hashes.len());
        let wanted = match offer.map_err(|error| self.malformed(&error))? {
            SaveOffer::Wanted(wanted) => wanted,
            SaveOffer::Busy { retry_after } => return Ok(SaveAnswer::Busy { retry_after }),
            SaveOffer::Refused(refusal) => return Ok(SaveAnswer::Refused(refusal)),
        };
        let slots: data::Slots = self.receive().await?;
        let mut window = self.parse_slots(&slots)?;
        let mut under_way = VecDeque::new();
        for (position, _) in wanted.iter().enumerate().filter(|(_, wanted)| **wanted) {
            let frame = source(position).bytes;
            if !window.fits(&frame) || frame.len() as u64 > self.link.split().2.local.frame_bytes_max().into()
            {
                self.finish_writes(&mut under_way).await?;
                self.send_frame(frame).await?;
                continue;
            }
            // Half of the slots are written while the node takes the frames in the other half.
            if under_way.len() as u64 >= window.slots.div_ceil(2) || window.free() == 0 {
                self.finish_writes(&mut under_way).await?;
            }
            while window.free() == 0 {
                let data::WriteAck {} = self.receive().await?;
                window.taken += 1;
            }
            self.write(&frame, &mut window, &mut under_way).await?;
        }
        self.finish_writes(&mut under_way).await?;
        while window.taken < window.written {
            let data::WriteAck {} = self.receive().await?;
            window.taken += 1;
        }
        let done: data::SaveDone = self.receive().await?;
        Ok(wire::done_from_pb(&done))
    }

    /// Aborts the save and waits until the node has ended it too. From then on, stored blocks are
    /// present and the others are wanted again. Returns whether that was confirmed.
    pub(super) async fn abort(&mut self) -> bool {
        let control = &mut self.link.control;
        let ended = async {
            // The node expects a message, so the end of the stream makes it end the save and then
            // the connection.
            let is_said = control.end(None).await.is_ok();
            loop {
                match read_message::<data::WriteAck>(control).await {
                    Ok(_) if is_said => {}
                    Ok(_) => return false,
                    Err(error) => return is_said && is_closed_by_node(&error),
                }
            }
        };
        tokio::time::timeout(self.stall_timeout, ended).await.unwrap_or(false)
    }

    fn parse_slots(&mut self, slots: &data::Slots) -> Result<SlotWindow, PathError> {
        let (count, slot_bytes) = (u64::from(slots.slots), u64::from(slots.slot_bytes));
        let tray = self.link.split().2.bounce_window.bytes;
        if count * slot_bytes > tray || !slot_bytes.is_multiple_of(ALIGN_BYTES) {
            return Err(self.malformed(&"slots that are not in the tray"));
        }
        Ok(SlotWindow { slots: count, slot_bytes, written: 0, taken: 0 })
    }

    /// Starts to write one frame.
    async fn write(
        &mut self,
        frame: &Bytes,
        window: &mut SlotWindow,
        under_way: &mut VecDeque<(PendingTransfer, u32)>,
    ) -> Result<(), PathError> {
        let len = u32::try_from(frame.len()).unwrap_or(u32::MAX); // checked against the largest frame
        let passing = std::sync::Arc::clone(&self.link.split().2.local.transient);
        let place = match passing.take(len) {
            Some(place) => Some(place),
            None => {
                // A caller that waits for a buffer must hold none; otherwise two could wait for
                // each other.
                self.finish_writes(under_way).await?;
                let waited = passing.wait(len);
                self.within_stall_timeout(async { Ok(waited.await) }).await?
            }
        };
        let mut place = place.ok_or_else(|| self.malformed(&"a slot that is too large"))?;
        place.write(frame);
        let at = (window.written % window.slots) * window.slot_bytes;
        let (peer, stall) = (self.peer, self.stall_timeout);
        let (_, _, reach) = self.link.split();
        let begun = async { reach.write(at, place).await.map_err(|error| transfer_error(peer, &error)) };
        let arriving = within(peer, stall, begun).await?;
        under_way.push_back((arriving, len));
        window.written += 1;
        Ok(())
    }

    /// Waits for the writes in flight, and tells the node.
    async fn finish_writes(
        &mut self,
        under_way: &mut VecDeque<(PendingTransfer, u32)>,
    ) -> Result<(), PathError> {
        if under_way.is_empty() {
            return Ok(());
        }
        let (peer, stall) = (self.peer, self.stall_timeout);
        let mut lens = Vec::with_capacity(under_way.len());
        for (arriving, len) in under_way.drain(..) {
            let ended = async { arriving.wait().await.map_err(|error| transfer_error(peer, &error)) };
            drop(within(peer, stall, ended).await?);
            lens.push(len);
        }
        let (_, _, reach) = self.link.split();
        let board = async { reach.read_epoch_word().await.map_err(|error| transfer_error(peer, &error)) };
        if within(peer, stall, board).await? == messages::REVOKED {
            return Err(transfer_error(peer, &TransferError::Broken));
        }
        for bytes in lens {
            self.send_message(&data::WriteDone { bytes, is_frame: false }).await?;
        }
        self.flush().await
    }

    /// Sends one frame over the connection.
    async fn send_frame(&mut self, frame: Bytes) -> Result<(), PathError> {
        self.send_message(&data::WriteDone { bytes: 0, is_frame: true }).await?;
        let (peer, stall) = (self.peer, self.stall_timeout);
        let sent = async { self.link.control.write(frame).await.map_err(|loss| loss.at(peer)) };
        within(peer, stall, sent).await?;
        self.flush().await
    }

    async fn send_message<M: Message>(&mut self, message: &M) -> Result<(), PathError> {
        let (peer, stall) = (self.peer, self.stall_timeout);
        let bytes = encode(message)?;
        let said = async { self.link.control.write(bytes).await.map_err(|loss: StreamError| loss.at(peer)) };
        within(peer, stall, said).await
    }

    async fn flush(&mut self) -> Result<(), PathError> {
        let (peer, stall) = (self.peer, self.stall_timeout);
        let flushed = async { self.link.control.flush().await.map_err(|loss| loss.at(peer)) };
        within(peer, stall, flushed).await
    }

    async fn receive<M: Message + Default>(&mut self) -> Result<M, PathError> {
        let (peer, stall) = (self.peer, self.stall_timeout);
        let heard = async { read_message(&mut self.link.control).await.map_err(|error| error.at(peer)) };
        let heard = within(peer, stall, heard).await?;
        self.is_answered = true;
        Ok(heard)
    }

    async fn within_stall_timeout<T>(
        &self,
        work: impl Future<Output = Result<T, PathError>>,
    ) -> Result<T, PathError> {
        within(self.peer, self.stall_timeout, work).await
    }

    fn malformed(&self, what: &dyn std::fmt::Display) -> PathError {
        let what = format!("a malformed message: {what}");
        PathError::Protocol { peer: self.peer.to_owned(), what }
    }
}

/// Whether the node closed the connection. Other errors do not show whether the node is still busy
/// with the save.
fn is_closed_by_node(error: &ItemError) -> bool {
    let reset = std::io::Error::from_raw_os_error(libc::ECONNRESET).to_string();
    match error {
        ItemError::Truncated => true,
        // The node closed before it had read everything, or without a TLS close notification.
        ItemError::Lost(StreamError::Broken(cause)) => *cause == reset || cause == CLOSED,
        _ => false,
    }
}

/// The path error for a failed transfer.
fn transfer_error(peer: &str, error: &TransferError) -> PathError {
    PathError::Broken { peer: peer.to_owned(), cause: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_connection_closed_by_the_node_confirms_the_abort() {
        let system = |errno| StreamError::Broken(std::io::Error::from_raw_os_error(errno).to_string());
        assert!(
            is_closed_by_node(&ItemError::Truncated) && is_closed_by_node(&system(libc::ECONNRESET).into())
        );
        assert!(is_closed_by_node(&StreamError::Broken(CLOSED.to_owned()).into()));
        for other in
            [system(libc::ETIMEDOUT), system(libc::EHOSTUNREACH), StreamError::Protocol("odd".to_owned())]
        {
            assert!(!is_closed_by_node(&other.clone().into()), "{other}");
        }
        assert!(!is_closed_by_node(&ItemError::Oversized { what: "a message", bytes: 2, limit: 1 }));
    }
}
