//! A save at the client's end: frames are written into the node's tray, then the node is told how long they are.
//!
//! The tray has as many slots as the node says, which are used one after the other; before one is used again the node said
//! that it took what was there. Not here: which link (`path.rs`).

use std::collections::VecDeque;

use bytes::Bytes;
use kvfleet_proto::data;
use kvfleet_proto::frame::Frame;
use prost::Message;

use super::flights::{Arriving, TransferError};
use super::link::Link;
use super::memory::ALIGN_BYTES;
use super::words;
use crate::stream::{ItemError, Loss, Stream, encode, read_message};
use crate::{PathError, SaveAnswer, SaveOffer, SaveRequest, wire};

/// A save under way.
pub(super) struct Save<'a> {
    pub(super) link: &'a mut Link,
    pub(super) peer: &'a str,
    pub(super) stall_timeout: std::time::Duration,
    /// Whether the node said anything.
    pub(super) is_heard: bool,
}

/// How far the frames of a save came.
struct Window {
    slots: u64,
    slot_bytes: u64,
    written: u64,
    taken: u64,
}

impl Window {
    fn fits(&self, frame: &Bytes) -> bool {
        self.slots > 0 && frame.len() as u64 <= self.slot_bytes
    }

    /// Frames whose slots may be written before the node takes one.
    fn free(&self) -> u64 {
        self.slots - (self.written - self.taken)
    }
}

