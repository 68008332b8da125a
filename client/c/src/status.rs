//! Results of functions: a status number, a message for people, and no panic.
//!
//! Not here: outcomes of operations (`results.rs`).

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kvfleet_client::{LayerSaveError, SubmitError};

/// Result of functions and operations; the header has the same numbers.
pub type Status = i32;

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $word:literal;)*) => {
        $($(#[$doc])* pub const $name: Status = $number;)*

        /// Every status with its name.
        pub const NAMES: &[(Status, &str)] = &[$(($number, concat!($word, "\0"))),*];
    };
}

statuses! {
    /// Success.
    OK = 0, "ok";
    /// An argument is invalid.
    INVALID = 1, "invalid";
    /// It exceeds a limit and can never be accepted.
    TOO_LARGE = 2, "too_large";
    /// It does not fit beside the operations in flight.
    BUSY = 3, "busy";
    /// An operation in flight has this tag.
    TAG_IN_USE = 4, "tag_in_use";
    /// The queue is closed.
    CLOSED = 5, "closed";
    /// The operation or part does not exist.
    NOT_FOUND = 6, "not_found";
    /// Timeout.
    TIMED_OUT = 7, "timed_out";
    /// The call failed.
    FAILED = 8, "failed";
    /// A bug inside the library.
    PANICKED = 9, "panicked";
    /// A fetch did not receive all blocks.
    MISSED = 16, "missed";
    /// No instance can accept the request now.
    REJECTED = 17, "rejected";
    /// The node is too busy for the save now.
    NODE_BUSY = 18, "node_busy";
    /// The node refuses the whole save.
    REFUSED = 19, "refused";
    /// The operation was cancelled.
    CANCELLED = 20, "cancelled";
    /// A bug inside the library ended the operation.
    LOST = 21, "lost";
}

/// Error of a function.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// A null pointer.
    #[error("{what} is null")]
    Null {
        /// Name of the argument or field.
        what: &'static str,
    },
    /// A pointer that is not aligned for its type.
    #[error("{what} is misaligned: its address must be a multiple of {align}")]
    Misaligned {
        /// Name of the argument or field.
        what: &'static str,
        /// Required alignment in bytes.
        align: usize,
    },
    /// A struct of another release, or one without its size set.
    #[error(
        "{what}.size is {got}, expected {expected}: set it to sizeof, and build with this library's header"
    )]
    Size {
        /// Name of the struct.
        what: &'static str,
        /// Size that it states.
        got: u64,
        /// Expected size.
        expected: usize,
    },
    /// A count above its limit.
    #[error("{what} has {got}, the limit is {limit}: give less at once")]
    TooLong {
        /// Name of the argument or field.
        what: &'static str,
        /// The count.
        got: u64,
        /// The limit.
        limit: usize,
    },
    /// A number out of range.
    #[error("{what} is {got}, expected {expected}")]
    Range {
        /// Name of the argument or field.
        what: &'static str,
        /// The number.
        got: u64,
        /// The valid numbers.
        expected: String,
    },
    /// Text that is not UTF-8.
    #[error("{what} is not UTF-8")]
    NotUtf8 {
        /// Name of the argument or field.
        what: &'static str,
    },
    /// See [`SubmitError`].
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// See [`LayerSaveError`].
    #[error(transparent)]
    LayerSave(#[from] LayerSaveError),
    /// The layer-wise save was finished and accepts no layer.
    #[error("this save was finished: free it, and begin another one")]
    SaveFinished,
    /// The prefill has ended.
    #[error("this prefill has ended: free it, and begin another one")]
    PrefillEnded,
    /// Blocks are returned only after the prefill's end.
    #[error("this prefill has not ended: end it first")]
    PrefillNotEnded,
    /// All blocks of the prefill were returned.
    #[error("all blocks of this prefill have come back: free it")]
    AllReturned,
    /// The operation or part does not exist.
    #[error("there is no {what}")]
    NotFound {
        /// Description of the missing item.
        what: &'static str,
    },
    /// A handle from before a fork.
    #[error("this handle was opened before a fork: open a client in the process that uses it")]
    Forked,
    /// Operations in flight did not end in time.
    #[error("slices are still in use: wait longer")]
    TimedOut,
    /// Any other failure.
    #[error("{0}")]
    Failed(String),
    /// A bug inside the library.
    #[error("the library panicked: {0}")]
    Panicked(String),
}

impl Failure {
    fn status(&self) -> Status {
        match self {
            Failure::Null { .. }
            | Failure::Misaligned { .. }
            | Failure::Size { .. }
            | Failure::Range { .. }
            | Failure::PrefillNotEnded
            | Failure::NotUtf8 { .. } => INVALID,
            Failure::TooLong { .. } | Failure::Submit(SubmitError::TooLarge { .. }) => TOO_LARGE,
            Failure::Submit(SubmitError::Busy { .. }) | Failure::LayerSave(LayerSaveError::Busy(_)) => BUSY,
            Failure::LayerSave(LayerSaveError::Layers { .. } | LayerSaveError::Slices { .. }) => INVALID,
            Failure::Submit(SubmitError::TagInUse { .. }) => TAG_IN_USE,
            Failure::Submit(SubmitError::Closed)
            | Failure::SaveFinished
            | Failure::PrefillEnded
            | Failure::AllReturned => CLOSED,
            Failure::NotFound { .. } => NOT_FOUND,
            Failure::TimedOut => TIMED_OUT,
            Failure::Failed(_) | Failure::Forked | Failure::LayerSave(_) => FAILED,
            Failure::Panicked(_) => PANICKED,
        }
    }
}

thread_local! {
    static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs the body of a function. Returns its status, and keeps the message for the thread.
pub(crate) fn guard(work: impl FnOnce() -> Result<(), Failure>) -> Status {
    // A panic leaves at most a handle behind, and its locks tell if it is inconsistent.
    let outcome = catch_unwind(AssertUnwindSafe(work));
    let failure = match outcome {
        Ok(Ok(())) => return OK,
        Ok(Err(failure)) => failure,
        Err(panic) => Failure::Panicked(panic_message(&*panic)),
    };
    let sentence = failure.to_string();
    // Fails only on a thread that is ending; then there is no message.
    let _ = LAST_ERROR.try_with(|last| last.replace(sentence));
    failure.status()
}

/// The same for functions that return a value; a panic gives the default.
pub(crate) fn guard_value<N: Default>(work: impl FnOnce() -> N) -> N {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_default()
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
}

/// The message of this thread's last failure.
pub(crate) fn last_error() -> String {
    LAST_ERROR.try_with(|last| last.borrow().clone()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_becomes_a_status_and_a_message() {
        assert_eq!(guard(|| panic!("on purpose")), PANICKED);
        assert_eq!(last_error(), "the library panicked: on purpose");
        assert_eq!(guard(|| panic!("with {}", 3)), PANICKED);
        assert_eq!(last_error(), "the library panicked: with 3");
        assert_eq!(guard(|| Ok(())), OK);
        assert_eq!(last_error(), "the library panicked: with 3", "the message of the last failed call stays");
        assert_eq!(guard_value::<u64>(|| panic!("on purpose")), 0);
    }
}
