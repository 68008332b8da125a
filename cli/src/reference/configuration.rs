//! The page on configuration keys: names and meanings from the sources, defaults from the program.

use std::collections::BTreeSet;

use kvfleet_engine::mock::InstanceConfig;
use kvfleet_gateway::GatewayConfig;
use kvfleet_node::NodeConfig;
use kvfleet_router::RouterConfig;
use serde::Serialize;
use serde_json::Value as Json;

use super::structs::{Definitions, Field, TypeName, TypeNameAnd};
use super::{check, head, opening, row};
use crate::config::ProcessConfig;

/// A table of the page.
struct Part {
    title: &'static str,
    introduction: &'static str,
    krate: &'static str,
    name: &'static str,
    /// Beginning of every key.
    prefix: &'static str,
    defaults: Json,
}

/// A key of the page.
struct Key {
    name: String,
    kind: String,
    default: String,
    meaning: String,
}

fn json<T: Default + Serialize>() -> Json {
    serde_json::to_value(T::default()).unwrap()
}

fn parts() -> [Part; 5] {
    [
        Part {
            title: "Router",
            introduction: "Keys of `kvfleet router`.",
            krate: "router",
            name: "RouterConfig",
            prefix: "",
            defaults: json::<RouterConfig>(),
        },
        Part {
            title: "Gateway",
            introduction: "Keys of `kvfleet router`, whose process has the gateway.",
            krate: "gateway",
            name: "GatewayConfig",
            prefix: "gateway.",
            defaults: json::<GatewayConfig>(),
        },
        Part {
            title: "Node",
            introduction: "Keys of `kvfleet node`.",
            krate: "node",
            name: "NodeConfig",
            prefix: "",
            defaults: json::<NodeConfig>(),
        },
        Part {
            title: "Mock instance",
            introduction: "Keys of `kvfleet instance`. They set the client library of that process too.",
            krate: "engine",
            name: "InstanceConfig",
            prefix: "",
            defaults: json::<InstanceConfig>(),
        },
        Part {
            title: "Every process",
            introduction: "Keys of all three.",
            krate: "cli",
            name: "ProcessConfig",
            prefix: "process.",
            defaults: json::<ProcessConfig>(),
        },
    ]
}

#[test]
fn the_page_on_configuration_is_current() {
    let definitions = Definitions::read();
    let mut text = opening("Configuration keys", "the configuration structures and their defaults");
    text.push_str("\nThe [guide](../guide/configure.md) says how to set a key. ");
    text.push_str("`name[].key` is a key of each entry of the\nlist `name`. ");
    text.push_str("A default of – means that the key has no value unless it is set,\n");
    text.push_str("or belongs to an entry of a list.\n");
    for part in parts() {
        text.push_str(&format!("\n## {}\n\n{}\n", part.title, part.introduction));
        text.push_str(&head(&["key", "type", "default", "meaning"]));
        let keys = part.keys(&definitions);
        assert_eq!(names_of_program(&part), names_of_page(&keys), "{}", part.title);
        for Key { name, kind, default, meaning } in keys {
            text.push_str(&row(&[&format!("`{name}`"), &kind, &default, &meaning]));
        }
    }
    check("configuration.md", &text);
}

/// Keys of the program outside lists.
fn names_of_program(part: &Part) -> BTreeSet<String> {
    fn collect(level: &Json, prefix: &str, found: &mut BTreeSet<String>) {
        for (name, value) in level.as_object().into_iter().flatten() {
            found.insert(format!("{prefix}{name}"));
            collect(value, &format!("{prefix}{name}."), found);
        }
    }
    let mut found = BTreeSet::new();
    collect(&part.defaults, part.prefix, &mut found);
    found
}

/// Keys of the page outside lists.
fn names_of_page(keys: &[Key]) -> BTreeSet<String> {
    keys.iter().map(|key| key.name.clone()).filter(|name| !name.contains("[]")).collect()
}

