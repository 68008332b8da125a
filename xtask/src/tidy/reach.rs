//! Rule: every Rust file is part of a crate, reached by a chain of `mod` from a target's root.
//!
//! Not here: unused items, which the compiler reports.

use std::collections::BTreeSet;

use super::tree::Source;
use super::{Tree, Violation};

/// Finds files that no target reaches.
pub(crate) fn check(tree: &Tree) -> anyhow::Result<Vec<Violation>> {
    let mut reached = BTreeSet::new();
    for root in tree.sources().iter().filter(|source| is_root(&source.path)) {
        mark_reachable(tree, root, &mut reached);
    }
    let dead = tree.sources().iter().filter(|source| !reached.contains(source.path.as_str()));
    Ok(dead
        .map(|source| Violation::new(&source.path, 0, "no `mod` reaches this file: name it or remove it"))
        .collect())
}

/// Packages inside the folder of another one, under the same rules.
const INNER_PACKAGES: [&str; 2] = ["benches/peers/", "client/c/"];

/// Roots that cargo finds by itself: `src/lib.rs`, `src/main.rs`, `build.rs`, and the files
/// directly in `src/bin`, `tests`, `benches` and `examples` of a package.
fn is_root(path: &str) -> bool {
    if let Some(inner) = INNER_PACKAGES.iter().find_map(|package| path.strip_prefix(package)) {
        return is_root(&format!("inner/{inner}"));
    }
    let parts: Vec<&str> = path.split('/').collect();
    let by_folder = |folder: &str| matches!(folder, "tests" | "benches" | "examples");
    match parts[..] {
        [_, "src", "bin", _] | [_, "src", "bin", _, "main.rs"] => true,
        [_, folder, _, "main.rs"] | [_, folder, _] if by_folder(folder) => true,
        [_, "src", name] => matches!(name, "lib.rs" | "main.rs"),
        [_, name] => name == "build.rs",
        _ => false,
    }
}

fn mark_reachable<'tree>(tree: &'tree Tree, source: &'tree Source, reached: &mut BTreeSet<&'tree str>) {
    if !reached.insert(&source.path) {
        return;
    }
    let folder = source.path.rsplit_once('/').map_or("", |(folder, _)| folder);
    let name = source.path.rsplit('/').next().unwrap_or_default();
    // `a/mod.rs` and roots declare files beside themselves, `a.rs` declares files in `a/`.
    let base = match name {
        "mod.rs" => folder.to_owned(),
        _ if is_root(&source.path) => folder.to_owned(),
        _ => source.path.trim_end_matches(".rs").to_owned(),
    };
    for declared in declared_files(&source.syntax.items, folder, &base) {
        if let Some(next) = tree.sources().iter().find(|source| declared.contains(&source.path)) {
            mark_reachable(tree, next, reached);
        }
    }
}

/// For every `mod name;` below these items, the paths its file may have.
fn declared_files(items: &[syn::Item], folder: &str, base: &str) -> Vec<Vec<String>> {
    let mut files = Vec::new();
    for item in items {
        let syn::Item::Mod(module) = item else { continue };
        let name = module.ident.to_string();
        match (&module.content, explicit_path(&module.attrs)) {
            (Some((_, inner)), _) => files.extend(declared_files(inner, folder, &format!("{base}/{name}"))),
            (None, Some(path)) => files.push(vec![format!("{folder}/{path}")]),
            (None, None) => files.push(vec![format!("{base}/{name}.rs"), format!("{base}/{name}/mod.rs")]),
        }
    }
    files
}

/// The file named by `#[path = "…"]`.
fn explicit_path(attributes: &[syn::Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| match &attribute.meta {
        syn::Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
            syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(path), .. }) => Some(path.value()),
            _ => None,
        },
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn dead(files: &[(&str, &str)]) -> Vec<String> {
        check(&Tree::of(files)).unwrap().into_iter().map(|violation| violation.path).collect()
    }

    #[test]
    fn refuses_an_unreachable_file() {
        let files = [("core/src/lib.rs", "mod a;"), ("core/src/a.rs", ""), ("core/src/b.rs", "")];
        assert_eq!(dead(&files), ["core/src/b.rs"]);
        let files = [("core/src/lib.rs", "mod a;"), ("core/src/a/mod.rs", ""), ("core/src/a/b.rs", "")];
        assert_eq!(dead(&files), ["core/src/a/b.rs"]);
    }

    #[test]
    fn knows_the_package_inside_another() {
        let files = [
            ("benches/src/main.rs", ""),
            ("benches/peers/src/main.rs", "mod a;"),
            ("benches/peers/src/a.rs", ""),
            ("benches/peers/src/b.rs", ""),
            ("benches/other/src/main.rs", ""),
        ];
        assert_eq!(dead(&files), ["benches/other/src/main.rs", "benches/peers/src/b.rs"]);
    }

    #[test]
    fn follows_every_way_to_name_a_file() {
        let files = [
            ("core/src/lib.rs", "mod a; mod inline { mod deep; } #[cfg(test)] #[path = \"odd.rs\"] mod c;"),
            ("core/src/a.rs", "mod b;"),
            ("core/src/a/b.rs", ""),
            ("core/src/inline/deep.rs", ""),
            ("core/src/odd.rs", ""),
            ("core/tests/seeded.rs", ""),
            ("core/src/bin/tool.rs", ""),
            ("core/build.rs", ""),
        ];
        assert!(dead(&files).is_empty());
    }
}
