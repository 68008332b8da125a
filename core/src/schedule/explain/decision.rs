//! The answer of routing: a decision with its plan and reasons, or a rejection with a retry hint.
//!
//! Not here: how the decision is reached (`mod.rs`) and its wire form (`kvfleet-proto`).

use crate::id::{Epoch, InstanceId, NodeId, RequestId, Tier, Timestamp};
use crate::index::Holder;
use crate::schedule::disaggregation::Handover;
use crate::schedule::predict::decode_forecast::{BrokenLimit, DecodePrediction};
use crate::schedule::sources::link_stats::{LinkPath, Price};
use std::fmt;
use std::time::Duration;

/// Predicted time to first token, by part, in microseconds. Modelled under the fleet's hardware
/// profile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prediction {
    /// Wait for the work ahead, beyond the transfer: both overlap.
    pub queue_us: u64,
    /// Time until the fetched KV has arrived.
    pub transfer_us: u64,
    /// Time to compute the rest and emit the first token.
    pub prefill_us: u64,
    /// Delay added by requests that arrive later but run earlier.
    pub overtaking_us: u64,
    /// Wait for KV capacity in GPU memory, after the work ahead is done.
    pub kv_wait_us: u64,
    /// Time between tokens after the first; not part of the TTFT.
    pub tbt_us: u64,
    /// Tokens computed until the first token.
    pub prompt: PromptWork,
}

/// Prompt tokens that an instance has and computes; input of its predicted and learned time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptWork {
    /// Tokens with KV available by then, fetched or resident in GPU memory.
    pub context_tokens: u32,
    /// Tokens computed after them.
    pub new_tokens: u32,
}

impl Prediction {
    /// Time to first token: transfer + queue + prefill (Mooncake, FAST '25, Algorithm 1), plus the
    /// waits for KV capacity and for overtaking requests.
    #[must_use]
    pub fn ttft_us(&self) -> u64 {
        [self.transfer_us, self.prefill_us, self.overtaking_us, self.kv_wait_us]
            .into_iter()
            .fold(self.queue_us, u64::saturating_add)
    }

    /// Same, plus the handover to the decode partner if there is one.
    fn ttft_with_handover_us(&self, handover: Option<Handover>) -> u64 {
        self.ttft_us().saturating_add(handover.map_or(0, |handover| handover.handover_us))
    }
}

/// Consecutive blocks to fetch from one tier of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// Source node.
    pub node: NodeId,
    /// Epoch under which the node announced them.
    pub epoch: Epoch,
    /// Their tier on that node.
    pub tier: Tier,
    /// Offset of the first block.
    pub start_blocks: u32,
    /// Number of blocks.
    pub len_blocks: u32,
}

/// An instance that was considered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The instance.
    pub instance: InstanceId,
    /// Prediction from profile and measured links alone, before learned corrections.
    pub uncorrected: Prediction,
    /// Corrected prediction; zero if the instance was filtered.
    pub predicted: Prediction,
    /// Delay that the request would cause to others, in microseconds. Covers requests that it would
    /// overtake, and later requests: its prefill grown by how busy the fleet is, and the part of
    /// its own wait that the transfer hides.
    pub delay_to_others_us: u64,
    /// Predicted time between tokens of requests that decode there, in microseconds; 0 if none
    /// does.
    pub others_tbt_us: u64,
    /// Whether its first token would miss the TTFT limit.
    pub is_late: bool,
    /// The inter-token limit that would be broken there, if any.
    pub broken_limit: Option<BrokenLimit>,
    /// Cost added because the instance joined recently and is still ramped up, in microseconds.
    pub slow_start_us: u64,
    /// Cost added because the instance has not reported for a while and may be gone, in
    /// microseconds.
    pub staleness_us: u64,
    /// Its priority deadline there.
    pub priority_deadline: Timestamp,
    /// Leading blocks that the instance has in GPU memory, as last reported; 0 if it was filtered.
    pub resident_blocks: u32,
    /// Whether some of these blocks are still being computed there, for a request that runs
    /// earlier.
    pub has_in_flight_blocks: bool,
    /// Blocks that its own node holds, from the first non-resident one; 0 if it was filtered.
    pub overlap_blocks: u32,
    /// The decode partner, if the instance only prefills.
    pub handover: Option<Handover>,
    /// Why it was not considered, if so.
    pub filtered: Option<FilterReason>,
}

impl Candidate {
    /// Predicted time to first token, including the handover, in microseconds.
    #[must_use]
    pub fn ttft_us(&self) -> u64 {
        self.predicted.ttft_with_handover_us(self.handover)
    }

