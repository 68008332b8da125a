//! Paths and links of a client, and reports of its instance to the routers.
//!
//! Not here: creating and freeing handles (`entry.rs`), and sending reports
//! (`kvfleet_client::Reporter`).

use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kv_core::schedule::LinkPath;
use kvfleet_client::{Client, InstanceLoad, Reporter, ReporterConfig, RequestOutcome};
use kvfleet_proto::pb;
use kvfleet_transport::pick::PathKind;
use tokio::runtime::Runtime;

use crate::abi;
use crate::handles::ClientRuntime;
use crate::results::{c_text, size_of_u32};
use crate::status::Failure;

/// Longest wait for the final reports when a reporter is freed.
const FINAL_REPORT_TIMEOUT: Duration = Duration::from_secs(2);

/// `kvf_paths`.
#[derive(Debug)]
pub struct PathsHandle {
    /// Path number, address and reason of each node.
    nodes: Vec<(u32, CString, CString)>,
    traffic: Vec<abi::PathTraffic>,
}

impl PathsHandle {
    /// The client's current paths.
    pub(crate) fn of(client: &Client) -> PathsHandle {
        let nodes = client
            .path_reports()
            .into_iter()
            .map(|report| (path_number(report.used), c_text(&report.peer), c_text(&report.to_string())));
        let carried = client.carried().into_iter().map(|(kind, carried)| abi::PathTraffic {
            size: size_of_u32::<abi::PathTraffic>(),
            path: path_number(kind),
            fetched_bytes: carried.received_bytes(),
            saved_bytes: carried.sent_bytes(),
        });
        PathsHandle { nodes: nodes.collect(), traffic: carried.collect() }
    }

    pub(crate) fn node(&self, position: usize) -> Result<abi::NodePath, Failure> {
        let found = self.nodes.get(position).ok_or(Failure::NotFound { what: "node of this number" })?;
        let (path, address, reason) = found;
        let size = size_of_u32::<abi::NodePath>();
        Ok(abi::NodePath { size, path: *path, address: address.as_ptr(), reason: reason.as_ptr() })
    }

    pub(crate) fn traffic(&self, position: usize) -> Result<abi::PathTraffic, Failure> {
        self.traffic.get(position).copied().ok_or(Failure::NotFound { what: "path of this number" })
    }
}

/// The number of a path, the same as in link samples.
fn path_number(kind: PathKind) -> u32 {
    let path = match kind {
        PathKind::SharedMemory => LinkPath::SharedMemory,
        PathKind::Rdma => LinkPath::Rdma,
        PathKind::Quic => LinkPath::Quic,
        PathKind::Tcp => LinkPath::Tcp,
    };
    path as u32
}

/// A link sample in C form.
pub(crate) fn link(sample: &pb::LinkSample) -> abi::Link {
    let pb::LinkSample { node, epoch, fetches, latency_us, bytes, stream_us, path, tier } = *sample;
    abi::Link { epoch, latency_us, bytes, stream_us, node, fetches, path, tier }
}

/// `kvf_reporter`.
#[derive(Debug)]
pub struct ReporterHandle {
    reporter: Option<Reporter>,
    load: Arc<Mutex<ReportedLoad>>,
    client_runtime: Arc<ClientRuntime>,
}

/// The load that the engine set, and when.
#[derive(Clone, Copy, Debug)]
struct ReportedLoad {
    load: InstanceLoad,
    at: Instant,
}

impl ReportedLoad {
    fn now(load: InstanceLoad) -> ReportedLoad {
        ReportedLoad { load, at: Instant::now() }
    }

    /// The load to report, or `None` if it is stale. The reporting threads continue while an
    /// engine's threads are stalled, so an old load does not describe its present state. An idle
    /// engine may block while it waits for requests; its load never becomes stale, since it must
    /// get requests.
    fn current(&self, now: Instant, silent_after: Duration) -> Option<InstanceLoad> {
        let is_idle = self.load.running == 0 && self.load.waiting == 0;
        (is_idle || now.saturating_duration_since(self.at) < silent_after).then_some(self.load)
    }
}

impl ReporterHandle {
    /// Starts reports on the client's threads; a load is repeated for at most `silent_after`.
    pub(crate) fn open(
        threads: &Arc<ClientRuntime>,
        config: &ReporterConfig,
        silent_after: Duration,
    ) -> Result<ReporterHandle, Failure> {
        let (client, runtime) = threads.for_owner()?;
        let said = Arc::new(Mutex::new(ReportedLoad::now(InstanceLoad::default())));
        let heard = Arc::clone(&said);
        let _inside = runtime.enter();
        let reporter = client.reporter_optional(config, move || {
            heard.lock().unwrap_or_else(PoisonError::into_inner).current(Instant::now(), silent_after)
        });
        Ok(ReporterHandle { reporter: Some(reporter), load: said, client_runtime: Arc::clone(threads) })
    }

    /// Sets the load of the next reports.
    pub(crate) fn set_load(&self, load: InstanceLoad) -> Result<(), Failure> {
        self.client_runtime.for_owner()?;
        *self.load.lock().unwrap_or_else(PoisonError::into_inner) = ReportedLoad::now(load);
        Ok(())
    }

    /// Queues a request's outcome for the next reports.
    pub(crate) fn record_outcome(&self, outcome: &RequestOutcome) -> Result<(), Failure> {
        let (client, _) = self.client_runtime.for_owner()?;
        client.record_outcome(outcome);
        Ok(())
    }

    /// Sends the final reports; in a forked process leaks the reporter instead.
    pub(crate) fn free(mut self) {
        let reporter = self.reporter.take();
        let Ok((_, runtime)) = self.client_runtime.for_owner() else {
            std::mem::forget(reporter);
            return std::mem::forget(self);
        };
        if let Some(reporter) = reporter {
            send_final_report(runtime, reporter);
        }
    }
}

fn send_final_report(runtime: &Runtime, reporter: Reporter) {
    // A lost final report has the same effect as the silence that follows.
    let _ = runtime.block_on(async { tokio::time::timeout(FINAL_REPORT_TIMEOUT, reporter.stop()).await });
}

/// C uses these handles from any thread.
const _: () = {
    const fn is_shared<T: Send + Sync>() {}
    is_shared::<PathsHandle>();
    is_shared::<ReporterHandle>();
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_load_is_not_reported() {
        let load = InstanceLoad { running: 3, ..InstanceLoad::default() };
        let (said, second) = (ReportedLoad::now(load), Duration::from_secs(1));
        let after = |span| said.current(said.at + span, second);
        assert_eq!([after(Duration::ZERO), after(second / 2), after(second)], [Some(load), Some(load), None]);
        let again = ReportedLoad { at: said.at + second, ..said };
        assert_eq!(again.current(said.at + second, second), Some(load), "a load that is set again is fresh");
        assert_eq!(again.current(said.at, second), Some(load), "also for a check that started before");
        let waiting = ReportedLoad { load: InstanceLoad { running: 0, waiting: 1, ..load }, ..said };
        assert_eq!(waiting.current(said.at + second, second), None);
    }

    #[test]
    fn idle_load_never_becomes_stale() {
        let said = ReportedLoad::now(InstanceLoad::default());
        let told = said.current(said.at + Duration::from_secs(86_400), Duration::from_secs(1));
        assert_eq!(told, Some(said.load));
    }
}
