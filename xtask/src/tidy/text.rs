//! Rule: no file contains unfinished work without an ADR, paths of one machine, or merge conflict
//! markers.
//!
//! Not here: names (`names.rs`, `glossary.rs`).

use super::{Tree, Violation};

/// Marks of unfinished work; each needs the number of the ADR that keeps it open.
const OPEN_ENDS: [&str; 2] = [concat!("TO", "DO"), concat!("FIX", "ME")];

/// Beginnings of paths that exist on one machine only.
const MACHINE_PATHS: [&str; 4] =
    [concat!("/ro", "ot/"), concat!("/wo", "rk/"), concat!("/ho", "me/"), concat!("/Us", "ers/")];

/// Line prefixes of merge conflict markers.
const MERGE_MARKS: [&str; 2] = [concat!("<<<<", "<<< "), concat!(">>>>", ">>> ")];

/// Finds such words.
pub(crate) fn check(tree: &Tree) -> anyhow::Result<Vec<Violation>> {
    let mut found = Vec::new();
    for (path, text) in tree.texts().filter(|(path, _)| *path != "Cargo.lock") {
        for (position, line) in text.lines().enumerate() {
            let line_number = position + 1;
            if OPEN_ENDS.iter().any(|word| has_word(line, word)) && !line.contains("ADR ") {
                found.push(Violation::new(
                    path,
                    line_number,
                    "an open end needs `ADR nnnn`: decide it or finish it",
                ));
            }
            if MERGE_MARKS.iter().any(|mark| line.starts_with(mark)) {
                found.push(Violation::new(path, line_number, "unresolved merge conflict: keep one version"));
            }
            if let Some(machine) = MACHINE_PATHS.iter().find(|machine| has_machine_path(line, machine)) {
                found.push(Violation::new(
                    path,
                    line_number,
                    format!("`{machine}…` exists on one machine only"),
                ));
            }
        }
    }
    Ok(found)
}

/// Whether `line` contains `word` as a whole word.
fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(start, _)| {
        let before = line[..start].chars().next_back();
        let after = line[start + word.len()..].chars().next();
        !before.is_some_and(char::is_alphanumeric) && !after.is_some_and(char::is_alphanumeric)
    })
}

/// Whether an absolute path starts with `machine` (a relative path may contain it).
fn has_machine_path(line: &str, machine: &str) -> bool {
    line.match_indices(machine).any(|(start, _)| {
        let before = line[..start].chars().next_back();
        !before.is_some_and(|letter| letter.is_alphanumeric() || ".}_-".contains(letter))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn found(text: &str) -> usize {
        check(&Tree::of(&[("docs/a.md", text)])).unwrap().len()
    }

    #[test]
    fn refuses_open_ends_without_a_decision() {
        assert_eq!(found(&format!("later: {}", OPEN_ENDS[0])), 1);
        assert_eq!(found(&format!("// {}: later", OPEN_ENDS[1])), 1);
        assert_eq!(found(&format!("// {} (ADR 0012): later", OPEN_ENDS[0])), 0);
        assert_eq!(found("mastodon, TODOS in a list of words"), 0);
    }

    #[test]
    fn refuses_paths_of_one_machine() {
        for machine in MACHINE_PATHS {
            assert_eq!(found(&format!("see {machine}x/notes")), 1);
            assert_eq!(found(&format!("see docs{machine}notes")), 0);
        }
        assert_eq!(found("$HOME/.cargo and /tmp/x"), 0);
    }

    #[test]
    fn refuses_conflict_markers() {
        for mark in MERGE_MARKS {
            assert_eq!(found(&format!("one\n{mark}main\ntwo")), 1);
            assert_eq!(found(&format!("see {mark}main")), 0);
        }
        assert_eq!(found("Title\n=======\n\n> quoted"), 0);
    }
}
