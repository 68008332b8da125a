//! Text as the tokens that engines make of it, by their `tokenizer.json`.
//!
//! A text is cut where a special token stands that nothing else can reach across; what is between two such cuts has the same tokens wherever it stands,
//! and is remembered by itself, so a conversation that goes on costs what is new of it. Not here: the text of a conversation (`template.rs`).

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use tokenizers::{AddedToken, Tokenizer};

use super::remembered::Remembered;

/// Memory of one tokenizer for what it has cut: some ten million tokens.
const REMEMBERED_BYTES: usize = 64 << 20;

/// Texts shorter than this are cut as fast as they are found.
const REMEMBERED_TEXT_BYTES_MIN: usize = 8;

/// Special tokens that are tried as cuts; each is held against all others at start, and templates have a few.
const CUTS_MAX: usize = 512;

/// Cuts are found by this many of their first bytes.
const KEY_BYTES: usize = 3;

/// Who cuts the texts of one model.
pub(super) struct Tokens {
    tokenizer: Tokenizer,
    cuts: Cuts,
    parts: Mutex<Remembered>,
    wholes: Mutex<Remembered>,
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").field("cuts", &self.cuts.by_key.len()).finish_non_exhaustive()
    }
}

impl Tokens {
    /// Reads a `tokenizer.json`; the error is a line for a person.
    pub(super) fn load(path: &Path) -> Result<Tokens, String> {
        let bytes = std::fs::read(path).map_err(|error| {
            format!(
                "cannot read {}: {error}; name a tokenizer.json that this process may read",
                path.display()
            )
        })?;
        let tokenizer = Tokenizer::from_bytes(&bytes).map_err(|error| {
            format!(
                "{} is no tokenizer.json: {error}; take the one beside the model's weights",
                path.display()
            )
        })?;
        Tokens::new(tokenizer).map_err(|error| format!("{}: {error}", path.display()))
    }

    fn new(mut tokenizer: Tokenizer) -> Result<Tokens, String> {
        // Engines cut whole prompts, whatever the file says of batches for training.
        tokenizer.with_truncation(None).map_err(|error| error.to_string())?;
        tokenizer.with_padding(None);
        let added: Vec<_> = tokenizer.get_added_tokens_decoder().into_values().collect();
        let half = || Mutex::new(Remembered::new(REMEMBERED_BYTES / 2));
        Ok(Tokens { tokenizer, cuts: Cuts::of(&added), parts: half(), wholes: half() })
    }

    /// Tokens of a text; with the special ones that the model wants around every text, or as it is.
    pub(super) fn of(&self, text: &str, with_special: bool) -> Result<Vec<u32>, String> {
        if with_special {
            return self.part(&self.wholes, text, true).map(|tokens| tokens.to_vec());
        }
        let mut tokens = Vec::with_capacity(text.len() / 3);
        let mut start = 0;
        for end in self.cuts.of_text(text).into_iter().chain([text.len()]) {
            if end > start {
                tokens.extend_from_slice(&self.part(&self.parts, &text[start..end], false)?);
                start = end;
            }
        }
        Ok(tokens)
    }

    fn part(&self, place: &Mutex<Remembered>, text: &str, with_special: bool) -> Result<Arc<[u32]>, String> {
        if text.len() < REMEMBERED_TEXT_BYTES_MIN {
            return self.cut(text, with_special);
        }
        if let Some(tokens) = place.lock().get(text) {
            return Ok(tokens);
        }
        let tokens = self.cut(text, with_special)?;
        place.lock().put(text, tokens.clone());
        Ok(tokens)
    }

    fn cut(&self, text: &str, with_special: bool) -> Result<Arc<[u32]>, String> {
        let encoding = self.tokenizer.encode_fast(text, with_special).map_err(|error| error.to_string())?;
        Ok(encoding.get_ids().into())
    }
}

/// Special tokens before which a text may be cut.
#[derive(Debug, Default)]
struct Cuts {
    by_key: HashMap<[u8; KEY_BYTES], Vec<String>>,
    /// Letters that they begin with. Those of a model have one or two, and a text is searched for a letter many bytes at a time.
    begins: BTreeSet<char>,
}

