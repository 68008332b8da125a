//! The repository's rules, each a function from the tree to its violations.
//!
//! Every rule runs as a test on the real tree, and has a second test with a tree that it must
//! refuse. Not here: style that rustfmt and clippy check.

mod arrows;
mod columns;
mod constants;
mod dependencies;
mod documents;
mod errors;
mod glossary;
mod homes;
mod length;
mod links;
mod modules;
mod names;
mod parameters;
mod paths;
mod plain_english;
mod prose;
mod reach;
mod subjects;
mod text;
mod tree;
mod type_names;
mod unsafe_code;

use std::fmt;

use anyhow::bail;

use crate::reference;

pub(crate) use tree::{Tree, is_test_file, is_test_only};

/// A violation of a rule, and its remedy.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    /// File, relative to the top of the repository.
    path: String,
    /// Line counted from 1, or 0 for the whole file.
    line: usize,
    /// Description and remedy.
    what: String,
}

impl Violation {
    pub(crate) fn new(path: &str, line: usize, what: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, what: what.into() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.what)
    }
}

/// A rule: its name, and the function that finds violations.
type Rule = (&'static str, fn(&Tree) -> anyhow::Result<Vec<Violation>>);

/// Every rule, in the order of the report.
const RULES: &[Rule] = &[
    ("arrows between crates", arrows::check),
    ("one home per package", homes::check),
    ("dependencies are used", dependencies::check),
    ("files open with prose", prose::check),
    ("names that say nothing", names::check),
    ("one word for one thing", glossary::check),
    ("length of functions", length::check),
    ("paths in documents", paths::check),
    ("links in documents", links::check),
    ("errors as tests got them", errors::check),
    ("every file is reached", reach::check),
    ("limits say why", constants::check),
    ("words in files", text::check),
    ("places of unsafe code", unsafe_code::check),
    ("types are nouns, each named once", type_names::check),
    ("parameters have names", parameters::check),
    ("files lie where modules say", modules::check),
    ("width of lines", columns::check),
    ("plain English", plain_english::check),
    ("form and size of documents", documents::check),
    ("subjects of commits", subjects::check),
    ("generated pages are current", reference::check),
];

/// Prints all violations of all rules.
///
/// # Errors
/// If there is any violation.
pub(crate) fn report() -> anyhow::Result<()> {
    let tree = Tree::read()?;
    let mut found = 0;
    for (name, rule) in RULES {
        for violation in rule(&tree)? {
            println!("{violation} [{name}]");
            found += 1;
        }
    }
    if found > 0 {
        bail!("{found} violations of the rules in xtask/src/tidy/");
    }
    println!("{} rules pass for {} files", RULES.len(), tree.sources().len());
    Ok(())
}

#[cfg(test)]
mod tests {
    //! The real tree passes every rule. One test per rule, so that a failure names it.
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn holds(rule: fn(&Tree) -> anyhow::Result<Vec<Violation>>) {
        let found = rule(&Tree::read().unwrap()).unwrap();
        let lines: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert!(found.is_empty(), "\n{}\n", lines.join("\n"));
    }

    macro_rules! rules {
        ($($name:ident),*) => {
            $(#[test] fn $name() { holds(super::$name::check); })*

            #[test]
            fn every_rule_has_its_test() {
                assert_eq!([$(stringify!($name)),*].len(), RULES.len());
            }
        };
    }

    rules!(
        arrows,
        homes,
        dependencies,
        prose,
        names,
        glossary,
        length,
        paths,
        links,
        errors,
        reach,
        constants,
        text,
        unsafe_code,
        type_names,
        parameters,
        modules,
        columns,
        plain_english,
        documents,
        subjects,
        reference
    );
}
