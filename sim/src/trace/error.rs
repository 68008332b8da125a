//! All errors in a line of a trace, with remedies.
//!
//! Not here: error handling ([`super::reader`] ends or skips, by its strictness).

use serde::Serialize;
use std::fmt;
use thiserror::Error;

/// An invalid line: reading ended, or (lenient) the line was skipped.
#[derive(Debug, Error)]
#[error("trace line {line}: {problem}; {}", problem.remedy())]
pub struct TraceError {
    /// Line of the file, counted from 1.
    pub line: u64,
    /// The problem.
    #[source]
    pub problem: Problem,
}

/// Problem of a line.
#[derive(Debug, Error)]
pub enum Problem {
    /// The bytes could not be read at all. Ends lenient reading too.
    #[error("could not be read: {0}")]
    Io(#[from] std::io::Error),
    /// The line has no end within the limit. Ends lenient reading too.
    #[error("expected a line end within {limit_bytes} bytes")]
    TooLong {
        /// The exceeded limit.
        limit_bytes: usize,
    },
    /// Not a JSON object.
    #[error("expected one JSON object, found {found}")]
    Malformed {
        /// The found text.
        found: String,
    },
    /// The file ends inside its last line.
    #[error("the file ends inside this line ({found})")]
    Truncated {
        /// Message of the parser.
        found: String,
    },
    /// A key the format needs is absent.
    #[error("expected the key \"{key}\" of the {format} format, found only {found}")]
    MissingKey {
        /// The missing key.
        key: &'static str,
        /// Format of the file.
        format: &'static str,
        /// The keys of the line.
        found: String,
    },
    /// A key the format does not have.
    #[error("unknown key \"{key}\"; the {format} format has {expected}")]
    UnknownKey {
        /// The unknown key.
        key: String,
        /// Format of the file.
        format: &'static str,
        /// The keys of the format.
        expected: String,
    },
    /// A value of the wrong type or out of range.
    #[error("expected {expected} as \"{key}\", found {found}")]
    BadValue {
        /// Key of the value.
        key: &'static str,
        /// The expected value.
        expected: String,
        /// The found value, shortened.
        found: String,
    },
    /// The same prefix twice in one request.
    #[error("expected every id of \"hash_ids\" once, found {id} at positions {first} and {second}")]
    DuplicateBlock {
        /// The repeated id.
        id: u64,
        /// Its first position, counted from 0.
        first: usize,
        /// Its second position.
        second: usize,
    },
    /// Another line has the same chat number.
    #[error("expected every \"chat_id\" once, found {chat}, which line {before_line} has")]
    DuplicateRequest {
        /// The repeated number.
        chat: u64,
        /// The earlier line.
        before_line: u64,
    },
    /// The number of blocks does not match the input length.
    #[error(
        "expected {expected} hash_ids (input_length {input_tokens} in blocks of {block_tokens}), found {found}"
    )]
    BlockCount {
        /// Blocks implied by the input length.
        expected: u64,
        /// Blocks listed.
        found: usize,
        /// Input length in tokens.
        input_tokens: u32,
        /// Tokens per block of the format.
        block_tokens: u32,
    },
    /// The request arrives before the previous one.
    #[error("expected a timestamp not before {before_us} us (line {before_line}), found {found_us} us")]
    Unsorted {
        /// Arrival in the latest valid line.
        before_us: u64,
        /// That line.
        before_line: u64,
        /// Arrival of this line.
        found_us: u64,
    },
    /// The file holds no request.
    #[error("expected at least one request, found an empty file")]
    Empty,
}

/// Kind of a [`Problem`], for counting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The bytes could not be read.
    Io,
    /// No line end within the limit.
    TooLong,
    /// Not a JSON object.
    Malformed,
    /// The file ends inside the line.
    Truncated,
    /// A key is absent.
    MissingKey,
    /// A key is unknown.
    UnknownKey,
    /// A value is of the wrong type or out of range.
    BadValue,
    /// An id appears twice.
    DuplicateBlock,
    /// A chat number is on two lines.
    DuplicateRequest,
    /// Number of ids and input length disagree.
    BlockCount,
    /// Earlier than the previous line.
    Unsorted,
    /// No request at all.
    Empty,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::Io => "unreadable",
            Reason::TooLong => "line too long",
            Reason::Malformed => "malformed JSON",
            Reason::Truncated => "truncated",
            Reason::MissingKey => "missing key",
            Reason::UnknownKey => "unknown key",
            Reason::BadValue => "bad value",
            Reason::DuplicateBlock => "duplicate block",
            Reason::DuplicateRequest => "duplicate request",
            Reason::BlockCount => "wrong number of blocks",
            Reason::Unsorted => "unsorted timestamp",
            Reason::Empty => "empty file",
        })
    }
}

impl Problem {
    /// Kind of the problem.
    #[must_use]
    pub fn reason(&self) -> Reason {
        match self {
            Problem::Io(_) => Reason::Io,
            Problem::TooLong { .. } => Reason::TooLong,
            Problem::Malformed { .. } => Reason::Malformed,
            Problem::Truncated { .. } => Reason::Truncated,
            Problem::MissingKey { .. } => Reason::MissingKey,
            Problem::UnknownKey { .. } => Reason::UnknownKey,
            Problem::BadValue { .. } => Reason::BadValue,
            Problem::DuplicateBlock { .. } => Reason::DuplicateBlock,
            Problem::DuplicateRequest { .. } => Reason::DuplicateRequest,
            Problem::BlockCount { .. } => Reason::BlockCount,
            Problem::Unsorted { .. } => Reason::Unsorted,
            Problem::Empty => Reason::Empty,
        }
    }

    /// Remedy.
    fn remedy(&self) -> &'static str {
        match self.reason() {
            Reason::Io => "give a file that this process may read",
            Reason::TooLong => "give a trace with one JSON object a line",
            Reason::Empty => "give a trace with at least one line",
            Reason::Truncated => "fetch the file again, or skip the line with --lenient",
            Reason::MissingKey => {
                "add it, name the file's format with --format, or skip the line with --lenient"
            }
            Reason::UnknownKey => {
                "remove it, name the file's format with --format, or skip the line with --lenient"
            }
            Reason::DuplicateRequest => "remove one of the two lines, or skip the second with --lenient",
            Reason::Unsorted => "sort the file by timestamp, or skip the line with --lenient",
            Reason::Malformed | Reason::BadValue | Reason::DuplicateBlock | Reason::BlockCount => {
                "correct the line, or skip it with --lenient"
            }
        }
    }

    /// Whether even lenient reading ends at this problem.
    pub(super) fn is_fatal(&self) -> bool {
        matches!(self.reason(), Reason::Io | Reason::TooLong | Reason::Empty)
    }
}
