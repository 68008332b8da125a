//! Starts and stops an instance: certificates, listeners, reports, services.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{Generation, IdentityDigest, InstanceId};
use kvfleet_client::{Client, ClientConfig, Reporter};
use kvfleet_net::tls::access::AccessService;
use kvfleet_net::tls::listen::{CallerStream, incoming};
use kvfleet_net::tls::{Renewal, Role, TlsError, TlsFiles};
use kvfleet_proto::pb::instance_server::InstanceServer;
use kvfleet_transport::renew::{RENEW_INTERVAL, keep_renewed};
use prometheus::Registry;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

use super::blocks::BlockShape;
use super::config::InstanceConfig;
use super::load::LoadCounters;
use super::metrics::{self, Metrics};
use super::openai::OpenAiService;
use super::prefill::Accelerator;
use super::report;
use super::request::{IdCounter, InstanceService};
use super::serve::MockEngine;

/// Time for calls in flight to end on shutdown.
const STOP_GRACE: Duration = Duration::from_secs(3);

/// Largest request message, far above the hashes of the longest prompt.
const REQUEST_BYTES_MAX: usize = 64 << 20;

/// Why an instance did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An invalid configuration value.
    #[error("config key {0}")]
    Config(String),
    /// The certificates cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// A listener cannot be opened.
    #[error("cannot listen on {address}: {cause}; choose another `{key}`, or stop the process that uses it")]
    Listen {
        /// Configuration key of the address.
        key: &'static str,
        /// Configured address.
        address: String,
        /// Error of the operating system.
        cause: std::io::Error,
    },
    /// A part could not be set up.
    #[error("{0}")]
    SetUp(String),
}

/// A running instance.
#[derive(Debug)]
pub struct Instance {
    address: SocketAddr,
    openai: Option<SocketAddr>,
    stop: CancellationToken,
    reporter: Reporter,
    tasks: Vec<JoinHandle<()>>,
}

impl Instance {
    /// Starts serving and reporting.
    pub async fn start(config: InstanceConfig, registry: &Registry) -> Result<Self, StartError> {
        config.validate().map_err(StartError::Config)?;
        let digest = IdentityDigest::from_hex(&config.identity).ok_or_else(|| {
            StartError::Config(format!("identity {:?} is not 32 hexadecimal digits", config.identity))
        })?;
        let digest = digest.with_generation(Generation(config.generation));
        let files = TlsFiles::from(&config.tls);
        let identity = files.load_server(&Role::Instance(Some(InstanceId(config.instance))))?;
        let listener = listen(&config.listen, "listen").await?;
        let address = listener.local_addr().map_err(|cause| set_up(&cause))?;
        let metrics = Metrics::register(registry).map_err(|cause| set_up(&cause))?;
        let working = Arc::new(LoadCounters::default());
        let client = client(&config, &identity)?;
        metrics::register_path_metrics(registry, client.clone()).map_err(|cause| set_up(&cause))?;
        let blocks = BlockShape::new(digest, config.key_form(), config.block_bytes, config.layers)
            .map(Arc::new)
            .map_err(|cause| set_up(&cause))?;
        let reporter = report::start_reporting(&client, &config, address.to_string(), &working, &metrics);
        let (profile, accelerator) =
            (config.hardware(), Arc::new(Accelerator::new(config.read_buffer_bytes)));
        let section = config.openai.clone();
        let numbers = Arc::new(IdCounter::new(config.instance));
        let engine =
            Arc::new(MockEngine { client, digest, blocks, profile, counters: working, accelerator, config });
        let stop = CancellationToken::new();
        let mut tasks = Vec::new();
        let mut openai = None;
        if !section.listen.is_empty() {
            let serving = OpenAiService::load(&section, Arc::clone(&engine), Arc::clone(&numbers), registry)
                .map_err(|cause| set_up(&cause))?;
            let listener = listen(&section.listen, "openai.listen").await?;
            openai = Some(listener.local_addr().map_err(|cause| set_up(&cause))?);
            tasks.push(tokio::spawn(serving.serve(listener, stop.clone())));
        }
        let (renewal, stopped) = (Renewal::new(identity.clone(), files), stop.clone());
        tasks.push(tokio::spawn(async move {
            let _ = stopped.run_until_cancelled(keep_renewed(renewal, RENEW_INTERVAL)).await; // stopped as requested
        }));
        let service = InstanceServer::new(InstanceService::new(engine, numbers, metrics))
            .max_decoding_message_size(REQUEST_BYTES_MAX);
        tasks.push(tokio::spawn(serve(
            AccessService::new(service),
            incoming(listener, &identity),
            stop.clone(),
        )));
        Ok(Self { address, openai, stop, reporter, tasks })
    }

    /// Address of the OpenAI-compatible API, if enabled.
    #[must_use]
    pub fn openai_addr(&self) -> Option<SocketAddr> {
        self.openai
    }

    /// Address of the gRPC service.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Tells the routers that it leaves, waits shortly for calls in flight, and stops.
    pub async fn shutdown(self) {
        self.stop.cancel();
        let all = async {
            self.reporter.stop().await;
            for task in self.tasks {
                // The panic of a task was already logged; continue to stop.
                let _ = task.await;
            }
        };
        if tokio::time::timeout(STOP_GRACE, all).await.is_err() {
            tracing::warn!("calls in flight were aborted");
        }
    }
}

fn client(config: &InstanceConfig, identity: &kvfleet_net::tls::Identity) -> Result<Client, StartError> {
    let transport = config.transport().map_err(StartError::Config)?;
    let routers = config.routers.clone();
    let network = config.network().map_err(StartError::Config)?;
    let (shm, rdma) = (config.shm(), config.rdma());
    let client =
        ClientConfig { transport, network, shm, rdma, ..ClientConfig::new(routers, identity.clone()) };
    Client::new(client).map_err(|cause| set_up(&cause))
}

async fn listen(address: &str, key: &'static str) -> Result<TcpListener, StartError> {
    TcpListener::bind(address).await.map_err(|cause| StartError::Listen {
        key,
        address: address.to_owned(),
        cause,
    })
}

fn set_up(cause: &dyn std::fmt::Display) -> StartError {
    StartError::SetUp(cause.to_string())
}

async fn serve(
    service: AccessService<InstanceServer<InstanceService>>,
    incoming: impl Stream<Item = std::io::Result<CallerStream>>,
    stop: CancellationToken,
) {
    let server = Server::builder().add_service(service);
    let served = server.serve_with_incoming_shutdown(incoming, stop.cancelled_owned()).await;
    if let Err(cause) = served {
        tracing::error!(%cause, "instance stopped serving");
    }
}
