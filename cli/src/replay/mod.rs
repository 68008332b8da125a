//! `kvfleet replay`: serves a request trace on a cluster of real processes and reports what happened.
//!
//! `prepare` reads and hashes the trace, `order` says what may start, `drive` starts it, `serve` serves
//! one request, `faults` and `watch` break the cluster and measure what that costs. `crosscheck` serves the same requests
//! in virtual time besides and compares. Not here: how the report is written and drawn (`crate::report`).

mod carried;
mod crosscheck;
mod drive;
mod faults;
mod measure;
mod order;
mod prepare;
mod progress;
mod run;
mod serve;
mod visible;
mod watch;

pub use carried::{Carried, PathBytes};
pub use crosscheck::run as crosscheck;
pub use measure::{
    FaultMark, Measured, ModelledSample, Percentiles, Sample, TierBlocks, TimedPrefill, ratio,
};
pub use prepare::{Prepared, Reading, Workload, prepare, tenant_salt};
pub use run::{Outcome, run};
