//! Common parts of dialing on every network path: name resolution and timeouts.
//!
//! Not here: connections.

use std::net::SocketAddr;
use std::time::Duration;

use crate::PathError;

/// The first address of `peer`.
pub(crate) async fn resolve(peer: &str) -> Result<SocketAddr, PathError> {
    let unreachable = |cause: String| PathError::Unreachable { peer: peer.to_owned(), cause };
    let mut found = tokio::net::lookup_host(peer).await.map_err(|error| unreachable(error.to_string()))?;
    found.next().ok_or_else(|| unreachable("the name has no address".to_owned()))
}

/// `work`, or [`PathError::TimedOut`] after `limit`.
///
/// # Errors
/// The error of `work`, or the timeout.
pub async fn within<T>(
    peer: &str,
    limit: Duration,
    work: impl Future<Output = Result<T, PathError>>,
) -> Result<T, PathError> {
    tokio::time::timeout(limit, work)
        .await
        .unwrap_or_else(|_| Err(PathError::TimedOut { peer: peer.to_owned(), after: limit }))
}
