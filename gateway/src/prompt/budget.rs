//! How much text the prompt of a request may become, decided before any of it is expanded.
//!
//! A request can be far shorter than its prompt: templates write constants for each message, and a
//! part of a message that is not text stands for many tokens. Without a limit, a small body could
//! take all memory. Not here: the limit on the body itself (`gateway.openai.body_bytes_max`).

use std::fmt;

/// Most bytes of text of a prompt for a model without a known context.
const TEXT_BYTES_MAX: usize = 4 << 20;

/// Most bytes of text per token of the model's context. English has about four, and long runs of
/// spaces or of one letter up to sixteen.
const TOKEN_BYTES_MAX: usize = 16;

/// Text that every prompt may have: more than the constant parts of a template.
const TEXT_BYTES_MIN: usize = 64 << 10;

/// Most bytes of text per byte of the body, above [`TEXT_BYTES_MIN`]. A template writes up to about
/// a hundred bytes for a message, and the shortest message takes 27.
const EXPANSION_MAX: usize = 8;

/// Limit of the text of one prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PromptBudget {
    pub(super) text_bytes: usize,
}

impl PromptBudget {
    /// Budget of a body of `body_bytes`, for a model with `context_tokens`, or 0 if the context is
    /// not known or does not bound the prompt.
    pub(super) fn new(body_bytes: usize, context_tokens: u32) -> PromptBudget {
        let of_context = match context_tokens {
            0 => TEXT_BYTES_MAX,
            tokens => (tokens as usize).saturating_mul(TOKEN_BYTES_MAX).max(TEXT_BYTES_MIN),
        };
        PromptBudget { text_bytes: PromptBudget::of_body(body_bytes).min(of_context) }
    }

    /// Most bytes of text that a body of `body_bytes` may become, whatever its model.
    pub(super) fn of_body(body_bytes: usize) -> usize {
        TEXT_BYTES_MIN.saturating_add(body_bytes.saturating_mul(EXPANSION_MAX))
    }
}

/// Text that takes no more than its limit. Of a write that does not fit, it keeps what does and
/// returns an error, as for every later one.
#[derive(Debug)]
pub(super) struct BoundedText {
    text: String,
    bytes_max: usize,
}

impl BoundedText {
    pub(super) fn new(bytes_max: usize) -> BoundedText {
        BoundedText { text: String::new(), bytes_max }
    }

    /// The text before the limit.
    pub(super) fn into_string(self) -> String {
        self.text
    }
}

impl fmt::Write for BoundedText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if text.len() > self.bytes_max.saturating_sub(self.text.len()) {
            let room = self.bytes_max.saturating_sub(self.text.len());
            self.text.push_str(&text[..text.floor_char_boundary(room)]);
            self.bytes_max = 0;
            return Err(fmt::Error);
        }
        self.text.push_str(text);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::*;

    #[test]
    fn budget_follows_context_and_body() {
        let budget = |body, context| PromptBudget::new(body, context).text_bytes;
        assert_eq!(budget(0, 0), TEXT_BYTES_MIN);
        assert_eq!(budget(10, 0), TEXT_BYTES_MIN + 80);
        assert_eq!(budget(1 << 20, 0), TEXT_BYTES_MAX);
        assert_eq!(budget(1 << 20, 100_000), 1_600_000);
        assert_eq!(budget(1 << 20, 10), TEXT_BYTES_MIN, "templates have constants");
        assert_eq!(budget(usize::MAX, u32::MAX), u32::MAX as usize * 16);
    }

    #[test]
    fn text_ends_at_its_limit_for_good() {
        let mut text = BoundedText::new(5);
        assert!(text.write_str("abc").is_ok() && text.write_str("de").is_ok());
        assert!(text.write_str("f").is_err() && text.write_str("").is_ok());
        let mut short = BoundedText::new(6);
        assert!(short.write_str("abcdöf").is_err() && short.write_str("a").is_err());
        assert_eq!((text.into_string().as_str(), short.into_string().as_str()), ("abcde", "abcdö"));
    }
}
