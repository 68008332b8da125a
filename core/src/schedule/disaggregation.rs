//! Disaggregated prefill and decode: one instance computes a prompt, another decodes.
//!
//! Fleets are split so that long prompts do not stall running decodes (DistServe, OSDI '24;
//! Splitwise, ISCA '24; Mooncake, FAST '25 §3). The cost is the KV transfer between the two. A
//! fleet may have instances of each role, of both, and some that are too far apart, so both
//! instances are chosen together. For each prefill candidate this file picks the decode partner
//! within its topology: first by the limits it keeps there, then by KV arrival, free capacity and
//! load. The pair then competes with instances of both roles by the same cost. Not here: that
//! choice (`mod.rs`), and the KV transfer itself (nodes, or the engines' own connector).

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

use super::fleet::load::Load;
use super::fleet::{Fleet, Instance, InstancePaths};
use super::predict::decode_forecast::{BrokenLimit, DecodeForecast};
use super::sources::link_stats::{Price, ReadPath};
use super::{PrefixLocations, RouteRequest, save_to};
use crate::id::{InstanceId, NodeId, Tier};

const NS_PER_US: u64 = 1_000;

/// Assumed output tokens if unknown. The mean of the conversation trace of Mooncake (FAST '25) is
/// about 340; short chats have less.
const OUTPUT_TOKENS: u64 = 256;

/// Role of an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum InstanceRole {
    /// Prefill and decode.
    #[default]
    Both = 0,
    /// Prefill only: another instance decodes.
    Prefill = 1,
    /// Decode only: another instance computes the prompt.
    Decode = 2,
}

impl InstanceRole {
    /// Every role, in the order of its number.
    pub const ALL: [InstanceRole; 3] = [InstanceRole::Both, InstanceRole::Prefill, InstanceRole::Decode];

    /// Lower-case name as used in configuration, labels and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            InstanceRole::Both => "both",
            InstanceRole::Prefill => "prefill",
            InstanceRole::Decode => "decode",
        }
    }

    /// The role with this name.
    #[must_use]
    pub fn by_name(name: &str) -> Option<InstanceRole> {
        InstanceRole::ALL.into_iter().find(|role| role.name() == name)
    }

    /// The role with this number.
    #[must_use]
    pub fn from_number(number: u32) -> Option<InstanceRole> {
        InstanceRole::ALL.into_iter().find(|role| *role as u32 == number)
    }
}

/// Most levels of a topology domain.
pub const DOMAIN_LEVELS: usize = 4;

/// Topology of an instance, largest domain first, as in `zone-a/rack-7/host-3`. Names are kept as
/// hashes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Domain {
    /// 0 for an unset level.
    levels: [u64; DOMAIN_LEVELS],
}

/// Why a topology text is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DomainError {
    /// Too many levels.
    #[error("it has {0} names, and {DOMAIN_LEVELS} at most count: leave out the largest or the smallest")]
    TooMany(usize),
    /// An empty name, as in `a//b`.
    #[error("its name {0} is empty: write names with one slash between two, the largest first")]
    Empty(usize),
}

impl Domain {
    /// Parses `zone/rack/host`; an empty text is an unset domain.
    ///
    /// # Errors
    /// [`DomainError`] if it has too many levels, or an empty one.
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

    /// Number of leading levels that are equal in both.
    #[must_use]
    pub fn shared_levels(self, other: Domain) -> usize {
        let both = self.levels.iter().zip(&other.levels);
        both.take_while(|(ours, theirs)| **ours != 0 && ours == theirs).count()
    }
}

/// Role and topology of an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Its role.
    pub role: InstanceRole,
    /// Its topology.
    pub domain: Domain,
}

/// The decode partner of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handover {
    /// The partner.
    pub instance: InstanceId,
    /// Time from the end of prefill until the KV has arrived and the first token is out, in
    /// microseconds.
    pub handover_us: u64,
    /// Requests on the partner.
    pub running: u64,
    /// Partners that it was compared with.
    pub others: u32,
}

/// An instance that could decode the request.
struct DecodePartner<'a> {
    id: InstanceId,
    domain: Domain,
    own_node: Option<NodeId>,
    paths: &'a InstancePaths,
    can_fetch: bool,
    /// Prompt tokens without KV in its GPU memory.
    missing_tokens: u64,
    running: u64,
    /// Wait for KV capacity, in microseconds.
    kv_wait_us: u64,
    /// The inter-token limit that it would break there.
    broken_limit: Option<BrokenLimit>,
}

/// All instances that could decode a request, for any prefill instance.
pub(super) struct DecodePartners<'a> {
    request: &'a RouteRequest,
    fleet: &'a Fleet,
    all: SmallVec<[DecodePartner<'a>; 16]>,
}

