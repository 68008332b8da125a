//! The connections of one path: an operation has one to itself and then passes it on.
//!
//! An unfinished operation's connection is closed, since its remaining bytes would reach the next
//! operation. Not here: operations (`client_ops.rs`), and the detection of lost peers (`watch.rs`).

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use kv_core::id::TrafficClass;
use prost::Message;
use rustls::ClientConfig;
use tokio::sync::watch;
use tokio::time::Instant;

use super::handshake::PeerChain;
use super::stream::{StreamShared, TlsStream};
use super::{handshake, socket};
use crate::dial::within;
use crate::slot_queue::{Slot, SlotQueue};
use crate::stream::{ItemError, Source, Stream, StreamError, read_message};
use crate::{MissReason, PathError, Progress};

/// Opens connections to one peer.
#[derive(Clone)]
pub(super) struct Connector {
    pub(super) peer: String,
    pub(super) address: SocketAddr,
    pub(super) tls: Arc<ClientConfig>,
    pub(super) ends: StreamShared,
    pub(super) dial_timeout: Duration,
    pub(super) congestion_control: Option<String>,
}

impl Connector {
    /// A connection after the handshake at this end. The peer may still refuse our certificate.
    pub(super) async fn connect(&self) -> Result<(TlsStream, PeerChain), PathError> {
        let connecting = async {
            let unreachable =
                |error: std::io::Error| StreamError::Unreachable(error.to_string()).at(&self.peer);
            let connected = socket::connect(self.address, self.congestion_control.as_deref()).await;
            let socket = connected.map_err(unreachable)?;
            // The future is large and needed only briefly.
            let connected = Box::pin(handshake::connect(socket, &self.tls, self.ends.clone())).await;
            connected.map_err(|loss| loss.at(&self.peer))
        };
        within(&self.peer, self.dial_timeout, connecting).await
    }
}

/// The error with which the peer was lost, once it is.
pub(super) type PeerLoss = watch::Receiver<Option<StreamError>>;

/// Returns once the peer is lost.
async fn peer_lost(lost: &mut PeerLoss) -> StreamError {
    match lost.wait_for(Option::is_some).await.map(|loss| loss.clone()) {
        Ok(Some(loss)) => loss,
        // The watching task ended with the path.
        _ => std::future::pending().await,
    }
}

/// Connections to one peer.
pub(crate) struct ConnectionPool {
    connector: Connector,
    slots: Arc<SlotQueue>,
    idle: Mutex<Vec<IdleConnection>>,
    idle_timeout: Duration,
    lost: PeerLoss,
}

struct IdleConnection {
    stream: TlsStream,
    since: Instant,
}

impl ConnectionPool {
    /// A pool of at most `connections_max` concurrent connections. Unused ones are closed after
    /// `idle_timeout`.
    pub(super) fn new(
        connector: Connector,
        connections_max: usize,
        idle_timeout: Duration,
        lost: PeerLoss,
    ) -> ConnectionPool {
        let slots = SlotQueue::new(connections_max.max(1));
        ConnectionPool { connector, slots, idle: Mutex::default(), idle_timeout, lost }
    }

    pub(super) fn peer(&self) -> &str {
        &self.connector.peer
    }

    fn idle(&self) -> MutexGuard<'_, Vec<IdleConnection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request of this class and reads the answer, over the last used connection or a new
    /// one. The peer may have closed a kept connection unnoticed: if it closed before any answer,
    /// the request is sent once more on a new connection. That is safe for every operation: a save
    /// stores no block before its offer is answered.
    pub(crate) async fn call<M: Message + Default>(
        self: &Arc<ConnectionPool>,
        class: TrafficClass,
        message: Bytes,
        fetch: Option<&Progress>,
    ) -> Result<(M, PooledConnection), PathError> {
        let mut waits = self.lost.clone();
        // Another process may serve there since, which only a new path can find out.
        if let Some(loss) = waits.borrow().as_ref() {
            return Err(loss.clone().at(self.peer()));
        }
        let asked = self.call_once_connected(class, message, fetch);
        tokio::select! {
            biased;
            asked = asked => asked,
            loss = peer_lost(&mut waits) => Err(loss.at(self.peer())),
        }
    }

    async fn call_once_connected<M: Message + Default>(
        self: &Arc<ConnectionPool>,
        class: TrafficClass,
        message: Bytes,
        fetch: Option<&Progress>,
    ) -> Result<(M, PooledConnection), PathError> {
        let mut place = self.slots.acquire(class).await;
        if let Some(fetch) = fetch {
            fetch.mark_asked();
        }
        if let Some(stream) = self.take_idle() {
            let before = stream.plain_bytes();
            let mut occupied = self.occupy(stream, place);
            match occupied.call(message.clone()).await {
                Ok(answer) => return Ok((answer, occupied)),
                Err(error) => match occupied.abort(before) {
                    Some(freed) if error.is_loss() => place = freed,
                    _ => return Err(error.at(self.peer())),
                },
            }
        }
        let mut occupied = self.occupy(self.connector.connect().await?.0, place);
        let answer = occupied.call(message).await.map_err(|error| error.at(self.peer()))?;
        Ok((answer, occupied))
    }

