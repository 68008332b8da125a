//! The caller of a control call: one of the cluster's own processes, or a client that acts for some
//! tenants.
//!
//! A tenant's client may ask for routes, and read and save as its tenants. All other calls are for
//! members, unless their paths are listed ([`MembersOnlyService`]). Not here: authorisation on the
//! block path (`node/src/block_service.rs`).

use std::collections::BTreeSet;
use std::task::{Context, Poll};

use futures_util::future::{Either, Ready, ready};
use kv_core::id::TenantId;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::transport::server::{TcpConnectInfo, TlsConnectInfo};
use tonic::{Extensions, Request, Status};

use super::names::names_router;
use super::{ROUTER_NAME, tenants_of};

/// The caller of a control call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// One of the cluster's own processes.
    Member,
    /// A client that acts for these tenants, at least one.
    Tenants(BTreeSet<TenantId>),
}

impl Caller {
    /// The caller of this call, by the certificate that the handshake verified.
    ///
    /// # Errors
    /// `PermissionDenied` for a caller without a certificate, or with invalid names in it.
    pub fn from_extensions(extensions: &Extensions) -> Result<Caller, Status> {
        let chain = extensions.get::<TlsConnectInfo<TcpConnectInfo>>().and_then(TlsConnectInfo::peer_certs);
        let leaf = chain.as_ref().and_then(|chain| chain.first());
        let leaf =
            leaf.ok_or_else(|| Status::permission_denied("this call needs a certificate of the cluster"))?;
        match tenants_of(leaf) {
            Ok(None) => Ok(Caller::Member),
            Ok(Some(tenants)) => Ok(Caller::Tenants(tenants)),
            Err(error) => Err(Status::permission_denied(format!(
                "this certificate is not accepted: {error}; issue a new one"
            ))),
        }
    }

    /// Requires one of the cluster's own processes.
    ///
    /// # Errors
    /// `PermissionDenied` for all other callers.
    pub fn require_member(&self) -> Result<(), Status> {
        let Caller::Tenants(tenants) = self else { return Ok(()) };
        Err(Status::permission_denied(format!(
            "this call is for the cluster's own processes, and this certificate is one of {}: use one with the subject \
             alternative name \"kvfleet\"",
            format_tenants(tenants)
        )))
    }

    /// Requires permission to act for this tenant.
    ///
    /// # Errors
    /// `PermissionDenied` without it.
    pub fn require_tenant(&self, tenant: TenantId) -> Result<(), Status> {
        match self {
            Caller::Tenants(tenants) if !tenants.contains(&tenant) => {
                Err(Status::permission_denied(format!(
                    "the call names {tenant}, and this certificate is one of {}: name another tenant, or use \
                     that one's certificate",
                    format_tenants(tenants)
                )))
            }
            _ => Ok(()),
        }
    }

    /// The tenant that this call is charged to: the lowest in the certificate, so that more names
    /// or more certificates give no larger share. `None` for members.
    #[must_use]
    pub fn share_tenant(&self) -> Option<TenantId> {
        match self {
            Caller::Member => None,
            Caller::Tenants(tenants) => tenants.first().copied(),
        }
    }
}

/// Interceptor of a whole service: passes members only.
///
/// # Errors
/// `PermissionDenied` for all other callers.
pub fn members_only<T>(request: Request<T>) -> Result<Request<T>, Status> {
    Caller::from_extensions(request.extensions())?.require_member()?;
    Ok(request)
}

/// Interceptor of a whole service: passes routers only, by the name [`ROUTER_NAME`] of their certificates.
///
/// # Errors
/// `PermissionDenied` for all other callers.
pub fn routers_only<T>(request: Request<T>) -> Result<Request<T>, Status> {
    Caller::from_extensions(request.extensions())?.require_member()?;
    let chain =
        request.extensions().get::<TlsConnectInfo<TcpConnectInfo>>().and_then(TlsConnectInfo::peer_certs);
    if chain.as_ref().and_then(|chain| chain.first()).is_some_and(|leaf| names_router(leaf)) {
        return Ok(request);
    }
    Err(Status::permission_denied(format!(
        "this call is for routers: use a certificate with the subject alternative name {ROUTER_NAME:?}, which only a \
         router's may have"
    )))
}

/// A service for members only, except for some paths that check their caller themselves. A new call
/// is for members until it is listed here.
#[derive(Clone, Debug)]
pub struct MembersOnlyService<S> {
    inner: S,
    open_paths: &'static [&'static str],
}

impl<S> MembersOnlyService<S> {
    /// `open` are gRPC paths: `/kvfleet.v1.Router/Route`.
    pub fn new(inner: S, open_paths: &'static [&'static str]) -> MembersOnlyService<S> {
        MembersOnlyService { inner, open_paths }
    }
}

impl<S: NamedService> NamedService for MembersOnlyService<S> {
    const NAME: &'static str = S::NAME;
}

impl<S, B> Service<http::Request<B>> for MembersOnlyService<S>
where
    S: Service<http::Request<B>, Response = http::Response<Body>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Either<S::Future, Ready<Result<S::Response, S::Error>>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let permission = match self.open_paths.contains(&request.uri().path()) {
            true => Ok(()),
            false => Caller::from_extensions(request.extensions()).and_then(|caller| caller.require_member()),
        };
        match permission {
            Ok(()) => Either::Left(self.inner.call(request)),
            Err(status) => Either::Right(ready(Ok(status.into_http()))),
        }
    }
}

/// At most eight tenants, for an error message.
fn format_tenants(tenants: &BTreeSet<TenantId>) -> String {
    const SHOWN_MAX: usize = 8;
    let names: Vec<String> = tenants.iter().take(SHOWN_MAX).map(ToString::to_string).collect();
    let more = if tenants.len() > SHOWN_MAX { ", …" } else { "" };
    format!("{}{more}", names.join(", "))
}
