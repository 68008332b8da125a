//! The kernel's arithmetic on the CPU: the same source, built by the machine's C++ compiler with stand-ins for what a GPU
//! gives it (`on_cpu.cpp`). Not here: that NVRTC takes it, and a GPU (`tiers/gpu/kernels.rs`).

use std::process::Command;

/// Builds the kernel for the CPU; nothing where there is no compiler, or none with these flags.
fn build(to: &std::path::Path, flags: &[&str]) -> Option<()> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/tiers/gpu/tests/on_cpu.cpp");
    let common = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-O1", source, "-o"];
    let built = Command::new("c++").args(flags).args(common).arg(to).output().ok()?;
    let said = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success() || !flags.is_empty(), "the kernel does not compile: {said}");
    built.status.success().then_some(())
}

#[test]
fn the_kernel_copies_what_it_is_told_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("on_cpu");
    let sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
    if Command::new("c++").arg("--version").output().is_err() {
        return println!("SKIPPED: there is no C++ compiler here");
    }
    if build(&program, &sanitizers).is_none() {
        println!("without sanitizers: words that lie wrong are not found");
        build(&program, &[]).unwrap();
    }
    for seed in [1u64, 0x9e37_79b9, 77_777] {
        let ran = Command::new(&program).arg(seed.to_string()).output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
        assert!(ran.status.success(), "seed {seed}: {out}{err}");
        println!("seed {seed}: {out}");
    }
}