    fn occupy(self: &Arc<ConnectionPool>, stream: TlsStream, place: Slot) -> PooledConnection {
        PooledConnection { stream_and_slot: Some((stream, Some(place))), lost: self.lost.clone() }
    }

    /// The last used connection, if it is reusable.
    pub(super) fn take_idle(&self) -> Option<TlsStream> {
        loop {
            let IdleConnection { stream, since } = self.idle().pop()?;
            if since.elapsed() < self.idle_timeout && stream.is_usable() {
                return Some(stream);
            }
            stream.close();
        }
    }

    /// Takes back the connection of a finished operation.
    pub(super) fn keep(&self, mut occupied: PooledConnection) {
        let Some((mut stream, place)) = occupied.stream_and_slot.take() else { return };
        stream.release_buffers();
        if stream.is_usable() {
            self.idle().push(IdleConnection { stream, since: Instant::now() });
        } else {
            stream.close();
        }
        // Only now, so that a waiting operation finds the connection.
        drop(place);
    }

    /// Closes connections that were idle for too long.
    pub(super) fn close_idle(&self) {
        let mut idle = self.idle();
        // The last used is taken first, so the front is the oldest.
        let old = idle.iter().take_while(|kept| kept.since.elapsed() >= self.idle_timeout).count();
        let old: Vec<IdleConnection> = idle.drain(..old).collect();
        drop(idle);
        old.into_iter().for_each(|kept| kept.stream.close());
    }

    /// Makes idle connections look as if their keys were nearly used up.
    #[cfg(test)]
    pub(super) fn wear_out(&self) {
        self.idle().iter_mut().for_each(|kept| kept.stream.wear_out());
    }

    #[cfg(test)]
    pub(super) fn idle_count(&self) -> usize {
        self.idle().len()
    }
}

impl Drop for ConnectionPool {
    fn drop(&mut self) {
        let idle = std::mem::take(&mut *self.idle());
        idle.into_iter().for_each(|kept| kept.stream.close());
    }
}

/// A connection that one operation has to itself.
pub struct PooledConnection {
    /// Present until the operation is finished. An upgraded connection holds no slot.
    stream_and_slot: Option<(TlsStream, Option<Slot>)>,
    lost: PeerLoss,
}

impl Drop for PooledConnection {
    fn drop(&mut self) {
        if let Some((stream, _)) = self.stream_and_slot.take() {
            stream.abort();
        }
    }
}

impl PooledConnection {
    async fn call<M: Message + Default>(&mut self, message: Bytes) -> Result<M, ItemError> {
        self.write(message).await?;
        self.flush().await?;
        read_message(self).await
    }

    /// Closes the connection. Returns its slot if the peer sent no byte since `before`.
    fn abort(mut self, before: u64) -> Option<Slot> {
        let (stream, place) = self.stream_and_slot.take()?;
        let is_silent = stream.plain_bytes() == before;
        stream.abort();
        place.filter(|_| is_silent)
    }

    /// Gives up the slot: the connection now belongs to another protocol, which bounds its own
    /// number of connections.
    pub fn release_slot(&mut self) {
        if let Some((_, place)) = &mut self.stream_and_slot {
            drop(place.take());
        }
    }

    /// Frees empty buffers. Returns whether the next operation may use the connection.
    pub fn release_buffers(&mut self) -> bool {
        let (stream, _) = self.stream();
        stream.release_buffers();
        stream.is_usable()
    }

    fn stream(&mut self) -> (&mut TlsStream, &mut PeerLoss) {
        let (stream, _) = self.stream_and_slot.as_mut().expect("taken only after the operation is finished");
        (stream, &mut self.lost)
    }
}

impl Source for PooledConnection {
    async fn fill(&mut self, have: &mut BytesMut, wanted: usize) -> Result<bool, StreamError> {
        let (stream, gone) = self.stream();
        tokio::select! {
            biased;
            filled = stream.fill(have, wanted) => filled,
            loss = peer_lost(gone) => Err(loss),
        }
    }

    async fn read_into(&mut self, to: &mut [u8], behind: usize) -> Result<bool, StreamError> {
        let (stream, gone) = self.stream();
        tokio::select! {
            biased;
            filled = stream.read_into(to, behind) => filled,
            loss = peer_lost(gone) => Err(loss),
        }
    }
}

impl Stream for PooledConnection {
    async fn write(&mut self, bytes: Bytes) -> Result<(), StreamError> {
        let (stream, gone) = self.stream();
        tokio::select! {
            biased;
            written = stream.write(bytes) => written,
            loss = peer_lost(gone) => Err(loss),
        }
    }

    async fn flush(&mut self) -> Result<(), StreamError> {
        let (stream, gone) = self.stream();
        tokio::select! {
            biased;
            flushed = stream.flush() => flushed,
            loss = peer_lost(gone) => Err(loss),
        }
    }

    async fn end(&mut self, reason: Option<MissReason>) -> Result<(), StreamError> {
        let (stream, gone) = self.stream();
        tokio::select! {
            biased;
            ended = stream.end(reason) => ended,
            loss = peer_lost(gone) => Err(loss),
        }
    }

    fn stopped(&self) -> impl Future<Output = ()> + Send + 'static {
        let stopped = self.stream_and_slot.as_ref().map(|(stream, _)| stream.stopped());
        async move {
            if let Some(stopped) = stopped {
                stopped.await;
            }
        }
    }
}
