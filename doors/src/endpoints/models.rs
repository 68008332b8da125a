//! Which models engines serve, as each of them says, and which engines can run a request: those that serve its model and have the context for it.
//!
//! Pure. An engine that said nothing can run everything. Not here: what an engine answers (`load/models.rs`), and which of those that can is chosen (the router).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kv_core::schedule::Unfit;

/// Names that a refusal lists of those that are served.
const NAMES_SAID_MAX: usize = 16;

/// What an engine is, as its list of models says. It tells how far a name that is not in it is one that the engine refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Maker {
    /// vLLM: it refuses names that it does not list, but for adapters that it loads when they are asked for.
    Vllm,
    /// SGLang: it serves its model whatever a request calls it, and adapters under `model:adapter`.
    Sglang,
    /// Somebody else.
    Other,
}

/// One name under which an engine is asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Served {
    /// The model that it is an adapter of, if it is one.
    pub(crate) parent: Option<String>,
    /// Longest prompt with its answer, in tokens, where it says so.
    pub(crate) context_tokens: Option<u32>,
}

/// All that one engine serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Models {
    pub(crate) maker: Maker,
    pub(crate) by_name: BTreeMap<String, Served>,
}

/// Whether an engine serves a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Serves {
    No,
    /// It does not list it, and may serve it all the same.
    Perhaps,
    Yes,
}

/// Models that the configuration names; of each whether it is an adapter.
pub(crate) type Written = BTreeMap<String, bool>;

impl Models {
    /// Whether a request that names this model may be served, by what the engine says alone.
    pub(crate) fn may_serve(&self, name: &str) -> bool {
        self.serves(name, &Written::new()) > Serves::No
    }

    fn serves(&self, name: &str, written: &Written) -> Serves {
        let is_adapter = |name: &str| self.by_name.get(name).map(|served| served.parent.is_some());
        // Without a name an engine takes what it has.
        if name.is_empty() || self.by_name.contains_key(name) {
            return Serves::Yes;
        }
        if let Some((base, adapter)) = name.split_once(':')
            && self.maker == Maker::Sglang
            && is_adapter(base) == Some(false)
        {
            // Earlier releases list no adapters.
            let lists_none = self.by_name.values().all(|served| served.parent.is_none());
            return match is_adapter(adapter) {
                Some(true) => Serves::Yes,
                _ if lists_none => Serves::Perhaps,
                _ => Serves::No,
            };
        }
        match written.get(name) {
            Some(is_adapter) if self.maker != Maker::Vllm || *is_adapter => Serves::Perhaps,
            _ => Serves::No,
        }
    }

    /// Longest prompt with its answer, in tokens, that it takes of a model that it serves; nothing where it does not say.
    pub(crate) fn context_tokens(&self, name: &str) -> Option<u32> {
        let own = |name: &str| self.by_name.get(name).and_then(|served| served.context_tokens);
        let base = name.split_once(':').map_or(name, |(base, _)| base);
        match self.by_name.get(name).or_else(|| self.by_name.get(base)) {
            Some(Served { context_tokens: Some(tokens), .. }) => Some(*tokens),
            // An adapter has what its model has.
            Some(Served { parent: Some(parent), .. }) => own(parent),
            Some(Served { parent: None, .. }) => None,
            // By another name it is one of these.
            None => {
                let models = self.by_name.values().filter(|served| served.parent.is_none());
                models.map(|served| served.context_tokens).reduce(|one, other| Some(one?.max(other?)))?
            }
        }
    }
}

/// What a request needs of an engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Need {
    /// What it calls its model; empty where it names none.
    pub(crate) model: String,
    /// Tokens of its prompt where they are counted as the engine counts them; 0 where they are a guess.
    pub(crate) prompt_tokens: u32,
    /// Tokens that it asks for; 0 where it does not say.
    pub(crate) output_tokens: u32,
    /// Whether nothing is to be said, and engines may take its prompt in pieces.
    pub(crate) is_embedding: bool,
}

impl Need {
    /// Context without which every engine refuses it: one token is to be said behind the prompt.
    fn least(&self) -> u32 {
        match self.prompt_tokens {
            0 => 0,
            _ if self.is_embedding => 0,
            tokens => tokens.saturating_add(1),
        }
    }