impl Part {
    fn keys(&self, definitions: &Definitions) -> Vec<Key> {
        let of = TypeName { krate: self.krate.to_owned(), name: self.name.to_owned() };
        let mut keys = Vec::new();
        Table { definitions, prefix: self.prefix.to_owned(), defaults: Some(&self.defaults) }
            .add(&of, &mut keys);
        keys
    }
}

/// A table of keys with its position in the file and its defaults.
struct Table<'all> {
    definitions: &'all Definitions,
    prefix: String,
    /// Absent for the entries of lists.
    defaults: Option<&'all Json>,
}

impl Table<'_> {
    fn add(&self, of: &TypeName, keys: &mut Vec<Key>) {
        let TypeNameAnd { name: of, definition } =
            self.definitions.fields(of).unwrap_or_else(|| panic!("{of:?} is not a structure"));
        for field in definition {
            self.add_field(of, field, keys);
        }
    }

    fn add_field(&self, of: &TypeName, field: &Field, keys: &mut Vec<Key>) {
        let kind = Kind::of(&field.kind);
        let inner = TypeName { krate: of.krate.clone(), name: kind.name.clone() };
        let is_table = self.definitions.fields(&inner).is_some();
        let default = self.defaults.and_then(|defaults| defaults.get(&field.name));
        let name = format!("{}{}", self.prefix, field.name);
        assert!(!field.is_flattened, "{name}: list the flattened structure as a part");
        assert!(!field.meaning.is_empty(), "{name} has no documentation");
        let values = self.definitions.values(&inner).unwrap_or_default();
        keys.push(Key {
            name: name.clone(),
            kind: kind.describe(is_table, values),
            default: describe_default(default, is_table),
            meaning: field.meaning.clone(),
        });
        if is_table {
            let mark = if kind.is_list { "[]." } else { "." };
            let defaults = default.filter(|_| !kind.is_list);
            Table { definitions: self.definitions, prefix: name + mark, defaults }.add(&inner, keys);
        }
    }
}

/// A type as a configuration has it.
struct Kind {
    /// Last part of its path in Rust, of an entry if it is a list.
    name: String,
    is_list: bool,
}

impl Kind {
    fn of(kind: &syn::Type) -> Kind {
        let syn::Type::Path(path) = kind else { panic!("a key has a type that is no path") };
        let last = path.path.segments.last().unwrap();
        let name = last.ident.to_string();
        let syn::PathArguments::AngleBracketed(arguments) = &last.arguments else {
            return Kind { name, is_list: false };
        };
        let Some(syn::GenericArgument::Type(inner)) = arguments.args.first() else {
            panic!("{name} has no type argument");
        };
        let inner = Kind::of(inner);
        match name.as_str() {
            "Vec" => Kind { is_list: true, ..inner },
            "Option" => inner,
            other => panic!("{other} is unknown to the reference: describe it here"),
        }
    }

    fn describe(&self, is_table: bool, values: &[String]) -> String {
        let one = match self.name.as_str() {
            _ if is_table => "table".to_owned(),
            "bool" => "true or false".to_owned(),
            "u8" | "u16" | "u32" | "u64" | "usize" | "i32" | "i64" => "whole number".to_owned(),
            "f64" => "number".to_owned(),
            "String" => "string".to_owned(),
            "PathBuf" => "path".to_owned(),
            "IpAddr" => "IP address".to_owned(),
            _ if !values.is_empty() => {
                let values: Vec<String> = values.iter().map(|value| format!("`\"{value}\"`")).collect();
                return values.join(" or ");
            }
            other => panic!("{other} is unknown to the reference: describe it here"),
        };
        match (self.is_list, one.as_str()) {
            (false, _) => one,
            (true, "IP address") => "list of IP addresses".to_owned(),
            (true, _) => format!("list of {one}s"),
        }
    }
}

fn describe_default(default: Option<&Json>, is_table: bool) -> String {
    match default {
        None | Some(Json::Null) => "–".to_owned(),
        Some(Json::Object(_)) if is_table => String::new(),
        Some(value) => format!("`{value}`"),
    }
}
