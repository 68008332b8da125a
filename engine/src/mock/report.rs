//! Periodic reports of an instance to the routers: load and link speeds.
//!
//! Not here: sending ([`kvfleet_client::Reporter`]), and counting (`load.rs`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::id::{IdentityDigest, InstanceId, NodeId};
use kvfleet_client::{Client, InstanceLoad, Reporter, ReporterConfig};

use super::config::InstanceConfig;
use super::load::LoadCounters;
use super::metrics::Metrics;

/// Starts the reports of the instance at `address`.
pub(super) fn start_reporting(
    client: &Client,
    config: &InstanceConfig,
    address: String,
    working: &Arc<LoadCounters>,
    metrics: &Metrics,
) -> Reporter {
    let reporter = ReporterConfig {
        instance: InstanceId(config.instance),
        address,
        host: config.host.clone(),
        node: config.own_node().map(NodeId),
        interval: Duration::from_millis(config.report_ms),
        links: config.report_links,
        // Without compute time, requests never wait.
        orders_by_deadline: config.time_scale > 0.0,
        role: config.role().unwrap_or_default(),
        place: config.place.clone(),
        // Without the OpenAI API, the manifest may be left unset.
        manifest: Some(config.openai.manifest.manifest())
            .filter(|manifest| Some(manifest.digest()) == IdentityDigest::from_hex(&config.identity)),
    };
    // Without a capacity, used memory cannot be rated.
    let kv_tokens_max = config.kv_tokens_max;
    // Reports to several routers are sent at about the same time.
    let within = reporter.interval / 2;
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
            // A prompt is always computed in one step.
            chunk_tokens: u32::MAX,
        }
    })
}
