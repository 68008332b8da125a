//! Rule: a crate uses every package that its manifest names, and a member uses every package of the
//! workspace's list.
//!
//! Separate workspaces (`fuzz/`, `benches/peers/`) are checked too. Not here: allowed arrows
//! (`arrows.rs`), and a dependency that only tests use but that is not declared for tests.

use anyhow::Context;

use super::{Tree, Violation};

/// Tables of a manifest with dependencies.
const TABLES: [&str; 3] = ["dependencies", "dev-dependencies", "build-dependencies"];

/// Manifest and dependency that is named only for a feature of a package that others bring.
const FOR_FEATURES: [(&str, &str); 1] = [("xtask/Cargo.toml", "proc-macro2")];

/// Manifest of the workspace.
const WORKSPACE: &str = "Cargo.toml";

/// Finds dependencies without use.
pub(crate) fn check(tree: &Tree) -> anyhow::Result<Vec<Violation>> {
    let mut found = Vec::new();
    let mut named = Vec::new();
    for (path, text) in tree.texts().filter(|(path, _)| path.ends_with("/Cargo.toml")) {
        let manifest: toml::Table = text.parse().with_context(|| format!("{path} is not TOML"))?;
        let dependencies = dependencies(&manifest);
        let sources = sources(tree, path, &manifest);
        let is_unused = |name: &&String| {
            !FOR_FEATURES.contains(&(path, name.as_str())) && !sources.iter().any(|text| uses(text, name))
        };
        for name in dependencies.iter().filter(is_unused) {
            found.push(Violation::new(path, 0, format!("no source of the crate uses `{name}`: remove it")));
        }
        named.extend(dependencies);
    }
    let workspace = tree.text(WORKSPACE).unwrap_or_default();
    let workspace: toml::Table = workspace.parse().context("Cargo.toml is not TOML")?;
    let listed = workspace.get("workspace").and_then(|table| table.get("dependencies"));
    let listed = listed.and_then(toml::Value::as_table).into_iter().flat_map(toml::Table::keys);
    for name in listed.filter(|name| !named.contains(name)) {
        found.push(Violation::new(WORKSPACE, 0, format!("no member depends on `{name}`: remove it")));
    }
    Ok(found)
}

/// Names of all dependencies, those of one platform included.
fn dependencies(manifest: &toml::Table) -> Vec<String> {
    let platforms = manifest.get("target").and_then(toml::Value::as_table);
    let platforms = platforms.into_iter().flat_map(toml::Table::values).filter_map(toml::Value::as_table);
    let tables = std::iter::once(manifest).chain(platforms);
    let tables = tables.flat_map(|table| TABLES.iter().filter_map(|name| table.get(*name)?.as_table()));
    tables.flat_map(toml::Table::keys).cloned().collect()
}

/// Texts of the crate's Rust files, without those of a crate inside its folder.
fn sources<'tree>(tree: &'tree Tree, path: &str, manifest: &toml::Table) -> Vec<&'tree str> {
    let folder = path.trim_end_matches("Cargo.toml");
    // A library may have its root in the folder of the package around it.
    let lib = manifest.get("lib").and_then(|lib| lib.get("path")).and_then(toml::Value::as_str);
    let outer = lib.filter(|lib| lib.starts_with("../src/")).and_then(|_| {
        folder.trim_end_matches('/').rsplit_once('/').map(|(outer, _)| format!("{outer}/src/"))
    });
    let inner: Vec<&str> = tree
        .paths()
        .iter()
        .filter_map(|known| known.strip_suffix("Cargo.toml"))
        .filter(|other| other.len() > folder.len() && other.starts_with(folder))
        .collect();
    let is_own = |known: &str| {
        let is_inner = inner.iter().any(|inner| known.starts_with(inner));
        known.starts_with(folder) && !is_inner
            || outer.as_ref().is_some_and(|outer| known.starts_with(outer.as_str()))
    };
    let sources = tree.sources().iter().filter(|source| is_own(&source.path));
    sources.map(|source| source.text.as_str()).collect()
}

/// Whether code of this text has a path into the package, or an import of it.
fn uses(text: &str, package: &str) -> bool {
    let name = package.replace('-', "_");
    let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    let mut code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    code.any(|line| {
        line.match_indices(&name).any(|(at, _)| {
            let (before, after) = (&line[..at], &line[at + name.len()..]);
            let is_import = before.trim_end().ends_with("use") && !after.starts_with(is_word);
            !before.ends_with(is_word) && (is_import || after.trim_start().starts_with("::"))
        })
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const MANIFEST: &str = "[dependencies]\nserde-json.workspace = true\n[dev-dependencies]\nrand = \"1\"\n";

    fn found(text: &str) -> Vec<String> {
        let workspace = "[workspace.dependencies]\nserde-json = \"1\"\n";
        let files = [
            ("Cargo.toml", workspace),
            ("core/Cargo.toml", MANIFEST),
            ("core/src/lib.rs", text),
            ("core/inner/Cargo.toml", ""),
            ("core/inner/src/lib.rs", "use serde_json::Value; use rand::Rng;"),
        ];
        check(&Tree::of(&files)).unwrap().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn refuses_dependencies_without_use() {
        assert_eq!(found("use serde_json::Value;").len(), 1);
        assert_eq!(found("// serde_json::Value and rand::Rng").len(), 2);
        assert_eq!(found("fn operand(rand: u8) { my_rand::new(); let serde_json = 1; }").len(), 2);
        let files = [("Cargo.toml", "[workspace.dependencies]\nserde = \"1\"\n")];
        assert_eq!(check(&Tree::of(&files)).unwrap().len(), 1);
    }

    #[test]
    fn accepts_paths_and_imports() {
        assert!(found("use rand; fn a() -> serde_json::Value {}").is_empty());
        assert!(found("#[serde_json::test] fn a() { rand::random() }").is_empty());
    }
}
