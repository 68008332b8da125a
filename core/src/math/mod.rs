//! Numbers only: fits and searches that know nothing of blocks, time or nodes.

pub mod exponential;
