//! What routing answers: a decision with its plan and reasons, or a rejection with a time to come back.
//!
//! Not here: how it was reached (`mod.rs`) and its wire form (`kvfleet-proto`).

use std::fmt;
use std::time::Duration;

use super::decoding::{Breaks, Pacing};
use super::lanes::{LinkPath, Price};
use super::pairs::Handover;
use crate::id::{Epoch, InstanceId, NodeId, RequestId, Tier, Timestamp};
use crate::index::Holder;

/// Predicted time to first token, by part. Modelled under the fleet's profile, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prediction {
    /// Until the work ahead is done, from when the fetched KV is there: both go on at once.
    pub queue_us: u64,
    /// Until the fetched KV is there.
    pub transfer_us: u64,
    /// Until the rest is computed and the first token is out.
    pub prefill_us: u64,
    /// By how much those lengthen the wait that are still to come and go before it.
    pub passed_us: u64,
    /// Until there is room for it in GPU memory, from when the work ahead is done.
    pub room_us: u64,
    /// Time between two of its tokens after the first; no part of the time to that one.
    pub tbt_us: u64,
    /// What is computed of it until the first.
    pub prompt: Prompt,
}

/// What an instance computes of a prompt, of which its time is predicted and learnt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    /// Tokens whose KV is there by then, fetched or in GPU memory.
    pub context_tokens: u32,
    /// Tokens that are computed behind them.
    pub new_tokens: u32,
}

impl Prediction {
    /// Time to first token: transfer + queue + prefill (Mooncake, FAST '25, Algorithm 1), room in GPU memory, and what those take who come later and go before.
    #[must_use]
    pub fn ttft_us(&self) -> u64 {
        [self.transfer_us, self.prefill_us, self.passed_us, self.room_us]
            .into_iter()
            .fold(self.queue_us, u64::saturating_add)
    }

    /// The same with the way to who goes on, if another does.
    fn ttft_by_us(&self, handover: Option<Handover>) -> u64 {
        self.ttft_us().saturating_add(handover.map_or(0, |handover| handover.us))
    }
}

/// Consecutive blocks to fetch from one tier of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// From whom.
    pub node: NodeId,
    /// Under which epoch the node announced them.
    pub epoch: Epoch,
    /// Where they are there.
    pub tier: Tier,
    /// Offset of the first block.
    pub start_blocks: u32,
    /// How many.
    pub len_blocks: u32,
}

/// An instance that was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The instance.
    pub instance: InstanceId,
    /// What the request would cost there by profile and measured links alone.
    pub parts: Prediction,
    /// What the request would cost there; zero when it was filtered.
    pub predicted: Prediction,
    /// What it would add to the waiting of others, in microseconds: of all requests that it would pass, and of those to come: by its prefill, the longer
    /// the busier the fleet is, and by as much of its own wait as its transfer hides.
    pub delays_us: u64,
    /// Time between two tokens of those that decode there, in microseconds; 0 where nobody does.
    pub others_tbt_us: u64,
    /// Whether its first token would be later than it may be.
    pub is_late: bool,
    /// Whose limit between two tokens would be broken there, if any.
    pub breaks: Option<Breaks>,
    /// What is added to its cost since it joined of late and is given less than others, in microseconds.
    pub ramp_us: u64,
    /// What is added since it has said nothing for a while and may be gone, in microseconds.
    pub doubt_us: u64,
    /// When its turn there would be.
    pub turn: Timestamp,
    /// Leading blocks that it has in GPU memory, as far as it said; 0 when it was filtered.
    pub resident_blocks: u32,
    /// Whether some of these are still being computed there, for a request whose turn is before.
    pub is_coming: bool,
    /// Blocks that its own node holds, from the first that is not resident on; 0 when it was filtered.
    pub overlap_blocks: u32,
    /// Who would go on, where it computes prompts only.
    pub handover: Option<Handover>,
    /// Why it was not considered, if so.
    pub filtered: Option<Filtered>,
}

impl Candidate {
    /// Predicted time to first token, with the way to who goes on, in microseconds.
    #[must_use]
    pub fn ttft_us(&self) -> u64 {
        self.predicted.ttft_by_us(self.handover)
    }

