//! Reads prompts: which model, which tokens, and whose hashes.
//!
//! It is built once and shared by all doors. Not here: HTTP.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use kv_core::prefix::PrefixHasher;
use kvfleet_router::Tenants;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::body::{Body, Input, One};
use super::messages;
use super::python::{self, JsonStyle};
use super::template::{Conversation, Template};
use super::tokens::Tokens;
use super::{Asked, Prompt, Reading, Unreadable};
use crate::config::{ConfigError, DoorsConfig, ModelConfig, refuse};
use crate::endpoints::Endpoints;
use crate::metrics::PromptMetrics;

/// Hashers that are kept; each is a table of keys, and their names come from requests.
const HASHERS_MAX: usize = 256;

/// Blocks of one request that the router takes; what is behind them routes no better.
const BLOCKS_MAX: usize = 65_536;

/// Bytes of text that stand for one token where no tokenizer is there: about what a token of English is.
const PIECE_BYTES: usize = 4;

/// Tokens that a prompt read as text counts as at most. The router refuses what no queue holds, and text is a guess: a guess refuses nobody.
const TEXT_TOKENS_MAX: usize = 1 << 20;

/// Bodies from this length on are read by threads that may take long; below it, handing over takes longer than reading.
const LONG_BODY_BYTES: usize = 8 << 10;

/// Paths that have a prompt.
const PATHS: [&str; 3] = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"];

/// In what stands for an adapter's name, so that pieces of text hash as no tokens do. No adapter has it: it is no text for a command line.
const TEXT_MARK: char = '\0';

/// Reads the prompts of requests.
#[derive(Debug)]
pub(crate) struct Reader {
    models: HashMap<String, Model>,
    tenants: Arc<Tenants>,
    hashers: Mutex<HashMap<Whose, Option<Arc<PrefixHasher>>>>,
    /// As many long ones are read at once as there are processors.
    turns: Arc<Semaphore>,
    metrics: PromptMetrics,
    /// Engines, each of which may serve models that the configuration does not name.
    endpoints: Endpoints,
}

/// Adapter and salt.
type Whose = (Option<String>, Option<String>);

/// How the prompts of one model are read.
#[derive(Debug, Default)]
struct Model {
    adapter: Option<String>,
    tokens: Option<Arc<Tokens>>,
    template: Option<Arc<Template>>,
    context_tokens: u32,
}

/// What was read from a tokenizer and a template, by their paths.
type Files = BTreeMap<(PathBuf, PathBuf), (Arc<Tokens>, Option<Arc<Template>>)>;

/// Tokens, or what stands for them.
enum Read {
    Tokens(Vec<u32>),
    Text(Vec<u32>),
}

impl Reader {
    /// Reads the files of all models.
    pub(crate) fn load(
        config: &DoorsConfig,
        tenants: Arc<Tenants>,
        metrics: PromptMetrics,
    ) -> Result<Reader, ConfigError> {
        let mut files = Files::new();
        let mut models = HashMap::new();
        for model in &config.models {
            models.insert(model.name.clone(), Model::load(model, &mut files)?);
        }
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let turns = Arc::new(Semaphore::new(threads));
        let endpoints = Endpoints::default();
        Ok(Reader { models, tenants, hashers: Mutex::default(), turns, metrics, endpoints })
    }

    /// The same where models that these engines list are served besides.
    pub(crate) fn of_engines(self, endpoints: &Endpoints) -> Reader {
        Reader { endpoints: endpoints.clone(), ..self }
    }

    /// Whether requests to `path` have a prompt.
    pub(crate) fn reads(path: &str) -> bool {
        PATHS.contains(&path)
    }

