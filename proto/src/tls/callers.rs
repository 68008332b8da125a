//! Who makes a control call: one of the cluster's own, or somebody who acts for some tenants.
//!
//! A tenant's holder may ask where its requests run, read and save as its tenants, and nothing else: calls are for members
//! unless they are named ([`MembersUnless`]). Not here: what the block path makes of the same names
//! (`node/src/serve.rs`).

use std::collections::BTreeSet;
use std::task::{Context, Poll};

use futures_util::future::{Either, Ready, ready};
use kv_core::id::TenantId;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::transport::server::{TcpConnectInfo, TlsConnectInfo};
use tonic::{Extensions, Request, Status};

use super::tenants_of;

/// Who makes a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// One of the cluster's own.
    Member,
    /// Somebody who acts for these tenants, of which there is at least one.
    Tenants(BTreeSet<TenantId>),
}

impl Caller {
    /// Whoever made this call, by the certificate of its connection, which the handshake verified.
    ///
    /// # Errors
    /// `PermissionDenied` for a caller without a certificate, and for one whose names cannot be told.
    pub fn of(extensions: &Extensions) -> Result<Caller, Status> {
        let chain = extensions.get::<TlsConnectInfo<TcpConnectInfo>>().and_then(TlsConnectInfo::peer_certs);
        let leaf = chain.as_ref().and_then(|chain| chain.first());
        let leaf =
            leaf.ok_or_else(|| Status::permission_denied("this call needs a certificate of the cluster"))?;
        match tenants_of(leaf) {
            Ok(None) => Ok(Caller::Member),
            Ok(Some(tenants)) => Ok(Caller::Tenants(tenants)),
            Err(error) => Err(Status::permission_denied(format!(
                "nobody is served with this certificate: {error}; issue a new one"
            ))),
        }
    }

    /// Whether it is one of the cluster's own.
    ///
    /// # Errors
    /// `PermissionDenied` if not.
    pub fn is_member(&self) -> Result<(), Status> {
        let Caller::Tenants(tenants) = self else { return Ok(()) };
        Err(Status::permission_denied(format!(
            "this call is for the cluster's own processes, and this certificate is one of {}: use one with the subject \
             alternative name \"kvfleet\"",
            shown(tenants)
        )))
    }

    /// Whether it may act for this tenant.
    ///
    /// # Errors
    /// `PermissionDenied` if not.
    pub fn may_name(&self, tenant: TenantId) -> Result<(), Status> {
        match self {
            Caller::Tenants(tenants) if !tenants.contains(&tenant) => {
                Err(Status::permission_denied(format!(
                    "the call names {tenant}, and this certificate is one of {}: name another tenant, or use that one's \
                 certificate",
                    shown(tenants)
                )))
            }
            _ => Ok(()),
        }
    }

    /// On whose share of what all have together this call counts: the lowest tenant of the certificate, so that more names or
    /// more certificates of the same tenants are no more shares. Members' calls count on none.
    #[must_use]
    pub fn share(&self) -> Option<TenantId> {
        match self {
            Caller::Member => None,
            Caller::Tenants(tenants) => tenants.first().copied(),
        }
    }
}

/// Passes on callers that are the cluster's own; an interceptor of a whole service.
///
/// # Errors
/// `PermissionDenied` for all others.
pub fn members_only<T>(request: Request<T>) -> Result<Request<T>, Status> {
    Caller::of(request.extensions())?.is_member()?;
    Ok(request)
}

/// A service whose calls are for the cluster's own, but for some that see to it themselves who makes them. A call that is added
/// is for members until it is named here.
#[derive(Clone, Debug)]
pub struct MembersUnless<S> {
    inner: S,
    open: &'static [&'static str],
}

impl<S> MembersUnless<S> {
    /// `open` are paths as gRPC has them: `/kvfleet.v1.Router/Route`.
    pub fn new(inner: S, open: &'static [&'static str]) -> MembersUnless<S> {
        MembersUnless { inner, open }
    }
}

impl<S: NamedService> NamedService for MembersUnless<S> {
    const NAME: &'static str = S::NAME;
}

impl<S, B> Service<http::Request<B>> for MembersUnless<S>
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
        let may = match self.open.contains(&request.uri().path()) {
            true => Ok(()),
            false => Caller::of(request.extensions()).and_then(|caller| caller.is_member()),
        };
        match may {
            Ok(()) => Either::Left(self.inner.call(request)),
            Err(status) => Either::Right(ready(Ok(status.into_http()))),
        }
    }
}

/// The first few of them.
fn shown(tenants: &BTreeSet<TenantId>) -> String {
    const SHOWN_MAX: usize = 8;
    let names: Vec<String> = tenants.iter().take(SHOWN_MAX).map(ToString::to_string).collect();
    let more = if tenants.len() > SHOWN_MAX { ", …" } else { "" };
    format!("{}{more}", names.join(", "))
}
