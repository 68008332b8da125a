//! A cluster on this machine: routers, nodes and instances as child processes of one binary.
//!
//! Used by `up`, `replay` and `demo`, and by tests that break clusters on purpose. Children die with
//! this process however it ends (they follow their standard input), and are reaped by [`Cluster::stop`].
//! Not here: what is asked of a cluster once it runs.

mod child;
mod configs;
mod faults;
mod ports;
mod shape;
mod wait;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvfleet_proto::tls::{Identity, TlsFiles};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::certificates::{Authority, CertificateFiles, files};
use crate::process::Role;

pub(crate) use child::cpu_time_of;
pub use child::{Child, ChildError};
pub use faults::{Killed, Leader};
pub use shape::{LAYERS, NodeCapacity, OpenAiShape, Shape, manifest};

/// How long children get to stop after SIGTERM before they are killed.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// How often starting is tried with other ports when one was taken in between.
const START_ATTEMPTS: u32 = 3;

/// Role under which this process's own certificate is made.
pub const ADMIN_ROLE: &str = "admin";

/// A child's name: its role and number.
pub type ChildId = (Role, u64);

/// A running cluster. Dropping it kills every child; [`Cluster::stop`] stops them cleanly.
#[derive(Debug)]
pub struct Cluster {
    shape: Shape,
    routers: BTreeMap<u64, String>,
    /// Where the instances take requests of OpenAI's clients, if there are doors for those; an instance that starts again has the same.
    engine_ports: Vec<u16>,
    children: BTreeMap<ChildId, Child>,
    // Behind the children, because fields are dropped in order: nobody writes there any more.
    directory: Directory,
    leader_killed: Option<u64>,
    /// Crashes of children that were started again since.
    crashes: Vec<(ChildId, std::process::ExitStatus)>,
    cpu_of_ended: Duration,
    /// Peak memory of children that were killed or stopped.
    peaks_of_ended: BTreeMap<ChildId, u64>,
}

/// What memory a process had in place at most.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeakMemory {
    /// The process: `node-2`.
    pub process: String,
    /// Most of it so far, over all its starts, in bytes.
    pub peak_bytes: u64,
    /// What it may take with its configuration, in bytes; nothing where that follows from no configuration.
    pub bytes_max: Option<u64>,
}

/// The data directory: kept when it was named, removed at the end when it is temporary.
#[derive(Debug)]
enum Directory {
    Kept(PathBuf),
    Temporary(tempfile::TempDir),
}

impl Directory {
    fn path(&self) -> &Path {
        match self {
            Directory::Kept(path) => path,
            Directory::Temporary(dir) => dir.path(),
        }
    }
}

impl Cluster {
    /// Starts every process and waits until a leader is elected, every node has joined and every
    /// instance has reported. On an error everything that was started is stopped.
    pub async fn start(shape: Shape) -> anyhow::Result<Self> {
        let mut attempt = 1;
        loop {
            let ports_given =
                shape.base_port.is_some() || shape.data_dir.as_deref().is_some_and(ports::are_kept);
            let error = match Self::start_once(shape.clone()).await {
                Ok(cluster) => return Ok(cluster),
                Err(error) => error,
            };
            let taken = error.downcast_ref::<ChildError>().is_some_and(ChildError::is_port_taken);
            if !taken || ports_given || attempt == START_ATTEMPTS {
                return Err(error);
            }
            if let Some(directory) = &shape.data_dir {
                ports::forget(directory, shape.routers)?;
            }
            attempt += 1;
        }
    }

