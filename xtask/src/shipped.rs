//! Release builds: `[profile.dist]` with profile-guided optimisation, which tells the compiler the
//! hot code (docs/adr/0071-profile-guided-release.md).
//!
//! A profile is valid for one compiler, its flags, the lock file, the manifests and features.
//! Recording one takes a build with counters, bench runs on it, and a merge of the counts.
//! Functions changed later have no counts until a new profile is recorded. Flags from a cargo
//! configuration file are ignored; those from the environment are kept. Not here: the benches
//! (`benches/`).

use std::ffi::OsString;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use clap::Args;

use crate::bench::{PROFILE, cargo, root, target};

/// Packages that are always built together: a named package affects the features of shared
/// dependencies, and other features would invalidate the profile. This also adds the router's
/// `probe` feature to the program, some public types that it never uses.
const PACKAGES: [&str; 3] = ["kvfleet", "benches", "kvfleet-lab"];

/// A bench that trains a profile.
struct Training {
    bench: &'static str,
    is_quick: bool,
    /// Weight of its counts. A request runs once through each of its functions, a loop of another
    /// bench a million times through one; both must count as hot.
    weight: u32,
}

const fn quick(bench: &'static str) -> Training {
    Training { bench, is_quick: true, weight: 1 }
}

/// Benches that need no disk and are short.
const TRAINING: [Training; 15] = [
    Training { bench: "proxy", is_quick: false, weight: 20 },
    Training { bench: "routing", is_quick: true, weight: 40 },
    quick("index"),
    quick("hash"),
    quick("frame"),
    quick("get"),
    quick("choose"),
    quick("decide"),
    quick("events"),
    quick("evict"),
    quick("layers"),
    quick("transport"),
    quick("host"),
    quick("network"),
    quick("tiers"),
];

/// Use of a profile for a build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProfileMode {
    /// No profile.
    Disabled,
    /// The existing profile if it is valid, else a new one.
    Reuse,
    /// Always a new profile.
    Rebuild,
}

/// Options of `cargo xtask dist`.
#[derive(Args, Debug)]
pub(crate) struct DistArgs {
    /// Features of the package kvfleet, such as `rdma`, separated by commas.
    #[arg(long, default_value = "", hide_default_value = true)]
    features: String,
    /// Record a new profile even if one exists, so that changed code is optimised too.
    #[arg(long, conflicts_with = "unprofiled")]
    anew: bool,
    /// Build without profile-guided optimisation: in half the time, but slower than a release.
    #[arg(long)]
    unprofiled: bool,
}

/// Builds the release program and prints its path. The path is separate, because builds without a
/// profile overwrite cargo's output. Its debug information is beside it, in `kvfleet.debug`.
///
/// # Errors
/// If a build or a training run fails, or if the tool that merges profiles or `objcopy` is missing.
pub(crate) fn run(args: &DistArgs) -> anyhow::Result<()> {
    let features: Vec<String> = args
        .features
        .split([',', ' '])
        .filter(|feature| !feature.is_empty())
        .map(|feature| format!("kvfleet/{feature}"))
        .collect();
    let by = match (args.unprofiled, args.anew) {
        (true, _) => ProfileMode::Disabled,
        (false, true) => ProfileMode::Rebuild,
        (false, false) => ProfileMode::Reuse,
    };
    build(&["kvfleet"], &features.join(","), by)?;
    let folder = target().join("shipped");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let shipped = folder.join("kvfleet");
    split_debug_info(&program("kvfleet"), &shipped)?;
    println!("{}", shipped.display());
    Ok(())
}

/// Copies `program` without debug information to `stripped`, and the information to a file of the
/// same name with `.debug` behind it. The program names that file, so debuggers find it.
fn split_debug_info(program: &Path, stripped: &Path) -> anyhow::Result<()> {
    let debug = stripped.with_added_extension("debug");
    let objcopy = |options: &[&str], from: &Path, to: &Path| {
        let status = Command::new("objcopy").args(options).args([from, to]).status();
        let status = status.context("cannot start objcopy: install the package binutils")?;
        if !status.success() {
            bail!("objcopy {} {}: it ended with {status}", options.join(" "), from.display());
        }
        Ok(())
    };
    objcopy(&["--only-keep-debug"], program, &debug)?;
    let link = format!("--add-gnu-debuglink={}", debug.display());
    objcopy(&["--strip-debug", &link], program, stripped)
}

/// Builds our programs as for a release, with features in cargo's syntax.
pub(crate) fn build(programs: &[&str], features: &str, by: ProfileMode) -> anyhow::Result<()> {
    let flags = match by {
        ProfileMode::Disabled => Vec::new(),
        ProfileMode::Reuse | ProfileMode::Rebuild => {
            flags_of(&profile(features, by == ProfileMode::Rebuild)?)
        }
    };
    compile(programs, features, &target(), &flags)
}

