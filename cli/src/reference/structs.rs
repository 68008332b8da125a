//! Structures and enumerations of the sources, with the documentation of their fields.
//!
//! Not here: default values, which the program itself gives (`configuration.rs`).

use std::collections::BTreeMap;
use std::path::Path;

use super::root;

/// Folders of the crates with configuration.
const CRATES: [&str; 6] = ["cli", "router", "gateway", "node", "engine", "proto"];

/// A field of a structure.
#[derive(Clone)]
pub(super) struct Field {
    pub(super) name: String,
    pub(super) kind: syn::Type,
    pub(super) meaning: String,
    pub(super) is_flattened: bool,
}

/// All structures and enumerations by crate and name.
pub(super) struct Definitions {
    structs: BTreeMap<TypeName, Vec<Field>>,
    enums: BTreeMap<TypeName, Vec<String>>,
}

/// Name of a type, in the crate that defines it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TypeName {
    pub(super) krate: String,
    pub(super) name: String,
}

impl Definitions {
    /// Reads the sources.
    pub(super) fn read() -> Definitions {
        let mut all = Definitions { structs: BTreeMap::new(), enums: BTreeMap::new() };
        for krate in CRATES {
            all.read_folder(krate, &root().join(krate).join("src"));
        }
        all
    }

    fn read_folder(&mut self, krate: &str, folder: &Path) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                self.read_folder(krate, &path);
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                let file = syn::parse_file(&std::fs::read_to_string(&path).unwrap()).unwrap();
                file.items.iter().for_each(|item| self.add(krate, item));
            }
        }
    }

    fn add(&mut self, krate: &str, item: &syn::Item) {
        let named = |name: &syn::Ident| TypeName { krate: krate.to_owned(), name: name.to_string() };
        match item {
            syn::Item::Struct(item) => {
                self.structs.insert(named(&item.ident), item.fields.iter().filter_map(field).collect());
            }
            syn::Item::Enum(item) => {
                let style = serde_text(&item.attrs, "rename_all").unwrap_or_default();
                let names = item.variants.iter().map(|variant| {
                    let renamed = serde_text(&variant.attrs, "rename");
                    renamed.unwrap_or_else(|| in_style(&variant.ident.to_string(), &style))
                });
                self.enums.insert(named(&item.ident), names.collect());
            }
            _ => {}
        }
    }

    /// Definition with this name, if possible in the same crate.
    fn find<'all, T>(all: &'all BTreeMap<TypeName, T>, wanted: &TypeName) -> Option<TypeNameAnd<'all, T>> {
        let named = |name: &&TypeName| name.name == wanted.name;
        let name = match all.get_key_value(wanted) {
            Some((name, _)) => name,
            None => all.keys().find(named)?,
        };
        Some(TypeNameAnd { name, definition: all.get(name)? })
    }

    /// Fields of a structure.
    pub(super) fn fields(&self, wanted: &TypeName) -> Option<TypeNameAnd<'_, Vec<Field>>> {
        Self::find(&self.structs, wanted)
    }

    /// Values of an enumeration, as a configuration spells them.
    pub(super) fn values(&self, wanted: &TypeName) -> Option<&[String]> {
        Self::find(&self.enums, wanted).map(|found| found.definition.as_slice())
    }
}

/// A definition and where it was found.
pub(super) struct TypeNameAnd<'all, T> {
    pub(super) name: &'all TypeName,
    pub(super) definition: &'all T,
}

fn field(field: &syn::Field) -> Option<Field> {
    let name = field.ident.as_ref()?.to_string();
    let name = serde_text(&field.attrs, "rename").unwrap_or(name);
    let is_flattened = serde_words(&field.attrs).iter().any(|word| word == "flatten");
    Some(Field { name, kind: field.ty.clone(), meaning: documentation(&field.attrs), is_flattened })
}

/// The documentation comment on one line, without the marks of links.
fn documentation(attributes: &[syn::Attribute]) -> String {
    let mut text = String::new();
    for attribute in attributes {
        let syn::Meta::NameValue(pair) = &attribute.meta else { continue };
        let syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(line), .. }) = &pair.value else { continue };
        if pair.path.is_ident("doc") {
            text.push_str(&line.value());
            text.push(' ');
        }
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace("[`", "`").replace("`]", "`")
}

/// The tokens of all `serde` attributes.
fn serde_words(attributes: &[syn::Attribute]) -> Vec<String> {
    let mut words = Vec::new();
    for attribute in attributes {
        if let syn::Meta::List(list) = &attribute.meta
            && list.path.is_ident("serde")
        {
            let text = list.tokens.to_string();
            words.extend(text.split([',', ' ', '=']).filter(|word| !word.is_empty()).map(str::to_owned));
        }
    }
    words
}

/// The text that a `serde` attribute gives to a key.
fn serde_text(attributes: &[syn::Attribute], key: &str) -> Option<String> {
    let words = serde_words(attributes);
    let at = words.iter().position(|word| word == key)?;
    words.get(at + 1).map(|text| text.trim_matches('"').to_owned())
}

/// Name of a variant in a style of `rename_all`.
fn in_style(name: &str, style: &str) -> String {
    match style {
        "lowercase" => name.to_lowercase(),
        "kebab-case" => {
            let mut text = String::new();
            for letter in name.chars() {
                if letter.is_uppercase() && !text.is_empty() {
                    text.push('-');
                }
                text.extend(letter.to_lowercase());
            }
            text
        }
        _ => name.to_owned(),
    }
}
