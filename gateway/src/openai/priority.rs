//! Sets the priority field of a request for engines with a priority queue, from the router's
//! priority deadline.
//!
//! Pure. Not here: how the deadline is computed (`kv_core::schedule::priority_deadline`).

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::body::with_field;

/// How engines order requests by their priority values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PriorityOrder {
    /// First come, first served. Such engines may refuse a request with a priority.
    #[default]
    None,
    /// Lower values first: vLLM with `--scheduling-policy priority`; SGLang if
    /// `--schedule-low-priority-values-first` is set too.
    LowerFirst,
    /// Higher values first: SGLang with `--enable-priority-scheduling`.
    HigherFirst,
}

impl PriorityOrder {
    /// Whether engines order requests by priority.
    #[must_use]
    pub fn is_ordered(self) -> bool {
        self != PriorityOrder::None
    }

    /// Priority for a deadline; `None` if there is no order or no deadline.
    fn value(self, deadline_ms: u64) -> Option<i64> {
        let priority_deadline_ms = i64::try_from(deadline_ms).ok().filter(|turn| *turn > 0)?;
        match self {
            PriorityOrder::None => None,
            PriorityOrder::LowerFirst => Some(priority_deadline_ms),
            PriorityOrder::HigherFirst => Some(-priority_deadline_ms),
        }
    }

    /// Adds the priority to a JSON object without one; returns any other body unchanged.
    pub(super) fn apply(self, body: &Bytes, deadline_ms: u64) -> Bytes {
        let priority = self.value(deadline_ms);
        let added = priority.and_then(|priority| with_field(body, "priority", &priority.to_string()));
        added.unwrap_or_else(|| body.clone())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn adds_a_priority_and_keeps_the_rest_of_the_body() {
        let put = |priorities: PriorityOrder, body: &'static str, priority_deadline_ms| {
            let put = priorities.apply(&Bytes::from_static(body.as_bytes()), priority_deadline_ms);
            String::from_utf8(put.to_vec()).unwrap()
        };
        let body = " \n{ \"model\": \"m\", \"x\": [1.0, {}] }";
        assert_eq!(
            put(PriorityOrder::LowerFirst, body, 1_790_000_000_000),
            "{\"priority\":1790000000000, \"model\": \"m\", \"x\": [1.0, {}] }"
        );
        assert_eq!(put(PriorityOrder::HigherFirst, "{\"a\":1}", 7), "{\"priority\":-7,\"a\":1}");
        assert_eq!(put(PriorityOrder::HigherFirst, "{ }", 7), "{\"priority\":-7 }");
        for (priorities, body, priority_deadline_ms) in [
            (PriorityOrder::None, "{}", 7),
            (PriorityOrder::LowerFirst, "{}", 0),
            (PriorityOrder::LowerFirst, "[1]", 7),
        ] {
            assert_eq!(put(priorities, body, priority_deadline_ms), body);
        }
        for body in ["", "{", "{}", "{\"a\":1}"] {
            let put = put(PriorityOrder::LowerFirst, body, 3);
            let is_json = |text: &str| serde_json::from_str::<serde_json::Value>(text).is_ok();
            assert_eq!(is_json(&put), is_json(body), "{put}");
        }
    }
}
