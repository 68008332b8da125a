//! Access to calls: which roles may make which call, and how long its answer may take.
//!
//! [`AccessService`] enforces [`TABLE`] before the message of a call is decoded, and bounds the bytes
//! of messages that a caller has in flight. Not here: the
//! numbers and tenants that a call may name ([`Caller`]), and the block path, which admits
//! connections instead of calls (`node/src/block_service.rs`).

mod in_flight;
mod table;

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;

use super::callers::Caller;
use super::{Role, RoleKind};

pub use in_flight::{BYTES_IN_FLIGHT_MAX, CountedBody};
use in_flight::{BytesInFlight, CallBytes};
pub use table::TABLE;

/// Longest time until a call's answer begins: the time to receive its message, and to handle it.
/// A caller that sends half a message must not hold the memory of its call for good.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// What a role may do with a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Any message.
    Allow,
    /// Messages that name the number, the tenants or the requests of the caller.
    Own,
    /// Any message, with a reduced answer.
    Limited,
    /// None.
    Deny,
}

impl Access {
    /// Word in the printed table.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Access::Allow => "yes",
            Access::Own => "own",
            Access::Limited => "limited",
            Access::Deny => "-",
        }
    }
}

/// The callers that a call is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guard {
    /// Roles, in the order of [`RoleKind::ALL`].
    Roles([Access; RoleKind::ALL.len()]),
    /// Every caller of a port that requires no certificate of the cluster.
    Port,
}

/// The time that an answer may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadline {
    /// [`CALL_TIMEOUT`].
    Common,
    /// The handler's own limits.
    OfHandler,
}

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallRule {
    /// Path of the call: `/kvfleet.v1.Router/Route`, or `data/Fetch` on the block path.
    pub path: &'static str,
    /// The callers that may make it.
    pub guard: Guard,
    /// Its deadline.
    pub deadline: Deadline,
}

impl CallRule {
    /// What a role may do with this call.
    #[must_use]
    pub fn access(&self, kind: RoleKind) -> Access {
        match self.guard {
            Guard::Roles(roles) => roles[kind as usize],
            Guard::Port => Access::Deny,
        }
    }

    /// Refuses a role without access.
    ///
    /// # Errors
    /// `PermissionDenied`, with the roles that have access.
    pub fn check(&self, role: &Role) -> Result<(), Status> {
        if self.access(role.kind()) != Access::Deny {
            return Ok(());
        }
        let may = |kind: &RoleKind| self.access(*kind) != Access::Deny;
        let roles: Vec<&str> =
            RoleKind::ALL.into_iter().filter(|kind| may(kind)).map(RoleKind::name).collect();
        Err(Status::permission_denied(format!(
            "{} is not for {role}, the role of this certificate: use one with the role {}; `kvfleet access` lists all \
             calls",
            self.path.trim_start_matches('/'),
            roles.join(" or ")
        )))
    }
}

/// The row of a call; `None` for an unknown call.
#[must_use]
pub fn rule_of(path: &str) -> Option<&'static CallRule> {
    static BY_PATH: LazyLock<HashMap<&str, &CallRule>> =
        LazyLock::new(|| TABLE.iter().map(|rule| (rule.path, rule)).collect());
    BY_PATH.get(path).copied()
}

/// A gRPC service that serves the calls of [`TABLE`] to the roles that may make them, each within
/// its deadline. Handlers find the [`Caller`] in the request's extensions.
#[derive(Clone, Debug)]
pub struct AccessService<S> {
    inner: S,
    in_flight: Arc<BytesInFlight>,
}

impl<S> AccessService<S> {
    /// Guards a service. Its listener must verify certificates of the cluster.
    pub fn new(inner: S) -> AccessService<S> {
        AccessService { inner, in_flight: Arc::default() }
    }
}

impl<S: NamedService> NamedService for AccessService<S> {
    const NAME: &'static str = S::NAME;
}

impl<S, B> Service<http::Request<B>> for AccessService<S>
where
    S: Service<http::Request<CountedBody<B>>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: http::Request<B>) -> Self::Future {
        let (rule, bytes) = match admit(request.uri().path(), request.extensions()) {
            Ok((rule, caller)) => {
                let bytes = CallBytes::new(&self.in_flight, &caller);
                request.extensions_mut().insert(caller);
                (rule, bytes)
            }
            Err(status) => return Box::pin(async move { Ok(status.into_http()) }),
        };
        let answering = self.inner.call(request.map(|body| CountedBody::new(body, bytes.clone())));
        Box::pin(async move {
            // The message is in memory until the answer begins, also if its body was read before.
            let _bytes = bytes;
            match rule.deadline {
                Deadline::Common => within_timeout(answering).await,
                Deadline::OfHandler => answering.await,
            }
        })
    }
}

/// The row of a call and its caller, if that one may make it.
fn admit(path: &str, extensions: &http::Extensions) -> Result<(&'static CallRule, Caller), Status> {
    let unknown = || Status::unimplemented(format!("there is no call {path}: it may be of a later version"));
    let rule = rule_of(path).ok_or_else(unknown)?;
    let caller = Caller::from_connection(extensions)?;
    rule.check(caller.role())?;
    Ok((rule, caller))
}

async fn within_timeout<E>(
    answering: impl Future<Output = Result<http::Response<Body>, E>>,
) -> Result<http::Response<Body>, E> {
    match tokio::time::timeout(CALL_TIMEOUT, answering).await {
        Ok(answer) => answer,
        Err(_) => {
            let seconds = CALL_TIMEOUT.as_secs();
            let text = format!("the message was not received and answered within {seconds} s: send it again");
            Ok(Status::deadline_exceeded(text).into_http())
        }
    }
}

#[cfg(test)]
mod tests;
