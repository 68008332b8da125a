//! Which prompt a request has: its tokens as the engine will see them, and the hashes of its blocks.
//!
//! `body.rs` takes a request apart, `messages.rs` and `template.rs` turn a conversation into the text that the engine makes of it
//! (`python.rs` has how Python writes values), `tokens.rs` cuts text into tokens, `reader.rs` puts it together, `public.rs` is for engines. Not here: what is done
//! with it (`crate::decide`).

mod body;
mod messages;
pub(crate) mod public;
mod python;
mod reader;
mod remembered;
mod template;
#[cfg(test)]
mod tests;
mod tokens;
mod unreadable;

use kv_core::id::BlockHash;

use crate::endpoints::models::Need;

pub(crate) use reader::Reader;
pub(crate) use unreadable::Unreadable;

/// What of a request decides where it runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Prompt {
    /// Hashes of its whole blocks, in prefix order.
    pub(crate) hashes: Vec<BlockHash>,
    /// Tokens of a full block.
    pub(crate) block_tokens: u32,
    /// Tokens of the whole prompt.
    pub(crate) input_tokens: u32,
    /// Tokens that may be generated; 0 when unknown.
    pub(crate) output_tokens: u32,
    /// Whether tokens are pieces of its text.
    pub(crate) is_text: bool,
}

/// A request, as far as a door has to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    /// What it has as `model`.
    pub(crate) model: String,
    /// Its first prompt: where that is, the others are welcome.
    pub(crate) prompt: Prompt,
    /// Its `cache_salt`.
    pub(crate) salt: Option<String>,
    /// Whether the answer comes in pieces.
    pub(crate) stream: bool,
    /// Whether it has a `priority`.
    pub(crate) has_priority: bool,
    /// How its prompt was read.
    pub(crate) reading: Reading,
    /// How many prompts it has; the engine counts the tokens of all of them.
    pub(crate) prompts: usize,
    /// Whether the engine cuts it to its own context, which we do not know.
    pub(crate) is_cut: bool,
}

impl Asked {
    /// Tokens that the engine must have counted, if we read what it read.
    pub(crate) fn countable(&self) -> Option<u32> {
        (self.reading == Reading::Tokens && self.prompts == 1).then_some(self.prompt.input_tokens)
    }

    /// What it needs of an engine, by the path that it was sent to.
    pub(crate) fn need(&self, path: &str) -> Need {
        let is_counted = self.reading == Reading::Tokens && !self.is_cut;
        Need {
            model: self.model.clone(),
            prompt_tokens: if is_counted { self.prompt.input_tokens } else { 0 },
            output_tokens: self.prompt.output_tokens,
            is_embedding: path == "/v1/embeddings",
        }
    }
}

/// How a prompt was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Reading {
    /// As the tokens that the engine makes of it.
    Tokens,
    /// As pieces of its text: equal texts are told, and what was sent where counts, for no engine tells of such blocks.
    Text,
}

impl Reading {
    /// As metrics call it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Reading::Tokens => "tokens",
            Reading::Text => "text",
        }
    }
}
