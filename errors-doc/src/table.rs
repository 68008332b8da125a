//! The rows of the document: which cell holds the answer to an input. Pure: text in, text out.
//!
//! A row is `| input | answer | test |`; a pipe inside a cell is written `\|`. Not here: how an answer is
//! written, and files.

use std::ops::Range;

/// The section whose answers are behaviour and not text; its rows are never compared.
const WITHOUT_WORDS: &str = "## Answers without words";

/// The answer of the row whose first cell is `input`.
pub(crate) fn row<'text>(document: &'text str, input: &str) -> Result<&'text str, String> {
    answer(document, input).map(|cell| &document[cell])
}

/// The document with `shown` as the answer to `input`.
pub(crate) fn replaced(document: &str, input: &str, shown: &str) -> Result<String, String> {
    let cell = answer(document, input)?;
    Ok([&document[..cell.start], shown, &document[cell.end..]].concat())
}

/// Where the second cell of the row of `input` stands.
fn answer(document: &str, input: &str) -> Result<Range<usize>, String> {
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
            "docs/ERRORS.md has no row \"{input}\" above \"{WITHOUT_WORDS}\": add the row \
             (| {input} | `` | `file.rs::test` |), then run the test with KVFLEET_BLESS=1"
        )),
        several => Err(format!("docs/ERRORS.md has {several} rows \"{input}\": keep one")),
    }
}

/// Start and end of each cell of a row without the spaces around it; nothing for a line that is no row.
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
            // An empty cell keeps a space on either side.
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
    fn a_row_is_found_by_its_whole_first_cell() {
        assert_eq!(row(TEXT, "an absent file"), Ok("`a \\| b`"));
        assert_eq!(row(TEXT, "a full disk"), Ok(""));
        assert!(row(TEXT, "an absent").unwrap_err().contains("add the row"));
    }

    #[test]
    fn rows_without_words_are_not_compared() {
        assert!(row(TEXT, "a flipped bit").unwrap_err().contains("Answers without words"));
    }

    #[test]
    fn one_input_has_one_row() {
        let twice = TEXT.replace("a full disk", "an absent file");
        assert!(row(&twice, "an absent file").unwrap_err().contains("2 rows"));
    }

    #[test]
    fn only_the_answer_changes() {
        let after = replaced(TEXT, "an absent file", "`gone`").unwrap();
        assert_eq!(after, TEXT.replace("`a \\| b`", "`gone`"));
        let filled = replaced(TEXT, "a full disk", "`full`").unwrap();
        assert!(filled.contains("| a full disk | `full` | `a.rs::c` |"), "{filled}");
        assert!(replaced(TEXT, "nothing", "`x`").is_err());
    }
}
