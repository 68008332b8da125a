//! A cluster on this machine: routers, nodes and instances as child processes of one binary.
//!
//! Used by `up`, `replay`, `demo` and fault tests. Children end with this process in any case,
//! because they follow their standard input; [`LocalCluster::stop`] reaps them. Not here: uses of
//! the running cluster.

mod child;
mod configs;
mod faults;
mod ports;
mod shape;
mod wait;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kv_core::id::{InstanceId, NodeId, RouterId};
use kvfleet_net::tls::{self, Identity, TlsFiles};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::process::Role;
use kvfleet_net::certificates::{Authority, files};

pub(crate) use child::cpu_time_of;
pub use child::{Child, ChildError};
pub use faults::{KilledProcess, Leader};
pub use shape::{ClusterShape, LAYERS, NodeCapacity, OpenAiShape, manifest};

/// Time for children to stop after SIGTERM before they are killed.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// Attempts to start with other ports if a chosen port was taken meanwhile.
const START_ATTEMPTS: u32 = 3;

/// Role and number of a child.
pub type ChildId = (Role, u64);

/// A running cluster. Dropping it kills every child; [`LocalCluster::stop`] stops them cleanly.
#[derive(Debug)]
pub struct LocalCluster {
    shape: ClusterShape,
    routers: BTreeMap<u64, String>,
    /// Ports for OpenAI-compatible requests to instances, if the cluster has a gateway; a restarted
    /// instance keeps its port.
    engine_ports: Vec<u16>,
    children: BTreeMap<ChildId, Child>,
    // After `children`, because fields are dropped in order and the children must end first.
    directory: DataDirectory,
    last_killed_leader: Option<u64>,
    /// Crashes of children that were restarted since.
    crashes: Vec<(ChildId, std::process::ExitStatus)>,
    ended_cpu_time: Duration,
    /// Peak memory of children that were killed or stopped.
    ended_peaks: BTreeMap<ChildId, u64>,
}

/// Peak memory of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeakMemory {
    /// Name of the process, such as `node-2`.
    pub process: String,
    /// Peak over all its starts, in bytes.
    pub peak_bytes: u64,
    /// Bound under its configuration, in bytes; `None` if it has none.
    pub bytes_max: Option<u64>,
}

/// The data directory: persistent if it was named, otherwise removed at the end.
#[derive(Debug)]
enum DataDirectory {
    Persistent(PathBuf),
    Temporary(tempfile::TempDir),
}

impl DataDirectory {
    fn path(&self) -> &Path {
        match self {
            DataDirectory::Persistent(path) => path,
            DataDirectory::Temporary(dir) => dir.path(),
        }
    }
}

impl LocalCluster {
    /// Starts every process, and waits until a leader is elected, every node has joined and every
    /// instance has reported. On an error, all started processes are stopped.
    pub async fn start(shape: ClusterShape) -> anyhow::Result<Self> {
        let mut attempt = 1;
        loop {
            let ports_given =
                shape.base_port.is_some() || shape.data_dir.as_deref().is_some_and(ports::has_kept_addresses);
            let error = match Self::start_once(shape.clone()).await {
                Ok(cluster) => return Ok(cluster),
                Err(error) => error,
            };
            let taken = error.downcast_ref::<ChildError>().is_some_and(ChildError::is_port_taken);
            if !taken || ports_given || attempt == START_ATTEMPTS {
                return Err(error);
            }
            if let Some(directory) = &shape.data_dir {
                ports::discard_choice(directory, shape.routers)?;
            }
            attempt += 1;
        }
    }

    async fn start_once(shape: ClusterShape) -> anyhow::Result<Self> {
        let directory = match &shape.data_dir {
            Some(path) => {
                std::fs::create_dir_all(path).map_err(|cause| {
                    anyhow::anyhow!("cannot create {}: {cause}; choose another --data-dir", path.display())
                })?;
                DataDirectory::Persistent(path.canonicalize()?)
            }
            None => DataDirectory::Temporary(tempfile::Builder::new().prefix("kvfleet-").tempdir()?),
        };
        let routers = ports::router_addresses(&shape, directory.path())?;
        let engine_ports = match &shape.openai {
            Some(_) => ports::free_engine_ports(&routers, shape.instances)?,
            None => Vec::new(),
        };
        let mut cluster = Self {
            shape,
            routers,
            engine_ports,
            children: BTreeMap::new(),
            directory,
            last_killed_leader: None,
            crashes: vec![],
            ended_cpu_time: Duration::ZERO,
            ended_peaks: BTreeMap::new(),
        };
        match cluster.start_all().await {
            Ok(()) => Ok(cluster),
            Err(error) => {
                cluster.stop().await;
                Err(error)
            }
        }
    }

    async fn start_all(&mut self) -> anyhow::Result<()> {
        Authority::open(&self.certificates())?.issue(&tls::Role::Admin)?;
        let counts = [
            (Role::Router, self.shape.routers),
            (Role::Node, self.shape.nodes),
            (Role::Instance, self.shape.instances),
        ];
        for (role, count) in counts {
            for number in 1..=u64::from(count) {
                self.spawn((role, number))?;
            }
            for number in 1..=u64::from(count) {
                self.ready((role, number)).await?;
            }
        }
        wait::until_serving(self).await
    }

    /// Writes the child's configuration and starts it; `ready` waits for it.
    fn spawn(&mut self, id: ChildId) -> anyhow::Result<()> {
        let config = configs::write(self, id)?;
        let log = self.directory().join("logs").join(format!("{}.log", process_name(id)));
        let child = Child::spawn(&self.shape.binary, id, &config, &log)?;
        self.children.insert(id, child);
        Ok(())
    }

