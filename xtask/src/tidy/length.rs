//! Rule: a function has at most 70 lines. Longer ones are listed by name in a file that only shrinks.
//!
//! Lines are counted from the signature to the closing brace. Tests are not counted: a scenario may
//! be long. Not here: length of files, which is a habit and not a limit.

use anyhow::Context;
use syn::visit::Visit;

use super::tree::{is_test_file, is_test_only};
use super::{Tree, Violation};

/// Longest function in lines: fits on a screen.
const FUNCTION_LINES_MAX: usize = 70;

/// Minimum length of a listed function; shorter ones must be split instead.
const FUNCTION_LINES_LISTED: usize = 76;

/// The list: `path name lines`, one function a line.
const LIST: &str = "xtask/long_functions.txt";

/// Maximum number of entries. Lower it with every removed entry; never raise it.
const LISTED_FUNCTIONS_MAX: usize = 0;

/// A function of the tree.
struct Function {
    path: String,
    name: String,
    line: usize,
    lines: usize,
}

/// An entry of the list.
struct ListEntry {
    line: usize,
    path: String,
    name: String,
    lines: usize,
}

impl ListEntry {
    fn matches(&self, function: &Function) -> bool {
        self.path == function.path && self.name == function.name
    }
}

/// Finds functions that are too long, and outdated entries of the list.
pub(crate) fn check(tree: &Tree) -> anyhow::Result<Vec<Violation>> {
    judge(tree, LISTED_FUNCTIONS_MAX)
}

fn judge(tree: &Tree, listed_max: usize) -> anyhow::Result<Vec<Violation>> {
    let functions: Vec<Function> = tree
        .sources()
        .iter()
        .filter(|source| !is_test_file(&source.path))
        .flat_map(|source| functions(&source.path, &source.syntax))
        .collect();
    let list = parse_list(tree.text(LIST).unwrap_or_default())?;
    let mut found: Vec<Violation> =
        functions.iter().filter_map(|function| too_long(function, &list)).collect();
    for entry in &list {
        if !functions.iter().any(|f| entry.matches(f) && f.lines >= FUNCTION_LINES_LISTED) {
            let what = format!("`{}` is shorter now: remove the entry", entry.name);
            found.push(Violation::new(LIST, entry.line, what));
        }
    }
    if list.len() > listed_max {
        found.push(Violation::new(
            LIST,
            0,
            format!("{} entries, at most {listed_max}: the list may only shrink", list.len()),
        ));
    }
    Ok(found)
}

fn too_long(function: &Function, list: &[ListEntry]) -> Option<Violation> {
    let limit = match list.iter().find(|entry| entry.matches(function)) {
        Some(entry) if function.lines >= FUNCTION_LINES_LISTED => entry.lines,
        _ => FUNCTION_LINES_MAX,
    };
    (function.lines > limit).then(|| {
        let what =
            format!("`{}` has {} lines, limit {limit}: split it by situation", function.name, function.lines);
        Violation::new(&function.path, function.line, what)
    })
}

fn parse_list(text: &str) -> anyhow::Result<Vec<ListEntry>> {
    let mut list = Vec::new();
    for (position, line) in text.lines().enumerate() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let explain = || format!("{LIST}:{}: expected `path name lines`, found `{line}`", position + 1);
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [path, name, lines] = fields[..] else { anyhow::bail!(explain()) };
        let lines = lines.parse().with_context(explain)?;
        list.push(ListEntry { line: position + 1, path: path.to_owned(), name: name.to_owned(), lines });
    }
    Ok(list)
}

fn functions(path: &str, file: &syn::File) -> Vec<Function> {
    let mut collector = Collector { path: path.to_owned(), owner: String::new(), seen: Vec::new() };
    collector.visit_file(file);
    collector.seen
}

/// Collects every function with a body outside test modules.
struct Collector {
    path: String,
    owner: String,
    seen: Vec<Function>,
}

impl Collector {
    fn add(&mut self, signature: &syn::Signature, block: &syn::Block) {
        let line = signature.fn_token.span.start().line;
        let end = block.brace_token.span.close().end().line;
        let name = match self.owner.as_str() {
            "" => signature.ident.to_string(),
            owner => format!("{owner}::{}", signature.ident),
        };
        self.seen.push(Function { path: self.path.clone(), name, line, lines: end + 1 - line });
    }
}

impl<'ast> Visit<'ast> for Collector {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test_only(&item.attrs) {
            syn::visit::visit_item_mod(self, item);
        }
    }
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.add(&item.sig, &item.block);
        syn::visit::visit_item_fn(self, item);
    }
    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        let outer = std::mem::take(&mut self.owner);
        if let syn::Type::Path(path) = &*item.self_ty {
            self.owner =
                path.path.segments.last().map(|segment| segment.ident.to_string()).unwrap_or_default();
        }
        syn::visit::visit_item_impl(self, item);
        self.owner = outer;
    }
    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.add(&item.sig, &item.block);
        syn::visit::visit_impl_item_fn(self, item);
    }
    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.add(&item.sig, block);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// A function of exactly this many lines.
    fn function(lines: usize) -> String {
        format!("fn long() {{\n{}}}\n", "    step();\n".repeat(lines - 2))
    }

    fn found(lines: usize, list: &str) -> usize {
        let tree = Tree::of(&[("core/src/a.rs", &function(lines)), (LIST, list)]);
        judge(&tree, 1).unwrap().len()
    }

    #[test]
    fn refuses_long_functions_even_listed_ones_just_above_the_limit() {
        assert_eq!(found(70, ""), 0);
        assert_eq!(found(71, ""), 1);
        assert_eq!(found(100, ""), 1);
        assert_eq!(found(100, "core/src/a.rs long 100\n"), 0);
        // Too short for the list: the function is too long, and the entry is invalid.
        assert_eq!(found(75, "core/src/a.rs long 75\n"), 2);
    }

    #[test]
    fn the_list_only_shrinks() {
        assert_eq!(found(101, "core/src/a.rs long 100\n"), 1, "grew");
        assert_eq!(found(10, "core/src/a.rs long 100\n"), 1, "was shortened, entry stayed");
        assert_eq!(found(10, "core/src/a.rs gone 100\n"), 1, "does not exist");
        let both = "core/src/a.rs long 100\ncore/src/b.rs long 100\n";
        let tree =
            Tree::of(&[("core/src/a.rs", &function(100)), ("core/src/b.rs", &function(100)), (LIST, both)]);
        assert_eq!(judge(&tree, 2).unwrap().len(), 0);
        assert_eq!(judge(&tree, 1).unwrap().len(), 1, "one entry too many");
    }

    #[test]
    fn methods_count_and_tests_do_not() {
        let method = format!("struct A; impl A {{ {} }}", function(71));
        let test = format!("#[cfg(test)] mod tests {{ {} }}", function(300));
        assert_eq!(judge(&Tree::of(&[("core/src/a.rs", &method)]), 0).unwrap().len(), 1);
        assert_eq!(judge(&Tree::of(&[("core/src/a.rs", &test)]), 0).unwrap().len(), 0);
        assert_eq!(judge(&Tree::of(&[("core/src/a/tests.rs", &function(300))]), 0).unwrap().len(), 0);
    }

    #[test]
    fn a_list_that_cannot_be_read_is_an_error() {
        assert!(parse_list("core/src/a.rs long").is_err());
        assert!(parse_list("core/src/a.rs long many").is_err());
    }
}
