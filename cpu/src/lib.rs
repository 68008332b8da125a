//! CPU instructions without a counterpart in the language, behind safe functions.
//!
//! `core` and `proto` forbid unsafe code and call this crate instead. Its only unsafe function is
//! [`SharedBytes::new`], for memory that other processes write.
//!
//! Not here: the frames that checksums protect (`proto/src/frame/`).

mod bytes;
mod cache;
mod copy;

pub use bytes::equal_bytes;
pub use cache::{prefetch, prefetch_whole};
pub use copy::{CopyBatch, SharedBytes, copy_batch, copy_crc32c, crc32c};
