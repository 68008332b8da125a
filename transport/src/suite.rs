//! The behaviour every path has, as one suite that all implementations run.
//!
//! `behaviour_suite!(make)` writes one test per case; `make` builds a [`Pair`] round a given service.
//! A case panics when the behaviour differs. Not here: what only one implementation has (hostile bytes,
//! certificates: `quic/tests.rs`; faults: `loopback/tests.rs`).
#![allow(clippy::missing_panics_doc)]

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{BlockHash, Category, Epoch, IdentityDigest, LeaseId, RequestId, TenantId, Tier};
use kvfleet_proto::content;
use kvfleet_proto::frame::{Frame, FrameBuilder, KeyForm};

use crate::{Asker, FetchAnswer, FetchRequest, Path, PathError, Progress, SaveAnswer, SaveDone, SaveRequest};

mod arena;
pub mod cases;
mod computed;
pub mod layer_cases;
#[cfg(feature = "rdma")]
mod lending;
mod rooms;
pub mod save_cases;
mod service;

pub use arena::BumpArena;
pub use computed::Computed;
#[cfg(feature = "rdma")]
pub use lending::LendingService;
pub use rooms::Rooms;
pub use service::MemoryService;

/// Identity of everything in the suite.
pub const IDENTITY: IdentityDigest = IdentityDigest([7; 16]);

/// Epoch of the suite's services.
pub const EPOCH: Epoch = Epoch(3);

/// Longest wait for something that must happen. Only ever reached by a failing test.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A path to a service, and what must live as long as the path.
pub struct Pair {
    /// The client's end.
    pub path: Arc<dyn Path>,
    /// Dropped at the end of the case.
    pub keep: Box<dyn Any + Send>,
}

impl std::fmt::Debug for Pair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pair(..)")
    }
}

/// Writes one `#[tokio::test]` per case of the suite; `$make` is an async function from
/// `Arc<MemoryService>` to [`Pair`], `$service` makes the service of a case when it is to be a certain one.
#[macro_export]
macro_rules! behaviour_suite {
    ($make:path) => {
        $crate::behaviour_suite!($make; $crate::suite::MemoryService::default());
    };
    ($make:path; $service:expr) => {
        $crate::behaviour_suite!($make; $service;
            fetch_hit, fetch_partial, fetch_miss, fetch_busy, fetch_of_nothing, fetch_many_blocks, fetch_big_block,
            fetch_stale_epoch, fetch_over_the_end_of_an_epoch, fetch_ends_early, fetch_ends_with_a_reason,
            deadline_before_any_block, deadline_between_frames,
            save_takes_the_wanted, save_refused, save_busy, aborted_save_leaves_nothing, release_reaches_the_node,
            operations_run_side_by_side, ping_answers, layers_of_all_blocks, layers_of_a_range, layers_of_what_is_held,
            layers_that_are_late, layers_over_the_end_of_an_epoch, layers_that_are_wrong, layers_of_a_frame_without_a_head,
            save_by_layer_takes_the_wanted, save_by_layer_refuses_alone_what_is_wrong, save_by_layer_without_room_comes_whole,
            save_by_layer_refused, aborted_save_by_layer_leaves_nothing,
        );
    };
    ($make:path; $service:expr; $($case:ident),* $(,)?) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                let service = std::sync::Arc::new($service);
                let pair = $make(service.clone()).await;
                $crate::suite::cases::$case(&service, pair.path.as_ref()).await;
            }
        )*
    };
}

/// The hash with this number.
#[must_use]
pub fn hash(number: u32) -> BlockHash {
    let mut bytes = [0xAB; 16];
    bytes[..4].copy_from_slice(&number.to_le_bytes());
    BlockHash(bytes)
}

/// Hashes `0..count`.
#[must_use]
pub fn hashes(count: u32) -> Vec<BlockHash> {
    (0..count).map(hash).collect()
}

/// The frame of `hash` with two layers and `bytes` of content.
#[must_use]
pub fn frame(hash: BlockHash, bytes: u32) -> Frame {
    frame_of(hash, &[bytes / 2, bytes - bytes / 2])
}

/// The frame of `hash` with slices of these lengths.
#[must_use]
pub fn frame_of(hash: BlockHash, slice_bytes: &[u32]) -> Frame {
    let mut builder = FrameBuilder::new(IDENTITY, hash, KeyForm::Rotated, slice_bytes)
        .expect("the suite's sizes are within the limits");
    content::fill(hash, builder.payload_mut());
    builder.seal()
}

/// The asker of a request under `lease`.
#[must_use]
pub fn asker(lease: u64) -> Asker {
    Asker {
        lease: LeaseId(lease),
        request: RequestId(lease),
        tenant: TenantId(0),
        category: Category::default(),
        identity: IDENTITY,
        traceparent: String::new(),
        class: None,
    }
}

/// A fetch of `hashes` with all the time in the world: over an emulated network that loses packets, on a machine that has other things to do, 18 MiB may
/// take more than a minute.
#[must_use]
pub fn fetch_request(hashes: &[BlockHash]) -> FetchRequest {
    FetchRequest {
        asker: asker(1),
        epoch: EPOCH,
        first_offset_blocks: 0,
        hashes: hashes.to_vec(),
        deadline: 4 * PATIENCE,
        progress: Progress::default(),
    }
}

/// A save of `hashes` with frames up to a mebibyte.
#[must_use]
pub fn save_request(hashes: &[BlockHash]) -> SaveRequest {
    SaveRequest {
        asker: asker(1),
        parent: None,
        first_offset_blocks: 0,
        hashes: hashes.to_vec(),
        frame_bytes: 1 << 20,
    }
}

/// Fetches, and checks that the frames are the leading blocks asked, whole and in order.
///
/// # Errors
/// Those of the path.
pub async fn fetch(path: &dyn Path, request: FetchRequest) -> Result<FetchAnswer, PathError> {
    let hashes = request.hashes.clone();
    let mut frames = Vec::new();
    let answer = path.fetch(request, &mut |frame| frames.push(frame)).await?;
    assert_eq!(frames.len(), answer.tiers().len(), "as many frames as the answer says");
    for (frame, hash) in frames.iter().zip(hashes) {
        frame.verify(IDENTITY, hash).expect("a good frame of the block asked");
        assert!(content::matches(hash, &frame.payload()), "the content of the block asked");
    }
    Ok(answer)
}

/// Saves with frames of `bytes` content each.
///
/// # Errors
/// Those of the path.
pub async fn save(path: &dyn Path, request: SaveRequest, bytes: u32) -> Result<SaveAnswer, PathError> {
    let hashes = request.hashes.clone();
    path.save(request, &|position| frame(hashes[position], bytes)).await
}

/// A complete save's result.
#[must_use]
pub fn done(answer: SaveAnswer) -> SaveDone {
    match answer {
        SaveAnswer::Done(done) => done,
        other => panic!("expected a completed save, got {other:?}"),
    }
}

/// As many tiers as blocks.
#[must_use]
pub fn in_dram(blocks: usize) -> Vec<Tier> {
    vec![Tier::Dram; blocks]
}
