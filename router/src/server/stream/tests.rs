//! The stream of answers with manual requests and answers; no test waits for network or time.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use futures_util::FutureExt;
use futures_util::stream::poll_fn;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tonic::Code;

use super::*;

/// Decides the answer to one request.
type AnswerSender = oneshot::Sender<Result<(), Code>>;

/// Answers on command.
#[derive(Clone, Default)]
struct ManualHandler(Arc<Mutex<BTreeMap<u64, AnswerSender>>>);

impl ManualHandler {
    fn answers(&self, call: u64, how: Result<(), Code>) {
        self.0.lock().remove(&call).expect("the request arrived").send(how).unwrap();
    }

    fn under_way(&self) -> usize {
        self.0.lock().len()
    }
}

impl RouteHandler for ManualHandler {
    async fn answer(&self, request: pb::RouteRequest) -> Result<pb::RouteReply, Status> {
        let (send, told) = oneshot::channel();
        assert!(self.0.lock().insert(request.call, send).is_none());
        match told.await.unwrap() {
            Ok(()) => Ok(pb::RouteReply::default()),
            Err(code) => Err(Status::new(code, "as told")),
        }
    }
}

/// A stream with access to both ends.
struct StreamScene {
    questions: mpsc::UnboundedSender<Result<pb::RouteRequest, Status>>,
    by_hand: ManualHandler,
    closing: CancellationToken,
    answers: Pin<Box<dyn Stream<Item = Result<pb::RouteStreamReply, Status>>>>,
}

impl StreamScene {
    fn new() -> StreamScene {
        let (questions, mut asked) = mpsc::unbounded_channel();
        let (by_hand, closing) = (ManualHandler::default(), CancellationToken::new());
        let asked = poll_fn(move |context| asked.poll_recv(context));
        let answers = Box::pin(RouteAnswers::new(asked, by_hand.clone(), closing.clone()));
        StreamScene { questions, by_hand, closing, answers }
    }

    fn ask(&self, call: u64, hashes_bytes: usize) {
        let request =
            pb::RouteRequest { request: 7, call, hashes: vec![0; hashes_bytes], ..Default::default() };
        self.questions.send(Ok(request)).unwrap();
    }

    /// The next item after all requested polls; `None` if pending.
    fn next(&mut self) -> Option<Option<Result<pb::RouteStreamReply, Status>>> {
        (0..=1_000 / YIELD_AFTER_REQUESTS).find_map(|_| self.answers.next().now_or_never())
    }

    fn answered(&mut self) -> (u64, Answer) {
        let reply = self.next().expect("an answer is there").unwrap().unwrap();
        assert_eq!(reply.request, 7);
        (reply.call, reply.answer.unwrap())
    }
}

#[test]
fn answers_come_as_they_are_ready() {
    let mut scene = StreamScene::new();
    (1..=4).for_each(|call| scene.ask(call, 16));
    assert!(scene.next().is_none());
    for call in [3, 1, 4, 2] {
        scene.by_hand.answers(call, Ok(()));
        assert_eq!(scene.answered(), (call, Answer::Reply(pb::RouteReply::default())));
        assert!(scene.next().is_none());
    }
}

#[test]
fn a_refused_request_does_not_end_the_stream() {
    let mut scene = StreamScene::new();
    (1..=3).for_each(|call| scene.ask(call, 16));
    assert!(scene.next().is_none());
    scene.by_hand.answers(2, Err(Code::InvalidArgument));
    let refused = pb::Refused { code: Code::InvalidArgument.into(), message: "as told".into() };
    assert_eq!(scene.answered(), (2, Answer::Refused(refused)));
    for call in [1, 3] {
        scene.by_hand.answers(call, Ok(()));
        assert_eq!(scene.answered().0, call);
    }
}

