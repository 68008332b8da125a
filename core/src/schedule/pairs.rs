//! Pairs: one instance computes a prompt, another goes on from there.
//!
//! Fleets are split so that long prompts do not hold up who is in the middle of an answer (DistServe, OSDI '24; Splitwise, ISCA '24; Mooncake, FAST '25 §3).
//! What that costs is the way of the KV from one to the other, and a fleet has instances of each kind, of both, and such as stand too far apart. Who computes and who
//! goes on is one choice here: for each that could compute, the partner by whose limits it keeps there, then that has the KV soonest, room and the least to do, among those that its place allows;
//! the pair then stands beside instances that do both by the same cost. Not here: that choice (`mod.rs`), and how KV gets from one to the other (nodes, or the
//! engines' own way).

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

use super::decoding::{Breaks, Climate};
use super::fleet::{Fleet, Instance, InstancePaths};
use super::lanes::{Price, Reader};
use super::load::Load;
use super::{Held, RouteRequest, save_to};
use crate::id::{InstanceId, NodeId, Tier};

const NS_PER_US: u64 = 1_000;

/// Tokens that a request is taken to say where nobody knows: about the mean of the conversation trace of Mooncake (FAST '25) is 340, that of short chats less.
const OUTPUT_TOKENS: u64 = 256;

/// What an instance does of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Role {
    /// All of it.
    #[default]
    Both = 0,
    /// It computes prompts, and another goes on.
    Prefill = 1,
    /// It goes on where another computed the prompt.
    Decode = 2,
}

impl Role {
    /// Every role, in the order of its number.
    pub const ALL: [Role; 3] = [Role::Both, Role::Prefill, Role::Decode];

    /// Lower-case name as used in configuration, labels and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Role::Both => "both",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        }
    }

    /// The role of this name.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Role> {
        Role::ALL.into_iter().find(|role| role.name() == name)
    }

    /// The role of this number.
    #[must_use]
    pub fn from_number(number: u32) -> Option<Role> {
        Role::ALL.into_iter().find(|role| *role as u32 == number)
    }
}

/// Names that a place has at most.
pub const DOMAIN_LEVELS: usize = 4;

/// Where an instance stands: what it is part of, the largest first, as in `zone-a/rack-7/host-3`. Names are kept as checksums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Domain {
    /// 0: not said.
    levels: [u64; DOMAIN_LEVELS],
}

/// What is wrong with a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DomainError {
    /// More names than count.
    #[error("it has {0} names, and {DOMAIN_LEVELS} at most count: leave out the largest or the smallest")]
    TooMany(usize),
    /// A name without a letter, as in `a//b`.
    #[error("its name {0} is empty: write names with one slash between two, the largest first")]
    Empty(usize),
}

impl Domain {
    /// Reads `zone/rack/host`; nothing is a place that is not said.
    ///
    /// # Errors
    /// [`DomainError`] when it has too many names, or an empty one.
    pub fn parse(text: &str) -> Result<Domain, DomainError> {
        let mut domain = Domain::default();
        if text.is_empty() {
            return Ok(domain);
        }
        let count = text.split('/').count();
        if count > DOMAIN_LEVELS {
            return Err(DomainError::TooMany(count));
        }
        for (at, (level, name)) in domain.levels.iter_mut().zip(text.split('/')).enumerate() {
            if name.is_empty() {
                return Err(DomainError::Empty(at + 1));
            }
            *level = xxh3_64(name.as_bytes()).max(1);
        }
        Ok(domain)
    }

    /// How many of the largest are the same for both.
    #[must_use]
    pub fn shared(self, other: Domain) -> usize {
        let both = self.levels.iter().zip(&other.levels);
        both.take_while(|(ours, theirs)| **ours != 0 && ours == theirs).count()
    }
}

/// What an instance is in a fleet of several kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// What it does.
    pub role: Role,
    /// Where it stands.
    pub domain: Domain,
}

/// Who goes on with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handover {
    /// The instance that does.
    pub instance: InstanceId,
    /// From when the prompt is computed until the KV is there and the first token out, in microseconds.
    pub us: u64,
    /// Requests that it has.
    pub running: u64,
    /// Partners that it was compared with.
    pub others: u32,
}

/// One that could go on.
struct Partner<'a> {
    id: InstanceId,
    domain: Domain,
    own: Option<NodeId>,
    paths: &'a InstancePaths,
    fetches: bool,
    /// Prompt tokens that it lacks.
    lacks_tokens: u64,
    running: u64,
    /// Until there is room for it.
    room_us: u64,
    /// Whose limit between tokens it would break there.
    breaks: Option<Breaks>,
}