    /// Cost of the request there: its TTFT, the delay to others, and the slow-start and staleness
    /// costs. The least cost is best for all requests together.
    #[must_use]
    pub fn cost_us(&self) -> u64 {
        [self.delay_to_others_us, self.slow_start_us, self.staleness_us]
            .into_iter()
            .fold(self.ttft_us(), u64::saturating_add)
    }
}

/// Why an instance was not considered. Closed set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilterReason {
    /// Its last report is too old.
    Stale {
        /// Age of the report.
        age: Duration,
    },
    /// Too many tokens are queued.
    QueueFull {
        /// Queued tokens.
        tokens: u64,
    },
    /// The caller excluded it.
    Ineligible,
    /// It only decodes: other instances compute the prompt.
    DecodeOnly,
    /// It only prefills, and no decode instance that may be chosen is close enough.
    NoDecodePartner,
    /// It cannot run the request, as the caller knows.
    Unfit(UnfitReason),
}

/// Why an instance cannot run a request, regardless of its load. Closed set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnfitReason {
    /// Its engine serves other models.
    Model,
    /// The prompt plus the output is longer than the context of its engine.
    Context,
}

impl fmt::Display for UnfitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            UnfitReason::Model => "it serves other models",
            UnfitReason::Context => "its context is too short",
        })
    }
}

impl fmt::Display for FilterReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FilterReason::Stale { age } => write!(f, "no report for {} ms", age.as_millis()),
            FilterReason::QueueFull { tokens } => write!(f, "{tokens} tokens are queued"),
            FilterReason::Ineligible => write!(f, "excluded by the caller"),
            FilterReason::DecodeOnly => write!(f, "it only decodes"),
            FilterReason::NoDecodePartner => write!(f, "no decode instance is close enough to hand over to"),
            FilterReason::Unfit(unfit) => unfit.fmt(f),
        }
    }
}

/// Result for blocks that were priced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceOutcome {
    /// Fetched from that holder.
    Fetched,
    /// Fetched from another holder.
    FetchedElsewhere,
    /// Recomputed.
    Recomputed,
}

impl fmt::Display for SourceOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SourceOutcome::Fetched => "taken",
            SourceOutcome::FetchedElsewhere => "passed over",
            SourceOutcome::Recomputed => "computed instead",
        })
    }
}

