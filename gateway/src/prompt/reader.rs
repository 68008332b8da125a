//! Combines parsing, templates, tokenizers and hashing into one reader of requests.
//!
//! One reader serves all listeners. Not here: HTTP.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use kv_core::prefix::PrefixHasher;
use kvfleet_router::Tenants;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::body::{Body, Input, PromptInput};
use super::budget::{BoundedText, PromptBudget};
use super::messages;
use super::python::{self, JsonError, JsonStyle};
use super::template::{Conversation, Template};
use super::tokenizer::CachedTokenizer;
use super::{ParsedRequest, Prompt, PromptError, PromptForm};
use crate::config::{ConfigError, GatewayConfig, ModelConfig, refuse};
use crate::endpoints::EndpointRegistry;
use crate::keys::Caller;
use crate::metrics::PromptMetrics;

/// Most cached hashers: callers choose the salts.
const HASHERS_MAX: usize = 256;

/// Most block hashes of one request; later blocks do not improve the placement.
const BLOCKS_MAX: usize = 65_536;

/// Bytes of text in a pseudo-token, about the length of an English token.
const PSEUDO_TOKEN_BYTES: usize = 4;

/// Most tokens that a text prompt counts as. The router refuses prompts that fit no queue, and an
/// estimate must not cause a refusal.
const TEXT_TOKENS_MAX: usize = 1 << 20;

/// Bodies of at least this length are read on blocking threads; for shorter ones the handover costs
/// more than reading.
const LONG_BODY_BYTES: usize = 8 << 10;

/// Text that the long requests which are read at once may have together, in KiB. The tokenizers
/// library takes up to about 250 bytes for each byte of text, so 4 GiB for all of it.
const TEXT_KIB_AT_ONCE: u32 = 16 << 10;

/// Paths of requests with a prompt.
const PATHS: [&str; 3] = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"];

/// Marks the adapter name under which pseudo-tokens are hashed, so that they never match real
/// tokens. No adapter name contains NUL.
const TEXT_MARK: char = '\0';

/// Reads the prompts of requests.
#[derive(Debug)]
pub(crate) struct RequestReader {
    models: HashMap<String, ModelFiles>,
    tenants: Arc<Tenants>,
    hashers: Mutex<HashMap<HasherKey, Option<Arc<PrefixHasher>>>>,
    /// Bounds the long requests that are read at once to the number of processors.
    blocking_permits: Arc<Semaphore>,
    /// Bounds the text of long requests that are read at once, in KiB, and so their memory.
    text_permits: Arc<Semaphore>,
    metrics: PromptMetrics,
    /// Endpoints, which may list models that the configuration does not name.
    endpoints: EndpointRegistry,
}

/// Adapter and salt.
type HasherKey = (Option<String>, Option<String>);

/// Tokenizer, template and limits of one model.
#[derive(Debug, Default)]
struct ModelFiles {
    adapter: Option<String>,
    tokens: Option<Arc<CachedTokenizer>>,
    template: Option<Arc<Template>>,
    context_tokens: u32,
}

/// Loaded tokenizers and templates, by their paths.
type FileCache = BTreeMap<(PathBuf, PathBuf), (Arc<CachedTokenizer>, Option<Arc<Template>>)>;

/// Tokens, or pseudo-tokens.
enum PromptTokens {
    Tokens(Vec<u32>),
    Text(Vec<u32>),
}

impl RequestReader {
    /// Loads the tokenizers and templates of all models.
    pub(crate) fn load(
        config: &GatewayConfig,
        tenants: Arc<Tenants>,
        metrics: PromptMetrics,
    ) -> Result<RequestReader, ConfigError> {
        let mut files = FileCache::new();
        let mut models = HashMap::new();
        for model in &config.models {
            models.insert(model.name.clone(), ModelFiles::load(model, &mut files)?);
        }
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let blocking_permits = Arc::new(Semaphore::new(threads));
        Ok(RequestReader {
            models,
            tenants,
            hashers: Mutex::default(),
            blocking_permits,
            text_permits: Arc::new(Semaphore::new(TEXT_KIB_AT_ONCE as usize)),
            metrics,
            endpoints: EndpointRegistry::default(),
        })
    }

    /// Also accepts models that these endpoints list.
    pub(crate) fn with_endpoints(self, endpoints: &EndpointRegistry) -> RequestReader {
        RequestReader { endpoints: endpoints.clone(), ..self }
    }

    /// Tenants of the hashes.
    pub(crate) fn tenants(&self) -> &Arc<Tenants> {
        &self.tenants
    }

    /// Whether requests to `path` have a prompt.
    pub(crate) fn has_prompt(path: &str) -> bool {
        PATHS.contains(&path)
    }

