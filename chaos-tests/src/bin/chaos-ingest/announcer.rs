//! A stand-in node's stream to one shard: as many batches under way as allowed, or a batch at fixed times.
//!
//! Not here: what is announced (`events.rs`) and what is made of the figures (`main.rs`).

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use chaos_tests::cluster::Contacts;
use kvfleet_proto::pb::announce_reply::Body as Reply;
use kvfleet_proto::pb::announce_request::Body as Word;
use kvfleet_proto::{convert, pb};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::events::Events;

/// As real nodes do.
const HEARTBEAT: Duration = Duration::from_millis(100);

/// How batches are sent.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Pace {
    /// The next one when fewer than this many wait for their acknowledgement.
    UnderWay(usize),
    /// One at each of these intervals, whatever happens to those before.
    Every(Duration),
}

/// One phase of load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Phase {
    pub(crate) pace: Pace,
    /// Events of one batch.
    pub(crate) batch_events: u64,
    /// What is acknowledged from here on counts.
    pub(crate) from: Instant,
    pub(crate) until: Instant,
}

/// What was acknowledged while it counted.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    /// Blocks stored and dropped.
    pub(crate) blocks: u64,
    pub(crate) events: u64,
    /// Time from when a batch was due to its acknowledgement.
    pub(crate) micros: Vec<u64>,
}

struct Sent {
    seq: u64,
    events: Range<u64>,
    due: Instant,
}

pub(crate) struct Announcer {
    contacts: Contacts,
    epoch: u64,
    events: Events,
    next_seq: u64,
    next_event: u64,
    /// Not acknowledged yet; the first `on_stream` of them are on the present stream.
    unacked: VecDeque<Sent>,
    on_stream: usize,
    tally: Tally,
}

type Words = mpsc::Sender<pb::AnnounceRequest>;

impl Announcer {
    pub(crate) fn new(contacts: Contacts, epoch: u64, events: Events) -> Announcer {
        let (unacked, tally) = (VecDeque::new(), Tally::default());
        Announcer { contacts, epoch, events, next_seq: 1, next_event: 0, unacked, on_stream: 0, tally }
    }

    /// Announces through a phase, and until all is acknowledged; gives what counted.
    pub(crate) async fn run(mut self, phase: Phase) -> (Announcer, Tally) {
        let (mut words, mut replies) = self.open().await;
        let mut due = Instant::now();
        loop {
            let now = Instant::now();
            if now < phase.until {
                due = self.make(phase, due, now);
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
                // No leader, or a full one: again, on a new stream.
                _ => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    (words, replies) = self.open().await;
                }
            }
        }
        let tally = std::mem::take(&mut self.tally);
        (self, tally)
    }

    /// Makes the batches that are due; when the next one is.
    fn make(&mut self, phase: Phase, mut due: Instant, now: Instant) -> Instant {
        match phase.pace {
            Pace::UnderWay(most) => {
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
        self.unacked.push_back(Sent { seq: self.next_seq, events, due });
        self.next_seq += 1;
    }

    /// Sends what is not on the stream yet; false when the stream is gone.
    async fn send(&mut self, words: &Words) -> bool {
        while let Some(Sent { seq, events, .. }) = self.unacked.get(self.on_stream) {
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
                self.tally.events += sent.events.end - sent.events.start;
                self.tally.blocks += sent.events.map(Events::blocks).sum::<u64>();
                let micros = now.saturating_duration_since(sent.due).as_micros();
                self.tally.micros.push(u64::try_from(micros).unwrap_or(u64::MAX));
            }
        }
    }

    /// A stream to whichever router leads the shard; what was not acknowledged goes on it again.
    async fn open(&mut self) -> (Words, Streaming<pb::AnnounceReply>) {
        self.on_stream = 0;
        open(&self.contacts, self.events.node, self.epoch, self.events.shard).await
    }
}

/// Opens a stream to whichever router leads this group.
async fn open(
    contacts: &Contacts,
    node: u32,
    epoch: u64,
    group: u16,
) -> (Words, Streaming<pb::AnnounceReply>) {
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

/// Keeps a stand-in node alive for ever, whoever leads the control group.
pub(crate) async fn beat(contacts: Contacts, node: u32, epoch: u64) {
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
