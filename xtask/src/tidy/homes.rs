//! Rule: a replaceable package is used in one place only, so that replacing it is one change.
//!
//! Not here: dependencies between crates (`arrows.rs`).

use syn::visit::Visit;

use super::{Tree, Violation};

/// Package (as Rust spells it) and the path prefixes of files that may use it.
const HOMES: &[(&str, &[&str])] = &[
    ("openraft", &["router/src/raft/"]),
    ("quinn", &["transport/src/quic", "benches/"]),
    ("io_uring", &["node/src/"]),
    ("cudarc", &["node/src/tiers/gpu/cuda.rs", "node/src/tiers/gpu/kernels.rs"]),
    ("opentelemetry", &["cli/src/", "net/src/trace_context.rs"]),
    ("opentelemetry_sdk", &["cli/src/"]),
    ("opentelemetry_otlp", &["cli/src/"]),
    ("plotters", &["cli/src/", "lab/src/"]),
    ("indicatif", &["cli/src/"]),
    ("axum", &["cli/src/", "engine/src/mock/", "gateway/", "benches/src/proxy", "net/src/http.rs"]),
    ("kube", &["gateway/src/endpoints/kubernetes/"]),
    ("k8s_openapi", &["gateway/src/endpoints/kubernetes/"]),
    ("tokenizers", &["gateway/src/prompt/"]),
    ("minijinja", &["gateway/src/prompt/"]),
    ("minijinja_contrib", &["gateway/src/prompt/"]),
];

/// Finds uses elsewhere.
pub(crate) fn check(tree: &Tree) -> anyhow::Result<Vec<Violation>> {
    Ok(judge(tree, HOMES))
}

fn judge(tree: &Tree, homes: &[(&str, &[&str])]) -> Vec<Violation> {
    let mut found = Vec::new();
    for source in tree.sources() {
        let mut named = PathRoots::default();
        named.visit_file(&source.syntax);
        for (package, places) in homes {
            if places.iter().any(|place| source.path.starts_with(place)) {
                continue;
            }
            if let Some((_, line)) = named.seen.iter().find(|(name, _)| name == package) {
                let what = format!("`{package}` may be used in {} only", places.join(" and "));
                found.push(Violation::new(&source.path, *line, what));
            }
        }
    }
    found
}

/// First segments of paths and imports, with their lines.
#[derive(Default)]
struct PathRoots {
    seen: Vec<(String, usize)>,
}

impl PathRoots {
    fn add(&mut self, name: &syn::Ident) {
        self.seen.push((name.to_string(), name.span().start().line));
    }
}

impl<'ast> Visit<'ast> for PathRoots {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.segments.len() > 1 {
            path.segments.iter().take(1).for_each(|segment| self.add(&segment.ident));
        }
        syn::visit::visit_path(self, path);
    }
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        match &item.tree {
            syn::UseTree::Path(path) => self.add(&path.ident),
            syn::UseTree::Name(name) => self.add(&name.ident),
            syn::UseTree::Rename(rename) => self.add(&rename.ident),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_a_second_home() {
        let homes: &[(&str, &[&str])] = &[("quinn", &["transport/src/quic"])];
        for text in
            ["use quinn::Endpoint;", "fn a(_: quinn::Endpoint) {}", "fn a() { quinn::b(); }", "use quinn;"]
        {
            assert_eq!(judge(&Tree::of(&[("router/src/a.rs", text)]), homes).len(), 1, "{text}");
            assert!(judge(&Tree::of(&[("transport/src/quic/mod.rs", text)]), homes).is_empty(), "{text}");
        }
    }
}
