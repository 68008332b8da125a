//! Media of this node beside DRAM, which is `arena`. One folder per medium.

pub mod gpu;
pub mod ssd;
