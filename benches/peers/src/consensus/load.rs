//! Closed loops: each client puts, waits for the answer, and puts again, for a fixed time.
//!
//! Not here: the servers (`etcd.rs`).

use std::time::{Duration, Instant};

use benches::sorted;

use super::{Client, Cluster};

/// Throughput and latency that the clients measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PutStats {
    pub(crate) per_s: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
}

/// Runs `clients` concurrent clients for `span`.
///
/// # Errors
/// If a put fails: a cluster that loses puts has no rate.
pub(crate) async fn run_puts(
    cluster: &impl Cluster,
    clients: usize,
    span: Duration,
) -> anyhow::Result<PutStats> {
    let start = Instant::now();
    let until = start + span;
    let tasks: Vec<_> = (0..clients)
        .map(|number| tokio::spawn(put_until(until, number as u64, cluster.client(number))))
        .collect();
    let mut times = Vec::new();
    for task in tasks {
        times.extend(task.await??);
    }
    let elapsed = start.elapsed();
    let times = sorted(times.iter().map(|time: &Duration| time.as_secs_f64() * 1e6));
    anyhow::ensure!(!times.is_empty(), "no put completed within {span:?}");
    Ok(PutStats {
        per_s: times.len() as f64 / elapsed.as_secs_f64(),
        p50_us: times[times.len() / 2],
        p99_us: times[times.len() * 99 / 100],
    })
}

async fn put_until(until: Instant, number: u64, mut client: impl Client) -> anyhow::Result<Vec<Duration>> {
    let mut times = Vec::new();
    while Instant::now() < until {
        let start = Instant::now();
        client.put((number << 32) | times.len() as u64).await?;
        times.push(start.elapsed());
    }
    Ok(times)
}
