//! `docs/ERRORS.md` as the tests write it: the answer in a row is the text that the row's test got.
//!
//! [`says`] compares a message with its row; with `KVFLEET_BLESS=1` it writes the message there. Only tests
//! use this crate. Not here: how the document is read (`table.rs`) and whether every row has its test and
//! every call its row (`xtask/src/tidy/errors.rs`).

mod table;

use std::cmp::Reverse;
use std::fmt::Display;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// The document, relative to this crate.
const DOCUMENT: &str = "../docs/ERRORS.md";

/// Held while the document is rewritten. Not in `docs`, where every file is a document.
const LOCK: &str = "../target/errors-doc.lock";

/// Set to `1`, it turns every comparison into a rewriting.
const BLESS: &str = "KVFLEET_BLESS";

/// Asserts that the row of `input` in `docs/ERRORS.md` shows `message`, on one line and with each text of
/// `varying` (paths, ports, checksums) shown as `…`. With `KVFLEET_BLESS=1` it writes the row instead.
///
/// # Panics
/// When the row shows another text, and when there is no such row.
#[track_caller]
pub fn says(input: &str, message: &dyn Display, varying: &[&str]) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let place = Place { document: here.join(DOCUMENT), lock: here.join(LOCK) };
    let is_blessing = std::env::var_os(BLESS).is_some_and(|value| value == "1");
    if let Err(problem) = place.settle(is_blessing, input, &shown(&message.to_string(), varying)) {
        panic!("{problem}");
    }
}

/// A document, and the lock for rewriting it.
struct Place {
    document: PathBuf,
    lock: PathBuf,
}

impl Place {
    /// Compares or rewrites the row of `input`; the error is what the test panics with.
    fn settle(&self, is_blessing: bool, input: &str, shown: &str) -> Result<(), String> {
        if !is_blessing {
            return compared(&self.read()?, input, shown);
        }
        // Tests run in processes of their own: without the lock, one would undo what another wrote.
        let lock = self.locked().map_err(|cause| format!("cannot lock {}: {cause}", self.lock.display()))?;
        let before = self.read()?;
        let after = table::replaced(&before, input, shown)?;
        if after != before {
            self.write(&after)
                .map_err(|cause| format!("cannot write {}: {cause}", self.document.display()))?;
        }
        drop(lock);
        Ok(())
    }

    fn read(&self) -> Result<String, String> {
        std::fs::read_to_string(&self.document)
            .map_err(|cause| format!("cannot read {}: {cause}", self.document.display()))
    }

    fn locked(&self) -> io::Result<File> {
        if let Some(folder) = self.lock.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let file = File::options().create(true).truncate(false).write(true).open(&self.lock)?;
        file.lock()?;
        Ok(file)
    }

    /// Under another name first: a test that compares at this moment reads the old text or the new one.
    fn write(&self, text: &str) -> io::Result<()> {
        let new = self.document.with_extension(format!("new-{}", std::process::id()));
        std::fs::write(&new, text)?;
        std::fs::rename(&new, &self.document)
    }
}

fn compared(document: &str, input: &str, shown: &str) -> Result<(), String> {
    let row = table::row(document, input)?;
    if row == shown {
        return Ok(());
    }
    Err(format!(
        "docs/ERRORS.md shows another answer to \"{input}\"\n  the row:  {row}\n  the test: {shown}\n\
         when the test is right, run it with {BLESS}=1 to write its answer there"
    ))
}

/// The message as a cell of the table: inline code on one line.
fn shown(message: &str, varying: &[&str]) -> String {
    let mut text = message.to_owned();
    let mut varying: Vec<&str> = varying.iter().copied().filter(|part| !part.is_empty()).collect();
    // A path may lie in another one: the longer goes first.
    varying.sort_by_key(|part| Reverse(part.len()));
    for part in varying {
        text = text.replace(part, "…");
    }
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    as_code(&lines.join(" ").replace('|', "\\|"))
}

