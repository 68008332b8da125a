//! Writes requests in either format, so that generated traces can be read back.
//!
//! Not here: the requests ([`crate::generate`]).

use super::{Format, Request};
use serde::Serialize;
use std::io::{self, Write};

/// A line of Mooncake's format.
#[derive(Serialize)]
struct MooncakeLine<'a> {
    timestamp: u64,
    input_length: u32,
    output_length: u32,
    hash_ids: &'a [u64],
}

/// A line of Bailian's format.
#[derive(Serialize)]
struct BailianLine<'a> {
    chat_id: i64,
    parent_chat_id: i64,
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    r#type: &'static str,
    turn: u32,
    hash_ids: &'a [u64],
}

/// Writes a trace line by line. Lossy only where the format is: Mooncake's has whole milliseconds
/// and no conversations.
#[derive(Debug)]
pub struct Writer<W> {
    output: W,
    format: Format,
}

impl<W: Write> Writer<W> {
    /// A writer of this format; [`Format::Detect`] writes Bailian's, which keeps everything.
    pub fn new(output: W, format: Format) -> Self {
        Writer { output, format }
    }

    /// Writes one request.
    ///
    /// # Errors
    /// The output's error, or an invalid-input error for a request with another block size than the
    /// format's, because it could not be read back.
    pub fn write(&mut self, request: &Request) -> io::Result<()> {
        let expected = match self.format {
            Format::Mooncake => super::MOONCAKE_BLOCK_TOKENS,
            _ => super::BAILIAN_BLOCK_TOKENS,
        };
        if request.block_tokens != expected {
            let text = format!(
                "the format has blocks of {expected} tokens, the request has {}; generate it with blocks of {expected}",
                request.block_tokens
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        match self.format {
            Format::Mooncake => serde_json::to_writer(&mut self.output, &mooncake(request))?,
            _ => serde_json::to_writer(&mut self.output, &bailian(request))?,
        }
        self.output.write_all(b"\n")
    }

    /// Flushes and returns the output.
    ///
    /// # Errors
    /// The output's error.
    pub fn finish(mut self) -> io::Result<W> {
        self.output.flush()?;
        Ok(self.output)
    }
}

fn mooncake(request: &Request) -> MooncakeLine<'_> {
    MooncakeLine {
        timestamp: request.arrival_us / 1000,
        input_length: request.input_tokens,
        output_length: request.output_tokens,
        hash_ids: &request.blocks,
    }
}

fn bailian(request: &Request) -> BailianLine<'_> {
    let number = |chat: Option<u64>| chat.and_then(|chat| i64::try_from(chat).ok()).unwrap_or(-1);
    BailianLine {
        chat_id: number(request.chat),
        parent_chat_id: number(request.parent),
        timestamp: request.arrival_us as f64 / 1e6,
        input_length: request.input_tokens,
        output_length: request.output_tokens,
        r#type: request.category.kind.name(),
        turn: request.turn,
        hash_ids: &request.blocks,
    }
}
