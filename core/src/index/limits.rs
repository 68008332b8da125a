//! Named limits of the index, and the check that every command passes before it is proposed and
//! again when it is applied.
//!
//! Not here: limits of the queues in front of the log, which belong to the router. All replicas
//! must run with equal limits: a command that one refuses and another applies would make them
//! diverge.

use super::command::{Announcement, Change, Command, NodeRecord, Pin, Refusal};

/// Nodes known at once, live or fenced. Four times the largest published fleet of this kind of
/// cache; keeps a status reply below 1 MiB.
pub const NODES_MAX: u32 = 4_096;
/// Blocks in one `Announce` command: four full batch windows of a router. At 5 MB of hashes, one
/// log record never delays the others for long.
pub const ANNOUNCE_BLOCKS_MAX: u32 = 262_144;
/// Announcements plus changes in one `Announce` command. Equals the block limit, because a useful
/// change carries at least one block.
pub const ANNOUNCE_CHANGES_MAX: u32 = 262_144;
/// (node, block) pairs in all: about 2 GiB of memory at 22 bytes each.
pub const COPIES_MAX: u64 = 100_000_000;
/// Blocks of one pin: 1.2 MiB of hashes in one log record.
pub const PIN_BLOCKS_MAX: u32 = 65_536;
/// Blocks of all pins together: the whole list goes to every node in one message of at most 4 MiB.
pub const PINNED_BLOCKS_MAX: u32 = 131_072;
/// Pins at once; each costs a line in the same message.
pub const PINS_MAX: u32 = 16_384;
/// Tenants with a quota; each costs a line in the same message.
pub const QUOTAS_MAX: u32 = 16_384;
/// Groups with a time to live; each costs a line in the same message.
pub const TTLS_MAX: u32 = 16_384;
/// Bytes of an address, host name or owner: a DNS name (253) with a port, doubled.
pub const TEXT_BYTES_MAX: u32 = 512;

/// Limits of one index. Equal on every replica of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexLimits {
    /// See [`NODES_MAX`]; values above 65,536 count as 65,536.
    pub nodes_max: u32,
    /// See [`ANNOUNCE_BLOCKS_MAX`].
    pub announce_blocks_max: u32,
    /// See [`ANNOUNCE_CHANGES_MAX`].
    pub announce_changes_max: u32,
    /// See [`COPIES_MAX`].
    pub copies_max: u64,
    /// See [`PIN_BLOCKS_MAX`].
    pub pin_blocks_max: u32,
    /// See [`PINNED_BLOCKS_MAX`].
    pub pinned_blocks_max: u32,
    /// See [`PINS_MAX`].
    pub pins_max: u32,
    /// See [`QUOTAS_MAX`].
    pub quotas_max: u32,
    /// See [`TTLS_MAX`].
    pub ttls_max: u32,
    /// See [`TEXT_BYTES_MAX`].
    pub text_bytes_max: u32,
}

impl Default for IndexLimits {
    fn default() -> Self {
        Self {
            nodes_max: NODES_MAX,
            announce_blocks_max: ANNOUNCE_BLOCKS_MAX,
            announce_changes_max: ANNOUNCE_CHANGES_MAX,
            copies_max: COPIES_MAX,
            pin_blocks_max: PIN_BLOCKS_MAX,
            pinned_blocks_max: PINNED_BLOCKS_MAX,
            pins_max: PINS_MAX,
            quotas_max: QUOTAS_MAX,
            ttls_max: TTLS_MAX,
            text_bytes_max: TEXT_BYTES_MAX,
        }
    }
}

impl IndexLimits {
    /// Checks the limits that depend on the command alone. A router calls this before it proposes.
    pub fn check(&self, command: &Command) -> Result<(), Refusal> {
        match command {
            Command::Join(record) | Command::Admit { record, .. } => self.check_record(record),
            Command::Announce(batch) => self.check_announce(batch),
            Command::Pin(pin) => self.check_pin(pin),
            Command::Unpin { owner, .. } => self.check_text("owner length in bytes", owner),
            Command::Fence { .. }
            | Command::Leave { .. }
            | Command::SetQuota { .. }
            | Command::SetTtl { .. }
            | Command::SetGeneration(_) => Ok(()),
        }
    }

    fn check_record(&self, record: &NodeRecord) -> Result<(), Refusal> {
        self.check_text("data address length in bytes", &record.data_address)?;
        self.check_text("control address length in bytes", &record.control_address)?;
        self.check_text("host name length in bytes", &record.host)
    }

    fn check_announce(&self, batch: &[Announcement]) -> Result<(), Refusal> {
        let changes = batch.len() + batch.iter().map(|one| one.changes.len()).sum::<usize>();
        check_limit("changes in one announce", changes as u64, self.announce_changes_max.into())?;
        let blocks = batch.iter().flat_map(|one| &one.changes).map(changed_blocks).sum();
        check_limit("blocks in one announce", blocks, self.announce_blocks_max.into())
    }

    fn check_pin(&self, pin: &Pin) -> Result<(), Refusal> {
        self.check_text("owner length in bytes", &pin.owner)?;
        check_limit("blocks of one pin", pin.blocks.len() as u64, self.pin_blocks_max.into())
    }

    fn check_text(&self, what: &str, text: &str) -> Result<(), Refusal> {
        check_limit(what, text.len() as u64, self.text_bytes_max.into())
    }
}

/// Blocks a change names.
fn changed_blocks(change: &Change) -> u64 {
    match change {
        Change::Stored { blocks, .. } | Change::Moved { blocks, .. } | Change::Dropped { blocks, .. } => {
            blocks.len() as u64
        }
        Change::Cleared => 0,
    }
}

/// Upper bound of the blocks that a batch adds: dropped blocks add none, repeated ones count as
/// new.
pub(super) fn added_blocks(batch: &[Announcement]) -> u64 {
    let adds = |change: &&Change| matches!(change, Change::Stored { .. } | Change::Moved { .. });
    batch.iter().flat_map(|one| &one.changes).filter(adds).map(changed_blocks).sum()
}

/// Returns [`Refusal::OverLimit`] if `got` exceeds `limit`.
pub(super) fn check_limit(what: &str, got: u64, limit: u64) -> Result<(), Refusal> {
    if got <= limit {
        return Ok(());
    }
    Err(Refusal::OverLimit { what: what.to_owned(), got, limit })
}
