//! Starts the sources of endpoints and the probers.
//!
//! Not here: the listeners for requests.

use std::net::SocketAddr;

use kvfleet_router::RouterHandle;
use prometheus::Registry;
use tokio_util::sync::CancellationToken;

use super::address::UrlError;
use super::admin::{self, AdminError};
use super::load::ProberPool;
use super::load::metrics::EndpointMetrics;
use super::{EndpointRegistry, configured};
use crate::config::GatewayConfig;
use crate::upstream::EngineAccess;

/// Why the endpoints did not start.
#[derive(Debug, thiserror::Error)]
pub enum EndpointsError {
    /// An endpoint has an invalid URL.
    #[error("gateway.endpoints: {0}")]
    Url(#[from] UrlError),
    /// Metrics cannot be registered, for example because a name is taken.
    #[error("metrics of the endpoints cannot be registered: {0}")]
    Metrics(#[from] prometheus::Error),
    /// The admin API did not start.
    #[error(transparent)]
    Admin(#[from] AdminError),
    /// Discovery in Kubernetes did not start.
    #[cfg(feature = "kubernetes")]
    #[error(transparent)]
    Kubernetes(#[from] super::kubernetes::KubernetesError),
}

/// Endpoints that are maintained until the token is cancelled.
#[derive(Debug)]
pub(crate) struct StartedEndpoints {
    pub(crate) endpoints: EndpointRegistry,
    /// Address of the admin API, if it is enabled.
    pub(crate) admin: Option<SocketAddr>,
}

/// Starts everything.
///
/// # Errors
/// [`EndpointsError`]; all started tasks are stopped in this case.
pub(crate) async fn start(
    config: &GatewayConfig,
    router: &RouterHandle,
    access: EngineAccess,
    registry: &Registry,
    stop: &CancellationToken,
) -> Result<StartedEndpoints, EndpointsError> {
    let endpoints = EndpointRegistry::default();
    configured::add_configured(&endpoints, &config.endpoints)?;
    let metrics = EndpointMetrics::register(registry)?;
    let prober = ProberPool::new(&config.load, &endpoints, router.clone(), access, metrics);
    let keeper = prober.with_priority_order(config.priorities.is_ordered());
    #[cfg(feature = "kubernetes")]
    if config.kubernetes.enabled {
        let metrics = super::kubernetes::DiscoveryMetrics::register(registry)?;
        super::kubernetes::start(&config.kubernetes, &endpoints, router, metrics, stop).await?;
    }
    let admin = admin::start(&config.admin, &endpoints, stop).await?;
    tokio::spawn(keeper.run(stop.clone()));
    Ok(StartedEndpoints { endpoints, admin })
}