    /// Context with which every engine takes it.
    fn whole(&self) -> u32 {
        match self.prompt_tokens {
            0 => 0,
            tokens if self.is_embedding => tokens,
            tokens => tokens.saturating_add(self.output_tokens.max(1)),
        }
    }
}

/// No engine can run a request, now or later.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Misfit {
    /// No engine serves its model.
    #[error("The model `{model}` does not exist; there {}.", listed(served))]
    Model {
        /// The model.
        model: String,
        /// What is served.
        served: Vec<String>,
    },
    /// No engine that serves its model takes so long a prompt.
    #[error(
        "the prompt has {tokens} tokens, and the longest context that an engine has for this model {context}, one of them for what is said; send a shorter one"
    )]
    Context {
        /// Tokens of the prompt.
        tokens: u32,
        /// The longest context.
        context: u32,
    },
}

impl Misfit {
    /// The HTTP status.
    pub(crate) fn status(&self) -> u16 {
        match self {
            Misfit::Model { .. } => 404,
            Misfit::Context { .. } => 400,
        }
    }

    /// What OpenAI's clients find as `code`.
    pub(crate) fn code(&self) -> &'static str {
        match self {
            Misfit::Model { .. } => "model_not_found",
            Misfit::Context { .. } => "context_length_exceeded",
        }
    }
}

/// Names in a sentence.
fn listed(names: &[String]) -> String {
    let shown: Vec<_> = names.iter().take(NAMES_SAID_MAX).map(|name| format!("`{name}`")).collect();
    let verb = if names.len() == 1 { "is" } else { "are" };
    match names.len().saturating_sub(NAMES_SAID_MAX) {
        0 => format!("{verb} {}", shown.join(", ")),
        more => format!("{verb} {} and {more} more", shown.join(", ")),
    }
}

/// Of each engine, why it cannot run a request, if it cannot. `is_open` says of each whether it takes requests now.
///
/// # Errors
/// [`Misfit`] where that is so of all of them, those included that take no requests just now and said what they serve.
pub(crate) fn fit(
    engines: &[Option<Arc<Models>>],
    is_open: &[bool],
    need: &Need,
    written: &Written,
) -> Result<Vec<Option<Unfit>>, Misfit> {
    let serves =
        |models: &Option<Arc<Models>>| models.as_ref().map(|models| models.serves(&need.model, written));
    let best = engines.iter().filter_map(serves).max();
    // Whoever said nothing may serve it.
    if best == Some(Serves::No) && engines.iter().all(Option::is_some) {
        let served: BTreeSet<&String> =
            engines.iter().flatten().flat_map(|models| models.by_name.keys()).collect();
        let (model, served) = (shortened(&need.model), served.into_iter().cloned().collect());
        return Err(Misfit::Model { model, served });
    }
    // A vLLM that was not asked for an adapter yet does not list it, and is as good as those that were.
    let is_lazy = |models: &Option<Arc<Models>>| models.as_ref().is_some_and(|all| all.maker == Maker::Vllm);
    let is_served = |models: &Option<Arc<Models>>| {
        serves(models).is_none_or(|serves| serves > Serves::No && (Some(serves) == best || is_lazy(models)))
    };
    let context = |models: &Option<Arc<Models>>| {
        models.as_ref().and_then(|models| models.context_tokens(&need.model)).unwrap_or(u32::MAX)
    };
    // What never said anything and takes no requests is nobody's hope for a longer context.
    let counts = engines.iter().zip(is_open).filter(|(models, is_open)| models.is_some() || **is_open);
    let longest = counts.map(|(models, _)| models).filter(|models| is_served(models)).map(context).max();
    let longest = longest.unwrap_or(u32::MAX);
    if longest < need.least() {
        return Err(Misfit::Context { tokens: need.prompt_tokens, context: longest });
    }
    // Where nobody has the context for all that it asks for, whoever has it for some of that says what becomes of it.
    let needed = if longest < need.whole() { need.least() } else { need.whole() };
    let unfit = |models: &Option<Arc<Models>>| match is_served(models) {
        false => Some(Unfit::Model),
        true => (context(models) < needed).then_some(Unfit::Context),
    };
    Ok(engines.iter().map(unfit).collect())
}

