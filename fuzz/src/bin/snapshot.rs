//! libFuzzer on the target `snapshot` of `core/src/index/tests/fuzzing`.
#![no_main]

use kv_core::index::fuzzing::TARGETS;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Err(wrong) = (TARGETS[2].run)(data) {
        panic!("{wrong}\n{}", (TARGETS[2].describe)(data));
    }
});
