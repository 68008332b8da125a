//! Three routers as processes: started, killed abruptly, and restarted on the same data.
//!
//! Not here: the schedule of faults (`workload.rs`) and the properties (`invariants/`).

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kv_core::id::RouterId;
use kvfleet_net::tls::{Identity, Role};
use kvfleet_proto::pb;
use kvfleet_proto::pb::router_client::RouterClient;
use kvfleet_router::{RouterConfig, VoterConfig};
use kvfleet_testkit::certificates::{Certificates, RoleChannel};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use tempfile::TempDir;

use kvfleet_testkit::ports::unused_address;

/// Routers of a cluster: the smallest number that tolerates one failure.
pub const ROUTERS_COUNT: usize = 3;

/// Shards of the index. Each fake node announces to one of them.
pub const SHARDS_COUNT: u16 = 2;

/// Call timeout: an election and a slow disk on a busy machine, with a margin.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// A failure of the suite itself; violated invariants are reported separately.
pub type SuiteError = Box<dyn std::error::Error + Send + Sync>;

/// Client of one router, which makes each call with a role that may make it.
pub type Client = RouterClient<RoleChannel>;

/// Clients of all routers. Cheap to clone; independent of the processes.
#[derive(Clone)]
pub struct RouterClients {
    clients: Vec<Client>,
}

impl RouterClients {
    /// Client of the router at this position.
    #[must_use]
    pub fn client(&self, position: usize) -> Client {
        self.clients[position % self.clients.len()].clone()
    }

    /// Number of routers.
    #[must_use]
    pub fn count(&self) -> usize {
        self.clients.len()
    }

    /// Status of one router, if it answers.
    pub async fn status(&self, position: usize) -> Option<pb::StatusReply> {
        let answer = self.client(position).status(pb::StatusRequest {}).await;
        answer.ok().map(tonic::Response::into_inner)
    }

    /// Position of the router that reports itself as leader, if any.
    pub async fn leader(&self) -> Option<usize> {
        for position in 0..self.clients.len() {
            if self.status(position).await.is_some_and(|status| status.leader == status.router) {
                return Some(position);
            }
        }
        None
    }
}

/// A running cluster. Dropping it kills every process.
pub struct Cluster {
    program: PathBuf,
    folder: TempDir,
    certificates: Certificates,
    addresses: Vec<String>,
    processes: Vec<Option<Child>>,
    router_clients: RouterClients,
}

impl Cluster {
    /// Creates certificates and configurations, and starts every router with the given program.
    ///
    /// # Errors
    /// If a router does not start.
    pub fn start(program: &Path) -> Result<Cluster, SuiteError> {
        Cluster::start_with(program, |_| {})
    }

    /// Like [`Cluster::start`], with a change applied to each configuration.
    ///
    /// # Errors
    /// If a router does not start.
    pub fn start_with(program: &Path, change: impl Fn(&mut RouterConfig)) -> Result<Cluster, SuiteError> {
        let folder = tempfile::tempdir()?;
        let certificates = Certificates::open(folder.path());
        let addresses: Vec<String> = (0..ROUTERS_COUNT).map(|_| unused_address()).collect();
        for position in 0..ROUTERS_COUNT {
            let mut config = config(position, &addresses, folder.path(), &certificates);
            change(&mut config);
            std::fs::write(config_path(folder.path(), position), toml::to_string(&config)?)?;
        }
        let contacts = router_clients(&addresses, &certificates);
        let processes = (0..ROUTERS_COUNT).map(|_| None).collect();
        let mut cluster = Cluster {
            program: program.to_owned(),
            folder,
            certificates,
            addresses,
            processes,
            router_clients: contacts,
        };
        for position in 0..ROUTERS_COUNT {
            cluster.start_router(position)?;
        }
        Ok(cluster)
    }

