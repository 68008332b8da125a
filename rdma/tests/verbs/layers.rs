//! Slices over real devices: time to the first layer of a history, compared with all layers and
//! with whole frames.

use std::ops::Range;

use kv_core::pipeline::ArrivalOrder;
use kvfleet_proto::frame::FrameHead;
use kvfleet_transport::{LayerRequest, SliceSink};

use super::*;

const BLOCKS: u32 = 16;
const LAYERS: usize = 16;
const SLICE_BYTES: usize = (MIB as usize) / LAYERS;

/// Memory for a history, and the time when each layer of all blocks was complete.
struct SliceHistory {
    slices: Vec<Vec<u8>>,
    filled: Vec<usize>,
    began: Instant,
    layer_times: Vec<Duration>,
}

impl SliceHistory {
    fn new() -> SliceHistory {
        let slices = vec![vec![0; SLICE_BYTES]; BLOCKS as usize * LAYERS];
        SliceHistory { slices, filled: vec![0; LAYERS], began: Instant::now(), layer_times: Vec::new() }
    }
}

impl SliceSink for SliceHistory {
    fn head(&mut self, position: usize, head: &FrameHead) -> bool {
        head.verify(suite::IDENTITY, suite::hash(position as u32)).is_ok()
    }

    fn slice(&mut self, position: usize, layer: usize) -> Option<&mut [u8]> {
        self.slices.get_mut(position * LAYERS + layer).map(|slice| &mut slice[..])
    }

    fn slices_filled(&mut self, _: usize, layers: Range<usize>) {
        for layer in layers {
            self.filled[layer] += 1;
        }
        while self.filled.get(self.layer_times.len()) == Some(&(BLOCKS as usize)) {
            self.layer_times.push(self.began.elapsed());
        }
    }

    fn slice_rejected(&mut self, position: usize) {
        panic!("block {position} is wrong");
    }

    fn count_received(&mut self, _: usize) {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_layer_arrives_long_before_the_last() {
    let Some(devices) = devices() else { return };
    let service = MemoryService::default();
    service.make_frames_ready();
    let authority = VerbsAuthority::new();
    let (server, arena) =
        serve(&devices.node, Ipv4Addr::LOCALHOST.into(), &authority.member(), &service, true);
    for number in 0..BLOCKS {
        let frame = suite::frame_of(suite::hash(number), &[SLICE_BYTES as u32; LAYERS]);
        let mut place = arena.take(u32::try_from(frame.bytes.len()).unwrap()).unwrap();
        place.write(&frame.bytes);
        service.hold(Frame { bytes: place.freeze(), ..frame });
    }
    let dialer = RdmaDialer::new(&devices.client, &authority.member(), tcp()).unwrap();
    let path = dialer.dial(server.local_addr().to_string()).await.unwrap();
    let request = suite::fetch_request(&suite::hashes(BLOCKS));
    suite::fetch(path.as_ref(), request.clone()).await.unwrap();
    for _ in 0..3 {
        let began = Instant::now();
        suite::fetch(path.as_ref(), request.clone()).await.unwrap();
        let whole = began.elapsed();
        let mut history = SliceHistory::new();
        let asked = LayerRequest { layers: 0..LAYERS, arrive: ArrivalOrder::ByLayer };
        path.fetch_layers(request.clone(), asked, &mut history).await.unwrap();
        assert_eq!(history.layer_times.len(), LAYERS);
        let [first, all] = [history.layer_times[0], history.layer_times[LAYERS - 1]]
            .map(|t| t.as_secs_f64() / whole.as_secs_f64());
        println!(
            "first layer of {BLOCKS} blocks in {first:.2}, all {LAYERS} in {all:.2} of the {whole:.0?} of whole frames"
        );
        assert!(first < all / 2.0, "{:?}", history.layer_times);
    }
    assert_eq!(devices.client.stats().failed, 0);
}
