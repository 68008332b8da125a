//! Rule: a thing of ours has one word. Words the glossary refuses name nothing we define.
//!
//! Only names that are *defined* here are looked at; a method of someone else's type may be called
//! what they called it. Not here: the words themselves, which are the table of `docs/GLOSSARY.md`.

use anyhow::ensure;
use syn::visit::Visit;

use super::names::words;
use super::{Tree, Violation};

/// Where the words are.
const GLOSSARY: &str = "docs/GLOSSARY.md";

/// Title of the column whose words are refused.
const REFUSED_COLUMN: &str = "tidy refuses";

/// A refused word (or words in a row) and the word to use instead.
struct Refused {
    words: Vec<String>,
    instead: String,
}

/// Finds definitions named by a refused word.
pub(crate) fn check(tree: &Tree) -> anyhow::Result<Vec<Violation>> {
    let refused = refused(tree.text(GLOSSARY).unwrap_or_default())?;
    let mut found = Vec::new();
    for source in tree.sources() {
        let mut defined = Defined::default();
        defined.visit_file(&source.syntax);
        for (name, line) in defined.seen {
            let parts = words(&name);
            let hit = refused.iter().find(|r| parts.windows(r.words.len()).any(|window| window == r.words));
            if let Some(r) = hit {
                let what = format!("`{name}`: say `{}`, not `{}` ({GLOSSARY})", r.instead, r.words.join("_"));
                found.push(Violation::new(&source.path, line, what));
            }
        }
    }
    Ok(found)
}

/// Reads the table: first column the word, column [`REFUSED_COLUMN`] what it replaces.
fn refused(glossary: &str) -> anyhow::Result<Vec<Refused>> {
    let cells = |line: &str| -> Vec<String> {
        line.trim().trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
    };
    let mut column = None;
    let mut refused = Vec::new();
    for line in glossary.lines().filter(|line| line.starts_with('|')) {
        let row = cells(line);
        if let Some(position) = row.iter().position(|cell| cell == REFUSED_COLUMN) {
            column = Some(position);
            continue;
        }
        let Some(cell) = column.and_then(|position| row.get(position)) else { continue };
        for word in cell.split(',').map(|word| word.trim().trim_matches('`')).filter(|word| is_word(word)) {
            refused.push(Refused { words: words(word), instead: row[0].clone() });
        }
    }
    ensure!(!refused.is_empty(), "{GLOSSARY} has no table with a column `{REFUSED_COLUMN}`");
    Ok(refused)
}

fn is_word(cell: &str) -> bool {
    !cell.is_empty() && cell.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_')
}

/// Every name a file defines: items, fields, variants, parameters, bindings.
#[derive(Default)]
struct Defined {
    seen: Vec<(String, usize)>,
}

impl Defined {
    fn add(&mut self, name: &syn::Ident) {
        self.seen.push((name.to_string(), name.span().start().line));
    }
}

impl<'ast> Visit<'ast> for Defined {
    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.add(&item.ident);
        syn::visit::visit_item_struct(self, item);
    }
    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.add(&item.ident);
        syn::visit::visit_item_enum(self, item);
    }
    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.add(&item.ident);
        syn::visit::visit_item_trait(self, item);
    }
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.add(&item.ident);
        syn::visit::visit_item_mod(self, item);
    }
    fn visit_item_const(&mut self, item: &'ast syn::ItemConst) {
        self.add(&item.ident);
        syn::visit::visit_item_const(self, item);
    }
    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.add(&item.ident);
    }
    fn visit_variant(&mut self, variant: &'ast syn::Variant) {
        self.add(&variant.ident);
        syn::visit::visit_variant(self, variant);
    }
    fn visit_field(&mut self, field: &'ast syn::Field) {
        field.ident.iter().for_each(|name| self.add(name));
    }
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.add(&item.sig.ident);
        syn::visit::visit_item_fn(self, item);
    }
    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        self.add(&item.sig.ident);
        syn::visit::visit_trait_item_fn(self, item);
    }
    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        for member in &item.items {
            // Methods of someone else's trait carry the name that trait gave them.
            if let (syn::ImplItem::Fn(function), None) = (member, &item.trait_) {
                self.add(&function.sig.ident);
            }
            self.visit_impl_item(member);
        }
    }
    fn visit_pat_ident(&mut self, pattern: &'ast syn::PatIdent) {
        self.add(&pattern.ident);
        syn::visit::visit_pat_ident(self, pattern);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const TABLE: &str = "| word | meaning | tidy refuses |\n| --- | --- | --- |\n\
        | hit rate | share of blocks | `hit_ratio` |\n| promote | up | `onload`, `swap_in` |\n| seed | n | – |\n";

    fn found_in(text: &str) -> Vec<Violation> {
        check(&Tree::of(&[(GLOSSARY, TABLE), ("core/src/a.rs", text)])).unwrap()
    }

    #[test]
    fn refuses_synonyms_wherever_a_name_is_defined() {
        for text in [
            "struct HitRatio;",
            "enum A { SwapIn }",
            "fn onload_block() {}",
            "struct A { hit_ratio: f64 }",
            "fn a() { let onload = 1; }",
            "fn a(hit_ratio: f64) {}",
            "const HIT_RATIO_MAX: u8 = 1;",
            "struct A; impl A { fn swap_in(&self) {} }",
            "trait A { fn onload(&self); }",
        ] {
            assert_eq!(found_in(text).len(), 1, "{text}");
        }
    }

    #[test]
    fn accepts_what_others_named_and_what_only_looks_alike() {
        for text in [
            "fn a(x: u8) { x.onload(); }",
            "struct A; impl Other for A { fn onload(&self) {} }",
            "struct Hit; struct Ratio;",
            "fn swap() {}",
        ] {
            assert!(found_in(text).is_empty(), "{text}");
        }
    }

    #[test]
    fn a_glossary_without_the_column_is_an_error() {
        assert!(check(&Tree::of(&[(GLOSSARY, "| word | meaning |\n")])).is_err());
    }
}