impl Save<'_> {
    /// Runs it to its end; then nothing of it is under way.
    pub(super) async fn run(
        &mut self,
        request: &SaveRequest,
        source: &(dyn Fn(usize) -> Frame + Send + Sync),
    ) -> Result<SaveAnswer, PathError> {
        self.say(&wire::save_to_pb(request)).await?;
        self.flush().await?;
        let offer: data::SaveOffer = self.hear().await?;
        let offer = wire::offer_from_pb(&offer, request.hashes.len());
        let wanted = match offer.map_err(|error| self.nonsense(&error))? {
            SaveOffer::Wanted(wanted) => wanted,
            SaveOffer::Busy { retry_after } => return Ok(SaveAnswer::Busy { retry_after }),
            SaveOffer::Refused(refusal) => return Ok(SaveAnswer::Refused(refusal)),
        };
        let slots: data::Slots = self.hear().await?;
        let mut window = self.window(&slots)?;
        let mut under_way = VecDeque::new();
        for (position, _) in wanted.iter().enumerate().filter(|(_, wanted)| **wanted) {
            let frame = source(position).bytes;
            if !window.fits(&frame) || frame.len() as u64 > self.link.parts().2.local.frame_bytes_max().into()
            {
                self.commit(&mut under_way).await?;
                self.send(frame).await?;
                continue;
            }
            // Half of the slots are written while the node takes what is in the other half.
            if under_way.len() as u64 >= window.slots.div_ceil(2) || window.free() == 0 {
                self.commit(&mut under_way).await?;
            }
            while window.free() == 0 {
                let data::Taken {} = self.hear().await?;
                window.taken += 1;
            }
            self.write(&frame, &mut window, &mut under_way).await?;
        }
        self.commit(&mut under_way).await?;
        while window.taken < window.written {
            let data::Taken {} = self.hear().await?;
            window.taken += 1;
        }
        let done: data::SaveDone = self.hear().await?;
        Ok(wire::done_from_pb(&done))
    }

    /// Breaks the save off and waits until the node did so, too: from then on, what it stored is present and what it did not is
    /// wanted. Whether that was seen.
    pub(super) async fn give_up(&mut self) -> bool {
        let control = &mut self.link.control;
        let ended = async {
            // Where a message is awaited this is none, so that the node ends the connection, and before it the save.
            let is_said = control.end(None).await.is_ok();
            loop {
                match read_message::<data::Taken>(control).await {
                    Ok(_) if is_said => {}
                    Ok(_) => return false,
                    Err(error) => return is_said && is_ended(&error),
                }
            }
        };
        tokio::time::timeout(self.stall_timeout, ended).await.unwrap_or(false)
    }

    fn window(&mut self, slots: &data::Slots) -> Result<Window, PathError> {
        let (count, slot_bytes) = (u64::from(slots.slots), u64::from(slots.slot_bytes));
        let tray = self.link.parts().2.tray.bytes;
        if count * slot_bytes > tray || !slot_bytes.is_multiple_of(ALIGN_BYTES) {
            return Err(self.nonsense(&"slots that are not in the tray"));
        }
        Ok(Window { slots: count, slot_bytes, written: 0, taken: 0 })
    }

    /// Begins to write one frame.
    async fn write(
        &mut self,
        frame: &Bytes,
        window: &mut Window,
        under_way: &mut VecDeque<(Arriving, u32)>,
    ) -> Result<(), PathError> {
        let len = u32::try_from(frame.len()).unwrap_or(u32::MAX); // checked against the largest frame
        let passing = std::sync::Arc::clone(&self.link.parts().2.local.passing);
        let place = match passing.take(len) {
            Some(place) => Some(place),
            None => {
                // Whoever waits for a place holds none, or two could wait for each other.
                self.commit(under_way).await?;
                let waited = passing.wait(len);
                self.timed(async { Ok(waited.await) }).await?
            }
        };
        let mut place = place.ok_or_else(|| self.nonsense(&"a slot that is too large"))?;
        place.write(frame);
        let at = (window.written % window.slots) * window.slot_bytes;
        let (peer, stall) = (self.peer, self.stall_timeout);
        let (_, _, reach) = self.link.parts();
        let begun = async { reach.write(at, place).await.map_err(|error| transfer(peer, &error)) };
        let arriving = crate::dial::within(peer, stall, begun).await?;
        under_way.push_back((arriving, len));
        window.written += 1;
        Ok(())
    }

    /// Waits for what is being written, and tells the node.
    async fn commit(&mut self, under_way: &mut VecDeque<(Arriving, u32)>) -> Result<(), PathError> {
        if under_way.is_empty() {
            return Ok(());
        }
        let (peer, stall) = (self.peer, self.stall_timeout);
        let mut lens = Vec::with_capacity(under_way.len());
        for (arriving, len) in under_way.drain(..) {
            let ended = async { arriving.end().await.map_err(|error| transfer(peer, &error)) };
            drop(crate::dial::within(peer, stall, ended).await?);
            lens.push(len);
        }
        let (_, _, reach) = self.link.parts();
        let board = async { reach.board().await.map_err(|error| transfer(peer, &error)) };
        if crate::dial::within(peer, stall, board).await? == words::REVOKED {
            return Err(transfer(peer, &TransferError::Broken));
        }
        for bytes in lens {
            self.say(&data::Written { bytes, is_frame: false }).await?;
        }
        self.flush().await
    }

    /// Sends one frame over the connection.
    async fn send(&mut self, frame: Bytes) -> Result<(), PathError> {
        self.say(&data::Written { bytes: 0, is_frame: true }).await?;
        let (peer, stall) = (self.peer, self.stall_timeout);
        let sent = async { self.link.control.write(frame).await.map_err(|loss| loss.at(peer)) };
        crate::dial::within(peer, stall, sent).await?;
        self.flush().await
    }

    async fn say<M: Message>(&mut self, message: &M) -> Result<(), PathError> {
        let (peer, stall) = (self.peer, self.stall_timeout);
        let bytes = encode(message)?;
        let said = async { self.link.control.write(bytes).await.map_err(|loss: Loss| loss.at(peer)) };
        crate::dial::within(peer, stall, said).await
    }

    async fn flush(&mut self) -> Result<(), PathError> {
        let (peer, stall) = (self.peer, self.stall_timeout);
        let flushed = async { self.link.control.flush().await.map_err(|loss| loss.at(peer)) };
        crate::dial::within(peer, stall, flushed).await
    }

    async fn hear<M: Message + Default>(&mut self) -> Result<M, PathError> {
        let (peer, stall) = (self.peer, self.stall_timeout);
        let heard = async { read_message(&mut self.link.control).await.map_err(|error| error.at(peer)) };
        let heard = crate::dial::within(peer, stall, heard).await?;
        self.is_heard = true;
        Ok(heard)
    }

    async fn timed<T>(&self, work: impl Future<Output = Result<T, PathError>>) -> Result<T, PathError> {
        crate::dial::within(self.peer, self.stall_timeout, work).await
    }

    fn nonsense(&self, what: &dyn std::fmt::Display) -> PathError {
        let what = format!("a message that makes no sense: {what}");
        PathError::Protocol { peer: self.peer.to_owned(), what }
    }
}

/// Whether the node ended the connection. What else goes wrong says nothing of what the node still has under way.
fn is_ended(error: &ItemError) -> bool {
    let reset = std::io::Error::from_raw_os_error(libc::ECONNRESET).to_string();
    match error {
        ItemError::Cut => true,
        // It had not read all that was said, or said no farewell.
        ItemError::Lost(Loss::Broken(cause)) => *cause == reset || cause == crate::tcp::CLOSED,
        _ => false,
    }
}

/// What a card's failure is to the path.
fn transfer(peer: &str, error: &TransferError) -> PathError {
    PathError::Broken { peer: peer.to_owned(), cause: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_connection_that_the_node_ended_says_that_it_gave_up() {
        let system = |errno| Loss::Broken(std::io::Error::from_raw_os_error(errno).to_string());
        assert!(is_ended(&ItemError::Cut) && is_ended(&system(libc::ECONNRESET).into()));
        assert!(is_ended(&Loss::Broken(crate::tcp::CLOSED.to_owned()).into()));
        for other in [system(libc::ETIMEDOUT), system(libc::EHOSTUNREACH), Loss::Protocol("odd".to_owned())] {
            assert!(!is_ended(&other.clone().into()), "{other}");
        }
        assert!(!is_ended(&ItemError::Oversized { what: "a message", bytes: 2, limit: 1 }));
    }
}
