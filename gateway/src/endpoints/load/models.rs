//! Parses an engine's answer to `/v1/models`, in the forms of vLLM, SGLang and other
//! OpenAI-compatible servers.
//!
//! Pure. Not here: the use of the list (`crate::endpoints::models`).

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::endpoints::models::{EngineKind, ServedModel, ServedModels};

/// Most names of one engine. An engine has one model and some adapters.
const MODELS_MAX: usize = 1_024;

/// Longest name in bytes; paths are valid names.
const NAME_BYTES_MAX: usize = 512;

/// Longest plausible context.
const CONTEXT_TOKENS_MAX: i64 = 1 << 30;

/// Longest error text of the parser that is kept.
const PROBLEM_CHARS_MAX: usize = 200;

/// Why the models of an engine are unknown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ModelListError {
    /// The answer is not valid.
    #[error("the model list of {authority} cannot be read: {problem}")]
    Json {
        /// Address of the engine.
        authority: String,
        /// Error of the parser.
        problem: String,
    },
    /// The list is empty or too long.
    #[error("{authority} lists {count} models, but 1 to {MODELS_MAX} were expected")]
    Count {
        /// Address of the engine.
        authority: String,
        /// Number of models.
        count: usize,
    },
    /// The length of a name is invalid.
    #[error("{authority} lists a model name of {bytes} bytes, but 1 to {NAME_BYTES_MAX} were expected")]
    Name {
        /// Address of the engine.
        authority: String,
        /// Length of the name in bytes.
        bytes: usize,
    },
    /// The context length is invalid.
    #[error(
        "{authority} reports max_model_len {tokens} for {name:?}, but 1 to {CONTEXT_TOKENS_MAX} tokens were expected"
    )]
    Context {
        /// Address of the engine.
        authority: String,
        /// Name of the model.
        name: String,
        /// Reported context length.
        tokens: i64,
    },
}

impl ModelListError {
    /// Value of the metric label.
    pub(super) fn label(&self) -> &'static str {
        match self {
            ModelListError::Json { .. } => "malformed",
            ModelListError::Count { .. } | ModelListError::Name { .. } | ModelListError::Context { .. } => {
                "nonsense"
            }
        }
    }
}

#[derive(Deserialize)]
struct ModelsAnswer {
    data: Vec<ModelEntry>,
}

#[derive(Deserialize)]
struct ModelEntry {
    id: String,
    #[serde(default)]
    owned_by: Option<String>,
    #[serde(default)]
    parent: Option<String>,
    #[serde(default)]
    max_model_len: Option<i64>,
}

/// Models that the engine at `authority` lists.
///
/// # Errors
/// [`ModelListError`]; one invalid entry invalidates the whole answer.
pub(super) fn parse(body: &[u8], authority: &str) -> Result<ServedModels, ModelListError> {
    let owned_authority = || authority.to_owned();
    let list: ModelsAnswer = serde_json::from_slice(body)
        // The parser's error may quote a long part of the answer.
        .map_err(|error| ModelListError::Json {
            authority: owned_authority(),
            problem: error.to_string().chars().take(PROBLEM_CHARS_MAX).collect(),
        })?;
    let count = list.data.len();
    if !(1..=MODELS_MAX).contains(&count) {
        return Err(ModelListError::Count { authority: owned_authority(), count });
    }
    let engine = match list.data[0].owned_by.as_deref() {
        Some("vllm") => EngineKind::Vllm,
        Some("sglang") => EngineKind::Sglang,
        Some(_) | None => EngineKind::Other,
    };
    let mut by_name = BTreeMap::new();
    for ModelEntry { id, parent, max_model_len, .. } in list.data {
        for name in [Some(&id), parent.as_ref()].into_iter().flatten() {
            if !(1..=NAME_BYTES_MAX).contains(&name.len()) {
                return Err(ModelListError::Name { authority: owned_authority(), bytes: name.len() });
            }
        }
        let context_tokens = match max_model_len {
            None => None,
            Some(tokens @ 1..=CONTEXT_TOKENS_MAX) => u32::try_from(tokens).ok(),
            Some(tokens) => {
                let name = id.chars().take(64).collect();
                return Err(ModelListError::Context { authority: owned_authority(), name, tokens });
            }
        };
        // Engines use the first of two entries with the same name.
        by_name.entry(id).or_insert(ServedModel { parent, context_tokens });
    }
    Ok(ServedModels { engine, by_name })
}

#[cfg(test)]
mod tests {
    use kvfleet_errors_doc::says;

    use super::*;

    fn read(body: &str) -> Result<ServedModels, ModelListError> {
        parse(body.as_bytes(), "10.0.0.4:8000")
    }

    fn all(models: &ServedModels) -> Vec<(&str, Option<&str>, Option<u32>)> {
        models
            .by_name
            .iter()
            .map(|(name, served)| (name.as_str(), served.parent.as_deref(), served.context_tokens))
            .collect()
    }

