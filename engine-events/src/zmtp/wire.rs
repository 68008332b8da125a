//! Frames, greeting and commands of ZMTP 3.0 as bytes: <https://rfc.zeromq.org/spec/23/>.
//!
//! Pure. Memory for a body is taken only once its bytes are here. Not here: sockets (`../zmtp.rs`).

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::{Role, ZmtpError};

/// Length of a greeting in bytes.
pub(super) const GREETING_BYTES: usize = 64;

/// Longest command in bytes: a few properties of one line each.
const COMMAND_BYTES_MAX: usize = 4_096;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// One frame.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ZmtpFrame {
    pub(super) is_command: bool,
    pub(super) has_more: bool,
    pub(super) body: Bytes,
}

/// Takes the next frame if it is complete. `bytes_max` bounds its body.
pub(super) fn take_frame(buffer: &mut BytesMut, bytes_max: usize) -> Result<Option<ZmtpFrame>, ZmtpError> {
    let Some(&flags) = buffer.first() else { return Ok(None) };
    let (is_command, has_more) = (flags & COMMAND != 0, flags & MORE != 0);
    if flags & !(MORE | LONG | COMMAND) != 0 || is_command && has_more {
        return Err(ZmtpError::Flags { flags });
    }
    let (header, length) = if flags & LONG == 0 {
        let Some(&length) = buffer.get(1) else { return Ok(None) };
        (2, u64::from(length))
    } else {
        let Some(length) = buffer.get(1..9).and_then(|length| length.try_into().ok()) else {
            return Ok(None);
        };
        (9, u64::from_be_bytes(length))
    };
    let limit = if is_command { COMMAND_BYTES_MAX } else { bytes_max };
    let body_bytes = usize::try_from(length).ok().filter(|length| *length <= limit);
    let body_bytes = body_bytes.ok_or(ZmtpError::TooLong { bytes: length, limit })?;
    if buffer.len() < header + body_bytes {
        return Ok(None);
    }
    buffer.advance(header);
    Ok(Some(ZmtpFrame { is_command, has_more, body: buffer.split_to(body_bytes).freeze() }))
}

/// Appends a frame.
pub(super) fn put_frame(buffer: &mut BytesMut, is_command: bool, has_more: bool, body: &[u8]) {
    let flags = if is_command { COMMAND } else { 0 } | if has_more { MORE } else { 0 };
    match u8::try_from(body.len()) {
        Ok(length) => buffer.put_slice(&[flags, length]),
        Err(_) => {
            buffer.put_u8(flags | LONG);
            buffer.put_u64(body.len() as u64);
        }
    }
    buffer.put_slice(body);
}

/// Appends our greeting: version 3.0, no authentication.
pub(super) fn put_greeting(buffer: &mut BytesMut) {
    let mut greeting = [0; GREETING_BYTES];
    (greeting[0], greeting[8], greeting[9], greeting[10]) = (0xff, 1, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    buffer.put_slice(&greeting);
}

/// Takes the peer's greeting if it is complete.
pub(super) fn take_greeting(buffer: &mut BytesMut) -> Result<Option<()>, ZmtpError> {
    // Checks the first bytes early, so that a foreign protocol fails before it sent 64 bytes.
    let is_signature = |at, byte: &u8| match at {
        0 => *byte == 0xff,
        9 => byte & 1 == 1,
        _ => true,
    };
    if !buffer.iter().take(10).enumerate().all(|(at, byte)| is_signature(at, byte)) {
        return Err(ZmtpError::NotZmtp);
    }
    if let Some(&major) = buffer.get(10).filter(|major| **major < 3) {
        return Err(ZmtpError::Version { major });
    }
    let Some(greeting) = buffer.get(..GREETING_BYTES) else { return Ok(None) };
    let mechanism = greeting[12..32].split(|byte| *byte == 0).next().unwrap_or_default();
    if mechanism != b"NULL" {
        return Err(ZmtpError::Mechanism { name: printable(mechanism) });
    }
    buffer.advance(GREETING_BYTES);
    Ok(Some(()))
}

/// Appends the command that ends a handshake.
pub(super) fn put_ready(buffer: &mut BytesMut, role: Role) {
    let mut body = BytesMut::new();
    put_name(&mut body, "READY");
    put_name(&mut body, "Socket-Type");
    let own = role.socket_type().as_bytes();
    body.put_u32(own.len() as u32);
    body.put_slice(own);
    put_frame(buffer, true, false, &body);
}

fn put_name(body: &mut BytesMut, name: &str) {
    body.put_u8(name.len() as u8);
    body.put_slice(name.as_bytes());
}

/// A command of the peer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Command {
    /// The handshake is complete; holds the peer's socket type.
    Ready(String),
    /// A ping; holds the bytes to echo.
    Ping(Bytes),
    /// A refusal, with the reason.
    Error(String),
    /// A command without effect.
    Other,
}

/// Parses a command.
pub(super) fn parse_command(mut body: Bytes) -> Result<Command, ZmtpError> {
    let name = take_name(&mut body)?;
    match &name[..] {
        b"READY" => {
            let mut socket = String::new();
            while !body.is_empty() {
                let property = take_name(&mut body)?;
                let length = body.try_get_u32().map_err(|_| ZmtpError::Command)?;
                let value = take(&mut body, length as usize)?;
                if property.eq_ignore_ascii_case(b"Socket-Type") {
                    socket = printable(&value);
                }
            }
            Ok(Command::Ready(socket))
        }
        b"PING" => {
            // Two bytes for the allowed silence, then at most 16 bytes of context.
            take(&mut body, 2)?;
            if body.len() > 16 { Err(ZmtpError::Command) } else { Ok(Command::Ping(body)) }
        }
        b"ERROR" => Ok(Command::Error(printable(&take_name(&mut body)?))),
        _ => Ok(Command::Other),
    }
}

/// Appends the answer to a ping.
pub(super) fn put_pong(buffer: &mut BytesMut, context: &[u8]) {
    let mut body = BytesMut::new();
    put_name(&mut body, "PONG");
    body.put_slice(context);
    put_frame(buffer, true, false, &body);
}

fn take_name(body: &mut Bytes) -> Result<Bytes, ZmtpError> {
    let length = body.try_get_u8().map_err(|_| ZmtpError::Command)?;
    take(body, length.into())
}

fn take(body: &mut Bytes, bytes: usize) -> Result<Bytes, ZmtpError> {
    if body.len() < bytes { Err(ZmtpError::Command) } else { Ok(body.split_to(bytes)) }
}

/// Text of the peer, truncated for a log.
fn printable(word: &[u8]) -> String {
    String::from_utf8_lossy(&word[..word.len().min(64)]).into_owned()
}
