//! Scans a response that Envoy sends through the picker.
//!
//! Pure: the time is an argument. Not here: the order of messages (`exchange.rs`), and the report
//! to the router (`service.rs`).

use std::time::Instant;

use kvfleet_proto::envoy::ext_proc::HttpHeaders;
use kvfleet_proto::envoy::ext_proc::processing_request::Request;

use super::head;
use crate::usage_scanner::{self, AnswerUsage, UsageScanner};

/// Scanner of one response.
#[derive(Debug, Default)]
pub(crate) struct ResponseScanner {
    /// Whether the response has a 2xx status. Errors of engines and answers by Envoy itself report
    /// no usage.
    is_success: bool,
    /// `None` for a compressed body.
    scanner: Option<UsageScanner>,
}

impl ResponseScanner {
    /// Scans a message. Returns the usage if the message ends a successful response.
    pub(crate) fn scan(&mut self, message: &Request, now: Instant) -> Option<AnswerUsage> {
        let is_end = match message {
            Request::ResponseHeaders(headers) => {
                *self = ResponseScanner::from_headers(headers);
                headers.end_of_stream
            }
            Request::ResponseBody(body) => {
                if let Some(tally) = &mut self.scanner {
                    tally.scan(&body.body, Some(now));
                }
                body.end_of_stream || usage_scanner::ends_with_done(&body.body)
            }
            Request::ResponseTrailers(_) => true,
            Request::RequestHeaders(_) | Request::RequestBody(_) | Request::RequestTrailers(_) => false,
        };
        let is_told = is_end && std::mem::take(&mut self.is_success);
        is_told.then(|| self.scanner.take().map_or_else(AnswerUsage::default, |tally| tally.usage()))
    }

    fn from_headers(headers: &HttpHeaders) -> ResponseScanner {
        let value = |name| headers.headers.as_ref().and_then(|headers| head::header_value(headers, name));
        let is_success = value(":status").is_some_and(|status| status.starts_with('2'));
        let is_text = value("content-encoding").is_none();
        ResponseScanner { is_success, scanner: is_text.then(|| UsageScanner::new(value("content-type"))) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;
    use kvfleet_proto::envoy::base::{HeaderMap, HeaderValue};
    use kvfleet_proto::envoy::ext_proc::{HttpBody, HttpTrailers};

    use super::*;

    fn head(pairs: &[(&str, &str)]) -> Request {
        let header = |(key, value): &(&str, &str)| HeaderValue {
            key: (*key).to_owned(),
            value: String::new(),
            raw_value: value.as_bytes().to_vec(),
        };
        let headers = Some(HeaderMap { headers: pairs.iter().map(header).collect() });
        Request::ResponseHeaders(HttpHeaders { headers, end_of_stream: false })
    }

    fn body(text: &str, end_of_stream: bool) -> Request {
        Request::ResponseBody(HttpBody { body: Bytes::from(text.to_owned()), end_of_stream })
    }

    #[test]
    fn reports_usage_once_at_the_end() {
        let begun = Instant::now();
        let event = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
        let done = "data: [DONE]\n\n";
        for last in [
            body("", true),
            body(done, true),
            body(done, false),
            Request::ResponseTrailers(HttpTrailers::default()),
        ] {
            let mut answer = ResponseScanner::default();
            let of = [(":status", "200"), ("Content-Type", "text/event-stream")];
            assert_eq!(answer.scan(&head(&of), begun), None);
            for nth in 0..5 {
                let said = answer.scan(&body(event, false), begun + Duration::from_millis(8 * nth));
                assert_eq!(said, None);
            }
            let said = AnswerUsage { tokens: 5, tbt: Some(Duration::from_millis(8)) };
            assert_eq!(answer.scan(&last, begun + Duration::from_secs(9)), Some(said));
            assert_eq!(answer.scan(&last, begun), None, "once");
        }
    }

    #[test]
    fn reports_no_usage_for_errors_and_zero_tokens_for_compressed_bodies() {
        let usage = "{\"usage\":{\"completion_tokens\":9}}";
        for (of, tokens) in [
            (&[(":status", "200")][..], Some(9)),
            (&[(":status", "503")], None),
            (&[], None),
            (&[(":status", "200"), ("content-encoding", "gzip")], Some(0)),
        ] {
            let mut answer = ResponseScanner::default();
            answer.scan(&head(of), Instant::now());
            let said = answer.scan(&body(usage, true), Instant::now());
            assert_eq!(said.map(|said| said.tokens), tokens, "{of:?}");
        }
        assert_eq!(
            ResponseScanner::default().scan(&body(usage, true), Instant::now()),
            None,
            "a body without headers"
        );
    }
}
