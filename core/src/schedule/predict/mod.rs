//! How long a request would take at an instance: prefill, queue, decode steps, and what observed answers correct.
//!
//! Not here: where KV comes from (`sources/`) and which instance is chosen (`mod.rs`).

pub(in crate::schedule) mod cost;
pub(in crate::schedule) mod decode_forecast;
pub(in crate::schedule) mod decode_step_model;
pub(in crate::schedule) mod overtaking;
pub(in crate::schedule) mod prefill_model;
pub(in crate::schedule) mod profile;
pub(in crate::schedule) mod relative_speed;
pub(in crate::schedule) mod slo_margin;
pub(in crate::schedule) mod ttft_bias;
