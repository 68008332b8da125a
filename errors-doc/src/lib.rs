//! Checks error messages against `docs/reference/errors.md`.
//!
//! [`says`] compares a message with its row in the document; with `KVFLEET_BLESS=1` it writes the
//! message there instead. Only tests use this crate. `table.rs` parses the document, and
//! `xtask/src/tidy/errors.rs` checks that every row has a test and every call a row.

pub mod log;
mod table;

use std::cmp::Reverse;
use std::fmt::Display;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// The document, relative to this crate.
const DOCUMENT: &str = "../docs/reference/errors.md";

/// Held while the document is rewritten. It is outside `docs/`, where every file counts as a
/// document.
const LOCK: &str = "../target/errors-doc.lock";

/// Set to `1` to rewrite rows instead of comparing them.
const BLESS: &str = "KVFLEET_BLESS";

/// Asserts that the row of `input` in `docs/reference/errors.md` shows `message`, on one line and with each text of
/// `varying` (paths, ports, checksums) shown as `…`. With `KVFLEET_BLESS=1` it writes the row instead.
///
/// # Panics
/// When the row shows another text, and when there is no such row.
#[track_caller]
pub fn says(input: &str, message: &dyn Display, varying: &[&str]) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let paths = DocumentPaths { document: here.join(DOCUMENT), lock: here.join(LOCK) };
    let is_blessing = std::env::var_os(BLESS).is_some_and(|value| value == "1");
    if let Err(problem) = paths.check_or_bless(is_blessing, input, &as_cell(&message.to_string(), varying)) {
        panic!("{problem}");
    }
}

/// The document and the lock file that guards rewriting it.
struct DocumentPaths {
    document: PathBuf,
    lock: PathBuf,
}

impl DocumentPaths {
    /// Compares or rewrites the row of `input`. The error is the text the test panics with.
    fn check_or_bless(&self, is_blessing: bool, input: &str, cell: &str) -> Result<(), String> {
        if !is_blessing {
            return compare_row(&self.read()?, input, cell);
        }
        // Tests run in separate processes: without the lock, one would overwrite another's row.
        let lock = self.locked().map_err(|cause| format!("cannot lock {}: {cause}", self.lock.display()))?;
        let before = self.read()?;
        let after = table::replace_row(&before, input, cell)?;
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

    /// Writes a temporary file and renames it, so that a test reading now sees the old text or the
    /// new one.
    fn write(&self, text: &str) -> io::Result<()> {
        let new = self.document.with_extension(format!("new-{}", std::process::id()));
        std::fs::write(&new, text)?;
        std::fs::rename(&new, &self.document)
    }
}

fn compare_row(document: &str, input: &str, cell: &str) -> Result<(), String> {
    let row = table::row(document, input)?;
    if row == cell {
        return Ok(());
    }
    Err(format!(
        "docs/reference/errors.md shows another answer to \"{input}\"\n  the row:  {row}\n  the test: {cell}\n\
         when the test is right, run it with {BLESS}=1 to write its answer there"
    ))
}

/// The message as a cell of the table: inline code on one line.
fn as_cell(message: &str, varying: &[&str]) -> String {
    let mut text = message.to_owned();
    let mut varying: Vec<&str> = varying.iter().copied().filter(|part| !part.is_empty()).collect();
    // One varying part may contain another, so longer ones are replaced first.
    varying.sort_by_key(|part| Reverse(part.len()));
    for part in varying {
        text = text.replace(part, "…");
    }
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    as_code(&lines.join(" ").replace('|', "\\|"))
}

/// Inline code with a fence longer than any run of backticks in `text`.
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

    /// A separate document for each test, removed on drop.
    struct Scratch(DocumentPaths);

    impl Scratch {
        fn new(name: &str, text: &str) -> Scratch {
            let folder = std::env::temp_dir().join(format!("errors-doc-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&folder).unwrap();
            let place = DocumentPaths { document: folder.join("ERRORS.md"), lock: folder.join("lock") };
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
    fn renders_messages_as_one_line_of_code() {
        assert_eq!(as_cell("plain", &[]), "`plain`");
        assert_eq!(as_cell("one\n  two\r\n\nthree \n", &[]), "`one two three`");
        assert_eq!(as_cell("a | b", &[]), "`a \\| b`");
        assert_eq!(as_cell("key `a`: wrong", &[]), "``key `a`: wrong``");
        assert_eq!(as_cell("key `a`", &[]), "`` key `a` ``");
        assert_eq!(as_cell("``a`` b", &[]), "``` ``a`` b ```");
    }

    #[test]
    fn replaces_varying_parts_longest_first() {
        let varying = ["/tmp/x", "/tmp/x/y", "", "7"];
        assert_eq!(as_cell("at /tmp/x/y and /tmp/x: 7", &varying), "`at … and …: …`");
    }

    #[test]
    fn reports_both_texts_on_a_mismatch() {
        let scratch = Scratch::new("compare", TEXT);
        assert_eq!(scratch.0.check_or_bless(false, "an absent file", "`cannot read …`"), Ok(()));
        let problem = scratch.0.check_or_bless(false, "an absent file", "`cannot open …`").unwrap_err();
        for part in ["an absent file", "`cannot read …`", "`cannot open …`", "KVFLEET_BLESS=1"] {
            assert!(problem.contains(part), "{part} is not in {problem}");
        }
        assert_eq!(scratch.0.read().unwrap(), TEXT, "comparing does not write");
    }

    #[test]
    #[should_panic(expected = "add the row")]
    fn panics_on_an_unknown_input() {
        says("an input that no row has", &"a message", &[]);
    }

    #[test]
    fn blessing_rewrites_the_row() {
        let scratch = Scratch::new("bless", TEXT);
        scratch.0.check_or_bless(true, "an absent file", "`gone`").unwrap();
        assert_eq!(scratch.0.read().unwrap(), TEXT.replace("cannot read …", "gone"));
        scratch.0.check_or_bless(false, "an absent file", "`gone`").unwrap();
        assert!(scratch.0.check_or_bless(true, "another file", "`gone`").is_err(), "blessing adds no row");
    }

    #[test]
    fn concurrent_blessings_keep_every_row() {
        const ROWS: usize = 16;
        let rows: String =
            (0..ROWS).map(|number| format!("| input {number} | `old` | `a.rs::b` |\n")).collect();
        let scratch = Scratch::new("parallel", &rows);
        std::thread::scope(|scope| {
            for number in 0..ROWS {
                let paths = &scratch.0;
                scope.spawn(move || {
                    paths.check_or_bless(true, &format!("input {number}"), &format!("`new {number}`"))
                });
            }
        });
        for number in 0..ROWS {
            scratch.0.check_or_bless(false, &format!("input {number}"), &format!("`new {number}`")).unwrap();
        }
    }
}
