//! Builds what is shipped: by `[profile.dist]`, and by a profile of its own work, which tells the compiler what of it runs and belongs together
//! (docs/adr/0071-the-program-that-is-shipped.md).
//!
//! A profile is made once for a compiler, its flags, a lock file, the manifests and features: a build with counters, benches that run on it, and what they
//! counted merged. Code that changed since goes without, function by function, until one is made anew. Flags that a configuration of cargo has beside
//! those of the environment are not taken over. Not here: what benches measure (`benches/`).

use std::ffi::OsString;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use clap::Args;

use crate::bench::{PROFILE, cargo, root, target};

/// Packages that are built together, always: those that are named have a say in the features of what all share, and with other features a profile is of
/// another program. For the program that adds `probe` of the router, some public types that it never uses.
const PACKAGES: [&str; 2] = ["kvfleet", "benches"];

/// A bench whose work a profile is made of.
struct Training {
    bench: &'static str,
    is_quick: bool,
    /// How often what it counted counts. A request runs once through each of its functions, and a loop in another bench a million times through one: both are
    /// to be found among what runs most.
    weight: u32,
}

const fn quick(bench: &'static str) -> Training {
    Training { bench, is_quick: true, weight: 1 }
}

/// Those that need no disk and end soon.
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

/// By which profile something is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// By none.
    Nothing,
    /// By the one that is there, if it is of this program.
    Kept,
    /// By one that is made anew.
    Anew,
}

/// What to build.
#[derive(Args, Debug)]
pub(crate) struct DistArgs {
    /// Features of the package kvfleet, such as `rdma`, separated by commas.
    #[arg(long, default_value = "", hide_default_value = true)]
    features: String,
    /// Make the profile anew, though there is one: code that changed since goes without.
    #[arg(long, conflicts_with = "unprofiled")]
    anew: bool,
    /// Without a profile: in half the time, and slower than what is shipped.
    #[arg(long)]
    unprofiled: bool,
}

/// Builds the program as it is shipped, and says where it is: at a place of its own, as builds without a profile leave theirs where this one does.
///
/// # Errors
/// When something does not build or run, or nothing is there to merge a profile with.
pub(crate) fn run(args: &DistArgs) -> anyhow::Result<()> {
    let features: Vec<String> = args
        .features
        .split([',', ' '])
        .filter(|feature| !feature.is_empty())
        .map(|feature| format!("kvfleet/{feature}"))
        .collect();
    let by = match (args.unprofiled, args.anew) {
        (true, _) => By::Nothing,
        (false, true) => By::Anew,
        (false, false) => By::Kept,
    };
    build(&["kvfleet"], &features.join(","), by)?;
    let folder = target().join("shipped");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let shipped = folder.join("kvfleet");
    std::fs::copy(program("kvfleet"), &shipped)
        .with_context(|| format!("cannot write {}", shipped.display()))?;
    println!("{}", shipped.display());
    Ok(())
}

/// Builds programs of ours as they are shipped; with features, as cargo takes them.
pub(crate) fn build(programs: &[&str], features: &str, by: By) -> anyhow::Result<()> {
    let flags = match by {
        By::Nothing => Vec::new(),
        By::Kept | By::Anew => flags_of(&profile(features, by == By::Anew)?),
    };
    compile(programs, features, (&target(), &flags))
}

/// Where a program of ours lies that was built so.
pub(crate) fn program(name: &str) -> PathBuf {
    target().join(PROFILE).join(name)
}

fn compile(programs: &[&str], features: &str, (folder, flags): (&Path, &[String])) -> anyhow::Result<()> {
    let mut command = cargo();
    command.args(["build", "--locked", "--profile", PROFILE]).env("CARGO_TARGET_DIR", folder);
    // For the machine that counts, in the folder that is named.
    command.env_remove("CARGO_BUILD_TARGET");
    command.args(PACKAGES.iter().flat_map(|package| ["--package", package]));
    command.args(programs.iter().flat_map(|program| ["--bin", program]));
    if !features.is_empty() {
        command.args(["--features", features]);
    }
    if !flags.is_empty() {
        command.env("CARGO_ENCODED_RUSTFLAGS", with(flags));
        // Programs that only build something have counters too, and nothing to tell.
        command.env("LLVM_PROFILE_FILE", "/dev/null");
    }
    let status = command.status().context("cannot start cargo")?;
    if !status.success() {
        bail!("{} was not built: cargo ended with {status}", programs.join(" and "));
    }
    Ok(())
}

/// Flags for the compiler beside those that whoever called us gave it.
fn with(flags: &[String]) -> OsString {
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
    // What runs most lies together then: a processor that slept fetches it anew, page by page.
    if cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        flags.push("-Clink-arg=-Wl,-z,keep-text-section-prefix".to_owned());
    }
    flags
}