/// Those that could go on with a request, whoever computes its prompt.
pub(super) struct Partners<'a> {
    request: &'a RouteRequest,
    fleet: &'a Fleet,
    all: SmallVec<[Partner<'a>; 16]>,
}

impl<'a> Partners<'a> {
    /// Those among `open`, instances that may be chosen whatever their role. Nothing in a fleet where all do both.
    pub(super) fn of(
        request: &'a RouteRequest,
        held: Held<'_>,
        (fleet, climate): (&'a Fleet, &Climate),
        is_open: impl Fn(&Instance) -> bool,
    ) -> Option<Partners<'a>> {
        if !fleet.has_roles() {
            return None;
        }
        let partner = |(instance, paths, part): (&Instance, &'a InstancePaths, Part)| {
            let goes_on = part.role != Role::Prefill && is_open(instance);
            let there = held.resident_blocks(instance.id).saturating_mul(request.block_tokens);
            if !goes_on {
                return None;
            }
            let forecast = climate.at_partner(fleet, instance);
            let learnt = |us| climate.learnt.tbt_us(us);
            let [tbt_us, others_us] = [forecast.tbt_us, forecast.others_us].map(learnt);
            Some(Partner {
                id: instance.id,
                domain: part.domain,
                own: instance.node,
                paths,
                fetches: instance.fetches,
                lacks_tokens: request.input_tokens.saturating_sub(there).into(),
                running: running(&instance.load),
                room_us: forecast.room_us,
                breaks: climate.breaks(instance, tbt_us, others_us),
            })
        };
        let all = fleet.instances_with_parts().filter_map(partner).collect();
        Some(Partners { request, fleet, all })
    }

    /// The best for the one that computes the prompt, which takes so long until it has.
    pub(super) fn best(&self, from: &Instance, domain: Domain, there_us: u64) -> Option<Handover> {
        let node = from.fetches.then(|| save_to(self.request, self.fleet, from.node)).flatten();
        let node = node.and_then(|holder| self.fleet.live(holder.node));
        let within = usize::from(self.fleet.limits.pair_within);
        // Most take the same path, for which the lane is looked up once.
        let mut last: Option<(Reader, Price)> = None;
        let mut handover = |partner: &Partner<'_>| {
            let profile = &self.fleet.profile;
            let tokens = partner.lacks_tokens;
            let (lane, stream_ns) = match node.filter(|_| partner.fetches) {
                Some(live) => {
                    let reader =
                        Reader { is_own: partner.own == Some(live.node), path: partner.paths.to(live.node) };
                    let known = last.filter(|(known, _)| *known == reader);
                    let (_, price) = *last
                        .insert(known.unwrap_or_else(|| (reader, live.price(Tier::Dram, reader, profile))));
                    let block_tokens = self.request.block_tokens;
                    (price.lane, live.stream_ns(price.lane, tokens, block_tokens, profile))
                }
                // The engines have a way of their own.
                None => (profile.network, profile.stream_ns(profile.network, tokens)),
            };
            let move_ns = lane.latency_ns.saturating_add(stream_ns);
            let step_ns =
                profile.step_ns.saturating_add(profile.step_ns_per_running.saturating_mul(partner.running));
            move_ns.saturating_add(step_ns) / NS_PER_US
        };
        let near = self.all.iter().filter(|partner| within == 0 || partner.domain.shared(domain) >= within);
        let mut count = 0;
        let all = near.map(|partner| {
            count += 1;
            let us = handover(partner);
            // Its room comes free while the prompt is computed.
            let room_us = partner.room_us.saturating_sub(there_us);
            let cost_us = us.saturating_add(room_us).saturating_add(self.pressure_us(partner.running));
            (cost_us, us, partner)
        });
        let (_, us, best) = all.min_by_key(|(cost_us, _, partner)| (partner.breaks, *cost_us, partner.id))?;
        Some(Handover { instance: best.id, us, running: best.running, others: count - 1 })
    }

    /// What a request adds to the time of others that run where it is decoded, in microseconds: each of its tokens lengthens a step of each of them.
    pub(super) fn pressure_us(&self, running: u64) -> u64 {
        let said = match self.request.output_tokens {
            0 => OUTPUT_TOKENS,
            known => known.into(),
        };
        let ns = self.fleet.profile.step_ns_per_running.saturating_mul(running).saturating_mul(said);
        ns / NS_PER_US
    }
}

/// Requests that an instance has, those that were sent since its report counted.
pub(super) fn running(load: &Load) -> u64 {
    u64::from(load.running).saturating_add(load.requests_ahead())
}
