//! The page on the wire: services, calls and messages, from `proto/proto/*.proto`.
//!
//! Not here: the frame of a block, which `proto/src/frame/mod.rs` describes.

use anyhow::{Context, ensure};

use super::{head, opening, row, wrap};
use crate::tidy::Tree;

/// Folder of the sources.
const FOLDER: &str = "proto/proto/";

/// A word or a sign of a `.proto` file.
#[derive(Clone, Debug, PartialEq)]
enum Token {
    /// A comment, and whether it has a line of its own.
    Comment {
        text: String,
        is_alone: bool,
    },
    Word(String),
    Sign(char),
    /// A line without anything: it parts a comment from the item below.
    Blank,
}

/// A field of a message, a value of an enum, or a call of a service.
#[derive(Debug, PartialEq)]
struct Entry {
    words: Vec<String>,
    comment: String,
}

/// A message, an enum or a service.
#[derive(Debug, PartialEq)]
struct Item {
    kind: String,
    name: String,
    comment: String,
    entries: Vec<Entry>,
}

/// The whole page.
pub(super) fn page(tree: &Tree) -> anyhow::Result<String> {
    let mut text = opening("Wire", "proto/proto/*.proto");
    text.push_str(
        "\nControl calls are gRPC. Block bytes travel in [frames](../../proto/src/frame/mod.rs), after \
         messages of\n`data.proto`. Formats may change with every version before 1.0.\n",
    );
    for (path, source) in tree.texts().filter(|(path, _)| path.starts_with(FOLDER)) {
        let name = path.strip_prefix(FOLDER).unwrap_or(path);
        let file = File::parse(source).with_context(|| format!("{path} cannot be read"))?;
        text.push_str(&format!("\n## {name}\n"));
        if !file.opening.is_empty() {
            text.push_str(&format!("\n{}\n", wrap(&file.opening)));
        }
        for item in &file.items {
            text.push_str(&item.render());
        }
    }
    Ok(text)
}

impl Item {
    fn render(&self) -> String {
        let mut text = format!("\n### {} {}\n", self.kind, self.name);
        if !self.comment.is_empty() {
            text.push_str(&format!("\n{}\n", wrap(&self.comment)));
        }
        if self.entries.is_empty() {
            text.push_str("\nIt has no fields.\n");
            return text;
        }
        text.push_str(&head(match self.kind.as_str() {
            "service" => &["call", "request", "answer", "meaning"],
            "enum" => &["number", "value", "meaning"],
            _ => &["number", "field", "type", "meaning"],
        }));
        for entry in &self.entries {
            text.push_str(&self.render_entry(entry));
        }
        text
    }

    fn render_entry(&self, entry: &Entry) -> String {
        let words: Vec<&str> = entry.words.iter().map(String::as_str).collect();
        let joined = |part: &[&str]| format!("`{}`", part.join(" "));
        match (self.kind.as_str(), words.as_slice()) {
            ("service", ["rpc", name, rest @ ..]) => {
                let at = rest.iter().position(|word| *word == "returns").unwrap_or(rest.len());
                let answer = rest.get(at + 1..).unwrap_or_default();
                row(&[&joined(&[name]), &joined(&rest[..at]), &joined(answer), &entry.comment])
            }
            ("enum", [name, number]) => row(&[number, &joined(&[name]), &entry.comment]),
            (_, [kind @ .., name, number]) => row(&[number, &joined(&[name]), &joined(kind), &entry.comment]),
            _ => String::new(),
        }
    }
}

/// A parsed file.
#[derive(Debug, PartialEq)]
struct File {
    opening: String,
    items: Vec<Item>,
}

/// State while the tokens of a file are read.
#[derive(Default)]
struct Parser {
    opening: Option<String>,
    items: Vec<Item>,
    /// The open blocks, the innermost last.
    open: Vec<Block>,
    /// Words of the statement so far.
    words: Vec<String>,
    /// Comment lines directly above the statement.
    comment: Vec<String>,
    /// Item and entry that a comment at the end of the line belongs to.
    last: Option<EntryPosition>,
    /// Whether an option in brackets is being skipped.
    is_option: bool,
}

/// An open block.
struct Block {
    /// Position in `items` of the item that its entries belong to.
    item: usize,
    /// Its name if it is a group of alternatives.
    oneof: Option<String>,
}

/// Position of an entry.
#[derive(Clone, Copy)]
struct EntryPosition {
    item: usize,
    entry: usize,
}

impl File {
    fn parse(source: &str) -> anyhow::Result<File> {
        let mut parser = Parser::default();
        for token in tokens(source) {
            parser.add(token)?;
        }
        ensure!(parser.open.is_empty(), "a block is not closed");
        Ok(File { opening: parser.opening.unwrap_or_default(), items: parser.items })
    }
}

impl Parser {
    fn add(&mut self, token: Token) -> anyhow::Result<()> {
        match token {
            Token::Blank => self.comment.clear(),
            Token::Comment { text, is_alone: true } => self.comment.push(text),
            Token::Comment { text, is_alone: false } => self.add_trailing(&text),
            Token::Sign('[') => self.is_option = true,
            Token::Sign(']') => self.is_option = false,
            _ if self.is_option => {}
            Token::Word(word) => self.words.push(word),
            Token::Sign('{') => self.begin()?,
            Token::Sign('}') => drop(self.open.pop().context("a block is closed twice")?),
            Token::Sign(';') => self.end_statement(),
            Token::Sign(_) => {}
        }
        Ok(())
    }

