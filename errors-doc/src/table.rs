//! Finds and replaces the answer cell of a row in the document. Text in, text out.
//!
//! A row is `| input | answer | test |`; a pipe inside a cell is written `\|`.

use std::ops::Range;

/// The section of rows that describe behaviour instead of text; they are never compared.
const WITHOUT_WORDS: &str = "## Answers without words";

/// The answer in the row with `input` in its first cell.
pub(crate) fn row<'text>(document: &'text str, input: &str) -> Result<&'text str, String> {
    answer_range(document, input).map(|cell| &document[cell])
}

/// The document with `new_cell` as the answer to `input`.
pub(crate) fn replace_row(document: &str, input: &str, new_cell: &str) -> Result<String, String> {
    let cell = answer_range(document, input)?;
    Ok([&document[..cell.start], new_cell, &document[cell.end..]].concat())
}

/// Byte range of the second cell in the row of `input`.
fn answer_range(document: &str, input: &str) -> Result<Range<usize>, String> {
    let mut found = Vec::new();
    let mut at = 0;
    for line in document.split_inclusive('\n').take_while(|line| !line.starts_with(WITHOUT_WORDS)) {
        if let [first, second, ..] = cells(line)[..]
            && &line[first.0..first.1] == input
        {
            found.push(at + second.0..at + second.1);
        }
        at += line.len();
    }
    match found.len() {
        1 => Ok(found.remove(0)),
        0 => Err(format!(
            "docs/reference/errors.md has no row \"{input}\" above \"{WITHOUT_WORDS}\": add the row \
             (| {input} | `` | `file.rs::test` |), then run the test with KVFLEET_BLESS=1"
        )),
        several => Err(format!("docs/reference/errors.md has {several} rows \"{input}\": keep one")),
    }
}

/// Start and end of each cell of a row, without surrounding spaces; empty for a line that is not a
/// row.
fn cells(line: &str) -> Vec<(usize, usize)> {
    let line = line.trim_end();
    if !line.starts_with('|') {
        return Vec::new();
    }
    let is_border = |at: &usize| !line[..*at].ends_with('\\');
    let borders: Vec<usize> = line.match_indices('|').map(|(at, _)| at).filter(is_border).collect();
    let between = borders.windows(2).map(|pair| (pair[0] + 1, pair[1]));
    between
        .map(|(start, end)| {
            let cell = &line[start..end];
            let spaces = cell.len() - cell.trim_start().len();
            // An empty cell keeps one space on either side.
            let start = start + if cell.trim().is_empty() { spaces.min(1) } else { spaces };
            (start, start + cell.trim().len())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const TEXT: &str = "# Errors\n\n| input | answer | test |\n| --- | --- | --- |\n\
        | an absent file | `a \\| b` | `a.rs::b` |\n| a full disk |  | `a.rs::c` |\n\n\
        ## Answers without words\n\n| a flipped bit | found | `a.rs::d` |\n";

    #[test]
    fn finds_a_row_by_its_whole_first_cell() {
        assert_eq!(row(TEXT, "an absent file"), Ok("`a \\| b`"));
        assert_eq!(row(TEXT, "a full disk"), Ok(""));
        assert!(row(TEXT, "an absent").unwrap_err().contains("add the row"));
    }

    #[test]
    fn ignores_rows_without_words() {
        assert!(row(TEXT, "a flipped bit").unwrap_err().contains("Answers without words"));
    }

    #[test]
    fn rejects_duplicate_rows() {
        let twice = TEXT.replace("a full disk", "an absent file");
        assert!(row(&twice, "an absent file").unwrap_err().contains("2 rows"));
    }

    #[test]
    fn replaces_only_the_answer() {
        let after = replace_row(TEXT, "an absent file", "`gone`").unwrap();
        assert_eq!(after, TEXT.replace("`a \\| b`", "`gone`"));
        let filled = replace_row(TEXT, "a full disk", "`full`").unwrap();
        assert!(filled.contains("| a full disk | `full` | `a.rs::c` |"), "{filled}");
        assert!(replace_row(TEXT, "nothing", "`x`").is_err());
    }
}
