//! Effect of each QUIC setting: bare loops on quinn against stock settings, with the other settings
//! as in our path.
//!
//! Not here: our path beside these (`network.rs`).

use std::sync::Arc;

use anyhow::Context;
use benches::{BenchRow, Better, TimeSpent, measure_time, outcome};
use kvfleet_net::tls::Identity;
use tokio::runtime::Runtime;

use crate::Effort;
use crate::network::{FetchSide, RateFn, fetch_concurrently};
use crate::transport::identities;
use crate::transport::raw::{RawQuic, Tuning};

pub(crate) const ABOUT: &str = "bare stream loops on quinn over loopback, without verification, both ends in \
    one process: all settings of our path, and the same with one of them changed, each against stock \
    settings; the starting loop alternates";

const STOCK: &str = "quinn 0.11.12, stock settings";

/// Bytes fetched per run and side.
const RUN_BYTES: u64 = 256 << 20;

struct TuningShape {
    name: &'static str,
    bytes: u64,
    in_flight: usize,
}

const SHAPES: [TuningShape; 2] = [
    TuningShape { name: "1 MiB, 1 in flight", bytes: 1 << 20, in_flight: 1 },
    TuningShape { name: "64 KiB, 64 in flight", bytes: 64 << 10, in_flight: 64 },
];

fn tunings() -> Vec<(&'static str, Tuning)> {
    let ours = Tuning::OURS;
    vec![
        (STOCK, Tuning::STOCK),
        ("as our path", ours),
        ("packets of 1,452 bytes", Tuning { mtu: 1452, ..ours }),
        ("packets of 3,000 bytes", Tuning { mtu: 3000, ..ours }),
        ("windows of stock", Tuning { windows: false, ..ours }),
        ("no segmentation offload", Tuning { segments: false, ..ours }),
        ("BBR", Tuning { bbr: true, ..ours }),
        ("an acknowledgement for ten packets", Tuning { acks: Some(10), ..ours }),
        ("two connections", Tuning { connections: 2, ..ours }),
        ("a thread for each end", Tuning { own_threads: true, ..ours }),
    ]
}

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let (server, client) = identities()?;
    let mut rows = Vec::new();
    for shape in SHAPES.iter().filter(|shape| effort.is_selected(shape.name)) {
        rows.extend(compare(effort, &runtime, &server, &client, shape)?);
    }
    Ok(rows)
}

fn compare(
    effort: &Effort,
    runtime: &Runtime,
    server: &Identity,
    client: &Identity,
    shape: &TuningShape,
) -> anyhow::Result<Vec<BenchRow>> {
    let tunings = tunings();
    let mut sides: Vec<Arc<dyn FetchSide>> = Vec::new();
    for (_, tuning) in &tunings {
        let raw = runtime.block_on(RawQuic::tuned(server, client, tuning))?;
        sides.push(Arc::new((raw, shape.bytes)));
    }
    let fetches = effort.scaled(RUN_BYTES).div_ceil(shape.bytes).next_multiple_of(shape.in_flight as u64);
    let mut runs: Vec<Vec<TimeSpent>> = Vec::new();
    for run in 0..=effort.runs {
        let mut spent = vec![None; sides.len()];
        for turn in 0..sides.len() {
            let at = (run + turn) % sides.len();
            let (done, took) =
                measure_time(|| runtime.block_on(fetch_concurrently(&sides[at], fetches, shape.in_flight)));
            done.with_context(|| format!("{} broke: {}", tunings[at].0, shape.name))?;
            spent[at] = Some(took);
        }
        // The first run warms caches and opens windows.
        if run > 0 {
            runs.push(spent.into_iter().flatten().collect());
        }
    }
    let bytes = fetches * shape.bytes;
    let rates: [(&str, RateFn); 2] = [
        ("GB/CPU-s", |spent, bytes| spent.per_cpu_s(bytes) / 1e9),
        ("GB/s", |spent, bytes| spent.per_wall_s(bytes) / 1e9),
    ];
    let mut rows = Vec::new();
    for (unit, rate) in rates {
        for (at, (name, _)) in tunings.iter().enumerate().skip(1) {
            let pairs: Vec<_> =
                runs.iter().map(|spent| (rate(&spent[at], bytes), rate(&spent[0], bytes))).collect();
            let name = format!("{}, {name}", shape.name);
            rows.push(BenchRow::new("tuning", &name, unit, STOCK, Better::Higher, outcome(&pairs)));
        }
    }
    Ok(rows)
}
