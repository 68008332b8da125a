//! Rule: a type is named by a noun, and within a crate no two types share a name.
//!
//! A participle, a preposition or a question word names no thing, and a name that two types share cannot be searched
//! for. Not here: words without meaning (`names.rs`) and the glossary (`glossary.rs`).

use std::collections::BTreeMap;

use super::names::defined;
use super::{Tree, Violation};

/// Types that may carry a word of [`NOT_NOUNS`]. Lower it with every type that goes; never raise it.
const NOT_NOUNS_MAX: usize = 10;

/// Names that every module may use for its own error and configuration.
const SHARED_NAMES: [&str; 2] = ["Error", "Config"];

/// Participles, prepositions and question words that were seen as names of types.
const NOT_NOUNS: &str = "
    Ahead Again Apart Around Aside Asked Asking Asks Away Back Before Began Begins Begun Behind Beside Besides Between
    Bound Bought Brought Broken Built Came Carried Chosen Closed Comes Coming Computed Computing Copied Counted Decided
    Decoding Done Dropped Due Each Ended Ending Fallen Filled Found Freed From Gained Given Gone Gives Guessed Had Has
    Heard Held Here How In Into Joined Joining Keeps Kept Knowing Known Laid Learnt Leaving Left Lent Listed Lost Made
    Meant Measured Met Missing Moved Moving Named Nearer Noted Of Off On Opened Opening Ours Out Over Paced Paid Passed
    Passing Picked Placed Planned Ran Reached Ready Received Refused Removed Returned Running Said Saved Saves Seen Sent
    Served Settled Shared Shown Since Spared Spent Stands Standing Started Stays Stopped Stored Taken Takes Tells Then
    There Told Tried Turned Under Unheard Until Used Waited Waiting Wanted Wants Weighed Went What When Where Which Who
    Whom Whose Why With Within Without Won Written";

/// A definition: crate, name, file and line.
struct Definition<'tree> {
    package: &'tree str,
    name: String,
    path: &'tree str,
    line: usize,
}

/// Finds such names.
pub(crate) fn check(tree: &Tree) -> anyhow::Result<Vec<Violation>> {
    Ok(judge(tree, NOT_NOUNS_MAX))
}

fn judge(tree: &Tree, not_nouns_max: usize) -> Vec<Violation> {
    let definitions = definitions(tree);
    let odd: Vec<&Definition<'_>> = definitions
        .iter()
        .filter(|definition| NOT_NOUNS.split_whitespace().any(|word| word == definition.name))
        .collect();
    let mut found = Vec::new();
    if odd.len() > not_nouns_max {
        let what = |name| format!("`{name}` is no noun ({} such types, limit {not_nouns_max})", odd.len());
        found.extend(odd.iter().map(|one| Violation::new(one.path, one.line, what(&one.name))));
    }
    let mut places: BTreeMap<(&str, &str), Vec<&Definition<'_>>> = BTreeMap::new();
    for definition in &definitions {
        places.entry((definition.package, &definition.name)).or_default().push(definition);
    }
    for ((package, name), those) in places {
        if SHARED_NAMES.contains(&name) {
            continue;
        }
        for one in those.iter().skip(1) {
            let first = those[0];
            let what = format!("`{package}` has another `{name}` at {}:{}", first.path, first.line);
            found.push(Violation::new(one.path, one.line, what));
        }
    }
    found
}

fn definitions(tree: &Tree) -> Vec<Definition<'_>> {
    let mut all = Vec::new();
    for source in tree.sources() {
        let package = package(&source.path);
        // Modules have names in lower case.
        let is_type = |(name, _): &(String, usize)| name.starts_with(char::is_uppercase);
        all.extend(defined(&source.syntax).into_iter().filter(is_type).map(|(name, line)| Definition {
            package,
            name,
            path: &source.path,
            line,
        }));
    }
    all
}

/// The folder of the crate that a file belongs to: what stands before `src`, `tests` or `build.rs`.
fn package(path: &str) -> &str {
    let end = ["/src/", "/tests/", "/examples/"].iter().filter_map(|part| path.find(part)).min();
    end.map_or(path, |end| &path[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_more_names_that_are_no_nouns_than_allowed() {
        let tree = Tree::of(&[("core/src/a.rs", "struct Told; enum Came {} trait Standing {}")]);
        assert_eq!(judge(&tree, 2).len(), 3);
        assert!(judge(&tree, 3).is_empty());
    }

    #[test]
    fn refuses_a_second_type_of_one_name_within_a_crate() {
        let one = "struct Report;";
        let within = Tree::of(&[("core/src/a.rs", one), ("core/src/b.rs", one)]);
        assert_eq!(judge(&within, 0).len(), 1);
        let across = Tree::of(&[("core/src/a.rs", one), ("node/src/b.rs", one), ("client/c/src/b.rs", one)]);
        assert!(judge(&across, 0).is_empty());
    }

    #[test]
    fn accepts_shared_errors_and_associated_types() {
        let text = "enum Error {} struct Config; impl Iterator for A { type Item = u8; }";
        assert!(judge(&Tree::of(&[("core/src/a.rs", text), ("core/src/b.rs", text)]), 0).is_empty());
    }
}