    /// Reads a request of so many bytes, on a thread that may take long if that is many. Both doors read by this alone: what takes long on a thread
    /// of all requests stops all of them.
    pub(crate) async fn read_in_turn(
        self: &Arc<Reader>,
        bytes: usize,
        read: impl FnOnce(&Reader) -> Result<Asked, Unreadable> + Send + 'static,
    ) -> Result<Asked, Unreadable> {
        if bytes < LONG_BODY_BYTES {
            return read(self);
        }
        // The rest waits its turn, and there are no more than requests under way.
        let turn = self.turns.clone().acquire_owned().await;
        let reader = self.clone();
        let reading = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            read(&reader)
        });
        reading.await.unwrap_or_else(|_| Err(Unreadable::Shape("the prompt cannot be read".into())))
    }

    /// Reads a request to `path`: `/v1/chat/completions`, `/v1/completions` or `/v1/embeddings`.
    pub(crate) fn read(&self, path: &str, body: &[u8]) -> Result<Asked, Unreadable> {
        let body = Body::parse(body)?;
        let name = body.model.clone().unwrap_or_default();
        let any = Model::default();
        let model = match self.models.get(&name) {
            Some(model) => model,
            None if self.models.is_empty() || self.endpoints.lists(&name) => &any,
            None => return Err(Unreadable::UnknownModel(name)),
        };
        let (read, prompts) = match path {
            "/v1/chat/completions" => (chat(model, &body)?, 1),
            "/v1/completions" => plain(model, &body, body.prompt.as_ref(), "prompt")?,
            "/v1/embeddings" => plain(model, &body, body.input.as_ref(), "input")?,
            other => return Err(Unreadable::Shape(format!("no prompt is read from {other}"))),
        };
        self.asked(name, model, &body, read, prompts)
    }

    fn asked(
        &self,
        name: String,
        model: &Model,
        body: &Body,
        read: Read,
        prompts: usize,
    ) -> Result<Asked, Unreadable> {
        let (tokens, reading, adapter) = match read {
            Read::Tokens(tokens) => (tokens, Reading::Tokens, model.adapter.clone()),
            Read::Text(pieces) => (pieces, Reading::Text, Some(text_adapter(&name))),
        };
        let counted = match reading {
            Reading::Tokens => tokens.len(),
            Reading::Text => tokens.len().min(TEXT_TOKENS_MAX),
        };
        let input_tokens = u32::try_from(counted).unwrap_or(u32::MAX);
        if reading == Reading::Tokens && model.context_tokens > 0 && input_tokens > model.context_tokens {
            return Err(Unreadable::TooLong { tokens: input_tokens, context: model.context_tokens });
        }
        let salt = body.cache_salt.clone();
        let hashes = match self.hasher(adapter, salt.clone()) {
            Some(hasher) => {
                let mut hashes = Vec::new();
                hasher.extend(&mut hasher.start(), &tokens, &mut hashes);
                hashes.truncate(BLOCKS_MAX);
                hashes
            }
            None => vec![],
        };
        self.metrics.read(reading, hashes.is_empty());
        let block_tokens = self.tenants.block_tokens();
        let (output_tokens, is_text) = (body.output_tokens(), reading == Reading::Text);
        let prompt = Prompt { hashes, block_tokens, input_tokens, output_tokens, is_text };
        let (stream, has_priority) = (body.stream.unwrap_or(false), body.priority.is_some());
        let is_cut = body.truncate_prompt_tokens == Some(-1) && model.context_tokens == 0;
        Ok(Asked { model: name, prompt, salt, stream, has_priority, reading, prompts, is_cut })
    }

    /// Who hashes these; nobody where no tenant has the salt: such prompts have nothing in common with others that we know of.
    fn hasher(&self, adapter: Option<String>, salt: Option<String>) -> Option<Arc<PrefixHasher>> {
        let whose = (adapter, salt);
        if let Some(hasher) = self.hashers.lock().get(&whose) {
            return hasher.clone();
        }
        let hasher = self.tenants.hasher(whose.0.as_deref(), whose.1.as_deref()).map(Arc::new)?;
        let mut hashers = self.hashers.lock();
        if hashers.len() >= HASHERS_MAX {
            hashers.clear();
        }
        hashers.insert(whose, Some(hasher.clone()));
        Some(hasher)
    }
}

impl Model {
    fn load(config: &ModelConfig, files: &mut Files) -> Result<Model, ConfigError> {
        let adapter = (!config.adapter.is_empty()).then(|| config.adapter.clone());
        let mut model = Model { adapter, context_tokens: config.context_tokens, ..Model::default() };
        if config.tokenizer.as_os_str().is_empty() {
            return Ok(model);
        }
        let key = (config.tokenizer.clone(), config.chat_template.clone());
        // An adapter has its base's tokenizer: it is in memory once.
        if !files.contains_key(&key) {
            let whose = |problem: String| format!("{:?}: {problem}", config.name);
            let tokens = Tokens::load(&config.tokenizer);
            let tokens = tokens.or_else(|problem| refuse("models", whose(problem)))?;
            let template = Template::load(&config.chat_template, &config.tokenizer);
            let template = template.or_else(|problem| refuse("models", whose(problem)))?;
            files.insert(key.clone(), (Arc::new(tokens), template.map(Arc::new)));
        }
        if let Some((tokens, template)) = files.get(&key) {
            (model.tokens, model.template) = (Some(tokens.clone()), template.clone());
        }
        Ok(model)
    }
}

/// A name that is no adapter's, by the model's.
fn text_adapter(model: &str) -> String {
    let mut name: String = model.chars().take(60).collect();
    name.push(TEXT_MARK);
    name
}

fn chat(model: &Model, body: &Body) -> Result<Read, Unreadable> {
    let Some(messages) = &body.messages else {
        return Err(Unreadable::Shape("`messages` is missing".into()));
    };
    if messages.is_empty() {
        return Err(Unreadable::Shape("`messages` is empty".into()));
    }
    let (Some(tokens), Some(template), None) = (&model.tokens, &model.template, &body.chat_template) else {
        return Ok(Read::Text(conversation_pieces(body, messages)));
    };
    let conversation = Conversation {
        messages,
        tools: body.tools.as_deref(),
        documents: body.documents.as_ref(),
        reasoning_effort: body.reasoning_effort.as_ref(),
        more: body.chat_template_kwargs.as_ref(),
        asks_for_answer: body.add_generation_prompt.unwrap_or(true),
        continues: body.continue_final_message.unwrap_or(false),
    };
    match template.render(&conversation, SystemTime::now())? {
        Some(text) => cut(tokens, &text, body.add_special_tokens.unwrap_or(false), model, body),
        None => Ok(Read::Text(conversation_pieces(body, messages))),
    }
}

