//! Operator settings for every node: pins, quotas, times to live, and the generation of the
//! weights.
//!
//! Not here: how a node applies them.

use std::collections::BTreeMap;

use super::command::{Applied, Pin, Refusal};
use super::limits::{IndexLimits, check_limit};
use crate::id::{Generation, PinId, TenantId, TtlGroupId};

/// Pins, quotas and times to live in force, each ordered by id, and the generation of the weights.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Directives {
    pub(super) pins: BTreeMap<PinId, Pin>,
    /// Limit in bytes per node.
    pub(super) quotas: BTreeMap<TenantId, u64>,
    /// Milliseconds since last use.
    pub(super) ttls: BTreeMap<TtlGroupId, u64>,
    /// Blocks of all pins; a block counts once per pin.
    pub(super) pinned_blocks: u64,
    pub(super) generation: Generation,
}

impl Directives {
    /// Adds a pin. Repeating the same pin is ignored, so a caller may retry. If owner and blocks
    /// are equal, the new kind and end replace the old ones.
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
        check_limit("pins", self.pins.len() as u64 + 1, limits.pins_max.into())?;
        let blocks = self.pinned_blocks + pin.blocks.len() as u64;
        check_limit("blocks of all pins", blocks, limits.pinned_blocks_max.into())?;
        self.insert_pin(pin.clone());
        Ok(Applied::Done)
    }

    pub(super) fn insert_pin(&mut self, pin: Pin) {
        self.pinned_blocks += pin.blocks.len() as u64;
        self.pins.insert(pin.pin, pin);
    }

    /// Ends a pin if its owner asks. If `ends_ms` is set, a pin with another end stays.
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

    /// Moves to the next generation. `Ignored` if `to` is the current one.
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
        set_or_remove(&mut self.quotas, tenant, bytes, "tenants with a quota", limits.quotas_max)
    }

    pub(super) fn set_ttl(
        &mut self,
        group: TtlGroupId,
        ttl_ms: Option<u64>,
        limits: &IndexLimits,
    ) -> Result<Applied, Refusal> {
        set_or_remove(&mut self.ttls, group, ttl_ms, "groups with a time to live", limits.ttls_max)
    }
}

/// Sets or removes one value; `Ignored` if it already is so.
fn set_or_remove<K: Ord>(
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
            check_limit(what, grown, limit.into())?;
            map.insert(key, value);
        }
    }
    Ok(Applied::Done)
}
