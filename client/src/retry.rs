//! Chooses the router for a call: the one that answered last, then the others in order, then all
//! again after a growing, jittered pause.
//!
//! Only failures that another router could avoid are retried. Not here: the calls (`route.rs`), and
//! the streams of route calls (`stream.rs`).

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvfleet_net::channel::{connect_lazily, endpoint};
use kvfleet_net::tls::{Identity, Role};
use kvfleet_proto::pb;
use kvfleet_proto::pb::router_client::RouterClient;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};

use crate::ClientError;
use crate::stream::{RouteStream, RouterSlot, StreamError};

/// Timeout of a connection. Routers are near, so a longer wait means a dead one.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Timeout of one answer: a replica waits at most a second for entries that it has not yet applied.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// Rounds over the whole list before giving up.
const ROUNDS_MAX: u32 = 4;

/// Pause after the first round without an answer; it doubles each round, and half of it is
/// jittered. Four rounds outlast a leader election only together with the caller's own retries.
const PAUSE_FIRST: Duration = Duration::from_millis(50);

/// Largest accepted answer, in bytes: runs of the longest prefix with several holders each.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Error of a call to the routers.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RouterError {
    /// A router answered that the call is invalid; another one would answer the same.
    #[error("router {address} refused the call: {}", status.message())]
    Refused {
        /// Address of the router.
        address: String,
        /// Status that it returned.
        status: Status,
    },
    /// No router was reachable and ready.
    #[error("none of the routers {} answered; the last error was: {}", addresses.join(", "), status.message())]
    NoneAnswered {
        /// All routers that were tried.
        addresses: Vec<String>,
        /// Status of the last one.
        status: Status,
    },
}

struct Router {
    address: String,
    client: RouterClient<Channel>,
    /// Stream for route calls; `None` makes each a unary call.
    stream: Option<RouteStream>,
}

impl Router {
    async fn route(&self, message: &pb::RouteRequest) -> Result<pb::RouteReply, Status> {
        if let Some(stream) = &self.stream {
            match stream.call(message).await {
                Ok(reply) => return Ok(reply),
                Err(StreamError::Failed(status)) => return Err(status),
                Err(StreamError::UseUnary) => {}
            }
        }
        self.client.clone().route(with_timeout(message.clone())).await.map(Response::into_inner)
    }
}

/// The routers of a cluster.
pub(crate) struct Routers {
    routers: Vec<Router>,
    /// Position of the router that answered last.
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
            let channel = channel(address, identity, Role::Router(None))?;
            let client = RouterClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX);
            let place = RouterSlot { sticky: Arc::clone(&sticky), position, count };
            let stream = with_streams.then(|| RouteStream::new(client.clone(), place));
            Ok(Router { address: address.clone(), client, stream })
        };
        let routers = addresses.iter().enumerate().map(router).collect::<Result<_, _>>()?;
        Ok(Routers { routers, sticky, jitter: Mutex::new(Jitter(seed)) })
    }

    pub(crate) fn addresses(&self) -> Vec<String> {
        self.routers.iter().map(|router| router.address.clone()).collect()
    }

    /// Position of the router that is asked first.
    #[cfg(test)]
    pub(crate) fn first(&self) -> usize {
        self.sticky.load(Ordering::Relaxed)
    }

    /// Route calls that wait for an answer over a stream.
    #[cfg(test)]
    pub(crate) fn pending_calls(&self) -> usize {
        self.routers.iter().filter_map(|router| router.stream.as_ref()).map(RouteStream::pending_calls).sum()
    }

    /// A handle to each router, for messages that all of them must receive.
    pub(crate) fn each(&self) -> impl Iterator<Item = (&str, RouterClient<Channel>)> {
        self.routers.iter().map(|router| (router.address.as_str(), router.client.clone()))
    }

    /// Makes `call` on one router after the other until one answers.
    pub(crate) async fn call<M: Clone, T, Fut>(
        &self,
        message: &M,
        call: impl Fn(RouterClient<Channel>, Request<M>) -> Fut,
    ) -> Result<T, RouterError>
    where
        Fut: Future<Output = Result<Response<T>, Status>>,
    {
        let ask = |router: &Router| {
            let called = call(router.client.clone(), with_timeout(message.clone()));
            async move { called.await.map(Response::into_inner) }
        };
        self.try_each(ask).await
    }

    /// Makes a route call on one router after the other, over streams where supported.
    pub(crate) async fn route(&self, message: &pb::RouteRequest) -> Result<pb::RouteReply, RouterError> {
        self.try_each(|router| router.route(message)).await
    }

    async fn try_each<'a, T, Fut>(&'a self, ask: impl Fn(&'a Router) -> Fut) -> Result<T, RouterError>
    where
        Fut: Future<Output = Result<T, Status>>,
    {
        let mut last = Status::unavailable("no router was tried");
        for round in 0..ROUNDS_MAX {
            if round > 0 {
                tokio::time::sleep(self.pause(round)).await;
            }
            let first = self.sticky.load(Ordering::Relaxed);
            for offset in 0..self.routers.len() {
                let position = (first + offset) % self.routers.len();
                let router = &self.routers[position];
                match ask(router).await {
                    Ok(answer) => {
                        // The first router stays first. Its stream may meanwhile have chosen the
                        // next one.
                        if offset > 0 {
                            self.sticky.store(position, Ordering::Relaxed);
                        }
                        return Ok(answer);
                    }
                    Err(status) if is_retryable_elsewhere(status.code()) => last = status,
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
        self.jitter.lock().unwrap_or_else(PoisonError::into_inner).jittered(whole)
    }
}

/// A channel to a server of this role, which connects at first use and again after every break.
pub(crate) fn channel(address: &str, identity: &Identity, server: Role) -> Result<Channel, ClientError> {
    let wrong = |cause: &dyn std::fmt::Display| ClientError::RouterAddress {
        address: address.to_owned(),
        cause: cause.to_string(),
    };
    let has_port = address.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    if !has_port {
        return Err(wrong(&"it does not end with a port"));
    }
    let endpoint = endpoint(address).map_err(|error| wrong(&error))?;
    Ok(connect_lazily(&endpoint.connect_timeout(CONNECT_TIMEOUT), identity, server))
}

/// Whether another router may answer differently: this one is down, late, overloaded, or not ready.
pub(crate) fn is_retryable_elsewhere(code: Code) -> bool {
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

fn with_timeout<M>(message: M) -> Request<M> {
    let mut request = Request::new(message);
    request.set_timeout(ANSWER_TIMEOUT);
    request
}

/// A small seeded generator (splitmix64): good enough for jitter, and a seed makes a run
/// repeatable.
#[derive(Debug)]
struct Jitter(u64);

impl Jitter {
    /// A value between half of `span` and all of it.
    fn jittered(&mut self, span: Duration) -> Duration {
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
    fn jitter_is_bounded_and_reproducible() {
        let span = Duration::from_millis(100);
        let draw = |seed| {
            let mut jitter = Jitter(seed);
            (0..1000).map(|_| jitter.jittered(span)).collect::<Vec<_>>()
        };
        assert!(draw(1).iter().all(|pause| (span / 2..=span).contains(pause)));
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn only_transient_failures_are_retried() {
        assert!(is_retryable_elsewhere(Code::Unavailable));
        for code in [Code::InvalidArgument, Code::PermissionDenied, Code::Unimplemented, Code::NotFound] {
            assert!(!is_retryable_elsewhere(code), "{code:?}");
        }
    }
}
