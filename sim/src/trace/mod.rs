//! The trace model: requests in order of arrival, each with the blocks of its input.
//!
//! Two public formats are supported (one file each): Mooncake's and Bailian's. Not here: statistics
//! of a trace ([`crate::stats`]) and opening files (the caller does that).

mod bailian;
mod error;
mod line;
mod mooncake;
mod reader;
mod turns;
mod write;

pub use error::{Problem, Reason, TraceError};
pub use reader::{Reader, Skipped, read};
pub use turns::TurnInference;
pub use write::Writer;

use kv_core::id::Category;

/// Longest accepted input or output in tokens: 16 Mi, sixteen times the longest context served
/// today.
pub const TOKENS_MAX: u64 = 1 << 24;
/// Longest accepted line in bytes: 64 MiB holds the ids of an input of [`TOKENS_MAX`] tokens. A
/// file without line ends is refused instead of read into memory.
pub const LINE_BYTES_MAX: usize = 64 << 20;
/// Latest accepted arrival in microseconds: ten thousand years would overflow sums, a hundred do
/// not.
pub const ARRIVAL_US_MAX: u64 = 100 * 366 * 86_400 * 1_000_000;
/// Tokens per block in Mooncake's files.
pub const MOONCAKE_BLOCK_TOKENS: u32 = 512;
/// Tokens per block in Bailian's files.
pub const BAILIAN_BLOCK_TOKENS: u32 = 16;

/// File format of a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// Detected from the keys of the first line.
    #[default]
    Detect,
    /// `timestamp` (ms), `input_length`, `output_length`, `hash_ids` naming prefixes of 512-token blocks.
    Mooncake,
    /// Adds `chat_id`, `parent_chat_id`, `type`, `turn`; `timestamp` in seconds; `hash_ids` name
    /// the content of 16-token blocks and are chained here.
    Bailian,
}

impl Format {
    /// Name as written on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Format::Detect => "detect",
            Format::Mooncake => "mooncake",
            Format::Bailian => "bailian",
        }
    }
}

/// Handling of invalid lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Strictness {
    /// Report the line and end.
    #[default]
    Strict,
    /// Skip the line and count the reason.
    Lenient,
}

/// One request of a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Arrival since the start of the trace, in microseconds.
    pub arrival_us: u64,
    /// Input length in tokens.
    pub input_tokens: u32,
    /// Output length in tokens.
    pub output_tokens: u32,
    /// Tokens per block; the last block of a request may be partly filled.
    pub block_tokens: u32,
    /// The blocks of the input in prefix order. Equal ids mean equal blocks *and equal prefixes*,
    /// and no id appears twice in a request.
    pub blocks: Vec<u64>,
    /// Type and turn; plain text with turn 0 if the format has neither.
    pub category: Category,
    /// Number of the conversation step, if the format has one.
    pub chat: Option<u64>,
    /// The step that this one continues; `None` for a root or if the format has no conversations.
    pub parent: Option<u64>,
    /// Turn of the conversation from 1; 0 if unknown. Not saturated, unlike the category's.
    pub turn: u32,
}
