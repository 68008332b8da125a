//! Models that engines serve by their own lists, and the check which engines can run a request by
//! model and context length.
//!
//! Pure. An engine without a list can run anything. Not here: parsing the lists (`load/models.rs`),
//! and the choice among the engines that fit (the router).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kv_core::schedule::UnfitReason;

/// Most model names in a refusal.
const LISTED_NAMES_MAX: usize = 16;

/// Kind of engine, by its model list. It decides whether the engine refuses names that it does not
/// list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EngineKind {
    /// vLLM: refuses unlisted names, except adapters that it loads on demand.
    Vllm,
    /// SGLang: serves its model under any name, and adapters as `model:adapter`.
    Sglang,
    /// Any other engine.
    Other,
}

/// One entry of an engine's model list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ServedModel {
    /// Base model, if the entry is an adapter.
    pub(crate) parent: Option<String>,
    /// Longest prompt plus answer, in tokens; `None` if not reported.
    pub(crate) context_tokens: Option<u32>,
}

/// Model list of one engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServedModels {
    pub(crate) engine: EngineKind,
    pub(crate) by_name: BTreeMap<String, ServedModel>,
}

/// Whether an engine serves a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ServeMatch {
    No,
    /// Not listed, but the engine may serve it.
    Maybe,
    Yes,
}

/// Configured model names, each with whether it is an adapter.
pub(crate) type ConfiguredModels = BTreeMap<String, bool>;

impl ServedModels {
    /// Whether the engine may serve a model of this name, by its own list.
    pub(crate) fn may_serve(&self, name: &str) -> bool {
        self.match_model(name, &ConfiguredModels::new()) > ServeMatch::No
    }

    fn match_model(&self, name: &str, configured: &ConfiguredModels) -> ServeMatch {
        let is_adapter = |name: &str| self.by_name.get(name).map(|served| served.parent.is_some());
        // Engines use their default model for a request without a name.
        if name.is_empty() || self.by_name.contains_key(name) {
            return ServeMatch::Yes;
        }
        if let Some((base, adapter)) = name.split_once(':')
            && self.engine == EngineKind::Sglang
            && is_adapter(base) == Some(false)
        {
            // Early versions of SGLang list no adapters.
            let lists_none = self.by_name.values().all(|served| served.parent.is_none());
            return match is_adapter(adapter) {
                Some(true) => ServeMatch::Yes,
                _ if lists_none => ServeMatch::Maybe,
                _ => ServeMatch::No,
            };
        }
        match configured.get(name) {
            Some(is_adapter) if self.engine != EngineKind::Vllm || *is_adapter => ServeMatch::Maybe,
            _ => ServeMatch::No,
        }
    }

    /// Longest prompt plus answer, in tokens, for a model that it serves; `None` if not reported.
    pub(crate) fn context_tokens(&self, name: &str) -> Option<u32> {
        let own = |name: &str| self.by_name.get(name).and_then(|served| served.context_tokens);
        let base = name.split_once(':').map_or(name, |(base, _)| base);
        match self.by_name.get(name).or_else(|| self.by_name.get(base)) {
            Some(ServedModel { context_tokens: Some(tokens), .. }) => Some(*tokens),
            // An adapter has the context of its base model.
            Some(ServedModel { parent: Some(parent), .. }) => own(parent),
            Some(ServedModel { parent: None, .. }) => None,
            // An unlisted name stands for one of its models.
            None => {
                let models = self.by_name.values().filter(|served| served.parent.is_none());
                models.map(|served| served.context_tokens).reduce(|one, other| Some(one?.max(other?)))?
            }
        }
    }
}

/// Requirements of a request on its engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EngineRequirements {
    /// Model name; empty if the request has none.
    pub(crate) model: String,
    /// Tokens of its prompt; 0 if they are only estimated.
    pub(crate) prompt_tokens: u32,
    /// Tokens that may be generated; 0 if the request sets no limit.
    pub(crate) output_tokens: u32,
    /// Whether it generates no text. Engines may then process a long prompt in parts.
    pub(crate) is_embedding: bool,
}

impl EngineRequirements {
    /// Least context with which an engine accepts it: the prompt plus one generated token. 0 if
    /// unknown.
    fn min_context(&self) -> u32 {
        match self.prompt_tokens {
            0 => 0,
            _ if self.is_embedding => 0,
            tokens => tokens.saturating_add(1),
        }
    }

    /// Context for all tokens that it may generate. 0 if unknown.
    fn full_context(&self) -> u32 {
        match self.prompt_tokens {
            0 => 0,
            tokens if self.is_embedding => tokens,
            tokens => tokens.saturating_add(self.output_tokens.max(1)),
        }
    }
}

