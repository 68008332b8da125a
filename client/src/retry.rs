//! Which router is asked: the last one that answered, then the others in turn, then all again after a
//! pause that grows and is jittered.
//!
//! Not here: what is asked (`route.rs`), and the streams of route calls (`stream.rs`). Only failures that another router could cure
//! are tried again.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvfleet_proto::channel::{connect_lazily, endpoint};
use kvfleet_proto::pb;
use kvfleet_proto::pb::router_client::RouterClient;
use kvfleet_proto::tls::Identity;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};

use crate::ClientError;
use crate::stream::{NoAnswer, Place, RouteStream};

/// Time for a connection. Routers are near; a longer wait means a dead one.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Time for one answer: a replica waits at most a second for what it has not applied yet.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// Times the whole list is tried before giving up.
const ROUNDS_MAX: u32 = 4;

/// Pause after the first round without an answer; doubles each round, half of it jittered. Four rounds
/// outlast the gap of a leader's election only together with the caller's own patience.
const PAUSE_FIRST: Duration = Duration::from_millis(50);

/// Largest answer taken, in bytes: runs of the longest prefix with several holders each.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Why no router answered.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RouterError {
    /// A router answered that the call itself is wrong; another one would say the same.
    #[error("router {address} refused the call: {}", status.message())]
    Refused {
        /// Which router.
        address: String,
        /// What it said.
        status: Status,
    },
    /// None could be reached or was ready.
    #[error("none of the routers {} answered; the last said: {}", addresses.join(", "), status.message())]
    NoneAnswered {
        /// All that were tried.
        addresses: Vec<String>,
        /// What the last one said.
        status: Status,
    },
}

struct Router {
    address: String,
    client: RouterClient<Channel>,
    /// For route calls; without one each is a call of its own.
    stream: Option<RouteStream>,
}

impl Router {
    async fn route(&self, message: &pb::RouteRequest) -> Result<pb::RouteReply, Status> {
        if let Some(stream) = &self.stream {
            match stream.ask(message).await {
                Ok(reply) => return Ok(reply),
                Err(NoAnswer::Failed(status)) => return Err(status),
                Err(NoAnswer::Alone) => {}
            }
        }
        self.client.clone().route(limited(message.clone())).await.map(Response::into_inner)
    }
}

/// The routers of a cluster.
pub(crate) struct Routers {
    routers: Vec<Router>,
    /// The one that answered last.
    sticky: Arc<AtomicUsize>,
    jitter: Mutex<Jitter>,
}

