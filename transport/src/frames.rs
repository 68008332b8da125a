//! The frames of a fetch on the node's side: what lies ready needs no channel and no task.
//!
//! Not here: the wire.

use std::collections::VecDeque;

use kvfleet_proto::frame::Frame;
use tokio::sync::mpsc;

use crate::MissReason;

/// Frames in prefix order: first those that are ready, then others as they become readable.
#[derive(Debug)]
pub struct Frames {
    ready: VecDeque<Frame>,
    later: Option<mpsc::Receiver<Result<Frame, MissReason>>>,
    ended: Option<MissReason>,
}

impl Frames {
    /// No frame.
    #[must_use]
    pub fn none() -> Frames {
        Frames::ready(Vec::new())
    }

    /// These and no others.
    #[must_use]
    pub fn ready(ready: Vec<Frame>) -> Frames {
        Frames { ready: ready.into(), later: None, ended: None }
    }

    /// These, then what comes until the sender is dropped or says why no more will come.
    #[must_use]
    pub fn then(ready: Vec<Frame>, later: mpsc::Receiver<Result<Frame, MissReason>>) -> Frames {
        Frames { ready: ready.into(), later: Some(later), ended: None }
    }

    /// The next frame; nothing after the last, or once it is known that no other will come. Loses nothing when the
    /// future is dropped.
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

    /// The next frame if it is there already.
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

    /// The frame that was taken last is the next one again.
    pub fn put_back(&mut self, frame: Frame) {
        self.ready.push_front(frame);
    }

    /// Why no more came than did, if that was said.
    #[must_use]
    pub fn ended(&self) -> Option<MissReason> {
        self.ended
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::suite::{frame, hash};

    #[tokio::test]
    async fn what_is_ready_comes_before_what_comes_later() {
        assert!(Frames::none().next().await.is_none());
        let (send, later) = mpsc::channel(2);
        let mut frames = Frames::then(vec![frame(hash(1), 100)], later);
        send.send(Ok(frame(hash(2), 100))).await.unwrap();
        send.send(Err(MissReason::Busy)).await.unwrap();
        let order = [frames.next().await.unwrap().hash, frames.next().await.unwrap().hash];
        assert_eq!((order, frames.ended()), ([hash(1), hash(2)], None));
        assert!(frames.next().await.is_none());
        assert_eq!(frames.ended(), Some(MissReason::Busy));
        assert!(frames.next().await.is_none());
    }

    #[tokio::test]
    async fn what_is_there_is_had_without_waiting() {
        let (send, later) = mpsc::channel(2);
        let mut frames = Frames::then(vec![frame(hash(1), 100)], later);
        assert_eq!(frames.try_next().unwrap().hash, hash(1));
        assert!(frames.try_next().is_none());
        send.send(Ok(frame(hash(2), 100))).await.unwrap();
        send.send(Err(MissReason::Busy)).await.unwrap();
        assert_eq!((frames.try_next().unwrap().hash, frames.ended()), (hash(2), None));
        assert!(frames.try_next().is_none());
        assert_eq!(frames.ended(), Some(MissReason::Busy));
        assert!(frames.next().await.is_none());
    }
}
