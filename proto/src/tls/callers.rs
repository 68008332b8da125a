//! Who makes a control call: one of the cluster's own, or somebody who acts for some tenants.
//!
//! A tenant's holder may ask where its requests run, read and save as its tenants, and nothing else. Not here: what
//! the block path makes of the same names (`node/src/serve.rs`).

use std::collections::BTreeSet;

use kv_core::id::TenantId;
use tonic::{Request, Status};

use super::tenants_of;

/// The tenants of whoever calls; nothing for one of the cluster's own.
///
/// # Errors
/// `PermissionDenied` for a caller without a certificate, and for one whose names cannot be told.
fn tenants<T>(request: &Request<T>) -> Result<Option<BTreeSet<TenantId>>, Status> {
    let chain = request.peer_certs();
    let leaf = chain.as_ref().and_then(|chain| chain.first());
    let leaf =
        leaf.ok_or_else(|| Status::permission_denied("this call needs a certificate of the cluster"))?;
    tenants_of(leaf).map_err(|error| {
        Status::permission_denied(format!("nobody is served with this certificate: {error}; issue a new one"))
    })
}

/// Passes on callers that are the cluster's own; also as an interceptor of a whole service.
///
/// # Errors
/// `PermissionDenied` for all others.
pub fn members_only<T>(request: Request<T>) -> Result<Request<T>, Status> {
    let Some(tenants) = tenants(&request)? else { return Ok(request) };
    Err(Status::permission_denied(format!(
        "this call is for the cluster's own processes, and this certificate is one of {}: use one with the subject \
         alternative name \"kvfleet\"",
        shown(&tenants)
    )))
}

/// Passes on callers that may act for a tenant.
///
/// # Errors
/// `PermissionDenied` for all others.
pub fn may_name<T>(request: Request<T>, tenant: impl Fn(&T) -> TenantId) -> Result<Request<T>, Status> {
    let tenant = tenant(request.get_ref());
    match tenants(&request)? {
        Some(tenants) if !tenants.contains(&tenant) => Err(Status::permission_denied(format!(
            "the call names {tenant}, and this certificate is one of {}: name another tenant, or use that one's \
             certificate",
            shown(&tenants)
        ))),
        _ => Ok(request),
    }
}

/// Passes on callers of the cluster and of any tenant.
///
/// # Errors
/// `PermissionDenied` for who is neither.
pub fn known<T>(request: Request<T>) -> Result<Request<T>, Status> {
    tenants(&request).map(|_| request)
}

/// The first few of them.
fn shown(tenants: &BTreeSet<TenantId>) -> String {
    const SHOWN_MAX: usize = 8;
    let names: Vec<String> = tenants.iter().take(SHOWN_MAX).map(ToString::to_string).collect();
    let more = if tenants.len() > SHOWN_MAX { ", …" } else { "" };
    format!("{}{more}", names.join(", "))
}
