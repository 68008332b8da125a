//! Route calls that share a stream, against fake routers over mutual TLS. The tests control the
//! routers' ends of the streams.

use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use kv_core::id::HASH_BYTES;
use kvfleet_net::tls::Identity;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tonic::{Code, Status};

use super::authority::{Authority, config};
use super::routing::{
    FakeRouter, RouterStreamEnd, StreamBehavior, TOO_LONG_BYTES, decision, instance, route_call, serve_fake,
    unused_address,
};
use crate::{Client, ClientConfig, RouteAnswer, RouteCall, RouteError, RouterError};

/// A router with streams that the test controls: its address, its streams, and its counters.
async fn manual_router(
    identity: &Identity,
) -> (String, mpsc::UnboundedReceiver<RouterStreamEnd>, FakeRouter) {
    let (test, conversations) = mpsc::unbounded_channel();
    let mut fake = FakeRouter::new(Err(Code::Internal));
    fake.streams = StreamBehavior::Manual(test);
    let (address, _serving) = serve_fake(identity, fake.clone()).await;
    (address, conversations, fake)
}

/// A router that answers every call with this instance.
async fn automatic_router(identity: &Identity, instance: u32) -> (String, FakeRouter) {
    let fake = FakeRouter::new(Ok(decision(instance)));
    let (address, _serving) = serve_fake(identity, fake.clone()).await;
    (address, fake)
}

type RouteTask = JoinHandle<Result<RouteAnswer, RouteError>>;

/// Starts a route call, and returns it with its number at the router.
async fn route_and_receive(client: &Client, talk: &mut RouterStreamEnd, tokens: u32) -> (u64, RouteTask) {
    let asking = spawn_route(client, tokens);
    let question = talk.next_request().await;
    assert_eq!(question.input_tokens, tokens);
    (question.call, asking)
}

fn spawn_route(client: &Client, tokens: u32) -> RouteTask {
    let client = client.clone();
    tokio::spawn(async move { client.route(RouteCall { input_tokens: tokens, ..route_call() }).await })
}

#[tokio::test]
async fn answers_match_calls_by_number_in_any_order() {
    let authority = Authority::new();
    let (address, mut talks, fake) = manual_router(&authority.router()).await;
    let client = Client::new(config(vec![address], authority.member())).unwrap();
    let first = spawn_route(&client, 1);
    let mut talk = talks.recv().await.unwrap();
    let mut calls = vec![(talk.next_request().await.call, first)];
    for tokens in 2..=3 {
        calls.push(route_and_receive(&client, &mut talk, tokens).await);
    }
    // All have the same request number, and are sent three times.
    let (first, second, third) = (calls[0].0, calls[1].0, calls[2].0);
    assert!(first != second && second != third && first != third);
    talk.answer(u64::MAX, 9);
    talk.answer(third, 3);
    talk.answer(third, 9);
    talk.answer(first, 1);
    talk.answer(second, 2);
    for (expected, (_, asked)) in (1..).zip(calls) {
        assert_eq!(instance(asked.await.unwrap().unwrap()), expected);
    }
    assert_eq!((fake.opened.load(Ordering::Relaxed), fake.calls.load(Ordering::Relaxed)), (1, 0));
}

#[tokio::test]
async fn refusal_ends_one_call_and_transient_failure_is_retried_elsewhere() {
    let authority = Authority::new();
    let (address, mut talks, _) = manual_router(&authority.router()).await;
    let (other, _) = automatic_router(&authority.router(), 8).await;
    let client = Client::new(config(vec![address.clone(), other], authority.member())).unwrap();
    let good = spawn_route(&client, 1);
    let mut talk = talks.recv().await.unwrap();
    let good_call = talk.next_request().await.call;
    let (wrong_call, wrong) = route_and_receive(&client, &mut talk, 2).await;
    let (late_call, late) = route_and_receive(&client, &mut talk, 3).await;
    talk.refuse(wrong_call, Code::InvalidArgument);
    talk.refuse(late_call, Code::Unavailable);
    let error = wrong.await.unwrap().unwrap_err();
    assert_eq!(error.to_string(), format!("router {address} refused the call: as told"));
    assert_eq!(instance(late.await.unwrap().unwrap()), 8);
    talk.answer(good_call, 1);
    assert_eq!(instance(good.await.unwrap().unwrap()), 1);
}