    /// Runs `read` for a request of `bytes` bytes, on a blocking thread if it is long. All
    /// listeners read through this function, so that no long prompt blocks the runtime.
    pub(crate) async fn read_async(
        self: &Arc<RequestReader>,
        bytes: usize,
        read: impl FnOnce(&RequestReader) -> Result<ParsedRequest, PromptError> + Send + 'static,
    ) -> Result<ParsedRequest, PromptError> {
        if bytes < LONG_BODY_BYTES {
            return read(self);
        }
        // Further requests wait here; the number of requests in flight bounds them.
        let text_kib = u32::try_from(PromptBudget::of_body(bytes) >> 10).unwrap_or(u32::MAX);
        let text_permit = self.text_permits.clone().acquire_many_owned(text_kib.min(TEXT_KIB_AT_ONCE)).await;
        let permit = self.blocking_permits.clone().acquire_owned().await;
        let reader = self.clone();
        let reading = tokio::task::spawn_blocking(move || {
            let _turn = (permit, text_permit);
            read(&reader)
        });
        reading.await.unwrap_or_else(|_| Err(PromptError::Shape("the prompt cannot be read".into())))
    }

    /// Reads a request to `/v1/chat/completions`, `/v1/completions` or `/v1/embeddings` of a caller
    /// without a key.
    pub(crate) fn read(&self, path: &str, body: &[u8]) -> Result<ParsedRequest, PromptError> {
        self.read_of(&Caller::Anyone, path, body)
    }

    /// Reads a request of this caller.
    pub(crate) fn read_of(
        &self,
        caller: &Caller,
        path: &str,
        body: &[u8],
    ) -> Result<ParsedRequest, PromptError> {
        let body_bytes = body.len();
        let mut body = Body::parse(body)?;
        if caller.key().is_some() {
            if let Some(field) = body.salt_field() {
                return Err(PromptError::OwnSalt(field));
            }
            body.cache_salt = Some(caller.own_salt().map(str::to_owned));
        }
        let name = body.model.clone().unwrap_or_default();
        // The same answer as for a model that does not exist, which the caller cannot tell apart.
        if !caller.may_use(&name) {
            return Err(PromptError::UnknownModel(name));
        }
        if caller.has_models() && body.lora_path.is_some() {
            let text = "`lora_path` names an adapter that the API key may not use; name one by `model`";
            return Err(PromptError::Shape(text.into()));
        }
        let no_files = ModelFiles::default();
        let model = match self.models.get(&name) {
            Some(model) => model,
            None if self.models.is_empty() || self.endpoints.may_serve_model(&name) => &no_files,
            None => return Err(PromptError::UnknownModel(name)),
        };
        // An engine that truncates the prompt may be sent more than its context.
        let is_bounded = body.truncate_prompt_tokens.is_none();
        let budget = PromptBudget::new(body_bytes, if is_bounded { model.context_tokens } else { 0 });
        let (tokens, prompts) = match path {
            "/v1/chat/completions" => (chat_prompt(model, &body, budget)?, 1),
            "/v1/completions" => completion_prompt(model, &body, body.prompt.as_ref(), "prompt", budget)?,
            "/v1/embeddings" => completion_prompt(model, &body, body.input.as_ref(), "input", budget)?,
            other => return Err(PromptError::Shape(format!("requests to {other} have no prompt"))),
        };
        self.finish(name, model, &body, tokens, prompts)
    }

    fn finish(
        &self,
        name: String,
        model: &ModelFiles,
        body: &Body,
        tokens: PromptTokens,
        prompts: usize,
    ) -> Result<ParsedRequest, PromptError> {
        let (tokens, reading, adapter) = match tokens {
            PromptTokens::Tokens(tokens) => (tokens, PromptForm::Tokens, model.adapter.clone()),
            PromptTokens::Text(pieces) => (pieces, PromptForm::Text, Some(text_adapter(&name))),
        };
        let counted = match reading {
            PromptForm::Tokens => tokens.len(),
            PromptForm::Text => tokens.len().min(TEXT_TOKENS_MAX),
        };
        let input_tokens = u32::try_from(counted).unwrap_or(u32::MAX);
        if reading == PromptForm::Tokens && model.context_tokens > 0 && input_tokens > model.context_tokens {
            return Err(PromptError::TooLong { tokens: input_tokens, context: model.context_tokens });
        }
        let salt = body.cache_salt.clone().flatten();
        let hashes = match self.hasher(adapter, salt.clone()) {
            Some(hasher) => {
                let mut hashes = Vec::new();
                let hashed = BLOCKS_MAX.saturating_mul(self.tenants.block_tokens() as usize);
                hasher.extend(&mut hasher.start(), &tokens[..tokens.len().min(hashed)], &mut hashes);
                hashes
            }
            None => vec![],
        };
        self.metrics.prompt_read(reading, hashes.is_empty());
        let block_tokens = self.tenants.block_tokens();
        let (output_tokens, is_text) = (body.output_tokens(), reading == PromptForm::Text);
        let prompt = Prompt { hashes, block_tokens, input_tokens, output_tokens, is_text };
        let (stream, has_priority) = (body.stream.unwrap_or(false), body.priority.is_some());
        let is_cut = body.truncate_prompt_tokens == Some(-1) && model.context_tokens == 0;
        Ok(ParsedRequest {
            model: name,
            prompt,
            salt,
            stream,
            has_priority,
            steers_engine: body.steers_engine(),
            form: reading,
            prompt_count: prompts,
            is_cut,
        })
    }

