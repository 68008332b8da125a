//! gRPC health checking of the picker, as Envoy and Kubernetes use it.
//!
//! Not here: when a router is ready (`kvfleet_router::RouterHandle`).

use std::pin::Pin;
use std::time::Duration;

use futures_util::{Stream, stream};
use kvfleet_proto::health::health_check_response::ServingStatus;
use kvfleet_proto::health::health_server::Health;
use kvfleet_proto::health::{HealthCheckRequest, HealthCheckResponse};
use kvfleet_router::RouterHandle;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

/// Interval between two checks for a watching client.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The service.
#[derive(Clone, Debug)]
pub(super) struct HealthService {
    pub(super) router: RouterHandle,
    pub(super) stop: CancellationToken,
}

impl HealthService {
    /// Status of a service; `None` for an unknown one.
    fn status_of(&self, service: &str) -> Option<ServingStatus> {
        let is_serving = match service {
            // Liveness is always true: restarting a router without a leader does not help.
            "liveness" => true,
            "" | "readiness" | "envoy.service.ext_proc.v3.ExternalProcessor" => {
                !self.stop.is_cancelled() && self.router.ready().is_ok()
            }
            _ => return None,
        };
        Some(if is_serving { ServingStatus::Serving } else { ServingStatus::NotServing })
    }
}

type StatusStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

#[tonic::async_trait]
impl Health for HealthService {
    type WatchStream = StatusStream;

    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        match self.status_of(&request.get_ref().service) {
            Some(status) => Ok(Response::new(HealthCheckResponse { status: status.into() })),
            None => Err(Status::not_found(
                "the services of this port are \"\", liveness, readiness and \
                 envoy.service.ext_proc.v3.ExternalProcessor",
            )),
        }
    }

    async fn watch(&self, request: Request<HealthCheckRequest>) -> Result<Response<StatusStream>, Status> {
        let (own, service) = (self.clone(), request.into_inner().service);
        let looks = stream::unfold(None, move |last| {
            let (own, service) = (own.clone(), service.clone());
            async move {
                loop {
                    if last.is_some() && own.stop.is_cancelled() {
                        return None;
                    }
                    let status = own.status_of(&service).unwrap_or(ServingStatus::ServiceUnknown);
                    if last != Some(status) {
                        return Some((Ok(HealthCheckResponse { status: status.into() }), Some(status)));
                    }
                    tokio::select! {
                        () = tokio::time::sleep(POLL_INTERVAL) => {}
                        () = own.stop.cancelled() => {}
                    }
                }
            }
        });
        Ok(Response::new(Box::pin(looks)))
    }
}
