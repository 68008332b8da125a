//! Infers turns of conversations if a format lacks them: a request that extends an earlier one is
//! its next turn.
//!
//! Block ids name prefixes, so a request continues an earlier one if it contains the last *whole*
//! block of its input. (The last block may be partly filled; appended tokens change its id.) Not
//! every last block identifies a conversation: one that other requests had before is a shared
//! prompt, and requests that start with it are unrelated. So an end is remembered only if its
//! request was the first to have that block. Of several ends in one request the deepest counts. Not
//! here: formats, and types of requests, which a prefix does not show.
//!
//! Wrong in three cases. A conversation grows by less than a block (its next turn is found from the
//! turn before). A prompt was cut in the middle. Two conversations start with the same long input.
//! In the last case the second counts as the next turn of the first.

use super::Request;
use std::collections::HashMap;

/// State of a block.
#[derive(Clone, Copy, Debug, Default)]
struct BlockEnd {
    /// Turn of the request that ended with it; 0 if no such request was first to have it.
    ends_turn: u32,
}

/// Assigns turns to requests, in order of arrival. Memory grows with the number of unique blocks.
#[derive(Debug, Default)]
pub struct TurnInference {
    ends: HashMap<u64, BlockEnd>,
}

impl TurnInference {
    /// An empty state.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the turn of a request without one; a given turn is kept.
    pub fn infer(&mut self, request: &mut Request) {
        if request.turn > 0 || request.blocks.is_empty() {
            return;
        }
        let whole = (request.input_tokens / request.block_tokens.max(1)) as usize;
        let whole = &request.blocks[..whole.min(request.blocks.len())];
        let before = |block: &u64| self.ends.get(block).map_or(0, |seen| seen.ends_turn);
        let turn = 1 + whole.iter().rev().map(before).find(|&turn| turn > 0).unwrap_or(0);
        if let Some(end) = whole.last() {
            let is_own = self.ends.get(end).is_none_or(|seen| seen.ends_turn > 0);
            if is_own {
                self.ends.insert(*end, BlockEnd { ends_turn: turn });
            }
        }
        for &block in whole {
            self.ends.entry(block).or_default();
        }
        request.turn = turn;
        request.category.conversation_turn = u8::try_from(turn).unwrap_or(u8::MAX);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::generate::{TraceGenerator, TraceSpec, TrafficKind};

    /// Turns of requests with these whole blocks, each followed by a partly filled one.
    fn turns(prompts: &[&[u64]]) -> Vec<u32> {
        let mut inference = TurnInference::new();
        let of = |(number, prompt): (usize, &&[u64])| {
            let mut blocks = prompt.to_vec();
            blocks.push(1_000_000 + number as u64);
            let input_tokens = prompt.len() as u32 * 16 + 5;
            let mut request = Request { input_tokens, block_tokens: 16, blocks, ..Request::default() };
            inference.infer(&mut request);
            assert_eq!(u32::from(request.category.conversation_turn), request.turn);
            request.turn
        };
        prompts.iter().enumerate().map(of).collect()
    }

    #[test]
    fn a_request_that_extends_another_is_its_next_turn() {
        assert_eq!(turns(&[&[0, 1, 2], &[0, 1, 2, 3, 4], &[0, 1, 2, 3, 4, 5], &[0, 9]]), [1, 2, 3, 1]);
    }

    #[test]
    fn a_shared_start_alone_is_another_conversation() {
        assert_eq!(turns(&[&[0, 1, 2], &[0, 1, 7], &[0, 1, 8, 9]]), [1, 1, 1]);
    }

    #[test]
    fn a_common_short_prompt_ends_no_conversation() {
        assert_eq!(turns(&[&[0, 1], &[0], &[0, 2], &[0], &[0, 3]]), [1, 1, 1, 1, 1]);
    }

    #[test]
    fn growing_by_less_than_a_block_is_a_turn_too() {
        assert_eq!(turns(&[&[0, 1], &[0, 1], &[0, 1, 2]]), [1, 2, 3]);
    }

    #[test]
    fn a_given_turn_is_kept() {
        let mut request = Request { turn: 7, blocks: vec![1], ..Request::default() };
        TurnInference::new().infer(&mut request);
        assert_eq!((request.turn, request.category.conversation_turn), (7, 0));
    }

    #[test]
    fn most_turns_of_a_generated_trace_are_found() {
        let mut inference = TurnInference::new();
        let (mut right, mut all) = (0, 0);
        for request in TraceGenerator::new(TraceSpec::new(TrafficKind::Consumer, 1, 3000)) {
            let mut blind = Request { turn: 0, ..request.clone() };
            inference.infer(&mut blind);
            all += 1;
            right += usize::from(blind.turn == request.turn);
        }
        assert!(right * 100 >= all * 95, "{right} of {all}");
    }
}
