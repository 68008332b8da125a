//! A prefill whose node sends some layers and then is gone, or falls silent: what is said of it, and when its memory is given back.
//!
//! Not here: what the rules say of it (`core/src/pipeline`), and what callers of C may do wrong (`tests/hostile/prefill.rs`).
#![allow(clippy::unwrap_used)]

use std::sync::mpsc::{Receiver, Sender, channel};

use kv_core::id::{Category, LeaseId, RequestId, TenantId, Tier};
use kv_core::pipeline::Costs;
use kvfleet_client::FetchCall;
use kvfleet_proto::frame::{Frame, encoded_len};
use kvfleet_proto::pb;
use kvfleet_transport::suite::{EPOCH, IDENTITY, frame_of, hashes};
use kvfleet_transport::{
    AskedLayers, BoxFuture, Dialer, FetchAnswer, FetchRequest, MissReason, Path, PathError, SaveAnswer,
    SaveRequest, SliceSink,
};

use super::*;
use crate::slices::leaked;

const SLICES: [u32; 3] = [40, 0, 24];
const BLOCKS: u32 = 2;

/// Only ever reached by a test that fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// A node that sends leading layers of all blocks, and the way to it.
#[derive(Clone, Debug)]
struct Node {
    layers: usize,
    /// Where it is silent then instead of gone: held until nobody waits for it any more.
    silent: Option<Arc<Gate>>,
}

/// Says when it is come to, and is shut until somebody opens it.
#[derive(Debug)]
struct Gate {
    come_to: Mutex<Sender<()>>,
    open: Mutex<Receiver<()>>,
}

/// What is dropped behind the gate only.
struct Held(Arc<Gate>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.come_to.lock().unwrap().send(()).unwrap();
        self.0.open.lock().unwrap().recv_timeout(PATIENCE).unwrap();
    }
}

impl Path for Node {
    fn fetch<'a>(
        &'a self,
        _: FetchRequest,
        _: &'a mut (dyn FnMut(Frame) + Send),
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        unreachable!("a prefill asks for layers")
    }

    fn fetch_layers<'a>(
        &'a self,
        request: FetchRequest,
        asked: AskedLayers,
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
                    sink.filled(position, layer..layer + 1);
                }
            }
            if asked.layers.end <= self.layers || self.layers == SLICES.len() {
                return Ok(FetchAnswer::Hit { tiers: vec![Tier::Dram; frames.len()] });
            }
            if let Some(gate) = &self.silent {
                let _held = Held(Arc::clone(gate));
                std::future::pending::<()>().await;
            }
            Ok(FetchAnswer::Partial { tiers: vec![], reason: MissReason::NodeLost })
        })
    }

    fn moves_slices(&self) -> bool {
        true
    }

    fn save<'a>(
        &'a self,
        _: SaveRequest,
        _: &'a (dyn Fn(usize) -> Frame + Send + Sync),
    ) -> BoxFuture<'a, Result<SaveAnswer, PathError>> {
        unreachable!("a prefill saves nothing")
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

impl Dialer for Node {
    fn dial(&self, _: String) -> BoxFuture<'_, Result<Arc<dyn Path>, PathError>> {
        let path: Arc<dyn Path> = Arc::new(self.clone());
        Box::pin(async move { Ok(path) })
    }
}

/// A prefill from such a node, of an engine that has one block itself. Recomputing takes an hour and a half, and a wait in vain a
/// minute and more.
fn begun(node: &Node) -> PrefillHandle {
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
    let costs = Costs {
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
    let (rooms, gone) = leaked(BLOCKS as usize, &SLICES);
    PrefillHandle::begin(&Opened::over(Arc::new(node.clone())), (call, rooms, gone)).unwrap()
}

/// Everything that is said until all layers are computed: what kind, up to which layer, of which blocks.
fn said(prefill: &PrefillHandle) -> Vec<(u32, u32, Vec<u32>)> {
    let next = || {
        let (step, blocks) = prefill.next(PATIENCE).unwrap();
        assert_eq!(step.blocks as usize, blocks.len());
        (step.kind != abi::STEP_DONE).then_some((step.kind, step.layer, blocks))
    };
    std::iter::from_fn(next).collect()
}

fn all_back(prefill: &PrefillHandle) -> Vec<(u32, u32)> {
    let next = || prefill.back(1, PATIENCE).ok().map(|back| (back[0].block, back[0].layers));
    let mut all: Vec<_> = std::iter::from_fn(next).collect();
    all.sort_unstable();
    assert!(matches!(prefill.back(1, PATIENCE), Err(Failure::AllBack)));
    all
}

#[test]
fn what_comes_is_not_computed_and_comes_back_whole() {
    whole(begun(&Node { layers: 3, silent: None }));
}

#[test]
fn a_thread_of_another_runtime_may_wait_too() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async { whole(begun(&Node { layers: 3, silent: None })) });
}

fn whole(prefill: PrefillHandle) {
    let layers: Vec<_> = (0..3).map(|layer| (abi::STEP_LAYER, layer, vec![])).collect();
    assert_eq!(said(&prefill), layers);
    let prefilled = prefill.end().unwrap().prefilled().unwrap();
    assert_eq!((prefilled.computed_count, prefilled.wrong_blocks), (2, 0));
    assert_eq!(Duration::from_micros(prefilled.saved_us), Duration::from_secs(3600), "six cells");
    assert_eq!(all_back(&prefill), [(1, 3), (2, 3)]);
    prefill.free();
}

#[test]
fn blocks_that_end_half_way_catch_up_and_come_back_with_what_is_in_them() {
    let prefill = begun(&Node { layers: 2, silent: None });
    let expected = [
        (abi::STEP_LAYER, 0, vec![]),
        (abi::STEP_LAYER, 1, vec![]),
        // One takes longer than may be done at a time: then what came meanwhile is looked at again.
        (abi::STEP_CATCH_UP, 2, vec![2]),
        (abi::STEP_CATCH_UP, 2, vec![1]),
        (abi::STEP_LAYER, 2, vec![1, 2]),
    ];
    assert_eq!(said(&prefill), expected);
    let result = prefill.end().unwrap();
    assert_eq!(result.prefilled().unwrap().saved_us, 0);
    assert_eq!(all_back(&prefill), [(1, 2), (2, 2)]);
    assert!(matches!(prefill.next(PATIENCE), Err(Failure::Ended)));
    assert!(matches!(prefill.end(), Err(Failure::Ended)));
    prefill.free();
}

#[test]
fn memory_is_not_given_back_before_the_last_writer_has_let_it_go_whichever_way_it_ends() {
    for is_ended in [false, true] {
        let ((come_to, comes), (opens, open)) = (channel(), channel());
        let gate = Gate { come_to: Mutex::new(come_to), open: Mutex::new(open) };
        let prefill = begun(&Node { layers: 1, silent: Some(Arc::new(gate)) });
        let (step, _) = prefill.next(PATIENCE).unwrap();
        assert_eq!((step.kind, step.layer), (abi::STEP_LAYER, 0), "it is under way");
        assert_eq!(prefill.next(Duration::ZERO).unwrap().0.kind, abi::STEP_WAIT);
        if is_ended {
            prefill.end().unwrap();
            assert!(prefill.back(2, Duration::ZERO).unwrap().is_empty());
            assert!(prefill.back(2, Duration::from_millis(1)).unwrap().is_empty());
        }
        let freeing = std::thread::spawn(move || prefill.free());
        comes.recv_timeout(PATIENCE).unwrap();
        assert!(!freeing.is_finished(), "somebody may write");
        opens.send(()).unwrap();
        freeing.join().unwrap();
    }
}
