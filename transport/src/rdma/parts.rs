//! The answer to a fetch that was asked in parts, each of which begins where the one before ended.
//!
//! Parts are asked because a link broke. Not here: asking (`path.rs`).

use kv_core::id::Tier;

use crate::{FetchAnswer, FetchRequest, MissReason, PathError};

/// What came of the parts that are over.
#[derive(Debug, Default)]
pub(super) struct Parts {
    tiers: Vec<Tier>,
    /// Whether the node answered any of them.
    is_answered: bool,
}

impl Parts {
    /// One part broke off, or came whole: of what it answered, so many blocks came.
    pub(super) fn add(&mut self, answer: &FetchAnswer, delivered: usize) {
        self.is_answered = true;
        self.tiers.extend(answer.tiers().iter().take(delivered));
    }

    /// Whether nothing came of any.
    pub(super) fn is_empty(&self) -> bool {
        self.tiers.is_empty()
    }

    /// The whole answer, when this became of the last part.
    ///
    /// # Errors
    /// That of the last part, when the node answered none.
    pub(super) fn end(mut self, last: Result<FetchAnswer, PathError>) -> Result<FetchAnswer, PathError> {
        let reason = match last {
            Ok(FetchAnswer::Hit { tiers }) => {
                self.tiers.extend(tiers);
                return Ok(FetchAnswer::Hit { tiers: self.tiers });
            }
            Ok(FetchAnswer::Partial { tiers, reason }) => {
                self.tiers.extend(tiers);
                reason
            }
            Ok(FetchAnswer::Miss { reason }) => reason,
            Ok(FetchAnswer::Busy { retry_after }) if self.tiers.is_empty() => {
                return Ok(FetchAnswer::Busy { retry_after });
            }
            Ok(FetchAnswer::Busy { .. }) => MissReason::Busy,
            Err(error) if !self.is_answered => return Err(error),
            Err(_) => MissReason::NodeLost,
        };
        if self.tiers.is_empty() {
            return Ok(FetchAnswer::Miss { reason });
        }
        Ok(FetchAnswer::Partial { tiers: self.tiers, reason })
    }
}

/// The request without so many of its first blocks.
pub(super) fn skip(request: &mut FetchRequest, blocks: usize) {
    let blocks = blocks.min(request.hashes.len());
    request.hashes.drain(..blocks);
    let offset_blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
    request.first_offset_blocks = request.first_offset_blocks.saturating_add(offset_blocks);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::*;
    use crate::suite::{fetch_request, hash, hashes, in_dram};

    fn after(came: usize, last: Result<FetchAnswer, PathError>) -> Result<FetchAnswer, PathError> {
        let mut parts = Parts::default();
        parts.add(&FetchAnswer::Hit { tiers: in_dram(9) }, came);
        parts.end(last)
    }

    fn broken() -> PathError {
        PathError::Broken { peer: "node".to_owned(), cause: "gone".to_owned() }
    }

    #[test]
    fn what_came_stands_whatever_becomes_of_the_rest() {
        let partial = |blocks, reason| FetchAnswer::Partial { tiers: in_dram(blocks), reason };
        let (hit, lost) = (FetchAnswer::Hit { tiers: in_dram(2) }, MissReason::NodeLost);
        let busy = FetchAnswer::Busy { retry_after: Duration::from_millis(5) };
        assert_eq!(after(3, Ok(hit.clone())).unwrap(), FetchAnswer::Hit { tiers: in_dram(5) });
        assert_eq!(after(3, Ok(partial(2, MissReason::NotHeld))).unwrap(), partial(5, MissReason::NotHeld));
        assert_eq!(after(3, Ok(FetchAnswer::Miss { reason: lost })).unwrap(), partial(3, lost));
        assert_eq!(after(3, Ok(busy.clone())).unwrap(), partial(3, MissReason::Busy));
        assert_eq!(after(3, Err(broken())).unwrap(), partial(3, lost));
        assert_eq!(after(0, Err(broken())).unwrap(), FetchAnswer::Miss { reason: lost }, "it had answered");
        assert_eq!(after(0, Ok(busy.clone())).unwrap(), busy);
        assert!(Parts::default().end(Err(broken())).is_err());
        assert_eq!(Parts::default().end(Ok(hit.clone())).unwrap(), hit);
    }

    #[test]
    fn the_rest_of_a_request_is_behind_what_came() {
        let mut request = FetchRequest { first_offset_blocks: 7, ..fetch_request(&hashes(5)) };
        skip(&mut request, 3);
        assert_eq!((request.first_offset_blocks, request.hashes), (10, vec![hash(3), hash(4)]));
    }
}
