//! Media of this node below DRAM. One folder per medium; DRAM itself is `arena`.

pub mod ssd;
