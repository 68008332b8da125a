//! Asks the router where a prompt runs, and which endpoints to try if that one fails.
//!
//! Not here: the answer (`kvfleet_router::RouterHandle`, and `kv_core::schedule` behind it).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{IdentityDigest, InstanceId};
use kv_core::prefix::IdentityManifest;
use kv_core::schedule::UnfitReason;
use kvfleet_proto::pb;
use kvfleet_router::{RouteHints, RouterHandle};

use crate::config::ModelConfig;
use crate::endpoints::models::{ConfiguredModels, EngineRequirements, NoFit, check_fit};
use crate::endpoints::{Endpoint, EndpointRegistry, EndpointView};
use crate::prompt::Prompt;

/// Asks the router, and maps the chosen instances to endpoints.
#[derive(Clone, Debug)]
pub(crate) struct Decider {
    router: RouterHandle,
    endpoints: EndpointRegistry,
    objectives: Arc<BTreeMap<String, i32>>,
    /// Models that the configuration names.
    configured_models: Arc<ConfiguredModels>,
    /// Identities under which prompts are hashed.
    hash_identities: Arc<[IdentityDigest]>,
}

/// Everything about a request, other than its prompt, that a decision depends on.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestContext {
    /// Number of the request, unique for a while. `kvfleet why` looks it up by this number.
    pub(crate) request: u64,
    /// Tenant of the request.
    pub(crate) tenant: u32,
    /// Instances that may be chosen; `None` allows all.
    pub(crate) candidates: Option<Vec<InstanceId>>,
    /// Instances that may not be chosen, because the request failed there.
    pub(crate) excluded: Vec<InstanceId>,
    /// W3C trace context of the caller; empty if it sent none.
    pub(crate) traceparent: String,
    /// Limits and priority that the caller asks for.
    pub(crate) slo: RequestSlo,
    /// Requirements on the engine.
    pub(crate) requirements: EngineRequirements,
    /// Whether an earlier decision for this request did not lead to a run.
    pub(crate) is_retry: bool,
}

/// Service objectives of a request, as the Gateway API Inference Extension names them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RequestSlo {
    /// Name of the objective that sets the priority; empty for none.
    pub(crate) objective: String,
    /// Fairness id: the fleet is shared fairly among these ids; empty for none.
    pub(crate) fairness: String,
    /// Limit for the time to first token.
    pub(crate) ttft: Option<Duration>,
    /// Limit for the time per output token after the first.
    pub(crate) tpot: Option<Duration>,
}

impl RequestSlo {
    /// Reads a latency limit from the header `name` (lower case). Returns whether the header is
    /// such a limit; an unparsable value counts as absent.
    pub(crate) fn read_latency_header(&mut self, name: &str, text: &str) -> bool {
        let milliseconds = || text.parse().ok().map(Duration::from_millis);
        match name {
            "x-llm-d-slo-ttft-ms" => self.ttft = milliseconds(),
            // Small models produce tokens less than a millisecond apart.
            "x-llm-d-slo-tpot-ms" => self.tpot = text.parse().ok().and_then(fractional_ms),
            _ => return false,
        }
        true
    }

