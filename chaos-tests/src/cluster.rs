//! Three routers as processes: started, killed without warning, started again on the same data.
//!
//! Not here: when any of this happens (`workload.rs` says) and what must hold (`invariants/`).

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kvfleet_proto::pb;
use kvfleet_proto::pb::router_client::RouterClient;
use kvfleet_proto::tls::{Identity, TlsFiles, provider};
use kvfleet_router::{RouterConfig, TlsConfig, VoterConfig};
use tempfile::TempDir;
use tonic::transport::{Channel, Endpoint};

use crate::certificates;
use crate::ports::unused_address;

/// Routers of a cluster: the smallest number of which one may die.
pub const ROUTERS_COUNT: usize = 3;

/// Shards of the index. Each stand-in node speaks to one of them.
pub const SHARDS_COUNT: u16 = 2;

/// Longest a call may take: an election and a disk on a busy machine, with room.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Anything that keeps a suite from running; what it finds is not among these.
pub type Trouble = Box<dyn std::error::Error + Send + Sync>;

/// Client of one router.
pub type Client = RouterClient<Channel>;

/// The addresses of the routers and how to speak with them. Cheap to clone; knows nothing of processes.
#[derive(Clone)]
pub struct Contacts {
    clients: Vec<Client>,
}

impl Contacts {
    /// Client of the router at this position.
    #[must_use]
    pub fn client(&self, position: usize) -> Client {
        self.clients[position % self.clients.len()].clone()
    }

    /// How many routers there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.clients.len()
    }

    /// Status of one router, if it answers.
    pub async fn status(&self, position: usize) -> Option<pb::StatusReply> {
        let answer = self.client(position).status(pb::StatusRequest {}).await;
        answer.ok().map(tonic::Response::into_inner)
    }

    /// Position of the router that says of itself that it leads, if one does.
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
    tls: TlsFiles,
    addresses: Vec<String>,
    processes: Vec<Option<Child>>,
    contacts: Contacts,
}

impl Cluster {
    /// Makes certificates and configurations, and starts every router with the given program.
    ///
    /// # Errors
    /// When a router does not come up.
    pub fn start(program: &Path) -> Result<Cluster, Trouble> {
        Cluster::start_with(program, |_| {})
    }

    /// The same, with configurations changed before they are written.
    ///
    /// # Errors
    /// When a router does not come up.
    pub fn start_with(program: &Path, change: impl Fn(&mut RouterConfig)) -> Result<Cluster, Trouble> {
        let folder = tempfile::tempdir()?;
        let tls = certificates::make(folder.path()).map_err(|error| error.to_string())?;
        let addresses: Vec<String> = (0..ROUTERS_COUNT).map(|_| unused_address()).collect();
        for position in 0..ROUTERS_COUNT {
            let mut config = config(position, &addresses, folder.path(), &tls);
            change(&mut config);
            std::fs::write(config_path(folder.path(), position), toml::to_string(&config)?)?;
        }
        let contacts = contacts(&addresses, &tls)?;
        let processes = (0..ROUTERS_COUNT).map(|_| None).collect();
        let mut cluster =
            Cluster { program: program.to_owned(), folder, tls, addresses, processes, contacts };
        for position in 0..ROUTERS_COUNT {
            cluster.start_router(position)?;
        }
        Ok(cluster)
    }