/// No engine can run the request, now or later.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoFit {
    /// No engine serves its model.
    #[error("The model `{model}` does not exist{}.", name_list(served))]
    Model {
        /// Model of the request.
        model: String,
        /// Models that engines serve; empty if the caller may not know them.
        served: Vec<String>,
    },
    /// The prompt is too long for every engine with its model.
    #[error(
        "the prompt has {tokens} tokens, but the longest context of an engine for this model is {context}, \
         including at least one generated token; send a shorter prompt"
    )]
    Context {
        /// Tokens of the prompt.
        tokens: u32,
        /// The longest context.
        context: u32,
    },
}

impl NoFit {
    /// The HTTP status.
    pub(crate) fn status(&self) -> u16 {
        match self {
            NoFit::Model { .. } => 404,
            NoFit::Context { .. } => 400,
        }
    }

    /// Error code in OpenAI's API.
    pub(crate) fn code(&self) -> &'static str {
        match self {
            NoFit::Model { .. } => "model_not_found",
            NoFit::Context { .. } => "context_length_exceeded",
        }
    }
}

/// Names as the end of a sentence.
fn name_list(names: &[String]) -> String {
    if names.is_empty() {
        return String::new();
    }
    let shown: Vec<_> = names.iter().take(LISTED_NAMES_MAX).map(|name| format!("`{name}`")).collect();
    let verb = if names.len() == 1 { "is" } else { "are" };
    match names.len().saturating_sub(LISTED_NAMES_MAX) {
        0 => format!("; there {verb} {}", shown.join(", ")),
        more => format!("; there {verb} {} and {more} more", shown.join(", ")),
    }
}

/// For each engine, why it cannot run the request, or `None` if it can. `is_open` has for each
/// engine whether it takes requests now.
///
/// # Errors
/// [`NoFit`] if no engine can run it, including closed engines with a known list.
pub(crate) fn check_fit(
    engines: &[Option<Arc<ServedModels>>],
    is_open: &[bool],
    requirements: &EngineRequirements,
    configured: &ConfiguredModels,
) -> Result<Vec<Option<UnfitReason>>, NoFit> {
    let serves = |models: &Option<Arc<ServedModels>>| {
        models.as_ref().map(|models| models.match_model(&requirements.model, configured))
    };
    let best = engines.iter().filter_map(serves).max();
    // An engine without a list may serve the model.
    if best == Some(ServeMatch::No) && engines.iter().all(Option::is_some) {
        let served: BTreeSet<&String> =
            engines.iter().flatten().flat_map(|models| models.by_name.keys()).collect();
        let (model, served) = (truncated(&requirements.model), served.into_iter().cloned().collect());
        return Err(NoFit::Model { model, served });
    }
    // vLLM does not list adapters that it loads on demand, so it ranks with engines that list the
    // adapter.
    let is_lazy = |models: &Option<Arc<ServedModels>>| {
        models.as_ref().is_some_and(|all| all.engine == EngineKind::Vllm)
    };
    let is_served = |models: &Option<Arc<ServedModels>>| {
        serves(models)
            .is_none_or(|serves| serves > ServeMatch::No && (Some(serves) == best || is_lazy(models)))
    };
    let context = |models: &Option<Arc<ServedModels>>| {
        models.as_ref().and_then(|models| models.context_tokens(&requirements.model)).unwrap_or(u32::MAX)
    };
    // A closed engine without a list does not count for the longest context.
    let counts = engines.iter().zip(is_open).filter(|(models, is_open)| models.is_some() || **is_open);
    let longest = counts.map(|(models, _)| models).filter(|models| is_served(models)).map(context).max();
    let longest = longest.unwrap_or(u32::MAX);
    if longest < requirements.min_context() {
        return Err(NoFit::Context { tokens: requirements.prompt_tokens, context: longest });
    }
    // If no engine has context for all tokens that may be generated, engines with enough for the
    // prompt decide what to do.
    let needed = if longest < requirements.full_context() {
        requirements.min_context()
    } else {
        requirements.full_context()
    };
    let unfit = |models: &Option<Arc<ServedModels>>| match is_served(models) {
        false => Some(UnfitReason::Model),
        true => (context(models) < needed).then_some(UnfitReason::Context),
    };
    Ok(engines.iter().map(unfit).collect())
}