#[test]
fn requests_are_read_as_room_allows() {
    let mut scene = StreamScene::new();
    (0..1_000).for_each(|call| scene.ask(call, 16));
    assert!(scene.next().is_none());
    for call in 0..1_000 {
        assert_eq!(scene.by_hand.under_way() as u64, (1_000 - call).min(REQUESTS_MAX as u64));
        scene.by_hand.answers(call, Ok(()));
        assert_eq!(scene.answered().0, call);
        assert!(scene.next().is_none());
    }
}

#[test]
fn large_requests_are_bounded_by_bytes() {
    let mut scene = StreamScene::new();
    (0..6).for_each(|call| scene.ask(call, 7 << 20));
    scene.ask(6, BYTES_MAX + 1);
    scene.ask(7, 16);
    assert!(scene.next().is_none());
    for (call, left) in (0..8).zip([3, 3, 3, 3, 3, 2, 1, 1]) {
        assert_eq!(scene.by_hand.under_way(), left, "at {call}");
        scene.by_hand.answers(call, Ok(()));
        assert_eq!(scene.answered().0, call);
        assert!(scene.next().is_none());
    }
}

#[test]
fn tokens_and_names_count_as_bytes() {
    let plain = bytes_of(&pb::RouteRequest::default());
    let tokens = pb::RouteRequest { tokens: vec![1; 1_000], ..Default::default() };
    assert_eq!(bytes_of(&tokens) - plain, 1_000 * (4 + HASH_BYTES));
    let (cache_salt, adapter) = ("s".repeat(500), "a".repeat(300));
    let names = pb::RouteRequest { cache_salt, adapter, ..Default::default() };
    assert_eq!(bytes_of(&names) - plain, 800);
}

#[test]
fn an_endless_stream_yields_to_other_tasks() {
    let taken = Arc::new(Mutex::new(0));
    let counted = Arc::clone(&taken);
    let endless = futures_util::stream::repeat_with(move || {
        *counted.lock() += 1;
        Ok(pb::RouteRequest { call: *counted.lock(), ..Default::default() })
    });
    let mut answers = RouteAnswers::new(endless, ManualHandler::default(), CancellationToken::new());
    for turns in 1..=3 {
        assert!(answers.next().now_or_never().is_none());
        assert_eq!(*taken.lock(), u64::from(turns * YIELD_AFTER_REQUESTS));
    }
}

#[test]
fn a_draining_router_answers_only_accepted_requests() {
    let mut scene = StreamScene::new();
    (1..=2).for_each(|call| scene.ask(call, 16));
    assert!(scene.next().is_none());
    scene.closing.cancel();
    scene.ask(3, 16);
    assert!(scene.next().is_none(), "two are in flight");
    for call in [2, 1] {
        scene.by_hand.answers(call, Ok(()));
        assert_eq!(scene.answered().0, call);
    }
    assert!(matches!(scene.next(), Some(None)), "it ends without an error");
    assert_eq!(scene.by_hand.under_way(), 0, "the third was not read");
}

#[test]
fn an_unreadable_message_ends_the_stream_after_outstanding_answers() {
    let mut scene = StreamScene::new();
    scene.ask(1, 16);
    scene.questions.send(Err(Status::out_of_range("too long"))).unwrap();
    scene.ask(2, 16);
    assert!(scene.next().is_none());
    scene.by_hand.answers(1, Ok(()));
    assert_eq!(scene.answered().0, 1);
    let ended = scene.next().unwrap().unwrap().unwrap_err();
    assert_eq!((ended.code(), ended.message()), (Code::OutOfRange, "too long"));
    assert!(matches!(scene.next(), Some(None)));
    // A stream that its caller ends has no error.
    let mut scene = StreamScene::new();
    scene.ask(1, 16);
    drop(std::mem::replace(&mut scene.questions, mpsc::unbounded_channel().0));
    assert!(scene.next().is_none());
    scene.by_hand.answers(1, Ok(()));
    assert_eq!(scene.answered().0, 1);
    assert!(matches!(scene.next(), Some(None)));
}
