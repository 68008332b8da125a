//! Rule: paths and tests that a document names exist.
//!
//! Not here: links (`links.rs`), and whether the document describes its paths correctly.

use super::{Tree, Violation};

/// Documents with checked paths.
const DOCUMENTS: [&str; 8] = [
    "docs/reference/invariants.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "README.md",
    "docs/ARCHITECTURE.md",
    "docs/PAPERS.md",
    "docs/GLOSSARY.md",
    "docs/reference/errors.md",
];

/// Top-level folders; other words with a slash are not paths of this repository.
const FOLDERS: [&str; 26] = [
    "cpu",
    "core",
    "proto",
    "transport",
    "rdma",
    "router",
    "node",
    "net",
    "engine-events",
    "engine",
    "gateway",
    "testkit",
    "client",
    "sim",
    "lab",
    "cli",
    "chaos-tests",
    "benches",
    "xtask",
    "errors-doc",
    "docs",
    "deploy",
    "scripts",
    ".ci",
    ".config",
    ".cargo",
];

/// Finds paths and tests that do not exist.
pub(crate) fn check(tree: &Tree) -> anyhow::Result<Vec<Violation>> {
    let mut found = Vec::new();
    let records = tree.texts().filter(|(path, _)| path.starts_with("docs/adr/"));
    let documents = DOCUMENTS.iter().filter_map(|path| tree.text(path).map(|text| (*path, text)));
    for (path, text) in documents.chain(records) {
        for (position, line) in text.lines().enumerate() {
            found.extend(missing_targets(tree, line).map(|what| Violation::new(path, position + 1, what)));
        }
    }
    Ok(found)
}

/// Missing paths and tests that this line names.
fn missing_targets<'line>(tree: &Tree, line: &'line str) -> impl Iterator<Item = String> + use<'line> {
    let quoted = line.split('`').skip(1).step_by(2).filter(|name| is_path(name)).filter_map(|name| {
        let (path, test) = name.split_once("::").map_or((name, None), |(path, test)| (path, Some(test)));
        (!is_present(tree, path, test)).then(|| format!("`{name}` does not exist"))
    });
    quoted.collect::<Vec<_>>().into_iter()
}

/// Whether the path exists and, if a test is named, the file (or a file of the folder) defines it.
fn is_present(tree: &Tree, path: &str, test: Option<&str>) -> bool {
    let Some(test) = test else { return tree.exists(path) };
    let declaration = format!("fn {test}(");
    tree.texts().any(|(known, text)| known.starts_with(path) && text.contains(&declaration))
}

fn is_path(name: &str) -> bool {
    let is_plain = name.chars().all(|letter| letter.is_ascii_alphanumeric() || "/._-:".contains(letter));
    is_plain && name.split_once('/').is_some_and(|(first, _)| FOLDERS.contains(&first))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const CODE: (&str, &str) = ("core/src/place/mod.rs", "#[test]\nfn ring_moves_little() {}");

    fn found(line: &str) -> usize {
        let files = [CODE, ("docs/PAPERS.md", line), ("docs/adr/0001-runs.md", "x")];
        check(&Tree::of(&files)).unwrap().len()
    }

    #[test]
    fn refuses_what_does_not_exist() {
        assert_eq!(found("| ring | `core/src/ring.rs` |"), 1);
        assert_eq!(found("see `core/src/place/mod.rs::no_such_test`"), 1);
        assert_eq!(found("`core/src/a.rs` and `core/src/b.rs`"), 2);
    }

    #[test]
    fn accepts_what_exists_and_what_is_no_path() {
        assert_eq!(
            found("`core/src/place/mod.rs`, `core/src/`, `core/src/place/mod.rs::ring_moves_little`"),
            0
        );
        assert_eq!(found("`route/fetch`, `host:port`, `a/b/c.rs`"), 0);
    }
}
