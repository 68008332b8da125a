//! The answer to a fetch that is asked in parts; each begins where the previous one ended.
//!
//! A fetch is split into parts when a link breaks. Not here: sending the parts (`path.rs`).

use kv_core::id::Tier;
use kvfleet_transport::{FetchAnswer, FetchRequest, MissReason, PathError};

/// Combined result of the parts that are over.
#[derive(Debug, Default)]
pub(super) struct AnswerParts {
    tiers: Vec<Tier>,
    /// Whether the node answered any part.
    is_answered: bool,
}

impl AnswerParts {
    /// Adds a finished or broken part that delivered `delivered` blocks of its answer.
    pub(super) fn add_part(&mut self, answer: &FetchAnswer, delivered_blocks: usize) {
        self.is_answered = true;
        self.tiers.extend(answer.tiers().iter().take(delivered_blocks));
    }

    /// Whether no part delivered a block.
    pub(super) fn is_empty(&self) -> bool {
        self.tiers.is_empty()
    }

    /// Combines the earlier parts with the result of the last one.
    ///
    /// # Errors
    /// The last part's error, if the node answered no part.
    pub(super) fn finish(mut self, last: Result<FetchAnswer, PathError>) -> Result<FetchAnswer, PathError> {
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

/// Removes the first `blocks` blocks from the request.
pub(super) fn skip_blocks(request: &mut FetchRequest, blocks: usize) {
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
    use kvfleet_transport::suite::{fetch_request, hash, hashes, in_dram};

    fn answer_after(came: usize, last: Result<FetchAnswer, PathError>) -> Result<FetchAnswer, PathError> {
        let mut parts = AnswerParts::default();
        parts.add_part(&FetchAnswer::Hit { tiers: in_dram(9) }, came);
        parts.finish(last)
    }

    fn broken() -> PathError {
        PathError::Broken { peer: "node".to_owned(), cause: "gone".to_owned() }
    }

    #[test]
    fn delivered_blocks_count_whatever_the_last_part_returns() {
        let partial = |blocks, reason| FetchAnswer::Partial { tiers: in_dram(blocks), reason };
        let (hit, lost) = (FetchAnswer::Hit { tiers: in_dram(2) }, MissReason::NodeLost);
        let busy = FetchAnswer::Busy { retry_after: Duration::from_millis(5) };
        assert_eq!(answer_after(3, Ok(hit.clone())).unwrap(), FetchAnswer::Hit { tiers: in_dram(5) });
        assert_eq!(
            answer_after(3, Ok(partial(2, MissReason::NotHeld))).unwrap(),
            partial(5, MissReason::NotHeld)
        );
        assert_eq!(answer_after(3, Ok(FetchAnswer::Miss { reason: lost })).unwrap(), partial(3, lost));
        assert_eq!(answer_after(3, Ok(busy.clone())).unwrap(), partial(3, MissReason::Busy));
        assert_eq!(answer_after(3, Err(broken())).unwrap(), partial(3, lost));
        assert_eq!(
            answer_after(0, Err(broken())).unwrap(),
            FetchAnswer::Miss { reason: lost },
            "the node had answered"
        );
        assert_eq!(answer_after(0, Ok(busy.clone())).unwrap(), busy);
        assert!(AnswerParts::default().finish(Err(broken())).is_err());
        assert_eq!(AnswerParts::default().finish(Ok(hit.clone())).unwrap(), hit);
    }

    #[test]
    fn skipping_moves_the_offset_past_the_delivered_blocks() {
        let mut request = FetchRequest { first_offset_blocks: 7, ..fetch_request(&hashes(5)) };
        skip_blocks(&mut request, 3);
        assert_eq!((request.first_offset_blocks, request.hashes), (10, vec![hash(3), hash(4)]));
    }
}