    async fn ready(&mut self, id: ChildId) -> anyhow::Result<()> {
        match self.children.get_mut(&id) {
            Some(child) => Ok(child.wait_ready().await?),
            None => Err(anyhow::anyhow!("{} was not started", process_name(id))),
        }
    }

    /// Addresses of all routers, in the order of their numbers, running or not.
    #[must_use]
    pub fn router_addresses(&self) -> Vec<String> {
        self.routers.values().cloned().collect()
    }

    /// Requested shape of the cluster.
    #[must_use]
    pub fn shape(&self) -> &ClusterShape {
        &self.shape
    }

    /// Directory of data, configurations, certificates and logs.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Directory of the certificates.
    #[must_use]
    pub fn certificates(&self) -> PathBuf {
        self.directory().join("certificates")
    }

    /// Identity of commands that call this cluster.
    pub fn identity(&self) -> anyhow::Result<Identity> {
        let files = files(&self.certificates(), &tls::Role::Admin);
        Ok(TlsFiles { ca: files.ca, cert: files.cert, key: files.key }.load()?)
    }

    /// Configuration of a child, including overrides.
    pub(crate) fn configuration<T>(&self, id: ChildId) -> anyhow::Result<T>
    where
        T: Default + Serialize + DeserializeOwned,
    {
        configs::read(self, id)
    }

    /// The child with this role and number, running or killed.
    #[must_use]
    pub fn child(&self, id: ChildId) -> Option<&Child> {
        self.children.get(&id)
    }

    /// Every child.
    pub fn children(&self) -> impl Iterator<Item = (&ChildId, &Child)> {
        self.children.iter()
    }

    /// Children that ended without a request.
    pub fn crashed_children(&mut self) -> Vec<String> {
        self.crashed_now().into_iter().map(|(id, how)| crash_text(id, how)).collect()
    }

    /// Crashed children, including those that were restarted since.
    pub fn all_crashes(&mut self) -> Vec<String> {
        let now = self.crashed_now();
        self.crashes.iter().copied().chain(now).map(|(id, how)| crash_text(id, how)).collect()
    }

    fn crashed_now(&mut self) -> Vec<(ChildId, std::process::ExitStatus)> {
        let children = self.children.iter_mut();
        children.filter_map(|(id, child)| child.crashed().map(|how| (*id, how))).collect()
    }

    /// CPU time of all processes so far, including ended ones.
    #[must_use]
    pub fn cpu_time(&self) -> Duration {
        self.children.values().filter_map(Child::cpu_time).sum::<Duration>() + self.ended_cpu_time
    }

    /// Peak memory of each process, including killed ones.
    pub fn peak_memory(&self) -> anyhow::Result<Vec<PeakMemory>> {
        let mut peaks = self.ended_peaks.clone();
        for (id, child) in &self.children {
            let peak = peaks.entry(*id).or_default();
            *peak = child.peak_memory().unwrap_or_default().max(*peak);
        }
        let known = peaks.into_iter().filter(|(_, peak_bytes)| *peak_bytes > 0);
        let told = |(id, peak_bytes)| {
            let bytes_max = configs::memory_bytes_max(self, id)?;
            Ok(PeakMemory { process: process_name(id), peak_bytes, bytes_max })
        };
        known.map(told).collect()
    }

    /// Records a child's peak memory before it ends.
    fn record_peak(&mut self, id: ChildId) {
        let peak = self.children.get(&id).and_then(Child::peak_memory).unwrap_or_default();
        let noted = self.ended_peaks.entry(id).or_default();
        *noted = peak.max(*noted);
    }

    /// Stops every child cleanly, kills those that do not stop in time, and reaps all.
    pub async fn stop(mut self) {
        for role in [Role::Instance, Role::Node, Role::Router] {
            let stopping = self.children.iter_mut().filter(|((of, _), _)| *of == role);
            let stops: Vec<_> = stopping.map(|(_, child)| child.stop(STOP_GRACE)).collect();
            futures_join(stops).await;
        }
    }
}

impl Drop for LocalCluster {
    /// Kills and reaps the children that [`LocalCluster::stop`] did not stop, for example after an
    /// interrupted start or a panic.
    fn drop(&mut self) {
        for child in self.children.values_mut() {
            child.kill_now();
        }
        for child in self.children.values_mut() {
            child.reap_now(STOP_GRACE);
        }
    }
}

fn crash_text(id: ChildId, how: std::process::ExitStatus) -> String {
    format!("{} ended: {how}", process_name(id))
}

/// The role of a child's certificate.
fn certificate_role(id: ChildId) -> anyhow::Result<tls::Role> {
    Ok(match id {
        (Role::Router, number) => tls::Role::Router(Some(RouterId(number))),
        (Role::Node, number) => tls::Role::Node(Some(NodeId(u32::try_from(number)?))),
        (Role::Instance, number) => tls::Role::Instance(Some(InstanceId(u32::try_from(number)?))),
    })
}

/// `router-1`, `node-2`: used in file names and messages.
#[must_use]
pub fn process_name((role, number): ChildId) -> String {
    format!("{}-{number}", role.name())
}

async fn futures_join<F: Future<Output = ()>>(all: Vec<F>) {
    let mut all: Vec<_> = all.into_iter().map(Box::pin).collect();
    std::future::poll_fn(|context| {
        all.retain_mut(|one| one.as_mut().poll(context).is_pending());
        if all.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}