/// The profile for these features, made if there is none, or if it is to be made anew.
fn profile(features: &str, is_anew: bool) -> anyhow::Result<PathBuf> {
    let all = target().join("profiles");
    let folder = all.join(folder_of(features));
    std::fs::create_dir_all(&all).with_context(|| format!("cannot make {}", all.display()))?;
    // Who comes meanwhile waits, and then has what was made.
    let lock = File::create(all.join("lock")).context("cannot make the lock of the profiles")?;
    lock.lock().context("cannot lock the profiles")?;
    let (stamp, named) = (folder.join("made-of.txt"), folder.join("profile.txt"));
    let made_of = made_of(features)?;
    if !is_anew && std::fs::read_to_string(&stamp).is_ok_and(|was| was == made_of) {
        let profile = folder.join(std::fs::read_to_string(&named).unwrap_or_default());
        if profile.is_file() {
            return Ok(profile);
        }
    }
    let tool = merger()?;
    eprintln!(
        "making a profile: this builds all of it twice, first with counters for some benches to run on, and then by what they counted. It is kept in {} for this compiler and Cargo.lock; --unprofiled does without",
        folder.display()
    );
    if folder.exists() {
        std::fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    let counted = target().join("counted");
    compile(&["benches"], features, (&counted, &["-Cprofile-generate".to_owned()]))?;
    for training in &TRAINING {
        train(&counted.join(PROFILE).join("benches"), training, &folder)?;
    }
    let merged = merge(&tool, &folder)?;
    std::fs::write(&named, &merged).with_context(|| format!("cannot write {}", named.display()))?;
    // The last: what is there without it is made again.
    std::fs::write(&stamp, made_of).with_context(|| format!("cannot write {}", stamp.display()))?;
    Ok(folder.join(merged))
}

fn folder_of(features: &str) -> String {
    match features {
        "" => "plain".to_owned(),
        features => features.replace(['/', ','], "-"),
    }
}

/// All that names functions: with another of these a profile is of another program.
fn made_of(features: &str) -> anyhow::Result<String> {
    let read = |path: PathBuf| {
        std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let flags = with(&[]).to_string_lossy().replace('\u{1f}', " ");
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
        // A comment names nothing.
        read(path)?.lines().filter(|line| !line.starts_with('#')).for_each(|line| {
            text.push_str(line);
            text.push('\n');
        });
    }
    Ok(text)
}

/// Runs a bench that counts.
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
            "the bench {}, of which a profile is made, ended with {status}; what it said is above. `cargo xtask dist` and `cargo xtask bench NAME` do without with --unprofiled",
            training.bench
        );
    }
    Ok(())
}

/// Puts together what was counted; the name of the file, by what is in it, as cargo builds anew only what it is called otherwise for.
fn merge(tool: &Path, folder: &Path) -> anyhow::Result<String> {
    let path = folder.join("merged");
    let mut command = Command::new(tool);
    command.args(["merge", "--sparse", "--output"]).arg(&path);
    for Training { bench, weight, .. } in &TRAINING {
        command.arg(format!("--weighted-input={weight},{}", folder.join("raw").join(bench).display()));
    }
    let status = command.status().with_context(|| format!("cannot start {}", tool.display()))?;
    if !status.success() {
        bail!("{} ended with {status}; what it said is above", tool.display());
    }
    let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    let name = format!("{:016x}.profdata", hasher.finish());
    std::fs::rename(&path, folder.join(&name))?;
    std::fs::remove_dir_all(folder.join("raw"))?;
    Ok(name)
}

/// What says of itself which compiler it is.
fn compiler() -> anyhow::Result<String> {
    said(rustc().arg("-vV"))
}

fn rustc() -> Command {
    let mut command = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    command.current_dir(root());
    command
}

fn said(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().context("cannot start rustc")?;
    if !output.status.success() {
        bail!("rustc ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).context("rustc said something that is no text")
}

/// The program that merges profiles, of the LLVM that the compiler has; installed if need be.
fn merger() -> anyhow::Result<PathBuf> {
    let compiler = compiler()?;
    let line = |name: &str| compiler.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let host = line("host:").context("rustc does not say for what it builds")?;
    let llvm = line("LLVM version:").context("rustc does not say which LLVM it has")?;
    let llvm = llvm.split('.').next().unwrap_or_default();
    let sysroot = said(rustc().args(["--print", "sysroot"]))?;
    let places = [
        Path::new(sysroot.trim()).join("lib/rustlib").join(host).join("bin/llvm-profdata"),
        PathBuf::from(format!("/usr/lib/llvm-{llvm}/bin/llvm-profdata")),
    ];
    let there = || places.iter().find(|place| place.is_file()).cloned();
    if let Some(tool) = there() {
        return Ok(tool);
    }
    // It says what is wrong. What we print is for who asked us.
    let mut setup = Command::new(root().join("scripts/setup"));
    setup.arg("profile").stdout(std::io::stderr()).status().context("cannot run scripts/setup")?;
    there().with_context(|| {
        format!(
            "no llvm-profdata of LLVM {llvm}: `rustup component add llvm-tools` or the package llvm-{llvm} has it. `cargo xtask dist` and `cargo xtask bench NAME` do without with --unprofiled"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_have_folders_of_their_own() {
        assert_eq!(folder_of(""), "plain");
        assert_eq!(folder_of("kvfleet/rdma,kvfleet/gpu"), "kvfleet-rdma-kvfleet-gpu");
    }

    #[test]
    fn a_profile_is_of_the_compiler_the_features_and_the_lock_file() {
        let made_of = |features| made_of(features).expect("all of it is there");
        let plain = made_of("");
        assert!(plain.starts_with("rustc ") && plain.contains("\nLLVM version: "), "{plain:.400}");
        assert!(plain.contains("\nname = \"hyper\"\n") && plain.contains("[profile.dist]"));
        assert!(plain.contains("name = \"kvfleet-doors\"\n"), "the members' manifests are part of it");
        assert_ne!(plain, made_of("kvfleet/rdma"));
        assert_eq!(plain, made_of(""));
    }

    #[test]
    fn flags_are_told_apart_by_what_cargo_tells_them_apart_by() {
        assert_eq!(encode(["-Ca=b c", "-d"].into_iter()), "-Ca=b c\u{1f}-d");
        let flags = flags_of(Path::new("/a folder/x.profdata"));
        assert_eq!(flags[0], "-Cprofile-use=/a folder/x.profdata");
    }
}
