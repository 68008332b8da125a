//! A fake node's stream to one shard: a fixed number of batches in flight, or batches at fixed
//! times.
//!
//! Not here: the announced events (`events.rs`) and the output (`main.rs`).

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use chaos_tests::cluster::RouterClients;
use kvfleet_proto::pb::announce_reply::Body as Reply;
use kvfleet_proto::pb::announce_request::Body as Word;
use kvfleet_proto::{convert, pb};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::events::Events;

/// Interval of real nodes.
const HEARTBEAT: Duration = Duration::from_millis(100);

/// When batches are sent.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Pace {
    /// The next one if fewer than this many await their acknowledgement.
    InFlight(usize),
    /// One at each of these intervals, independent of earlier ones.
    Every(Duration),
}

/// One phase of load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Phase {
    pub(crate) pace: Pace,
    /// Events of one batch.
    pub(crate) batch_events: u64,
    /// Acknowledgements count from here on.
    pub(crate) from: Instant,
    pub(crate) until: Instant,
}

/// Acknowledged work in the counted time.
#[derive(Clone, Debug, Default)]
pub(crate) struct PhaseReport {
    /// Blocks stored and dropped.
    pub(crate) blocks: u64,
    pub(crate) events: u64,
    /// Time from a batch's due time to its acknowledgement.
    pub(crate) micros: Vec<u64>,
}

struct SentBatch {
    seq: u64,
    events: Range<u64>,
    due: Instant,
}

pub(crate) struct Announcer {
    contacts: RouterClients,
    epoch: u64,
    events: Events,
    next_seq: u64,
    next_event: u64,
    /// Not acknowledged yet; the first `on_stream` of them are on the current stream.
    unacked: VecDeque<SentBatch>,
    on_stream: usize,
    report: PhaseReport,
}

type RequestSender = mpsc::Sender<pb::AnnounceRequest>;

impl Announcer {
    pub(crate) fn new(contacts: RouterClients, epoch: u64, events: Events) -> Announcer {
        let (unacked, report) = (VecDeque::new(), PhaseReport::default());
        Announcer { contacts, epoch, events, next_seq: 1, next_event: 0, unacked, on_stream: 0, report }
    }

    /// Announces through a phase, and until all batches are acknowledged. Returns the counts.
    pub(crate) async fn run(mut self, phase: Phase) -> (Announcer, PhaseReport) {
        let (mut words, mut replies) = self.open().await;
        let mut due = Instant::now();
        loop {
            let now = Instant::now();
            if now < phase.until {
                due = self.make_due_batches(phase, due, now);
            } else if self.unacked.is_empty() {
                break;
            }
            let sent = self.send(&words).await;
            let paced = matches!(phase.pace, Pace::Every(_)) && now < phase.until;
            let answer = tokio::select! {
                reply = replies.message() => reply.ok().flatten().and_then(|reply| reply.body),
                () = tokio::time::sleep_until(due.into()), if paced => continue,
            };
            match answer {
                Some(Reply::Ack(ack)) if sent => self.acked(ack.seq, phase),
                Some(Reply::Directives(_)) if sent => {}
                // No leader, or a busy one: retry on a new stream.
                _ => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    (words, replies) = self.open().await;
                }
            }
        }
        let tally = std::mem::take(&mut self.report);
        (self, tally)
    }

    /// Creates the batches that are due. Returns the next due time.
    fn make_due_batches(&mut self, phase: Phase, mut due: Instant, now: Instant) -> Instant {
        match phase.pace {
            Pace::InFlight(most) => {
                while self.unacked.len() < most {
                    self.batch(phase.batch_events, now);
                }
            }
            Pace::Every(interval) => {
                while due <= now {
                    self.batch(phase.batch_events, due);
                    due += interval;
                }
            }
        }
        due
    }

    fn batch(&mut self, count: u64, due: Instant) {
        let events = self.next_event..self.next_event + count;
        self.next_event = events.end;
        self.unacked.push_back(SentBatch { seq: self.next_seq, events, due });
        self.next_seq += 1;
    }

    /// Sends batches that are not on the stream yet. Returns `false` if the stream is gone.
    async fn send(&mut self, words: &RequestSender) -> bool {
        while let Some(SentBatch { seq, events, .. }) = self.unacked.get(self.on_stream) {
            let announcement = self.events.announcement(self.epoch, *seq, events.clone());
            let mut word = convert::announcement_to_pb(&announcement);
            word.group = self.events.shard.into();
            if words.send(word).await.is_err() {
                return false;
            }
            self.on_stream += 1;
        }
        true
    }

    fn acked(&mut self, seq: u64, phase: Phase) {
        let now = Instant::now();
        while let Some(sent) = self.unacked.pop_front_if(|sent| sent.seq <= seq) {
            self.on_stream = self.on_stream.saturating_sub(1);
            if now >= phase.from && now < phase.until {
                self.report.events += sent.events.end - sent.events.start;
                self.report.blocks += sent.events.map(Events::blocks).sum::<u64>();
                let micros = now.saturating_duration_since(sent.due).as_micros();
                self.report.micros.push(u64::try_from(micros).unwrap_or(u64::MAX));
            }
        }
    }

    /// Opens a stream to the shard's leader; unacknowledged batches are sent again.
    async fn open(&mut self) -> (RequestSender, Streaming<pb::AnnounceReply>) {
        self.on_stream = 0;
        open(&self.contacts, self.events.node, self.epoch, self.events.shard).await
    }
}

/// Opens a stream to the leader of this group.
async fn open(
    contacts: &RouterClients,
    node: u32,
    epoch: u64,
    group: u16,
) -> (RequestSender, Streaming<pb::AnnounceReply>) {
    for position in 0.. {
        let (words, receiver) = mpsc::channel(64);
        if words.send(heartbeat(node, epoch, group)).await.is_ok()
            && let Ok(replies) = contacts.client(position).announce(ReceiverStream::new(receiver)).await
        {
            return (words, replies.into_inner());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    unreachable!("positions do not end")
}

fn heartbeat(node: u32, epoch: u64, group: u16) -> pb::AnnounceRequest {
    let body = Some(Word::Heartbeat(pb::Heartbeat::default()));
    pb::AnnounceRequest { node, epoch, group: group.into(), body }
}

/// Keeps a fake node alive forever at the control group.
pub(crate) async fn send_heartbeats(contacts: RouterClients, node: u32, epoch: u64) {
    loop {
        let (words, mut replies) = open(&contacts, node, epoch, 0).await;
        loop {
            tokio::select! {
                reply = replies.message() => match reply.ok().flatten().and_then(|reply| reply.body) {
                    Some(Reply::Directives(_)) => {}
                    _ => break,
                },
                () = tokio::time::sleep(HEARTBEAT) => if words.send(heartbeat(node, epoch, 0)).await.is_err() {
                    break;
                },
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
