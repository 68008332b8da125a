//! The JSON of a request, limited to the fields that affect its prompt.
//!
//! The engine reads and validates all other fields. Not here: tokens and hashes (`reader.rs`).

use minijinja::Value;
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

use super::PromptError;

/// Fields that affect the prompt or its placement.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Body {
    pub(super) model: Option<String>,
    pub(super) stream: Option<bool>,
    pub(super) priority: Option<IgnoredAny>,
    pub(super) kv_transfer_params: Option<IgnoredAny>,
    pub(super) data_parallel_rank: Option<IgnoredAny>,
    pub(super) routed_dp_rank: Option<IgnoredAny>,
    pub(super) disagg_prefill_dp_rank: Option<IgnoredAny>,
    pub(super) bootstrap_host: Option<IgnoredAny>,
    pub(super) bootstrap_port: Option<IgnoredAny>,
    pub(super) bootstrap_room: Option<IgnoredAny>,
    /// The outer value is `None` if the body has no such field, the inner one if it is null.
    #[serde(deserialize_with = "present")]
    pub(super) cache_salt: Option<Option<String>>,
    pub(super) extra_key: Option<IgnoredAny>,
    pub(super) lora_path: Option<IgnoredAny>,
    pub(super) max_tokens: Option<u32>,
    pub(super) max_completion_tokens: Option<u32>,
    pub(super) prompt: Option<Input>,
    pub(super) input: Option<Input>,
    pub(super) messages: Option<Vec<Value>>,
    pub(super) tools: Option<Vec<Value>>,
    pub(super) documents: Option<Value>,
    pub(super) chat_template: Option<Value>,
    pub(super) chat_template_kwargs: Option<Value>,
    pub(super) add_generation_prompt: Option<bool>,
    pub(super) continue_final_message: Option<bool>,
    pub(super) add_special_tokens: Option<bool>,
    pub(super) reasoning_effort: Option<Value>,
    pub(super) truncate_prompt_tokens: Option<i64>,
    pub(super) truncation_side: Option<String>,
}

/// Distinguishes a field that is null from none.
fn present<'de, D: Deserializer<'de>>(field: D) -> Result<Option<Option<String>>, D::Error> {
    Option::deserialize(field).map(Some)
}

/// Names of fields that steer the engine of a request: the transfer of its KV (vLLM, SGLang),
/// the rank that computes it, and its place in the queue.
pub(crate) const STEERING_FIELDS: [&str; 8] = [
    "priority",
    "kv_transfer_params",
    "data_parallel_rank",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
];

/// The accepted forms of `prompt` and `input`.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "`prompt` and `input` are text, a list of texts, a list of token ids, or a list of such lists"
)]
pub(super) enum Input {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    ManyTokens(Vec<Vec<u32>>),
}

/// One prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PromptInput<'a> {
    Text(&'a str),
    Tokens(&'a [u32]),
}

impl Input {
    /// The first prompt, and the number of prompts; `None` if there are none.
    pub(super) fn first(&self) -> Option<(PromptInput<'_>, usize)> {
        match self {
            Input::Text(text) => Some((PromptInput::Text(text), 1)),
            Input::Tokens(tokens) => (!tokens.is_empty()).then_some((PromptInput::Tokens(tokens), 1)),
            Input::Texts(texts) => Some((PromptInput::Text(texts.first()?), texts.len())),
            Input::ManyTokens(lists) => Some((PromptInput::Tokens(lists.first()?), lists.len())),
        }
    }
}

impl Body {
    pub(super) fn parse(bytes: &[u8]) -> Result<Body, PromptError> {
        // serde would accept a list as the struct's fields in order.
        if bytes.trim_ascii_start().first() == Some(&b'[') {
            return Err(PromptError::Shape("the request is a list; send one JSON object".into()));
        }
        serde_json::from_slice(bytes).map_err(|error| match error.classify() {
            serde_json::error::Category::Data => {
                PromptError::Shape(format!("the request is not as expected: {error}"))
            }
            _ => PromptError::Json(error.to_string()),
        })
    }

    /// Whether it has one of [`STEERING_FIELDS`].
    pub(super) fn steers_engine(&self) -> bool {
        let fields = [
            &self.priority,
            &self.kv_transfer_params,
            &self.data_parallel_rank,
            &self.routed_dp_rank,
            &self.disagg_prefill_dp_rank,
            &self.bootstrap_host,
            &self.bootstrap_port,
            &self.bootstrap_room,
        ];
        fields.into_iter().any(Option::is_some)
    }

    /// Name of a field that decides which prefix cache an engine uses, if there is one. A
    /// `cache_salt` of null counts: engines would take it instead of a salt that the gateway adds.
    /// SGLang joins `cache_salt` and `extra_key` to one text, which may equal another tenant's salt.
    pub(super) fn salt_field(&self) -> Option<&'static str> {
        match (&self.cache_salt, &self.extra_key) {
            (Some(_), _) => Some("cache_salt"),
            (None, Some(_)) => Some("extra_key"),
            (None, None) => None,
        }
    }

    /// Tokens that may be generated; 0 when unknown.
    pub(super) fn output_tokens(&self) -> u32 {
        self.max_completion_tokens.or(self.max_tokens).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_steering_field_is_noticed() {
        for name in STEERING_FIELDS {
            let body = Body::parse(format!(r#"{{"{name}":{{"a":1}}}}"#).as_bytes());
            assert!(body.is_ok_and(|body| body.steers_engine()), "{name}");
            let twice = Body::parse(format!(r#"{{"{name}":1,"{name}":2}}"#).as_bytes());
            assert!(twice.is_err(), "{name} twice: engines may read another one than the gateway");
        }
        assert!(Body::parse(b"{}").is_ok_and(|body| !body.steers_engine()));
    }
}