/// Path of a program built by [`build`].
pub(crate) fn program(name: &str) -> PathBuf {
    target().join(PROFILE).join(name)
}

fn compile(programs: &[&str], features: &str, folder: &Path, flags: &[String]) -> anyhow::Result<()> {
    let mut command = cargo();
    command.args(["build", "--locked", "--profile", PROFILE]).env("CARGO_TARGET_DIR", folder);
    // Builds for the host machine, into the given folder.
    command.env_remove("CARGO_BUILD_TARGET");
    command.args(PACKAGES.iter().flat_map(|package| ["--package", package]));
    command.args(programs.iter().flat_map(|program| ["--bin", program]));
    if !features.is_empty() {
        command.args(["--features", features]);
    }
    if !flags.is_empty() {
        command.env("CARGO_ENCODED_RUSTFLAGS", merged_flags(flags));
        // Build scripts and macros have counters too, but their counts are discarded.
        command.env("LLVM_PROFILE_FILE", "/dev/null");
    }
    let status = command.status().context("cannot start cargo")?;
    if !status.success() {
        bail!("{} was not built: cargo ended with {status}", programs.join(" and "));
    }
    Ok(())
}

/// Flags for the compiler, in addition to those from the environment.
fn merged_flags(flags: &[String]) -> OsString {
    let encoded = std::env::var_os("CARGO_ENCODED_RUSTFLAGS");
    let plain = || std::env::var("RUSTFLAGS").ok().map(|all| encode(all.split_whitespace()).into());
    let mut all: OsString = encoded.or_else(plain).unwrap_or_default();
    if !all.is_empty() && !flags.is_empty() {
        all.push("\u{1f}");
    }
    all.push(encode(flags.iter().map(String::as_str)));
    all
}

fn encode<'a>(flags: impl Iterator<Item = &'a str>) -> String {
    flags.collect::<Vec<_>>().join("\u{1f}")
}

fn flags_of(profile: &Path) -> Vec<String> {
    let mut flags = vec![format!("-Cprofile-use={}", profile.display())];
    // Keeps hot code together, so that an idle processor reloads fewer pages.
    if cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        flags.push("-Clink-arg=-Wl,-z,keep-text-section-prefix".to_owned());
    }
    flags
}

