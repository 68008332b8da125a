//! Rule: comments and documents are in plain English. Turns of phrase that make a text hard to read stay rare.
//!
//! Rates are per thousand words, over all comments of Rust and over all Markdown. Not here: text in backquotes, code
//! blocks and tables of figures, and whether a sentence is true.

use super::{Tree, Violation};

/// A turn of phrase: its name, how often it may stand among a thousand words, and its forms, a word or two each.
struct Turn {
    name: &'static str,
    per_thousand_max: f64,
    first: &'static [&'static str],
    second: &'static [&'static str],
}

/// What is counted.
const TURNS: [Turn; 6] = [
    Turn {
        name: "who, whoever, whose, whom",
        per_thousand_max: 0.5,
        first: &["who", "whoever", "whose", "whom"],
        second: &[],
    },
    Turn {
        name: "what is, what comes, what they",
        per_thousand_max: 0.5,
        first: &["what"],
        second: &["is", "was", "are", "were", "comes", "came", "has", "had", "they", "it", "one"],
    },
    Turn {
        name: "he, his, him",
        per_thousand_max: 0.0,
        first: &["he", "his", "him", "himself"],
        second: &[],
    },
    Turn {
        name: "of which, by which, in which",
        per_thousand_max: 0.8,
        first: &["of", "by", "in", "for", "from"],
        second: &["which", "whom"],
    },
    Turn {
        name: "so many, so much, so long",
        per_thousand_max: 0.3,
        first: &["so"],
        second: &["many", "much", "long", "few"],
    },
    Turn {
        name: "nobody, nothing, somebody",
        per_thousand_max: 1.0,
        first: &["nobody", "somebody", "whoever", "nothing", "everybody"],
        second: &[],
    },
];

/// Fewer words than these have no rate.
const WORDS_MIN: usize = 200;

/// Where one turn stands.
struct Place<'tree> {
    path: &'tree str,
    line: usize,
}

/// Finds the places of every turn that is too frequent.
pub(crate) fn check(tree: &Tree) -> anyhow::Result<Vec<Violation>> {
    let rust = tree.sources().iter().flat_map(|source| {
        lines(&source.path, &source.text).filter_map(|(place, line)| Some((place, comment(line)?)))
    });
    let documents = tree.texts().filter(|(path, _)| path.ends_with(".md"));
    let markdown = documents.flat_map(|(path, text)| {
        let mut is_code = false;
        lines(path, text).filter(move |(_, line)| {
            let is_fence = line.trim_start().starts_with("```");
            is_code ^= is_fence;
            !is_fence && !is_code && !is_figures(line)
        })
    });
    let mut found = judge("comments", rust);
    found.extend(judge("Markdown", markdown));
    Ok(found)
}

fn lines<'tree>(path: &'tree str, text: &'tree str) -> impl Iterator<Item = (Place<'tree>, &'tree str)> {
    text.lines().enumerate().map(move |(position, line)| (Place { path, line: position + 1 }, line))
}

/// The text of a line's comment. A `//` in an address or at the start of a string begins none.
fn comment(line: &str) -> Option<&str> {
    let (start, _) =
        line.match_indices("//").find(|(start, _)| !line[..*start].ends_with([':', '"', '\'']))?;
    Some(line[start + 2..].trim_start_matches(['/', '!']))
}

/// Whether this is a row of a table with figures.
fn is_figures(line: &str) -> bool {
    let line = line.trim();
    line.starts_with('|') && line.ends_with('|') && line.chars().any(|letter| letter.is_ascii_digit())
}

fn judge<'tree>(of: &str, lines: impl Iterator<Item = (Place<'tree>, &'tree str)>) -> Vec<Violation> {
    let mut count = 0;
    let mut seen: [Vec<Place<'_>>; TURNS.len()] = Default::default();
    for (place, line) in lines {
        let words = words(line);
        count += words.len();
        for (turn, places) in TURNS.iter().zip(&mut seen) {
            let starts = (0..words.len()).filter(|at| turn.stands(&words[*at..]));
            places.extend(starts.map(|_| Place { ..place }));
        }
    }
    let mut found = Vec::new();
    for (turn, places) in TURNS.iter().zip(seen) {
        let rate = places.len() as f64 * 1000.0 / count.max(1) as f64;
        if count >= WORDS_MIN && rate > turn.per_thousand_max {
            let what = format!(
                "`{}`: {rate:.2} among a thousand words of {of}, limit {}",
                turn.name, turn.per_thousand_max
            );
            found.extend(places.iter().map(|place| Violation::new(place.path, place.line, &*what)));
        }
    }
    found
}

impl Turn {
    /// Whether these words begin with it.
    fn stands(&self, words: &[String]) -> bool {
        let is = |at: usize, those: &[&str]| words.get(at).is_some_and(|word| those.contains(&word.as_str()));
        is(0, self.first) && (self.second.is_empty() || is(1, self.second))
    }
}

/// The words of a line in lower case, without those in backquotes.
fn words(line: &str) -> Vec<String> {
    let prose: String = line.split('`').step_by(2).collect::<Vec<_>>().join(" ");
    prose
        .split(|letter: char| !letter.is_ascii_alphabetic() && letter != '\'' && letter != '-')
        .filter(|word| word.starts_with(|letter: char| letter.is_ascii_alphabetic()))
        .map(str::to_ascii_lowercase)
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// As many words as a rate needs, and then these.
    fn found(path: &str, text: &str) -> usize {
        let plain = "// The node evicts the block and the client reads it again.\n".repeat(30);
        check(&Tree::of(&[(path, &format!("{plain}{text}"))])).unwrap().len()
    }

    #[test]
    fn refuses_each_turn_in_comments_and_documents() {
        for text in [
            "// Who asks.",
            "// What comes is told.",
            "// He waits.",
            "// The way by which it goes.",
            "// So many of them.",
            "// Nobody asks.",
        ] {
            assert_eq!(found("core/src/a.rs", text), 1, "{text}");
            assert_eq!(found("docs/a.md", text), 1, "{text}");
        }
    }

    #[test]
    fn accepts_code_names_figures_and_addresses() {
        assert_eq!(found("core/src/a.rs", "const A: &str = \"nobody\"; // `who` is a name"), 0);
        assert_eq!(found("core/src/a.rs", "const A: &str = \"http://who/whose\";"), 0);
        assert_eq!(found("docs/a.md", "```\nnobody\n```"), 0);
        assert_eq!(found("docs/a.md", "| nobody | 7 |"), 0);
    }

    #[test]
    fn a_rate_below_its_limit_passes() {
        let plain = "// The node evicts the block and the client reads it again.\n".repeat(200);
        let text = format!("{plain}// Nothing was read.");
        assert!(check(&Tree::of(&[("core/src/a.rs", &text)])).unwrap().is_empty());
    }
}
