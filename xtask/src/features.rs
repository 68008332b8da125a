//! `cargo xtask features`: `cargo check` of each crate with each combination of its features.
//!
//! A check of the whole workspace cannot find a feature that a crate forgets to pass on, because
//! another crate turns it on. Not here: lints, and builds without features (`scripts/test`).

use std::collections::BTreeSet;

use anyhow::{Context, ensure};
use serde_json::Value;

use crate::bench::cargo;

/// Most features of one crate: each further one doubles the number of checks.
const FEATURES_MAX: usize = 4;

/// Name of the feature that turns on the default ones.
const DEFAULT: &str = "default";

/// Options of `cargo xtask features`.
#[derive(clap::Args)]
pub(crate) struct FeaturesArgs {
    /// Features `package/feature` that other steps check, separated by commas. A crate with only
    /// one feature is skipped if that feature is among them.
    #[arg(long, value_delimiter = ',')]
    checked: Vec<String>,
}

/// A crate with features.
#[derive(Debug, PartialEq, Eq)]
struct Package {
    name: String,
    features: BTreeSet<String>,
    defaults: BTreeSet<String>,
}

/// Checks every combination.
///
/// # Errors
/// At the first combination that does not compile.
pub(crate) fn run(args: &FeaturesArgs) -> anyhow::Result<()> {
    let mut metadata = cargo();
    metadata.args(["metadata", "--no-deps", "--format-version", "1", "--offline"]);
    let output = metadata.output().context("cannot start cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    for package in packages(&serde_json::from_slice(&output.stdout)?)? {
        if is_checked(&package, &args.checked) {
            continue;
        }
        let name = &package.name;
        let count = package.features.len();
        ensure!(count <= FEATURES_MAX, "{name} has {count} features, limit {FEATURES_MAX}: merge some");
        for features in combinations(&package) {
            println!("{name} with features [{features}]");
            let mut check = cargo();
            check.args(["check", "--quiet", "--locked", "--no-default-features", "-p", name]);
            let status =
                check.args(["--features", &features]).status().context("cannot start cargo check")?;
            ensure!(status.success(), "{name} does not compile with the features [{features}]");
        }
    }
    Ok(())
}

fn packages(metadata: &Value) -> anyhow::Result<Vec<Package>> {
    let mut found = Vec::new();
    for package in metadata["packages"].as_array().context("cargo metadata lists no packages")? {
        let name = package["name"].as_str().context("a package has no name")?.to_owned();
        let listed = package["features"].as_object().context("a package lists no features")?;
        let features: BTreeSet<String> = listed.keys().filter(|name| *name != DEFAULT).cloned().collect();
        let defaults = listed.get(DEFAULT).and_then(Value::as_array).into_iter().flatten();
        let defaults = defaults.filter_map(Value::as_str).map(str::to_owned).collect();
        found.extend((!features.is_empty()).then_some(Package { name, features, defaults }));
    }
    Ok(found)
}

fn is_checked(package: &Package, checked: &[String]) -> bool {
    match package.features.first() {
        Some(only) if package.features.len() == 1 => checked.contains(&format!("{}/{only}", package.name)),
        _ => false,
    }
}

/// Every combination, joined with commas, except the default one, which all other steps compile.
fn combinations(package: &Package) -> Vec<String> {
    let subset = |number: usize| -> BTreeSet<&String> {
        let chosen = package.features.iter().enumerate().filter(|(position, _)| number >> position & 1 == 1);
        chosen.map(|(_, name)| name).collect()
    };
    let subsets = (0_usize..1 << package.features.len()).map(subset);
    let others = subsets.filter(|subset| !subset.iter().copied().eq(&package.defaults));
    others.map(|subset| subset.into_iter().map(String::as_str).collect::<Vec<_>>().join(",")).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn package(name: &str, features: &[&str]) -> Package {
        let features = features.iter().map(|feature| (*feature).to_owned()).collect();
        Package { name: name.to_owned(), features, defaults: BTreeSet::new() }
    }

    #[test]
    fn all_combinations_are_listed_once() {
        assert_eq!(combinations(&package("a", &["gpu", "rdma"])), ["gpu", "rdma", "gpu,rdma"]);
        let defaults = BTreeSet::from(["kube".to_owned()]);
        assert_eq!(combinations(&Package { defaults, ..package("a", &["kube"]) }), [""]);
    }

    #[test]
    fn only_single_features_can_be_checked_elsewhere() {
        let checked = ["a/rdma".to_owned(), "b/rdma".to_owned()];
        assert!(is_checked(&package("a", &["rdma"]), &checked));
        assert!(!is_checked(&package("b", &["gpu", "rdma"]), &checked));
        assert!(!is_checked(&package("c", &["rdma"]), &checked));
    }

    #[test]
    fn packages_without_features_are_left_out() {
        let metadata = serde_json::json!({"packages": [
            {"name": "a", "features": {"default": [], "rdma": []}}, {"name": "b", "features": {"default": []}}]});
        assert_eq!(packages(&metadata).unwrap(), [package("a", &["rdma"])]);
    }
}
