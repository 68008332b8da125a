//! The kernel's arithmetic on the CPU: the same source, built by the host's C++ compiler with stubs
//! of the GPU intrinsics (`on_cpu.cpp`). Not here: compilation by NVRTC, and a GPU
//! (`tiers/gpu/kernels.rs`).

use std::process::Command;

/// Builds the kernel for the CPU; `None` if there is no compiler, or it lacks these flags.
fn build(to: &std::path::Path, flags: &[&str]) -> Option<()> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/tiers/gpu/tests/on_cpu.cpp");
    let common = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-O1", source, "-o"];
    let built = Command::new("c++").args(flags).args(common).arg(to).output().ok()?;
    let said = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success() || !flags.is_empty(), "the kernel does not compile: {said}");
    built.status.success().then_some(())
}

#[test]
fn kernel_copies_exactly_the_given_slices() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("on_cpu");
    let sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
    if Command::new("c++").arg("--version").output().is_err() {
        return println!("SKIPPED: no C++ compiler");
    }
    if build(&program, &sanitizers).is_none() {
        println!("built without sanitizers: misaligned words are not detected");
        build(&program, &[]).unwrap();
    }
    for seed in [1u64, 0x9e37_79b9, 77_777] {
        let ran = Command::new(&program).arg(seed.to_string()).output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
        assert!(ran.status.success(), "seed {seed}: {out}{err}");
        println!("seed {seed}: {out}");
    }
}