/// Names come from requests.
fn shortened(name: &str) -> String {
    match name.char_indices().nth(128) {
        Some((at, _)) => format!("{}…", &name[..at]),
        None => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With all of them open.
    fn fit(
        engines: &[Option<Arc<Models>>],
        need: &Need,
        written: &Written,
    ) -> Result<Vec<Option<Unfit>>, Misfit> {
        super::fit(engines, &vec![true; engines.len()], need, written)
    }

    fn models(maker: Maker, all: &[(&str, &str, u32)]) -> Option<Arc<Models>> {
        let served = |(name, parent, context): &(&str, &str, u32)| {
            let parent = (!parent.is_empty()).then(|| (*parent).to_owned());
            ((*name).to_owned(), Served { parent, context_tokens: (*context > 0).then_some(*context) })
        };
        Some(Arc::new(Models { maker, by_name: all.iter().map(served).collect() }))
    }

    fn vllm(all: &[(&str, &str, u32)]) -> Option<Arc<Models>> {
        models(Maker::Vllm, all)
    }

    fn sglang(all: &[(&str, &str, u32)]) -> Option<Arc<Models>> {
        models(Maker::Sglang, all)
    }

    fn need(model: &str, prompt_tokens: u32, output_tokens: u32) -> Need {
        Need { model: model.to_owned(), prompt_tokens, output_tokens, is_embedding: false }
    }

    const OTHER: Option<Unfit> = Some(Unfit::Model);
    const SHORT: Option<Unfit> = Some(Unfit::Context);

    #[test]
    fn requests_go_to_who_serves_their_model_and_to_who_said_nothing() {
        let engines = [vllm(&[("a", "", 0)]), vllm(&[("b", "", 0), ("b-fr", "b", 0)]), None];
        let of = |model| fit(&engines, &need(model, 0, 0), &Written::new());
        assert_eq!(of("a"), Ok(vec![None, OTHER, None]));
        assert_eq!(of("b-fr"), Ok(vec![OTHER, None, None]));
        assert_eq!(of("c"), Ok(vec![OTHER, OTHER, None]), "whoever said nothing may serve it");
        assert_eq!(of(""), Ok(vec![None; 3]), "it takes what is there");
        let refused = fit(&engines[..2], &need("c", 0, 0), &Written::new()).expect_err("nobody serves it");
        assert_eq!(refused.to_string(), "The model `c` does not exist; there are `a`, `b`, `b-fr`.");
        let one = fit(&engines[..1], &need(&"é".repeat(500), 0, 0), &Written::new());
        let one = one.expect_err("nobody serves it").to_string();
        assert!(one.ends_with("é…` does not exist; there is `a`.") && one.len() < 400, "{one}");
        let many: Vec<_> = (0..50).map(|nth| format!("m{nth:02}")).collect();
        let many: Vec<_> = many.iter().map(|name| (name.as_str(), "", 0)).collect();
        let many = fit(&[vllm(&many)], &need("c", 0, 0), &Written::new()).expect_err("nobody serves it");
        assert!(many.to_string().ends_with("`m15` and 34 more."), "{many}");
        assert_eq!(
            fit(&[], &need("a", 9, 9), &Written::new()),
            Ok(vec![]),
            "that nobody is there is said elsewhere"
        );
    }

    #[test]
    fn a_name_that_the_configuration_has_may_be_one_that_an_engine_does_not_list() {
        let engines = [vllm(&[("base", "", 0)]), sglang(&[("base", "", 0)])];
        let written = Written::from([("alias".to_owned(), false), ("lazy".to_owned(), true)]);
        let of = |engines: &[_], model| fit(engines, &need(model, 0, 0), &written);
        assert_eq!(of(&engines, "alias"), Ok(vec![OTHER, None]), "SGLang takes any name");
        assert_eq!(of(&engines, "lazy"), Ok(vec![None, None]), "vLLM loads adapters that are asked for");
        assert!(of(&engines[..1], "alias").is_err());
        assert!(of(&engines, "other").is_err());
        let loaded = [engines[0].clone(), vllm(&[("base", "", 0), ("lazy", "base", 0)])];
        assert_eq!(of(&loaded, "lazy"), Ok(vec![None, None]), "one that has loaded it keeps it from nobody");
        // Whoever lists it goes before who may serve it.
        let listed = [engines[1].clone(), sglang(&[("alias", "", 0)])];
        assert_eq!(of(&listed, "alias"), Ok(vec![OTHER, None]));
    }

    #[test]
    fn an_adapter_of_sglang_is_asked_for_behind_its_model() {
        let plain = sglang(&[("m", "", 100)]);
        let with = sglang(&[("m", "", 200), ("fr", "m", 0)]);
        let of = |engines: &[_], model| fit(engines, &need(model, 0, 0), &Written::new());
        assert_eq!(of(&[plain.clone(), with.clone()], "m:fr"), Ok(vec![OTHER, None]));
        assert_eq!(of(&[plain.clone(), plain.clone()], "m:fr"), Ok(vec![None, None]), "it lists no adapters");
        assert!(of(std::slice::from_ref(&with), "m:de").is_err());
        let may = |name| with.as_ref().is_some_and(|all| all.may_serve(name));
        assert!(may("m") && may("m:fr") && may("") && !may("m:de") && !may("other"));
        assert!(of(&[vllm(&[("m", "", 0)])], "m:fr").is_err(), "names of vLLM are as they are");
        let context =
            |models: &Option<Arc<Models>>, name| models.as_ref().and_then(|all| all.context_tokens(name));
        assert_eq!(
            [context(&with, "m:fr"), context(&with, "fr"), context(&plain, "m:fr")]
                .map(Option::unwrap_or_default),
            [200, 200, 100]
        );
    }

    #[test]
    fn a_prompt_goes_to_who_has_the_context_for_it() {
        let engines =
            [vllm(&[("m", "", 100)]), vllm(&[("m", "", 1_000), ("fr", "m", 0)]), vllm(&[("m", "", 0)])];
        let of = |engines: &[_], prompt, output| fit(engines, &need("m", prompt, output), &Written::new());
        assert_eq!(of(&engines, 99, 0), Ok(vec![None; 3]));
        assert_eq!(of(&engines, 100, 0), Ok(vec![SHORT, None, None]), "one token is to be said");
        assert_eq!(of(&engines, 50, 51), Ok(vec![SHORT, None, None]), "all that is asked for");
        assert_eq!(
            of(&engines, 5_000, 0),
            Ok(vec![SHORT, SHORT, None]),
            "one does not say how much it takes"
        );
        let two = &engines[..2];
        assert_eq!(
            of(two, 500, 9_000),
            Ok(vec![SHORT, None]),
            "who has the room for its prompt says what is wrong"
        );
        assert_eq!(of(two, 1_000, 0), Err(Misfit::Context { tokens: 1_000, context: 1_000 }));
        assert_eq!(of(two, 0, 9_000), Ok(vec![None; 2]), "a guess refuses nobody");
        assert_eq!(of(two, u32::MAX, u32::MAX), Err(Misfit::Context { tokens: u32::MAX, context: 1_000 }));
        let adapter = fit(two, &need("fr", 1_000, 0), &Written::new());
        assert_eq!(adapter, Err(Misfit::Context { tokens: 1_000, context: 1_000 }), "that of its model");
        // Another model's context is no matter.
        let other = [vllm(&[("m", "", 100)]), vllm(&[("n", "", 1_000)])];
        assert_eq!(of(&other, 100, 0), Err(Misfit::Context { tokens: 100, context: 100 }));
    }

    #[test]
    fn what_is_embedded_needs_room_for_nothing_else_and_is_refused_by_nobody_here() {
        let engines = [vllm(&[("m", "", 100)]), vllm(&[("m", "", 200)])];
        let of = |prompt_tokens| {
            let need = Need { is_embedding: true, ..need("m", prompt_tokens, 0) };
            fit(&engines, &need, &Written::new())
        };
        assert_eq!(of(100), Ok(vec![None, None]));
        assert_eq!(of(101), Ok(vec![SHORT, None]));
        assert_eq!(of(201), Ok(vec![None, None]), "some engines take it in pieces");
    }

    #[test]
    fn one_that_never_answered_and_takes_nothing_is_no_hope_for_a_long_prompt() {
        let engines = [vllm(&[("m", "", 40_000)]), None];
        let of = |prompt, output, open| {
            super::fit(&engines, &[true, open], &need("m", prompt, output), &Written::new())
        };
        assert_eq!(of(10_000, 32_000, true), Ok(vec![Some(Unfit::Context), None]));
        assert_eq!(of(10_000, 32_000, false), Ok(vec![None, None]), "it says itself what becomes of it");
        assert!(of(50_000, 1, false).is_err() && of(50_000, 1, true).is_ok());
    }
}
