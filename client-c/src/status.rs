//! What a function says: a number for the program, a sentence for the person, and no panic.
//!
//! Not here: what became of operations (`results.rs`).

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kvfleet_client::{LayerSaveError, SubmitError};

/// What functions return and operations end with; the header has the same numbers.
pub type Status = i32;

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $word:literal;)*) => {
        $($(#[$doc])* pub const $name: Status = $number;)*

        /// Every status with its name.
        pub const NAMES: &[(Status, &str)] = &[$(($number, concat!($word, "\0"))),*];
    };
}

statuses! {
    /// All is well.
    OK = 0, "ok";
    /// An argument is wrong.
    INVALID = 1, "invalid";
    /// It would never be taken.
    TOO_LARGE = 2, "too_large";
    /// It does not fit beside what is in flight.
    BUSY = 3, "busy";
    /// An operation in flight has this tag.
    TAG_IN_USE = 4, "tag_in_use";
    /// The queue is closed.
    CLOSED = 5, "closed";
    /// There is no such operation, or no such part.
    NOT_FOUND = 6, "not_found";
    /// Not in the time given.
    TIMED_OUT = 7, "timed_out";
    /// What was asked failed.
    FAILED = 8, "failed";
    /// A mistake inside the library.
    PANICKED = 9, "panicked";
    /// A fetch of which not all blocks came.
    MISSED = 16, "missed";
    /// No instance can take the request now.
    REJECTED = 17, "rejected";
    /// The node has no time for a save now.
    NODE_BUSY = 18, "node_busy";
    /// The node takes nothing of a save.
    REFUSED = 19, "refused";
    /// The operation was cancelled.
    CANCELLED = 20, "cancelled";
    /// The operation broke inside the library.
    LOST = 21, "lost";
}

/// Why a function did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// A pointer to nothing.
    #[error("{what} is null")]
    Null {
        /// Which argument or field.
        what: &'static str,
    },
    /// A pointer that cannot be to such a thing.
    #[error("{what} is misaligned: its address must be a multiple of {align}")]
    Misaligned {
        /// Which argument or field.
        what: &'static str,
        /// Bytes.
        align: usize,
    },
    /// A struct of another release, or one whose size was not set.
    #[error(
        "{what}.size is {got}, expected {expected}: set it to sizeof, and build with this library's header"
    )]
    Size {
        /// Which struct.
        what: &'static str,
        /// What it says.
        got: u64,
        /// What it should.
        expected: usize,
    },
    /// More than is ever taken.
    #[error("{what} has {got}, the limit is {limit}: give less at once")]
    TooLong {
        /// Which argument or field.
        what: &'static str,
        /// How many.
        got: u64,
        /// How many at most.
        limit: usize,
    },
    /// A number that is none of those it may be.
    #[error("{what} is {got}, expected {expected}")]
    Range {
        /// Which argument or field.
        what: &'static str,
        /// What it is.
        got: u64,
        /// What it may be.
        expected: String,
    },
    /// Bytes that are no text.
    #[error("{what} is no UTF-8")]
    Text {
        /// Which argument or field.
        what: &'static str,
    },
    /// See [`SubmitError`].
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// See [`LayerSaveError`].
    #[error(transparent)]
    LayerSave(#[from] LayerSaveError),
    /// A save by layers of which nothing more is taken.
    #[error("this save was finished: free it, and begin another one")]
    Finished,
    /// A prefill that says nothing more.
    #[error("this prefill has ended: free it, and begin another one")]
    Ended,
    /// A prefill of which nothing comes back yet.
    #[error("this prefill has not ended: end it first")]
    NotEnded,
    /// A prefill of which nothing more comes back.
    #[error("all blocks of this prefill have come back: free it")]
    AllBack,
    /// No such operation or part.
    #[error("there is no {what}")]
    NotFound {
        /// What was asked for.
        what: &'static str,
    },
    /// A handle of the process that this one was forked from.
    #[error("this handle was opened before a fork: open a client in the process that uses it")]
    Forked,
    /// Operations in flight did not end in time.
    #[error("slices are still in use: wait longer")]
    TimedOut,
    /// Whatever else.
    #[error("{0}")]
    Failed(String),
    /// A mistake of ours.
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
            | Failure::NotEnded
            | Failure::Text { .. } => INVALID,
            Failure::TooLong { .. } | Failure::Submit(SubmitError::TooLarge { .. }) => TOO_LARGE,
            Failure::Submit(SubmitError::Busy { .. }) | Failure::LayerSave(LayerSaveError::Busy(_)) => BUSY,
            Failure::LayerSave(LayerSaveError::Layers { .. } | LayerSaveError::Slices { .. }) => INVALID,
            Failure::Submit(SubmitError::TagInUse { .. }) => TAG_IN_USE,
            Failure::Submit(SubmitError::Closed) | Failure::Finished | Failure::Ended | Failure::AllBack => {
                CLOSED
            }
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

/// Runs the inside of a function: its status, with the sentence kept for the thread.
pub(crate) fn guard(work: impl FnOnce() -> Result<(), Failure>) -> Status {
    // What a panic left behind is a handle, of which nothing is half done but what its locks say.
    let outcome = catch_unwind(AssertUnwindSafe(work));
    let failure = match outcome {
        Ok(Ok(())) => return OK,
        Ok(Err(failure)) => failure,
        Err(panic) => Failure::Panicked(words_of(&*panic)),
    };
    let sentence = failure.to_string();
    // Only a thread that is ending has none.
    let _ = LAST_ERROR.try_with(|last| last.replace(sentence));
    failure.status()
}

/// The same for functions that give a number, and 0 where they panic.
pub(crate) fn guard_number<N: Default>(work: impl FnOnce() -> N) -> N {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_default()
}

fn words_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
}

/// The sentence of this thread's last failure.
pub(crate) fn last_error() -> String {
    LAST_ERROR.try_with(|last| last.borrow().clone()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_status_and_a_sentence() {
        assert_eq!(guard(|| panic!("on purpose")), PANICKED);
        assert_eq!(last_error(), "the library panicked: on purpose");
        assert_eq!(guard(|| panic!("with {}", 3)), PANICKED);
        assert_eq!(last_error(), "the library panicked: with 3");
        assert_eq!(guard(|| Ok(())), OK);
        assert_eq!(last_error(), "the library panicked: with 3", "of the last call that failed");
        assert_eq!(guard_number::<u64>(|| panic!("on purpose")), 0);
    }
}