/// Why the decision was made. Closed set; each reason was decisive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The chosen instance had the least predicted TTFT.
    LeastTtft {
        /// Candidates it was compared with.
        others: u32,
        /// TTFT of the next best minus that of the chosen one, in microseconds.
        margin_us: u64,
    },
    /// The chosen instance had the least cost, and TTFT alone would choose another one or by
    /// another margin. Cost also counts the delay to others, slow start and staleness.
    LeastCost {
        /// Candidates it was compared with.
        others: u32,
        /// Cost of the next best minus that of the chosen one, in microseconds.
        margin_us: u64,
    },
    /// Several instances had the same least TTFT; the request id broke the tie.
    Tie {
        /// Number of equal instances, including the chosen one.
        among: u32,
    },
    /// Several instances had the same least cost, and TTFT alone would say something else; the
    /// request id broke the tie.
    CostTie {
        /// Number of equal instances, including the chosen one.
        among: u32,
    },
    /// The chosen instance joined recently, which adds to its cost.
    SlowStart {
        /// Added cost, in microseconds.
        slow_start_us: u64,
    },
    /// Another instance would have been chosen, but joined recently.
    SlowStartAvoided {
        /// That instance; of several, the one with the least cost otherwise.
        instance: InstanceId,
        /// Cost added to it, in microseconds.
        slow_start_us: u64,
    },
    /// The chosen instance has not reported for a while, which adds to its cost.
    StaleReport {
        /// Added cost, in microseconds.
        staleness_us: u64,
    },
    /// Another instance would have been chosen, but has not reported for a while.
    StaleReportAvoided {
        /// That instance; of several, the one with the least cost otherwise.
        instance: InstanceId,
        /// Cost added to it, in microseconds.
        staleness_us: u64,
    },
    /// No other instance could take it.
    OnlyCandidate,
    /// An inter-token limit decided: instances that break none come first.
    TbtLimit {
        /// Instances ranked behind the chosen one because they would break the request's own limit.
        own: u32,
        /// Instances where a limit of requests that already decode would be broken.
        others: u32,
    },
    /// The TTFT limit decided: instances that meet it come first.
    TtftLimit {
        /// Cheaper instances that would miss the limit.
        late: u32,
    },
    /// It has to wait for KV capacity in GPU memory.
    WaitsForKvCapacity {
        /// Wait after the work ahead, in microseconds.
        kv_wait_us: u64,
    },
    /// The instance has the leading blocks in GPU memory.
    Resident {
        /// Number of blocks.
        blocks: u32,
    },
    /// The instance was sent the leading blocks before, as text; no engine reports those.
    InferredResident {
        /// Number of blocks.
        blocks: u32,
    },
    /// The instance is computing some of the leading blocks for a request that runs earlier.
    InFlight,
    /// Its own node holds the leading blocks, not counting those in GPU memory.
    LocalOverlap {
        /// Number of blocks.
        blocks: u32,
    },
    /// Blocks are fetched from other nodes: the prefix gets another copy.
    RemoteFetch {
        /// Number of blocks.
        blocks: u32,
    },
    /// Blocks that nodes hold are recomputed because that is faster.
    RecomputeCheaper {
        /// Number of blocks.
        blocks: u32,
    },
    /// The measured price of blocks of a holder.
    MeasuredPrice {
        /// What happened to them.
        outcome: SourceOutcome,
        /// The holder.
        node: NodeId,
        /// Their tier there.
        tier: Tier,
        /// The path, if known.
        path: Option<LinkPath>,
        /// The price.
        price: Price,
    },
    /// No live node holds the first block, and it is not in the instance's GPU memory.
    NothingCached,
    /// Nodes may hold more, but the engine cannot fetch.
    CannotFetch,
    /// The index lists more blocks, from one on that no live node holds.
    HolderLost {
        /// Number of blocks from that one on.
        blocks: u32,
    },
    /// New blocks are saved on the ring's node, because the instance has no live node of its own.
    SaveOnRing {
        /// That node.
        node: NodeId,
    },
    /// No live node can take new blocks.
    NoSaveTarget,
    /// The instance computes the prompt, and another one decodes.
    Disaggregated {
        /// The partner, its handover time and its load.
        handover: Handover,
    },
    /// Instances were left out because of their role.
    RoleMismatch {
        /// Decode-only instances.
        decode: u32,
        /// Prefill instances without a decode partner.
        unpaired: u32,
    },
    /// Instances were left out because they cannot run the request.
    Unfit {
        /// Instances that serve other models.
        model: u32,
        /// Instances with a context that is too short.
        context: u32,
    },
    /// Instances were left out.
    Filtered {
        /// Instances without a fresh report.
        stale: u32,
        /// Instances with a full queue.
        full: u32,
        /// Instances that the caller excluded.
        ineligible: u32,
    },
}

/// The terms of a cost.
const COST_TERMS: &str = "TTFT, delay to others, slow start, stale reports";

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::LeastTtft { others, margin_us } => {
                write!(f, "least predicted TTFT of {} instances, next best {margin_us} us later", others + 1)
            }
            Reason::LeastCost { others, margin_us } => {
                write!(
                    f,
                    "least cost of {} instances ({COST_TERMS}), next best {margin_us} us more",
                    others + 1
                )
            }
            Reason::Tie { among } => write!(f, "equal TTFT on {among} instances, spread by request"),
            Reason::CostTie { among } => {
                write!(f, "equal cost on {among} instances ({COST_TERMS}), spread by request")
            }
            Reason::StaleReport { staleness_us } => {
                write!(f, "its last report is old: {staleness_us} us are added to its cost")
            }
            Reason::StaleReportAvoided { instance, staleness_us: added } => write!(
                f,
                "{instance} would cost less, but its last report is old: {added} us are added to its cost"
            ),
            Reason::SlowStart { slow_start_us } => {
                write!(f, "it joined recently: {slow_start_us} us are added to its cost")
            }
            Reason::SlowStartAvoided { instance, slow_start_us: added } => {
                write!(f, "{instance} would cost less, but joined recently: {added} us are added to its cost")
            }
            Reason::OnlyCandidate => write!(f, "only instance that can take it"),
            Reason::TbtLimit { own, others } => write!(
                f,
                "on {own} instances its inter-token limit would be broken, on {others} that of requests that \
                 decode there"
            ),
            Reason::TtftLimit { late } => {
                write!(
                    f,
                    "on {late} instances that would cost less ({COST_TERMS}) its first token would be too late"
                )
            }
            Reason::WaitsForKvCapacity { kv_wait_us } => {
                write!(f, "it waits {kv_wait_us} us for KV capacity in GPU memory, after the work ahead")
            }
            Reason::Disaggregated { handover: Handover { instance, handover_us: us, running, others } } => {
                write!(
                    f,
                    "it hands over to {instance} {us} us later, beside {running} requests, the best of {}",
                    others + 1
                )
            }
            Reason::RoleMismatch { .. } | Reason::Unfit { .. } | Reason::Filtered { .. } => {
                self.fmt_left_out(f)
            }
            Reason::InFlight
            | Reason::Resident { .. }
            | Reason::InferredResident { .. }
            | Reason::LocalOverlap { .. }
            | Reason::RemoteFetch { .. }
            | Reason::RecomputeCheaper { .. }
            | Reason::MeasuredPrice { .. }
            | Reason::NothingCached
            | Reason::CannotFetch
            | Reason::HolderLost { .. }
            | Reason::SaveOnRing { .. }
            | Reason::NoSaveTarget => self.fmt_blocks(f),
        }
    }
}

