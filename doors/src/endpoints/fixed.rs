//! Endpoints that the configuration names.
//!
//! Not here: those of calls and of Kubernetes.

use kv_core::id::InstanceId;

use super::address::{UrlError, authority};
use super::{Endpoint, Endpoints, Origin};
use crate::config::EndpointConfig;

/// Enters them.
///
/// # Errors
/// [`UrlError`] for a URL that is none; whoever validated the configuration has seen it before.
pub(crate) fn enter(endpoints: &Endpoints, configured: &[EndpointConfig]) -> Result<(), UrlError> {
    for one in configured {
        let endpoint = Endpoint {
            instance: InstanceId(one.instance),
            authority: authority(&one.url)?,
            fetches: one.fetches,
            role: one.role().unwrap_or_default(),
            place: one.place.clone(),
            draining: false,
            origin: Origin::Configured,
        };
        endpoints.put_that_reports(endpoint, one.reports_itself);
    }
    Ok(())
}
