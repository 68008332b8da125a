//! Runs the binary in a separate directory, so that tests stay isolated and leftovers are visible.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

use kvfleet::cluster::{ClusterShape, NodeCapacity};
use serde_json::Value;

/// Timeout for each wait, far above the expected duration.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A temporary directory for one test.
pub(crate) struct Workspace {
    dir: tempfile::TempDir,
}

impl Workspace {
    pub(crate) fn new() -> Self {
        let place = Self { dir: tempfile::tempdir().unwrap() };
        std::fs::create_dir(place.temporary()).unwrap();
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The binary's directory for temporary files.
    pub(crate) fn temporary(&self) -> PathBuf {
        self.path("tmp")
    }

    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = self.command_of(binary());
        command.args(words);
        command
    }

    /// Another program, run in the same environment.
    pub(crate) fn command_of(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        // Variables that control the tests must not configure the program.
        for (variable, _) in std::env::vars().filter(|(variable, _)| variable.starts_with("KVFLEET_")) {
            command.env_remove(variable);
        }
        command.current_dir(self.dir.path()).env("TMPDIR", self.temporary());
        command
    }

    /// Runs the binary with one environment variable set.
    pub(crate) fn run_with(&self, variable: (&str, &str), words: &[&str]) -> CommandOutput {
        CommandOutput::of(&self.command(words).env(variable.0, variable.1).output().unwrap())
    }

    pub(crate) fn run(&self, words: &[&str]) -> CommandOutput {
        CommandOutput::of(&self.command(words).output().unwrap())
    }

    /// Generates a small deterministic trace with recurring conversations.
    pub(crate) fn trace(&self, requests: usize) -> PathBuf {
        let path = self.path("trace.jsonl");
        let count = requests.to_string();
        let words = [
            "trace",
            "gen",
            "--kind",
            "consumer",
            "--format",
            "mooncake",
            "--requests",
            &count,
            "--seed",
            "7",
            "--sessions-per-s",
            "0.1",
            "-o",
            path.to_str().unwrap(),
        ];
        self.run(&words).ok();
        path
    }

    /// Replays `trace` with extra arguments and returns the report.
    pub(crate) fn replay(&self, words: &[&str]) -> Value {
        self.replay_with_code(words).0
    }

    /// Like [`Self::replay`], with the exit status.
    pub(crate) fn replay_with_code(&self, words: &[&str]) -> (Value, Option<i32>) {
        let report = self.path("report");
        let mut all = vec!["replay", "trace.jsonl", "--quiet", "--report", "report"];
        all.extend(words);
        let ran = self.run(&all);
        let text = std::fs::read_to_string(report.join("report.json"));
        let text = text.unwrap_or_else(|cause| panic!("no report ({cause}): {}", ran.all()));
        let json: Value = serde_json::from_str(&text).unwrap();
        println!("{}", ran.all());
        (json, ran.code)
    }

    /// Command lines of all running processes that name this workspace.
    pub(crate) fn processes(&self) -> Vec<String> {
        self.command_lines().into_values().collect()
    }

    /// Process ID of the process with this configuration, if it runs.
    pub(crate) fn pid_of(&self, name: &str) -> Option<i32> {
        let config = format!("/{name}.toml");
        self.command_lines().into_iter().find_map(|(pid, line)| line.contains(&config).then_some(pid))
    }

    /// Log so far of the named process in a temporary cluster.
    pub(crate) fn log_of(&self, name: &str) -> String {
        let clusters = self.leftovers();
        let logs = clusters.iter().map(|cluster| cluster.join("logs").join(format!("{name}.log")));
        logs.filter_map(|log| std::fs::read_to_string(log).ok()).collect()
    }

    fn command_lines(&self) -> BTreeMap<i32, String> {
        let needle = self.dir.path().to_str().unwrap().to_owned();
        let entries = std::fs::read_dir("/proc").unwrap().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        let lines = pids.filter_map(|pid| Some((pid, std::fs::read(format!("/proc/{pid}/cmdline")).ok()?)));
        let texts = lines.map(|(pid, line)| (pid, String::from_utf8_lossy(&line).replace('\0', " ")));
        texts.filter(|(_, text)| text.contains(&needle)).collect()
    }

    pub(crate) fn leftovers(&self) -> Vec<PathBuf> {
        std::fs::read_dir(self.temporary()).unwrap().flatten().map(|entry| entry.path()).collect()
    }
}

pub(crate) fn binary() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_kvfleet"))
}

/// The first line that `kvfleet up --json` writes.
pub(crate) fn read_first_line(child: &mut Child) -> Value {
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap()
}

/// Waits until the condition holds.
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < TIMEOUT, "timed out waiting until {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A cluster for tests that inject their own faults.
pub(crate) fn shape(place: &Workspace, capacity: NodeCapacity) -> ClusterShape {
    ClusterShape {
        routers: 3,
        nodes: 2,
        instances: 2,
        layers: kvfleet::cluster::LAYERS,
        capacity,
        data_dir: Some(place.path("cluster")),
        ..ClusterShape::small(binary().to_owned())
    }
}

/// Exit status and output of one run of the binary.
pub(crate) struct CommandOutput {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl CommandOutput {
    pub(crate) fn of(output: &Output) -> Self {
        Self {
            code: output.status.code(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    pub(crate) fn all(&self) -> String {
        format!("exit {:?}\n{}\n{}", self.code, self.out, self.err)
    }

    pub(crate) fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{}", self.all());
        self.out
    }

    /// Asserts failure with a message that contains every one of `parts`, and returns the message.
    pub(crate) fn refused(&self, parts: &[&str]) -> &str {
        assert!(!matches!(self.code, Some(0) | None), "{}", self.all());
        assert!(!self.err.contains("panicked"), "{}", self.all());
        for part in parts {
            assert!(self.err.contains(part), "{part:?} is not in: {}", self.all());
        }
        &self.err
    }
}
