//! The streaming reader: one line in memory at a time, in order, strict or lenient.
//!
//! Not here: the contents of a line ([`super::mooncake`], [`super::bailian`]).

use super::{
    Format, LINE_BYTES_MAX, Problem, Reason, Request, Strictness, TraceError, bailian, line, mooncake,
};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, Read};

/// Lines that a lenient reader skipped, by reason.
pub type Skipped = BTreeMap<Reason, u64>;

/// Reads the requests of a trace, in file order.
///
/// # Errors
/// The iterator yields a [`TraceError`] for the first invalid line and then ends. A lenient one
/// skips and counts such lines, and fails only if reading cannot continue.
pub fn read<R: BufRead>(input: R, format: Format, strictness: Strictness) -> Reader<R> {
    Reader {
        input,
        format,
        strictness,
        line: 0,
        last: None,
        chats: HashMap::new(),
        skipped: Skipped::new(),
        unknown_kinds: 0,
        done: false,
        buffer: Vec::new(),
    }
}

/// Iterator over the requests of a trace; made by [`read`].
#[derive(Debug)]
pub struct Reader<R> {
    input: R,
    format: Format,
    strictness: Strictness,
    line: u64,
    /// Arrival and line of the latest request.
    last: Option<(u64, u64)>,
    /// Line of each chat number so far: sixteen bytes per request, less than its blocks.
    chats: HashMap<u64, u64>,
    skipped: Skipped,
    unknown_kinds: u64,
    done: bool,
    buffer: Vec<u8>,
}

impl<R: BufRead> Reader<R> {
    /// Lines skipped so far, by reason. Empty for a strict reader.
    pub fn skipped(&self) -> &Skipped {
        &self.skipped
    }

    /// The file's format; [`Format::Detect`] until the first line determines it.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Requests of unknown type so far; they count as text.
    pub fn unknown_kinds(&self) -> u64 {
        self.unknown_kinds
    }

    /// Reads the next non-blank line into the buffer. Returns whether it had its line end, or
    /// `None` at the end of the file.
    fn next_line(&mut self) -> Result<Option<bool>, Problem> {
        loop {
            self.buffer.clear();
            let limit = LINE_BYTES_MAX as u64 + 1;
            let count = self.input.by_ref().take(limit).read_until(b'\n', &mut self.buffer)?;
            if count == 0 {
                return Ok(None);
            }
            self.line += 1;
            let ended = self.buffer.last() == Some(&b'\n');
            if !ended && count > LINE_BYTES_MAX {
                return Err(Problem::TooLong { limit_bytes: LINE_BYTES_MAX });
            }
            if !self.buffer.trim_ascii().is_empty() {
                return Ok(Some(ended));
            }
        }
    }

    fn next_request(&mut self) -> Result<Option<Request>, Problem> {
        let Some(ended) = self.next_line()? else {
            let empty = self.last.is_none() && self.skipped.is_empty();
            return if empty { Err(Problem::Empty) } else { Ok(None) };
        };
        let values = line::parse(&self.buffer, ended)?;
        let request = self.interpret(values)?;
        // Checked first: in a file that was written twice, the second half is duplicate *and*
        // unsorted.
        if let Some(chat) = request.chat
            && let Some(&before_line) = self.chats.get(&chat)
        {
            return Err(Problem::DuplicateRequest { chat, before_line });
        }
        if let Some((before_us, before_line)) = self.last
            && request.arrival_us < before_us
        {
            return Err(Problem::Unsorted { before_us, before_line, found_us: request.arrival_us });
        }
        self.last = Some((request.arrival_us, self.line));
        self.chats.extend(request.chat.map(|chat| (chat, self.line)));
        Ok(Some(request))
    }

    fn interpret(&mut self, values: Map<String, Value>) -> Result<Request, Problem> {
        let format = match self.format {
            Format::Detect if values.contains_key("chat_id") => Format::Bailian,
            Format::Detect => Format::Mooncake,
            given => given,
        };
        let request = if format == Format::Bailian {
            let (request, is_unknown) = bailian::request(values)?;
            self.unknown_kinds += u64::from(is_unknown);
            request
        } else {
            mooncake::request(values)?
        };
        self.format = format;
        Ok(request)
    }
}

impl<R: BufRead> Iterator for Reader<R> {
    type Item = Result<Request, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.done {
            match self.next_request() {
                Ok(Some(request)) => return Some(Ok(request)),
                Ok(None) => self.done = true,
                Err(problem) if self.strictness == Strictness::Strict || problem.is_fatal() => {
                    self.done = true;
                    return Some(Err(TraceError { line: self.line.max(1), problem }));
                }
                Err(problem) => *self.skipped.entry(problem.reason()).or_default() += 1,
            }
        }
        None
    }
}

#[cfg(test)]
mod tests;
