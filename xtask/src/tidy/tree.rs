//! The repository as the rules see it: paths, texts and parsed Rust files.
//!
//! Not here: any rule. Tests can make a tree from strings, to show a rule a violation.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context;

/// Prefixes of top-level entries that are not sources.
const SKIPPED: [&str; 3] = ["target", ".git", "report"];

/// Extensions of files with their text read; for others only the path is known.
const TEXT_ENDINGS: [&str; 9] = ["rs", "md", "toml", "proto", "txt", "yml", "yaml", "sh", "lock"];

/// A parsed Rust file.
pub(crate) struct Source {
    /// Path relative to the top of the repository, with `/`.
    pub(crate) path: String,
    /// The file's text.
    pub(crate) text: String,
    /// The parsed text.
    pub(crate) syntax: syn::File,
}

/// All files that a rule may inspect.
pub(crate) struct Tree {
    root: PathBuf,
    texts: BTreeMap<String, String>,
    paths: Vec<String>,
    sources: Vec<Source>,
}

impl Tree {
    /// Reads the repository this program was built from.
    pub(crate) fn read() -> anyhow::Result<Tree> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask lies in the repository")?;
        let mut tree =
            Tree { root: root.to_owned(), texts: BTreeMap::new(), paths: Vec::new(), sources: Vec::new() };
        tree.walk(root)?;
        tree.parse()?;
        Ok(tree)
    }

    /// A tree made of the given files.
    #[cfg(test)]
    pub(crate) fn of(files: &[(&str, &str)]) -> Tree {
        let texts: BTreeMap<String, String> =
            files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect();
        let paths = texts.keys().cloned().collect();
        let mut tree = Tree { root: PathBuf::new(), texts, paths, sources: Vec::new() };
        tree.parse().expect("the test's own snippets parse");
        tree
    }

    fn walk(&mut self, folder: &Path) -> anyhow::Result<()> {
        let listing =
            std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
        for entry in listing {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let is_folder = entry.file_type()?.is_dir();
            if folder == self.root
                && SKIPPED.iter().any(|skipped| name.starts_with(skipped))
                && (is_folder || name == ".git")
            {
                continue;
            }
            let path = entry.path();
            if is_folder {
                self.walk(&path)?;
                continue;
            }
            let relative = path.strip_prefix(&self.root)?.to_string_lossy().into_owned();
            if is_text(&path) {
                let text =
                    std::fs::read_to_string(&path).with_context(|| format!("cannot read {relative}"))?;
                self.texts.insert(relative.clone(), text);
            }
            self.paths.push(relative);
        }
        self.paths.sort();
        Ok(())
    }

    fn parse(&mut self) -> anyhow::Result<()> {
        for (path, text) in &self.texts {
            if path.ends_with(".rs") {
                let syntax = syn::parse_file(text).with_context(|| format!("{path} is not Rust"))?;
                self.sources.push(Source { path: path.clone(), text: text.clone(), syntax });
            }
        }
        Ok(())
    }

    /// Top folder of the repository.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Every Rust file.
    pub(crate) fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// Path and text of every text file.
    pub(crate) fn texts(&self) -> impl Iterator<Item = (&str, &str)> {
        self.texts.iter().map(|(path, text)| (path.as_str(), text.as_str()))
    }

    /// Text of one file, if it exists.
    pub(crate) fn text(&self, path: &str) -> Option<&str> {
        self.texts.get(path).map(String::as_str)
    }

    /// Every file, relative to the top.
    pub(crate) fn paths(&self) -> &[String] {
        &self.paths
    }

    /// Whether this is a file, or a folder with at least one file.
    pub(crate) fn exists(&self, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        self.paths.iter().any(|known| {
            known.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
    }
}

/// Whether the text of this file is read. Scripts have no extension, so a name without one counts.
fn is_text(path: &Path) -> bool {
    match path.extension() {
        Some(ending) => TEXT_ENDINGS.iter().any(|known| ending == *known),
        None => true,
    }
}

/// Whether these attributes remove the item outside tests.
pub(crate) fn is_test_only(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::List(list) if list.path.is_ident("cfg") => {
            let condition = list.tokens.to_string();
            condition == "test" || condition.starts_with("all (test")
        }
        _ => false,
    })
}

/// Whether this file contains tests only, by its path or name.
pub(crate) fn is_test_file(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    path.contains("/tests/")
        || name == "tests.rs"
        || name.ends_with("_tests.rs")
        || name.ends_with("_test.rs")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_exists_when_a_file_lies_in_it() {
        let tree = Tree::of(&[("core/src/index/mod.rs", "//! x.")]);
        assert!(tree.exists("core/src/index/mod.rs"));
        assert!(tree.exists("core/src/index/"));
        assert!(tree.exists("core/src/index"));
        assert!(!tree.exists("core/src/ind"));
        assert!(!tree.exists("core/src/index.rs"));
    }

    #[test]
    fn folders_are_skipped_at_the_top_only() -> anyhow::Result<()> {
        let tree = Tree::read()?;
        assert!(tree.exists("cli/src/report/"));
        assert!(!tree.exists("target"));
        Ok(())
    }

    #[test]
    fn test_only_items_are_known() {
        let of = |text: &str| syn::parse_str::<syn::ItemMod>(text).map(|item| is_test_only(&item.attrs)).ok();
        assert_eq!(of("#[cfg(test)] mod tests {}"), Some(true));
        assert_eq!(of("#[cfg(feature = \"test\")] mod tests {}"), Some(false));
        assert_eq!(of("mod tests {}"), Some(false));
    }
}
