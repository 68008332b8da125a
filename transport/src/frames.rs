//! The frames of a fetch on the node's side: what lies ready needs no channel and no task.
//!
//! Not here: the wire.

use kvfleet_proto::frame::Frame;
use tokio::sync::mpsc;

/// Frames in prefix order: first those that are ready, then others as they become readable.
#[derive(Debug)]
pub struct Frames {
    ready: std::vec::IntoIter<Frame>,
    later: Option<mpsc::Receiver<Frame>>,
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
        Frames { ready: ready.into_iter(), later: None }
    }

    /// These, then what comes until the sender is dropped.
    #[must_use]
    pub fn then(ready: Vec<Frame>, later: mpsc::Receiver<Frame>) -> Frames {
        Frames { ready: ready.into_iter(), later: Some(later) }
    }

    /// The next frame; nothing after the last, or once it is known that no other will come. Loses nothing when the
    /// future is dropped.
    pub async fn next(&mut self) -> Option<Frame> {
        match self.ready.next() {
            Some(frame) => Some(frame),
            None => self.later.as_mut()?.recv().await,
        }
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
        send.send(frame(hash(2), 100)).await.unwrap();
        drop(send);
        let order = [frames.next().await.unwrap().hash, frames.next().await.unwrap().hash];
        assert_eq!(order, [hash(1), hash(2)]);
        assert!(frames.next().await.is_none());
    }
}
