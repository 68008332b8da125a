//! Rule: the subject of a commit is `scope: imperative` and fits on one line.
//!
//! Commits up to the last one of an older habit are left as they are. Not here: the body, which says why.

use std::process::Command;

use anyhow::{Context, ensure};

use super::{Tree, Violation};

/// The last commit before this rule.
const SINCE: &str = "39a35161";

/// Longest subject, in characters: the width at which `git log` and mail cut it.
const SUBJECT_MAX: usize = 72;

/// Finds subjects of another form. Says so and finds none where the history is not at hand.
pub(crate) fn check(tree: &Tree) -> anyhow::Result<Vec<Violation>> {
    let is_known = git(tree, &["merge-base", "--is-ancestor", SINCE, "HEAD"])?.status.success();
    if !is_known {
        eprintln!("skipped: subjects of commits, since {SINCE} is not in this clone's history");
        return Ok(Vec::new());
    }
    let output = git(tree, &["log", "--no-merges", "--format=%h %s", &format!("{SINCE}..HEAD")])?;
    ensure!(output.status.success(), "git log: {}", String::from_utf8_lossy(&output.stderr));
    Ok(judge(&String::from_utf8_lossy(&output.stdout)))
}

fn git(tree: &Tree, arguments: &[&str]) -> anyhow::Result<std::process::Output> {
    Command::new("git").args(arguments).current_dir(tree.root()).output().context("cannot start git")
}

/// Judges lines of a commit's name and subject.
fn judge(log: &str) -> Vec<Violation> {
    let wrong = |line: &str| {
        let (name, subject) = line.split_once(' ').unwrap_or((line, ""));
        let what = problem(subject)?;
        Some(Violation::new(&format!("commit {name}"), 0, format!("`{subject}`: {what}")))
    };
    log.lines().filter_map(wrong).collect()
}

fn problem(subject: &str) -> Option<&'static str> {
    let is_scope = |scope: &str| {
        !scope.is_empty()
            && scope.chars().all(|letter| {
                letter.is_ascii_lowercase() || letter.is_ascii_digit() || "-_/".contains(letter)
            })
    };
    if subject.chars().count() > SUBJECT_MAX {
        return Some("longer than 72 characters");
    }
    let Some((scope, what)) = subject.split_once(": ") else { return Some("write `scope: imperative`") };
    if !is_scope(scope) {
        return Some("a scope is a folder or a topic in lower case");
    }
    if !what.starts_with(|letter: char| letter.is_ascii_lowercase()) {
        return Some("after the scope comes a verb in lower case");
    }
    what.ends_with('.').then_some("no full stop at the end")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_subjects_of_another_form() {
        for subject in [
            "What was not looked into is not given a reason",
            "Gateway: retry",
            "gateway: Retry before the first byte",
            "gateway: retry.",
            "gateway:retry",
            ": retry",
            "core, node: rename the shelf",
        ] {
            assert!(problem(subject).is_some(), "{subject}");
        }
        assert!(problem(&format!("gateway: {}", "x".repeat(SUBJECT_MAX - 8))).is_some());
    }

    #[test]
    fn accepts_scopes_and_verbs() {
        for subject in ["gateway: retry before the first byte only", "ci: run fuzzers"] {
            assert_eq!(problem(subject), None, "{subject}");
        }
        assert_eq!(judge("abc1234 gateway: retry\ndef5678 Retry more").len(), 1);
    }
}
