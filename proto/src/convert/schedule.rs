//! Parts of a route call: categories and holders, to and from the wire.
//!
//! Not here: the message of a decision (the router builds it).

use kv_core::id::{Category, RequestKind, Tier};

use super::{ConvertError, tier_field};
use crate::pb;

/// Reads a category. Absent or unknown kinds mean text; turn numbers saturate at 255.
#[must_use]
pub fn category_from_pb(category: Option<&pb::Category>) -> Category {
    category.map(|category| category_from_parts(category.kind, category.turn)).unwrap_or_default()
}

/// Writes a category.
#[must_use]
pub fn category_to_pb(category: Category) -> pb::Category {
    let (kind, turn) = category_to_parts(category);
    pb::Category { kind, turn }
}

/// A category from its two numbers: unknown kinds mean text, turn numbers saturate at 255.
#[must_use]
pub fn category_from_parts(kind: u32, turn: u32) -> Category {
    Category {
        kind: u8::try_from(kind).map(RequestKind::from_u8).unwrap_or_default(),
        conversation_turn: u8::try_from(turn).unwrap_or(u8::MAX),
    }
}

/// The two numbers of a category.
#[must_use]
pub fn category_to_parts(category: Category) -> (u32, u32) {
    (category.kind as u32, u32::from(category.conversation_turn))
}

/// The tier of a holder.
///
/// # Errors
/// When no tier has the number.
pub fn holder_tier(holder: &pb::Holder) -> Result<Tier, ConvertError> {
    tier_field("holder.tier", holder.tier)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn categories_round_trip() {
        for kind in RequestKind::ALL {
            for turn in [0, 1, 255] {
                let category = Category { kind, conversation_turn: turn };
                assert_eq!(category_from_pb(Some(&category_to_pb(category))), category);
            }
        }
    }

    #[test]
    fn unknown_categories_fall_back_to_defaults() {
        assert_eq!(category_from_pb(None), Category::default());
        let wire = pb::Category { kind: 300, turn: 300 };
        assert_eq!(
            category_from_pb(Some(&wire)),
            Category { kind: RequestKind::Text, conversation_turn: 255 }
        );
    }

    #[test]
    fn a_holder_with_an_unknown_tier_is_refused() {
        let holder = pb::Holder { tier: 9, ..pb::Holder::default() };
        assert_eq!(holder_tier(&holder), Err(ConvertError::Tier { field: "holder.tier", number: 9 }));
    }
}
