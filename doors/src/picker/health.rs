//! Whether Envoy's requests are taken here: gRPC health checking, as Envoy and Kubernetes ask it.
//!
//! Not here: when a router is ready (`kvfleet_router::Desk`).

use std::pin::Pin;
use std::time::Duration;

use futures_util::{Stream, stream};
use kvfleet_proto::health::health_check_response::ServingStatus;
use kvfleet_proto::health::health_server::Health;
use kvfleet_proto::health::{HealthCheckRequest, HealthCheckResponse};
use kvfleet_router::Desk;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

/// Between two looks on behalf of somebody who watches.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The service.
#[derive(Clone, Debug)]
pub(super) struct Readiness {
    pub(super) desk: Desk,
    pub(super) stop: CancellationToken,
}

impl Readiness {
    /// Nothing for a service that nobody knows.
    fn of(&self, service: &str) -> Option<ServingStatus> {
        let is_serving = match service {
            // A router without a leader is no better when it is started again.
            "liveness" => true,
            "" | "readiness" | "envoy.service.ext_proc.v3.ExternalProcessor" => {
                !self.stop.is_cancelled() && self.desk.ready().is_ok()
            }
            _ => return None,
        };
        Some(if is_serving { ServingStatus::Serving } else { ServingStatus::NotServing })
    }
}

type Looks = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

#[tonic::async_trait]
impl Health for Readiness {
    type WatchStream = Looks;

    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        match self.of(&request.get_ref().service) {
            Some(status) => Ok(Response::new(HealthCheckResponse { status: status.into() })),
            None => Err(Status::not_found(
                "the services here are \"\", liveness, readiness and envoy.service.ext_proc.v3.ExternalProcessor",
            )),
        }
    }

    async fn watch(&self, request: Request<HealthCheckRequest>) -> Result<Response<Looks>, Status> {
        let (own, service) = (self.clone(), request.into_inner().service);
        let looks = stream::unfold(None, move |last| {
            let (own, service) = (own.clone(), service.clone());
            async move {
                loop {
                    if last.is_some() && own.stop.is_cancelled() {
                        return None;
                    }
                    let status = own.of(&service).unwrap_or(ServingStatus::ServiceUnknown);
                    if last != Some(status) {
                        return Some((Ok(HealthCheckResponse { status: status.into() }), Some(status)));
                    }
                    tokio::select! {
                        () = tokio::time::sleep(LOOK_EVERY) => {}
                        () = own.stop.cancelled() => {}
                    }
                }
            }
        });
        Ok(Response::new(Box::pin(looks)))
    }
}
