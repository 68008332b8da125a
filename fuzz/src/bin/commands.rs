//! libFuzzer on the target `commands` of `core/src/index/tests/fuzzing`.
#![no_main]

use kv_core::index::fuzzing::TARGETS;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Err(wrong) = (TARGETS[0].run)(data) {
        panic!("{wrong}\n{}", (TARGETS[0].describe)(data));
    }
});
