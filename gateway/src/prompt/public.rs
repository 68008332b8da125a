//! Prompt reading for engines: an engine that serves OpenAI requests behind the gateway gets the
//! same hashes as the gateway.
//!
//! Not here: how prompts are read (`reader.rs`).

use std::sync::Arc;

use kv_core::id::BlockHash;
use kvfleet_router::{EnginesConfig, Tenants};
use prometheus::Registry;

use super::{PromptError, RequestReader};
use crate::config::{GatewayConfig, ModelConfig};
use crate::metrics::PromptMetrics;
use crate::start::StartError;

/// Reads prompts of OpenAI requests as the gateway does. Clones share state.
#[derive(Clone, Debug)]
pub struct PromptReader {
    reader: Arc<RequestReader>,
    block_tokens: u32,
}

/// The parsed fields of a request that an engine needs to find its KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadPrompt {
    /// Value of `model`.
    pub model: String,
    /// Hashes of the full blocks of its first prompt, in prefix order.
    pub hashes: Vec<BlockHash>,
    /// Tokens of a full block.
    pub block_tokens: u32,
    /// Tokens of the whole prompt.
    pub input_tokens: u32,
    /// Tokens that may be generated; 0 when unknown.
    pub output_tokens: u32,
    /// Whether the answer is streamed.
    pub stream: bool,
}

/// A request that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct UnreadablePrompt {
    /// The HTTP status to answer with: 400, or 404 for an unknown model.
    pub status: u16,
    /// The problem, for the caller.
    pub message: String,
}

impl From<PromptError> for UnreadablePrompt {
    fn from(error: PromptError) -> UnreadablePrompt {
        UnreadablePrompt { status: error.status(), message: error.to_string() }
    }
}

impl PromptReader {
    /// Loads the tokenizers and templates of all models. Without models, every model name is
    /// accepted and text prompts are compared by their text. `engines` sets the identity of prompt
    /// hashes.
    ///
    /// # Errors
    /// [`StartError`]: a duplicate name, an unreadable file, or metrics that are already in `registry`.
    pub fn load(
        models: &[ModelConfig],
        engines: &EnginesConfig,
        registry: &Registry,
    ) -> Result<PromptReader, StartError> {
        let config = GatewayConfig { models: models.to_vec(), ..GatewayConfig::default() };
        config.validate()?;
        engines.require_hash_key()?;
        let tenants = Arc::new(Tenants::load(engines)?);
        let block_tokens = tenants.block_tokens();
        let reader = RequestReader::load(&config, tenants, PromptMetrics::register(registry)?)?;
        Ok(PromptReader { reader: Arc::new(reader), block_tokens })
    }

    /// Reads a request to `/v1/chat/completions`, `/v1/completions` or `/v1/embeddings`. Long
    /// bodies are read on a blocking thread.
    ///
    /// # Errors
    /// [`UnreadablePrompt`] says why the request was refused.
    pub async fn read(&self, path: &str, body: bytes::Bytes) -> Result<ReadPrompt, UnreadablePrompt> {
        let path = path.to_owned();
        let parsed = self.reader.read_async(body.len(), move |reader| reader.read(&path, &body)).await?;
        Ok(ReadPrompt {
            model: parsed.model,
            hashes: parsed.prompt.hashes,
            block_tokens: self.block_tokens,
            input_tokens: parsed.prompt.input_tokens,
            output_tokens: parsed.prompt.output_tokens,
            stream: parsed.stream,
        })
    }
}
