//! Rule: a parameter has a name, so no function takes a tuple.
//!
//! A tuple hides two parameters behind one place and names neither at the call. Not here: tuples that are returned,
//! and what closures take, which is what an iterator gives them.

use syn::visit::Visit;

use super::tree::{is_test_file, is_test_only};
use super::{Tree, Violation};

/// Finds such parameters.
pub(crate) fn check(tree: &Tree) -> anyhow::Result<Vec<Violation>> {
    Ok(judge(tree))
}

fn judge(tree: &Tree) -> Vec<Violation> {
    let mut found = Vec::new();
    for source in tree.sources().iter().filter(|source| !is_test_file(&source.path)) {
        let mut tuples = Tuples::default();
        tuples.visit_file(&source.syntax);
        found.extend(tuples.seen.into_iter().map(|(function, line)| {
            let what =
                format!("`{function}` takes a tuple: give each part a name, or a struct to all of them");
            Violation::new(&source.path, line, what)
        }));
    }
    found
}

/// Functions that take a tuple, with the line of each.
#[derive(Default)]
struct Tuples {
    seen: Vec<(String, usize)>,
}

impl Tuples {
    fn look(&mut self, signature: &syn::Signature) {
        for input in &signature.inputs {
            if let syn::FnArg::Typed(typed) = input
                && is_tuple(&typed.ty)
            {
                self.seen.push((signature.ident.to_string(), signature.ident.span().start().line));
            }
        }
    }
}

/// Whether this is a tuple of two or more, or a reference to one.
fn is_tuple(of: &syn::Type) -> bool {
    match of {
        syn::Type::Tuple(tuple) => tuple.elems.len() > 1,
        syn::Type::Reference(reference) => is_tuple(&reference.elem),
        syn::Type::Paren(inner) => is_tuple(&inner.elem),
        _ => false,
    }
}

impl<'ast> Visit<'ast> for Tuples {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test_only(&item.attrs) {
            syn::visit::visit_item_mod(self, item);
        }
    }
    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        // A trait of others takes what it takes.
        if item.trait_.is_none() {
            syn::visit::visit_item_impl(self, item);
        }
    }
    fn visit_signature(&mut self, signature: &'ast syn::Signature) {
        self.look(signature);
        syn::visit::visit_signature(self, signature);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> usize {
        judge(&Tree::of(&[("core/src/a.rs", text)])).len()
    }

    #[test]
    fn refuses_tuples_in_every_kind_of_function() {
        assert_eq!(found("fn a((x, y): (u8, u8)) {}"), 1);
        assert_eq!(found("fn a(x: &(u8, u8), y: &mut (u8, u8)) {}"), 2);
        assert_eq!(found("struct A; impl A { fn a(&self, x: (u8, u8)) {} }"), 1);
        assert_eq!(found("trait A { fn a(&self, x: (u8, u8)); }"), 1);
    }

    #[test]
    fn accepts_units_results_closures_tests_and_traits_of_others() {
        assert_eq!(found("fn a(x: ()) -> (u8, u8) { (1, 2) }"), 0);
        assert_eq!(found("fn a() { let b = |(x, y): (u8, u8)| x + y; }"), 0);
        assert_eq!(found("fn a(x: &[(u8, u8)], y: impl Fn((u8, u8))) {}"), 0);
        assert_eq!(found("#[cfg(test)] mod tests { fn a(x: (u8, u8)) {} }"), 0);
        assert_eq!(found("impl Extend<(u8, u8)> for A { fn one(&mut self, x: (u8, u8)) {} }"), 0);
    }
}
