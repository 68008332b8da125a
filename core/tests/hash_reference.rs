//! The example in `docs/reference/hash.md` against the product code: Python, with a BLAKE3 of its own.
//!
//! Not here: other tests of block hashes (`core/src/prefix/tests/`).
#![allow(clippy::unwrap_used, clippy::disallowed_methods, missing_docs)]

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use kv_core::prefix::{IdentityManifest, PrefixHasher};

const DOCUMENT: &str = include_str!("../../docs/reference/hash.md");

fn manifest(block_tokens: u32) -> IdentityManifest {
    IdentityManifest {
        model: "example-8b".to_owned(),
        weights_digest: "sha256:00".to_owned(),
        block_tokens,
        ..IdentityManifest::default()
    }
}

fn hashes(block_tokens: u32, tokens: u32) -> Vec<String> {
    let hasher = PrefixHasher::new(&manifest(block_tokens), &[7; 32]);
    hasher.blocks(&(0..tokens).collect::<Vec<u32>>()).iter().map(ToString::to_string).collect()
}

/// The rows of the table of vectors: tokens in a block, tokens, number of the block, hash.
fn vectors() -> Vec<(u32, u32, usize, &'static str)> {
    let (_, table) = DOCUMENT.split_once("| block_tokens | tokens | block | hash |").unwrap();
    let rows = table.lines().skip(2).map_while(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    rows.map(|row| {
        let cells: Vec<&str> = row.split(" | ").collect();
        let number = |at: usize| cells[at].parse().unwrap();
        (number(0), number(1), number(2) as usize, cells[3].trim_matches('`'))
    })
    .collect()
}

#[test]
fn the_published_vectors_hold() {
    let vectors = vectors();
    assert_eq!(vectors.len(), 8);
    for (block_tokens, tokens, block, hash) in vectors {
        assert_eq!(hashes(block_tokens, tokens)[block], hash, "block {block} of {tokens} tokens");
    }
}

/// Runs Python, with the directory of its BLAKE3 on the path.
fn python(code: &str) -> String {
    let modules = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let mut child = Command::new("python3")
        .args(["-B", "-"])
        .env("PYTHONPATH", modules)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python3 is missing: scripts/setup installs it");
    child.stdin.take().unwrap().write_all(code.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "the example failed");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_published_example_computes_the_same_hashes() {
    let (_, example) = DOCUMENT.split_once("```python\n").unwrap();
    let (example, _) = example.split_once("```").unwrap();
    let manifest = manifest(0);
    let mut code = format!(
        "{example}\nmanifest = dict(model={:?}, weights_digest={:?}, dtype={:?}, layout={:?}, rope={:?}, adapter='', \
         layers={}, tp=1, pp=1, rank=0, rotated_keys=1)\n",
        manifest.model,
        manifest.weights_digest,
        manifest.dtype,
        manifest.layout,
        manifest.rope,
        manifest.layers
    );
    // More than two groups, and a last block that is not whole. Leaves of less than a compression,
    // of one, of a chunk, and of two chunks.
    let cases = [(1, 20), (3, 60), (16, 16 * 19 + 5), (256, 256 * 9 + 1), (512, 1025)];
    for (block_tokens, tokens) in cases {
        code += &format!(
            "manifest['block_tokens'] = {block_tokens}\n\
             for one in block_hashes(keys_of(manifest, bytes([7] * 32)), list(range({tokens})), {block_tokens}):\n    \
             print(one.hex())\n"
        );
    }
    let printed = python(&code);
    let expected: Vec<String> = cases.iter().flat_map(|case| hashes(case.0, case.1)).collect();
    assert_eq!(printed.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn the_blake3_of_this_test_has_the_published_answers() {
    python(include_str!("blake3.py"));
}
