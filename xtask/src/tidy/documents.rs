//! Rule: documents have one form and a size that a person reads.
//!
//! A decision record names its decision and has the same six parts as every other. Not here: the language
//! (`plain_english.rs`), the width of lines (`columns.rs`) and whether paths exist (`paths.rs`).

use super::{Tree, Violation};

/// Where decision records are; the file `README.md` there is their index.
const RECORDS: &str = "docs/adr/";

/// Longest decision record, in lines.
const RECORD_LINES_MAX: usize = 120;

/// Beginnings of lines that every decision record has, in this order.
const RECORD_PARTS: [&str; 6] =
    ["- Status: ", "- Date: ", "## Context", "## Decision", "## Alternatives", "## Consequences"];

/// Documents and how many lines each may have.
const LINES_MAX: [(&str, usize); 4] =
    [("README.md", 160), ("docs/ARCHITECTURE.md", 500), ("CONTRIBUTING.md", 120), ("SECURITY.md", 60)];

/// Where measurements are, and the most bytes of one file there: larger ones are artefacts of a release.
const MEASUREMENTS: &str = "docs/measurements/";
const MEASUREMENT_BYTES_MAX: usize = 20_000;

/// Finds documents of another form.
pub(crate) fn check(tree: &Tree) -> anyhow::Result<Vec<Violation>> {
    let mut found = Vec::new();
    for (path, text) in tree.texts() {
        if path.starts_with(RECORDS) && path.ends_with(".md") && !path.ends_with("/README.md") {
            found.extend(record(path, text));
        }
        if path.starts_with(MEASUREMENTS) && text.len() > MEASUREMENT_BYTES_MAX {
            let what = format!("{} bytes, limit {MEASUREMENT_BYTES_MAX}: keep the summary", text.len());
            found.push(Violation::new(path, 0, what));
        }
    }
    for (path, lines_max) in LINES_MAX {
        match tree.text(path) {
            None => found.push(Violation::new(path, 0, "this document is missing")),
            Some(text) => found.extend(too_long(path, text, lines_max)),
        }
    }
    Ok(found)
}

fn too_long(path: &str, text: &str, lines_max: usize) -> Option<Violation> {
    let lines = text.lines().count();
    (lines > lines_max).then(|| Violation::new(path, 0, format!("{lines} lines, limit {lines_max}")))
}

/// Finds what a decision record lacks.
fn record(path: &str, text: &str) -> Vec<Violation> {
    let mut found: Vec<_> = too_long(path, text, RECORD_LINES_MAX).into_iter().collect();
    let number = path.trim_start_matches(RECORDS).split('-').next().unwrap_or_default();
    if !text.starts_with(&format!("# {number}: ")) {
        found.push(Violation::new(
            path,
            1,
            format!("its title begins with `# {number}: ` and names the decision"),
        ));
    }
    let mut rest = text.lines();
    for part in RECORD_PARTS {
        if !rest.any(|line| line.starts_with(part)) {
            found.push(Violation::new(path, 0, format!("`{}` is missing or out of order", part.trim_end())));
            break;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const GOOD: &str = "# 0001: Batch announcements\n\n- Status: accepted\n- Date: 2026-01-01\n\n## Context\n\n\
        ## Decision\n\n## Alternatives\n\n## Consequences\n";

    /// Violations beside those of the documents that this small tree lacks.
    fn found(path: &str, text: &str) -> usize {
        let lacking = check(&Tree::of(&[])).unwrap().len();
        let all = check(&Tree::of(&[(path, text)])).unwrap();
        all.len() + usize::from(LINES_MAX.iter().any(|(known, _)| *known == path)) - lacking
    }

    #[test]
    fn refuses_records_of_another_form() {
        let path = "docs/adr/0001-batches.md";
        assert_eq!(found(path, GOOD), 0);
        assert_eq!(found(path, &GOOD.replace("# 0001: ", "# ")), 1);
        assert_eq!(found(path, &GOOD.replace("0001", "0002")), 1);
        for part in RECORD_PARTS {
            assert_eq!(found(path, &GOOD.replace(part, "")), 1, "{part}");
        }
        let swapped = GOOD
            .replace("## Context", "## X")
            .replace("## Decision", "## Context")
            .replace("## X", "## Decision");
        assert_eq!(found(path, &swapped), 1);
        assert_eq!(found(path, &format!("{GOOD}{}", "line\n".repeat(RECORD_LINES_MAX))), 1);
        assert_eq!(found("docs/adr/README.md", "an index"), 0);
    }

    #[test]
    fn refuses_documents_that_are_missing_or_too_long() {
        assert_eq!(check(&Tree::of(&[])).unwrap().len(), LINES_MAX.len());
        for (path, lines) in LINES_MAX {
            assert_eq!(found(path, &"line\n".repeat(lines)), 0);
            assert_eq!(found(path, &"line\n".repeat(lines + 1)), 1);
        }
        assert_eq!(found("docs/measurements/a.md", &"x".repeat(MEASUREMENT_BYTES_MAX + 1)), 1);
    }
}