/// Inline code, whatever backticks are in it: the fence is longer than each run of them.
fn as_code(text: &str) -> String {
    let longest = text.split(|letter| letter != '`').map(str::len).max().unwrap_or_default();
    let fence = "`".repeat(longest + 1);
    let pad = if text.starts_with('`') || text.ends_with('`') { " " } else { "" };
    format!("{fence}{pad}{text}{pad}{fence}")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const TEXT: &str = "# Errors\n\n| input | answer | test |\n| --- | --- | --- |\n\
        | an absent file | `cannot read …` | `a.rs::b` |\n";

    /// A document of its own for each test; the folder is removed at the end.
    struct Scratch(Place);

    impl Scratch {
        fn new(name: &str, text: &str) -> Scratch {
            let folder = std::env::temp_dir().join(format!("errors-doc-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&folder).unwrap();
            let place = Place { document: folder.join("ERRORS.md"), lock: folder.join("lock") };
            std::fs::write(&place.document, text).unwrap();
            Scratch(place)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let folder = self.0.document.parent().unwrap();
            std::fs::remove_dir_all(folder).unwrap();
        }
    }

    #[test]
    fn messages_are_shown_on_one_line_as_code() {
        assert_eq!(shown("plain", &[]), "`plain`");
        assert_eq!(shown("one\n  two\r\n\nthree \n", &[]), "`one two three`");
        assert_eq!(shown("a | b", &[]), "`a \\| b`");
        assert_eq!(shown("key `a`: wrong", &[]), "``key `a`: wrong``");
        assert_eq!(shown("key `a`", &[]), "`` key `a` ``");
        assert_eq!(shown("``a`` b", &[]), "``` ``a`` b ```");
    }

    #[test]
    fn varying_parts_are_dots_longest_first() {
        let varying = ["/tmp/x", "/tmp/x/y", "", "7"];
        assert_eq!(shown("at /tmp/x/y and /tmp/x: 7", &varying), "`at … and …: …`");
    }

    #[test]
    fn an_equal_message_passes_and_another_one_fails_with_both_texts() {
        let scratch = Scratch::new("compare", TEXT);
        assert_eq!(scratch.0.settle(false, "an absent file", "`cannot read …`"), Ok(()));
        let problem = scratch.0.settle(false, "an absent file", "`cannot open …`").unwrap_err();
        for part in ["an absent file", "`cannot read …`", "`cannot open …`", "KVFLEET_BLESS=1"] {
            assert!(problem.contains(part), "{part} is not in {problem}");
        }
        assert_eq!(scratch.0.read().unwrap(), TEXT, "comparing writes nothing");
    }

    #[test]
    #[should_panic(expected = "add the row")]
    fn an_unknown_input_fails_the_test_that_says_it() {
        says("an input that no row has", &"a message", &[]);
    }

    #[test]
    fn blessing_rewrites_the_row_and_then_it_passes() {
        let scratch = Scratch::new("bless", TEXT);
        scratch.0.settle(true, "an absent file", "`gone`").unwrap();
        assert_eq!(scratch.0.read().unwrap(), TEXT.replace("cannot read …", "gone"));
        scratch.0.settle(false, "an absent file", "`gone`").unwrap();
        assert!(scratch.0.settle(true, "another file", "`gone`").is_err(), "blessing adds no row");
    }

    #[test]
    fn blessings_side_by_side_lose_nothing() {
        const ROWS: usize = 16;
        let rows: String =
            (0..ROWS).map(|number| format!("| input {number} | `old` | `a.rs::b` |\n")).collect();
        let scratch = Scratch::new("parallel", &rows);
        std::thread::scope(|scope| {
            for number in 0..ROWS {
                let place = &scratch.0;
                scope.spawn(move || {
                    place.settle(true, &format!("input {number}"), &format!("`new {number}`"))
                });
            }
        });
        for number in 0..ROWS {
            scratch.0.settle(false, &format!("input {number}"), &format!("`new {number}`")).unwrap();
        }
    }
}
