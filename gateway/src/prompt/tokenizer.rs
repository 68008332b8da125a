//! Tokenizes text by an engine's `tokenizer.json`, with a cache.
//!
//! A text is split at special tokens that no other token can overlap. The text between two splits
//! has the same tokens in any context, so it is cached by itself. A longer conversation therefore
//! costs only its new part. Not here: rendering a conversation (`template.rs`).

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use tokenizers::{AddedToken, Tokenizer};

use super::token_cache::TokenCache;

/// Cache size of one tokenizer, enough for about ten million tokens.
const CACHE_BYTES: usize = 64 << 20;

/// Shorter texts are tokenized as fast as they are looked up.
const CACHED_TEXT_BYTES_MIN: usize = 8;

/// Most special tokens that are considered as splits. Each is compared with all others at start,
/// and templates use few.
const SPLIT_TOKENS_MAX: usize = 512;

/// Split tokens are indexed by this many of their first bytes.
const KEY_BYTES: usize = 3;

/// Tokenizer of one model, with its cache.
pub(super) struct CachedTokenizer {
    tokenizer: Tokenizer,
    split_tokens: SplitTokens,
    parts: Mutex<TokenCache>,
    wholes: Mutex<TokenCache>,
}

impl fmt::Debug for CachedTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").field("cuts", &self.split_tokens.by_key.len()).finish_non_exhaustive()
    }
}

impl CachedTokenizer {
    /// Loads a `tokenizer.json`; the error is one line for the operator.
    pub(super) fn load(path: &Path) -> Result<CachedTokenizer, String> {
        let bytes = std::fs::read(path).map_err(|error| {
            format!(
                "cannot read {}: {error}; name a tokenizer.json that this process may read",
                path.display()
            )
        })?;
        let tokenizer = Tokenizer::from_bytes(&bytes).map_err(|error| {
            format!(
                "{} is not a valid tokenizer.json: {error}; use the one next to the model's weights",
                path.display()
            )
        })?;
        CachedTokenizer::new(tokenizer).map_err(|error| format!("{}: {error}", path.display()))
    }

    fn new(mut tokenizer: Tokenizer) -> Result<CachedTokenizer, String> {
        // Engines tokenize whole prompts, whatever the file sets for training batches.
        tokenizer.with_truncation(None).map_err(|error| error.to_string())?;
        tokenizer.with_padding(None);
        let added: Vec<_> = tokenizer.get_added_tokens_decoder().into_values().collect();
        let half = || Mutex::new(TokenCache::new(CACHE_BYTES / 2));
        Ok(CachedTokenizer {
            tokenizer,
            split_tokens: SplitTokens::new(&added),
            parts: half(),
            wholes: half(),
        })
    }

    /// Tokens of a text, with or without the model's special tokens around it.
    pub(super) fn encode(&self, text: &str, with_special: bool) -> Result<Vec<u32>, String> {
        if with_special {
            return self.encode_part(&self.wholes, text, true).map(|tokens| tokens.to_vec());
        }
        let mut tokens = Vec::with_capacity(text.len() / 3);
        let mut start = 0;
        for end in self.split_tokens.split_points(text).into_iter().chain([text.len()]) {
            if end > start {
                tokens.extend_from_slice(&self.encode_part(&self.parts, &text[start..end], false)?);
                start = end;
            }
        }
        Ok(tokens)
    }

    fn encode_part(
        &self,
        cache: &Mutex<TokenCache>,
        text: &str,
        with_special: bool,
    ) -> Result<Arc<[u32]>, String> {
        if text.len() < CACHED_TEXT_BYTES_MIN {
            return self.encode_uncached(text, with_special);
        }
        if let Some(tokens) = cache.lock().get(text) {
            return Ok(tokens);
        }
        let tokens = self.encode_uncached(text, with_special)?;
        cache.lock().put(text, tokens.clone());
        Ok(tokens)
    }

    fn encode_uncached(&self, text: &str, with_special: bool) -> Result<Arc<[u32]>, String> {
        let encoding = self.tokenizer.encode_fast(text, with_special).map_err(|error| error.to_string())?;
        Ok(encoding.get_ids().into())
    }
}

