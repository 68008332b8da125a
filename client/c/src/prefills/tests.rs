//! A prefill from a node that sends some layers and then fails or falls silent: its steps, and the
//! return of its memory.
//!
//! Not here: the rules (`core/src/pipeline`), and errors of C callers (`tests/hostile/prefill.rs`).
#![allow(clippy::unwrap_used)]

use std::sync::mpsc::{Receiver, Sender, channel};

use kv_core::id::{Category, LeaseId, RequestId, TenantId, Tier};
use kv_core::pipeline::ComputeCosts;
use kvfleet_client::FetchCall;
use kvfleet_proto::frame::{Frame, encoded_len};
use kvfleet_proto::pb;
use kvfleet_transport::suite::{EPOCH, IDENTITY, frame_of, hashes};
use kvfleet_transport::{
    BoxFuture, Dialer, FetchAnswer, FetchRequest, LayerRequest, MissReason, Path, PathError, SaveAnswer,
    SaveRequest, SliceSink,
};

use super::*;
use crate::slices::leaked_buffers;

const SLICES: [u32; 3] = [40, 0, 24];
const BLOCKS: u32 = 2;

/// Only reached by a failing test.
const PATIENCE: Duration = Duration::from_secs(60);

/// A node that sends leading layers of all blocks, and the path to it.
#[derive(Clone, Debug)]
struct PartialNode {
    layers: usize,
    /// If set, the node falls silent instead of failing, until its request is dropped.
    silent: Option<Arc<DropGate>>,
}

/// Signals when it is reached, and blocks until opened.
#[derive(Debug)]
struct DropGate {
    reached: Mutex<Sender<()>>,
    open: Mutex<Receiver<()>>,
}

/// Its drop blocks at the gate.
struct GatedDrop(Arc<DropGate>);

impl Drop for GatedDrop {
    fn drop(&mut self) {
        self.0.reached.lock().unwrap().send(()).unwrap();
        self.0.open.lock().unwrap().recv_timeout(PATIENCE).unwrap();
    }
}

impl Path for PartialNode {
    fn fetch<'a>(
        &'a self,
        _: FetchRequest,
        _: &'a mut (dyn FnMut(Frame) + Send),
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        unreachable!("a prefill must request layers")
    }

    fn fetch_layers<'a>(
        &'a self,
        request: FetchRequest,
        asked: LayerRequest,
        sink: &'a mut dyn SliceSink,
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move {
            let frames: Vec<_> = request.hashes.iter().map(|hash| frame_of(*hash, &SLICES)).collect();
            for (position, frame) in frames.iter().enumerate() {
                assert!(sink.head(position, &frame.head().unwrap()));
            }
            for layer in asked.layers.start..asked.layers.end.min(self.layers) {
                for (position, frame) in frames.iter().enumerate() {
                    sink.slice(position, layer).unwrap().copy_from_slice(&frame.slice(layer).unwrap());
                    sink.slices_filled(position, layer..layer + 1);
                }
            }
            if asked.layers.end <= self.layers || self.layers == SLICES.len() {
                return Ok(FetchAnswer::Hit { tiers: vec![Tier::Dram; frames.len()] });
            }
            if let Some(gate) = &self.silent {
                let _held = GatedDrop(Arc::clone(gate));
                std::future::pending::<()>().await;
            }
            Ok(FetchAnswer::Partial { tiers: vec![], reason: MissReason::NodeLost })
        })
    }

    fn fetches_slices(&self) -> bool {
        true
    }

    fn save<'a>(
        &'a self,
        _: SaveRequest,
        _: &'a (dyn Fn(usize) -> Frame + Send + Sync),
    ) -> BoxFuture<'a, Result<SaveAnswer, PathError>> {
        unreachable!("a prefill must not save")
    }

    fn release(&self, _: LeaseId) -> BoxFuture<'_, Result<(), PathError>> {
        Box::pin(async { Ok(()) })
    }

    fn failure(&self) -> Option<PathError> {
        None
    }

    fn ping(&self) -> BoxFuture<'_, Result<Duration, PathError>> {
        Box::pin(async { Ok(Duration::ZERO) })
    }
}

impl Dialer for PartialNode {
    fn dial(&self, _: String) -> BoxFuture<'_, Result<Arc<dyn Path>, PathError>> {
        let path: Arc<dyn Path> = Arc::new(self.clone());
        Box::pin(async move { Ok(path) })
    }
}

