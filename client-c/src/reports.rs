//! What a client tells of its paths and links, and what it tells the routers of its instance.
//!
//! Not here: how they are given out and come back (`entry.rs`), and the telling itself (`kvfleet_client::Reporter`).

use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kv_core::schedule::LinkPath;
use kvfleet_client::{Client, InstanceLoad, Reporter, ReporterConfig, RequestOutcome};
use kvfleet_proto::pb;
use kvfleet_transport::pick::PathKind;
use tokio::runtime::Runtime;

use crate::abi;
use crate::handles::Opened;
use crate::results::{c_text, size_of_u32};
use crate::status::Failure;

/// Longest that freeing a reporter waits for its goodbyes.
const GOODBYE_MAX: Duration = Duration::from_secs(2);

/// `kvf_paths`.
#[derive(Debug)]
pub struct PathsHandle {
    /// Path, address and reason of each node.
    nodes: Vec<(u32, CString, CString)>,
    carried: Vec<abi::Carried>,
}

impl PathsHandle {
    /// What the client knows now.
    pub(crate) fn of(client: &Client) -> PathsHandle {
        let nodes = client
            .path_reports()
            .into_iter()
            .map(|report| (path_number(report.used), c_text(&report.peer), c_text(&report.to_string())));
        let carried = client.carried().into_iter().map(|(kind, carried)| abi::Carried {
            size: size_of_u32::<abi::Carried>(),
            path: path_number(kind),
            fetched_bytes: carried.received_bytes(),
            saved_bytes: carried.sent_bytes(),
        });
        PathsHandle { nodes: nodes.collect(), carried: carried.collect() }
    }

    pub(crate) fn node(&self, position: usize) -> Result<abi::NodePath, Failure> {
        let found = self.nodes.get(position).ok_or(Failure::NotFound { what: "node of this number" })?;
        let (path, address, reason) = found;
        let size = size_of_u32::<abi::NodePath>();
        Ok(abi::NodePath { size, path: *path, address: address.as_ptr(), reason: reason.as_ptr() })
    }

    pub(crate) fn carried(&self, position: usize) -> Result<abi::Carried, Failure> {
        self.carried.get(position).copied().ok_or(Failure::NotFound { what: "path of this number" })
    }
}

/// The number of a path, as samples of links have it too.
fn path_number(kind: PathKind) -> u32 {
    let path = match kind {
        PathKind::SharedMemory => LinkPath::SharedMemory,
        PathKind::Rdma => LinkPath::Rdma,
        PathKind::Quic => LinkPath::Quic,
        PathKind::Tcp => LinkPath::Tcp,
    };
    path as u32
}

/// A sample as C reads it.
pub(crate) fn link(sample: &pb::LinkSample) -> abi::Link {
    let pb::LinkSample { node, epoch, fetches, latency_us, bytes, stream_us, path, tier } = *sample;
    abi::Link { epoch, latency_us, bytes, stream_us, node, fetches, path, tier }
}

/// `kvf_reporter`.
#[derive(Debug)]
pub struct ReporterHandle {
    reporter: Option<Reporter>,
    said: Arc<Mutex<Said>>,
    threads: Arc<Opened>,
}

/// What the engine said it is doing, and when.
#[derive(Clone, Copy, Debug)]
struct Said {
    load: InstanceLoad,
    at: Instant,
}

impl Said {
    fn now(load: InstanceLoad) -> Said {
        Said { load, at: Instant::now() }
    }

    /// What may still be told of it. The threads that report go on while those of an engine stand still: what it said long ago is
    /// no word of what it does now. An engine without work may wait for some and say nothing, and must be sent it.
    fn fresh(&self, now: Instant, silent_after: Duration) -> Option<InstanceLoad> {
        let is_idle = self.load.running == 0 && self.load.waiting == 0;
        (is_idle || now.saturating_duration_since(self.at) < silent_after).then_some(self.load)
    }
}

impl ReporterHandle {
    /// Begins to report on the client's threads, each load for so long at most.
    pub(crate) fn open(
        threads: &Arc<Opened>,
        config: &ReporterConfig,
        silent_after: Duration,
    ) -> Result<ReporterHandle, Failure> {
        let (client, runtime) = threads.here()?;
        let said = Arc::new(Mutex::new(Said::now(InstanceLoad::default())));
        let heard = Arc::clone(&said);
        let _inside = runtime.enter();
        let reporter = client.reporter_while(config, move || {
            heard.lock().unwrap_or_else(PoisonError::into_inner).fresh(Instant::now(), silent_after)
        });
        Ok(ReporterHandle { reporter: Some(reporter), said, threads: Arc::clone(threads) })
    }

    /// What the next reports say.
    pub(crate) fn set_load(&self, load: InstanceLoad) -> Result<(), Failure> {
        self.threads.here()?;
        *self.said.lock().unwrap_or_else(PoisonError::into_inner) = Said::now(load);
        Ok(())
    }

    /// What becomes of a request is told with the next reports.
    pub(crate) fn tell(&self, outcome: &RequestOutcome) -> Result<(), Failure> {
        let (client, _) = self.threads.here()?;
        client.tell(outcome);
        Ok(())
    }

    /// Says goodbye; in a forked process nothing is said or given back.
    pub(crate) fn free(mut self) {
        let reporter = self.reporter.take();
        let Ok((_, runtime)) = self.threads.here() else {
            std::mem::forget(reporter);
            return std::mem::forget(self);
        };
        if let Some(reporter) = reporter {
            say_goodbye(runtime, reporter);
        }
    }
}

fn say_goodbye(runtime: &Runtime, reporter: Reporter) {
    // Late goodbyes are left to the silence that follows.
    let _ = runtime.block_on(async { tokio::time::timeout(GOODBYE_MAX, reporter.stop()).await });
}

/// C uses them from any thread.
const _: () = {
    const fn is_shared<T: Send + Sync>() {}
    is_shared::<PathsHandle>();
    is_shared::<ReporterHandle>();
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_that_was_said_long_ago_is_not_told() {
        let load = InstanceLoad { running: 3, ..InstanceLoad::default() };
        let (said, second) = (Said::now(load), Duration::from_secs(1));
        let after = |span| said.fresh(said.at + span, second);
        assert_eq!([after(Duration::ZERO), after(second / 2), after(second)], [Some(load), Some(load), None]);
        let again = Said { at: said.at + second, ..said };
        assert_eq!(again.fresh(said.at + second, second), Some(load), "said again, it is");
        assert_eq!(again.fresh(said.at, second), Some(load), "also by a look that began before");
        let waiting = Said { load: InstanceLoad { running: 0, waiting: 1, ..load }, ..said };
        assert_eq!(waiting.fresh(said.at + second, second), None);
    }

    #[test]
    fn an_engine_that_waits_for_work_is_told_of_however_long_it_says_nothing() {
        let said = Said::now(InstanceLoad::default());
        let told = said.fresh(said.at + Duration::from_secs(86_400), Duration::from_secs(1));
        assert_eq!(told, Some(said.load));
    }
}
