//! Reports to the router about answers that pass through the picker, and about those that do not.

use kvfleet_proto::envoy::ext_proc::processing_request::Request;
use kvfleet_proto::envoy::ext_proc::processing_response::Response;
use kvfleet_proto::envoy::ext_proc::{HttpBody, HttpHeaders, ProcessingRequest, ProtocolConfiguration};
use kvfleet_proto::envoy::mode::processing_mode::BodySendMode;
use kvfleet_proto::pb;

use super::fixture::{PickerFixture, RESIDENT_PROMPT, RunningPicker, completion};
use super::streams::{PickerStream, body, map, message, metadata, post, start_fixture};
use kvfleet_testkit::cluster::until;

/// A picked request of an Envoy with this response body mode, and its number.
async fn picked_request(opened: &RunningPicker, mode: BodySendMode) -> (PickerStream, u64) {
    let config = ProtocolConfiguration {
        request_body_mode: BodySendMode::FullDuplexStreamed.into(),
        response_body_mode: mode.into(),
        ..Default::default()
    };
    let mut call = PickerStream::open(opened).await.unwrap();
    call.send(ProcessingRequest { protocol_config: Some(config), ..post() }).await;
    call.send(body(completion(RESIDENT_PROMPT, true), true)).await;
    let answer = call.next().await.unwrap().unwrap();
    let Some(Response::RequestHeaders(picked)) = &answer.response else { panic!("{answer:?}") };
    let set = &picked.response.as_ref().unwrap().header_mutation.as_ref().unwrap().set_headers;
    let number = set.iter().filter_map(|one| one.header.as_ref()).find(|one| one.key == "x-kvfleet-request");
    let number = std::str::from_utf8(&number.unwrap().raw_value).unwrap().parse().unwrap();
    (call, number)
}

fn response_headers(status: &str) -> ProcessingRequest {
    let headers = Some(map(&[(":status", status), ("content-type", "text/event-stream")]));
    message(Request::ResponseHeaders(HttpHeaders { headers, end_of_stream: false }))
}

fn event(text: &str, end_of_stream: bool) -> ProcessingRequest {
    let text = format!("data: {{\"choices\":[{{\"index\":0,\"text\":\"{text}\"}}]}}\n\n");
    message(Request::ResponseBody(HttpBody { body: text.into(), end_of_stream }))
}

/// Output tokens and time between tokens in the router's decision log.
async fn usage(gateway: &PickerFixture, request: u64) -> (u32, u64) {
    let told = gateway.cluster.client(1).why(pb::WhyRequest { request }).await.unwrap().into_inner();
    (told.output_tokens, told.tbt_us)
}

/// Waits until all streams are closed.
async fn until_no_streams(opened: &RunningPicker) {
    until("closed streams", || async {
        (opened.metric("kvfleet_gateway_picker_streams") == 0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_usage_of_relayed_answers() {
    let gateway = start_fixture().await;
    let opened = gateway.open(|_| {}).await;
    let (mut call, request) = picked_request(&opened, BodySendMode::FullDuplexStreamed).await;
    call.send(response_headers("200")).await;
    for nth in 0..5 {
        call.send(event("a", nth == 4)).await;
        // Each event is echoed before the next one.
        while !matches!(call.next().await.unwrap().unwrap().response, Some(Response::ResponseBody(_))) {}
    }
    let told = until("the usage of the answer", || async {
        Some(usage(&gateway, request).await).filter(|(tokens, _)| *tokens > 0)
    });
    let (tokens, tbt_us) = told.await;
    assert!(tokens == 5 && tbt_us > 0, "{tokens} {tbt_us}");
    drop(call);

    // Neither a broken answer nor an error has a length, even if the engine reports one.
    let (cut, first) = picked_request(&opened, BodySendMode::FullDuplexStreamed).await;
    cut.send(response_headers("200")).await;
    cut.send(event("a", false)).await;
    drop(cut);
    let (mut failed, second) = picked_request(&opened, BodySendMode::FullDuplexStreamed).await;
    failed.send(response_headers("503")).await;
    failed.send(event("a", true)).await;
    while !matches!(failed.next().await.unwrap().unwrap().response, Some(Response::ResponseBody(_))) {}
    drop(failed);
    until_no_streams(&opened).await;
    // If the response body does not pass through, the engine's report counts.
    let (mut unseen, third) = picked_request(&opened, BodySendMode::None).await;
    unseen.send(response_headers("200")).await;
    while !matches!(unseen.next().await.unwrap().unwrap().response, Some(Response::ResponseHeaders(_))) {}
    drop(unseen);
    until_no_streams(&opened).await;
    let outcome = |request| pb::Outcome { request, output_tokens: 9, tbt_us: 7, ..Default::default() };
    gateway.outcomes.lock().extend([first, second, third].map(outcome));
    for (request, told) in [(third, (9, 7)), (first, (0, 7)), (second, (0, 7))] {
        until("the engine's report", || async { (usage(&gateway, request).await == told).then_some(()) })
            .await;
    }
    opened.gateway.shutdown().await;
    gateway.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_count_at_the_engine_that_served_them() {
    let gateway = start_fixture().await;
    let opened = gateway.open(|_| {}).await;
    let (mut call, request) = picked_request(&opened, BodySendMode::FullDuplexStreamed).await;
    let answered = |by: &str| ProcessingRequest {
        metadata_context: metadata("envoy.lb", "x-gateway-destination-endpoint-served", by),
        ..response_headers("200")
    };
    let decision_log =
        async || gateway.cluster.client(1).why(pb::WhyRequest { request }).await.unwrap().into_inner();
    assert_eq!((decision_log().await.instance, decision_log().await.answered_by), (2, None));
    call.send(answered(&gateway.endpoints[0])).await;
    for nth in 0..5 {
        call.send(event("a", nth == 4)).await;
        while !matches!(call.next().await.unwrap().unwrap().response, Some(Response::ResponseBody(_))) {}
    }
    let told = until("the usage of the answer", || async {
        Some(decision_log().await).filter(|story| story.output_tokens > 0)
    })
    .await;
    assert_eq!((told.instance, told.answered_by, told.output_tokens), (2, Some(1), 5));
    drop(call);
    // If the picked endpoint or an unknown one answers, the request stays with the picked one.
    for by in [gateway.endpoints[1].as_str(), "10.9.9.9:1"] {
        let (mut call, request) = picked_request(&opened, BodySendMode::None).await;
        call.send(answered(by)).await;
        while !matches!(call.next().await.unwrap().unwrap().response, Some(Response::ResponseHeaders(_))) {}
        let story = gateway.cluster.client(1).why(pb::WhyRequest { request }).await.unwrap().into_inner();
        assert_eq!((story.instance, story.answered_by), (2, None), "{by}");
    }
    assert_eq!(opened.metric("kvfleet_gateway_picker_served_elsewhere_total"), 2);
    opened.gateway.shutdown().await;
    gateway.shutdown().await;
}
