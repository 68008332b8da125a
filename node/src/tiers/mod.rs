//! Storage media of this node besides DRAM, which is `arena`. One folder per medium.

pub mod gpu;
pub mod ssd;
