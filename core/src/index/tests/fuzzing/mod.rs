//! Fuzz targets on the state of the index: properties that must hold for any input bytes.
//!
//! Tests run each target a fixed number of times from a fixed seed; `cargo xtask fuzz` runs them
//! for a given time; `fuzz/` passes them to libFuzzer. All three use [`TARGETS`]. Not here:
//! properties that single tests state (the other files of this folder).

mod commands;
mod drive;
mod encoded;

pub use drive::{FuzzFailure, drive};

/// Checks the internal consistency. Only test builds have the check; other builds use the real
/// sizes of parts and sweeps instead.
fn check_structure(index: &super::Index) {
    #[cfg(test)]
    index.store.check();
    #[cfg(not(test))]
    let _ = index;
}

/// `Err` describes the failure.
pub type FuzzResult = Result<(), String>;

/// A property that must hold for any bytes.
#[derive(Clone, Copy, Debug)]
pub struct FuzzTarget {
    /// Its name on the command line.
    pub name: &'static str,
    /// Runs it once. A failure is an error or a panic.
    pub run: fn(&[u8]) -> FuzzResult,
    /// Initial inputs that reach deep states.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Describes an input for people.
    pub describe: fn(&[u8]) -> String,
    /// Bytes per record: mutation and shrinking work on whole records first.
    pub record_bytes: usize,
}

/// All targets.
pub const TARGETS: [FuzzTarget; 3] = [
    FuzzTarget {
        name: "commands",
        run: commands::run,
        seeds: commands::seeds,
        describe: commands::describe,
        record_bytes: commands::RECORD_BYTES,
    },
    FuzzTarget {
        name: "codec",
        run: encoded::codec,
        seeds: encoded::codec_seeds,
        describe: encoded::describe,
        record_bytes: 1,
    },
    FuzzTarget {
        name: "snapshot",
        run: encoded::snapshot,
        seeds: encoded::snapshot_seeds,
        describe: encoded::describe,
        record_bytes: 1,
    },
];
