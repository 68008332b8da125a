//! Reads the prompt of a request: the tokens that the engine will compute, and the hashes of their
//! blocks.
//!
//! - `body.rs` parses the request's JSON; `budget.rs` bounds what it may become.
//! - `messages.rs`, `template.rs` and `python.rs` render a conversation into the text that the
//!   engine would build.
//! - `tokenizer.rs` encodes text, with the cache in `token_cache.rs`.
//! - `reader.rs` combines them; `public.rs` exports them to engines.
//!
//! Not here: placing the request (`crate::decide`).

mod body;
mod budget;
mod error;
mod messages;
pub(crate) mod public;
mod python;
mod reader;
mod template;
#[cfg(test)]
mod tests;
mod token_cache;
mod tokenizer;

use kv_core::id::BlockHash;

use crate::endpoints::models::EngineRequirements;

pub(crate) use body::STEERING_FIELDS;
pub(crate) use error::PromptError;
pub(crate) use reader::RequestReader;

/// The part of a request that decides where it runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Prompt {
    /// Hashes of its full blocks, in prefix order.
    pub(crate) hashes: Vec<BlockHash>,
    /// Tokens of a full block.
    pub(crate) block_tokens: u32,
    /// Tokens of the whole prompt.
    pub(crate) input_tokens: u32,
    /// Tokens that may be generated; 0 when unknown.
    pub(crate) output_tokens: u32,
    /// Whether the tokens are pseudo-tokens, made of the text without a tokenizer.
    pub(crate) is_text: bool,
}

/// The parsed fields of a request that the gateway needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ParsedRequest {
    /// Value of `model`.
    pub(crate) model: String,
    /// Its first prompt. A request with several prompts is placed by the first.
    pub(crate) prompt: Prompt,
    /// The `cache_salt` of its hashes: that of the request, or of the tenant of its key.
    pub(crate) salt: Option<String>,
    /// Whether the answer is streamed.
    pub(crate) stream: bool,
    /// Whether it has a `priority`.
    pub(crate) has_priority: bool,
    /// Whether it has one of [`STEERING_FIELDS`].
    pub(crate) steers_engine: bool,
    /// Whether the prompt was tokenized.
    pub(crate) form: PromptForm,
    /// Number of prompts; the engine reports the tokens of all of them together.
    pub(crate) prompt_count: usize,
    /// Whether the engine truncates the prompt to its own context length, which is unknown here.
    pub(crate) is_cut: bool,
}

impl ParsedRequest {
    /// Prompt tokens that the engine should report, if the gateway tokenized the prompt as it does.
    pub(crate) fn expected_prompt_tokens(&self) -> Option<u32> {
        (self.form == PromptForm::Tokens && self.prompt_count == 1).then_some(self.prompt.input_tokens)
    }

    /// Requirements on the engine for a request to this path.
    pub(crate) fn requirements(&self, path: &str) -> EngineRequirements {
        let is_counted = self.form == PromptForm::Tokens && !self.is_cut;
        EngineRequirements {
            model: self.model.clone(),
            prompt_tokens: if is_counted { self.prompt.input_tokens } else { 0 },
            output_tokens: self.prompt.output_tokens,
            is_embedding: path == "/v1/embeddings",
        }
    }
}

/// Whether a prompt was read as tokens or as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum PromptForm {
    /// Tokens of the engine's tokenizer.
    Tokens,
    /// Pseudo-tokens made of the text. Equal texts match, but only by earlier placements, because
    /// no engine reports such blocks.
    Text,
}

impl PromptForm {
    /// Value of the metric label.
    pub(crate) fn name(self) -> &'static str {
        match self {
            PromptForm::Tokens => "tokens",
            PromptForm::Text => "text",
        }
    }
}
