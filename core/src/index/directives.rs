//! What the operators ask of every node: pins, quotas, times to live, and of which weights its blocks are to be.
//!
//! Not here: how a node follows them.

use std::collections::BTreeMap;

use super::command::{Applied, Pin, Refusal};
use super::limits::{IndexLimits, within};
use crate::id::{Generation, GroupId, PinId, TenantId};

/// Pins, quotas and times to live in force, each in the order of its number; and the generation of the weights.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Directives {
    pub(super) pins: BTreeMap<PinId, Pin>,
    /// Limit in bytes per node.
    pub(super) quotas: BTreeMap<TenantId, u64>,
    /// Milliseconds since last use.
    pub(super) ttls: BTreeMap<GroupId, u64>,
    /// Blocks of all pins, counted as often as pinned.
    pub(super) pinned_blocks: u64,
    pub(super) generation: Generation,
}

impl Directives {
    /// Adds a pin. The same pin again changes nothing, so that a caller may repeat a lost call; with the same owner and
    /// blocks, how firmly and until when is what was said last.
    pub(super) fn pin(&mut self, pin: &Pin, limits: &IndexLimits) -> Result<Applied, Refusal> {
        if let Some(known) = self.pins.get_mut(&pin.pin) {
            if known == pin {
                return Ok(Applied::Ignored);
            }
            if (&known.owner, &known.blocks) != (&pin.owner, &pin.blocks) {
                return Err(Refusal::PinExists(pin.pin));
            }
            (known.kind, known.ends_ms) = (pin.kind, pin.ends_ms);
            return Ok(Applied::Done);
        }
        within("pins", self.pins.len() as u64 + 1, limits.pins_max.into())?;
        let blocks = self.pinned_blocks + pin.blocks.len() as u64;
        within("blocks of all pins", blocks, limits.pinned_blocks_max.into())?;
        self.insert_pin(pin.clone());
        Ok(Applied::Done)
    }

    pub(super) fn insert_pin(&mut self, pin: Pin) {
        self.pinned_blocks += pin.blocks.len() as u64;
        self.pins.insert(pin.pin, pin);
    }

    /// Ends a pin, if its owner asks; one with another end than `ends_ms`, if that is named, stays.
    pub(super) fn unpin(
        &mut self,
        pin: PinId,
        owner: &str,
        ends_ms: Option<u64>,
    ) -> Result<Applied, Refusal> {
        let Some(known) = self.pins.get(&pin) else { return Ok(Applied::Ignored) };
        if known.owner != owner {
            return Err(Refusal::NotOwner { pin, owner: known.owner.clone() });
        }
        if ends_ms.is_some() && known.ends_ms != ends_ms {
            return Ok(Applied::Ignored);
        }
        self.pinned_blocks -= known.blocks.len() as u64;
        self.pins.remove(&pin);
        Ok(Applied::Done)
    }

    /// Goes on to the generation that follows. `Ignored` when that is the one in force.
    pub(super) fn set_generation(&mut self, to: Generation) -> Result<Applied, Refusal> {
        let now = self.generation;
        if to == now {
            return Ok(Applied::Ignored);
        }
        if now.0.checked_add(1) != Some(to.0) {
            return Err(Refusal::Generation { now, to });
        }
        self.generation = to;
        Ok(Applied::Done)
    }

    pub(super) fn set_quota(
        &mut self,
        tenant: TenantId,
        bytes: Option<u64>,
        limits: &IndexLimits,
    ) -> Result<Applied, Refusal> {
        set(&mut self.quotas, tenant, bytes, "tenants with a quota", limits.quotas_max)
    }

    pub(super) fn set_ttl(
        &mut self,
        group: GroupId,
        ttl_ms: Option<u64>,
        limits: &IndexLimits,
    ) -> Result<Applied, Refusal> {
        set(&mut self.ttls, group, ttl_ms, "groups with a time to live", limits.ttls_max)
    }
}

/// Sets or lifts one value; `Ignored` when it was so already.
fn set<K: Ord>(
    map: &mut BTreeMap<K, u64>,
    key: K,
    value: Option<u64>,
    what: &str,
    limit: u32,
) -> Result<Applied, Refusal> {
    if map.get(&key).copied() == value {
        return Ok(Applied::Ignored);
    }
    match value {
        None => {
            map.remove(&key);
        }
        Some(value) => {
            let grown = map.len() as u64 + u64::from(!map.contains_key(&key));
            within(what, grown, limit.into())?;
            map.insert(key, value);
        }
    }
    Ok(Applied::Done)
}