/// Callers choose the names, so they are bounded.
fn truncated(name: &str) -> String {
    match name.char_indices().nth(128) {
        Some((at, _)) => format!("{}…", &name[..at]),
        None => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Check with all engines open.
    fn fit_open(
        engines: &[Option<Arc<ServedModels>>],
        need: &EngineRequirements,
        written: &ConfiguredModels,
    ) -> Result<Vec<Option<UnfitReason>>, NoFit> {
        check_fit(engines, &vec![true; engines.len()], need, written)
    }

    fn models_of(maker: EngineKind, all: &[(&str, &str, u32)]) -> Option<Arc<ServedModels>> {
        let served = |(name, parent, context): &(&str, &str, u32)| {
            let parent = (!parent.is_empty()).then(|| (*parent).to_owned());
            ((*name).to_owned(), ServedModel { parent, context_tokens: (*context > 0).then_some(*context) })
        };
        Some(Arc::new(ServedModels { engine: maker, by_name: all.iter().map(served).collect() }))
    }

    fn vllm(all: &[(&str, &str, u32)]) -> Option<Arc<ServedModels>> {
        models_of(EngineKind::Vllm, all)
    }

    fn sglang(all: &[(&str, &str, u32)]) -> Option<Arc<ServedModels>> {
        models_of(EngineKind::Sglang, all)
    }

    fn requirements(model: &str, prompt_tokens: u32, output_tokens: u32) -> EngineRequirements {
        EngineRequirements { model: model.to_owned(), prompt_tokens, output_tokens, is_embedding: false }
    }

    const OTHER: Option<UnfitReason> = Some(UnfitReason::Model);
    const SHORT: Option<UnfitReason> = Some(UnfitReason::Context);

    #[test]
    fn engines_fit_by_model_or_without_a_list() {
        let engines = [vllm(&[("a", "", 0)]), vllm(&[("b", "", 0), ("b-fr", "b", 0)]), None];
        let of = |model| fit_open(&engines, &requirements(model, 0, 0), &ConfiguredModels::new());
        assert_eq!(of("a"), Ok(vec![None, OTHER, None]));
        assert_eq!(of("b-fr"), Ok(vec![OTHER, None, None]));
        assert_eq!(of("c"), Ok(vec![OTHER, OTHER, None]), "an engine without a list may serve it");
        assert_eq!(of(""), Ok(vec![None; 3]), "each engine uses its default model");
        let refused = fit_open(&engines[..2], &requirements("c", 0, 0), &ConfiguredModels::new())
            .expect_err("no engine serves it");
        assert_eq!(refused.to_string(), "The model `c` does not exist; there are `a`, `b`, `b-fr`.");
        let one = fit_open(&engines[..1], &requirements(&"é".repeat(500), 0, 0), &ConfiguredModels::new());
        let one = one.expect_err("no engine serves it").to_string();
        assert!(one.ends_with("é…` does not exist; there is `a`.") && one.len() < 400, "{one}");
        let many: Vec<_> = (0..50).map(|nth| format!("m{nth:02}")).collect();
        let many: Vec<_> = many.iter().map(|name| (name.as_str(), "", 0)).collect();
        let many = fit_open(&[vllm(&many)], &requirements("c", 0, 0), &ConfiguredModels::new())
            .expect_err("no engine serves it");
        assert!(many.to_string().ends_with("`m15` and 34 more."), "{many}");
        assert_eq!(
            fit_open(&[], &requirements("a", 9, 9), &ConfiguredModels::new()),
            Ok(vec![]),
            "an empty fleet is reported elsewhere"
        );
    }

    #[test]
    fn configured_names_match_unlisted_models() {
        let engines = [vllm(&[("base", "", 0)]), sglang(&[("base", "", 0)])];
        let written = ConfiguredModels::from([("alias".to_owned(), false), ("lazy".to_owned(), true)]);
        let of = |engines: &[_], model| fit_open(engines, &requirements(model, 0, 0), &written);
        assert_eq!(of(&engines, "alias"), Ok(vec![OTHER, None]), "SGLang takes any name");
        assert_eq!(of(&engines, "lazy"), Ok(vec![None, None]), "vLLM loads adapters on demand");
        assert!(of(&engines[..1], "alias").is_err());
        assert!(of(&engines, "other").is_err());
        let loaded = [engines[0].clone(), vllm(&[("base", "", 0), ("lazy", "base", 0)])];
        assert_eq!(of(&loaded, "lazy"), Ok(vec![None, None]), "vLLM without the loaded adapter still fits");
        // An engine that lists the name takes precedence.
        let listed = [engines[1].clone(), sglang(&[("alias", "", 0)])];
        assert_eq!(of(&listed, "alias"), Ok(vec![OTHER, None]));
    }

    #[test]
    fn sglang_adapters_follow_their_model() {
        let plain = sglang(&[("m", "", 100)]);
        let with = sglang(&[("m", "", 200), ("fr", "m", 0)]);
        let of =
            |engines: &[_], model| fit_open(engines, &requirements(model, 0, 0), &ConfiguredModels::new());
        assert_eq!(of(&[plain.clone(), with.clone()], "m:fr"), Ok(vec![OTHER, None]));
        assert_eq!(of(&[plain.clone(), plain.clone()], "m:fr"), Ok(vec![None, None]), "it lists no adapters");
        assert!(of(std::slice::from_ref(&with), "m:de").is_err());
        let may = |name| with.as_ref().is_some_and(|all| all.may_serve(name));
        assert!(may("m") && may("m:fr") && may("") && !may("m:de") && !may("other"));
        assert!(of(&[vllm(&[("m", "", 0)])], "m:fr").is_err(), "vLLM names are literal");
        let context = |models: &Option<Arc<ServedModels>>, name| {
            models.as_ref().and_then(|all| all.context_tokens(name))
        };
        assert_eq!(
            [context(&with, "m:fr"), context(&with, "fr"), context(&plain, "m:fr")]
                .map(Option::unwrap_or_default),
            [200, 200, 100]
        );
    }

    #[test]
    fn engines_fit_by_context_length() {
        let engines =
            [vllm(&[("m", "", 100)]), vllm(&[("m", "", 1_000), ("fr", "m", 0)]), vllm(&[("m", "", 0)])];
        let of = |engines: &[_], prompt, output| {
            fit_open(engines, &requirements("m", prompt, output), &ConfiguredModels::new())
        };
        assert_eq!(of(&engines, 99, 0), Ok(vec![None; 3]));
        assert_eq!(of(&engines, 100, 0), Ok(vec![SHORT, None, None]), "needs one generated token");
        assert_eq!(of(&engines, 50, 51), Ok(vec![SHORT, None, None]), "prompt plus requested tokens");
        assert_eq!(of(&engines, 5_000, 0), Ok(vec![SHORT, SHORT, None]), "one engine has no known limit");
        let two = &engines[..2];
        assert_eq!(
            of(two, 500, 9_000),
            Ok(vec![SHORT, None]),
            "an engine with context for the prompt decides"
        );
        assert_eq!(of(two, 1_000, 0), Err(NoFit::Context { tokens: 1_000, context: 1_000 }));
        assert_eq!(of(two, 0, 9_000), Ok(vec![None; 2]), "an estimate refuses no request");
        assert_eq!(of(two, u32::MAX, u32::MAX), Err(NoFit::Context { tokens: u32::MAX, context: 1_000 }));
        let adapter = fit_open(two, &requirements("fr", 1_000, 0), &ConfiguredModels::new());
        assert_eq!(
            adapter,
            Err(NoFit::Context { tokens: 1_000, context: 1_000 }),
            "the context of its base model"
        );
        // Engines with other models do not count.
        let other = [vllm(&[("m", "", 100)]), vllm(&[("n", "", 1_000)])];
        assert_eq!(of(&other, 100, 0), Err(NoFit::Context { tokens: 100, context: 100 }));
    }

    #[test]
    fn embeddings_need_context_for_the_prompt_only() {
        let engines = [vllm(&[("m", "", 100)]), vllm(&[("m", "", 200)])];
        let of = |prompt_tokens| {
            let need = EngineRequirements { is_embedding: true, ..requirements("m", prompt_tokens, 0) };
            fit_open(&engines, &need, &ConfiguredModels::new())
        };
        assert_eq!(of(100), Ok(vec![None, None]));
        assert_eq!(of(101), Ok(vec![SHORT, None]));
        assert_eq!(of(201), Ok(vec![None, None]), "some engines process it in parts");
    }

    #[test]
    fn closed_engines_without_a_list_do_not_count() {
        let engines = [vllm(&[("m", "", 40_000)]), None];
        let of = |prompt, output, open| {
            check_fit(&engines, &[true, open], &requirements("m", prompt, output), &ConfiguredModels::new())
        };
        assert_eq!(of(10_000, 32_000, true), Ok(vec![Some(UnfitReason::Context), None]));
        assert_eq!(of(10_000, 32_000, false), Ok(vec![None, None]), "the engine itself decides");
        assert!(of(50_000, 1, false).is_err() && of(50_000, 1, true).is_ok());
    }
}
