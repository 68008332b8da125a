//! Rule: a relative link in Markdown leads to a file that exists, and its anchor to a heading there.
//!
//! Not here: paths in backquotes (`paths.rs`), and addresses of other sites.

use std::collections::BTreeMap;

use super::{Tree, Violation};

/// A link: its line and target.
#[derive(Debug, PartialEq, Eq)]
struct Link<'text> {
    line: usize,
    target: &'text str,
}

/// Finds links without a target.
pub(crate) fn check(tree: &Tree) -> anyhow::Result<Vec<Violation>> {
    let mut found = Vec::new();
    for (path, text) in tree.texts().filter(|(path, _)| path.ends_with(".md")) {
        for link in links(text) {
            found.extend(error(tree, path, link.target).map(|what| Violation::new(path, link.line, what)));
        }
    }
    Ok(found)
}

/// Why a link leads nowhere.
fn error(tree: &Tree, document: &str, target: &str) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
    let path = if file.is_empty() { document.to_owned() } else { resolve(document, file) };
    if !tree.exists(&path) {
        return Some(format!("link to `{target}` has no target file"));
    }
    let text = tree.text(&path).filter(|_| !anchor.is_empty() && path.ends_with(".md"))?;
    let is_known = anchors(text).iter().any(|known| known == anchor);
    (!is_known).then(|| format!("link to `{target}`: {path} has no heading with this anchor"))
}

/// Path of a link relative to its document.
fn resolve(document: &str, target: &str) -> String {
    let mut parts: Vec<&str> = document.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    parts.join("/")
}

/// Lines outside code blocks, counted from 1.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    text.lines().enumerate().filter_map(move |(position, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        (!is_fence && !is_code).then_some((position + 1, line))
    })
}

/// Links and images outside code. The text of a link may begin on the line above its target.
fn links(text: &str) -> Vec<Link<'_>> {
    let mut found = Vec::new();
    for (line, content) in prose(text) {
        // Parts of a line between backquotes are code.
        for part in content.split('`').step_by(2) {
            let targets = part.split("](").skip(1).filter_map(|rest| rest.split(')').next());
            // A title may stand behind the target.
            let targets = targets.filter_map(|target| target.split_whitespace().next());
            found.extend(targets.map(|target| Link { line, target }));
        }
    }
    found
}

/// Anchors of all headings, as GitHub and mdBook derive them.
fn anchors(text: &str) -> Vec<String> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let headings = prose(text).filter(|(_, line)| line.starts_with('#'));
    let titles = headings.map(|(_, line)| line.trim_start_matches('#').trim());
    let mut found = Vec::new();
    for title in titles {
        let name = anchor(title);
        let earlier = counts.entry(name.clone()).or_default();
        found.push(if *earlier == 0 { name } else { format!("{name}-{earlier}") });
        *earlier += 1;
    }
    found
}

/// Lower case, spaces as dashes, without other signs. A link in a title counts by its text.
fn anchor(title: &str) -> String {
    let mut text = String::new();
    for (position, part) in title.split("](").enumerate() {
        let part = if position == 0 { part } else { part.split_once(')').map_or("", |(_, rest)| rest) };
        text.push_str(part);
    }
    let kept = text.chars().filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
    kept.flat_map(char::to_lowercase).map(|letter| if letter == ' ' { '-' } else { letter }).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn found(line: &str) -> usize {
        let other = "# Title\n\n## Set a `key`, twice\n\n## Same\n\n## Same\n\n```\n# no heading\n```\n";
        let files = [("docs/guide/a.md", line), ("docs/b.md", other), ("core/src/lib.rs", "//! Code.")];
        check(&Tree::of(&files)).unwrap().len()
    }

    #[test]
    fn refuses_links_without_a_target() {
        assert_eq!(found("[b](../c.md)"), 1);
        assert_eq!(found("![b](b.svg)"), 1);
        assert_eq!(found("[b](../b.md#gone) and [b](../b.md#same-2)"), 2);
        assert_eq!(found("[b](../b.md#no-heading)"), 1);
        assert_eq!(found("[a](#gone)"), 1);
    }

    #[test]
    fn accepts_links_that_lead_somewhere() {
        assert_eq!(found("[b](../b.md) [b](../b.md#title) [b](../b.md#set-a-key-twice)"), 0);
        assert_eq!(found("[b](../b.md#same) [b](../b.md#same-1) [core](../../core/src/)"), 0);
        assert_eq!(found("## Here\n\n[a](#here) [out](https://example.org/x#y)"), 0);
        assert_eq!(found("```\n[b](../c.md)\n```\n`[b](../c.md)`"), 0);
    }
}
