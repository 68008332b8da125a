//! Sharing of one resource between traffic classes: [`ClassQuota`] decides which operations are
//! admitted at once, [`ClassScheduler`] which class is next among waiting ones. Pure.
//!
//! Both protect each side. A higher class always has capacity that lower ones cannot take, and a
//! lower class that asks is never starved: its wait has a numeric bound (`tests`). Not here: the
//! class of an operation ([`TrafficClass`](crate::id::TrafficClass)), the waiting itself, and the
//! answer to a refused one.

mod quota;
mod scheduler;
#[cfg(test)]
mod tests;

pub use quota::{ClassMinima, ClassQuota, HELD_BACK_MAX, INACTIVE_AFTER_REQUESTS, OVERTAKEN_MAX};
pub use scheduler::{ClassScheduler, LOWER_CLASS_TURN_EVERY, lower_class_slots};
