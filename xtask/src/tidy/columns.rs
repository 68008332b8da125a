//! Rule: a line of Rust or Markdown fits on a screen.
//!
//! Tables, links and code blocks of Markdown are as wide as they must be. Not here: the width that rustfmt and the
//! writing of comments aim at, which is less.

use super::{Tree, Violation};

/// Widest line, in characters.
const COLUMNS_MAX: usize = 120;

/// Documents that a program writes: their lines are its own.
const GENERATED: [&str; 2] = ["<!-- generated", "<!-- Generated"];

/// Finds lines that are wider.
pub(crate) fn check(tree: &Tree) -> anyhow::Result<Vec<Violation>> {
    Ok(judge(tree))
}

fn judge(tree: &Tree) -> Vec<Violation> {
    let mut found = Vec::new();
    for (path, text) in tree.texts() {
        let is_markdown = path.ends_with(".md");
        if !is_markdown && !path.ends_with(".rs") || GENERATED.iter().any(|mark| text.starts_with(mark)) {
            continue;
        }
        let mut is_code = false;
        for (position, line) in text.lines().enumerate() {
            is_code ^= is_markdown && line.trim_start().starts_with("```");
            let columns = line.chars().count();
            let is_free = is_markdown && (is_code || line.trim_start().starts_with('|') || is_one_word(line));
            if columns > COLUMNS_MAX && !is_free {
                let what = format!("{columns} columns, limit {COLUMNS_MAX}: break the line");
                found.push(Violation::new(path, position + 1, what));
            }
        }
    }
    found
}

/// Whether there is nowhere to break it: a link or a path that stands alone.
fn is_one_word(line: &str) -> bool {
    line.split_whitespace().filter(|word| word.len() > 3).count() == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> usize {
        judge(&Tree::of(&[(path, text)])).len()
    }

    #[test]
    fn refuses_wide_lines_of_rust_and_markdown() {
        let wide = format!("// {}", "word ".repeat(30));
        assert_eq!(found("core/src/a.rs", &wide), 1);
        assert_eq!(found("docs/a.md", &wide), 1);
        assert_eq!(found("docs/a.toml", "a = 1"), 0);
    }

    #[test]
    fn accepts_wide_tables_code_and_links() {
        let row = format!("| {} |", "word ".repeat(30));
        let code = format!("```\n{}\n```\n", "word ".repeat(30));
        let link = format!("- [a](https://example.org/{})", "x".repeat(120));
        assert_eq!([row, code, link].map(|text| found("docs/a.md", &text)), [0; 3]);
        assert_eq!(
            found("core/src/a.rs", &format!("// {}", "é".repeat(110))),
            0,
            "characters count, not bytes"
        );
    }
}
