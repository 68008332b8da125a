//! Rule: crates depend on each other as `docs/ARCHITECTURE.md` says, and on no forbidden package.
//!
//! The allowed arrows come from the table in that document, so code and document stay consistent.
//! Not here: the places inside a crate that may name a package (`homes.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use anyhow::{Context, ensure};
use serde_json::Value;

use super::{Tree, Violation};

/// Document with the arrows: rows `| folder | package | may depend on | … |`.
const DOCUMENT: &str = "docs/ARCHITECTURE.md";

/// Title of the column with the arrows.
const ARROWS_COLUMN: &str = "may depend on";

/// Packages that the pure crate may link: none reads a clock, a file or a socket, or spawns
/// threads.
const CORE_PACKAGES: [&str; 6] =
    ["blake3", "hashbrown", "kvfleet-cpu", "smallvec", "thiserror", "xxhash-rust"];

/// Packages that the crate of CPU instructions may link, for the same reason.
const CPU_PACKAGES: [&str; 1] = ["crc32c"];

/// Package and packages forbidden in its closure: the control plane never carries block bytes, the
/// data plane never votes.
const FORBIDDEN: [(&str, &[&str]); 4] = [
    ("kvfleet-router", &["kvfleet-transport", "quinn", "kvfleet-node"]),
    ("kvfleet-node", &["openraft", "kvfleet-router"]),
    ("kvfleet-proto", &["opentelemetry", "quinn"]),
    ("kv-core", &["tokio", "mio", "socket2", "parking_lot"]),
];

/// Packages for tests only: any crate's tests may use them, no program may.
const FOR_TESTS: [&str; 2] = ["kvfleet-errors-doc", "kvfleet-testkit"];

/// Package and the packages that it depends on.
type Graph = BTreeMap<String, BTreeSet<String>>;

/// Finds undocumented arrows and forbidden dependencies.
pub(crate) fn check(tree: &Tree) -> anyhow::Result<Vec<Violation>> {
    let members = members(&metadata(tree)?)?;
    let locked = lock_graph(tree.text("Cargo.lock").context("Cargo.lock is missing")?)?;
    let drawn = documented_arrows(tree.text(DOCUMENT).unwrap_or_default())?;
    let mut found = wrong_arrows(&members, &drawn);
    found.extend(impure_packages(&members));
    found.extend(forbidden_packages(&locked, &FORBIDDEN));
    Ok(found)
}

/// Cargo's metadata of the members; needs no network.
fn metadata(tree: &Tree) -> anyhow::Result<Value> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .current_dir(tree.root())
        .output()
        .context("cannot start cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Direct dependencies of a member: of the program, and of tests and build scripts.
#[derive(Default)]
struct Member {
    normal: BTreeSet<String>,
    other: BTreeSet<String>,
}

type Members = BTreeMap<String, Member>;

fn members(metadata: &Value) -> anyhow::Result<Members> {
    let mut members = Members::new();
    for package in metadata["packages"].as_array().context("cargo metadata lists no packages")? {
        let name = package["name"].as_str().context("a package has no name")?;
        let member = members.entry(name.to_owned()).or_default();
        for dependency in package["dependencies"].as_array().context("a package lists no dependencies")? {
            let name = dependency["name"].as_str().context("a dependency has no name")?.to_owned();
            let kind = if dependency["kind"].is_null() { &mut member.normal } else { &mut member.other };
            kind.insert(name);
        }
    }
    Ok(members)
}

/// Every package of the lock file with its dependencies, all versions merged.
fn lock_graph(text: &str) -> anyhow::Result<Graph> {
    let lock: toml::Table = toml::from_str(text).context("Cargo.lock cannot be read")?;
    let mut graph = Graph::new();
    for package in lock.get("package").and_then(|list| list.as_array()).context("Cargo.lock is empty")? {
        let name =
            package.get("name").and_then(|name| name.as_str()).context("a locked package has no name")?;
        let dependencies = package.get("dependencies").and_then(|list| list.as_array());
        let names = dependencies.into_iter().flatten().filter_map(|dependency| dependency.as_str());
        let names = names.filter_map(|dependency| dependency.split(' ').next()).map(str::to_owned);
        graph.entry(name.to_owned()).or_default().extend(names);
    }
    Ok(graph)
}

/// Arrows of the document: package to allowed packages. `everything` means all members.
fn documented_arrows(document: &str) -> anyhow::Result<Graph> {
    let mut column = None;
    let mut rows = Vec::new();
    for line in document.lines().filter(|line| line.starts_with('|')) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        if let Some(position) = cells.iter().position(|cell| *cell == ARROWS_COLUMN) {
            column = Some(position);
        } else if let Some(cell) = column.and_then(|position| cells.get(position)) {
            let names = cell.split(',').map(|name| name.trim().trim_matches('`').to_owned());
            let package = cells.get(1).copied().unwrap_or_default().trim_matches('`');
            rows.push((package.to_owned(), names.collect::<BTreeSet<String>>()));
        }
    }
    ensure!(!rows.is_empty(), "{DOCUMENT} has no table with a column `{ARROWS_COLUMN}`");
    let all: BTreeSet<String> = rows.iter().map(|(package, _)| package.clone()).collect();
    let widen = |names: BTreeSet<String>| if names.contains("everything") { all.clone() } else { names };
    Ok(rows.into_iter().map(|(package, names)| (package, widen(names))).collect())
}

