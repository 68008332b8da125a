//! Replays messages of a real Envoy (`gateway/testdata/envoy-1.40.0.txt`, written by `envoy.rs`) to a
//! picker.
//!
//! The engines differ from those of the recording, but the second one attracts the same requests.

use kvfleet_proto::envoy::ext_proc::ProcessingRequest;
use kvfleet_proto::envoy::ext_proc::body_mutation::Mutation;
use kvfleet_proto::envoy::ext_proc::processing_request::Request;
use kvfleet_proto::envoy::ext_proc::processing_response::Response;
use kvfleet_proto::envoy::mode::processing_mode::BodySendMode;
use kvfleet_proto::envoy::well_known::value::Kind;
use prost::Message;

use super::streams::{PickerStream, destination, start_fixture};

const RECORDED: &str = include_str!("../../testdata/envoy-1.40.0.txt");

/// Messages of the stream with this name.
fn recorded(name: &str) -> Vec<ProcessingRequest> {
    let title = format!("# {name}");
    let lines = RECORDED.lines().skip_while(|line| *line != title).skip(1);
    let bytes = |line: &str| -> Vec<u8> {
        let digits = line.as_bytes().chunks(2).map(|two| std::str::from_utf8(two).unwrap());
        digits.map(|two| u8::from_str_radix(two, 16).unwrap()).collect()
    };
    let messages: Vec<_> = lines
        .take_while(|line| !line.starts_with('#'))
        .map(|line| ProcessingRequest::decode(bytes(line).as_slice()).unwrap())
        .collect();
    assert!(!messages.is_empty(), "{name}");
    messages
}

/// Result of a stream.
#[derive(Debug, Default, PartialEq)]
struct ReplayOutcome {
    destination: String,
    /// The echoed request body.
    body: Vec<u8>,
    ended: bool,
    refused: i32,
    /// Number of answers to response headers.
    responses: usize,
}

/// Replays a stream; its response headers are sent after the pick.
async fn replay(
    opened: &super::fixture::RunningPicker,
    mut messages: Vec<ProcessingRequest>,
) -> ReplayOutcome {
    let mut call = PickerStream::open(opened).await.unwrap();
    let mut outcome = ReplayOutcome::default();
    let is_response =
        |message: &ProcessingRequest| matches!(message.request, Some(Request::ResponseHeaders(_)));
    let last = messages.iter().position(is_response).map(|at| messages.split_off(at)).unwrap_or_default();
    for message in messages {
        call.send(message).await;
    }
    let mut last = Some(last);
    while let Some(answer) = call.next().await.unwrap() {
        let is_chosen = answer.dynamic_metadata.is_some();
        match answer.response.clone().unwrap() {
            Response::RequestHeaders(_) if is_chosen => outcome.destination = destination(&answer),
            Response::RequestHeaders(_) => {}
            Response::RequestBody(body) => {
                let common = body.response.unwrap();
                if let Some(mutation) = &common.header_mutation {
                    let header = mutation.set_headers[0].header.as_ref().unwrap();
                    outcome.destination = String::from_utf8(header.raw_value.clone()).unwrap();
                }
                let mutation = common.body_mutation.and_then(|mutation| mutation.mutation);
                if let Some(Mutation::StreamedResponse(piece)) = mutation {
                    outcome.body.extend_from_slice(&piece.body);
                    outcome.ended = piece.end_of_stream;
                }
            }
            Response::ResponseHeaders(_) => {
                outcome.responses += 1;
                return outcome;
            }
            Response::ImmediateResponse(immediate) => outcome.refused = immediate.status.unwrap().code,
            other => panic!("{other:?}"),
        }
        if is_chosen {
            for message in last.take().unwrap_or_default() {
                call.send(message).await;
            }
        }
    }
    outcome
}

/// A request restricted to `engine`. The recording names an engine of its own run.
fn subset_request(engine: &str) -> Vec<ProcessingRequest> {
    let mut messages = recorded("a subset");
    let hints = messages.iter_mut().filter_map(|message| {
        message.metadata_context.as_mut()?.filter_metadata.get_mut("envoy.lb.subset_hint")
    });
    let mut named = 0;
    for hint in hints {
        let name =
            hint.fields.get_mut("x-gateway-destination-endpoint-subset").expect("Envoy sent the subset");
        assert!(matches!(&name.kind, Some(Kind::StringValue(engine)) if engine.starts_with("127.0.0.1:")));
        name.kind = Some(Kind::StringValue(engine.to_owned()));
        named += 1;
    }
    assert!(named > 0, "Envoy sent the subset");
    messages
}

/// The request body in the recording.
fn sent_body(name: &str) -> Vec<u8> {
    let bodies = recorded(name).into_iter().filter_map(|message| match message.request {
        Some(Request::RequestBody(body)) => Some(body.body.to_vec()),
        _ => None,
    });
    bodies.flatten().collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replays_a_recorded_envoy() {
    let gateway = start_fixture().await;
    let [first, second] = &gateway.endpoints;
    let opened = gateway.open(|config| config.endpoints_max = 1).await;
    for name in ["a prompt", "several pieces"] {
        let expected = ReplayOutcome {
            destination: second.clone(),
            body: sent_body(name),
            ended: true,
            refused: 0,
            responses: 1,
        };
        assert_eq!(replay(&opened, recorded(name)).await, expected, "{name}");
    }
    assert!(recorded("several pieces").len() > 4, "headers, body chunks, a response");
    let inside = replay(&opened, subset_request(first)).await;
    assert_eq!((&inside.destination, inside.body), (first, sent_body("a subset")));
    let outside = replay(&opened, recorded("a subset of strangers")).await;
    assert_eq!(outside, ReplayOutcome { refused: 503, ..ReplayOutcome::default() });
    let without = replay(&opened, recorded("no body")).await;
    assert!(!without.destination.is_empty() && without.body.is_empty() && without.responses == 1);
    // Buffered bodies are not echoed, because Envoy holds them.
    let whole = replay(&opened, recorded("in one piece")).await;
    let expected = ReplayOutcome { destination: second.clone(), responses: 1, ..ReplayOutcome::default() };
    assert_eq!(whole, expected);
    // Each recorded response names the endpoint that served it, as an attribute; those were other
    // engines.
    assert_eq!(opened.metric("kvfleet_gateway_picker_picked_total"), 5);
    assert!(opened.metric("kvfleet_gateway_picker_served_elsewhere_total") >= 3);
    opened.gateway.shutdown().await;
    gateway.shutdown().await;
}

#[test]
fn recorded_streams_begin_with_their_body_mode() {
    let mode = |name: &str| recorded(name)[0].protocol_config.as_ref().unwrap().request_body_mode();
    assert_eq!(mode("a prompt"), BodySendMode::FullDuplexStreamed);
    assert_eq!(mode("in one piece"), BodySendMode::Buffered);
}
