//! Prompts for engines: whoever serves OpenAI requests behind a door reads them as the door does, and has the same hashes.
//!
//! Not here: how they are read (`reader.rs`).

use std::sync::Arc;

use kv_core::id::BlockHash;
use kvfleet_router::{EnginesConfig, Tenants};
use prometheus::Registry;

use super::{Reader, Unreadable};
use crate::config::{DoorsConfig, ModelConfig};
use crate::metrics::PromptMetrics;
use crate::start::StartError;

/// Reads the prompts of OpenAI requests as the doors do. Clones share it.
#[derive(Clone, Debug)]
pub struct PromptReader {
    reader: Arc<Reader>,
    block_tokens: u32,
}

/// A request, as far as an engine must know it to find its KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadPrompt {
    /// What it has as `model`.
    pub model: String,
    /// Hashes of the whole blocks of its first prompt, in prefix order.
    pub hashes: Vec<BlockHash>,
    /// Tokens of a full block.
    pub block_tokens: u32,
    /// Tokens of the whole prompt.
    pub input_tokens: u32,
    /// Tokens that may be generated; 0 where it does not say.
    pub output_tokens: u32,
    /// Whether the answer is to come in pieces.
    pub stream: bool,
}

/// A request that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct UnreadablePrompt {
    /// The HTTP status to answer with: 400, or 404 for an unknown model.
    pub status: u16,
    /// What is wrong, for the caller.
    pub message: String,
}

impl From<Unreadable> for UnreadablePrompt {
    fn from(error: Unreadable) -> UnreadablePrompt {
        UnreadablePrompt { status: error.status(), message: error.to_string() }
    }
}

impl PromptReader {
    /// Reads the files of all models. Without a model every name is taken, and prompts of text are told apart by their text. `engines` says
    /// whose hashes prompts have.
    ///
    /// # Errors
    /// [`StartError`]: a name that is there twice, a file that cannot be read, figures that are in `registry` already.
    pub fn load(
        models: &[ModelConfig],
        engines: &EnginesConfig,
        registry: &Registry,
    ) -> Result<PromptReader, StartError> {
        let config = DoorsConfig { models: models.to_vec(), ..DoorsConfig::default() };
        config.validate()?;
        let tenants = Arc::new(Tenants::load(engines)?);
        let block_tokens = tenants.block_tokens();
        let reader = Reader::load(&config, tenants, PromptMetrics::register(registry)?)?;
        Ok(PromptReader { reader: Arc::new(reader), block_tokens })
    }

    /// Reads a request to `/v1/chat/completions`, `/v1/completions` or `/v1/embeddings`; a long one on a thread that may take long.
    ///
    /// # Errors
    /// [`UnreadablePrompt`] says what is wrong with it.
    pub async fn read(&self, path: &str, body: bytes::Bytes) -> Result<ReadPrompt, UnreadablePrompt> {
        let path = path.to_owned();
        let asked = self.reader.read_in_turn(body.len(), move |reader| reader.read(&path, &body)).await?;
        Ok(ReadPrompt {
            model: asked.model,
            hashes: asked.prompt.hashes,
            block_tokens: self.block_tokens,
            input_tokens: asked.prompt.input_tokens,
            output_tokens: asked.prompt.output_tokens,
            stream: asked.stream,
        })
    }
}
