//! Rule: a visible limit has a doc comment that says its meaning and the reason for its value.
//!
//! Not here: whether the reason is good.

use syn::visit::Visit;

use super::tree::is_test_file;
use super::{Tree, Violation};

/// Endings that make a constant a limit or an amount.
const LIMIT_ENDINGS: [&str; 14] = [
    "_MAX",
    "_MIN",
    "_MS",
    "_US",
    "_BYTES",
    "_BLOCKS",
    "_TOKENS",
    "_SECONDS",
    "_LIMIT",
    "_COUNT",
    "_TIMEOUT",
    "_INTERVAL",
    "_CAPACITY",
    "_DEPTH",
];

/// Finds visible limits without a doc comment.
pub(crate) fn check(tree: &Tree) -> anyhow::Result<Vec<Violation>> {
    let mut found = Vec::new();
    for source in tree.sources().iter().filter(|source| !is_test_file(&source.path)) {
        let mut limits = UndocumentedLimits::default();
        limits.visit_file(&source.syntax);
        for (name, line) in limits.found {
            let what = format!("`{name}` needs a doc comment: its unit and why this number");
            found.push(Violation::new(&source.path, line, what));
        }
    }
    Ok(found)
}

/// Limits without a doc comment, with the line of each.
#[derive(Default)]
struct UndocumentedLimits {
    found: Vec<(String, usize)>,
}

impl UndocumentedLimits {
    fn check(&mut self, visibility: &syn::Visibility, attributes: &[syn::Attribute], name: &syn::Ident) {
        let is_private = matches!(visibility, syn::Visibility::Inherited);
        let text = name.to_string();
        let is_limit = LIMIT_ENDINGS.iter().any(|ending| text.ends_with(ending));
        let has_doc = attributes.iter().any(|attribute| attribute.path().is_ident("doc"));
        if !is_private && is_limit && !has_doc {
            self.found.push((text, name.span().start().line));
        }
    }
}

impl<'ast> Visit<'ast> for UndocumentedLimits {
    fn visit_item_const(&mut self, item: &'ast syn::ItemConst) {
        self.check(&item.vis, &item.attrs, &item.ident);
    }
    fn visit_impl_item_const(&mut self, item: &'ast syn::ImplItemConst) {
        self.check(&item.vis, &item.attrs, &item.ident);
    }
    fn visit_item_static(&mut self, item: &'ast syn::ItemStatic) {
        self.check(&item.vis, &item.attrs, &item.ident);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn found(text: &str) -> usize {
        check(&Tree::of(&[("core/src/a.rs", text)])).unwrap().len()
    }

    #[test]
    fn refuses_a_visible_limit_without_doc() {
        assert_eq!(found("pub const QUEUE_BLOCKS_MAX: usize = 8;"), 1);
        assert_eq!(found("pub(crate) const LEASE_MS: u64 = 8;"), 1);
        assert_eq!(found("struct A; impl A { pub const FRAME_BYTES: usize = 8; }"), 1);
        assert_eq!(found("mod inner { pub static READ_LIMIT: u8 = 1; }"), 1);
    }

    #[test]
    fn accepts_documented_and_private_ones() {
        assert_eq!(found("/// Blocks; two requests' worth.\npub const QUEUE_BLOCKS_MAX: usize = 8;"), 0);
        assert_eq!(found("const LEASE_MS: u64 = 8;"), 0);
        assert_eq!(found("pub const ALL: [u8; 1] = [1];"), 0);
    }
}
