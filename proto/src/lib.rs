//! The wire format of kvfleet: generated protobuf types, the block frame, and conversions to and
//! from `kv-core` types. Also the TLS identity and the trace context that both ends of a call need.
//!
//! Not here: sockets, connections and streams (`transport/`, and the processes that serve or call).
//! This crate depends on `kv-core` and never the other way round, so the pure types know no wire
//! format. It has no unsafe code: checksummed copies are in `cpu/`.
#![forbid(unsafe_code)]

pub mod codec;
pub mod convert;
pub mod envoy;
pub mod frame;
pub mod identity;

/// Control calls: router, node and mock instance (`kvfleet.v1`).
pub mod pb {
    #![allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all, clippy::pedantic)]
    #![allow(clippy::unwrap_used)]
    tonic::include_proto!("kvfleet.v1");
}

/// Health checks: whether a server accepts calls (`grpc.health.v1`).
pub mod health {
    #![allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all, clippy::pedantic)]
    tonic::include_proto!("grpc.health.v1");
}

/// Messages of the block path (`kvfleet.data.v1`).
pub mod data {
    #![allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all, clippy::pedantic)]
    tonic::include_proto!("kvfleet.data.v1");
}
