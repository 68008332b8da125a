//! Route calls that share a stream, against fake routers over mutual TLS whose end of it the tests have in hand.

use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use kvfleet_proto::tls::Identity;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tonic::{Code, Status};

use super::authority::{Authority, config};
use super::routing::{
    Conversation, Fake, Streams, TOO_LONG_BYTES, decision, instance, nobody, route_call, serve_fake,
};
use crate::{Client, ClientConfig, RouteAnswer, RouteCall, RouteError, RouterError};

/// A router whose streams come here; its address, its streams, and what it counts.
async fn by_hand(identity: &Identity) -> (String, mpsc::UnboundedReceiver<Conversation>, Fake) {
    let (test, conversations) = mpsc::unbounded_channel();
    let mut fake = Fake::new(Err(Code::Internal));
    fake.streams = Streams::ByHand(test);
    let (address, _serving) = serve_fake(identity, fake.clone()).await;
    (address, conversations, fake)
}

/// A router that answers everything with this instance.
async fn at_once(identity: &Identity, instance: u32) -> (String, Fake) {
    let fake = Fake::new(Ok(decision(instance)));
    let (address, _serving) = serve_fake(identity, fake.clone()).await;
    (address, fake)
}

type Asked = JoinHandle<Result<RouteAnswer, RouteError>>;

/// Asks, and comes back with the question as the router has it.
async fn asked(client: &Client, talk: &mut Conversation, tokens: u32) -> (u64, Asked) {
    let asking = ask(client, tokens);
    let question = talk.question().await;
    assert_eq!(question.input_tokens, tokens);
    (question.call, asking)
}

fn ask(client: &Client, tokens: u32) -> Asked {
    let client = client.clone();
    tokio::spawn(async move { client.route(RouteCall { input_tokens: tokens, ..route_call() }).await })
}