    /// What the request costs there, its own waiting and that of others, and more where the instance joined of late or is silent: what is least is best for all together.
    #[must_use]
    pub fn cost_us(&self) -> u64 {
        [self.delays_us, self.ramp_us, self.doubt_us].into_iter().fold(self.ttft_us(), u64::saturating_add)
    }
}

/// Why an instance was not considered. Closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filtered {
    /// Its last report is too old.
    Stale {
        /// Age of the report.
        age: Duration,
    },
    /// Too many tokens are ahead.
    QueueFull {
        /// How many.
        tokens: u64,
    },
    /// Whoever asked left it out.
    Ineligible,
    /// It goes on where others computed the prompt, and computes none.
    Decodes,
    /// It computes prompts, and none that goes on from there may be chosen and is near enough.
    Alone,
    /// It cannot run the request, as whoever asked knows.
    Unfit(Unfit),
}

/// Why an instance cannot run a request, whatever it has to do. Closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// Its engine serves other models.
    Model,
    /// The prompt, with what is to be said, is longer than its engine takes.
    Context,
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unfit::Model => "it serves other models",
            Unfit::Context => "its context is too short",
        })
    }
}

impl fmt::Display for Filtered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Filtered::Stale { age } => write!(f, "no report for {} ms", age.as_millis()),
            Filtered::QueueFull { tokens } => write!(f, "{tokens} tokens are queued"),
            Filtered::Ineligible => write!(f, "left out by whoever asked"),
            Filtered::Decodes => write!(f, "it computes no prompts"),
            Filtered::Alone => write!(f, "no instance that may go on from there is near enough"),
            Filtered::Unfit(unfit) => unfit.fmt(f),
        }
    }
}

/// What became of blocks that were priced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// They are fetched from there.
    Taken,
    /// They are fetched from somebody else.
    PassedOver,
    /// They are computed.
    Computed,
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Fate::Taken => "taken",
            Fate::PassedOver => "passed over",
            Fate::Computed => "computed instead",
        })
    }
}

