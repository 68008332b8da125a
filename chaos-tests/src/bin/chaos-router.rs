//! One router as its own process, so that a suite can kill it.
//!
//! Takes the path of a router configuration. Not here: metrics over HTTP, logs, and a clean stop;
//! the command line's `router` has those.

use kvfleet_router::{Router, RouterConfig};

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: chaos-router CONFIG")?;
    let config: RouterConfig = toml::from_str(&std::fs::read_to_string(path)?)?;
    let router = Router::start(config, &prometheus::Registry::new()).await?;
    println!("ready");
    // As in the command line: a router that cannot vote any more must exit with an error.
    Err(router.failed().await.into())
}
