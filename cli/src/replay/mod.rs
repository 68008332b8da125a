//! `kvfleet replay`: serves a request trace on a cluster of real processes and reports the results.
//!
//! `prepare` reads and hashes the trace, `order` decides what may start, `drive` starts requests,
//! `serve` serves one request, `faults` and `watch` inject faults and measure their cost.
//! `crosscheck` also runs the same requests in virtual time and compares. `crate::report` writes
//! and plots the report.

mod crosscheck;
mod drive;
mod faults;
mod measure;
mod order;
mod prepare;
mod progress;
mod run;
mod save_positions;
mod serve;
mod traffic;
mod watch;

pub use crosscheck::run_crosscheck as crosscheck;
pub use measure::{
    FaultMark, ModelledSample, Percentiles, ReplayMeasurements, RequestSample, TierBlocks, TimedPrefill,
    ratio,
};
pub use prepare::{PreparedRequest, TraceSource, Workload, load_workload, tenant_salt};
pub use run::{Outcome, run_replay};
pub use traffic::{PathBytes, ReplayTraffic};
