//! The priority that a request is given on its way to an engine that keeps an order: its turn, in the engine's own terms.
//!
//! Pure. Not here: what a turn is (`kv_core::schedule::turn_of`).

use bytes::{Bytes, BytesMut};
use serde::{Deserialize, Serialize};

/// Which of two priorities engines begin first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Priorities {
    /// They keep no order, and may refuse a request that has a priority.
    #[default]
    None,
    /// The lower one: vLLM with `--scheduling-policy priority`, SGLang with `--schedule-low-priority-values-first` besides.
    LowerFirst,
    /// The higher one: SGLang with `--enable-priority-scheduling`.
    HigherFirst,
}

impl Priorities {
    /// Whether engines keep an order at all.
    #[must_use]
    pub fn keep_order(self) -> bool {
        self != Priorities::None
    }

    /// The priority of a turn.
    fn of(self, turn_ms: u64) -> Option<i64> {
        let turn_ms = i64::try_from(turn_ms).ok().filter(|turn| *turn > 0)?;
        match self {
            Priorities::None => None,
            Priorities::LowerFirst => Some(turn_ms),
            Priorities::HigherFirst => Some(-turn_ms),
        }
    }

    /// The body of a request, a JSON object without a priority, with that of its turn; else as it is.
    pub(super) fn put(self, body: &Bytes, turn_ms: u64) -> Bytes {
        let Some(priority) = self.of(turn_ms) else { return body.clone() };
        let begin = body.iter().position(|byte| !byte.is_ascii_whitespace());
        let Some(begin) = begin.filter(|begin| body[*begin] == b'{') else { return body.clone() };
        let rest = body.slice(begin + 1..);
        // An object with nothing in it takes no comma behind what is put there.
        let is_empty = rest.iter().find(|byte| !byte.is_ascii_whitespace()).is_none_or(|byte| *byte == b'}');
        let field = format!("{{\"priority\":{priority}{}", if is_empty { "" } else { "," });
        let mut whole = BytesMut::with_capacity(field.len() + rest.len());
        whole.extend_from_slice(field.as_bytes());
        whole.extend_from_slice(&rest);
        whole.freeze()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_body_is_given_its_turn_and_is_otherwise_as_it_was() {
        let put = |priorities: Priorities, body: &'static str, turn_ms| {
            let put = priorities.put(&Bytes::from_static(body.as_bytes()), turn_ms);
            String::from_utf8(put.to_vec()).unwrap()
        };
        let body = " \n{ \"model\": \"m\", \"x\": [1.0, {}] }";
        assert_eq!(
            put(Priorities::LowerFirst, body, 1_790_000_000_000),
            "{\"priority\":1790000000000, \"model\": \"m\", \"x\": [1.0, {}] }"
        );
        assert_eq!(put(Priorities::HigherFirst, "{\"a\":1}", 7), "{\"priority\":-7,\"a\":1}");
        assert_eq!(put(Priorities::HigherFirst, "{ }", 7), "{\"priority\":-7 }");
        for (priorities, body, turn_ms) in [
            (Priorities::None, "{}", 7),
            (Priorities::LowerFirst, "{}", 0),
            (Priorities::LowerFirst, "[1]", 7),
        ] {
            assert_eq!(put(priorities, body, turn_ms), body);
        }
        for body in ["", "{", "{}", "{\"a\":1}"] {
            let put = put(Priorities::LowerFirst, body, 3);
            let is_json = |text: &str| serde_json::from_str::<serde_json::Value>(text).is_ok();
            assert_eq!(is_json(&put), is_json(body), "{put}");
        }
    }
}