    /// A comment behind an entry belongs to it.
    fn add_trailing(&mut self, text: &str) {
        let Some(EntryPosition { item, entry }) = self.last else { return };
        let Some(entry) = self.items.get_mut(item).and_then(|item| item.entries.get_mut(entry)) else {
            return;
        };
        if !entry.comment.is_empty() {
            entry.comment.push(' ');
        }
        entry.comment.push_str(text);
    }

    fn take_comment(&mut self) -> String {
        std::mem::take(&mut self.comment).join(" ")
    }

    fn begin(&mut self) -> anyhow::Result<()> {
        let words = std::mem::take(&mut self.words);
        let [kind, name] = words.as_slice() else {
            anyhow::bail!("expected a kind and a name before `{{`, found {words:?}");
        };
        let comment = self.take_comment();
        let outer = self.open.last();
        if kind == "oneof" {
            // Its fields are those of the message, and say so.
            let item = outer.context("a oneof is outside of a message")?.item;
            self.open.push(Block { item, oneof: Some(name.clone()) });
            return Ok(());
        }
        let outer = outer.and_then(|block| self.items.get(block.item));
        let name = outer.map_or_else(|| name.clone(), |outer| format!("{}.{name}", outer.name));
        self.open.push(Block { item: self.items.len(), oneof: None });
        self.items.push(Item { kind: kind.clone(), name, comment, entries: Vec::new() });
        Ok(())
    }

    fn end_statement(&mut self) {
        let words = std::mem::take(&mut self.words);
        let comment = self.take_comment();
        if words.first().is_some_and(|word| word == "reserved") {
            return;
        }
        match self.open.last() {
            Some(block) => {
                let Some(item) = self.items.get_mut(block.item) else { return };
                let alternatives = block.oneof.as_ref().map(|name| format!("One of `{name}`."));
                let parts: Vec<String> =
                    alternatives.into_iter().chain((!comment.is_empty()).then_some(comment)).collect();
                self.last = Some(EntryPosition { item: block.item, entry: item.entries.len() });
                item.entries.push(Entry { words, comment: parts.join(" ") });
            }
            None if self.opening.is_none() => self.opening = Some(comment),
            None => {}
        }
    }
}

/// Splits a file into tokens.
fn tokens(source: &str) -> Vec<Token> {
    let mut found = Vec::new();
    for line in source.lines() {
        let (code, comment) = match line.split_once("//") {
            Some((code, comment)) => (code, Some(comment.trim().to_owned())),
            None => (line, None),
        };
        let is_alone = code.trim().is_empty();
        if is_alone && comment.is_none() {
            found.push(Token::Blank);
        }
        let mut word = String::new();
        for letter in code.chars() {
            if letter.is_alphanumeric() || "_.<>,\"".contains(letter) {
                word.push(letter);
                continue;
            }
            if !word.is_empty() {
                found.push(Token::Word(std::mem::take(&mut word)));
            }
            if !letter.is_whitespace() && letter != '=' {
                found.push(Token::Sign(letter));
            }
        }
        if !word.is_empty() {
            found.push(Token::Word(word));
        }
        found.extend(comment.map(|text| Token::Comment { text, is_alone }));
    }
    found
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const SOURCE: &str = "// Calls.\nsyntax = \"proto3\";\npackage a.v1;\n\nservice S {\n  // Asks.\n  \
        rpc Ask(stream Q) returns (A);\n}\n// Lost comment.\n\nmessage Q {\n  oneof op { Inner one = 1; }\n  \
        map<string, string> two = 2; repeated bytes three = 3; // in order\n  \
        enum Kind { NONE = 0; } // unused\n}\nmessage A {}\n";

    #[test]
    fn services_and_messages_are_tables() {
        let text = page(&Tree::of(&[("proto/proto/a.proto", SOURCE)])).unwrap();
        assert!(text.contains("\n## a.proto\n\nCalls.\n"), "{text}");
        assert!(text.contains("| `Ask` | `stream Q` | `A` | Asks. |\n"), "{text}");
        assert!(text.contains("\n### message Q\n\n| number |"), "{text}");
        assert!(text.contains("| 1 | `one` | `Inner` | One of `op`. |\n"), "{text}");
        assert!(text.contains("| 2 | `two` | `map<string, string>` |  |\n"), "{text}");
        assert!(text.contains("| 3 | `three` | `repeated bytes` | in order |\n"), "{text}");
        assert!(text.contains("\n### enum Q.Kind\n\n| number | value | meaning |"), "{text}");
        assert!(text.contains("| 0 | `NONE` | unused |\n"), "{text}");
        assert!(text.contains("\n### message A\n\nIt has no fields.\n"), "{text}");
        assert!(!text.contains("Lost"), "{text}");
    }

    #[test]
    fn refuses_files_that_do_not_close() {
        assert!(File::parse("message A {").is_err());
        assert!(File::parse("}").is_err());
        assert!(File::parse("message {}").is_err());
    }

    #[test]
    fn prose_is_broken_between_words() {
        let text = wrap(&"word ".repeat(40));
        assert!(text.lines().all(|line| line.len() <= 100));
        assert_eq!(text.lines().count(), 2);
    }
}
