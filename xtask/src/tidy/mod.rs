//! The repository's rules, each a function from the tree to the places that break it.
//!
//! Every rule runs as a test on the real tree, and has a second test that feeds it a tree it must
//! refuse: a rule that cannot fail is no rule. Not here: style that rustfmt and clippy already hold.

mod arrows;
mod constants;
mod errors;
mod glossary;
mod homes;
mod length;
mod names;
mod paths;
mod prose;
mod reach;
mod text;
mod tree;
mod unsafe_code;

use std::fmt;

use anyhow::bail;

pub(crate) use tree::Tree;

/// One place that breaks a rule, and what to do about it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    /// File, relative to the top of the repository.
    path: String,
    /// Line counted from 1, or 0 when the whole file is meant.
    line: usize,
    /// What is wrong and what to do.
    what: String,
}

impl Violation {
    fn new(path: &str, line: usize, what: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, what: what.into() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.what)
    }
}

/// A rule: its name, and the function that finds the places that break it.
type Rule = (&'static str, fn(&Tree) -> anyhow::Result<Vec<Violation>>);

/// Every rule, in the order of the report.
const RULES: &[Rule] = &[
    ("arrows between crates", arrows::check),
    ("one home per package", homes::check),
    ("files open with prose", prose::check),
    ("names that say nothing", names::check),
    ("one word for one thing", glossary::check),
    ("length of functions", length::check),
    ("paths in documents", paths::check),
    ("errors as tests got them", errors::check),
    ("every file is reached", reach::check),
    ("limits say why", constants::check),
    ("words in files", text::check),
    ("places of unsafe code", unsafe_code::check),
];

/// Prints every violation of every rule; an error when there is one.
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
        bail!("{found} places break a rule of xtask/src/tidy/");
    }
    println!("{} rules hold in {} files", RULES.len(), tree.sources().len());
    Ok(())
}

#[cfg(test)]
mod tests {
    //! The real tree obeys every rule. One test per rule, so that a failure names it.
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

    rules!(arrows, homes, prose, names, glossary, length, paths, errors, reach, constants, text, unsafe_code);
}
