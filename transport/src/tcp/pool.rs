//! The connections of one path: an operation has one to itself, and leaves it to the next.
//!
//! One that an operation did not bring to its end is closed with it: what of it is still under way would reach the
//! next. Not here: what an operation says (`ask.rs`), when a peer counts as gone (`watch.rs`).

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use kv_core::id::Class;
use prost::Message;
use rustls::ClientConfig;
use tokio::sync::watch;
use tokio::time::Instant;

use super::stream::{Ends, TlsStream};
use super::{handshake, socket};
use crate::dial::within;
use crate::stream::{ItemError, Loss, Source, Stream, read_message};
use crate::turns::{Place, Places};
use crate::{MissReason, PathError, Progress};

/// Opens connections to one peer.
#[derive(Clone)]
pub(super) struct Connector {
    pub(super) peer: String,
    pub(super) address: SocketAddr,
    pub(super) tls: Arc<ClientConfig>,
    pub(super) ends: Ends,
    pub(super) dial_timeout: Duration,
    pub(super) congestion_control: Option<String>,
}

impl Connector {
    /// A connection whose handshake is over at this end: the peer may still refuse us.
    pub(super) async fn connect(&self) -> Result<TlsStream, PathError> {
        let connecting = async {
            let unreachable = |error: std::io::Error| Loss::Unreachable(error.to_string()).at(&self.peer);
            let connected = socket::connect(self.address, self.congestion_control.as_deref()).await;
            let socket = connected.map_err(unreachable)?;
            // Large, and needed for a moment of a connection's life.
            let connected = Box::pin(handshake::connect(socket, &self.tls, self.ends.clone())).await;
            connected.map_err(|loss| loss.at(&self.peer))
        };
        within(&self.peer, self.dial_timeout, connecting).await
    }
}

/// Why the peer counts as gone, once it does.
pub(super) type Lost = watch::Receiver<Option<Loss>>;

/// Returns once the peer counts as gone.
async fn lost(lost: &mut Lost) -> Loss {
    match lost.wait_for(Option::is_some).await.map(|loss| loss.clone()) {
        Ok(Some(loss)) => loss,
        // Whoever would say so ended with the path.
        _ => std::future::pending().await,
    }
}

/// Connections to one peer.
pub(crate) struct Pool {
    connector: Connector,
    at_once: Arc<Places>,
    idle: Mutex<Vec<Idle>>,
    idle_timeout: Duration,
    lost: Lost,
}

struct Idle {
    stream: TlsStream,
    since: Instant,
}

impl Pool {
    /// As many connections at once, which are closed when nobody used them for so long.
    pub(super) fn new(
        connector: Connector,
        connections_max: usize,
        idle_timeout: Duration,
        lost: Lost,
    ) -> Pool {
        let at_once = Places::new(connections_max.max(1));
        Pool { connector, at_once, idle: Mutex::default(), idle_timeout, lost }
    }

