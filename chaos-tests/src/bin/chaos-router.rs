//! One router as a process of its own, so that a suite can kill it without asking.
//!
//! Takes the path of a router configuration. Not here: metrics over HTTP, logs, and a clean stop; the
//! command line's `router` has those.

use kvfleet_router::{Router, RouterConfig};

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: chaos-router CONFIG")?;
    let config: RouterConfig = toml::from_str(&std::fs::read_to_string(path)?)?;
    let router = Router::start(config, &prometheus::Registry::new()).await?;
    println!("ready");
    // Like the command line's: a router that cannot vote any more must not look as if it lived.
    Err(router.failed().await.into())
}
