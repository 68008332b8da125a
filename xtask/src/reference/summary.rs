//! The table of contents of the book, `docs/SUMMARY.md`, from the documents that exist.
//!
//! Not here: building the book (`scripts/book`).

use anyhow::Context;

use crate::tidy::Tree;

/// The table of contents.
pub(super) const PATH: &str = "docs/SUMMARY.md";

/// A part of the book: its title, and the folder or file that it lists.
struct Part {
    title: &'static str,
    documents: &'static [&'static str],
}

/// The parts in order. A folder stands for its `README.md` with all other documents below it, or
/// for all its documents if it has none.
const PARTS: [Part; 4] = [
    Part { title: "Guide", documents: &["docs/guide/"] },
    Part {
        title: "Design",
        documents: &["docs/ARCHITECTURE.md", "docs/GLOSSARY.md", "docs/PAPERS.md", "docs/adr/"],
    },
    Part { title: "Reference", documents: &["docs/reference/"] },
    Part { title: "Measurements", documents: &["docs/measurements/"] },
];

/// The whole table of contents. A document that does not exist is left out.
pub(super) fn page(tree: &Tree) -> anyhow::Result<String> {
    let mut text = super::opening("Summary", "the documents in docs/");
    for Part { title, documents } in PARTS {
        text.push_str(&format!("\n# {title}\n\n"));
        for document in documents {
            text.push_str(&entries(tree, document)?);
        }
    }
    Ok(text)
}

/// Lines for a document, or for all documents of a folder.
fn entries(tree: &Tree, document: &str) -> anyhow::Result<String> {
    if !document.ends_with('/') {
        return match tree.text(document) {
            Some(text) => line(document, text, ""),
            None => Ok(String::new()),
        };
    }
    let index = format!("{document}README.md");
    let mut lines = String::new();
    let mut indent = "";
    if let Some(text) = tree.text(&index) {
        lines.push_str(&line(&index, text, indent)?);
        indent = "  ";
    }
    let others = tree
        .texts()
        .filter(|(path, _)| path.starts_with(document) && path.ends_with(".md") && *path != index.as_str());
    for (path, text) in others {
        lines.push_str(&line(path, text, indent)?);
    }
    Ok(lines)
}

fn line(path: &str, text: &str, indent: &str) -> anyhow::Result<String> {
    let title = text.lines().find_map(|line| line.strip_prefix("# "));
    let title = title.with_context(|| format!("{path} has no title `# …`"))?.replace(['[', ']'], "");
    let target = path.strip_prefix("docs/").unwrap_or(path);
    Ok(format!("{indent}- [{title}]({target})\n"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn lists_documents_below_their_index() {
        let tree = Tree::of(&[
            ("docs/adr/README.md", "# Records"),
            ("docs/adr/0001-a.md", "<!-- x -->\n\n# 0001: Do [a]"),
            ("docs/reference/cli.md", "# Commands"),
        ]);
        let text = page(&tree).unwrap();
        assert!(text.contains("\n- [Records](adr/README.md)\n  - [0001: Do a](adr/0001-a.md)\n"), "{text}");
        assert!(text.contains("\n# Reference\n\n- [Commands](reference/cli.md)\n"), "{text}");
        assert!(page(&Tree::of(&[("docs/adr/0001-a.md", "no title")])).is_err());
    }
}
