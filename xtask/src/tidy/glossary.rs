//! Rule: the glossary has each word once, and every code name that it gives exists.
//!
//! Words of the field are free to use; the glossary says which one this project means. Not here: names without meaning
//! (`names.rs`) and names of types (`type_names.rs`).

use std::collections::{BTreeMap, BTreeSet};

use anyhow::ensure;
use syn::visit::Visit;

use super::{Tree, Violation};

/// Where the words are.
const GLOSSARY: &str = "docs/GLOSSARY.md";

/// Title of the column with names in code.
const CODE_COLUMN: &str = "in code";

/// A row: the line, the words of its first cell, and the names in code.
struct Row<'tree> {
    line: usize,
    words: Vec<&'tree str>,
    code: Vec<&'tree str>,
}

/// Finds words that stand twice and names that no source defines.
pub(crate) fn check(tree: &Tree) -> anyhow::Result<Vec<Violation>> {
    let rows = rows(tree.text(GLOSSARY).unwrap_or_default())?;
    let mut found = Vec::new();
    let mut first: BTreeMap<&str, usize> = BTreeMap::new();
    for row in &rows {
        for word in &row.words {
            if let Some(line) = first.insert(word, row.line) {
                let what = format!("`{word}` has a row at line {line} as well: keep one meaning");
                found.push(Violation::new(GLOSSARY, row.line, what));
            }
        }
    }
    let names = names(tree);
    for row in &rows {
        for name in row.code.iter().filter(|name| !names.contains(**name)) {
            found.push(Violation::new(
                GLOSSARY,
                row.line,
                format!("no source names `{name}`: correct the row"),
            ));
        }
    }
    Ok(found)
}

/// Reads the tables: the first column, and the column [`CODE_COLUMN`].
fn rows(glossary: &str) -> anyhow::Result<Vec<Row<'_>>> {
    let mut column = None;
    let mut rows = Vec::new();
    for (position, line) in glossary.lines().enumerate() {
        if !line.starts_with('|') {
            column = None;
            continue;
        }
        let cells: Vec<&str> = line.trim().trim_matches('|').split('|').map(str::trim).collect();
        if let Some(at) = cells.iter().position(|cell| *cell == CODE_COLUMN) {
            column = Some(at);
            continue;
        }
        let Some(code) = column.and_then(|at| cells.get(at)) else { continue };
        if cells[0].chars().all(|letter| letter == '-' || letter == ':') {
            continue;
        }
        rows.push(Row {
            line: position + 1,
            words: cells[0].split(',').map(str::trim).collect(),
            code: code.split('`').skip(1).step_by(2).flat_map(identifiers).collect(),
        });
    }
    ensure!(!rows.is_empty(), "{GLOSSARY} has no table with a column `{CODE_COLUMN}`");
    Ok(rows)
}

/// The names in a piece of code: `Change::Stored` has two.
fn identifiers(code: &str) -> impl Iterator<Item = &str> {
    code.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_')
        .filter(|name| name.starts_with(|letter: char| letter.is_ascii_alphabetic() || letter == '_'))
}

/// Every identifier of every source.
fn names(tree: &Tree) -> BTreeSet<String> {
    let mut names = Names::default();
    tree.sources().iter().for_each(|source| names.visit_file(&source.syntax));
    names.seen
}

/// Identifiers, those in the arguments of macros included.
#[derive(Default)]
struct Names {
    seen: BTreeSet<String>,
}

impl<'ast> Visit<'ast> for Names {
    fn visit_ident(&mut self, name: &'ast syn::Ident) {
        self.seen.insert(name.to_string());
    }
    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        self.seen.extend(identifiers(&called.tokens.to_string()).map(str::to_owned));
        syn::visit::visit_macro(self, called);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn found(table: &str) -> usize {
        let head = "| word | meaning here | in code | elsewhere called |\n| --- | --- | --- | --- |\n";
        let source = "struct Tier; enum Change { Stored }";
        let tree = Tree::of(&[(GLOSSARY, &format!("{head}{table}")), ("core/src/a.rs", source)]);
        check(&tree).unwrap().len()
    }

    #[test]
    fn refuses_words_with_two_rows() {
        assert_eq!(found("| tier | a | – | – |\n| tier | b | – | – |\n"), 1);
        assert_eq!(found("| promote, demote | a | – | – |\n| demote | b | – | – |\n"), 1);
    }

    #[test]
    fn refuses_names_that_no_source_has() {
        assert_eq!(found("| tier | a | `Tier`, `Change::Stored` | – |\n"), 0);
        assert_eq!(found("| tier | a | `Tier`, `Change::Gone` | – |\n"), 1);
    }

    #[test]
    fn a_glossary_without_the_column_is_an_error() {
        assert!(check(&Tree::of(&[(GLOSSARY, "| word | meaning |\n")])).is_err());
    }
}
