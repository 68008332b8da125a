//! Which models an engine says that it serves: its answer to `/v1/models`, as vLLM, SGLang and others write it.
//!
//! Pure. Not here: what is made of it (`crate::endpoints::models`).

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::endpoints::models::{Maker, Models, Served};

/// Names of one engine. An engine has a model and some adapters.
const MODELS_MAX: usize = 1_024;

/// Longest name, in bytes: paths are names, too.
const NAME_BYTES_MAX: usize = 512;

/// More tokens than any context has.
const CONTEXT_TOKENS_MAX: i64 = 1 << 30;

/// Of what is wrong with an answer, so much is said.
const PROBLEM_CHARS_MAX: usize = 200;

/// Why it is not known what an engine serves.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ModelsError {
    /// It is something else.
    #[error("what {authority} says of its models cannot be read: {problem}")]
    Json {
        /// Who.
        authority: String,
        /// What is wrong.
        problem: String,
    },
    /// It names none, or too many.
    #[error("{authority} lists {count} models, and 1 to {MODELS_MAX} were expected")]
    Count {
        /// Who.
        authority: String,
        /// How many.
        count: usize,
    },
    /// A name that is none.
    #[error(
        "{authority} lists a model whose name has {bytes} bytes, and 1 to {NAME_BYTES_MAX} were expected"
    )]
    Name {
        /// Who.
        authority: String,
        /// Its length.
        bytes: usize,
    },
    /// A length that cannot be.
    #[error(
        "{authority} says that max_model_len of {name:?} is {tokens}, which cannot be: 1 to {CONTEXT_TOKENS_MAX} tokens were expected"
    )]
    Context {
        /// Who.
        authority: String,
        /// Of which model.
        name: String,
        /// What it says.
        tokens: i64,
    },
}

impl ModelsError {
    /// As metrics name it.
    pub(super) fn name(&self) -> &'static str {
        match self {
            ModelsError::Json { .. } => "malformed",
            ModelsError::Count { .. } | ModelsError::Name { .. } | ModelsError::Context { .. } => "nonsense",
        }
    }
}

#[derive(Deserialize)]
struct List {
    data: Vec<Card>,
}

#[derive(Deserialize)]
struct Card {
    id: String,
    #[serde(default)]
    owned_by: Option<String>,
    #[serde(default)]
    parent: Option<String>,
    #[serde(default)]
    max_model_len: Option<i64>,
}

/// What an engine at `authority` says that it serves.
///
/// # Errors
/// [`ModelsError`]; nothing of an answer counts of which a part cannot be.
pub(super) fn read(body: &[u8], authority: &str) -> Result<Models, ModelsError> {
    let whose = || authority.to_owned();
    let list: List = serde_json::from_slice(body)
        // What was found in place of what was expected may be long.
        .map_err(|error| ModelsError::Json {
            authority: whose(),
            problem: error.to_string().chars().take(PROBLEM_CHARS_MAX).collect(),
        })?;
    let count = list.data.len();
    if !(1..=MODELS_MAX).contains(&count) {
        return Err(ModelsError::Count { authority: whose(), count });
    }
    let maker = match list.data[0].owned_by.as_deref() {
        Some("vllm") => Maker::Vllm,
        Some("sglang") => Maker::Sglang,
        Some(_) | None => Maker::Other,
    };
    let mut by_name = BTreeMap::new();
    for Card { id, parent, max_model_len, .. } in list.data {
        for name in [Some(&id), parent.as_ref()].into_iter().flatten() {
            if !(1..=NAME_BYTES_MAX).contains(&name.len()) {
                return Err(ModelsError::Name { authority: whose(), bytes: name.len() });
            }
        }
        let context_tokens = match max_model_len {
            None => None,
            Some(tokens @ 1..=CONTEXT_TOKENS_MAX) => u32::try_from(tokens).ok(),
            Some(tokens) => {
                let name = id.chars().take(64).collect();
                return Err(ModelsError::Context { authority: whose(), name, tokens });
            }
        };
        // Of two cards with one name the engine takes the first.
        by_name.entry(id).or_insert(Served { parent, context_tokens });
    }
    Ok(Models { maker, by_name })
}

#[cfg(test)]
mod tests {
    use kvfleet_errors_doc::says;

    use super::*;

    fn read(body: &str) -> Result<Models, ModelsError> {
        super::read(body.as_bytes(), "10.0.0.4:8000")
    }

    fn all(models: &Models) -> Vec<(&str, Option<&str>, Option<u32>)> {
        models
            .by_name
            .iter()
            .map(|(name, served)| (name.as_str(), served.parent.as_deref(), served.context_tokens))
            .collect()
    }

    #[test]
    fn vllm_lists_its_names_and_adapters_with_their_model() {
        let body = r#"{"object":"list","data":[
            {"id":"qwen3-8b","object":"model","created":1795576520,"owned_by":"vllm","root":"Qwen/Qwen3-8B","parent":null,
             "max_model_len":40960,"permission":[{"id":"modelperm-1","object":"model_permission","created":1795576520,
             "allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,"allow_search_indices":false,
             "allow_view":true,"allow_fine_tuning":false,"organization":"*","group":null,"is_blocking":false}]},
            {"id":"Qwen/Qwen3-8B","object":"model","created":1795576520,"owned_by":"vllm","root":"Qwen/Qwen3-8B","parent":null,
             "max_model_len":40960,"permission":[]},
            {"id":"french","object":"model","created":1795576520,"owned_by":"vllm","root":"/adapters/french","parent":"qwen3-8b",
             "max_model_len":null,"permission":[]}]}"#;
        let models = read(body).expect("is read");
        assert_eq!(models.maker, Maker::Vllm);
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
        assert_eq!((models.maker, models.by_name.len()), (Maker::Sglang, 2));
        assert_eq!(models.context_tokens("meta-llama/Llama-3.1-8B-Instruct:lora0"), Some(131_072));
    }

    #[test]
    fn whoever_else_speaks_openai_says_less() {
        let models =
            read(r#"{"data":[{"id":"m"},{"id":"m","max_model_len":7}],"models":[]}"#).expect("is read");
        assert_eq!((models.maker, all(&models)), (Maker::Other, vec![("m", None, None)]));
    }

    #[test]
    fn what_cannot_be_is_said() {
        let refused = |body: &str| read(body).expect_err("is refused").to_string();
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
