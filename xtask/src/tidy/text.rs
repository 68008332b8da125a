//! Rule: words that must not stand in any file: open ends without a decision, paths of one machine, and what a merge left.
//!
//! Not here: names (`names.rs`, `glossary.rs`).

use super::{Tree, Violation};

/// Marks of unfinished work, which need the number of the decision record that keeps them open.
const OPEN_ENDS: [&str; 2] = [concat!("TO", "DO"), concat!("FIX", "ME")];

/// Beginnings of paths that exist on one machine only.
const MACHINE_PATHS: [&str; 4] =
    [concat!("/ro", "ot/"), concat!("/wo", "rk/"), concat!("/ho", "me/"), concat!("/Us", "ers/")];

/// Beginnings of lines between which a merge leaves two versions.
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
                found.push(Violation::new(path, line_number, "a merge left two versions here: keep one"));
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

/// Whether `word` stands in `line` with no letter on either side.
fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(start, _)| {
        let before = line[..start].chars().next_back();
        let after = line[start + word.len()..].chars().next();
        !before.is_some_and(char::is_alphanumeric) && !after.is_some_and(char::is_alphanumeric)
    })
}

/// Whether an absolute path starts with `machine` (and not a relative one that merely contains it).
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
    fn refuses_what_a_merge_left() {
        for mark in MERGE_MARKS {
            assert_eq!(found(&format!("one\n{mark}main\ntwo")), 1);
            assert_eq!(found(&format!("see {mark}main")), 0);
        }
        assert_eq!(found("Title\n=======\n\n> quoted"), 0);
    }
}
