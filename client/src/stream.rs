//! The stream of one router on which route calls travel: opened with the first, kept open, and opened again when it has ended.
//!
//! A question is tied to its answer by a number of its own, and one that nobody waits for any more leaves nothing behind. What was not
//! answered when the stream ends fails as a call to a router that went away does, so that it is asked elsewhere. Not
//! here: which router is asked, and how often (`retry.rs`).

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvfleet_proto::pb;
use kvfleet_proto::pb::route_stream_reply::Answer;
use kvfleet_proto::pb::router_client::RouterClient;
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};
use tonic::transport::Channel;
use tonic::{Code, Request, Status, Streaming};

use crate::retry::{ANSWER_TIMEOUT, may_differ_elsewhere};

/// Questions that wait to be written. A router takes in 256 of a stream; whoever has more waits here, within its own time.
const WRITTEN_MAX: usize = 256;

/// Bytes of hashes up to which a question goes over the stream: those of the longest prompt that routers take. What is longer
/// could end the stream for all others.
const HASHES_BYTES_MAX: usize = 1 << 20;

/// The same for points to wait for.
const SEEN_MAX: usize = 4_096;

/// How long a router that takes no streams is asked without; by then it may be of another release.
const ALONE_FOR: Duration = Duration::from_secs(60);

/// Where a router stands among all, and which of them is asked first.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) sticky: Arc<AtomicUsize>,
    pub(crate) position: usize,
    pub(crate) count: usize,
}

impl Place {
    /// Has the next router asked first, if this one was.
    fn leave(&self) {
        let next = (self.position + 1) % self.count;
        // An error says that another one is asked first already.
        let _ = self.sticky.compare_exchange(self.position, next, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Why a question has no answer.
#[derive(Clone, Debug)]
pub(crate) enum NoAnswer {
    /// This is no question for a stream, or no router of streams: ask by a call.
    Alone,
    /// As a call of its own would have ended.
    Failed(Status),
}

type Answered = Result<pb::RouteReply, NoAnswer>;

/// Route calls to one router over a stream.
pub(crate) struct RouteStream {
    client: RouterClient<Channel>,
    place: Place,
    open: Mutex<Option<Open>>,
    /// Questions asked so far over all streams: a late answer of one is no answer of another.
    calls: AtomicU64,
}

impl RouteStream {
    pub(crate) fn new(client: RouterClient<Channel>, place: Place) -> RouteStream {
        RouteStream { client, place, open: Mutex::default(), calls: AtomicU64::default() }
    }

    /// Asks, and waits as long as a call would.
    pub(crate) async fn ask(&self, message: &pb::RouteRequest) -> Answered {
        if message.hashes.len() > HASHES_BYTES_MAX || message.after.len() > SEEN_MAX {
            return Err(NoAnswer::Alone);
        }
        let Entered { written, waits, mut answer, heard } = self.enter()?;
        let message = pb::RouteRequest { call: waits.call, ..message.clone() };
        let asking = async {
            tokio::select! {
                biased;
                ended = &mut answer => ended,
                // Where nobody writes any more, the stream is about to end, and says so to all that wait.
                _ = written.send(message) => (&mut answer).await,
            }
        };
        match timeout(ANSWER_TIMEOUT, asking).await {
            Ok(answered) => answered.unwrap_or_else(|_| Err(NoAnswer::Failed(dropped()))),
            Err(_) => {
                let late = Status::deadline_exceeded(format!("no answer within {ANSWER_TIMEOUT:?}"));
                // Not one answer since: the others that wait have nothing to hope for here either.
                waits.on.end_if_silent_since(heard, &late);
                Err(NoAnswer::Failed(late))
            }
        }
    }

    /// Enters a question into the stream that is open, or into a new one.
    fn enter(&self) -> Result<Entered, NoAnswer> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let mut open = lock(&self.open);
        let entered = match &*open {
            Some(open) if !open.waiting.is_to_be_replaced() => open.enter(call),
            _ => open.insert(Open::begin(self.client.clone(), self.place.clone())).enter(call),
        };
        drop(open);
        entered
    }

    /// Questions that wait for an answer.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        lock(&self.open).as_ref().map_or(0, |open| lock(&open.waiting.inner).calls.len())
    }
}

/// A question on its way.
struct Entered {
    written: mpsc::Sender<pb::RouteRequest>,
    waits: Waits,
    answer: oneshot::Receiver<Answered>,
    /// Answers that had come before.
    heard: u64,
}

/// That a question waits, for as long as somebody waits for it.
struct Waits {
    on: Arc<Waiting>,
    call: u64,
}

impl Drop for Waits {
    fn drop(&mut self) {
        lock(&self.on.inner).calls.remove(&self.call);
    }
}

/// One stream. Its task ends with it.
struct Open {
    written: mpsc::Sender<pb::RouteRequest>,
    waiting: Arc<Waiting>,
    task: AbortHandle,
}

impl Open {
    fn begin(client: RouterClient<Channel>, place: Place) -> Open {
        let (written, words) = mpsc::channel(WRITTEN_MAX);
        let waiting = Arc::new(Waiting { inner: Mutex::default(), place });
        let ending = Ending(Arc::clone(&waiting));
        let task = tokio::spawn(converse(client, words, ending)).abort_handle();
        Open { written, waiting, task }
    }

