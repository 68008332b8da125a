//! The behaviour of every path, as one suite that all implementations run.
//!
//! `behaviour_suite!(make)` writes one test per case; `make` builds a [`SuitePath`] to a given
//! service. A case panics if the behaviour differs. Not here: tests of a single implementation
//! (hostile bytes, certificates: `quic/tests.rs`; faults: `loopback/tests.rs`).
#![allow(clippy::missing_panics_doc)]

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use kv_core::content;
use kv_core::id::{BlockHash, Category, Epoch, IdentityDigest, LeaseId, RequestId, TenantId, Tier};
use kvfleet_net::tls::Identity;
use kvfleet_proto::frame::{Frame, FrameBuilder, KeyForm};
use tokio::net::TcpListener;

use crate::tcp::server::accept_unserved;
use crate::tcp::stream::TlsStream;
use crate::{
    FetchAnswer, FetchRequest, Path, PathError, Progress, RequestContext, SaveAnswer, SaveDone, SaveRequest,
};

mod arena;
pub mod cases;
mod computed;
pub mod layer_cases;
mod rooms;
pub mod save_cases;
mod service;

pub use arena::BumpArena;
pub use computed::ComputedBlocks;
pub use rooms::CheckedSlices;
pub use service::MemoryService;

/// Identity of everything in the suite.
pub const IDENTITY: IdentityDigest = IdentityDigest([7; 16]);

/// Epoch of the suite's services.
pub const EPOCH: Epoch = Epoch(3);

/// Longest wait for an expected event. Only failing tests reach it.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A path to a service, with its resources.
pub struct SuitePath {
    /// The client's end.
    pub path: Arc<dyn Path>,
    /// Dropped at the end of the case.
    pub keep: Box<dyn Any + Send>,
}

impl std::fmt::Debug for SuitePath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pair(..)")
    }
}

/// Writes one `#[tokio::test]` per case of the suite. `$make` is an async function from
/// `Arc<MemoryService>` to [`SuitePath`]; `$service` makes the service of a case, if not the
/// default.
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
            layers_that_are_late, layers_over_the_end_of_an_epoch, layers_that_are_wrong,
            layers_of_a_frame_without_a_head,
            save_by_layer_takes_the_wanted, save_by_layer_refuses_alone_what_is_wrong,
            save_by_layer_without_room_comes_whole,
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

/// The hash of block `number`.
#[must_use]
pub fn hash(number: u32) -> BlockHash {
    let mut bytes = [0xAB; _];
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

/// The context of a request under `lease`.
#[must_use]
pub fn request_context(lease: u64) -> RequestContext {
    RequestContext {
        lease: LeaseId(lease),
        request: RequestId(lease),
        tenant: TenantId(0),
        category: Category::default(),
        identity: IDENTITY,
        traceparent: String::new(),
        class: None,
    }
}

/// A fetch of `hashes` with a generous deadline: over an emulated lossy network on a busy machine,
/// 18 MiB may take more than a minute.
#[must_use]
pub fn fetch_request(hashes: &[BlockHash]) -> FetchRequest {
    FetchRequest {
        context: request_context(1),
        epoch: EPOCH,
        first_offset_blocks: 0,
        hashes: hashes.to_vec(),
        deadline: 4 * PATIENCE,
        progress: Progress::default(),
    }
}

/// A save of `hashes` with frames of at most a mebibyte.
#[must_use]
pub fn save_request(hashes: &[BlockHash]) -> SaveRequest {
    SaveRequest {
        context: request_context(1),
        parent: None,
        first_offset_blocks: 0,
        hashes: hashes.to_vec(),
        frame_bytes: 1 << 20,
    }
}

/// Fetches, and checks that the frames are the leading requested blocks, complete and in order.
///
/// # Errors
/// Those of the path.
pub async fn fetch(path: &dyn Path, request: FetchRequest) -> Result<FetchAnswer, PathError> {
    let hashes = request.hashes.clone();
    let mut frames = Vec::new();
    let answer = path.fetch(request, &mut |frame| frames.push(frame)).await?;
    assert_eq!(frames.len(), answer.tiers().len(), "the number of frames differs from the answer");
    for (frame, hash) in frames.iter().zip(hashes) {
        frame.verify(IDENTITY, hash).expect("a valid frame of the requested block");
        assert!(content::matches(hash, &frame.payload()), "wrong content");
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

/// The result of a complete save.
#[must_use]
pub fn done(answer: SaveAnswer) -> SaveDone {
    match answer {
        SaveAnswer::Done(done) => done,
        other => panic!("expected a completed save, got {other:?}"),
    }
}

/// Accepts one TCP connection, as a node whose answers the test sends itself.
pub async fn accept_one(listener: &TcpListener, identity: &Identity) -> TlsStream {
    accept_unserved(listener, identity).await.expect("a client with a valid certificate")
}

/// One DRAM tier per block.
#[must_use]
pub fn in_dram(blocks: usize) -> Vec<Tier> {
    vec![Tier::Dram; blocks]
}