/// Sends 50 calls to a router that answers 10 and then ends as given; the other router answers the
/// rest.
async fn check_rest_is_retried_elsewhere(end: impl FnOnce(RouterStreamEnd)) {
    let authority = Authority::new();
    let (address, mut talks, fake) = manual_router(&authority.router()).await;
    let (other, others) = automatic_router(&authority.router(), 8).await;
    let client = Client::new(config(vec![address, other], authority.member())).unwrap();
    let asking: Vec<_> = (0..50).map(|_| spawn_route(&client, 48)).collect();
    let mut talk = talks.recv().await.unwrap();
    let mut calls = Vec::new();
    while calls.len() < 50 {
        calls.push(talk.next_request().await.call);
    }
    calls[..10].iter().for_each(|call| talk.answer(*call, 7));
    end(talk);
    let answers: Vec<_> =
        join_all(asking).await.into_iter().map(|one| instance(one.unwrap().unwrap())).collect();
    let of = |one| answers.iter().filter(|answer| **answer == one).count();
    assert_eq!((of(7), of(8)), (10, 40));
    // The other router is asked first from now on.
    assert_eq!(instance(client.route(route_call()).await.unwrap()), 8);
    assert_eq!(fake.opened.load(Ordering::Relaxed), 1);
    assert_eq!(others.opened.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn calls_on_an_ended_stream_go_to_the_next_router() {
    check_rest_is_retried_elsewhere(drop).await;
}

#[tokio::test]
async fn calls_on_a_broken_stream_go_to_the_next_router() {
    for code in [Code::Unavailable, Code::Internal, Code::OutOfRange, Code::InvalidArgument] {
        check_rest_is_retried_elsewhere(|talk| {
            talk.answers.send(Err(Status::new(code, "as told"))).unwrap();
        })
        .await;
    }
}

#[tokio::test]
async fn calls_to_a_dead_router_are_answered_by_another() {
    let authority = Authority::new();
    // On a separate runtime, so that shutting it down closes the connections.
    let doomed = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let member = authority.router();
    let (address, mut talks, _) = doomed.spawn(async move { manual_router(&member).await }).await.unwrap();
    let (other, _) = automatic_router(&authority.router(), 8).await;
    let client = Client::new(config(vec![address, other], authority.member())).unwrap();
    let asking: Vec<_> = (0..20).map(|_| spawn_route(&client, 48)).collect();
    let mut talk = talks.recv().await.unwrap();
    for _ in 0..20 {
        talk.next_request().await;
    }
    doomed.shutdown_background();
    for one in asking {
        assert_eq!(instance(one.await.unwrap().unwrap()), 8);
    }
}

#[tokio::test]
async fn router_ending_an_idle_stream_is_not_first_any_more() {
    let authority = Authority::new();
    let (address, mut talks, fake) = manual_router(&authority.router()).await;
    let (other, _) = automatic_router(&authority.router(), 8).await;
    let client = Client::new(config(vec![address, other], authority.member())).unwrap();
    let one = spawn_route(&client, 1);
    let mut talk = talks.recv().await.unwrap();
    let call = talk.next_request().await.call;
    talk.answer(call, 7);
    assert_eq!(instance(one.await.unwrap().unwrap()), 7);
    drop(talk);
    while client.routers.first() == 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(instance(client.route(route_call()).await.unwrap()), 8);
    assert_eq!(fake.opened.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn only_router_is_asked_again_on_a_new_stream() {
    let authority = Authority::new();
    let (address, mut talks, _) = manual_router(&authority.router()).await;
    let client = Client::new(config(vec![address], authority.member())).unwrap();
    let one = spawn_route(&client, 1);
    let mut talk = talks.recv().await.unwrap();
    let first = talk.next_request().await.call;
    drop(talk);
    let mut talk = talks.recv().await.unwrap();
    let again = talk.next_request().await.call;
    // A late answer of the first stream must not match a call on the second.
    assert_ne!(first, again);
    talk.answer(first, 6);
    talk.answer(again, 7);
    assert_eq!(instance(one.await.unwrap().unwrap()), 7);
}

#[tokio::test]
async fn routers_without_streams_get_unary_calls_for_a_period() {
    let authority = Authority::new();
    // A router of an earlier release: it lacks the method for members, or does not allow it to
    // tenants.
    for code in [Code::Unimplemented, Code::PermissionDenied] {
        let mut fake = FakeRouter::new(Ok(decision(7)));
        fake.streams = StreamBehavior::Refused(code);
        let (address, _serving) = serve_fake(&authority.router(), fake.clone()).await;
        let client = Client::new(config(vec![address], authority.member())).unwrap();
        let counted = || (fake.opened.load(Ordering::Relaxed), fake.calls.load(Ordering::Relaxed));
        for calls in 1..=5 {
            assert_eq!(instance(client.route(route_call()).await.unwrap()), 7);
            assert_eq!(counted(), (1, calls), "{code:?}");
        }
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(61)).await;
        tokio::time::resume();
        assert_eq!(instance(client.route(route_call()).await.unwrap()), 7);
        assert_eq!(counted(), (2, 6), "{code:?}");
    }
}

#[tokio::test]
async fn streams_can_be_disabled() {
    let authority = Authority::new();
    let (address, fake) = automatic_router(&authority.router(), 7).await;
    let config = ClientConfig { route_streams: false, ..config(vec![address], authority.member()) };
    let client = Client::new(config).unwrap();
    assert_eq!(instance(client.route(route_call()).await.unwrap()), 7);
    assert_eq!((fake.opened.load(Ordering::Relaxed), fake.calls.load(Ordering::Relaxed)), (0, 1));
}

#[tokio::test]
async fn abandoned_calls_leave_no_state_and_late_answers_are_ignored() {
    let authority = Authority::new();
    let (address, mut talks, _) = manual_router(&authority.router()).await;
    let client = Client::new(config(vec![address], authority.member())).unwrap();
    let given_up = spawn_route(&client, 1);
    let mut talk = talks.recv().await.unwrap();
    let late = talk.next_request().await.call;
    let mut more = JoinSet::new();
    for _ in 0..40 {
        let client = client.clone();
        more.spawn(async move { client.route(route_call()).await });
        talk.next_request().await;
    }
    assert_eq!(client.routers.pending_calls(), 41);
    given_up.abort();
    more.shutdown().await;
    assert!(given_up.await.unwrap_err().is_cancelled());
    assert_eq!(client.routers.pending_calls(), 0);
    talk.answer(late, 6);
    let (call, good) = route_and_receive(&client, &mut talk, 2).await;
    talk.answer(call, 7);
    assert_eq!(instance(good.await.unwrap().unwrap()), 7);
    assert_eq!(client.routers.pending_calls(), 0);
}

#[tokio::test]
async fn first_timeout_on_a_silent_stream_fails_all_calls() {
    let authority = Authority::new();
    let (address, mut talks, _) = manual_router(&authority.router()).await;
    let (other, _) = automatic_router(&authority.router(), 8).await;
    let client = Client::new(config(vec![address, other], authority.member())).unwrap();
    let early = spawn_route(&client, 1);
    let mut talk = talks.recv().await.unwrap();
    talk.next_request().await;
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(2)).await;
    tokio::time::resume();
    let (_, late) = route_and_receive(&client, &mut talk, 2).await;
    tokio::time::pause();
    tokio::time::advance(Duration::from_millis(1_100)).await;
    tokio::time::resume();
    assert_eq!(instance(early.await.unwrap().unwrap()), 8);
    let begun = tokio::time::Instant::now();
    assert_eq!(instance(late.await.unwrap().unwrap()), 8);
    assert!(begun.elapsed() < Duration::from_secs(1), "the second call ended before its own timeout");
}

#[tokio::test]
async fn slow_answer_fails_only_its_own_call() {
    let authority = Authority::new();
    let (address, mut talks, _) = manual_router(&authority.router()).await;
    let (other, _) = automatic_router(&authority.router(), 8).await;
    let client = Client::new(config(vec![address, other], authority.member())).unwrap();
    let slow = spawn_route(&client, 1);
    let mut talk = talks.recv().await.unwrap();
    talk.next_request().await;
    let (call, good) = route_and_receive(&client, &mut talk, 2).await;
    talk.answer(call, 7);
    assert_eq!(instance(good.await.unwrap().unwrap()), 7);
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(2)).await;
    tokio::time::resume();
    let (call, patient) = route_and_receive(&client, &mut talk, 3).await;
    tokio::time::pause();
    tokio::time::advance(Duration::from_millis(1_100)).await;
    tokio::time::resume();
    assert_eq!(instance(slow.await.unwrap().unwrap()), 8);
    talk.answer(call, 7);
    assert_eq!(instance(patient.await.unwrap().unwrap()), 7);
}

#[tokio::test]
async fn oversized_calls_are_unary() {
    let authority = Authority::new();
    let (address, fake) = automatic_router(&authority.router(), 7).await;
    let client = Client::new(config(vec![address], authority.member())).unwrap();
    let hash = route_call().hashes[0];
    let long = RouteCall { hashes: vec![hash; TOO_LONG_BYTES / HASH_BYTES], ..route_call() };
    assert_eq!(instance(client.route(long).await.unwrap()), 7);
    assert_eq!((fake.opened.load(Ordering::Relaxed), fake.calls.load(Ordering::Relaxed)), (0, 1));
    assert_eq!(instance(client.route(route_call()).await.unwrap()), 7);
    assert_eq!((fake.opened.load(Ordering::Relaxed), fake.calls.load(Ordering::Relaxed)), (1, 2));
}

#[tokio::test]
async fn concurrent_calls_share_one_stream() {
    let authority = Authority::new();
    let (address, fake) = automatic_router(&authority.router(), 7).await;
    let client = Client::new(config(vec![address], authority.member())).unwrap();
    let asking: Vec<_> = (0..1_000).map(|_| spawn_route(&client, 48)).collect();
    for one in asking {
        assert_eq!(instance(one.await.unwrap().unwrap()), 7);
    }
    assert_eq!((fake.opened.load(Ordering::Relaxed), fake.calls.load(Ordering::Relaxed)), (1, 1_000));
}

#[tokio::test]
async fn stream_ends_with_the_client() {
    let authority = Authority::new();
    let (address, mut talks, _) = manual_router(&authority.router()).await;
    let client = Client::new(config(vec![address], authority.member())).unwrap();
    let one = spawn_route(&client, 1);
    let mut talk = talks.recv().await.unwrap();
    let call = talk.next_request().await.call;
    talk.answer(call, 7);
    assert_eq!(instance(one.await.unwrap().unwrap()), 7);
    drop(client);
    // Through a normal end or a reset.
    assert!(!matches!(talk.requests.message().await, Ok(Some(_))));
}

#[tokio::test]
async fn unreachable_routers_fail_all_calls() {
    let authority = Authority::new();
    let client = Client::new(config(vec![unused_address(), unused_address()], authority.member())).unwrap();
    for one in (0..10).map(|_| spawn_route(&client, 48)).collect::<Vec<_>>() {
        let error = one.await.unwrap().unwrap_err();
        assert!(matches!(error, RouteError::Router(RouterError::NoneAnswered { .. })), "{error}");
    }
}
