//! Route calls that carry tokens: the router hashes them, as the gateway does with prompts.
//!
//! Not here: the hash (`kv_core::prefix`), and calls with hashes (`route.rs`).

use std::sync::Arc;

use kvfleet_net::tls::callers::Caller;
use kvfleet_proto::pb;
use tonic::Status;

use super::check::{self, REQUEST_BLOCKS_MAX};
use crate::engines::tenants::Tenants;

/// Most tokens hashed on a thread that serves other calls: some twenty microseconds.
const TOKENS_AT_ONCE_MAX: usize = 8_192;

/// The request with the block hashes of its tokens, and what follows from them: number of tokens and
/// block size.
///
/// # Errors
/// `InvalidArgument` for tokens beside hashes, too many of them, or an unknown salt or adapter.
/// `PermissionDenied` for a tenant's certificate: its salt is only a name, and the hashes are made
/// with the secret. `FailedPrecondition` if the router has no key.
pub(super) async fn hash_tokens(
    tenants: Option<&Arc<Tenants>>,
    caller: &Caller,
    mut request: pb::RouteRequest,
) -> Result<pb::RouteRequest, Status> {
    let (tokens, salt, adapter) = (
        std::mem::take(&mut request.tokens),
        std::mem::take(&mut request.cache_salt),
        std::mem::take(&mut request.adapter),
    );
    if tokens.is_empty() {
        return Ok(request);
    }
    if caller.share_tenant().is_some() {
        return Err(Status::permission_denied(
            "the call has `tokens`, and this certificate is a tenant's: send hashes, made with the tenant's secret",
        ));
    }
    if !request.hashes.is_empty() {
        return Err(check::invalid("the call has both `tokens` and `hashes`: send one of them"));
    }
    let Some(tenants) = tenants else {
        return Err(Status::failed_precondition(
            "the call has `tokens`, and this router has no key to hash them with: set engines.secret_file of the \
             routers, or send hashes",
        ));
    };
    let block_tokens = tenants.block_tokens();
    let blocks = tokens.len().div_ceil(block_tokens as usize);
    check::at_most("number of blocks of `tokens`", blocks, REQUEST_BLOCKS_MAX)?;
    let salt = Some(salt.as_str()).filter(|salt| !salt.is_empty());
    let adapter = Some(adapter.as_str()).filter(|adapter| !adapter.is_empty());
    let Some(hasher) = tenants.hasher(adapter, salt) else {
        return Err(check::invalid(
            "the `cache_salt` of the call is not in engines.tenants of the router, or its `adapter` has too long a \
             name: add the tenant, or correct the call",
        ));
    };
    request.input_tokens = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
    request.block_tokens = block_tokens;
    let hashed = move || -> Vec<u8> { hasher.blocks(&tokens).into_iter().flat_map(|hash| hash.0).collect() };
    request.hashes = if request.input_tokens as usize <= TOKENS_AT_ONCE_MAX {
        hashed()
    } else {
        let hashing = tokio::task::spawn_blocking(hashed);
        hashing.await.map_err(|_| Status::internal("the tokens could not be hashed: send the call again"))?
    };
    Ok(request)
}