impl Routers {
    /// `with_streams`: whether route calls to a router share a stream.
    pub(crate) fn new(
        addresses: &[String],
        identity: &Identity,
        seed: u64,
        with_streams: bool,
    ) -> Result<Routers, ClientError> {
        if addresses.is_empty() {
            return Err(ClientError::NoRouters);
        }
        let (sticky, count) = (Arc::new(AtomicUsize::new(0)), addresses.len());
        let router = |(position, address): (usize, &String)| {
            let channel = channel(address, identity)?;
            let client = RouterClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX);
            let place = Place { sticky: Arc::clone(&sticky), position, count };
            let stream = with_streams.then(|| RouteStream::new(client.clone(), place));
            Ok(Router { address: address.clone(), client, stream })
        };
        let routers = addresses.iter().enumerate().map(router).collect::<Result<_, _>>()?;
        Ok(Routers { routers, sticky, jitter: Mutex::new(Jitter(seed)) })
    }

    pub(crate) fn addresses(&self) -> Vec<String> {
        self.routers.iter().map(|router| router.address.clone()).collect()
    }

    /// The router that is asked first.
    #[cfg(test)]
    pub(crate) fn first(&self) -> usize {
        self.sticky.load(Ordering::Relaxed)
    }

    /// Questions that wait for an answer over a stream.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.routers.iter().filter_map(|router| router.stream.as_ref()).map(RouteStream::waiting).sum()
    }

    /// A handle to each router, for what all of them must hear.
    pub(crate) fn each(&self) -> impl Iterator<Item = (&str, RouterClient<Channel>)> {
        self.routers.iter().map(|router| (router.address.as_str(), router.client.clone()))
    }

    /// Makes `call` on one router after the other until one answers.
    pub(crate) async fn call<M: Clone, T, Called>(
        &self,
        message: &M,
        call: impl Fn(RouterClient<Channel>, Request<M>) -> Called,
    ) -> Result<T, RouterError>
    where
        Called: Future<Output = Result<Response<T>, Status>>,
    {
        let ask = |router: &Router| {
            let called = call(router.client.clone(), limited(message.clone()));
            async move { called.await.map(Response::into_inner) }
        };
        self.in_turn(ask).await
    }

    /// Asks one router after the other where a request should run, over their streams where they take any.
    pub(crate) async fn route(&self, message: &pb::RouteRequest) -> Result<pb::RouteReply, RouterError> {
        self.in_turn(|router| router.route(message)).await
    }

    async fn in_turn<'a, T, Asked>(&'a self, ask: impl Fn(&'a Router) -> Asked) -> Result<T, RouterError>
    where
        Asked: Future<Output = Result<T, Status>>,
    {
        let mut last = Status::unavailable("no router was tried");
        for round in 0..ROUNDS_MAX {
            if round > 0 {
                tokio::time::sleep(self.pause(round)).await;
            }
            let first = self.sticky.load(Ordering::Relaxed);
            for turn in 0..self.routers.len() {
                let position = (first + turn) % self.routers.len();
                let router = &self.routers[position];
                match ask(router).await {
                    Ok(answer) => {
                        // Who was asked first stays first, unless it has ended what it had meanwhile: its stream says so behind its last answers.
                        if turn > 0 {
                            self.sticky.store(position, Ordering::Relaxed);
                        }
                        return Ok(answer);
                    }
                    Err(status) if may_differ_elsewhere(status.code()) => last = status,
                    Err(status) => {
                        return Err(RouterError::Refused { address: router.address.clone(), status });
                    }
                }
            }
        }
        Err(RouterError::NoneAnswered { addresses: self.addresses(), status: last })
    }

    fn pause(&self, round: u32) -> Duration {
        let whole = PAUSE_FIRST * 2u32.pow(round - 1);
        self.jitter.lock().unwrap_or_else(PoisonError::into_inner).around(whole)
    }
}

/// A channel that connects when first used and again after every break.
pub(crate) fn channel(address: &str, identity: &Identity) -> Result<Channel, ClientError> {
    let wrong = |cause: &dyn std::fmt::Display| ClientError::RouterAddress {
        address: address.to_owned(),
        cause: cause.to_string(),
    };
    let has_port = address.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    if !has_port {
        return Err(wrong(&"it does not end with a port"));
    }
    let endpoint = endpoint(address).map_err(|error| wrong(&error))?;
    Ok(connect_lazily(&endpoint.connect_timeout(CONNECT_TIMEOUT), identity))
}

/// Whether another router may answer differently: it is gone, late, full, or not ready.
pub(crate) fn may_differ_elsewhere(code: Code) -> bool {
    matches!(
        code,
        Code::Unavailable
            | Code::DeadlineExceeded
            | Code::Cancelled
            | Code::ResourceExhausted
            | Code::FailedPrecondition
            | Code::Aborted
            | Code::Unknown
            | Code::Internal
    )
}

fn limited<M>(message: M) -> Request<M> {
    let mut request = Request::new(message);
    request.set_timeout(ANSWER_TIMEOUT);
    request
}

/// A small seeded generator (splitmix64): jitter needs no more, and a seed makes a run repeat.
#[derive(Debug)]
struct Jitter(u64);

impl Jitter {
    /// Between half of `span` and all of it.
    fn around(&mut self, span: Duration) -> Duration {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let share = f64::from(u32::try_from(word >> 32).unwrap_or(u32::MAX)) / f64::from(u32::MAX);
        span.mul_f64(0.5 + share / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_stays_within_half_and_whole_and_repeats() {
        let span = Duration::from_millis(100);
        let draw = |seed| {
            let mut jitter = Jitter(seed);
            (0..1000).map(|_| jitter.around(span)).collect::<Vec<_>>()
        };
        assert!(draw(1).iter().all(|pause| (span / 2..=span).contains(pause)));
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn only_curable_failures_are_tried_again() {
        assert!(may_differ_elsewhere(Code::Unavailable));
        for code in [Code::InvalidArgument, Code::PermissionDenied, Code::Unimplemented, Code::NotFound] {
            assert!(!may_differ_elsewhere(code), "{code:?}");
        }
    }
}
