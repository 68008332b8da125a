//! Route calls that carry tokens: the router hashes them, as the gateway does with prompts.
//!
//! Not here: the hash (`kv_core::prefix`), and calls with hashes (`route.rs`).

use kvfleet_net::tls::callers::Caller;
use kvfleet_proto::pb;
use tonic::Status;

use super::check::{self, REQUEST_BLOCKS_MAX};
use crate::engines::tenants::Tenants;

/// The request with the block hashes of its tokens, and what follows from them: number of tokens,
/// block size, and identity if it names none. Requests without tokens are returned as they are.
///
/// # Errors
/// `InvalidArgument` for tokens beside hashes, too many of them, or an unknown salt or adapter.
/// `PermissionDenied` for a tenant's call without a salt, since those are blocks of the default
/// tenant. `FailedPrecondition` if the router has no key.
pub(super) fn hash_tokens(
    tenants: Option<&Tenants>,
    caller: &Caller,
    mut request: pb::RouteRequest,
) -> Result<pb::RouteRequest, Status> {
    let tokens = std::mem::take(&mut request.tokens);
    if tokens.is_empty() {
        return Ok(request);
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
    let salt = Some(&*request.cache_salt).filter(|salt| !salt.is_empty());
    if salt.is_none() && caller.share_tenant().is_some() {
        return Err(Status::permission_denied(
            "the call has `tokens` without a `cache_salt`, and this certificate is a tenant's: send the tenant's salt",
        ));
    }
    let block_tokens = tenants.block_tokens();
    let blocks = tokens.len().div_ceil(block_tokens as usize);
    check::at_most("number of blocks of `tokens`", blocks, REQUEST_BLOCKS_MAX)?;
    let adapter = Some(&*request.adapter).filter(|adapter| !adapter.is_empty());
    let Some(hasher) = tenants.hasher(adapter, salt) else {
        return Err(check::invalid(
            "the `cache_salt` of the call is not in engines.tenants of the router, or its `adapter` has too long a \
             name: add the tenant, or correct the call",
        ));
    };
    request.hashes = hasher.blocks(&tokens).into_iter().flat_map(|hash| hash.0).collect();
    request.input_tokens = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
    request.block_tokens = block_tokens;
    Ok(request)
}
