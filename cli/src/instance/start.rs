//! Starts an instance: reads its certificates, binds, reports, serves; and stops it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{Generation, IdentityDigest};
use kvfleet_client::{Client, ClientConfig, Reporter};
use kvfleet_proto::pb::instance_server::InstanceServer;
use kvfleet_proto::tls::callers::MembersUnless;
use kvfleet_proto::tls::listen::{Called, incoming};
use kvfleet_proto::tls::{Renewal, TlsError, TlsFiles};
use kvfleet_transport::renew::{RENEW_EVERY, keep_renewed};
use prometheus::Registry;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

use super::blocks::BlockShape;
use super::config::InstanceConfig;
use super::load::Working;
use super::metrics::{self, Metrics};
use super::openai::OpenAi;
use super::prefill::Accelerator;
use super::report;
use super::request::{FOR_TENANTS, Numbers, Service};
use super::serve::Engine;

/// How long calls under way get to end when the instance stops.
const STOP_GRACE: Duration = Duration::from_secs(3);

/// Largest request message: the hashes of the longest prompt stay far below.
const REQUEST_BYTES_MAX: usize = 64 << 20;

/// Why an instance did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A value that types cannot refuse.
    #[error("config key {0}")]
    Config(String),
    /// Certificates.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The address is taken or not ours.
    #[error("cannot listen on {address}: {cause}; choose another `{key}`, or stop what uses it")]
    Listen {
        /// Which key.
        key: &'static str,
        /// The address asked for.
        address: String,
        /// What the system said.
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
        let digest = digest.of_generation(Generation(config.generation));
        let files = TlsFiles::from(&config.tls);
        let identity = files.load_server()?;
        let listener = listen(&config.listen, "listen").await?;
        let address = listener.local_addr().map_err(|cause| set_up(&cause))?;
        let metrics = Metrics::register(registry).map_err(|cause| set_up(&cause))?;
        let working = Arc::new(Working::default());
        let client = client(&config, &identity)?;
        metrics::watch_paths(registry, client.clone()).map_err(|cause| set_up(&cause))?;
        let blocks = BlockShape::new(digest, config.key_form(), config.block_bytes, config.layers)
            .map(Arc::new)
            .map_err(|cause| set_up(&cause))?;
        let reporter = report::begin(&client, &config, address.to_string(), &working, &metrics);
        let (profile, accelerator) =
            (config.hardware(), Arc::new(Accelerator::new(config.read_buffer_bytes)));
        let section = config.openai.clone();
        let numbers = Arc::new(Numbers::new(config.instance));
        let engine = Arc::new(Engine { client, digest, blocks, profile, working, accelerator, config });
        let stop = CancellationToken::new();
        let mut tasks = Vec::new();
        let mut openai = None;
        if !section.listen.is_empty() {
            let serving = OpenAi::load(&section, Arc::clone(&engine), Arc::clone(&numbers), registry)
                .map_err(|cause| set_up(&cause))?;
            let listener = listen(&section.listen, "openai.listen").await?;
            openai = Some(listener.local_addr().map_err(|cause| set_up(&cause))?);
            tasks.push(tokio::spawn(serving.serve(listener, stop.clone())));
        }
        let (renewal, stopped) = (Renewal::new(identity.clone(), files), stop.clone());
        tasks.push(tokio::spawn(async move {
            let _ = stopped.run_until_cancelled(keep_renewed(renewal, RENEW_EVERY)).await; // stopped, as asked
        }));
        let service = InstanceServer::new(Service::new(engine, numbers, metrics))
            .max_decoding_message_size(REQUEST_BYTES_MAX);
        tasks.push(tokio::spawn(serve(
            MembersUnless::new(service, FOR_TENANTS),
            incoming(listener, &identity),
            stop.clone(),
        )));
        Ok(Self { address, openai, stop, reporter, tasks })
    }

    /// Where it takes requests of OpenAI's clients, if it does.
    #[must_use]
    pub fn openai_addr(&self) -> Option<SocketAddr> {
        self.openai
    }

    /// Where it serves.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Says goodbye to the routers, lets calls end for a moment, and stops.
    pub async fn shutdown(self) {
        self.stop.cancel();
        let all = async {
            self.reporter.stop().await;
            for task in self.tasks {
                // A task that panicked has been logged by its panic; stopping goes on.
                let _ = task.await;
            }
        };
        if tokio::time::timeout(STOP_GRACE, all).await.is_err() {
            tracing::warn!("calls under way were cut off");
        }
    }
}

fn client(config: &InstanceConfig, identity: &kvfleet_proto::tls::Identity) -> Result<Client, StartError> {
    let transport = config.transport().map_err(StartError::Config)?;
    let routers = config.routers.clone();
    let (shm, rdma) = (config.shm(), config.rdma());
    let client = ClientConfig { transport, shm, rdma, ..ClientConfig::new(routers, identity.clone()) };
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
    service: MembersUnless<InstanceServer<Service>>,
    incoming: impl Stream<Item = std::io::Result<Called>>,
    stop: CancellationToken,
) {
    let server = Server::builder().add_service(service);
    let served = server.serve_with_incoming_shutdown(incoming, stop.cancelled_owned()).await;
    if let Err(cause) = served {
        tracing::error!(%cause, "instance stopped serving");
    }
}
