//! Limits on requests, and the errors for violations.
//!
//! Not here: limits of the index itself (`kv_core::index::IndexLimits`, checked before a proposal).

use kv_core::id::BlockHash;
use kv_core::index::{IndexLimits, command::Command};
use kv_core::schedule::QUEUE_TOKENS_MAX;
use kvfleet_proto::convert;
use kvfleet_proto::pb;
use tonic::Status;

/// Blocks of one request: a million tokens in blocks of sixteen, 1.2 MiB of hashes.
pub(crate) const REQUEST_BLOCKS_MAX: usize = 65_536;

/// Tokens per block: the largest configured block has 512; the rest is headroom.
pub(crate) const BLOCK_TOKENS_MAX: u32 = 4_096;

/// Tokens of one prompt: at most the queue limit of an instance.
pub(crate) const INPUT_TOKENS_MAX: u64 = QUEUE_TOKENS_MAX;

/// Stream positions that a reader may wait for: one per node of a large cluster.
pub(crate) const SEEN_MAX: usize = 4_096;

/// Bytes of an address or a host name: a DNS name (253) with a port, doubled.
pub(crate) const TEXT_BYTES_MAX: usize = 512;

/// Error for an invalid field.
pub(crate) fn invalid(error: impl std::fmt::Display) -> Status {
    Status::invalid_argument(error.to_string())
}

/// Fails if `got` exceeds `limit`.
pub(crate) fn at_most(what: &str, got: usize, limit: usize) -> Result<(), Status> {
    if got <= limit {
        Ok(())
    } else {
        Err(invalid(format!("{what} is {got}, the limit is {limit}: send less")))
    }
}

/// Parses block hashes of a request, in prefix order.
pub(crate) fn hashes(field: &'static str, bytes: &[u8]) -> Result<Vec<BlockHash>, Status> {
    at_most(&format!("number of {field}"), bytes.len() / convert::HASH_BYTES, REQUEST_BLOCKS_MAX)?;
    convert::hashes_from_bytes(field, bytes).map_err(invalid)
}

/// Checks the tokens of a prompt.
pub(crate) fn input_tokens(tokens: u32) -> Result<(), Status> {
    if u64::from(tokens) <= INPUT_TOKENS_MAX {
        return Ok(());
    }
    Err(invalid(format!(
        "input_tokens is {tokens}, the limit is {INPUT_TOKENS_MAX}: no instance's queue holds more"
    )))
}

/// Checks the number of stream positions to wait for.
pub(crate) fn seen(after: &[pb::AnnouncePosition]) -> Result<(), Status> {
    at_most("number of points in `after`", after.len(), SEEN_MAX)
}

/// Checks a command against the limits of the index, before it costs a log entry.
pub(crate) fn within_limits(limits: &IndexLimits, command: Command) -> Result<Command, Status> {
    limits.check(&command).map_err(invalid)?;
    Ok(command)
}
