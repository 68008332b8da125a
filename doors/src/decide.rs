//! The one question that every door asks: where does this prompt run, and where else if that fails?
//!
//! Not here: the answer (`kvfleet_router::Desk`, and `kv_core::schedule` behind it).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{IdentityDigest, InstanceId};
use kv_core::prefix::IdentityManifest;
use kv_core::schedule::Unfit;
use kvfleet_proto::pb;
use kvfleet_router::{Besides, Desk};

use crate::config::ModelConfig;
use crate::endpoints::models::{Misfit, Need, Written, fit};
use crate::endpoints::{Endpoint, Endpoints, Known};
use crate::prompt::Prompt;

/// Asks the router, and knows where its instances take requests.
#[derive(Clone, Debug)]
pub(crate) struct Decider {
    desk: Desk,
    endpoints: Endpoints,
    objectives: Arc<BTreeMap<String, i32>>,
    /// Models that the configuration names.
    written: Arc<Written>,
    /// Identities under which prompts are hashed.
    hashed_under: Arc<[IdentityDigest]>,
}

/// Under what a request is sent.
#[derive(Clone, Debug, Default)]
pub(crate) struct Terms {
    /// Its number, unique for a while: it is what `kvfleet why` is asked by.
    pub(crate) request: u64,
    /// Whose it is.
    pub(crate) tenant: u32,
    /// Only these may be chosen; none given: all.
    pub(crate) among: Option<Vec<InstanceId>>,
    /// None of these: it failed there.
    pub(crate) without: Vec<InstanceId>,
    /// Trace that the caller began.
    pub(crate) traceparent: String,
    /// What the caller wishes for it.
    pub(crate) wishes: Wishes,
    /// What it needs of an engine.
    pub(crate) need: Need,
    /// Whether it was decided before and does not run there.
    pub(crate) again: bool,
}

/// What a caller wishes for a request, in the words of the Inference Extension.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wishes {
    /// How much it matters, by the name of an objective; empty for none.
    pub(crate) objective: String,
    /// Among whom the fleet is shared fairly; empty for nobody in particular.
    pub(crate) fairness: String,
    /// Until its first token.
    pub(crate) ttft: Option<Duration>,
    /// For each token after that.
    pub(crate) tpot: Option<Duration>,
}

impl Wishes {
    /// Takes a limit that a header asks for, by its name in lower case; whether it is one. A time that is none is left out, as if it were not there.
    pub(crate) fn limit(&mut self, name: &str, text: &str) -> bool {
        let milliseconds = || text.parse().ok().map(Duration::from_millis);
        match name {
            "x-llm-d-slo-ttft-ms" => self.ttft = milliseconds(),
            // Tokens of small models are less than a millisecond apart.
            "x-llm-d-slo-tpot-ms" => self.tpot = text.parse().ok().and_then(fraction),
            _ => return false,
        }
        true
    }

    /// Takes how much it matters, or among whom the fleet is shared, by the name of a header in lower case; whether it is one.
    pub(crate) fn whose(&mut self, name: &str, text: &str) -> bool {
        match name {
            "x-gateway-inference-objective" | "x-llm-d-inference-objective" => {
                text.clone_into(&mut self.objective);
            }
            "x-gateway-inference-fairness-id" => text.clone_into(&mut self.fairness),
            _ => return false,
        }
        true
    }
}

/// Milliseconds that need not be whole.
fn fraction(ms: f64) -> Option<Duration> {
    (ms.is_finite() && ms > 0.0).then(|| Duration::try_from_secs_f64(ms / 1e3).ok()).flatten()
}

impl Terms {
    /// Whose it is: a fairness id stands for a tenant of its own, above those that have numbers.
    fn tenant(&self) -> u32 {
        if self.wishes.fairness.is_empty() {
            return self.tenant;
        }
        let mut number = 0x811c_9dc5_u32;
        self.wishes
            .fairness
            .bytes()
            .for_each(|byte| number = (number ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        number | 1 << 31
    }
}

/// One way for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Way {
    /// Where its prompt is computed.
    pub(crate) endpoint: Arc<Endpoint>,
    /// Who goes on from there; nobody else where none is named.
    pub(crate) partner: Option<Arc<Endpoint>>,
}

impl Way {
    /// Who answers.
    pub(crate) fn answers(&self) -> &Arc<Endpoint> {
        self.partner.as_ref().unwrap_or(&self.endpoint)
    }

