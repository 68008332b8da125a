//! Endpoints from the configuration.
//!
//! Not here: endpoints of the admin API and of Kubernetes.

use kv_core::id::InstanceId;

use super::address::{EngineUrl, UrlError};
use super::{Endpoint, EndpointRegistry, Origin};
use crate::config::EndpointConfig;

/// Registers the configured endpoints.
///
/// # Errors
/// [`UrlError`] for an invalid URL, which the validation of the configuration has already excluded.
pub(crate) fn add_configured(
    endpoints: &EndpointRegistry,
    configured: &[EndpointConfig],
) -> Result<(), UrlError> {
    for one in configured {
        let EngineUrl { authority, is_tls } = EngineUrl::parse(&one.url)?;
        let endpoint = Endpoint {
            instance: InstanceId(one.instance),
            authority,
            is_tls,
            fetches: one.fetches,
            role: one.role().unwrap_or_default(),
            place: one.place.clone(),
            is_draining: false,
            origin: Origin::Configured,
        };
        endpoints.put_reporting(endpoint, one.reports_itself);
    }
    Ok(())
}
