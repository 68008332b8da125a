//! Finds how many tokens an engine counted in a prompt, in an answer that goes by.
//!
//! It keeps no byte of it: only how far it has come in `"prompt_tokens": 123`. Text that a model wrote cannot look like that, because in JSON its quotes have a backslash
//! before them. Pure. Not here: what the number is compared with (`relay.rs`).

/// The key, with its quotes.
const KEY: &[u8] = b"\"prompt_tokens\"";

/// How far it has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// So many bytes of the key.
    Key(usize),
    /// Behind the key.
    Colon,
    /// Behind the colon; the number so far.
    Number(Option<u32>),
}

/// Looks through an answer.
#[derive(Clone, Debug)]
pub(super) struct Usage {
    at: At,
    found: Option<u32>,
}

impl Default for Usage {
    fn default() -> Self {
        Usage { at: At::Key(0), found: None }
    }
}

impl Usage {
    /// Looks through the next bytes.
    pub(super) fn see(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.at = self.next(*byte);
        }
    }

    /// The last number that was there.
    pub(super) fn found(&self) -> Option<u32> {
        match self.at {
            At::Number(Some(number)) => Some(number),
            _ => self.found,
        }
    }

    fn next(&mut self, byte: u8) -> At {
        match self.at {
            At::Key(seen) if byte == KEY[seen] => match seen + 1 == KEY.len() {
                true => At::Colon,
                false => At::Key(seen + 1),
            },
            At::Key(_) => begin(byte),
            At::Colon => match byte {
                b' ' | b'\t' | b'\n' | b'\r' => At::Colon,
                b':' => At::Number(None),
                _ => begin(byte),
            },
            At::Number(number) => match (byte, number) {
                (b'0'..=b'9', _) => {
                    let digit = u32::from(byte - b'0');
                    At::Number(Some(number.unwrap_or(0).saturating_mul(10).saturating_add(digit)))
                }
                (b' ' | b'\t' | b'\n' | b'\r', None) => At::Number(None),
                _ => {
                    self.found = number.or(self.found);
                    begin(byte)
                }
            },
        }
    }
}

/// The key's first byte is in it once more, at its end: after a mismatch only that can begin it again.
fn begin(byte: u8) -> At {
    At::Key(usize::from(byte == KEY[0]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(pieces: &[&str]) -> Option<u32> {
        let mut usage = Usage::default();
        pieces.iter().for_each(|piece| usage.see(piece.as_bytes()));
        usage.found()
    }

    #[test]
    fn the_number_is_found_wherever_the_answer_is_cut() {
        let text =
            "data: {\"usage\":{\"prompt_tokens\": 1234,\"prompt_tokens_details\":{\"cached_tokens\":7}}}\n\n";
        for cut in 0..text.len() {
            let (first, second) = text.split_at(cut);
            assert_eq!(found(&[first, second]), Some(1234), "cut at {cut}");
        }
        let bytes: Vec<_> = text.split("").collect();
        assert_eq!(found(&bytes), Some(1234));
    }

    #[test]
    fn what_a_model_says_is_no_number_of_the_engine() {
        assert_eq!(found(&[r#"{"content":"\"prompt_tokens\": 5"}"#]), None);
        assert_eq!(found(&[r#"{"prompt_tokens_details":5,"x_prompt_tokens":6,"prompt_tokens":null}"#]), None);
        assert_eq!(found(&[r#""prompt_tokens":1 "prompt_tokens":2}"#]), Some(2), "the last one counts");
        assert_eq!(found(&[r#"""prompt_tokens":3}"#]), Some(3));
        assert_eq!(found(&[r#"{"prompt_tokens":99999999999}"#]), Some(u32::MAX));
    }
}