    /// Starts one more router that belongs to no cluster yet and waits to be added. Its number is
    /// one above the highest. Returns its number and address.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start_unjoined_router(
        &mut self,
        change: impl Fn(&mut RouterConfig),
    ) -> Result<(u64, String), SuiteError> {
        let position = self.processes.len();
        let mut addresses = self.addresses.clone();
        addresses.push(unused_address());
        let mut config = config(position, &addresses, self.folder.path(), &self.certificates);
        (config.join, config.voters, config.advertise) = (true, Vec::new(), addresses[position].clone());
        change(&mut config);
        std::fs::write(config_path(self.folder.path(), position), toml::to_string(&config)?)?;
        self.router_clients = router_clients(&addresses, &self.certificates);
        self.addresses = addresses;
        self.processes.push(None);
        self.start_router(position)?;
        Ok((config.id, self.addresses[position].clone()))
    }

    /// Data directory of the router at this position.
    #[must_use]
    pub fn data_dir(&self, position: usize) -> PathBuf {
        data_dir(self.folder.path(), position)
    }

    /// Detaches a stopped router from the cluster: moves its data away, so that it waits to be
    /// added after a restart. Returns the new path of its data.
    ///
    /// # Errors
    /// If a file operation fails.
    pub fn detach_router(&mut self, position: usize) -> Result<PathBuf, SuiteError> {
        let away = self.folder.path().join(format!("away-{position}"));
        std::fs::rename(self.data_dir(position), &away)?;
        let path = config_path(self.folder.path(), position);
        let mut config: RouterConfig = toml::from_str(&std::fs::read_to_string(&path)?)?;
        (config.join, config.voters, config.advertise) = (true, Vec::new(), self.addresses[position].clone());
        std::fs::write(path, toml::to_string(&config)?)?;
        Ok(away)
    }

    /// Addresses of the routers, by position.
    #[must_use]
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// The TLS identity of a role.
    #[must_use]
    pub fn identity(&self, role: &Role) -> Identity {
        self.certificates.identity(role)
    }

    /// Clients of the routers.
    #[must_use]
    pub fn router_clients(&self) -> RouterClients {
        self.router_clients.clone()
    }

    /// Whether the router at this position runs.
    #[must_use]
    pub fn is_running(&self, position: usize) -> bool {
        self.processes[position].is_some()
    }

    /// Process ids of the running routers.
    #[must_use]
    pub fn process_ids(&self) -> Vec<u32> {
        self.processes.iter().flatten().map(Child::id).collect()
    }

    /// Number of running routers.
    #[must_use]
    pub fn running(&self) -> usize {
        self.processes.iter().flatten().count()
    }

    /// Ends a router's process with SIGKILL.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn kill(&mut self, position: usize) -> Result<(), SuiteError> {
        if let Some(mut process) = self.processes[position].take() {
            process.kill()?;
            process.wait()?;
        }
        Ok(())
    }

    /// Starts a router on its existing data. Has no effect if it runs.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start_router(&mut self, position: usize) -> Result<(), SuiteError> {
        if self.is_running(position) {
            return Ok(());
        }
        let mut command = Command::new(&self.program);
        // `program` is the full command line, or a program that only runs routers.
        if self.program.file_stem().is_some_and(|name| name == "kvfleet") {
            command.args(["router", "--log", "error", "--metrics-listen", "", "--config"]);
        }
        command.arg(config_path(self.folder.path(), position));
        self.run(position, command)
    }

    /// Deletes a stopped router's log and snapshots, as if its index had only been in memory.
    ///
    /// # Errors
    /// If it still runs, or its files cannot be removed.
    pub fn delete_router_data(&self, position: usize) -> Result<(), SuiteError> {
        if self.is_running(position) {
            return Err(format!("router {position} runs: kill it first").into());
        }
        Ok(std::fs::remove_dir_all(data_dir(self.folder.path(), position))?)
    }

    /// Starts a router with a nearly full disk: no file may exceed this size, and writes beyond it
    /// fail with an error instead of a signal. Has no effect if it runs.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start_router_on_a_full_disk(
        &mut self,
        position: usize,
        file_bytes: u64,
    ) -> Result<(), SuiteError> {
        if self.is_running(position) {
            return Ok(());
        }
        /// Unit of `ulimit -f`.
        const UNIT_BYTES: u64 = 512;
        let units = file_bytes / UNIT_BYTES;
        let mut command = Command::new("sh");
        command
            .args(["-c", &format!("trap '' XFSZ; ulimit -S -f {units}; exec \"$0\" \"$1\"")])
            .arg(&self.program)
            .arg(config_path(self.folder.path(), position));
        self.run(position, command)
    }

    /// Gives a router that was started on a full disk unlimited room.
    ///
    /// # Errors
    /// If it does not run.
    pub fn make_room(&self, position: usize) -> Result<(), SuiteError> {
        let process = self.processes[position].as_ref().ok_or("the router does not run")?;
        let unlimited = Rlimit { current: None, maximum: None };
        prlimit(Pid::from_raw(process.id().cast_signed()), Resource::Fsize, unlimited)?;
        Ok(())
    }

    fn run(&mut self, position: usize, mut command: Command) -> Result<(), SuiteError> {
        let mut process = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let output = process.stdout.take().ok_or("the output of a router is not available")?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        if !line.to_ascii_lowercase().starts_with("ready") {
            let status = process.wait()?;
            return Err(format!("router {position} did not start ({status}); its message is above").into());
        }
        self.processes[position] = Some(process);
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for process in self.processes.iter_mut().flatten() {
            drop(process.kill());
            drop(process.wait());
        }
    }
}

fn config_path(folder: &Path, position: usize) -> PathBuf {
    folder.join(format!("router-{position}.toml"))
}

fn data_dir(folder: &Path, position: usize) -> PathBuf {
    folder.join(format!("data-{position}"))
}

fn config(position: usize, addresses: &[String], folder: &Path, certificates: &Certificates) -> RouterConfig {
    let voters = (1..).zip(addresses).map(|(id, address)| VoterConfig { id, address: address.clone() });
    RouterConfig {
        id: position as u64 + 1,
        listen: addresses[position].clone(),
        shards: SHARDS_COUNT,
        voters: voters.collect(),
        data_dir: data_dir(folder, position),
        tls: certificates.config(&Role::Router(Some(RouterId(position as u64 + 1)))),
        // Small, so that snapshots and log purges happen within a test.
        snapshot_every_entries: 100,
        ..RouterConfig::default()
    }
}

fn router_clients(addresses: &[String], certificates: &Certificates) -> RouterClients {
    let client = |address: &String| RouterClient::new(certificates.callers(address));
    RouterClients { clients: addresses.iter().map(client).collect() }
}