    /// Starts one more router, which belongs to no cluster yet and waits to be added. Its number is one above
    /// the highest; gives number and address.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn start_joiner(&mut self, change: impl Fn(&mut RouterConfig)) -> Result<(u64, String), Trouble> {
        let position = self.processes.len();
        let mut addresses = self.addresses.clone();
        addresses.push(unused_address());
        let mut config = config(position, &addresses, self.folder.path(), &self.tls);
        (config.join, config.voters, config.advertise) = (true, Vec::new(), addresses[position].clone());
        change(&mut config);
        std::fs::write(config_path(self.folder.path(), position), toml::to_string(&config)?)?;
        self.contacts = contacts(&addresses, &self.tls)?;
        self.addresses = addresses;
        self.processes.push(None);
        self.start_router(position)?;
        Ok((config.id, self.addresses[position].clone()))
    }

    /// Where the router at this position keeps its data.
    #[must_use]
    pub fn data_dir(&self, position: usize) -> PathBuf {
        data_dir(self.folder.path(), position)
    }

    /// Makes a router that does not run one that belongs to no cluster: its data is moved away, and when it is
    /// started again it waits to be added. Gives where its data is now.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn empty_router(&mut self, position: usize) -> Result<PathBuf, Trouble> {
        let away = self.folder.path().join(format!("away-{position}"));
        std::fs::rename(self.data_dir(position), &away)?;
        let path = config_path(self.folder.path(), position);
        let mut config: RouterConfig = toml::from_str(&std::fs::read_to_string(&path)?)?;
        (config.join, config.voters, config.advertise) = (true, Vec::new(), self.addresses[position].clone());
        std::fs::write(path, toml::to_string(&config)?)?;
        Ok(away)
    }

    /// Where the routers are, by position.
    #[must_use]
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// The identity of the suite towards the routers.
    ///
    /// # Errors
    /// When the certificates cannot be read.
    pub fn identity(&self) -> Result<Identity, Trouble> {
        Ok(self.tls.load()?)
    }

    /// How to speak with the routers.
    #[must_use]
    pub fn contacts(&self) -> Contacts {
        self.contacts.clone()
    }

    /// Whether the router at this position runs.
    #[must_use]
    pub fn is_running(&self, position: usize) -> bool {
        self.processes[position].is_some()
    }

    /// Process ids of the routers that run.
    #[must_use]
    pub fn process_ids(&self) -> Vec<u32> {
        self.processes.iter().flatten().map(Child::id).collect()
    }

    /// How many routers run.
    #[must_use]
    pub fn running(&self) -> usize {
        self.processes.iter().flatten().count()
    }

    /// Ends a router's process with SIGKILL.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn kill(&mut self, position: usize) -> Result<(), Trouble> {
        if let Some(mut process) = self.processes[position].take() {
            process.kill()?;
            process.wait()?;
        }
        Ok(())
    }

    /// Starts a router on the data it had. Does nothing when it runs.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn start_router(&mut self, position: usize) -> Result<(), Trouble> {
        if self.is_running(position) {
            return Ok(());
        }
        let mut command = Command::new(&self.program);
        // The command line, where its own program is given; else one that only runs routers.
        if self.program.file_stem().is_some_and(|name| name == "kvfleet") {
            command.args(["router", "--log", "error", "--metrics-listen", "", "--config"]);
        }
        command.arg(config_path(self.folder.path(), position));
        self.run(position, command)
    }

    /// Makes a router forget: log and snapshots of it are gone, as of an index that is kept in memory.
    ///
    /// # Errors
    /// When it still runs, or its files cannot be removed.
    pub fn forget(&self, position: usize) -> Result<(), Trouble> {
        if self.is_running(position) {
            return Err(format!("router {position} runs: kill it first").into());
        }
        Ok(std::fs::remove_dir_all(data_dir(self.folder.path(), position))?)
    }

    /// Starts a router whose disk is nearly full: no file of it may pass so many bytes, which a write beyond
    /// them meets as an error and not as a signal. Does nothing when it runs.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn start_router_on_a_full_disk(&mut self, position: usize, file_bytes: u64) -> Result<(), Trouble> {
        if self.is_running(position) {
            return Ok(());
        }
        /// What `ulimit -f` counts in.
        const UNIT_BYTES: u64 = 512;
        let units = file_bytes / UNIT_BYTES;
        let mut command = Command::new("sh");
        command
            .args(["-c", &format!("trap '' XFSZ; ulimit -f {units}; exec \"$0\" \"$1\"")])
            .arg(&self.program)
            .arg(config_path(self.folder.path(), position));
        self.run(position, command)
    }

    fn run(&mut self, position: usize, mut command: Command) -> Result<(), Trouble> {
        let mut process = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let output = process.stdout.take().ok_or("a router has no output")?;
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

fn config(position: usize, addresses: &[String], folder: &Path, tls: &TlsFiles) -> RouterConfig {
    let voters = (1..).zip(addresses).map(|(id, address)| VoterConfig { id, address: address.clone() });
    RouterConfig {
        id: position as u64 + 1,
        listen: addresses[position].clone(),
        shards: SHARDS_COUNT,
        voters: voters.collect(),
        data_dir: data_dir(folder, position),
        tls: TlsConfig { ca: tls.ca.clone(), cert: tls.cert.clone(), key: tls.key.clone() },
        // Small, so that snapshots and purged logs happen within a test.
        snapshot_every_entries: 100,
        ..RouterConfig::default()
    }
}

fn contacts(addresses: &[String], tls: &TlsFiles) -> Result<Contacts, Trouble> {
    drop(provider());
    let identity: Identity = tls.load()?;
    let client = |address: &String| -> Result<Client, Trouble> {
        let endpoint = Endpoint::from_shared(format!("https://{address}"))?
            .tls_config(identity.client_tls())?
            .connect_timeout(CALL_TIMEOUT);
        Ok(RouterClient::new(endpoint.connect_lazy()))
    };
    Ok(Contacts { clients: addresses.iter().map(client).collect::<Result<_, _>>()? })
}
