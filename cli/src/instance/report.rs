//! What an instance tells the routers of itself, a few times a second: its load, and how fast it read from nodes.
//!
//! Not here: the telling ([`kvfleet_client::Reporter`]), and the counting (`load.rs`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::id::{IdentityDigest, InstanceId, NodeId};
use kvfleet_client::{Client, InstanceLoad, Reporter, ReporterConfig};

use super::config::InstanceConfig;
use super::load::Working;
use super::metrics::Metrics;

/// Begins to report for the instance that serves at `address`.
pub(super) fn begin(
    client: &Client,
    config: &InstanceConfig,
    address: String,
    working: &Arc<Working>,
    metrics: &Metrics,
) -> Reporter {
    let reporter = ReporterConfig {
        instance: InstanceId(config.instance),
        address,
        host: config.host.clone(),
        node: config.own_node().map(NodeId),
        every: Duration::from_millis(config.report_ms),
        links: config.report_links,
        // Where compute takes no time, nobody waits.
        keeps_order: config.time_scale > 0.0,
        role: config.role().unwrap_or_default(),
        place: config.place.clone(),
        // Who takes no prompts need not have written it.
        manifest: Some(config.openai.manifest.manifest())
            .filter(|manifest| Some(manifest.digest()) == IdentityDigest::from_hex(&config.identity)),
    };
    // Without a capacity nobody can tell what of it is taken.
    let kv_tokens_max = config.kv_tokens_max;
    // Reports to several routers go at about the same time.
    let within = reporter.every / 2;
    let (working, metrics) = (Arc::clone(working), metrics.clone());
    client.reporter(&reporter, move || {
        let now = working.snapshot();
        metrics.running(now.running);
        InstanceLoad {
            queue_tokens: now.queue_tokens,
            running: now.running,
            waiting: now.waiting,
            kv_tokens_max,
            kv_tokens: now.kv_tokens.min(kv_tokens_max),
            tbt_us: working.tbt_us(Instant::now(), within),
            // A prompt is one step, however long it is.
            chunk_tokens: u32::MAX,
        }
    })
}
