//! Who goes first where operations of several classes share one bound: [`ClassRoom`] says what is let in at once, [`Turns`]
//! whose turn it is among those who wait. Pure.
//!
//! Both keep one promise to each side. A higher class finds what lower ones cannot take; and a lower class that asks is not
//! passed over for ever, which is a number and not a hope (`tests`). Not here: what an operation is for
//! ([`Class`](crate::id::Class)), who waits and how, and what a refused one is told.

mod room;
#[cfg(test)]
mod tests;
mod turns;

pub use room::{ClassRoom, FORGOTTEN_ASKS, HELD_UP_MAX, OVERTAKEN_MAX, Parts};
pub use turns::{TURN_EVERY, Turns, places_behind};
