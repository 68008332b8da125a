//! Rule: every Rust file opens with `//!` prose that says what the file is.
//!
//! Not here: whether the prose is true. Length stands in for content, so a one-word heading fails.

use super::{Tree, Violation};

/// Minimum length of an opening, in characters.
const OPENING_CHARACTERS_MIN: usize = 20;

/// Finds files without an opening.
pub(crate) fn check(tree: &Tree) -> anyhow::Result<Vec<Violation>> {
    let missing = tree.sources().iter().filter(|source| !opens_with_prose(&source.text));
    Ok(missing
        .map(|source| {
            Violation::new(&source.path, 1, "open with `//!`: what this file is, and what it is not")
        })
        .collect())
}

fn opens_with_prose(text: &str) -> bool {
    let opening: usize =
        text.lines().map_while(|line| line.strip_prefix("//!")).map(|line| line.trim().chars().count()).sum();
    opening >= OPENING_CHARACTERS_MIN && !text.starts_with("//! Placeholder")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn refuses_a_file_without_opening() {
        for text in ["fn a() {}", "//! Short.\nfn a() {}", "// A comment that is long enough.\nfn a() {}"] {
            assert_eq!(check(&Tree::of(&[("core/src/a.rs", text)])).unwrap().len(), 1, "{text}");
        }
    }

    #[test]
    fn accepts_prose() {
        let text = "//! Keeps the heads of the queues, one per category.\nfn a() {}";
        assert!(check(&Tree::of(&[("core/src/a.rs", text)])).unwrap().is_empty());
    }
}