    fn enter(&self, call: u64) -> Result<Entered, NoAnswer> {
        let mut inner = lock(&self.waiting.inner);
        if let Some(ended) = &inner.ended {
            return Err(ended.why.clone());
        }
        let (send, answer) = oneshot::channel();
        inner.calls.insert(call, send);
        let heard = inner.heard;
        drop(inner);
        let waits = Waits { on: Arc::clone(&self.waiting), call };
        Ok(Entered { written: self.written.clone(), waits, answer, heard })
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Who waits for answers of one stream.
struct Waiting {
    inner: Mutex<Inner>,
    place: Place,
}

#[derive(Default)]
struct Inner {
    calls: HashMap<u64, oneshot::Sender<Answered>>,
    heard: u64,
    ended: Option<Ended>,
}

struct Ended {
    why: NoAnswer,
    at: Instant,
}

impl Waiting {
    /// Gives an answer to who asked for it, if somebody still does.
    fn answered(&self, reply: pb::RouteStreamReply) {
        let answer = match reply.answer {
            Some(Answer::Reply(reply)) => Ok(reply),
            Some(Answer::Refused(pb::Refused { code, message })) => {
                Err(NoAnswer::Failed(Status::new(Code::from_i32(code), message)))
            }
            None => Ok(pb::RouteReply::default()),
        };
        let mut inner = lock(&self.inner);
        inner.heard += 1;
        let asked = inner.calls.remove(&reply.call);
        drop(inner);
        if let Some(asked) = asked {
            // Whoever asked may have given up just now.
            let _ = asked.send(answer);
        }
    }

    /// Ends the stream for all that wait, unless it has ended.
    fn end(&self, why: &NoAnswer) {
        self.end_in(lock(&self.inner), why);
    }

    fn end_if_silent_since(&self, heard: u64, late: &Status) {
        let inner = lock(&self.inner);
        if inner.heard == heard {
            self.end_in(inner, &NoAnswer::Failed(late.clone()));
        }
    }

    fn end_in(&self, mut inner: MutexGuard<'_, Inner>, why: &NoAnswer) {
        if inner.ended.is_some() {
            return;
        }
        inner.ended = Some(Ended { why: why.clone(), at: Instant::now() });
        let left = std::mem::take(&mut inner.calls);
        drop(inner);
        if matches!(why, NoAnswer::Failed(_)) {
            self.place.leave();
        }
        for asked in left.into_values() {
            // As above.
            let _ = asked.send(Err(why.clone()));
        }
    }

    fn is_to_be_replaced(&self) -> bool {
        lock(&self.inner).ended.as_ref().is_some_and(|ended| match ended.why {
            NoAnswer::Alone => ended.at.elapsed() >= ALONE_FOR,
            NoAnswer::Failed(_) => true,
        })
    }
}

/// Whatever becomes of a stream's task, nobody waits for it in vain.
struct Ending(Arc<Waiting>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.end(&NoAnswer::Failed(dropped()));
    }
}

/// Opens the stream and hands out answers until it ends.
async fn converse(
    mut client: RouterClient<Channel>,
    mut words: mpsc::Receiver<pb::RouteRequest>,
    ending: Ending,
) {
    let words = futures_util::stream::poll_fn(move |context| words.poll_recv(context));
    // Without a deadline, which would be one of the whole stream.
    let why = match client.route_stream(Request::new(words)).await {
        Ok(replies) => NoAnswer::Failed(hear(replies.into_inner(), &ending.0).await),
        // Of an earlier release: to members a call that it does not have, to tenants one that is not for them.
        Err(status) if matches!(status.code(), Code::Unimplemented | Code::PermissionDenied) => {
            NoAnswer::Alone
        }
        Err(status) => NoAnswer::Failed(of_stream(status)),
    };
    ending.0.end(&why);
}

/// Why it ended.
async fn hear(mut replies: Streaming<pb::RouteStreamReply>, waiting: &Waiting) -> Status {
    loop {
        match replies.message().await {
            Ok(Some(reply)) => waiting.answered(reply),
            Ok(None) => return Status::unavailable("the router ended its stream of answers"),
            Err(status) => return of_stream(status),
        }
    }
}

/// What ended a stream says nothing against a question on it: it may be asked again.
fn of_stream(status: Status) -> Status {
    if may_differ_elsewhere(status.code()) {
        return status;
    }
    Status::unavailable(format!("the stream of answers ended: {}", status.message()))
}

fn dropped() -> Status {
    Status::unavailable("the stream of answers was dropped")
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}
