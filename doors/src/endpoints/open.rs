//! Puts together who names endpoints and who asks them.
//!
//! Not here: the doors through which requests come.

use std::net::SocketAddr;

use kvfleet_router::Desk;
use prometheus::Registry;
use tokio_util::sync::CancellationToken;

use super::address::UrlError;
use super::calls::{self, AdminError};
use super::load::Keeper;
use super::load::metrics::EndpointMetrics;
use super::{Endpoints, fixed};
use crate::config::DoorsConfig;

/// Why engines cannot be followed.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A URL that is none.
    #[error("doors.endpoints: {0}")]
    Url(#[from] UrlError),
    /// A registry that has metrics of these names.
    #[error("metrics of the doors cannot be registered: {0}")]
    Metrics(#[from] prometheus::Error),
    /// The door for calls.
    #[error(transparent)]
    Admin(#[from] AdminError),
    /// Kubernetes.
    #[cfg(feature = "kubernetes")]
    #[error(transparent)]
    Kubernetes(#[from] super::kubernetes::KubernetesError),
}

/// Engines that are followed until the token is cancelled.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) endpoints: Endpoints,
    /// Where calls that name engines are taken, if anywhere.
    pub(crate) admin: Option<SocketAddr>,
}

/// Begins.
///
/// # Errors
/// [`OpenError`], with nothing left behind.
pub(crate) async fn open(
    config: &DoorsConfig,
    desk: &Desk,
    registry: &Registry,
    stop: &CancellationToken,
) -> Result<Opened, OpenError> {
    let endpoints = Endpoints::default();
    fixed::enter(&endpoints, &config.endpoints)?;
    let metrics = EndpointMetrics::register(registry)?;
    let keeper = Keeper::new(&config.load, &endpoints, desk.clone(), metrics);
    let keeper = keeper.of_engines_that_keep_order(config.priorities.keep_order());
    #[cfg(feature = "kubernetes")]
    if config.kubernetes.enabled {
        let metrics = super::kubernetes::DiscoveryMetrics::register(registry)?;
        super::kubernetes::open(&config.kubernetes, &endpoints, desk, metrics, stop).await?;
    }
    let admin = calls::open(&config.admin, &endpoints, stop).await?;
    tokio::spawn(keeper.run(stop.clone()));
    Ok(Opened { endpoints, admin })
}
