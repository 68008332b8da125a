//! Three routers over real connections: agreement, failover, restarts, joins and departures of
//! nodes, invalid input.
#![allow(clippy::unwrap_used, missing_docs, unreachable_pub)]

mod agreement;
mod anti_entropy;
mod bad_input;
mod bursts;
mod copies;
mod engines;
mod hot;
mod identities;
mod learned_factors;
mod links;
mod moved_requests;
mod nodes;
mod pinned_requests;
mod prompt_tokens;
mod repair;
mod residency;
mod restarts;
mod roles;
mod shards;
mod streams;
mod tbt_limits;
mod tenants;
mod weights;
mod why;
mod windows;