    #[test]
    fn vllm_lists_its_names_and_adapters_with_their_model() {
        let body = r#"{"object":"list","data":[
            {"id":"qwen3-8b","object":"model","created":1795576520,"owned_by":"vllm",
             "root":"Qwen/Qwen3-8B","parent":null,
             "max_model_len":40960,"permission":[{"id":"modelperm-1","object":"model_permission","created":1795576520,
             "allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,"allow_search_indices":false,
             "allow_view":true,"allow_fine_tuning":false,"organization":"*","group":null,"is_blocking":false}]},
            {"id":"Qwen/Qwen3-8B","object":"model","created":1795576520,"owned_by":"vllm",
             "root":"Qwen/Qwen3-8B","parent":null,
             "max_model_len":40960,"permission":[]},
            {"id":"french","object":"model","created":1795576520,"owned_by":"vllm",
             "root":"/adapters/french","parent":"qwen3-8b",
             "max_model_len":null,"permission":[]}]}"#;
        let models = read(body).expect("is read");
        assert_eq!(models.engine, EngineKind::Vllm);
        assert_eq!(
            all(&models),
            [
                ("Qwen/Qwen3-8B", None, Some(40_960)),
                ("french", Some("qwen3-8b"), None),
                ("qwen3-8b", None, Some(40_960))
            ]
        );
        assert_eq!(models.context_tokens("french"), Some(40_960));
    }

    #[test]
    fn sglang_lists_its_model_and_adapters() {
        let body = r#"{"object":"list","data":[
            {"id":"meta-llama/Llama-3.1-8B-Instruct","object":"model","created":1795576520,"owned_by":"sglang",
             "root":"meta-llama/Llama-3.1-8B-Instruct","parent":null,"max_model_len":131072},
            {"id":"lora0","object":"model","created":1795576520,"owned_by":"sglang","root":"/adapters/lora0",
             "parent":"meta-llama/Llama-3.1-8B-Instruct","max_model_len":null}]}"#;
        let models = read(body).expect("is read");
        assert_eq!((models.engine, models.by_name.len()), (EngineKind::Sglang, 2));
        assert_eq!(models.context_tokens("meta-llama/Llama-3.1-8B-Instruct:lora0"), Some(131_072));
    }

    #[test]
    fn reads_minimal_openai_answers() {
        let models =
            read(r#"{"data":[{"id":"m"},{"id":"m","max_model_len":7}],"models":[]}"#).expect("is read");
        assert_eq!((models.engine, all(&models)), (EngineKind::Other, vec![("m", None, None)]));
    }

    #[test]
    fn explains_invalid_answers() {
        let refused = |body: &str| read(body).expect_err("must be refused").to_string();
        says("an engine's models that are a page", &refused("<html><body>404</body></html>"), &[]);
        says("an engine's models that are no list", &refused(r#"{"object":"list","data":{}}"#), &[]);
        says("an engine that lists no model", &refused(r#"{"object":"list","data":[]}"#), &[]);
        says("an engine's model without a name", &refused(r#"{"data":[{"id":""}]}"#), &[]);
        let negative = r#"{"data":[{"id":"m","max_model_len":-1}]}"#;
        says("an engine's context that cannot be", &refused(negative), &[]);
        let many: Vec<_> = (0..=MODELS_MAX).map(|nth| format!("{{\"id\":\"m{nth}\"}}")).collect();
        says(
            "an engine with models without end",
            &refused(&format!("{{\"data\":[{}]}}", many.join(","))),
            &[],
        );
        let long = "n".repeat(NAME_BYTES_MAX + 1);
        for body in [
            String::new(),
            "[".repeat(100_000),
            "\u{0}".to_owned(),
            "{}".to_owned(),
            "[]".to_owned(),
            r#"{"data":[{"object":"model"}]}"#.to_owned(),
            r#"{"data":[{"id":7}]}"#.to_owned(),
            format!(r#"{{"data":[{{"id":"m","max_model_len":"{}"}}]}}"#, "9".repeat(10_000)),
            r#"{"data":[{"id":"m","max_model_len":"long"}]}"#.to_owned(),
            r#"{"data":[{"id":"m","max_model_len":1e400}]}"#.to_owned(),
            r#"{"data":[{"id":"m","max_model_len":0}]}"#.to_owned(),
            r#"{"data":[{"id":"m","max_model_len":9223372036854775807}]}"#.to_owned(),
            r#"{"data":[{"id":"m","max_model_len":4096.5}]}"#.to_owned(),
            format!(r#"{{"data":[{{"id":"{long}"}}]}}"#),
            format!(r#"{{"data":[{{"id":"m","parent":"{long}"}}]}}"#),
        ] {
            let said = refused(&body);
            assert!(said.len() < 400, "{said}");
        }
    }
}