/// Special tokens before which a text may be split.
#[derive(Debug, Default)]
struct SplitTokens {
    by_key: HashMap<[u8; KEY_BYTES], Vec<String>>,
    /// First characters of the split tokens. A model has one or two of them, and searching for a
    /// single character is vectorised.
    first_letters: BTreeSet<char>,
}

impl SplitTokens {
    /// Selects the added tokens at which every text can be split.
    ///
    /// Tokenizers match added tokens first, from left to right, longest first, and process the text
    /// between them separately. So a token is a safe split if three conditions hold:
    /// - no other token can begin before it and overlap it;
    /// - no longer token begins with it;
    /// - it does not strip spaces around it.
    ///
    /// The text after a split tokenizes as it would at the start of a text that begins with the
    /// token. Only the very first position of a text is special to tokenizers, and a piece that
    /// begins with a split token is unaffected by it.
    fn new(added: &[AddedToken]) -> SplitTokens {
        let is_candidate = |token: &&AddedToken| {
            let text = token.content.as_str();
            text.len() >= KEY_BYTES
                && text.trim() == text
                && !token.normalized
                && !token.lstrip
                && !token.single_word
        };
        let others: Vec<_> =
            added.iter().map(|token| token.content.as_str()).filter(|text| !text.is_empty()).collect();
        let mut cuts = SplitTokens::default();
        for token in added.iter().filter(is_candidate).take(SPLIT_TOKENS_MAX) {
            let text = token.content.as_str();
            if others.iter().all(|other| *other == text || !hides(other, text)) && !overlaps(text, text) {
                let key = key_of(text.as_bytes()).unwrap_or_default();
                cuts.first_letters.extend(text.chars().next());
                cuts.by_key.entry(key).or_default().push(text.to_owned());
            }
        }
        cuts
    }

    /// Byte positions at which a text is split, ascending.
    fn split_points(&self, text: &str) -> Vec<usize> {
        let is_split_point = |at: &usize| {
            let rest = &text.as_bytes()[*at..];
            let Some(found) = key_of(rest).and_then(|key| self.by_key.get(&key)) else { return false };
            found.iter().any(|cut| rest.starts_with(cut.as_bytes()))
        };
        let begins = self.first_letters.iter().flat_map(|begin| text.match_indices(*begin));
        let mut cuts: Vec<_> = begins.map(|(at, _)| at).filter(is_split_point).collect();
        cuts.sort_unstable();
        cuts
    }
}

fn key_of(bytes: &[u8]) -> Option<[u8; KEY_BYTES]> {
    bytes.first_chunk().copied()
}

/// Whether an occurrence of `other` can hide one of `text`.
fn hides(other: &str, text: &str) -> bool {
    other.contains(text) || overlaps(other, text)
}

/// Whether a proper suffix of `first` is a proper prefix of `second`.
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
        let mut all: Vec<_> = SplitTokens::new(added).by_key.into_values().flatten().collect();
        all.sort();
        all
    }

    #[test]
    fn splits_only_at_tokens_that_no_other_token_overlaps() {
        assert_eq!(cuts(&[token("<|a|>"), token("<|b|>")]), ["<|a|>", "<|b|>"]);
        assert_eq!(cuts(&[token("<|a|>"), token("<|a|>x")]), ["<|a|>x"], "the longer one wins");
        assert_eq!(cuts(&[token("<|a|>"), token("x<|")]), ["x<|"], "its end may be the other's start");
        assert_eq!(cuts(&[token("aba")]), [""; 0], "it overlaps itself");
        assert_eq!(cuts(&[token("<|a|>").lstrip(true), token(" <|b|>"), token("<s")]), [""; 0]);
        assert_eq!(cuts(&[token("<|a|>").normalized(true), token("<|b|>").single_word(true)]), [""; 0]);
    }

    #[test]
    fn splits_a_text_before_each_split_token() {
        let cuts = SplitTokens::new(&[token("<|a|>"), token("<|b|>")]);
        assert_eq!(cuts.split_points("é<|a|>x<|a|<|b|><|a|>"), [2, 12, 17]);
        assert_eq!(cuts.split_points("<|"), [0; 0]);
        let cuts = SplitTokens::new(&[token("<|a|>"), token("[B]"), token("｜c>")]);
        assert_eq!(cuts.split_points("[B]<|a|>｜c>｜c[B]"), [0, 3, 8, 17], "any first character works");
    }
}