/// A prefill from this node, with one resident block. Recomputing takes an hour and a half, and a
/// wasted wait more than a minute.
fn begin_prefill(node: &PartialNode) -> PrefillHandle {
    let source = pb::Source {
        node: 0,
        epoch: EPOCH.0,
        address: "node:0".to_owned(),
        start_blocks: 1,
        len_blocks: BLOCKS,
        tier: 1,
    };
    let fetch = FetchCall {
        lease: LeaseId(5),
        request: RequestId(5),
        tenant: TenantId(0),
        category: Category::default(),
        identity: IDENTITY,
        hashes: hashes(BLOCKS + 1),
        resident_blocks: 1,
        sources: vec![source],
        deadline: Duration::MAX,
        class: None,
    };
    let ten_minutes_ns = 600_000_000_000;
    let costs = ComputeCosts {
        block_layer_ns: vec![ten_minutes_ns; BLOCKS as usize],
        new_layer_ns: ten_minutes_ns,
        layers: 3,
    };
    let call = PrefillCall {
        fetch,
        costs,
        frame_bytes: encoded_len(&SLICES) as u64,
        bytes_per_s: 1_000_000_000,
        read_buffer_bytes_max: 0,
        in_flight_bytes_max: u64::MAX,
    };
    let (rooms, gone) = leaked_buffers(BLOCKS as usize, &SLICES);
    PrefillHandle::begin(&ClientRuntime::with_dialer(Arc::new(node.clone())), call, rooms, gone).unwrap()
}

/// All steps until all layers are computed: kind, layer, blocks.
fn collect_steps(prefill: &PrefillHandle) -> Vec<(u32, u32, Vec<u32>)> {
    let next = || {
        let (step, blocks) = prefill.next(PATIENCE).unwrap();
        assert_eq!(step.blocks as usize, blocks.len());
        (step.kind != abi::STEP_DONE).then_some((step.kind, step.layer, blocks))
    };
    std::iter::from_fn(next).collect()
}

fn collect_returned(prefill: &PrefillHandle) -> Vec<(u32, u32)> {
    let next = || prefill.returned_blocks(1, PATIENCE).ok().map(|back| (back[0].block, back[0].layers));
    let mut all: Vec<_> = std::iter::from_fn(next).collect();
    all.sort_unstable();
    assert!(matches!(prefill.returned_blocks(1, PATIENCE), Err(Failure::AllReturned)));
    all
}

#[test]
fn received_blocks_are_not_computed_and_return_whole() {
    check_whole_prefill(begin_prefill(&PartialNode { layers: 3, silent: None }));
}

#[test]
fn thread_of_another_runtime_may_wait() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async { check_whole_prefill(begin_prefill(&PartialNode { layers: 3, silent: None })) });
}

fn check_whole_prefill(prefill: PrefillHandle) {
    let layers: Vec<_> = (0..3).map(|layer| (abi::STEP_LAYER, layer, vec![])).collect();
    assert_eq!(collect_steps(&prefill), layers);
    let prefilled = prefill.end().unwrap().prefilled().unwrap();
    assert_eq!((prefilled.computed_count, prefilled.wrong_blocks), (2, 0));
    assert_eq!(Duration::from_micros(prefilled.saved_us), Duration::from_secs(3600), "six layer tasks");
    assert_eq!(collect_returned(&prefill), [(1, 3), (2, 3)]);
    prefill.free();
}

#[test]
fn incomplete_blocks_catch_up_and_return_with_their_layers() {
    let prefill = begin_prefill(&PartialNode { layers: 2, silent: None });
    let expected = [
        (abi::STEP_LAYER, 0, vec![]),
        (abi::STEP_LAYER, 1, vec![]),
        // One block exceeds the limit of a single step; then arrived data is checked again.
        (abi::STEP_CATCH_UP, 2, vec![2]),
        (abi::STEP_CATCH_UP, 2, vec![1]),
        (abi::STEP_LAYER, 2, vec![1, 2]),
    ];
    assert_eq!(collect_steps(&prefill), expected);
    let result = prefill.end().unwrap();
    assert_eq!(result.prefilled().unwrap().saved_us, 0);
    assert_eq!(collect_returned(&prefill), [(1, 2), (2, 2)]);
    assert!(matches!(prefill.next(PATIENCE), Err(Failure::PrefillEnded)));
    assert!(matches!(prefill.end(), Err(Failure::PrefillEnded)));
    prefill.free();
}

#[test]
fn memory_is_returned_only_after_the_last_writer() {
    for is_ended in [false, true] {
        let ((come_to, comes), (opens, open)) = (channel(), channel());
        let gate = DropGate { reached: Mutex::new(come_to), open: Mutex::new(open) };
        let prefill = begin_prefill(&PartialNode { layers: 1, silent: Some(Arc::new(gate)) });
        let (step, _) = prefill.next(PATIENCE).unwrap();
        assert_eq!((step.kind, step.layer), (abi::STEP_LAYER, 0), "the prefill is running");
        assert_eq!(prefill.next(Duration::ZERO).unwrap().0.kind, abi::STEP_WAIT);
        if is_ended {
            prefill.end().unwrap();
            assert!(prefill.returned_blocks(2, Duration::ZERO).unwrap().is_empty());
            assert!(prefill.returned_blocks(2, Duration::from_millis(1)).unwrap().is_empty());
        }
        let freeing = std::thread::spawn(move || prefill.free());
        comes.recv_timeout(PATIENCE).unwrap();
        assert!(!freeing.is_finished(), "the buffer may still be written");
        opens.send(()).unwrap();
        freeing.join().unwrap();
    }
}
