//! The frames of a fetch on the node's side. Ready frames need neither a channel nor a task.
//!
//! Not here: the wire format.

use std::collections::VecDeque;

use kvfleet_proto::frame::Frame;
use tokio::sync::mpsc;

use crate::MissReason;

/// Frames in prefix order: first the ready ones, then others as they become readable.
#[derive(Debug)]
pub struct Frames {
    ready: VecDeque<Frame>,
    later: Option<mpsc::Receiver<Result<Frame, MissReason>>>,
    ended: Option<MissReason>,
}

impl Frames {
    /// No frame.
    #[must_use]
    pub fn empty() -> Frames {
        Frames::ready(Vec::new())
    }

    /// Only these frames.
    #[must_use]
    pub fn ready(ready: Vec<Frame>) -> Frames {
        Frames { ready: ready.into(), later: None, ended: None }
    }

    /// These frames, then those of the channel, until its sender is dropped or sends a reason for
    /// the end.
    #[must_use]
    pub fn ready_then(ready: Vec<Frame>, later: mpsc::Receiver<Result<Frame, MissReason>>) -> Frames {
        Frames { ready: ready.into(), later: Some(later), ended: None }
    }

    /// The next frame; `None` at the end. Cancel safe.
    pub async fn next(&mut self) -> Option<Frame> {
        if let Some(frame) = self.ready.pop_front() {
            return Some(frame);
        }
        match self.later.as_mut()?.recv().await? {
            Ok(frame) => Some(frame),
            Err(reason) => {
                (self.later, self.ended) = (None, Some(reason));
                None
            }
        }
    }

    /// The next frame if it is available now.
    #[must_use]
    pub fn try_next(&mut self) -> Option<Frame> {
        if let Some(frame) = self.ready.pop_front() {
            return Some(frame);
        }
        match self.later.as_mut()?.try_recv().ok()? {
            Ok(frame) => Some(frame),
            Err(reason) => {
                (self.later, self.ended) = (None, Some(reason));
                None
            }
        }
    }

    /// Puts back the frame that was taken last.
    pub fn put_back(&mut self, frame: Frame) {
        self.ready.push_front(frame);
    }

    /// Why the frames ended early; `None` if no reason was given.
    #[must_use]
    pub fn end_reason(&self) -> Option<MissReason> {
        self.ended
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::suite::{frame, hash};

    #[tokio::test]
    async fn ready_frames_come_before_later_ones() {
        assert!(Frames::empty().next().await.is_none());
        let (send, later) = mpsc::channel(2);
        let mut frames = Frames::ready_then(vec![frame(hash(1), 100)], later);
        send.send(Ok(frame(hash(2), 100))).await.unwrap();
        send.send(Err(MissReason::Busy)).await.unwrap();
        let order = [frames.next().await.unwrap().hash, frames.next().await.unwrap().hash];
        assert_eq!((order, frames.end_reason()), ([hash(1), hash(2)], None));
        assert!(frames.next().await.is_none());
        assert_eq!(frames.end_reason(), Some(MissReason::Busy));
        assert!(frames.next().await.is_none());
    }

    #[tokio::test]
    async fn try_next_returns_available_frames_without_waiting() {
        let (send, later) = mpsc::channel(2);
        let mut frames = Frames::ready_then(vec![frame(hash(1), 100)], later);
        assert_eq!(frames.try_next().unwrap().hash, hash(1));
        assert!(frames.try_next().is_none());
        send.send(Ok(frame(hash(2), 100))).await.unwrap();
        send.send(Err(MissReason::Busy)).await.unwrap();
        assert_eq!((frames.try_next().unwrap().hash, frames.end_reason()), (hash(2), None));
        assert!(frames.try_next().is_none());
        assert_eq!(frames.end_reason(), Some(MissReason::Busy));
        assert!(frames.next().await.is_none());
    }
}
