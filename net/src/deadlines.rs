//! Deadlines of control calls: a caller that sends half a message must not hold the memory of its
//! call for good.
//!
//! Not here: deadlines that callers set for themselves, which the server obeys too, and limits on
//! single messages (each server sets its own).

use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;

/// Longest time until a call's answer begins: the time to receive its message, and to handle it.
/// Well above any call that is not named as a long one.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// A gRPC service that ends calls after [`CALL_TIMEOUT`], except on some paths with limits of their
/// own.
#[derive(Clone, Debug)]
pub struct DeadlineService<S> {
    inner: S,
    long_paths: &'static [&'static str],
}

impl<S> DeadlineService<S> {
    /// `long_paths` are gRPC paths: `/kvfleet.v1.Router/Drain`.
    pub fn new(inner: S, long_paths: &'static [&'static str]) -> DeadlineService<S> {
        DeadlineService { inner, long_paths }
    }
}

impl<S: NamedService> NamedService for DeadlineService<S> {
    const NAME: &'static str = S::NAME;
}

impl<S, B> Service<http::Request<B>> for DeadlineService<S>
where
    S: Service<http::Request<B>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let is_long = self.long_paths.contains(&request.uri().path());
        let answering = self.inner.call(request);
        if is_long {
            return Box::pin(answering);
        }
        Box::pin(async move {
            match tokio::time::timeout(CALL_TIMEOUT, answering).await {
                Ok(answer) => answer,
                Err(_) => {
                    let seconds = CALL_TIMEOUT.as_secs();
                    let text = format!(
                        "the message was not received and answered within {seconds} s: send it again"
                    );
                    Ok(Status::deadline_exceeded(text).into_http())
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::convert::Infallible;
    use std::future::{Pending, pending};

    use super::*;

    /// A service that never answers.
    #[derive(Clone)]
    struct Stuck;

    impl Service<http::Request<()>> for Stuck {
        type Response = http::Response<Body>;
        type Error = Infallible;
        type Future = Pending<Result<http::Response<Body>, Infallible>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: http::Request<()>) -> Self::Future {
            pending()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn only_long_calls_may_take_longer() {
        let mut service = DeadlineService::new(Stuck, &["/s/Drain"]);
        let request = |path: &str| http::Request::builder().uri(path).body(()).unwrap();
        let begun = tokio::time::Instant::now();
        let answer = service.call(request("/s/Route")).await.unwrap();
        assert_eq!(begun.elapsed(), CALL_TIMEOUT);
        assert_eq!(answer.headers()["grpc-status"], "4", "deadline exceeded");
        let long = tokio::time::timeout(10 * CALL_TIMEOUT, service.call(request("/s/Drain"))).await;
        assert!(long.is_err(), "it has a limit of its own");
    }
}
