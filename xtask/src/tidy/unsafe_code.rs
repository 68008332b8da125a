//! Rule: only the listed files contain unsafe code, and every listed file has some.
//!
//! Not here: whether a block is justified (clippy requires a `SAFETY` comment on each).

use syn::visit::Visit;

use super::{Tree, Violation};

/// Files that may contain unsafe code. Adding one needs an ADR.
const UNSAFE_FILES: &[&str] = &[
    "client/c/src/calls.rs",
    "client/c/src/entry.rs",
    "client/c/src/raw.rs",
    "client/c/src/slices.rs",
    "client/c/tests/hostile/main.rs",
    "client/c/tests/hostile/prefill.rs",
    "cpu/src/bytes.rs",
    "cpu/src/cache.rs",
    "cpu/src/copy/avx512.rs",
    "cpu/src/copy/mod.rs",
    "cpu/src/copy/shared.rs",
    "node/src/arena/mod.rs",
    "node/src/arena/memory.rs",
    "node/src/tiers/gpu/cuda.rs",
    "node/src/tiers/gpu/kernels.rs",
    "node/src/tiers/ssd/buffer.rs",
    "node/src/tiers/ssd/ring/mod.rs",
    "node/src/tiers/ssd/ring/registered.rs",
    "rdma/src/memory.rs",
    "rdma/src/verbs.rs",
    "transport/src/shm/mapping.rs",
];

/// Roots of the crates that forbid unsafe code altogether (docs/adr/0081).
const FORBIDDING_ROOTS: &[&str] = &["core/src/lib.rs", "proto/src/lib.rs"];

/// Finds unsafe code in other files, listed files without any, and roots that do not forbid it.
pub(crate) fn check(tree: &Tree) -> anyhow::Result<Vec<Violation>> {
    let mut found = judge(tree, UNSAFE_FILES);
    found.extend(permissive_roots(tree, FORBIDDING_ROOTS));
    Ok(found)
}

/// Finds roots without `#![forbid(unsafe_code)]`.
fn permissive_roots(tree: &Tree, roots: &[&str]) -> Vec<Violation> {
    let forbids = |attribute: &syn::Attribute| {
        attribute.path().is_ident("forbid")
            && attribute.parse_args::<syn::Path>().is_ok_and(|lint| lint.is_ident("unsafe_code"))
    };
    let forbidding: Vec<&str> = tree
        .sources()
        .iter()
        .filter(|source| source.syntax.attrs.iter().any(forbids))
        .map(|source| source.path.as_str())
        .collect();
    let permissive = roots.iter().filter(|root| !forbidding.contains(root));
    permissive.map(|root| Violation::new(root, 0, "needs `#![forbid(unsafe_code)]`")).collect()
}

fn judge(tree: &Tree, allowed: &[&str]) -> Vec<Violation> {
    let mut found = Vec::new();
    for source in tree.sources() {
        let mut places = UnsafeLines::default();
        places.visit_file(&source.syntax);
        let is_allowed = allowed.contains(&source.path.as_str());
        match places.lines.first() {
            Some(line) if !is_allowed => {
                let what = "unsafe code outside the listed files (xtask/src/tidy/unsafe_code.rs)";
                found.push(Violation::new(&source.path, *line, what));
            }
            None if is_allowed => {
                found.push(Violation::new(
                    &source.path,
                    0,
                    "listed for unsafe code but has none: remove it from the list",
                ));
            }
            _ => {}
        }
    }
    for path in allowed.iter().filter(|path| !tree.exists(path)) {
        found.push(Violation::new(path, 0, "listed for unsafe code but does not exist"));
    }
    found
}

/// Lines with unsafe code.
#[derive(Default)]
struct UnsafeLines {
    lines: Vec<usize>,
}

impl<'ast> Visit<'ast> for UnsafeLines {
    fn visit_expr_unsafe(&mut self, block: &'ast syn::ExprUnsafe) {
        self.lines.push(block.unsafe_token.span.start().line);
    }
    fn visit_signature(&mut self, signature: &'ast syn::Signature) {
        self.lines.extend(signature.unsafety.iter().map(|token| token.span.start().line));
    }
    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        self.lines.extend(item.unsafety.iter().map(|token| token.span.start().line));
        syn::visit::visit_item_impl(self, item);
    }
    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.lines.extend(item.unsafety.iter().map(|token| token.span.start().line));
        syn::visit::visit_item_trait(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_unsafe_code_elsewhere() {
        for text in [
            "fn a() { unsafe { b() } }",
            "unsafe fn a() {}",
            "struct A; unsafe impl Send for A {}",
            "unsafe trait A {}",
            "struct A; impl A { fn a() { let _ = [1].map(|_| unsafe { b() }); } }",
        ] {
            let tree = Tree::of(&[("core/src/a.rs", text)]);
            assert_eq!(judge(&tree, &[]).len(), 1, "{text}");
            assert!(judge(&tree, &["core/src/a.rs"]).is_empty(), "{text}");
        }
    }

    #[test]
    fn refuses_a_root_that_permits_unsafe_code() {
        for (text, expected) in [
            ("#![forbid(unsafe_code)] fn a() {}", 0),
            ("#![deny(unsafe_code)] fn a() {}", 1),
            ("fn a() {}", 1),
        ] {
            let tree = Tree::of(&[("core/src/lib.rs", text)]);
            assert_eq!(permissive_roots(&tree, &["core/src/lib.rs"]).len(), expected, "{text}");
        }
        assert_eq!(permissive_roots(&Tree::of(&[]), &["core/src/lib.rs"]).len(), 1, "no such file");
    }

    #[test]
    fn refuses_a_listed_file_without_unsafe_code() {
        let tree = Tree::of(&[("core/src/a.rs", "fn a() {}")]);
        assert_eq!(judge(&tree, &["core/src/a.rs", "core/src/gone.rs"]).len(), 2);
    }
}