    /// Hasher for this adapter and salt; `None` if no tenant has the salt, since such a prompt
    /// shares no blocks with others.
    fn hasher(&self, adapter: Option<String>, salt: Option<String>) -> Option<Arc<PrefixHasher>> {
        let key = (adapter, salt);
        if let Some(hasher) = self.hashers.lock().get(&key) {
            return hasher.clone();
        }
        let hasher = self.tenants.hasher(key.0.as_deref(), key.1.as_deref()).map(Arc::new)?;
        let mut hashers = self.hashers.lock();
        if hashers.len() >= HASHERS_MAX {
            hashers.clear();
        }
        hashers.insert(key, Some(hasher.clone()));
        Some(hasher)
    }
}

impl ModelFiles {
    fn load(config: &ModelConfig, files: &mut FileCache) -> Result<ModelFiles, ConfigError> {
        let adapter = (!config.adapter.is_empty()).then(|| config.adapter.clone());
        let mut model =
            ModelFiles { adapter, context_tokens: config.context_tokens, ..ModelFiles::default() };
        if config.tokenizer.as_os_str().is_empty() {
            return Ok(model);
        }
        let key = (config.tokenizer.clone(), config.chat_template.clone());
        // Adapters share the tokenizer of their base model in memory.
        if !files.contains_key(&key) {
            let named = |problem: String| format!("{:?}: {problem}", config.name);
            let tokens = CachedTokenizer::load(&config.tokenizer);
            let tokens = tokens.or_else(|problem| refuse("models", named(problem)))?;
            let template = Template::load(&config.chat_template, &config.tokenizer);
            let template = template.or_else(|problem| refuse("models", named(problem)))?;
            files.insert(key.clone(), (Arc::new(tokens), template.map(Arc::new)));
        }
        if let Some((tokens, template)) = files.get(&key) {
            (model.tokens, model.template) = (Some(tokens.clone()), template.clone());
        }
        Ok(model)
    }
}

/// A pseudo adapter name for text prompts of a model.
fn text_adapter(model: &str) -> String {
    let mut name: String = model.chars().take(60).collect();
    name.push(TEXT_MARK);
    name
}

fn chat_prompt(model: &ModelFiles, body: &Body, budget: PromptBudget) -> Result<PromptTokens, PromptError> {
    let Some(messages) = &body.messages else {
        return Err(PromptError::Shape("`messages` is missing".into()));
    };
    if messages.is_empty() {
        return Err(PromptError::Shape("`messages` is empty".into()));
    }
    let (Some(tokens), Some(template), None) = (&model.tokens, &model.template, &body.chat_template) else {
        return Ok(PromptTokens::Text(conversation_pseudo_tokens(body, messages, budget)));
    };
    let conversation = Conversation {
        messages,
        tools: body.tools.as_deref(),
        documents: body.documents.as_ref(),
        reasoning_effort: body.reasoning_effort.as_ref(),
        kwargs: body.chat_template_kwargs.as_ref(),
        add_generation_prompt: body.add_generation_prompt.unwrap_or(true),
        continue_final_message: body.continue_final_message.unwrap_or(false),
    };
    match template.render(&conversation, budget, SystemTime::now())? {
        Some(text) => tokenize(tokens, &text, body.add_special_tokens.unwrap_or(false), model, body),
        None => Ok(PromptTokens::Text(conversation_pseudo_tokens(body, messages, budget))),
    }
}

/// Reads a prompt of a completion or embedding request. Returns its tokens and the number of
/// prompts.
fn completion_prompt(
    model: &ModelFiles,
    body: &Body,
    input: Option<&Input>,
    key: &str,
    budget: PromptBudget,
) -> Result<(PromptTokens, usize), PromptError> {
    let Some(input) = input else { return Err(PromptError::Shape(format!("`{key}` is missing"))) };
    let Some((first, prompts)) = input.first() else {
        return Err(PromptError::Shape(format!("`{key}` is empty")));
    };
    let read = match (first, &model.tokens) {
        (PromptInput::Tokens(tokens), _) => match Truncation::from_request(body, model) {
            Some(kept) => PromptTokens::Tokens(kept.apply(tokens.to_vec())),
            None => PromptTokens::Text(tokens.to_vec()),
        },
        (PromptInput::Text(text), Some(_)) if text.len() > budget.text_bytes => {
            return Err(PromptError::TooMuchText { limit: budget.text_bytes });
        }
        (PromptInput::Text(text), Some(tokens)) => {
            tokenize(tokens, text, body.add_special_tokens.unwrap_or(true), model, body)?
        }
        (PromptInput::Text(text), None) => PromptTokens::Text(pseudo_tokens(text.as_bytes())),
    };
    Ok((read, prompts))
}

