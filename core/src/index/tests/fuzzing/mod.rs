//! Fuzz targets on the state of the index: any bytes in, and what must hold of them whatever they are.
//!
//! Tests run each target a fixed number of times from a fixed seed; `cargo xtask fuzz` runs them for as long as
//! asked, and `fuzz/` gives them to libFuzzer. All three use [`TARGETS`]. Not here: promises that a test can
//! state one by one (the other files of this folder).

mod commands;
mod drive;
mod encoded;

pub use drive::{Found, drive};

/// What the index knows to be so about its own structure. Only builds for tests have that; in others, pieces and
/// sweeps have their real sizes instead.
fn check_structure(index: &super::Index) {
    #[cfg(test)]
    index.store.check();
    #[cfg(not(test))]
    let _ = index;
}

/// What a target found to be wrong.
pub type Verdict = Result<(), String>;

/// Something that must hold for any bytes.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, as a person types it.
    pub name: &'static str,
    /// Runs it once. Whatever is wrong is an error or a panic.
    pub run: fn(&[u8]) -> Verdict,
    /// Bytes that get far, to begin with.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// What bytes say, for a person.
    pub tell: fn(&[u8]) -> String,
    /// Bytes that belong together: the shrinker takes them away together first.
    pub record_bytes: usize,
}

/// All of them.
pub const TARGETS: [Target; 3] = [
    Target {
        name: "commands",
        run: commands::run,
        seeds: commands::seeds,
        tell: commands::tell,
        record_bytes: commands::RECORD_BYTES,
    },
    Target {
        name: "codec",
        run: encoded::codec,
        seeds: encoded::codec_seeds,
        tell: encoded::tell,
        record_bytes: 1,
    },
    Target {
        name: "snapshot",
        run: encoded::snapshot,
        seeds: encoded::snapshot_seeds,
        tell: encoded::tell,
        record_bytes: 1,
    },
];