/// A prompt without a conversation around it.
fn plain(model: &Model, body: &Body, input: Option<&Input>, key: &str) -> Result<(Read, usize), Unreadable> {
    let Some(input) = input else { return Err(Unreadable::Shape(format!("`{key}` is missing"))) };
    let Some((first, prompts)) = input.first() else {
        return Err(Unreadable::Shape(format!("`{key}` is empty")));
    };
    let read = match (first, &model.tokens) {
        (One::Tokens(tokens), _) => match Kept::of(body, model) {
            Some(kept) => Read::Tokens(kept.of_tokens(tokens.to_vec())),
            None => Read::Text(tokens.to_vec()),
        },
        (One::Text(text), Some(tokens)) => {
            cut(tokens, text, body.add_special_tokens.unwrap_or(true), model, body)?
        }
        (One::Text(text), None) => Read::Text(pieces(text.as_bytes())),
    };
    Ok((read, prompts))
}

fn cut(
    tokens: &Tokens,
    text: &str,
    with_special: bool,
    model: &Model,
    body: &Body,
) -> Result<Read, Unreadable> {
    let of = |with_special| {
        let cut = tokens.of(text, with_special);
        cut.map_err(|error| Unreadable::Shape(format!("the prompt cannot be cut into tokens: {error}")))
    };
    let Some(kept) = Kept::of(body, model) else { return Ok(Read::Text(pieces(text.as_bytes()))) };
    let whole = of(with_special)?;
    if !with_special || whole.len() <= kept.most {
        return Ok(Read::Tokens(kept.of_tokens(whole)));
    }
    // Special tokens around a text stay around what is kept of it.
    let kept = kept.inside(&whole, of(false)?);
    Ok(kept.map_or_else(|| Read::Text(pieces(text.as_bytes())), Read::Tokens))
}

/// How much of a prompt is kept, and of which end.
#[derive(Clone, Copy, Debug)]
struct Kept {
    most: usize,
    is_first: bool,
}

impl Kept {
    /// As the request says; nothing where we do not know what an engine makes of that.
    fn of(body: &Body, model: &Model) -> Option<Kept> {
        let is_first = match body.truncation_side.as_deref() {
            None | Some("left") => false,
            Some("right") => true,
            Some(_) => return None,
        };
        let most = match body.truncate_prompt_tokens {
            // Where only the engine knows its length, most prompts are shorter.
            Some(-1) if model.context_tokens > 0 => model.context_tokens as usize,
            None | Some(-1) => usize::MAX,
            Some(most) => usize::try_from(most).ok().filter(|most| *most > 0)?,
        };
        Some(Kept { most, is_first })
    }

    fn of_tokens(self, mut tokens: Vec<u32>) -> Vec<u32> {
        match self.is_first {
            true => tokens.truncate(self.most),
            false => drop(tokens.drain(..tokens.len().saturating_sub(self.most))),
        }
        tokens
    }

    /// What is kept of `inner`, with what `whole` has around it; nothing where it is not around it, or alone is too long.
    fn inside(self, whole: &[u32], inner: Vec<u32>) -> Option<Vec<u32>> {
        let around = whole.len().checked_sub(inner.len())?;
        let most = self.most.checked_sub(around)?;
        let before = (0..=around).find(|before| whole[*before..].starts_with(&inner))?;
        let behind = &whole[before + inner.len()..];
        let kept = Kept { most, ..self }.of_tokens(inner);
        Some([&whole[..before], &kept, behind].concat())
    }
}

/// What stands for the tokens of a conversation that no template is there for: tools first, as templates have them, then each message. An image
/// counts as what images have in tokens, and not as its letters.
fn conversation_pieces(body: &Body, messages: &[minijinja::Value]) -> Vec<u32> {
    let mut text = String::new();
    let write = |text: &mut String, value: &minijinja::Value| {
        text.push_str(&python::json(value, &JsonStyle::default()).unwrap_or_default());
        text.push('\n');
    };
    body.tools.iter().flatten().for_each(|tool| write(&mut text, tool));
    messages.iter().for_each(|message| write(&mut text, &messages::with_marks(message)));
    pieces(text.as_bytes())
}

/// Pieces of a fixed size, so that equal beginnings have equal blocks.
fn pieces(bytes: &[u8]) -> Vec<u32> {
    let piece = |piece: &[u8]| {
        let mut word = [0; PIECE_BYTES];
        word[..piece.len()].copy_from_slice(piece);
        u32::from_le_bytes(word)
    };
    bytes.chunks(PIECE_BYTES).map(piece).collect()
}