fn tokenize(
    tokens: &CachedTokenizer,
    text: &str,
    with_special: bool,
    model: &ModelFiles,
    body: &Body,
) -> Result<PromptTokens, PromptError> {
    let encode = |with_special| {
        let cut = tokens.encode(text, with_special);
        cut.map_err(|error| PromptError::Shape(format!("the prompt cannot be tokenized: {error}")))
    };
    let Some(truncation) = Truncation::from_request(body, model) else {
        return Ok(PromptTokens::Text(pseudo_tokens(text.as_bytes())));
    };
    let whole = encode(with_special)?;
    if !with_special || whole.len() <= truncation.max_tokens {
        return Ok(PromptTokens::Tokens(truncation.apply(whole)));
    }
    // Special tokens around the text are kept when the text is truncated.
    let kept = truncation.apply_inside(&whole, encode(false)?);
    Ok(kept.map_or_else(|| PromptTokens::Text(pseudo_tokens(text.as_bytes())), PromptTokens::Tokens))
}

/// Truncation of a prompt to `max_tokens`.
#[derive(Clone, Copy, Debug)]
struct Truncation {
    max_tokens: usize,
    keeps_start: bool,
}

impl Truncation {
    /// Truncation that the request asks for; `None` if the engine's behaviour for these values is
    /// unknown.
    fn from_request(body: &Body, model: &ModelFiles) -> Option<Truncation> {
        let keeps_start = match body.truncation_side.as_deref() {
            None | Some("left") => false,
            Some("right") => true,
            Some(_) => return None,
        };
        let max_tokens = match body.truncate_prompt_tokens {
            // If only the engine knows its context length, assume that the prompt fits.
            Some(-1) if model.context_tokens > 0 => model.context_tokens as usize,
            None | Some(-1) => usize::MAX,
            Some(most) => usize::try_from(most).ok().filter(|most| *most > 0)?,
        };
        Some(Truncation { max_tokens, keeps_start })
    }

    fn apply(self, mut tokens: Vec<u32>) -> Vec<u32> {
        match self.keeps_start {
            true => tokens.truncate(self.max_tokens),
            false => drop(tokens.drain(..tokens.len().saturating_sub(self.max_tokens))),
        }
        tokens
    }

    /// Truncates `inner` and keeps the special tokens that `whole` has around it. `None` if `whole`
    /// does not contain `inner`, or if the special tokens alone are too long.
    fn apply_inside(self, whole: &[u32], inner: Vec<u32>) -> Option<Vec<u32>> {
        let around = whole.len().checked_sub(inner.len())?;
        let max_tokens = self.max_tokens.checked_sub(around)?;
        let before = (0..=around).find(|before| whole[*before..].starts_with(&inner))?;
        let behind = &whole[before + inner.len()..];
        let kept = Truncation { max_tokens, ..self }.apply(inner);
        Some([&whole[..before], &kept, behind].concat())
    }
}

/// Pseudo-tokens of a conversation without a template: tools first, as in templates, then each
/// message. An image counts as many tokens as images usually have, independent of the length of its
/// data. Text beyond the budget is left out: it would not change where the request runs.
fn conversation_pseudo_tokens(body: &Body, messages: &[minijinja::Value], budget: PromptBudget) -> Vec<u32> {
    let mut text = BoundedText::new(budget.text_bytes);
    // A value that is no JSON counts as what could be written of it.
    let mut write = || -> Result<(), JsonError> {
        for tool in body.tools.iter().flatten() {
            python::write_json(&mut text, tool, &JsonStyle::default())?;
            text.write_char('\n')?;
        }
        for message in messages {
            messages::write_with_placeholders(&mut text, message)?;
            text.write_char('\n')?;
        }
        Ok(())
    };
    let _ = write();
    pseudo_tokens(text.into_string().as_bytes())
}

/// Splits bytes into pseudo-tokens of a fixed size, so that equal prefixes have equal blocks.
fn pseudo_tokens(bytes: &[u8]) -> Vec<u32> {
    let piece = |piece: &[u8]| {
        let mut word = [0; PSEUDO_TOKEN_BYTES];
        word[..piece.len()].copy_from_slice(piece);
        u32::from_le_bytes(word)
    };
    bytes.chunks(PSEUDO_TOKEN_BYTES).map(piece).collect()
}
