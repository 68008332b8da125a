//! Looks after the certificate files of a process while it runs: as for control calls (`kvfleet_proto::tls`), and under test
//! here with the connections of both network paths.
//!
//! Not here: what is taken and what is refused (`kvfleet_proto::tls`).

pub use kvfleet_proto::tls::{RENEW_EVERY, keep_renewed};

#[cfg(test)]
#[path = "renew_tests.rs"]
mod tests;