fn wrong_arrows(members: &Members, drawn: &Graph) -> Vec<Violation> {
    let mut found = Vec::new();
    for (package, member) in members {
        let Some(allowed) = drawn.get(package) else {
            found.push(Violation::new(
                DOCUMENT,
                0,
                format!("`{package}` is missing from the table of crates"),
            ));
            continue;
        };
        let for_tests = |name: &String| FOR_TESTS.contains(&name.as_str());
        let in_tests = member.other.iter().filter(|name| !for_tests(name));
        let used: BTreeSet<&String> = member.normal.iter().chain(in_tests).collect();
        let ours = used.into_iter().filter(|name| members.contains_key(*name));
        for name in ours.filter(|name| !allowed.contains(*name)) {
            found.push(Violation::new(
                DOCUMENT,
                0,
                format!("`{package}` depends on `{name}`: the table does not allow it"),
            ));
        }
    }
    found
}

fn impure_packages(members: &Members) -> Vec<Violation> {
    let mut found = foreign_packages(members, "kv-core", &CORE_PACKAGES);
    found.extend(foreign_packages(members, "kvfleet-cpu", &CPU_PACKAGES));
    found
}

/// Packages outside the list that a pure crate links.
fn foreign_packages(members: &Members, package: &str, listed: &[&str]) -> Vec<Violation> {
    let linked = members.get(package).map(|member| member.normal.clone()).unwrap_or_default();
    let foreign = linked.into_iter().filter(|name| !listed.contains(&name.as_str()));
    foreign
        .map(|name| {
            let what = format!("`{package}` may not link `{name}`: it is not in its list of packages");
            Violation::new("xtask/src/tidy/arrows.rs", 0, what)
        })
        .collect()
}

fn forbidden_packages(locked: &Graph, never: &[(&str, &[&str])]) -> Vec<Violation> {
    let mut found = Vec::new();
    for (package, forbidden) in never {
        let closure = closure(locked, package);
        for name in forbidden.iter().filter(|name| closure.contains(**name)) {
            found.push(Violation::new(
                "Cargo.lock",
                0,
                format!("`{package}` depends on `{name}`, which is forbidden"),
            ));
        }
    }
    found
}

/// All packages that `package` depends on, itself included.
fn closure<'graph>(graph: &'graph Graph, package: &'graph str) -> BTreeSet<&'graph str> {
    let mut seen = BTreeSet::new();
    let mut open = vec![package];
    while let Some(name) = open.pop() {
        if seen.insert(name) {
            open.extend(graph.get(name).into_iter().flatten().map(String::as_str));
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const TABLE: &str = "| folder | package | may depend on | what |\n| --- | --- | --- | --- |\n\
        | `core/` | `kv-core` | nothing | x |\n| `router/` | `kvfleet-router` | `kv-core` | x |\n\
        | `benches/` | `benches` | everything | x |\n";

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn member(normal: &[&str], other: &[&str]) -> Member {
        Member { normal: set(normal), other: set(other) }
    }

    fn wrong(package: &str, normal: &[&str], other: &[&str]) -> usize {
        let mut members: Members =
            ["kv-core", "kvfleet-router", "benches"].map(|name| (name.to_owned(), Member::default())).into();
        members.insert(package.to_owned(), member(normal, other));
        wrong_arrows(&members, &documented_arrows(TABLE).unwrap()).len()
    }

    #[test]
    fn refuses_an_arrow_that_is_not_drawn() {
        assert_eq!(wrong("kv-core", &["kvfleet-router"], &[]), 1);
        assert_eq!(wrong("kvfleet-router", &["benches"], &[]), 1);
        assert_eq!(wrong("kvfleet-router", &[], &["benches"]), 1, "tests may not cross either");
        assert_eq!(wrong("stranger", &[], &[]), 1, "a crate the document does not know");
        assert_eq!(wrong("kvfleet-router", &["kv-core", "tokio"], &[]), 0);
        assert_eq!(wrong("benches", &["kv-core", "kvfleet-router"], &[]), 0);
        assert!(documented_arrows("no table").is_err());
    }

    #[test]
    fn refuses_a_program_with_a_package_for_tests() {
        for package in FOR_TESTS {
            let row = format!("{TABLE}| `errors-doc/` | `{package}` | nothing | x |\n");
            let wrong = |normal: &[&str], other: &[&str]| {
                let crates = [("kvfleet-router", member(normal, other)), (package, member(&[], &[]))];
                let members = crates.map(|(name, member)| (name.to_owned(), member)).into();
                wrong_arrows(&members, &documented_arrows(&row).unwrap()).len()
            };
            assert_eq!(wrong(&[], &[package]), 0);
            assert_eq!(wrong(&[package], &[]), 1);
        }
    }

    #[test]
    fn refuses_a_pure_crate_that_links_anything_new() {
        let core = |normal: &[&str], other: &[&str]| [("kv-core".to_owned(), member(normal, other))].into();
        assert_eq!(impure_packages(&core(&["blake3", "tokio"], &[])).len(), 1);
        assert_eq!(impure_packages(&core(&["blake3"], &["proptest"])).len(), 0);
    }

    #[test]
    fn refuses_transitive_dependencies() {
        let lock = "[[package]]\nname = \"a\"\ndependencies = [\"b 1.0.0\"]\n\
            [[package]]\nname = \"b\"\ndependencies = [\"quinn\"]\n[[package]]\nname = \"quinn\"\n";
        let graph = lock_graph(lock).unwrap();
        assert_eq!(forbidden_packages(&graph, &[("a", &["quinn"])]).len(), 1);
        assert_eq!(forbidden_packages(&graph, &[("quinn", &["a"])]).len(), 0);
        assert!(lock_graph("").is_err());
    }

    #[test]
    fn members_keep_the_kinds_apart() {
        let metadata = serde_json::json!({"packages": [{"name": "a", "dependencies": [
            {"name": "b", "kind": null}, {"name": "c", "kind": "dev"}]}]});
        let members = members(&metadata).unwrap();
        assert_eq!(members["a"].normal, set(&["b"]));
        assert_eq!(members["a"].other, set(&["c"]));
    }
}
