//! Runs of blocks copied between nodes, to and from the wire.
//!
//! Not here: the end of a copy (`kv_core::place::copies`).

use kv_core::id::TenantId;
use kv_core::place::copies::BlockRun;

use super::{
    ConvertError, category_from_pb, category_to_pb, hashes_from_bytes, hashes_to_bytes, parent_from_bytes,
    parent_to_bytes,
};
use crate::pb;

/// Reads a run.
///
/// # Errors
/// When its hashes or its parent hash are truncated.
pub fn run_from_pb(run: &pb::BlockRun) -> Result<BlockRun, ConvertError> {
    Ok(BlockRun {
        hashes: hashes_from_bytes("run.blocks", &run.blocks)?,
        parent: parent_from_bytes("run.parent", &run.parent)?,
        first_offset_blocks: run.first_offset_blocks,
        tenant: TenantId(run.tenant),
        category: category_from_pb(run.category.as_ref()),
        frame_bytes: run.frame_bytes,
    })
}

/// Writes a run.
#[must_use]
pub fn run_to_pb(run: &BlockRun) -> pb::BlockRun {
    pb::BlockRun {
        blocks: hashes_to_bytes(&run.hashes),
        parent: parent_to_bytes(run.parent),
        first_offset_blocks: run.first_offset_blocks,
        tenant: run.tenant.0,
        category: Some(category_to_pb(run.category)),
        frame_bytes: run.frame_bytes,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kv_core::id::{BlockHash, Category};

    use super::*;

    #[test]
    fn runs_round_trip_and_truncated_ones_are_rejected() {
        let hashes = vec![BlockHash([1; _]), BlockHash([2; _])];
        for parent in [None, Some(BlockHash([9; _]))] {
            let category = Category { conversation_turn: 3, ..Category::default() };
            let (first_offset_blocks, tenant, frame_bytes) = (7, TenantId(5), 100);
            let run = BlockRun {
                hashes: hashes.clone(),
                parent,
                first_offset_blocks,
                tenant,
                category,
                frame_bytes,
            };
            let sent = run_to_pb(&run);
            assert_eq!(run_from_pb(&sent).unwrap(), run);
            let cut = pb::BlockRun { blocks: sent.blocks[..31].to_vec(), ..sent.clone() };
            assert!(run_from_pb(&cut).is_err());
            assert!(run_from_pb(&pb::BlockRun { parent: vec![0; 3], ..sent }).is_err());
        }
    }
}
