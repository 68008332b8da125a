//! W3C trace context: a span's `traceparent` out, a remote `traceparent` in as a span's parent.
//!
//! Each process configures the export and sampling of spans itself. A malformed header is ignored:
//! tracing must never fail a request.

use opentelemetry::Context;
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState};
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// Version 00 is `00-{32 hex}-{16 hex}-{2 hex}`: 55 characters.
const TRACEPARENT_CHARS: usize = 55;

/// The `traceparent` of the current span; empty when the current span is not traced.
#[must_use]
pub fn current_traceparent() -> String {
    let context = tracing::Span::current().context();
    format(context.span().span_context())
}

/// Makes the span behind `traceparent` the parent of `span`. Empty or malformed text is ignored.
pub fn set_parent(span: &tracing::Span, traceparent: &str) {
    let Some(parent) = parse(traceparent) else { return };
    // A span that no OpenTelemetry layer records has no parent to set.
    let _ = span.set_parent(Context::new().with_remote_span_context(parent));
}

fn format(context: &SpanContext) -> String {
    if !context.is_valid() {
        return String::new();
    }
    let flags = (context.trace_flags() & TraceFlags::SAMPLED).to_u8();
    format!("00-{}-{}-{flags:02x}", context.trace_id(), context.span_id())
}

fn parse(text: &str) -> Option<SpanContext> {
    if text.len() != TRACEPARENT_CHARS || !text.is_ascii() {
        return None;
    }
    let mut parts = text.split('-');
    let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() || version != "00" || text.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return None;
    }
    let trace = TraceId::from(u128::from_str_radix(hex(trace, 32)?, 16).ok()?);
    let span = SpanId::from(u64::from_str_radix(hex(span, 16)?, 16).ok()?);
    let flags = TraceFlags::new(u8::from_str_radix(hex(flags, 2)?, 16).ok()?) & TraceFlags::SAMPLED;
    Some(SpanContext::new(trace, span, flags, true, TraceState::default())).filter(SpanContext::is_valid)
}

/// `text` if it is exactly `chars` hexadecimal digits (the number parsers also accept a sign).
fn hex(text: &str, chars: usize) -> Option<&str> {
    (text.len() == chars && text.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const GOOD: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_good_header_survives_a_round_trip() {
        assert_eq!(format(&parse(GOOD).unwrap()), GOOD);
        let unsampled = GOOD.replace("-01", "-00");
        assert_eq!(format(&parse(&unsampled).unwrap()), unsampled);
    }

    #[test]
    fn malformed_headers_are_ignored() {
        let zero_trace = format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32));
        let zero_span = format!("00-4bf92f3577b34da6a3ce929d0e0e4736-{}-01", "0".repeat(16));
        let upper = GOOD.to_uppercase();
        let signed = GOOD.replace("-4bf", "-+bf");
        let long = format!("{GOOD}0");
        let shifted = GOOD.replace("4736-00", "473-600");
        for bad in ["", "00", &zero_trace, &zero_span, &upper, &signed, &long, &shifted, &GOOD[..54], "é"] {
            assert!(parse(bad).is_none(), "{bad} was accepted");
            set_parent(&tracing::Span::none(), bad);
        }
    }

    #[test]
    fn an_untraced_span_has_no_header() {
        assert_eq!(current_traceparent(), "");
    }
}