    /// Reads an objective or a fairness id from the header `name` (lower case). Returns whether the
    /// header is one of these.
    pub(crate) fn read_objective_header(&mut self, name: &str, text: &str) -> bool {
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

/// Parses milliseconds that need not be whole.
fn fractional_ms(ms: f64) -> Option<Duration> {
    (ms.is_finite() && ms > 0.0).then(|| Duration::try_from_secs_f64(ms / 1e3).ok()).flatten()
}

impl RequestContext {
    /// Tenant for fairness: a fairness id maps to a tenant number above the configured ones.
    fn tenant(&self) -> u32 {
        if self.slo.fairness.is_empty() {
            return self.tenant;
        }
        let mut number = 0x811c_9dc5_u32;
        self.slo
            .fairness
            .bytes()
            .for_each(|byte| number = (number ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        number | 1 << 31
    }
}

/// One placement of a request: an endpoint, or a prefill/decode pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RouteTarget {
    /// Endpoint that computes the prompt.
    pub(crate) endpoint: Arc<Endpoint>,
    /// Endpoint that decodes, if another one than `endpoint` does.
    pub(crate) partner: Option<Arc<Endpoint>>,
}

impl RouteTarget {
    /// Endpoint that sends the answer.
    pub(crate) fn answering_endpoint(&self) -> &Arc<Endpoint> {
        self.partner.as_ref().unwrap_or(&self.endpoint)
    }

    /// Whether the request would use one of these instances.
    pub(crate) fn uses_any(&self, instances: &[InstanceId]) -> bool {
        let partner = self.partner.as_ref().map(|partner| partner.instance);
        instances.contains(&self.endpoint.instance)
            || partner.is_some_and(|partner| instances.contains(&partner))
    }
}

/// Placements that the router returned for a request.
#[derive(Clone, Debug)]
pub(crate) struct RouteChoice {
    /// The chosen placement.
    pub(crate) target: RouteTarget,
    /// Alternatives, best first.
    pub(crate) fallbacks: Vec<RouteTarget>,
    /// Deadline for ordering the request in an engine's priority queue, in milliseconds.
    pub(crate) priority_deadline_ms: u64,
}

/// Why a request is not placed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    /// Overloaded, retry later: status 429.
    #[error("{reason}")]
    Busy {
        /// Reason, for the caller.
        reason: String,
        /// Delay before a retry.
        retry_after: Duration,
    },
    /// No instance can take it: status 503.
    #[error("{reason}")]
    Unavailable {
        /// Reason, for the caller.
        reason: String,
        /// Delay before a retry.
        retry_after: Duration,
    },
    /// The request is invalid: status 400.
    #[error("{0}")]
    Invalid(String),
    /// No engine serves its model (404), or none has enough context for it (400).
    #[error(transparent)]
    NoFit(#[from] NoFit),
}

impl Refusal {
    /// The same refusal, without names of other models than that of the request.
    pub(crate) fn without_other_models(self) -> Refusal {
        match self {
            Refusal::NoFit(NoFit::Model { model, .. }) => {
                Refusal::NoFit(NoFit::Model { model, served: Vec::new() })
            }
            other => other,
        }
    }
}

/// Endpoints that may run a request, and instances that cannot.
struct EligibleEndpoints {
    /// Endpoints that may be chosen.
    endpoints: Vec<Arc<Endpoint>>,
    /// Instances that cannot run it, with the reason.
    unfit: Vec<(InstanceId, UnfitReason)>,
}

impl Decider {
    pub(crate) fn new(router: RouterHandle, endpoints: EndpointRegistry) -> Decider {
        let (objectives, configured_models, hash_identities) = Default::default();
        Decider { router, endpoints, objectives, configured_models, hash_identities }
    }

    /// Adds the models that the configuration names.
    pub(crate) fn with_models(self, models: &[ModelConfig]) -> Decider {
        let written = models.iter().map(|model| (model.name.clone(), !model.adapter.is_empty()));
        Decider { configured_models: Arc::new(written.collect()), ..self }
    }

    /// Adds the identities of the base model and of its adapters, under which prompts are hashed.
    pub(crate) fn with_identity(self, base: &IdentityManifest, models: &[ModelConfig]) -> Decider {
        let adapters = models.iter().map(|model| &model.adapter).filter(|adapter| !adapter.is_empty());
        let digest_of =
            |adapter: &String| IdentityManifest { adapter: adapter.clone(), ..base.clone() }.digest();
        let hashed_under = std::iter::once(base.digest()).chain(adapters.map(digest_of)).collect();
        Decider { hash_identities: hashed_under, ..self }
    }

    /// Adds the priorities of objectives.
    pub(crate) fn with_objectives(self, objectives: impl IntoIterator<Item = (String, i32)>) -> Decider {
        Decider { objectives: Arc::new(objectives.into_iter().collect()), ..self }
    }

    /// Priority of an objective; 0 for an unknown one.
    fn priority(&self, objective: &str) -> i32 {
        self.objectives.get(objective).copied().unwrap_or_default()
    }

    pub(crate) fn endpoints(&self) -> &EndpointRegistry {
        &self.endpoints
    }

    pub(crate) fn router(&self) -> &RouterHandle {
        &self.router
    }

    /// Asks the router where a prompt runs.
    pub(crate) async fn decide(
        &self,
        prompt: &Prompt,
        terms: &RequestContext,
    ) -> Result<RouteChoice, Refusal> {
        let EligibleEndpoints { endpoints: eligible, unfit } = self.eligible_and_unfit(terms)?;
        if eligible.is_empty() {
            let reason = match self.endpoints.count() {
                0 => "no endpoint that takes requests is known".to_owned(),
                known => format!("none of the {known} known endpoints may take this request"),
            };
            return Err(Refusal::Unavailable { reason, retry_after: Duration::from_secs(1) });
        }
        let among = Some(pb::CandidateSet {
            instances: eligible.iter().map(|endpoint| endpoint.instance.0).collect(),
        });
        let request = pb::RouteRequest { candidates: among, ..self.route_request(prompt, terms) };
        let besides =
            RouteHints { unfit, is_retry: terms.is_retry, hashed_under: Arc::clone(&self.hash_identities) };
        let reply = self.router.route_with(request, besides).await.map_err(|status| match status.code() {
            tonic::Code::InvalidArgument => Refusal::Invalid(status.message().to_owned()),
            _ => Refusal::Unavailable {
                reason: status.message().to_owned(),
                retry_after: Duration::from_secs(1),
            },
        })?;
        self.handle_reply(reply, terms)
    }

    /// Builds the route request.
    fn route_request(&self, prompt: &Prompt, terms: &RequestContext) -> pb::RouteRequest {
        pb::RouteRequest {
            request: terms.request,
            tenant: terms.tenant(),
            ttft_max_ms: terms.slo.ttft.map_or(0, |ttft| u64::try_from(ttft.as_millis()).unwrap_or(u64::MAX)),
            tbt_max_us: terms.slo.tpot.map_or(0, |tpot| u64::try_from(tpot.as_micros()).unwrap_or(u64::MAX)),
            priority: self.priority(&terms.slo.objective),
            hashes: prompt.hashes.iter().flat_map(|hash| hash.0).collect(),
            block_tokens: prompt.block_tokens,
            input_tokens: prompt.input_tokens,
            output_tokens: prompt.output_tokens,
            traceparent: terms.traceparent.clone(),
            text: prompt.is_text,
            ..pb::RouteRequest::default()
        }
    }

    /// Reports that a placed request runs at `target` instead of the endpoint that was chosen.
    pub(crate) fn report_reroute(&self, prompt: &Prompt, terms: &RequestContext, target: &RouteTarget) {
        let decode_instance = target.partner.as_ref().map(|partner| partner.instance);
        let request = self.route_request(prompt, terms);
        self.router.record_move(&request, target.endpoint.instance, decode_instance);
    }

    fn handle_reply(&self, reply: pb::RouteReply, terms: &RequestContext) -> Result<RouteChoice, Refusal> {
        match reply.answer {
            Some(pb::route_reply::Answer::Decision(decision)) => {
                // The router counts the request as sent; report it as abandoned if the endpoint has
                // just been removed.
                self.choice_from(&decision).inspect_err(|_| self.router.record_abort(terms.request))
            }
            Some(pb::route_reply::Answer::Rejected(rejected)) => {
                let pb::Rejected { reason, retry_after_ms, no_instance: nobody } = rejected;
                let retry_after = Duration::from_millis(retry_after_ms);
                if nobody {
                    return Err(Refusal::Unavailable { reason, retry_after });
                }
                Err(Refusal::Busy { reason, retry_after })
            }
            None => Err(Refusal::Unavailable {
                reason: "the router gave no answer".into(),
                retry_after: Duration::from_secs(1),
            }),
        }
    }

    /// Endpoints that may be chosen; empty if none can run the request.
    pub(crate) fn eligible(&self, terms: &RequestContext) -> Vec<Arc<Endpoint>> {
        self.eligible_and_unfit(terms).map_or_else(|_| Vec::new(), |open| open.endpoints)
    }

    /// Endpoints that may be chosen, and instances that cannot run the request.
    fn eligible_and_unfit(&self, terms: &RequestContext) -> Result<EligibleEndpoints, NoFit> {
        let known = self.endpoints.views();
        let models: Vec<_> = known.iter().map(|one| one.models.clone()).collect();
        let is_open: Vec<_> = known.iter().map(|one| one.is_open).collect();
        let fits = check_fit(&models, &is_open, &terms.requirements, &self.configured_models)?;
        let mut eligible = EligibleEndpoints { endpoints: Vec::new(), unfit: Vec::new() };
        for (EndpointView { endpoint, is_open, .. }, unfit) in known.into_iter().zip(fits) {
            let instance = endpoint.instance;
            let may = is_open
                && terms.candidates.as_ref().is_none_or(|among| among.contains(&instance))
                && !terms.excluded.contains(&instance);
            match unfit {
                Some(unfit) => eligible.unfit.push((instance, unfit)),
                None if may => eligible.endpoints.push(endpoint),
                None => {}
            }
        }
        Ok(eligible)
    }

    fn choice_from(&self, decision: &pb::Decision) -> Result<RouteChoice, Refusal> {
        // The chosen instance is the first candidate.
        let open = decision.candidates.iter().filter(|candidate| candidate.filtered.is_empty());
        let get = |instance| self.endpoints.get(InstanceId(instance));
        let mut targets = open.filter_map(|candidate| {
            let partner = match &candidate.handover {
                // A pair needs both of its endpoints.
                Some(handover) => Some(get(handover.instance)?),
                None => None,
            };
            Some(RouteTarget { endpoint: get(candidate.instance)?, partner })
        });
        let target = targets.next();
        let fallbacks = targets.collect();
        match target {
            Some(way) => Ok(RouteChoice {
                target: way,
                fallbacks,
                priority_deadline_ms: decision.priority_deadline_ms,
            }),
            None => Err(Refusal::Unavailable {
                reason: format!(
                    "instance {} was chosen, but its endpoint was just removed",
                    decision.instance
                ),
                retry_after: Duration::from_millis(100),
            }),
        }
    }
}
