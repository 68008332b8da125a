//! The stream of answers over questions and answers by hand: nothing here waits for a network or for time.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use futures_util::FutureExt;
use futures_util::stream::poll_fn;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tonic::Code;

use super::*;

/// How a question is to be answered.
type Told = oneshot::Sender<Result<(), Code>>;

/// Answers when it is told to.
#[derive(Clone, Default)]
struct ByHand(Arc<Mutex<BTreeMap<u64, Told>>>);

impl ByHand {
    fn answers(&self, call: u64, how: Result<(), Code>) {
        self.0.lock().remove(&call).expect("it was asked").send(how).unwrap();
    }

    fn under_way(&self) -> usize {
        self.0.lock().len()
    }
}

impl Answering for ByHand {
    async fn answer(&self, request: pb::RouteRequest) -> Result<pb::RouteReply, Status> {
        let (send, told) = oneshot::channel();
        assert!(self.0.lock().insert(request.call, send).is_none());
        match told.await.unwrap() {
            Ok(()) => Ok(pb::RouteReply::default()),
            Err(code) => Err(Status::new(code, "as told")),
        }
    }
}

/// A stream, with its ends in hand.
struct Scene {
    questions: mpsc::UnboundedSender<Result<pb::RouteRequest, Status>>,
    by_hand: ByHand,
    closing: CancellationToken,
    answers: Pin<Box<dyn Stream<Item = Result<pb::RouteStreamReply, Status>>>>,
}

impl Scene {
    fn new() -> Scene {
        let (questions, mut asked) = mpsc::unbounded_channel();
        let (by_hand, closing) = (ByHand::default(), CancellationToken::new());
        let asked = poll_fn(move |context| asked.poll_recv(context));
        let answers = Box::pin(Answers::new(asked, by_hand.clone(), closing.clone()));
        Scene { questions, by_hand, closing, answers }
    }

    fn ask(&self, call: u64, hashes_bytes: usize) {
        let request =
            pb::RouteRequest { request: 7, call, hashes: vec![0; hashes_bytes], ..Default::default() };
        self.questions.send(Ok(request)).unwrap();
    }

    /// What is there now, after all turns that the stream wants at once; `None` for nothing.
    fn next(&mut self) -> Option<Option<Result<pb::RouteStreamReply, Status>>> {
        (0..=1_000 / TURN_QUESTIONS).find_map(|_| self.answers.next().now_or_never())
    }

    fn answered(&mut self) -> (u64, Answer) {
        let reply = self.next().expect("an answer is there").unwrap().unwrap();
        assert_eq!(reply.request, 7);
        (reply.call, reply.answer.unwrap())
    }
}

#[test]
fn answers_come_in_the_order_in_which_they_are_ready() {
    let mut scene = Scene::new();
    (1..=4).for_each(|call| scene.ask(call, 16));
    assert!(scene.next().is_none());
    for call in [3, 1, 4, 2] {
        scene.by_hand.answers(call, Ok(()));
        assert_eq!(scene.answered(), (call, Answer::Reply(pb::RouteReply::default())));
        assert!(scene.next().is_none());
    }
}

#[test]
fn one_that_is_refused_ends_by_itself() {
    let mut scene = Scene::new();
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
fn a_thousand_at_once_are_taken_in_as_there_is_room() {
    let mut scene = Scene::new();
    (0..1_000).for_each(|call| scene.ask(call, 16));
    assert!(scene.next().is_none());
    for call in 0..1_000 {
        assert_eq!(scene.by_hand.under_way() as u64, (1_000 - call).min(QUESTIONS_MAX as u64));
        scene.by_hand.answers(call, Ok(()));
        assert_eq!(scene.answered().0, call);
        assert!(scene.next().is_none());
    }
}

#[test]
fn large_ones_are_bounded_by_their_bytes_and_the_largest_goes_alone() {
    let mut scene = Scene::new();
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
fn others_on_the_thread_have_their_turn_though_questions_never_end() {
    let taken = Arc::new(Mutex::new(0));
    let counted = Arc::clone(&taken);
    let endless = futures_util::stream::repeat_with(move || {
        *counted.lock() += 1;
        Ok(pb::RouteRequest { call: *counted.lock(), ..Default::default() })
    });
    let mut answers = Answers::new(endless, ByHand::default(), CancellationToken::new());
    for turns in 1..=3 {
        assert!(answers.next().now_or_never().is_none());
        assert_eq!(*taken.lock(), u64::from(turns * TURN_QUESTIONS));
    }
}

#[test]
fn a_router_that_drains_answers_what_it_took_in_and_nothing_else() {
    let mut scene = Scene::new();
    (1..=2).for_each(|call| scene.ask(call, 16));
    assert!(scene.next().is_none());
    scene.closing.cancel();
    scene.ask(3, 16);
    assert!(scene.next().is_none(), "two are under way");
    for call in [2, 1] {
        scene.by_hand.answers(call, Ok(()));
        assert_eq!(scene.answered().0, call);
    }
    assert!(matches!(scene.next(), Some(None)), "it ends well");
    assert_eq!(scene.by_hand.under_way(), 0, "the third was not taken in");
}

#[test]
fn what_cannot_be_read_ends_the_stream_behind_the_answers_under_way() {
    let mut scene = Scene::new();
    scene.ask(1, 16);
    scene.questions.send(Err(Status::out_of_range("too long"))).unwrap();
    scene.ask(2, 16);
    assert!(scene.next().is_none());
    scene.by_hand.answers(1, Ok(()));
    assert_eq!(scene.answered().0, 1);
    let ended = scene.next().unwrap().unwrap().unwrap_err();
    assert_eq!((ended.code(), ended.message()), (Code::OutOfRange, "too long"));
    assert!(matches!(scene.next(), Some(None)));
    // And one that ends by its caller's word ends well.
    let mut scene = Scene::new();
    scene.ask(1, 16);
    drop(std::mem::replace(&mut scene.questions, mpsc::unbounded_channel().0));
    assert!(scene.next().is_none());
    scene.by_hand.answers(1, Ok(()));
    assert_eq!(scene.answered().0, 1);
    assert!(matches!(scene.next(), Some(None)));
}