    /// Whether it goes by way of one of these.
    pub(crate) fn is_by(&self, instances: &[InstanceId]) -> bool {
        let partner = self.partner.as_ref().map(|partner| partner.instance);
        instances.contains(&self.endpoint.instance)
            || partner.is_some_and(|partner| instances.contains(&partner))
    }
}

/// Where a request goes.
#[derive(Clone, Debug)]
pub(crate) struct Chosen {
    /// The best way.
    pub(crate) way: Way,
    /// The others that it could take, best first.
    pub(crate) fallbacks: Vec<Way>,
    /// Its turn, of what waits at an engine that keeps an order.
    pub(crate) turn_ms: u64,
}

/// Why a request goes nowhere.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    /// Not now: 429.
    #[error("{reason}")]
    Busy {
        /// Why.
        reason: String,
        /// When to ask again.
        retry_after: Duration,
    },
    /// Nobody is there to take it: 503.
    #[error("{reason}")]
    Nobody {
        /// Why.
        reason: String,
        /// When to ask again.
        retry_after: Duration,
    },
    /// The request makes no sense: 400.
    #[error("{0}")]
    Invalid(String),
    /// No engine serves its model, 404, or has the context for it, 400.
    #[error(transparent)]
    Misfit(#[from] Misfit),
}

/// Engines, as far as a request may go there.
struct Open {
    /// Those that may be chosen.
    endpoints: Vec<Arc<Endpoint>>,
    /// Those that cannot run it.
    unfit: Vec<(InstanceId, Unfit)>,
}

impl Decider {
    pub(crate) fn new(desk: Desk, endpoints: Endpoints) -> Decider {
        let (objectives, written, hashed_under) = Default::default();
        Decider { desk, endpoints, objectives, written, hashed_under }
    }

    /// The same where the configuration names these models.
    pub(crate) fn with_models(self, models: &[ModelConfig]) -> Decider {
        let written = models.iter().map(|model| (model.name.clone(), !model.adapter.is_empty()));
        Decider { written: Arc::new(written.collect()), ..self }
    }

    /// The same where prompts are hashed under this identity, and those of adapters under theirs.
    pub(crate) fn with_identity(self, base: &IdentityManifest, models: &[ModelConfig]) -> Decider {
        let adapters = models.iter().map(|model| &model.adapter).filter(|adapter| !adapter.is_empty());
        let of = |adapter: &String| IdentityManifest { adapter: adapter.clone(), ..base.clone() }.digest();
        let hashed_under = std::iter::once(base.digest()).chain(adapters.map(of)).collect();
        Decider { hashed_under, ..self }
    }

    /// The same with priorities for these objectives.
    pub(crate) fn with_objectives(self, objectives: impl IntoIterator<Item = (String, i32)>) -> Decider {
        Decider { objectives: Arc::new(objectives.into_iter().collect()), ..self }
    }

    /// What an objective is worth; one that nobody set is worth as much as none.
    fn priority(&self, objective: &str) -> i32 {
        self.objectives.get(objective).copied().unwrap_or_default()
    }

    pub(crate) fn endpoints(&self) -> &Endpoints {
        &self.endpoints
    }

    pub(crate) fn desk(&self) -> &Desk {
        &self.desk
    }

    /// Decides where a prompt runs.
    pub(crate) async fn decide(&self, prompt: &Prompt, terms: &Terms) -> Result<Chosen, Refusal> {
        let Open { endpoints: open, unfit } = self.fitting(terms)?;
        if open.is_empty() {
            let reason = match self.endpoints.count() {
                0 => "no engine is known that takes requests".to_owned(),
                known => format!("none of the {known} engines that are known may take this request"),
            };
            return Err(Refusal::Nobody { reason, retry_after: Duration::from_secs(1) });
        }
        let among = Some(pb::Among { instances: open.iter().map(|endpoint| endpoint.instance.0).collect() });
        let request = pb::RouteRequest { among, ..self.question(prompt, terms) };
        let besides = Besides { unfit, again: terms.again, hashed_under: Arc::clone(&self.hashed_under) };
        let reply = self.desk.route_with(request, besides).await.map_err(|status| match status.code() {
            tonic::Code::InvalidArgument => Refusal::Invalid(status.message().to_owned()),
            _ => Refusal::Nobody { reason: status.message().to_owned(), retry_after: Duration::from_secs(1) },
        })?;
        self.answered(reply, terms)
    }