/// The profile for these features; records one if none is valid or if `is_anew`.
fn profile(features: &str, is_anew: bool) -> anyhow::Result<PathBuf> {
    let all = target().join("profiles");
    let folder = all.join(folder_of(features));
    std::fs::create_dir_all(&all).with_context(|| format!("cannot make {}", all.display()))?;
    // A concurrent call waits, and then uses the new profile.
    let lock = File::create(all.join("lock")).context("cannot make the lock of the profiles")?;
    lock.lock().context("cannot lock the profiles")?;
    let (stamp, named) = (folder.join("made-of.txt"), folder.join("profile.txt"));
    let made_of = profile_inputs(features)?;
    if !is_anew && std::fs::read_to_string(&stamp).is_ok_and(|was| was == made_of) {
        let profile = folder.join(std::fs::read_to_string(&named).unwrap_or_default());
        if profile.is_file() {
            return Ok(profile);
        }
    }
    let tool = find_profdata_tool()?;
    eprintln!(
        "recording a profile: this builds everything twice, first with counters to run some benches, then \
         with their counts. It is kept in {} for this compiler and Cargo.lock; --unprofiled skips it",
        folder.display()
    );
    if folder.exists() {
        std::fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    let counted = target().join("counted");
    compile(&["benches"], features, &counted, &["-Cprofile-generate".to_owned()])?;
    for training in &TRAINING {
        train(&counted.join(PROFILE).join("benches"), training, &folder)?;
    }
    let merged = merge(&tool, &folder)?;
    std::fs::write(&named, &merged).with_context(|| format!("cannot write {}", named.display()))?;
    // Written last: a folder without it is recorded again.
    std::fs::write(&stamp, made_of).with_context(|| format!("cannot write {}", stamp.display()))?;
    Ok(folder.join(merged))
}

fn folder_of(features: &str) -> String {
    match features {
        "" => "plain".to_owned(),
        features => features.replace(['/', ','], "-"),
    }
}

/// All inputs that determine the names of functions: if one changes, the profile is invalid.
fn profile_inputs(features: &str) -> anyhow::Result<String> {
    let read = |path: PathBuf| {
        std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let flags = merged_flags(&[]).to_string_lossy().replace('\u{1f}', " ");
    let mut text = format!("{}flags {flags}\nfeatures {features}\n", compiler()?);
    for Training { bench, is_quick, weight } in &TRAINING {
        text.push_str(&format!("{bench} {is_quick} {weight}\n"));
    }
    let mut manifests = vec![root().join("Cargo.lock"), root().join("Cargo.toml")];
    for entry in std::fs::read_dir(root())? {
        manifests.push(entry?.path().join("Cargo.toml"));
    }
    manifests.retain(|path| path.is_file());
    manifests.sort();
    for path in manifests {
        // Comments do not matter.
        read(path)?.lines().filter(|line| !line.starts_with('#')).for_each(|line| {
            text.push_str(line);
            text.push('\n');
        });
    }
    Ok(text)
}

/// Runs a training bench.
fn train(benches: &Path, training: &Training, folder: &Path) -> anyhow::Result<()> {
    let raw = folder.join("raw").join(training.bench).join("%m.profraw");
    let mut command = Command::new(benches);
    command.args([training.bench, "--runs", "5"]).current_dir(root()).stdout(Stdio::null());
    command.env("LLVM_PROFILE_FILE", raw);
    if training.is_quick {
        command.arg("--quick");
    }
    let status = command.status().with_context(|| format!("cannot start {}", benches.display()))?;
    if !status.success() {
        bail!(
            "the training bench {} ended with {status}; see its output above. With --unprofiled, `cargo \
             xtask dist` and `cargo xtask bench NAME` skip the profile",
            training.bench
        );
    }
    Ok(())
}

/// Merges the counts. Returns the file name, which contains a hash of the contents: cargo rebuilds
/// only if the name changes.
fn merge(tool: &Path, folder: &Path) -> anyhow::Result<String> {
    let path = folder.join("merged");
    let mut command = Command::new(tool);
    command.args(["merge", "--sparse", "--output"]).arg(&path);
    for Training { bench, weight, .. } in &TRAINING {
        command.arg(format!("--weighted-input={weight},{}", folder.join("raw").join(bench).display()));
    }
    let status = command.status().with_context(|| format!("cannot start {}", tool.display()))?;
    if !status.success() {
        bail!("{} ended with {status}; see its output above", tool.display());
    }
    let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    let name = format!("{:016x}.profdata", hasher.finish());
    std::fs::rename(&path, folder.join(&name))?;
    std::fs::remove_dir_all(folder.join("raw"))?;
    Ok(name)
}

/// Version information of the compiler.
fn compiler() -> anyhow::Result<String> {
    capture(rustc().arg("-vV"))
}

fn rustc() -> Command {
    let mut command = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    command.current_dir(root());
    command
}

fn capture(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().context("cannot start rustc")?;
    if !output.status.success() {
        bail!("rustc ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).context("rustc printed bytes that are not UTF-8")
}

/// Path of the `llvm-profdata` for the compiler's LLVM; installs it if necessary.
fn find_profdata_tool() -> anyhow::Result<PathBuf> {
    let compiler = compiler()?;
    let line = |name: &str| compiler.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let host = line("host:").context("rustc does not state its host")?;
    let llvm = line("LLVM version:").context("rustc does not state its LLVM version")?;
    let llvm = llvm.split('.').next().unwrap_or_default();
    let sysroot = capture(rustc().args(["--print", "sysroot"]))?;
    let places = [
        Path::new(sysroot.trim()).join("lib/rustlib").join(host).join("bin/llvm-profdata"),
        PathBuf::from(format!("/usr/lib/llvm-{llvm}/bin/llvm-profdata")),
    ];
    let there = || places.iter().find(|place| place.is_file()).cloned();
    if let Some(tool) = there() {
        return Ok(tool);
    }
    // The script reports its own errors. Standard output is reserved for our result.
    let mut setup = Command::new(root().join("scripts/setup"));
    setup.arg("profile").stdout(std::io::stderr()).status().context("cannot run scripts/setup")?;
    there().with_context(|| {
        format!(
            "no llvm-profdata of LLVM {llvm}: install it with `rustup component add llvm-tools` or the \
             package llvm-{llvm}. With --unprofiled, `cargo xtask dist` and `cargo xtask bench NAME` skip \
             the profile"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_have_separate_folders() {
        assert_eq!(folder_of(""), "plain");
        assert_eq!(folder_of("kvfleet/rdma,kvfleet/gpu"), "kvfleet-rdma-kvfleet-gpu");
    }

    #[test]
    fn profile_inputs_cover_compiler_features_and_lock_file() {
        let made_of = |features| profile_inputs(features).expect("all of it is there");
        let plain = made_of("");
        assert!(plain.starts_with("rustc ") && plain.contains("\nLLVM version: "), "{plain:.400}");
        assert!(plain.contains("\nname = \"hyper\"\n") && plain.contains("[profile.dist]"));
        assert!(plain.contains("name = \"kvfleet-gateway\"\n"), "the members' manifests are part of it");
        assert_ne!(plain, made_of("kvfleet/rdma"));
        assert_eq!(plain, made_of(""));
    }

    #[test]
    fn flags_use_the_separator_of_cargo() {
        assert_eq!(encode(["-Ca=b c", "-d"].into_iter()), "-Ca=b c\u{1f}-d");
        let flags = flags_of(Path::new("/a folder/x.profdata"));
        assert_eq!(flags[0], "-Cprofile-use=/a folder/x.profdata");
    }
}