/// Why the decision is what it is. Closed; each one says something that was decisive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The chosen instance had the least predicted TTFT.
    LeastTtft {
        /// Candidates it was compared with.
        others: u32,
        /// How much later the next best would have been, in microseconds.
        margin_us: u64,
    },
    /// The chosen instance had the least cost, and TTFT alone would choose another or by another margin: what others wait longer counts too, those that it
    /// passes and those still to come, and that one joined of late or is silent.
    LeastCost {
        /// Candidates it was compared with.
        others: u32,
        /// How much more the next best would have cost, in microseconds.
        margin_us: u64,
    },
    /// Several instances had the same least TTFT; the request's number chose among them.
    Tie {
        /// How many, the chosen one included.
        among: u32,
    },
    /// Several instances had the same least cost, and TTFT alone would say something else; the request's number chose among them.
    CostTie {
        /// How many, the chosen one included.
        among: u32,
    },
    /// The chosen instance joined of late, and that counts against it.
    Joined {
        /// By how much, in microseconds.
        ramp_us: u64,
    },
    /// Another one would have been chosen, and joined of late.
    JoinerSpared {
        /// Which; of several, the one that would have cost least.
        instance: InstanceId,
        /// How much counts against it, in microseconds.
        ramp_us: u64,
    },
    /// The chosen instance has said nothing for a while, and that counts against it.
    Silent {
        /// By how much, in microseconds.
        doubt_us: u64,
    },
    /// Another one would have been chosen, and has said nothing for a while.
    SilentSpared {
        /// Which; of several, the one that would have cost least.
        instance: InstanceId,
        /// How much counts against it, in microseconds.
        doubt_us: u64,
    },
    /// No other instance could take it.
    OnlyCandidate,
    /// A limit between two tokens counted: instances where none is broken come first.
    Paced {
        /// Instances behind the chosen one where its own limit would be broken.
        own: u32,
        /// Those where that of requests that decode there would be.
        others: u32,
    },
    /// The limit until its first token counted: instances where it is kept come first.
    InTime {
        /// Instances that would cost less, and be too late.
        late: u32,
    },
    /// It has to wait for room in GPU memory.
    WaitsForRoom {
        /// For so long behind the work ahead, in microseconds.
        room_us: u64,
    },
    /// It has the leading blocks in GPU memory.
    Resident {
        /// How many.
        blocks: u32,
    },
    /// It was sent the leading blocks before, as text of which no instance tells.
    Guessed {
        /// How many.
        blocks: u32,
    },
    /// It computes some of the leading blocks for a request that goes before.
    Coming,
    /// Its own node holds the leading blocks, those in GPU memory left out.
    OwnOverlap {
        /// How many.
        blocks: u32,
    },
    /// Blocks come over the network from other nodes: the prefix gets another copy.
    RemoteFetch {
        /// How many.
        blocks: u32,
    },
    /// Blocks that are held are computed again because that is faster.
    RecomputeCheaper {
        /// How many.
        blocks: u32,
    },
    /// What blocks of a holder were priced with, where that was measured.
    Priced {
        /// What became of them.
        fate: Fate,
        /// From whom.
        node: NodeId,
        /// Where they are there.
        tier: Tier,
        /// Over which path, where that is known.
        path: Option<LinkPath>,
        /// With what.
        price: Price,
    },
    /// No live node holds the first block, and it is not in the instance's GPU memory.
    NothingHeld,
    /// Nodes may hold more, and its engine cannot fetch.
    FetchesNothing,
    /// The index names more blocks, from one on whose holders are not live.
    HolderGone {
        /// How many, that one included.
        blocks: u32,
    },
    /// New blocks are saved on the ring's node, as the instance has no live node of its own.
    SavedByRing {
        /// Where.
        node: NodeId,
    },
    /// No live node can take new blocks.
    NowhereToSave,
    /// It computes the prompt, and another goes on.
    Pair {
        /// Which, how soon, and beside how many.
        handover: Handover,
    },
    /// Instances were left out for what they do.
    Roles {
        /// Those that compute no prompts.
        decode: u32,
        /// Those that compute prompts, and have nobody to go on.
        alone: u32,
    },
    /// Instances were left out that cannot run it.
    Unfit {
        /// Those that serve other models.
        model: u32,
        /// Those whose context is too short.
        context: u32,
    },
    /// Instances were left out.
    Filtered {
        /// Those without a fresh report.
        stale: u32,
        /// Those with a full queue.
        full: u32,
        /// Those that whoever asked left out.
        ineligible: u32,
    },
}

/// What counts in a choice.
const COSTS: &str = "TTFT, what others wait longer, slow starts, silence";

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::LeastTtft { others, margin_us } => {
                write!(f, "least predicted TTFT of {} instances, next best {margin_us} us later", others + 1)
            }
            Reason::LeastCost { others, margin_us } => {
                write!(f, "least cost of {} instances ({COSTS}), next best {margin_us} us more", others + 1)
            }
            Reason::Tie { among } => write!(f, "equal TTFT on {among} instances, spread by request"),
            Reason::CostTie { among } => {
                write!(f, "equal cost on {among} instances ({COSTS}), spread by request")
            }
            Reason::Silent { doubt_us } => {
                write!(f, "it has said nothing for a while: {doubt_us} us count against it")
            }
            Reason::SilentSpared { instance, doubt_us } => write!(
                f,
                "{instance} would cost less and has said nothing for a while: {doubt_us} us count against it"
            ),
            Reason::Joined { ramp_us } => write!(f, "it joined of late: {ramp_us} us count against it"),
            Reason::JoinerSpared { instance, ramp_us } => {
                write!(f, "{instance} would cost less and joined of late: {ramp_us} us count against it")
            }
            Reason::OnlyCandidate => write!(f, "only instance that can take it"),
            Reason::Paced { own, others } => write!(
                f,
                "on {own} instances its tokens would come too far apart, on {others} those of requests that decode there"
            ),
            Reason::InTime { late } => {
                write!(
                    f,
                    "on {late} instances that would cost less ({COSTS}) its first token would be too late"
                )
            }
            Reason::WaitsForRoom { room_us } => {
                write!(f, "it waits {room_us} us for room in GPU memory, behind the work ahead")
            }
            Reason::Pair { handover: Handover { instance, us, running, others } } => {
                write!(
                    f,
                    "{instance} goes on from there {us} us later beside {running} requests, the best of {}",
                    others + 1
                )
            }
            Reason::Roles { .. } | Reason::Unfit { .. } | Reason::Filtered { .. } => self.say_of_left_out(f),
            Reason::Coming
            | Reason::Resident { .. }
            | Reason::Guessed { .. }
            | Reason::OwnOverlap { .. }
            | Reason::RemoteFetch { .. }
            | Reason::RecomputeCheaper { .. }
            | Reason::Priced { .. }
            | Reason::NothingHeld
            | Reason::FetchesNothing
            | Reason::HolderGone { .. }
            | Reason::SavedByRing { .. }
            | Reason::NowhereToSave => self.say_of_blocks(f),
        }
    }
}