impl<'a> DecodePartners<'a> {
    /// The decode partners among instances that pass `is_open`, which may be chosen regardless of
    /// their role. `None` in a fleet without roles.
    pub(super) fn find(
        request: &'a RouteRequest,
        held: PrefixLocations<'_>,
        fleet: &'a Fleet,
        decode: &DecodeForecast,
        is_open: impl Fn(&Instance) -> bool,
    ) -> Option<DecodePartners<'a>> {
        if !fleet.has_roles() {
            return None;
        }
        let partner = |(instance, paths, part): (&Instance, &'a InstancePaths, Placement)| {
            let can_decode = part.role != InstanceRole::Prefill && is_open(instance);
            let resident_tokens = held.resident_blocks(instance.id).saturating_mul(request.block_tokens);
            if !can_decode {
                return None;
            }
            let forecast = decode.estimate_at_partner(fleet, instance);
            let learnt = |us| decode.bias.corrected_tbt_us(us);
            let [tbt_us, others_us] = [forecast.tbt_us, forecast.others_tbt_us].map(learnt);
            Some(DecodePartner {
                id: instance.id,
                domain: part.domain,
                own_node: instance.node,
                paths,
                can_fetch: instance.can_fetch,
                missing_tokens: request.input_tokens.saturating_sub(resident_tokens).into(),
                running: active_requests(&instance.load),
                kv_wait_us: forecast.kv_wait_us,
                broken_limit: decode.broken_limit(instance, tbt_us, others_us),
            })
        };
        let all = fleet.instances_with_placement().filter_map(partner).collect();
        Some(DecodePartners { request, fleet, all })
    }

    /// The best partner for a prefill instance that has computed the prompt after
    /// `prefill_done_us`.
    pub(super) fn best_for(&self, from: &Instance, domain: Domain, prefill_done_us: u64) -> Option<Handover> {
        let node = from.can_fetch.then(|| save_to(self.request, self.fleet, from.node)).flatten();
        let node = node.and_then(|holder| self.fleet.live(holder.node));
        let within = usize::from(self.fleet.limits.pair_shared_levels);
        // Most partners take the same path, so the last price is reused.
        let mut last: Option<(ReadPath, Price)> = None;
        let mut handover_us = |partner: &DecodePartner<'_>| {
            let profile = &self.fleet.profile;
            let tokens = partner.missing_tokens;
            let (lane, stream_ns) = match node.filter(|_| partner.can_fetch) {
                Some(live) => {
                    let reader = ReadPath {
                        is_local: partner.own_node == Some(live.node),
                        path: partner.paths.to(live.node),
                    };
                    let known = last.filter(|(known, _)| *known == reader);
                    let (_, price) = *last
                        .insert(known.unwrap_or_else(|| (reader, live.price(Tier::Dram, reader, profile))));
                    let block_tokens = self.request.block_tokens;
                    (price.speed, live.stream_ns(price.speed, tokens, block_tokens, profile))
                }
                // The engines use their own connector.
                None => (profile.network, profile.stream_ns(profile.network, tokens)),
            };
            let move_ns = lane.latency_ns.saturating_add(stream_ns);
            let step_ns =
                profile.step_ns.saturating_add(profile.step_ns_per_running.saturating_mul(partner.running));
            move_ns.saturating_add(step_ns) / NS_PER_US
        };
        let near =
            self.all.iter().filter(|partner| within == 0 || partner.domain.shared_levels(domain) >= within);
        let mut count = 0;
        let all = near.map(|partner| {
            count += 1;
            let us = handover_us(partner);
            // The partner frees KV capacity while the prompt is computed.
            let room_us = partner.kv_wait_us.saturating_sub(prefill_done_us);
            let cost_us = us.saturating_add(room_us).saturating_add(self.pressure_us(partner.running));
            (cost_us, us, partner)
        });
        let (_, us, best) =
            all.min_by_key(|(cost_us, _, partner)| (partner.broken_limit, *cost_us, partner.id))?;
        Some(Handover { instance: best.id, handover_us: us, running: best.running, others: count - 1 })
    }

    /// Delay that decoding a request causes to others there, in microseconds: each of its tokens
    /// lengthens a step of each of them.
    pub(super) fn pressure_us(&self, running: u64) -> u64 {
        let output_tokens = match self.request.output_tokens {
            0 => OUTPUT_TOKENS,
            known => known.into(),
        };
        let ns = self.fleet.profile.step_ns_per_running.saturating_mul(running).saturating_mul(output_tokens);
        ns / NS_PER_US
    }
}

/// Requests on an instance, including those sent since its report.
pub(super) fn active_requests(load: &Load) -> u64 {
    u64::from(load.running).saturating_add(load.requests_ahead())
}
