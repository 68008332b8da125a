//! Rule: each row of `docs/reference/errors.md` is a message that a test received. The test file in the row
//! calls `says` with the row's input, and every input passed to `says` has a row.
//!
//! Not here: whether the texts agree (the tests themselves, through `errors-doc/`), and whether the
//! named tests exist (`paths.rs`).

use std::collections::BTreeMap;

use syn::visit::Visit;

use super::{Tree, Violation};

/// The document.
const DOCUMENT: &str = "docs/reference/errors.md";

/// Rows below this heading describe behaviour without a message: no test compares them.
const UNCHECKED_HEADING: &str = "## Answers without words";

/// The function that compares a message with its row, and its crate.
const SAYS: &str = "says";
const OWN_CRATE: &str = "errors-doc/";

/// A row: its line, the input, and the test.
struct ErrorRow<'tree> {
    line: usize,
    input: &'tree str,
    test: &'tree str,
}

/// Finds rows without a test call, and inputs without a row.
pub(crate) fn check(tree: &Tree) -> anyhow::Result<Vec<Violation>> {
    let mut found = Vec::new();
    let mut said: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let rows = rows(tree.text(DOCUMENT).unwrap_or_default());
    for source in tree.sources().iter().filter(|source| !source.path.starts_with(OWN_CRATE)) {
        let mut calls = SaysCalls::default();
        calls.visit_file(&source.syntax);
        for (line, input) in calls.seen {
            found.extend(
                call_error(&rows, input.as_deref()).map(|what| Violation::new(&source.path, line, what)),
            );
            said.entry(&source.path).or_default().extend(input);
        }
    }
    for (position, row) in rows.iter().enumerate() {
        let (file, _) = row.test.split_once("::").unwrap_or_default();
        if !said.get(file).is_some_and(|inputs| inputs.iter().any(|input| input == row.input)) {
            let what = format!(
                "no test in `{file}` says `{}`: name the test that does, or move the row below `{UNCHECKED_HEADING}`",
                row.input
            );
            found.push(Violation::new(DOCUMENT, row.line, what));
        }
        if rows[..position].iter().any(|other| other.input == row.input) {
            found.push(Violation::new(DOCUMENT, row.line, format!("`{}` has two rows: keep one", row.input)));
        }
    }
    Ok(found)
}

/// The error of a call, if any.
fn call_error(rows: &[ErrorRow<'_>], input: Option<&str>) -> Option<String> {
    match input {
        None => Some("write the input as a literal, so that its row can be found".to_owned()),
        Some(input) if rows.iter().any(|row| row.input == input) => None,
        Some(input) => Some(format!("`{input}` has no row in {DOCUMENT}: add it")),
    }
}

/// The rows that have a message.
fn rows(document: &str) -> Vec<ErrorRow<'_>> {
    let numbered = (1..).zip(document.lines()).take_while(|(_, line)| *line != UNCHECKED_HEADING);
    numbered.filter_map(|(line, text)| row(line, text)).collect()
}

/// A row of a table; `None` for headers, separators and other text.
fn row(line: usize, text: &str) -> Option<ErrorRow<'_>> {
    let cells: Vec<&str> = text.strip_prefix('|')?.trim_end().strip_suffix('|')?.split('|').collect();
    // The answer between the two may contain pipes.
    let (input, test) = (cells.first()?.trim(), cells.last()?.trim());
    let is_row = input != "input" && !input.starts_with("---");
    is_row.then(|| ErrorRow { line, input, test: test.trim_matches('`') })
}

/// Calls of [`SAYS`]: the line, and the input if it is a literal.
#[derive(Default)]
struct SaysCalls {
    seen: Vec<(usize, Option<String>)>,
}

impl<'ast> Visit<'ast> for SaysCalls {
    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        if let syn::Expr::Path(function) = &*call.func
            && let Some(name) = function.path.segments.last().filter(|last| last.ident == SAYS)
        {
            let input = match call.args.first() {
                Some(syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(input), .. })) => Some(input.value()),
                _ => None,
            };
            self.seen.push((name.ident.span().start().line, input));
        }
        syn::visit::visit_expr_call(self, call);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const HEAD: &str = "| input | answer | test |\n| --- | --- | --- |\n";
    const ROW: &str = "| an absent file | `cannot read \\| …` | `node/src/a.rs::absent` |\n";

    fn found(table: &str, test: &str) -> Vec<String> {
        let tree = Tree::of(&[(DOCUMENT, &format!("{HEAD}{table}")), ("node/src/a.rs", test)]);
        check(&tree).unwrap().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn refuses_rows_without_a_test_call() {
        let other = "fn a() { says(\"an absent file\", &error, &[]); }";
        assert_eq!(found(ROW, "fn absent() {}").len(), 1);
        assert_eq!(found(&ROW.replace("a.rs", "b.rs"), other).len(), 1, "said in another file");
        assert_eq!(found(&format!("{ROW}{ROW}"), other).len(), 1, "one input, one row");
        assert_eq!(found("| an absent file | prose | |\n", other).len(), 1, "a row without a test");
    }

    #[test]
    fn refuses_inputs_without_a_row() {
        let found_in =
            |call: &str| found(ROW, &format!("fn a() {{ says(\"an absent file\", &e, &[]); {call} }}"));
        assert_eq!(found_in("says(\"a full disk\", &e, &[]);").len(), 1);
        assert_eq!(found_in("kvfleet_errors_doc::says(\"a full disk\", &e, &[]);").len(), 1);
        assert!(found_in("says(name, &e, &[]);")[0].contains("literal"));
        assert!(found_in("says(&format!(\"an {x} file\"), &e, &[]);")[0].contains("literal"));
        let below = format!(
            "{ROW}\n{UNCHECKED_HEADING}\n\n{HEAD}| a full disk | goes on | `node/src/a.rs::full` |\n"
        );
        let both = "fn a() { says(\"an absent file\", &e, &[]); says(\"a full disk\", &e, &[]); }";
        assert_eq!(found(&below, both).len(), 1, "a row without words is no row for a text");
    }

    #[test]
    fn accepts_rows_and_calls_that_fit() {
        let call = "fn a() { says(\n    \"an absent file\",\n    &e,\n    &[],\n); }";
        assert!(found(ROW, call).is_empty());
        let below = format!(
            "{ROW}\n{UNCHECKED_HEADING}\n\n{HEAD}| a flipped bit | is found | `node/src/a.rs::bit` |\n"
        );
        assert!(found(&below, call).is_empty());
        let own = Tree::of(&[("errors-doc/src/lib.rs", "fn a() { says(\"no row\", &e, &[]); }")]);
        assert!(check(&own).unwrap().is_empty());
    }
}
