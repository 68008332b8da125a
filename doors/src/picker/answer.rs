//! What is seen of a response that Envoy sends through here.
//!
//! Pure: the time is an argument. Not here: which message may follow which (`exchange.rs`), and who is told (`service.rs`).

use std::time::Instant;

use kvfleet_proto::envoy::ext_proc::HttpHeaders;
use kvfleet_proto::envoy::ext_proc::processing_request::Request;

use super::head;
use crate::tally::{self, Said, Tally};

/// A response, as far as it has come.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    /// Whether it is one to the request; engines refuse some, and Envoy answers in their place.
    is_one: bool,
    /// Nothing of what is no text.
    tally: Option<Tally>,
}

impl Answer {
    /// Takes a message: what was said, if that was the end of an answer.
    pub(crate) fn hear(&mut self, message: &Request, now: Instant) -> Option<Said> {
        let is_end = match message {
            Request::ResponseHeaders(headers) => {
                *self = Answer::of(headers);
                headers.end_of_stream
            }
            Request::ResponseBody(body) => {
                if let Some(tally) = &mut self.tally {
                    tally.see(&body.body, Some(now));
                }
                body.end_of_stream || tally::is_last(&body.body)
            }
            Request::ResponseTrailers(_) => true,
            Request::RequestHeaders(_) | Request::RequestBody(_) | Request::RequestTrailers(_) => false,
        };
        let is_told = is_end && std::mem::take(&mut self.is_one);
        is_told.then(|| self.tally.take().map_or_else(Said::default, |tally| tally.said()))
    }

    fn of(headers: &HttpHeaders) -> Answer {
        let value = |name| headers.headers.as_ref().and_then(|headers| head::value(headers, name));
        let is_one = value(":status").is_some_and(|status| status.starts_with('2'));
        let is_text = value("content-encoding").is_none();
        Answer { is_one, tally: is_text.then(|| Tally::of(value("content-type"))) }
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
    fn the_end_of_an_answer_tells_what_was_said() {
        let begun = Instant::now();
        let event = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
        let done = "data: [DONE]\n\n";
        for last in [
            body("", true),
            body(done, true),
            body(done, false),
            Request::ResponseTrailers(HttpTrailers::default()),
        ] {
            let mut answer = Answer::default();
            let of = [(":status", "200"), ("Content-Type", "text/event-stream")];
            assert_eq!(answer.hear(&head(&of), begun), None);
            for nth in 0..5 {
                let said = answer.hear(&body(event, false), begun + Duration::from_millis(8 * nth));
                assert_eq!(said, None);
            }
            let said = Said { tokens: 5, tbt: Some(Duration::from_millis(8)) };
            assert_eq!(answer.hear(&last, begun + Duration::from_secs(9)), Some(said));
            assert_eq!(answer.hear(&last, begun), None, "once");
        }
    }

    #[test]
    fn of_what_is_no_answer_nothing_is_told_and_of_what_is_no_text_only_its_end() {
        let usage = "{\"usage\":{\"completion_tokens\":9}}";
        for (of, tokens) in [
            (&[(":status", "200")][..], Some(9)),
            (&[(":status", "503")], None),
            (&[], None),
            (&[(":status", "200"), ("content-encoding", "gzip")], Some(0)),
        ] {
            let mut answer = Answer::default();
            answer.hear(&head(of), Instant::now());
            let said = answer.hear(&body(usage, true), Instant::now());
            assert_eq!(said.map(|said| said.tokens), tokens, "{of:?}");
        }
        assert_eq!(Answer::default().hear(&body(usage, true), Instant::now()), None, "a body without a head");
    }
}