impl Reason {
    /// Writes how many instances were left out.
    fn fmt_left_out(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::RoleMismatch { decode, unpaired: alone } => write!(
                f,
                "left out {decode} decode-only instances, and {alone} prefill instances without a decode partner"
            ),
            Reason::Unfit { model, context } => write!(
                f,
                "left out {model} instances that serve other models, and {context} with a context that is too short"
            ),
            Reason::Filtered { stale, full, ineligible } => {
                write!(f, "left out {stale} instances without a fresh report and {full} with a full queue")?;
                if *ineligible > 0 {
                    write!(f, ", and {ineligible} excluded by the caller")?;
                }
                Ok(())
            }
            // `fmt` writes the other reasons.
            _ => Ok(()),
        }
    }

    /// Writes where blocks come from and go to.
    fn fmt_blocks(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::InFlight => {
                write!(f, "some of its blocks are being computed there for a request that goes before")
            }
            Reason::Resident { blocks } => write!(f, "the first {blocks} blocks are in its GPU memory"),
            Reason::InferredResident { blocks } => {
                write!(
                    f,
                    "it was sent the first {blocks} blocks of text before, and probably has them in GPU memory"
                )
            }
            Reason::LocalOverlap { blocks } => write!(f, "own node holds the first {blocks} blocks to fetch"),
            Reason::RemoteFetch { blocks } => write!(f, "{blocks} blocks come from other nodes"),
            Reason::RecomputeCheaper { blocks } => {
                write!(f, "{blocks} held blocks are faster to recompute than to fetch")
            }
            Reason::MeasuredPrice {
                outcome: fate,
                node,
                tier,
                path,
                price: Price { speed: lane, basis: measure },
            } => {
                let (tier, us, rate) = (tier.name(), lane.latency_ns / 1_000, lane.bytes_per_s);
                write!(f, "{tier} of {node}")?;
                if let Some(path) = path {
                    write!(f, " over {}", path.name())?;
                }
                write!(f, " at {rate} B/s after {us} us, {measure}: {fate}")
            }
            Reason::NothingCached => write!(f, "no live node holds the first block"),
            Reason::CannotFetch => write!(f, "its engine cannot fetch from nodes"),
            Reason::HolderLost { blocks } => {
                write!(f, "{blocks} further blocks are listed, but the first of them has no live holder")
            }
            Reason::SaveOnRing { node } => write!(f, "new blocks go to {node} by the ring"),
            Reason::NoSaveTarget => write!(f, "no live node takes new blocks"),
            // `fmt` and `fmt_left_out` write the other reasons.
            _ => Ok(()),
        }
    }
}

/// The instance that runs a request, the sources of its KV, and the reasons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The request.
    pub request: RequestId,
    /// The instance that runs it.
    pub instance: InstanceId,
    /// Leading blocks that the instance has in GPU memory, as last reported: neither fetched nor
    /// computed.
    pub resident_blocks: u32,
    /// Blocks to fetch, in prefix order and without gaps from the first non-resident block.
    pub sources: Vec<Source>,
    /// Number of blocks to fetch: the sum over `sources`.
    pub fetch_blocks: u32,
    /// Blocks after them, to compute.
    pub recompute_blocks: u32,
    /// Prompt tokens to compute.
    pub recompute_tokens: u32,
    /// The best holder for new blocks, in DRAM; `None` if no live node takes any.
    pub save_to: Option<Holder>,
    /// Prediction from profile and measured links alone: the input of
    /// [`TtftBias`](crate::schedule::TtftBias).
    pub uncorrected: Prediction,
    /// Corrected prediction.
    pub predicted: Prediction,
    /// The instance that decodes, if another one computes the prompt.
    pub handover: Option<Handover>,
    /// Prediction of its decoding.
    pub decode: DecodePrediction,
    /// Its priority deadline: an instance that orders its queue starts the earliest deadline first.
    pub priority_deadline: Timestamp,
    /// Every instance considered: the chosen one first, then by cost, then the filtered ones.
    pub candidates: Vec<Candidate>,
    /// Why it was chosen.
    pub reasons: Vec<Reason>,
}

