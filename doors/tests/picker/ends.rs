//! What the router learns of answers that Envoy sends through the picker, and of those that it does not.

use kvfleet_proto::envoy::ext_proc::processing_request::Request;
use kvfleet_proto::envoy::ext_proc::processing_response::Response;
use kvfleet_proto::envoy::ext_proc::{HttpBody, HttpHeaders, ProcessingRequest, ProtocolConfiguration};
use kvfleet_proto::envoy::mode::processing_mode::BodySendMode;
use kvfleet_proto::pb;

use super::door::{DRAWN, Door, Opened, completion};
use super::streams::{Call, body, door, map, metadata, post, said};
use crate::harness::until;

/// A request of an Envoy that sends bodies of responses so, when it has been told where it goes; and its number.
async fn asked(opened: &Opened, mode: BodySendMode) -> (Call, u64) {
    let config = ProtocolConfiguration {
        request_body_mode: BodySendMode::FullDuplexStreamed.into(),
        response_body_mode: mode.into(),
        ..Default::default()
    };
    let mut call = Call::open(opened).await.unwrap();
    call.say(ProcessingRequest { protocol_config: Some(config), ..post() }).await;
    call.say(body(completion(DRAWN, true), true)).await;
    let answer = call.next().await.unwrap().unwrap();
    let Some(Response::RequestHeaders(picked)) = &answer.response else { panic!("{answer:?}") };
    let set = &picked.response.as_ref().unwrap().header_mutation.as_ref().unwrap().set_headers;
    let number = set.iter().filter_map(|one| one.header.as_ref()).find(|one| one.key == "x-kvfleet-request");
    let number = std::str::from_utf8(&number.unwrap().raw_value).unwrap().parse().unwrap();
    (call, number)
}

fn back(status: &str) -> ProcessingRequest {
    let headers = Some(map(&[(":status", status), ("content-type", "text/event-stream")]));
    said(Request::ResponseHeaders(HttpHeaders { headers, end_of_stream: false }))
}

fn event(text: &str, end_of_stream: bool) -> ProcessingRequest {
    let text = format!("data: {{\"choices\":[{{\"index\":0,\"text\":\"{text}\"}}]}}\n\n");
    said(Request::ResponseBody(HttpBody { body: text.into(), end_of_stream }))
}

/// What the router was told: tokens, and the time between two.
async fn why(door: &Door, request: u64) -> (u32, u64) {
    let told = door.cluster.client(1).why(pb::WhyRequest { request }).await.unwrap().into_inner();
    (told.output_tokens, told.tbt_us)
}

/// Waits until all streams are gone.
async fn gone(opened: &Opened) {
    until("streams that are gone", || async {
        (opened.counted("kvfleet_doors_picker_streams") == 0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_router_is_told_how_answers_end_that_come_through_the_picker() {
    let door = door().await;
    let opened = door.open(|_| {}).await;
    let (mut call, request) = asked(&opened, BodySendMode::FullDuplexStreamed).await;
    call.say(back("200")).await;
    for nth in 0..5 {
        call.say(event("a", nth == 4)).await;
        // Each is answered before the next one comes.
        while !matches!(call.next().await.unwrap().unwrap().response, Some(Response::ResponseBody(_))) {}
    }
    let told = until("word of the answer", || async {
        Some(why(&door, request).await).filter(|(tokens, _)| *tokens > 0)
    });
    let (tokens, tbt_us) = told.await;
    assert!(tokens == 5 && tbt_us > 0, "{tokens} {tbt_us}");
    drop(call);

    // Of one that breaks off, and of one that is none, nobody learns how long it was, nor from its engine.
    let (cut, first) = asked(&opened, BodySendMode::FullDuplexStreamed).await;
    cut.say(back("200")).await;
    cut.say(event("a", false)).await;
    drop(cut);
    let (mut failed, second) = asked(&opened, BodySendMode::FullDuplexStreamed).await;
    failed.say(back("503")).await;
    failed.say(event("a", true)).await;
    while !matches!(failed.next().await.unwrap().unwrap().response, Some(Response::ResponseBody(_))) {}
    drop(failed);
    gone(&opened).await;
    // Where no body of a response comes by, its engine is believed.
    let (mut unseen, third) = asked(&opened, BodySendMode::None).await;
    unseen.say(back("200")).await;
    while !matches!(unseen.next().await.unwrap().unwrap().response, Some(Response::ResponseHeaders(_))) {}
    drop(unseen);
    gone(&opened).await;
    let outcome = |request| pb::Outcome { request, output_tokens: 9, tbt_us: 7, ..Default::default() };
    door.outcomes.lock().extend([first, second, third].map(outcome));
    for (request, told) in [(third, (9, 7)), (first, (0, 7)), (second, (0, 7))] {
        until("word of the engine", || async { (why(&door, request).await == told).then_some(()) }).await;
    }
    opened.doors.shutdown().await;
    door.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_envoy_sent_elsewhere_counts_where_it_is_answered() {
    let door = door().await;
    let opened = door.open(|_| {}).await;
    let (mut call, request) = asked(&opened, BodySendMode::FullDuplexStreamed).await;
    let answered = |by: &str| ProcessingRequest {
        metadata_context: metadata("envoy.lb", "x-gateway-destination-endpoint-served", by),
        ..back("200")
    };
    let story = async || door.cluster.client(1).why(pb::WhyRequest { request }).await.unwrap().into_inner();
    assert_eq!((story().await.instance, story().await.answered_by), (2, None));
    call.say(answered(&door.endpoints[0])).await;
    for nth in 0..5 {
        call.say(event("a", nth == 4)).await;
        while !matches!(call.next().await.unwrap().unwrap().response, Some(Response::ResponseBody(_))) {}
    }
    let told =
        until("word of the answer", || async { Some(story().await).filter(|story| story.output_tokens > 0) })
            .await;
    assert_eq!((told.instance, told.answered_by, told.output_tokens), (2, Some(1), 5));
    drop(call);
    // The one that was picked answers, or one that nobody knows: it stays where it was sent.
    for by in [door.endpoints[1].as_str(), "10.9.9.9:1"] {
        let (mut call, request) = asked(&opened, BodySendMode::None).await;
        call.say(answered(by)).await;
        while !matches!(call.next().await.unwrap().unwrap().response, Some(Response::ResponseHeaders(_))) {}
        let story = door.cluster.client(1).why(pb::WhyRequest { request }).await.unwrap().into_inner();
        assert_eq!((story.instance, story.answered_by), (2, None), "{by}");
    }
    assert_eq!(opened.counted("kvfleet_doors_picker_served_elsewhere_total"), 2);
    opened.doors.shutdown().await;
    door.shutdown().await;
}