impl Reason {
    /// Says how many instances were left out.
    fn say_of_left_out(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Roles { decode, alone } => write!(
                f,
                "left out {decode} instances that compute no prompts, and {alone} that have nobody to go on from there"
            ),
            Reason::Unfit { model, context } => write!(
                f,
                "left out {model} instances that serve other models, and {context} whose context is too short"
            ),
            Reason::Filtered { stale, full, ineligible } => {
                write!(f, "left out {stale} instances without a fresh report and {full} with a full queue")?;
                if *ineligible > 0 {
                    write!(f, ", and {ineligible} by whoever asked")?;
                }
                Ok(())
            }
            // The others are said elsewhere.
            _ => Ok(()),
        }
    }

    /// Says where blocks come from and go to.
    fn say_of_blocks(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Coming => {
                write!(f, "some of them are being computed there for a request that goes before")
            }
            Reason::Resident { blocks } => write!(f, "the first {blocks} blocks are in its GPU memory"),
            Reason::Guessed { blocks } => {
                write!(
                    f,
                    "it was sent the first {blocks} blocks of text before, and probably has them in GPU memory"
                )
            }
            Reason::OwnOverlap { blocks } => write!(f, "own node holds the first {blocks} blocks to fetch"),
            Reason::RemoteFetch { blocks } => write!(f, "{blocks} blocks come from other nodes"),
            Reason::RecomputeCheaper { blocks } => {
                write!(f, "{blocks} held blocks are faster to recompute than to fetch")
            }
            Reason::Priced { fate, node, tier, path, price: Price { lane, measure } } => {
                let (tier, us, rate) = (tier.name(), lane.latency_ns / 1_000, lane.bytes_per_s);
                write!(f, "{tier} of {node}")?;
                if let Some(path) = path {
                    write!(f, " over {}", path.name())?;
                }
                write!(f, " at {rate} B/s after {us} us, {measure}: {fate}")
            }
            Reason::NothingHeld => write!(f, "no live node holds the first block"),
            Reason::FetchesNothing => write!(f, "its engine fetches nothing from nodes"),
            Reason::HolderGone { blocks } => {
                write!(f, "{blocks} blocks lie from one on whose holders are not live")
            }
            Reason::SavedByRing { node } => write!(f, "new blocks go to {node} by the ring"),
            Reason::NowhereToSave => write!(f, "no live node takes new blocks"),
            // The others are said above.
            _ => Ok(()),
        }
    }
}

/// Where a request runs, where its KV comes from, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The request.
    pub request: RequestId,
    /// Where it runs.
    pub instance: InstanceId,
    /// Leading blocks that the instance has in GPU memory, as far as it said: neither fetched nor computed.
    pub resident_blocks: u32,
    /// What is fetched, in prefix order and without gaps from the first block that is not resident.
    pub sources: Vec<Source>,
    /// Blocks to fetch: what `sources` sum to.
    pub fetch_blocks: u32,
    /// Blocks behind them, to compute.
    pub recompute_blocks: u32,
    /// Prompt tokens to compute.
    pub recompute_tokens: u32,
    /// Where new blocks are best saved, in DRAM; nothing when no live node takes any.
    pub save_to: Option<Holder>,
    /// What the request will cost there by profile and measured links alone: what [`Learnt`](super::Learnt) learns by.
    pub parts: Prediction,
    /// What the request will cost there.
    pub predicted: Prediction,
    /// Who goes on when the prompt is computed, where that is another instance.
    pub handover: Option<Handover>,
    /// What was predicted of its decoding.
    pub pacing: Pacing,
    /// When its turn is: of what waits at an instance that keeps an order, the earliest goes first.
    pub turn: Timestamp,
    /// Every instance looked at: the chosen one first, then by cost, then the filtered ones.
    pub candidates: Vec<Candidate>,
    /// Why.
    pub reasons: Vec<Reason>,
}