impl Cuts {
    /// Those of a model's added tokens at which every text can be cut.
    ///
    /// Tokenizers look for added tokens before anything else, from left to right, the longest first, and cut what is between them piece by
    /// piece. So the text is cut at an occurrence of one for certain, if no other can begin before it and reach into it, or begin with it and
    /// be longer, and if none takes spaces from its neighbours there. What follows is the same as behind a text that begins with the
    /// token: nothing but "is it the very first" is ever asked about the place of a piece, and behind a token it never is.
    fn of(added: &[AddedToken]) -> Cuts {
        let may = |token: &&AddedToken| {
            let text = token.content.as_str();
            text.len() >= KEY_BYTES
                && text.trim() == text
                && !token.normalized
                && !token.lstrip
                && !token.single_word
        };
        let others: Vec<_> =
            added.iter().map(|token| token.content.as_str()).filter(|text| !text.is_empty()).collect();
        let mut cuts = Cuts::default();
        for token in added.iter().filter(may).take(CUTS_MAX) {
            let text = token.content.as_str();
            if others.iter().all(|other| *other == text || !reaches(other, text)) && !overlaps(text, text) {
                let key = key_of(text.as_bytes()).unwrap_or_default();
                cuts.begins.extend(text.chars().next());
                cuts.by_key.entry(key).or_default().push(text.to_owned());
            }
        }
        cuts
    }

    /// Where a text is cut, ascending.
    fn of_text(&self, text: &str) -> Vec<usize> {
        let is_cut = |at: &usize| {
            let rest = &text.as_bytes()[*at..];
            let Some(found) = key_of(rest).and_then(|key| self.by_key.get(&key)) else { return false };
            found.iter().any(|cut| rest.starts_with(cut.as_bytes()))
        };
        let begins = self.begins.iter().flat_map(|begin| text.match_indices(*begin));
        let mut cuts: Vec<_> = begins.map(|(at, _)| at).filter(is_cut).collect();
        cuts.sort_unstable();
        cuts
    }
}

fn key_of(bytes: &[u8]) -> Option<[u8; KEY_BYTES]> {
    bytes.first_chunk().copied()
}

/// Whether an occurrence of `other` can hide one of `text`.
fn reaches(other: &str, text: &str) -> bool {
    other.contains(text) || overlaps(other, text)
}

/// Whether a proper end of `first` is a proper beginning of `second`.
fn overlaps(first: &str, second: &str) -> bool {
    let (first, second) = (first.as_bytes(), second.as_bytes());
    (1..first.len().min(second.len())).any(|length| first.ends_with(&second[..length]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(text: &str) -> AddedToken {
        AddedToken::from(text, true)
    }

    fn cuts(added: &[AddedToken]) -> Vec<String> {
        let mut all: Vec<_> = Cuts::of(added).by_key.into_values().flatten().collect();
        all.sort();
        all
    }

    #[test]
    fn only_tokens_that_nothing_reaches_across_are_cuts() {
        assert_eq!(cuts(&[token("<|a|>"), token("<|b|>")]), ["<|a|>", "<|b|>"]);
        assert_eq!(cuts(&[token("<|a|>"), token("<|a|>x")]), ["<|a|>x"], "the longer one is taken");
        assert_eq!(cuts(&[token("<|a|>"), token("x<|")]), ["x<|"], "its end may be the other's beginning");
        assert_eq!(cuts(&[token("aba")]), [""; 0], "it reaches into itself");
        assert_eq!(cuts(&[token("<|a|>").lstrip(true), token(" <|b|>"), token("<s")]), [""; 0]);
        assert_eq!(cuts(&[token("<|a|>").normalized(true), token("<|b|>").single_word(true)]), [""; 0]);
    }

    #[test]
    fn a_text_is_cut_before_each_of_them() {
        let cuts = Cuts::of(&[token("<|a|>"), token("<|b|>")]);
        assert_eq!(cuts.of_text("é<|a|>x<|a|<|b|><|a|>"), [2, 12, 17]);
        assert_eq!(cuts.of_text("<|"), [0; 0]);
        let cuts = Cuts::of(&[token("<|a|>"), token("[B]"), token("｜c>")]);
        assert_eq!(cuts.of_text("[B]<|a|>｜c>｜c[B]"), [0, 3, 8, 17], "whatever letter each begins with");
    }
}