impl Decision {
    /// Predicted time to first token, including the handover, in microseconds.
    #[must_use]
    pub fn ttft_us(&self) -> u64 {
        self.predicted.ttft_with_handover_us(self.handover)
    }
}

/// No instance can take the request now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}; ask again in {} ms", retry_after.as_millis())]
pub struct Rejection {
    /// The reason.
    pub reason: RejectReason,
    /// When to retry.
    pub retry_after: Duration,
}

/// Why no instance can take a request. Closed set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RejectReason {
    /// No instance ever reported.
    #[error("no instance has reported to this router: start one")]
    NoInstance,
    /// Instances are known, but none has a fresh report.
    #[error("none of {instances} instances has reported for {} ms", youngest.as_millis())]
    AllStale {
        /// Known instances.
        instances: u32,
        /// Age of the latest report.
        youngest: Duration,
    },
    /// Every instance with a fresh report has a full queue.
    #[error("all {instances} instances have full queues, the shortest has {tokens} tokens")]
    AllFull {
        /// Instances with a fresh report.
        instances: u32,
        /// Tokens in the shortest queue.
        tokens: u64,
    },
    /// The first token would miss the TTFT limit on every instance.
    #[error("the first token would come after {} ms, and its limit is {} ms", ttft.as_millis(), limit.as_millis())]
    TooLate {
        /// TTFT on the best instance.
        ttft: Duration,
        /// The requested limit.
        limit: Duration,
    },
    /// The fleet is overloaded: requests with a better claim come first.
    #[error(
        "the first token would come after {} ms, within its limit of {} ms, but the fleet is overloaded: \
         requests above {} ms are rejected",
        ttft.as_millis(),
        limit.as_millis(),
        within.as_millis()
    )]
    Overloaded {
        /// TTFT on the best instance.
        ttft: Duration,
        /// TTFT up to which it would be admitted now.
        within: Duration,
        /// The requested limit.
        limit: Duration,
    },
    /// No prefill instance has a decode partner that may be chosen, or only decode-only instances
    /// are left.
    #[error(
        "of {instances} instances {decode} only decode, and no prefill instance has a reporting decode \
         partner near enough: start one with the role \"both\", or one with the missing role"
    )]
    NoPair {
        /// Known instances.
        instances: u32,
        /// Decode-only instances among them.
        decode: u32,
    },
    /// Its tokens would miss the inter-token limit on every instance.
    #[error("its tokens would come {} us apart, and its limit is {} us", tbt.as_micros(), limit.as_micros())]
    TooSlow {
        /// Time between tokens on the best instance.
        tbt: Duration,
        /// The requested limit.
        limit: Duration,
    },
    /// On the best instance, requests that already decode would be slowed until one breaks its
    /// inter-token limit.
    #[error(
        "requests that decode there would get tokens {} us apart, above the {} us allowed by their limit of {} us",
        tbt.as_micros(),
        within.as_micros(),
        limit.as_micros()
    )]
    SlowsOthers {
        /// Their time between tokens on the best instance.
        tbt: Duration,
        /// Time between tokens up to which it would be admitted.
        within: Duration,
        /// The tightest of their limits.
        limit: Duration,
    },
    /// Decode capacity is overloaded: all of it is used, except for the share reserved for other
    /// tenants.
    #[error(
        "its tokens would come {} us apart, within its limit of {} us, but decoding is overloaded: requests \
         above {} us are rejected",
        tbt.as_micros(),
        limit.as_micros(),
        within.as_micros()
    )]
    DecodeOverloaded {
        /// Time between tokens on the best instance.
        tbt: Duration,
        /// Time between tokens up to which it would be admitted now.
        within: Duration,
        /// The requested limit.
        limit: Duration,
    },
    /// Instances are known, but the caller excluded all of them.
    #[error("none of {instances} instances is among those that may be chosen")]
    NoneEligible {
        /// Known instances.
        instances: u32,
    },
}