    /// What the router is asked of a request.
    fn question(&self, prompt: &Prompt, terms: &Terms) -> pb::RouteRequest {
        pb::RouteRequest {
            request: terms.request,
            tenant: terms.tenant(),
            ttft_max_ms: terms
                .wishes
                .ttft
                .map_or(0, |ttft| u64::try_from(ttft.as_millis()).unwrap_or(u64::MAX)),
            tbt_max_us: terms
                .wishes
                .tpot
                .map_or(0, |tpot| u64::try_from(tpot.as_micros()).unwrap_or(u64::MAX)),
            priority: self.priority(&terms.wishes.objective),
            hashes: prompt.hashes.iter().flat_map(|hash| hash.0).collect(),
            block_tokens: prompt.block_tokens,
            input_tokens: prompt.input_tokens,
            output_tokens: prompt.output_tokens,
            traceparent: terms.traceparent.clone(),
            text: prompt.is_text,
            ..pb::RouteRequest::default()
        }
    }

    /// A request that was decided goes this way, and not the one that was chosen for it.
    pub(crate) fn goes(&self, prompt: &Prompt, terms: &Terms, way: &Way) {
        let goes_on = way.partner.as_ref().map(|partner| partner.instance);
        self.desk.moved(&self.question(prompt, terms), (way.endpoint.instance, goes_on));
    }

    fn answered(&self, reply: pb::RouteReply, terms: &Terms) -> Result<Chosen, Refusal> {
        match reply.answer {
            Some(pb::route_reply::Answer::Decision(decision)) => {
                // It counts as sent, and goes nowhere if that one has just left.
                self.chosen(&decision).inspect_err(|_| self.desk.left(terms.request))
            }
            Some(pb::route_reply::Answer::Rejected(rejected)) => {
                let pb::Rejected { reason, retry_after_ms, nobody } = rejected;
                let retry_after = Duration::from_millis(retry_after_ms);
                if nobody {
                    return Err(Refusal::Nobody { reason, retry_after });
                }
                Err(Refusal::Busy { reason, retry_after })
            }
            None => Err(Refusal::Nobody {
                reason: "the router gave no answer".into(),
                retry_after: Duration::from_secs(1),
            }),
        }
    }

    /// Endpoints that may be chosen; nobody where none can run it.
    pub(crate) fn open(&self, terms: &Terms) -> Vec<Arc<Endpoint>> {
        self.fitting(terms).map_or_else(|_| Vec::new(), |open| open.endpoints)
    }

    /// The same, and which cannot run it.
    fn fitting(&self, terms: &Terms) -> Result<Open, Misfit> {
        let known = self.endpoints.known();
        let models: Vec<_> = known.iter().map(|one| one.models.clone()).collect();
        let is_open: Vec<_> = known.iter().map(|one| one.is_open).collect();
        let fits = fit(&models, &is_open, &terms.need, &self.written)?;
        let mut open = Open { endpoints: Vec::new(), unfit: Vec::new() };
        for (Known { endpoint, is_open, .. }, unfit) in known.into_iter().zip(fits) {
            let instance = endpoint.instance;
            let may = is_open
                && terms.among.as_ref().is_none_or(|among| among.contains(&instance))
                && !terms.without.contains(&instance);
            match unfit {
                Some(unfit) => open.unfit.push((instance, unfit)),
                None if may => open.endpoints.push(endpoint),
                None => {}
            }
        }
        Ok(open)
    }

    fn chosen(&self, decision: &pb::Decision) -> Result<Chosen, Refusal> {
        // The chosen one is the first of the candidates.
        let open = decision.candidates.iter().filter(|candidate| candidate.filtered.is_empty());
        let get = |instance| self.endpoints.get(InstanceId(instance));
        let mut at = open.filter_map(|candidate| {
            let partner = match &candidate.handover {
                // One of a pair alone is of no use.
                Some(handover) => Some(get(handover.instance)?),
                None => None,
            };
            Some(Way { endpoint: get(candidate.instance)?, partner })
        });
        let way = at.next();
        let fallbacks = at.collect();
        match way {
            Some(way) => Ok(Chosen { way, fallbacks, turn_ms: decision.turn_ms }),
            None => Err(Refusal::Nobody {
                reason: format!("instance {} was chosen, and has just left", decision.instance),
                retry_after: Duration::from_millis(100),
            }),
        }
    }
}
