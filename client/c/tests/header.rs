//! The header matches the library: sizes, offsets, constants and functions, as a C compiler reads
//! them.
//!
//! Not here: behaviour of the functions (`hostile.rs`, and `chaos-tests/tests/c_engine.rs` with a
//! cluster).
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use kv_core::id::{Generation, IdentityDigest};
use kvfleet_client_c::{abi, status};

const HEADER: &str = include_str!("../include/kvfleet.h");
const ENTRY: &str = include_str!("../src/entry.rs");

/// Output of a C program compiled against the header.
fn compile_and_run(body: &str) -> String {
    let place = tempfile::tempdir().unwrap();
    let (source, program) = (place.path().join("it.c"), place.path().join("it"));
    let text = format!("#include <stdio.h>\n#include <kvfleet.h>\nint main(void) {{\n{body}return 0;\n}}\n");
    std::fs::write(&source, text).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let flags = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror"];
    let mut compiler = Command::new("cc");
    compiler.args(flags).arg("-I").arg(include).arg("-o").arg(&program).arg(&source);
    let built = compiler.output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    String::from_utf8(Command::new(program).output().unwrap().stdout).unwrap()
}

#[test]
fn header_compiles_as_cpp() {
    let place = tempfile::tempdir().unwrap();
    let source = place.path().join("it.cc");
    std::fs::write(&source, "#include <kvfleet.h>\nint main() { return kvf_abi_version() == 0; }\n").unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++11", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]);
    match compiler.arg("-I").arg(include).arg(&source).output() {
        Ok(built) => assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr)),
        Err(error) => println!("skipped: no C++ compiler: {error}"),
    }
}

/// Words of the header with this prefix.
fn header_words(beginning: &str) -> BTreeSet<&'static str> {
    let is_word = |character: char| character.is_ascii_alphanumeric() || character == '_';
    HEADER.split(|character| !is_word(character)).filter(|word| word.starts_with(beginning)).collect()
}

#[test]
fn identity_of_generation_matches_the_library() {
    let body = "kvf_identity of = {{0}};\nfor (int at = 0; at < 16; at++) of.bytes[at] = (uint8_t)(at * 17);\n\
                of = kvf_identity_of_generation(of, 0x01020304u);\n\
                for (int at = 0; at < 16; at++) printf(\"%02x\", (unsigned)of.bytes[at]);\n";
    let manifest = IdentityDigest(std::array::from_fn(|at| 17 * at as u8));
    assert_eq!(compile_and_run(body), manifest.with_generation(Generation(0x0102_0304)).to_string());
}

#[test]
fn structs_match_the_header() {
    let (mut body, mut expected) = (String::new(), String::new());
    for (name, bytes, fields) in abi::layouts() {
        writeln!(body, "printf(\"{name} %zu\\n\", sizeof({name}));").unwrap();
        writeln!(expected, "{name} {bytes}").unwrap();
        for (field, place, bytes) in fields {
            let sizes = format!("offsetof({name}, {field}), sizeof((({name} *)0)->{field})");
            writeln!(body, "printf(\"{name}.{field} %zu %zu\\n\", {sizes});").unwrap();
            writeln!(expected, "{name}.{field} {place} {bytes}").unwrap();
        }
    }
    assert_eq!(compile_and_run(&body), expected);
    let declared = HEADER.lines().filter_map(|line| line.strip_prefix("typedef struct ")?.strip_suffix(" {"));
    let ours: BTreeSet<_> = abi::layouts().into_iter().map(|(name, ..)| name).collect();
    assert_eq!(declared.collect::<BTreeSet<_>>(), ours, "each struct must be in both");
}

#[test]
fn constants_match_the_header() {
    let mut ours: BTreeMap<String, i64> = [
        ("ABI_VERSION", abi::ABI_VERSION),
        ("ROUTE", abi::ROUTE),
        ("FETCH", abi::FETCH),
        ("SAVE", abi::SAVE),
        ("RELEASE", abi::RELEASE),
        ("ADMIT_DECODE", abi::ADMIT_DECODE),
        ("FETCH_EACH_BLOCK", abi::FETCH_EACH_BLOCK),
        ("FETCH_DEFERRED", abi::FETCH_DEFERRED),
        ("FETCH_EACH_LAYER", abi::FETCH_EACH_LAYER),
        ("QOS_FETCH", abi::QOS_FETCH),
        ("QOS_SAVE", abi::QOS_SAVE),
        ("QOS_REPLICATE", abi::QOS_REPLICATE),
        ("QOS_PREFETCH", abi::QOS_PREFETCH),
        ("PATH_SHM", abi::PATH_SHM),
        ("PATH_RDMA", abi::PATH_RDMA),
        ("PATH_QUIC", abi::PATH_QUIC),
        ("PATH_TCP", abi::PATH_TCP),
        ("STEP_LAYER", abi::STEP_LAYER),
        ("STEP_CATCH_UP", abi::STEP_CATCH_UP),
        ("STEP_WAIT", abi::STEP_WAIT),
        ("STEP_DONE", abi::STEP_DONE),
        ("ARRIVED", abi::ARRIVED),
        ("RECOMPUTE", abi::RECOMPUTE),
        ("LAYER", abi::LAYER),
        ("ENDED", abi::ENDED),
    ]
    .map(|(name, number)| (format!("KVF_{name}"), i64::from(number)))
    .into();
    for (number, name) in status::NAMES {
        let name = name.trim_end_matches('\0').to_uppercase();
        ours.insert(format!("KVF_{name}"), i64::from(*number));
    }
    let body: String =
        ours.keys().map(|name| format!("printf(\"{name} %lld\\n\", (long long){name});\n")).collect();
    let expected: String = ours.iter().map(|(name, number)| format!("{name} {number}\n")).collect();
    assert_eq!(compile_and_run(&body), expected);
    let names: BTreeSet<_> = ours.keys().map(String::as_str).collect();
    assert_eq!(header_words("KVF_"), names, "each number must be in both");
}

/// Parses a declaration `… name(parameters`: its name and parameter names.
fn parse_function(text: &str, name_of: fn(&str) -> &str) -> Option<(String, Vec<String>)> {
    let (before, rest) = text.split_once('(')?;
    let (inside, _) = rest.split_once(')')?;
    let parameters = inside.split(',').map(str::trim).filter(|one| !one.is_empty() && *one != "void");
    let name = before.rsplit([' ', '*']).next()?;
    Some((name.to_owned(), parameters.map(|one| name_of(one).to_owned()).collect()))
}

#[test]
fn functions_match_the_header() {
    let of_rust: BTreeMap<_, _> = ENTRY
        .split("pub ")
        .filter(|part| part.contains("extern \"C\" fn "))
        .filter_map(|part| parse_function(part, |one| one.split(':').next().unwrap_or_default().trim()))
        .collect();
    let is_code = |line: &&str| !line.trim_start().starts_with(['/', '*', '#']);
    let code = HEADER.lines().filter(is_code).collect::<Vec<_>>().join(" ");
    let of_c: BTreeMap<_, _> = code
        .split(';')
        // Inline functions are not part of the library.
        .filter(|part| !part.contains("static inline "))
        .filter_map(|part| parse_function(part, |one| one.rsplit([' ', '*']).next().unwrap_or_default()))
        .filter(|(name, _)| name.starts_with("kvf_"))
        .collect();
    assert_eq!(of_c, of_rust);
    assert_eq!(of_rust.len(), ENTRY.matches("#[unsafe(no_mangle)]").count());
    assert!(of_rust.len() > 20, "{of_rust:?}");
}