    async fn start_once(shape: Shape) -> anyhow::Result<Self> {
        let directory = match &shape.data_dir {
            Some(path) => {
                std::fs::create_dir_all(path).map_err(|cause| {
                    anyhow::anyhow!("cannot make {}: {cause}; choose another --data-dir", path.display())
                })?;
                Directory::Kept(path.canonicalize()?)
            }
            None => Directory::Temporary(tempfile::Builder::new().prefix("kvfleet-").tempdir()?),
        };
        let routers = ports::router_addresses(&shape, directory.path())?;
        let engine_ports = match &shape.openai {
            Some(_) => ports::beside(&routers, shape.instances)?,
            None => Vec::new(),
        };
        let mut cluster = Self {
            shape,
            routers,
            engine_ports,
            children: BTreeMap::new(),
            directory,
            leader_killed: None,
            crashes: vec![],
            cpu_of_ended: Duration::ZERO,
            peaks_of_ended: BTreeMap::new(),
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
        Authority::open(&self.certificates())?.issue(ADMIN_ROLE)?;
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

    /// Writes the child's configuration and starts it; [`Cluster::ready`] waits for it.
    fn spawn(&mut self, id: ChildId) -> anyhow::Result<()> {
        let config = configs::write(self, id)?;
        let log = self.directory().join("logs").join(format!("{}.log", name(id)));
        let child = Child::spawn(&self.shape.binary, id, &config, &log)?;
        self.children.insert(id, child);
        Ok(())
    }

    async fn ready(&mut self, id: ChildId) -> anyhow::Result<()> {
        match self.children.get_mut(&id) {
            Some(child) => Ok(child.wait_ready().await?),
            None => Err(anyhow::anyhow!("{} was not started", name(id))),
        }
    }

    /// Addresses of all routers, in the order of their numbers, running or not.
    #[must_use]
    pub fn router_addresses(&self) -> Vec<String> {
        self.routers.values().cloned().collect()
    }

    /// What the cluster was asked to be.
    #[must_use]
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Where data, configurations, certificates and logs are.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Directory of the certificates.
    #[must_use]
    pub fn certificates(&self) -> PathBuf {
        self.directory().join("certificates")
    }

    /// Certificate files of `role`, as made at start.
    #[must_use]
    pub fn certificate_files(&self, role: &str) -> CertificateFiles {
        files(&self.certificates(), role)
    }

    /// The identity with which commands call this cluster.
    pub fn identity(&self) -> anyhow::Result<Identity> {
        let files = self.certificate_files(ADMIN_ROLE);
        Ok(TlsFiles { ca: files.ca, cert: files.cert, key: files.key }.load()?)
    }

    /// The configuration with which a child was started, whatever was set besides.
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

    /// Children that are gone although nobody asked them to end.
    pub fn crashed(&mut self) -> Vec<String> {
        self.crashed_now().into_iter().map(crash_text).collect()
    }

    /// The same, with those that were started again since.
    pub fn ever_crashed(&mut self) -> Vec<String> {
        let now = self.crashed_now();
        self.crashes.iter().copied().chain(now).map(crash_text).collect()
    }

    fn crashed_now(&mut self) -> Vec<(ChildId, std::process::ExitStatus)> {
        let children = self.children.iter_mut();
        children.filter_map(|(id, child)| child.crashed().map(|how| (*id, how))).collect()
    }

    /// Processor time that all processes of the cluster have used so far, ended ones included.
    #[must_use]
    pub fn cpu_time(&self) -> Duration {
        self.children.values().filter_map(Child::cpu_time).sum::<Duration>() + self.cpu_of_ended
    }

    /// Memory that each process had in place at most, killed ones included.
    pub fn peak_memory(&self) -> anyhow::Result<Vec<PeakMemory>> {
        let mut peaks = self.peaks_of_ended.clone();
        for (id, child) in &self.children {
            let peak = peaks.entry(*id).or_default();
            *peak = child.peak_memory().unwrap_or_default().max(*peak);
        }
        let known = peaks.into_iter().filter(|(_, peak_bytes)| *peak_bytes > 0);
        let told = |(id, peak_bytes)| {
            let bytes_max = configs::memory_bytes_max(self, id)?;
            Ok(PeakMemory { process: name(id), peak_bytes, bytes_max })
        };
        known.map(told).collect()
    }

    /// Notes what a child had at most, before it ends.
    fn note_peak(&mut self, id: ChildId) {
        let peak = self.children.get(&id).and_then(Child::peak_memory).unwrap_or_default();
        let noted = self.peaks_of_ended.entry(id).or_default();
        *noted = peak.max(*noted);
    }

    /// Stops every child cleanly, kills those that do not stop in time, reaps all.
    pub async fn stop(mut self) {
        for role in [Role::Instance, Role::Node, Role::Router] {
            let stopping = self.children.iter_mut().filter(|((of, _), _)| *of == role);
            let stops: Vec<_> = stopping.map(|(_, child)| child.stop(STOP_GRACE)).collect();
            futures_join(stops).await;
        }
    }
}

impl Drop for Cluster {
    /// Kills and reaps whatever [`Cluster::stop`] did not: an interrupted start, a panic.
    fn drop(&mut self) {
        for child in self.children.values_mut() {
            child.kill_now();
        }
        for child in self.children.values_mut() {
            child.reap_now(STOP_GRACE);
        }
    }
}

fn crash_text((id, how): (ChildId, std::process::ExitStatus)) -> String {
    format!("{} ended: {how}", name(id))
}

/// `router-1`, `node-2`: names of files, certificates and messages.
#[must_use]
pub fn name((role, number): ChildId) -> String {
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
