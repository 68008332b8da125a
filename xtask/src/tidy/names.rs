//! Rule: names of files and types contain no meaningless words.
//!
//! Not here: wrong words for our concepts (`glossary.rs`).

use syn::visit::Visit;

use super::{Tree, Violation};

/// Meaningless words; a file or type with such a name grows without limit.
const EMPTY_WORDS: [&str; 9] =
    ["manager", "helper", "helpers", "util", "utils", "common", "misc", "v2", "stuff"];

/// Finds such files and types.
pub(crate) fn check(tree: &Tree) -> anyhow::Result<Vec<Violation>> {
    let mut found = Vec::new();
    for path in tree.paths() {
        if let Some(word) = path.split(['/', '.', '-', '_']).find(|word| EMPTY_WORDS.contains(word)) {
            found.push(Violation::new(path, 0, format!("`{word}` in a path: name its contents")));
        }
    }
    for source in tree.sources() {
        for (name, line) in defined(&source.syntax) {
            if let Some(word) = words(&name).into_iter().find(|word| EMPTY_WORDS.contains(&word.as_str())) {
                found.push(Violation::new(
                    &source.path,
                    line,
                    format!("`{word}` in `{name}`: name its purpose"),
                ));
            }
        }
    }
    Ok(found)
}

/// Lower-case words of a name in either case style: `HitRatio`, `hit_ratio` and `HIT_RATIO` alike.
pub(crate) fn words(name: &str) -> Vec<String> {
    let mut split = String::new();
    let mut last_was_lower = false;
    for letter in name.chars() {
        if letter.is_uppercase() && last_was_lower {
            split.push('_');
        }
        last_was_lower = letter.is_lowercase() || letter.is_ascii_digit();
        split.extend(letter.to_lowercase());
    }
    split.split('_').filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// Names of the types and modules of a file, with the line of each. Associated types belong to their
/// trait and are left out.
pub(crate) fn defined(file: &syn::File) -> Vec<(String, usize)> {
    let mut types = TypeNames::default();
    types.visit_file(file);
    types.seen
}

#[derive(Default)]
struct TypeNames {
    seen: Vec<(String, usize)>,
}

impl TypeNames {
    fn add(&mut self, name: &syn::Ident) {
        self.seen.push((name.to_string(), name.span().start().line));
    }
}

impl<'ast> Visit<'ast> for TypeNames {
    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.add(&item.ident);
    }
    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.add(&item.ident);
    }
    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.add(&item.ident);
    }
    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.add(&item.ident);
    }
    fn visit_item_union(&mut self, item: &'ast syn::ItemUnion) {
        self.add(&item.ident);
    }
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.add(&item.ident);
        syn::visit::visit_item_mod(self, item);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn refuses_empty_words() {
        let text = "//! x.\nstruct CacheManager;\nenum KvUtils {}\nmod common {}\ntrait PathHelper {}";
        assert_eq!(check(&Tree::of(&[("core/src/a.rs", text)])).unwrap().len(), 4);
        assert_eq!(check(&Tree::of(&[("core/src/block_utils.rs", "")])).unwrap().len(), 1);
        assert_eq!(check(&Tree::of(&[("docs/misc/notes.md", "")])).unwrap().len(), 1);
    }

    #[test]
    fn accepts_names_that_only_contain_the_letters() {
        let text = "//! x.\nstruct Commonality;\nstruct Utilisation;";
        assert!(check(&Tree::of(&[("core/src/miscount.rs", text)])).unwrap().is_empty());
    }

    #[test]
    fn words_of_a_name() {
        assert_eq!(words("HitRatio"), ["hit", "ratio"]);
        assert_eq!(words("HIT_RATIO_MAX"), ["hit", "ratio", "max"]);
        assert_eq!(words("h2_index"), ["h2", "index"]);
    }
}