#[tokio::test]
async fn answers_belong_to_the_question_of_their_number_whatever_their_order() {
    let authority = Authority::new();
    let (address, mut talks, fake) = by_hand(&authority.member()).await;
    let client = Client::new(config(vec![address], authority.member())).unwrap();
    let first = ask(&client, 1);
    let mut talk = talks.recv().await.unwrap();
    let mut calls = vec![(talk.question().await.call, first)];
    for tokens in 2..=3 {
        calls.push(asked(&client, &mut talk, tokens).await);
    }
    // All are of one request, asked three times.
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
async fn one_that_is_refused_ends_alone_and_one_that_may_differ_elsewhere_is_asked_there() {
    let authority = Authority::new();
    let (address, mut talks, _) = by_hand(&authority.member()).await;
    let (other, _) = at_once(&authority.member(), 8).await;
    let client = Client::new(config(vec![address.clone(), other], authority.member())).unwrap();
    let good = ask(&client, 1);
    let mut talk = talks.recv().await.unwrap();
    let good_call = talk.question().await.call;
    let (wrong_call, wrong) = asked(&client, &mut talk, 2).await;
    let (late_call, late) = asked(&client, &mut talk, 3).await;
    talk.refuse(wrong_call, Code::InvalidArgument);
    talk.refuse(late_call, Code::Unavailable);
    let error = wrong.await.unwrap().unwrap_err();
    assert_eq!(error.to_string(), format!("router {address} refused the call: as told"));
    assert_eq!(instance(late.await.unwrap().unwrap()), 8);
    talk.answer(good_call, 1);
    assert_eq!(instance(good.await.unwrap().unwrap()), 1);
}

/// Asks 50 questions of a router, which answers 10 and then ends as it does; the other one answers the rest.
async fn the_rest_is_asked_elsewhere(end: impl FnOnce(Conversation)) {
    let authority = Authority::new();
    let (address, mut talks, fake) = by_hand(&authority.member()).await;
    let (other, others) = at_once(&authority.member(), 8).await;
    let client = Client::new(config(vec![address, other], authority.member())).unwrap();
    let asking: Vec<_> = (0..50).map(|_| ask(&client, 48)).collect();
    let mut talk = talks.recv().await.unwrap();
    let mut calls = Vec::new();
    while calls.len() < 50 {
        calls.push(talk.question().await.call);
    }
    calls[..10].iter().for_each(|call| talk.answer(*call, 7));
    end(talk);
    let answers: Vec<_> =
        join_all(asking).await.into_iter().map(|one| instance(one.unwrap().unwrap())).collect();
    let of = |one| answers.iter().filter(|answer| **answer == one).count();
    assert_eq!((of(7), of(8)), (10, 40));
    // The other one is asked first from here on.
    assert_eq!(instance(client.route(route_call()).await.unwrap()), 8);
    assert_eq!(fake.opened.load(Ordering::Relaxed), 1);
    assert_eq!(others.opened.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn what_a_router_that_ends_its_stream_did_not_answer_is_asked_of_the_next() {
    the_rest_is_asked_elsewhere(drop).await;
}

#[tokio::test]
async fn what_a_stream_that_breaks_left_open_is_asked_of_the_next_whatever_broke_it() {
    for code in [Code::Unavailable, Code::Internal, Code::OutOfRange, Code::InvalidArgument] {
        the_rest_is_asked_elsewhere(|talk| {
            talk.answers.send(Err(Status::new(code, "as told"))).unwrap();
        })
        .await;
    }
}

#[tokio::test]
async fn when_a_router_dies_with_its_connections_all_questions_are_answered_by_another() {
    let authority = Authority::new();
    // On a runtime of its own, which takes the open connections with it when it goes.
    let doomed = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let member = authority.member();
    let (address, mut talks, _) = doomed.spawn(async move { by_hand(&member).await }).await.unwrap();
    let (other, _) = at_once(&authority.member(), 8).await;
    let client = Client::new(config(vec![address, other], authority.member())).unwrap();
    let asking: Vec<_> = (0..20).map(|_| ask(&client, 48)).collect();
    let mut talk = talks.recv().await.unwrap();
    for _ in 0..20 {
        talk.question().await;
    }
    doomed.shutdown_background();
    for one in asking {
        assert_eq!(instance(one.await.unwrap().unwrap()), 8);
    }
}

#[tokio::test]
async fn a_router_that_ends_a_stream_on_which_nobody_waits_is_not_asked_first_any_more() {
    let authority = Authority::new();
    let (address, mut talks, fake) = by_hand(&authority.member()).await;
    let (other, _) = at_once(&authority.member(), 8).await;
    let client = Client::new(config(vec![address, other], authority.member())).unwrap();
    let one = ask(&client, 1);
    let mut talk = talks.recv().await.unwrap();
    let call = talk.question().await.call;
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
async fn the_only_router_is_asked_again_over_a_new_stream() {
    let authority = Authority::new();
    let (address, mut talks, _) = by_hand(&authority.member()).await;
    let client = Client::new(config(vec![address], authority.member())).unwrap();
    let one = ask(&client, 1);
    let mut talk = talks.recv().await.unwrap();
    let first = talk.question().await.call;
    drop(talk);
    let mut talk = talks.recv().await.unwrap();
    let again = talk.question().await.call;
    // What the first stream might still have said is no answer of the second.
    assert_ne!(first, again);
    talk.answer(first, 6);
    talk.answer(again, 7);
    assert_eq!(instance(one.await.unwrap().unwrap()), 7);
}

#[tokio::test]
async fn routers_that_take_no_streams_are_asked_by_calls_and_for_streams_again_later() {
    let authority = Authority::new();
    // To members a call that an earlier release does not have, to tenants one that is not for them.
    for code in [Code::Unimplemented, Code::PermissionDenied] {
        let mut fake = Fake::new(Ok(decision(7)));
        fake.streams = Streams::Refused(code);
        let (address, _serving) = serve_fake(&authority.member(), fake.clone()).await;
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
async fn streams_can_be_switched_off() {
    let authority = Authority::new();
    let (address, fake) = at_once(&authority.member(), 7).await;
    let config = ClientConfig { route_streams: false, ..config(vec![address], authority.member()) };
    let client = Client::new(config).unwrap();
    assert_eq!(instance(client.route(route_call()).await.unwrap()), 7);
    assert_eq!((fake.opened.load(Ordering::Relaxed), fake.calls.load(Ordering::Relaxed)), (0, 1));
}

#[tokio::test]
async fn what_is_given_up_leaves_nothing_behind_and_its_late_answer_is_nobodys() {
    let authority = Authority::new();
    let (address, mut talks, _) = by_hand(&authority.member()).await;
    let client = Client::new(config(vec![address], authority.member())).unwrap();
    let given_up = ask(&client, 1);
    let mut talk = talks.recv().await.unwrap();
    let late = talk.question().await.call;
    let mut more = JoinSet::new();
    for _ in 0..40 {
        let client = client.clone();
        more.spawn(async move { client.route(route_call()).await });
        talk.question().await;
    }
    assert_eq!(client.routers.waiting(), 41);
    given_up.abort();
    more.shutdown().await;
    assert!(given_up.await.unwrap_err().is_cancelled());
    assert_eq!(client.routers.waiting(), 0);
    talk.answer(late, 6);
    let (call, good) = asked(&client, &mut talk, 2).await;
    talk.answer(call, 7);
    assert_eq!(instance(good.await.unwrap().unwrap()), 7);
    assert_eq!(client.routers.waiting(), 0);
}

#[tokio::test]
async fn a_router_that_says_nothing_any_more_is_left_by_all_when_the_first_has_waited_long_enough() {
    let authority = Authority::new();
    let (address, mut talks, _) = by_hand(&authority.member()).await;
    let (other, _) = at_once(&authority.member(), 8).await;
    let client = Client::new(config(vec![address, other], authority.member())).unwrap();
    let early = ask(&client, 1);
    let mut talk = talks.recv().await.unwrap();
    talk.question().await;
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(2)).await;
    tokio::time::resume();
    let (_, late) = asked(&client, &mut talk, 2).await;
    tokio::time::pause();
    tokio::time::advance(Duration::from_millis(1_100)).await;
    tokio::time::resume();
    assert_eq!(instance(early.await.unwrap().unwrap()), 8);
    let begun = tokio::time::Instant::now();
    assert_eq!(instance(late.await.unwrap().unwrap()), 8);
    assert!(begun.elapsed() < Duration::from_secs(1), "its own time was not over");
}

#[tokio::test]
async fn a_slow_answer_ends_one_question_where_others_have_theirs() {
    let authority = Authority::new();
    let (address, mut talks, _) = by_hand(&authority.member()).await;
    let (other, _) = at_once(&authority.member(), 8).await;
    let client = Client::new(config(vec![address, other], authority.member())).unwrap();
    let slow = ask(&client, 1);
    let mut talk = talks.recv().await.unwrap();
    talk.question().await;
    let (call, good) = asked(&client, &mut talk, 2).await;
    talk.answer(call, 7);
    assert_eq!(instance(good.await.unwrap().unwrap()), 7);
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(2)).await;
    tokio::time::resume();
    let (call, patient) = asked(&client, &mut talk, 3).await;
    tokio::time::pause();
    tokio::time::advance(Duration::from_millis(1_100)).await;
    tokio::time::resume();
    assert_eq!(instance(slow.await.unwrap().unwrap()), 8);
    talk.answer(call, 7);
    assert_eq!(instance(patient.await.unwrap().unwrap()), 7);
}

#[tokio::test]
async fn what_is_too_long_for_a_stream_is_asked_by_a_call() {
    let authority = Authority::new();
    let (address, fake) = at_once(&authority.member(), 7).await;
    let client = Client::new(config(vec![address], authority.member())).unwrap();
    let hash = route_call().hashes[0];
    let long = RouteCall { hashes: vec![hash; TOO_LONG_BYTES / 16], ..route_call() };
    assert_eq!(instance(client.route(long).await.unwrap()), 7);
    assert_eq!((fake.opened.load(Ordering::Relaxed), fake.calls.load(Ordering::Relaxed)), (0, 1));
    assert_eq!(instance(client.route(route_call()).await.unwrap()), 7);
    assert_eq!((fake.opened.load(Ordering::Relaxed), fake.calls.load(Ordering::Relaxed)), (1, 2));
}

#[tokio::test]
async fn a_thousand_at_once_share_one_stream() {
    let authority = Authority::new();
    let (address, fake) = at_once(&authority.member(), 7).await;
    let client = Client::new(config(vec![address], authority.member())).unwrap();
    let asking: Vec<_> = (0..1_000).map(|_| ask(&client, 48)).collect();
    for one in asking {
        assert_eq!(instance(one.await.unwrap().unwrap()), 7);
    }
    assert_eq!((fake.opened.load(Ordering::Relaxed), fake.calls.load(Ordering::Relaxed)), (1, 1_000));
}

#[tokio::test]
async fn the_stream_ends_with_the_client() {
    let authority = Authority::new();
    let (address, mut talks, _) = by_hand(&authority.member()).await;
    let client = Client::new(config(vec![address], authority.member())).unwrap();
    let one = ask(&client, 1);
    let mut talk = talks.recv().await.unwrap();
    let call = talk.question().await.call;
    talk.answer(call, 7);
    assert_eq!(instance(one.await.unwrap().unwrap()), 7);
    drop(client);
    // By a word or by a reset.
    assert!(!matches!(talk.questions.message().await, Ok(Some(_))));
}

#[tokio::test]
async fn where_nobody_listens_all_hear_it() {
    let authority = Authority::new();
    let client = Client::new(config(vec![nobody(), nobody()], authority.member())).unwrap();
    for one in (0..10).map(|_| ask(&client, 48)).collect::<Vec<_>>() {
        let error = one.await.unwrap().unwrap_err();
        assert!(matches!(error, RouteError::Router(RouterError::NoneAnswered { .. })), "{error}");
    }
}