    pub(super) fn peer(&self) -> &str {
        &self.connector.peer
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Idle>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for something of this class, over a connection that was used last, or a new one when there is none. One that
    /// was kept may have ended at the peer's side unnoticed: if it did before anything was answered, a new one is asked
    /// once more. That is sound for every operation: a save stores nothing before its offer is answered.
    pub(crate) async fn ask<M: Message + Default>(
        self: &Arc<Pool>,
        class: Class,
        message: Bytes,
        fetch: Option<&Progress>,
    ) -> Result<(M, Occupied), PathError> {
        let mut waits = self.lost.clone();
        // Another process may be there since, which is a new path's to find out.
        if let Some(loss) = waits.borrow().as_ref() {
            return Err(loss.clone().at(self.peer()));
        }
        let asked = self.ask_while_there(class, message, fetch);
        tokio::select! {
            biased;
            asked = asked => asked,
            loss = lost(&mut waits) => Err(loss.at(self.peer())),
        }
    }

    async fn ask_while_there<M: Message + Default>(
        self: &Arc<Pool>,
        class: Class,
        message: Bytes,
        fetch: Option<&Progress>,
    ) -> Result<(M, Occupied), PathError> {
        let mut place = self.at_once.take(class).await;
        if let Some(fetch) = fetch {
            fetch.asked();
        }
        if let Some(stream) = self.kept() {
            let before = stream.plain_bytes();
            let mut occupied = self.occupy(stream, place);
            match occupied.ask(message.clone()).await {
                Ok(answer) => return Ok((answer, occupied)),
                Err(error) => match occupied.give_up(before) {
                    Some(freed) if error.is_loss() => place = freed,
                    _ => return Err(error.at(self.peer())),
                },
            }
        }
        let mut occupied = self.occupy(self.connector.connect().await?, place);
        let answer = occupied.ask(message).await.map_err(|error| error.at(self.peer()))?;
        Ok((answer, occupied))
    }

    fn occupy(self: &Arc<Pool>, stream: TlsStream, place: Place) -> Occupied {
        Occupied { held: Some((stream, Some(place))), lost: self.lost.clone() }
    }

    /// The connection that was used last, if one can be used again.
    pub(super) fn kept(&self) -> Option<TlsStream> {
        loop {
            let Idle { stream, since } = self.idle().pop()?;
            if since.elapsed() < self.idle_timeout && stream.is_usable() {
                return Some(stream);
            }
            stream.close();
        }
    }

    /// Takes back the connection of an operation that is over.
    pub(super) fn keep(&self, mut occupied: Occupied) {
        let Some((mut stream, place)) = occupied.held.take() else { return };
        stream.rest();
        if stream.is_usable() {
            self.idle().push(Idle { stream, since: Instant::now() });
        } else {
            stream.close();
        }
        // Only now: whoever waits for it finds the connection.
        drop(place);
    }

    /// Closes what nobody used for long.
    pub(super) fn close_idle(&self) {
        let mut idle = self.idle();
        // Used last is taken first, so the front is the oldest.
        let old = idle.iter().take_while(|kept| kept.since.elapsed() >= self.idle_timeout).count();
        let old: Vec<Idle> = idle.drain(..old).collect();
        drop(idle);
        old.into_iter().for_each(|kept| kept.stream.close());
    }

    /// Makes what is idle look as if much had gone over it.
    #[cfg(test)]
    pub(super) fn wear_out(&self) {
        self.idle().iter_mut().for_each(|kept| kept.stream.wear_out());
    }

    #[cfg(test)]
    pub(super) fn idle_count(&self) -> usize {
        self.idle().len()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let idle = std::mem::take(&mut *self.idle());
        idle.into_iter().for_each(|kept| kept.stream.close());
    }
}

/// A connection that one operation has to itself.
pub(crate) struct Occupied {
    /// Present until the operation is over. What was upgraded takes no place any more.
    held: Option<(TlsStream, Option<Place>)>,
    lost: Lost,
}

impl Drop for Occupied {
    fn drop(&mut self) {
        if let Some((stream, _)) = self.held.take() {
            stream.abort();
        }
    }
}

impl Occupied {
    async fn ask<M: Message + Default>(&mut self, message: Bytes) -> Result<M, ItemError> {
        self.write(message).await?;
        self.flush().await?;
        read_message(self).await
    }

    /// Closes the connection. Its place, if it gave no byte of an answer since `before`.
    fn give_up(mut self, before: u64) -> Option<Place> {
        let (stream, place) = self.held.take()?;
        let is_silent = stream.plain_bytes() == before;
        stream.abort();
        place.filter(|_| is_silent)
    }

    /// The connection belongs to another protocol, which bounds how many there are: its place is another's.
    #[cfg(feature = "rdma")]
    pub(crate) fn upgraded(&mut self) {
        if let Some((_, place)) = &mut self.held {
            drop(place.take());
        }
    }

    /// Gives back memory that holds nothing; whether the next operation may use the connection.
    #[cfg(feature = "rdma")]
    pub(crate) fn rest(&mut self) -> bool {
        let (stream, _) = self.stream();
        stream.rest();
        stream.is_usable()
    }

    fn stream(&mut self) -> (&mut TlsStream, &mut Lost) {
        let (stream, _) = self.held.as_mut().expect("taken only where the operation is over");
        (stream, &mut self.lost)
    }
}

impl Source for Occupied {
    async fn fill(&mut self, have: &mut BytesMut, wanted: usize) -> Result<bool, Loss> {
        let (stream, gone) = self.stream();
        tokio::select! {
            biased;
            filled = stream.fill(have, wanted) => filled,
            loss = lost(gone) => Err(loss),
        }
    }

    async fn read_into(&mut self, to: &mut [u8], behind: usize) -> Result<bool, Loss> {
        let (stream, gone) = self.stream();
        tokio::select! {
            biased;
            filled = stream.read_into(to, behind) => filled,
            loss = lost(gone) => Err(loss),
        }
    }
}

impl Stream for Occupied {
    async fn write(&mut self, bytes: Bytes) -> Result<(), Loss> {
        let (stream, gone) = self.stream();
        tokio::select! {
            biased;
            written = stream.write(bytes) => written,
            loss = lost(gone) => Err(loss),
        }
    }

    async fn flush(&mut self) -> Result<(), Loss> {
        let (stream, gone) = self.stream();
        tokio::select! {
            biased;
            flushed = stream.flush() => flushed,
            loss = lost(gone) => Err(loss),
        }
    }

    async fn end(&mut self, reason: Option<MissReason>) -> Result<(), Loss> {
        let (stream, gone) = self.stream();
        tokio::select! {
            biased;
            ended = stream.end(reason) => ended,
            loss = lost(gone) => Err(loss),
        }
    }

    fn stopped(&self) -> impl Future<Output = ()> + Send + 'static {
        let stopped = self.held.as_ref().map(|(stream, _)| stream.stopped());
        async move {
            if let Some(stopped) = stopped {
                stopped.await;
            }
        }
    }
}
