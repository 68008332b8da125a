//! Conversions between wire types and `kv-core` types, and their common error.
//!
//! One file per subject: `index` (the replicated index), `schedule` (route calls), `copies` (copies
//! between nodes), `manifest` (identity of block bytes) and `statistics` (reuse statistics of
//! nodes). Not here: meaning. The receiver may still reject a message that converts.

mod copies;
mod index;
mod manifest;
mod schedule;
mod statistics;

pub use copies::{run_from_pb, run_to_pb};
pub use index::{
    announcement_from_pb, announcement_to_pb, change_from_pb, change_to_pb, changes_from_pb, hash_field,
    hashes_from_bytes, hashes_to_bytes, identity_field, join_to_pb, node_digest_from_bytes,
    node_digest_to_bytes, node_record_from_pb, parent_from_bytes, parent_to_bytes, tier_field,
};
pub use manifest::{manifest_from_pb, manifest_to_pb};
pub use schedule::{category_from_parts, category_from_pb, category_to_parts, category_to_pb, holder_tier};
pub use statistics::{statistics_from_pb, statistics_to_pb};

use kv_core::evict::reuse_stats::InvalidStats;
use kv_core::prefix::ManifestError;

pub use kv_core::id::HASH_BYTES;

/// A message field with an invalid value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConvertError {
    /// A list of hashes is not a whole number of hashes.
    #[error(
        "{field} has {bytes} bytes, which is no whole number of hashes: send {HASH_BYTES} bytes for each block"
    )]
    HashList {
        /// The field.
        field: &'static str,
        /// Its length in bytes.
        bytes: usize,
    },
    /// A hash or a digest has another length than it must have (or, where a value may be absent, 0).
    #[error("{field} has {bytes} bytes, expected {expected}")]
    Digest {
        /// The field.
        field: &'static str,
        /// Its length in bytes.
        bytes: usize,
        /// The length that it must have.
        expected: usize,
    },
    /// A number that stands for no tier.
    #[error("{field} is {number}, expected 0 (ssd), 1 (dram) or 2 (gpu)")]
    Tier {
        /// The field.
        field: &'static str,
        /// The number.
        number: u32,
    },
    /// A required field is absent.
    #[error("{field} is absent: it must be given")]
    Absent {
        /// The field.
        field: &'static str,
    },
    /// A count that contradicts the rest of the message.
    #[error("{field} is {number}, expected {expected}: run the same release on both ends")]
    Count {
        /// The field.
        field: &'static str,
        /// The number.
        number: usize,
        /// The count that the rest of the message, or the call, implies.
        expected: usize,
    },
    /// An enumerated number outside the known values.
    #[error("{field} is {number}, which this release does not know: run the same release on both ends")]
    Unknown {
        /// The field.
        field: &'static str,
        /// The number.
        number: u32,
    },
    /// A text above its limit.
    #[error("{field} has {bytes} bytes, the limit is {limit}: shorten it")]
    TooLong {
        /// The field.
        field: &'static str,
        /// Its length in bytes.
        bytes: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// An invalid manifest.
    #[error("manifest: {0}")]
    Manifest(#[from] ManifestError),
    /// Statistics with impossible values.
    #[error("statistics: {0}")]
    Unsound(#[from] InvalidStats),
}