impl Decision {
    /// Predicted time to first token, with the way to who goes on, in microseconds.
    #[must_use]
    pub fn ttft_us(&self) -> u64 {
        self.predicted.ttft_by_us(self.handover)
    }
}

/// No instance can take the request now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}; ask again in {} ms", retry_after.as_millis())]
pub struct Rejection {
    /// Why.
    pub reason: RejectReason,
    /// When asking again makes sense.
    pub retry_after: Duration,
}

/// Why no instance can take a request. Closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RejectReason {
    /// No instance ever reported.
    #[error("no instance has reported to this router: start one")]
    NoInstance,
    /// Instances are known, and none has reported lately.
    #[error("none of {instances} instances has reported for {} ms", youngest.as_millis())]
    AllStale {
        /// How many are known.
        instances: u32,
        /// Age of the latest report.
        youngest: Duration,
    },
    /// Every instance with a fresh report has a full queue.
    #[error("all {instances} instances have full queues, the shortest has {tokens} tokens")]
    AllFull {
        /// How many have a fresh report.
        instances: u32,
        /// Tokens in the shortest queue.
        tokens: u64,
    },
    /// Wherever it ran, the first token would come after its limit.
    #[error("the first token would come after {} ms, and its limit is {} ms", ttft.as_millis(), limit.as_millis())]
    TooLate {
        /// On the best instance.
        ttft: Duration,
        /// What was asked for.
        limit: Duration,
    },
    /// More is offered than can be served in time, and others go before this one.
    #[error(
        "the first token would come after {} ms, within its limit of {} ms, and more is asked for than can be served: beyond {} ms others go before",
        ttft.as_millis(),
        limit.as_millis(),
        within.as_millis()
    )]
    Crowded {
        /// On the best instance.
        ttft: Duration,
        /// Up to when it would be let in now.
        within: Duration,
        /// What was asked for.
        limit: Duration,
    },
    /// Of those that could compute the prompt none has another that may go on, or all that are left compute no prompts.
    #[error(
        "of {instances} instances {decode} compute no prompts, and the others have nobody that reports and is near enough to go on: start one with the role \"both\", or one of the kind that is missing"
    )]
    NoPair {
        /// How many are known.
        instances: u32,
        /// Of these, how many compute no prompts.
        decode: u32,
    },
    /// Wherever it ran, its tokens would come further apart than they may.
    #[error("its tokens would come {} us apart, and its limit is {} us", tbt.as_micros(), limit.as_micros())]
    TooSlow {
        /// On the best instance.
        tbt: Duration,
        /// What was asked for.
        limit: Duration,
    },
    /// Where it is best for it to run, tokens of requests that decode there would come so far apart that some would break their limit.
    #[error(
        "tokens of requests that decode would come {} us apart, and beyond {} us those might break their limit whose own is {} us",
        tbt.as_micros(),
        within.as_micros(),
        limit.as_micros()
    )]
    Slows {
        /// On the best instance.
        tbt: Duration,
        /// Up to which it would be let in.
        within: Duration,
        /// The least that was asked for one of them.
        limit: Duration,
    },
    /// As many decode as can within its limit but for what is kept for others, and others go before this one.
    #[error(
        "its tokens would come {} us apart, within its limit of {} us, and more is asked for than can be served: beyond {} us others go before",
        tbt.as_micros(),
        limit.as_micros(),
        within.as_micros()
    )]
    CrowdedPace {
        /// On the best instance.
        tbt: Duration,
        /// Up to when it would be let in now.
        within: Duration,
        /// What was asked for.
        limit: Duration,
    },
    /// Instances are known, and whoever asked left all of them out.
    #[error("none of {instances} instances is among those that may be chosen")]
    NoneEligible {
        /// How many are known.
        instances: u32,
    },
}
