//! Rule: a file is found by its path. No `#[path]` in sources, and a module with a folder is that folder's `mod.rs`.
//!
//! Not here: files that no module names (`reach.rs`).

use super::{Tree, Violation};

/// Finds modules that lie elsewhere than their name says, and modules beside their folder.
pub(crate) fn check(tree: &Tree) -> anyhow::Result<Vec<Violation>> {
    let mut found = Vec::new();
    for source in tree.sources() {
        for (position, line) in source.text.lines().enumerate() {
            if line.trim_start().starts_with(concat!("#[pa", "th = ")) {
                let what = "a module's file is named by the module: move the file";
                found.push(Violation::new(&source.path, position + 1, what));
            }
        }
        if let Some(folder) = source.path.strip_suffix(".rs")
            && tree.sources().iter().any(|other| is_module_of(&other.path, folder))
        {
            let what = format!("its folder has modules of it: make it `{folder}/mod.rs`");
            found.push(Violation::new(&source.path, 0, what));
        }
    }
    Ok(found)
}

/// Whether this file is a module below `folder`; a `main.rs` there begins a program of its own.
fn is_module_of(path: &str, folder: &str) -> bool {
    path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/') && rest != "/main.rs")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn found(files: &[(&str, &str)]) -> usize {
        check(&Tree::of(files)).unwrap().len()
    }

    #[test]
    fn refuses_paths_and_modules_beside_their_folder() {
        assert_eq!(found(&[("core/src/a.rs", concat!("#[pa", "th = \"b.rs\"]\nmod c;"))]), 1);
        assert_eq!(found(&[("core/src/a.rs", "mod b;"), ("core/src/a/b.rs", "")]), 1);
    }

    #[test]
    fn accepts_folders_with_their_module() {
        assert_eq!(found(&[("core/src/a/mod.rs", "mod b;"), ("core/src/a/b.rs", "")]), 0);
        assert_eq!(found(&[("core/src/a.rs", ""), ("core/src/ab.rs", "")]), 0);
    }
}
