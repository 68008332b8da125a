//! `kvfleet up`: a cluster on this machine until Ctrl-C.

use kv_core::id::TenantId;
use kvfleet_gateway::ModelConfig;
use serde::Serialize;

use crate::args::{Capacity, UpArgs};
use crate::cluster::{ClusterShape, LocalCluster, NodeCapacity, OpenAiShape, process_name};
use crate::process::{Role, Stop};
use kvfleet_engine::mock::InstanceConfig;
use kvfleet_net::certificates::Authority;
use kvfleet_net::tls;

/// Default DRAM of each node: fits a laptop and still shows hits.
const DRAM_DEFAULT: Capacity = Capacity::Bytes(256 << 20);

/// Default tokens of a block: as in Mooncake's traces, and as in vLLM.
const BLOCK_TOKENS_OF_TRACES: u32 = 512;
const BLOCK_TOKENS_OF_ENGINES: u32 = 16;

/// The started processes, for scripts.
#[derive(Debug, Serialize)]
struct UpReply {
    routers: Vec<String>,
    tls_dir: String,
    data_dir: String,
    processes: Vec<crate::process::ReadyLine>,
    /// Certificates of the requested tenants.
    tenants: Vec<String>,
}

/// Starts the cluster, prints its addresses, and stops it on request.
pub async fn run(args: &UpArgs, stop: &Stop) -> anyhow::Result<()> {
    let shape = shape(args)?;
    let mut cluster = tokio::select! {
        cluster = LocalCluster::start(shape) => cluster?,
        _ = stop.requested() => return Ok(()),
    };
    // On any error below, the cluster must be stopped.
    let printed = tenants(args, &cluster).and_then(|tenants| print(args, &cluster, tenants));
    if let Err(error) = printed {
        cluster.stop().await;
        return Err(error);
    }
    let outcome = tokio::select! {
        _ = stop.requested() => Ok(()),
        crashed = first_crash(&mut cluster) => {
            let logs = cluster.directory().join("logs");
            Err(anyhow::anyhow!("{crashed}; its log is in {}", logs.display()))
        }
    };
    cluster.stop().await;
    outcome
}

fn shape(args: &UpArgs) -> anyhow::Result<ClusterShape> {
    let shape = ClusterShape::from_args(&args.shape)?;
    let blocks = |capacity: Capacity, flag: &str| match capacity {
        Capacity::Share(_) | Capacity::Unbounded => {
            anyhow::bail!(
                "{flag} {capacity} is only valid with a trace: give bytes (512MiB) or blocks (1000b)"
            )
        }
        sized => Ok(sized.blocks_per_node(0, args.shape.nodes, args.shape.block_bytes)),
    };
    let capacity = NodeCapacity {
        dram_blocks: blocks(args.shape.dram.unwrap_or(DRAM_DEFAULT), "--dram")?,
        ssd_blocks: blocks(args.shape.ssd.unwrap_or(Capacity::None), "--ssd")?,
    };
    Ok(ClusterShape {
        capacity,
        watermarks: args.shape.watermarks.map(|marks| (marks.high, marks.low)),
        base_port: args.base_port,
        block_tokens: args.block_tokens.unwrap_or(if args.openai.is_some() {
            BLOCK_TOKENS_OF_ENGINES
        } else {
            BLOCK_TOKENS_OF_TRACES
        }),
        openai: args.openai.map(|port| openai(args, port)).transpose()?,
        // The production default; a replay that counts hits waits longer.
        fetch_floor_ms: InstanceConfig::default().fetch_floor_ms,
        ..shape
    })
}

fn openai(args: &UpArgs, port: u16) -> anyhow::Result<OpenAiShape> {
    let (Some(tokenizer), Some(name)) = (&args.tokenizer, &args.model) else {
        return Ok(OpenAiShape { port, open: args.open, models: Vec::new() });
    };
    // The processes run in other working directories.
    let tokenizer = tokenizer.canonicalize().map_err(|cause| {
        anyhow::anyhow!("cannot read {}: {cause}; give the tokenizer.json of a model", tokenizer.display())
    })?;
    let model = ModelConfig { name: name.clone(), tokenizer, ..ModelConfig::default() };
    Ok(OpenAiShape { port, open: args.open, models: vec![model] })
}

async fn first_crash(cluster: &mut LocalCluster) -> String {
    /// Interval of crash checks.
    const POLL_INTERVAL: std::time::Duration = std::time::Duration::from_millis(500);
    loop {
        if let Some(crashed) = cluster.crashed_children().into_iter().next() {
            return crashed;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Issues the certificates of tenants, and returns their paths.
fn tenants(args: &UpArgs, cluster: &LocalCluster) -> anyhow::Result<Vec<String>> {
    let authority = Authority::open(&cluster.certificates())?;
    let issue =
        |tenant: &u32| Ok(authority.issue(&tls::Role::tenant(TenantId(*tenant)))?.cert.display().to_string());
    args.tenants.iter().map(issue).collect()
}

fn print(args: &UpArgs, cluster: &LocalCluster, tenants: Vec<String>) -> anyhow::Result<()> {
    let processes: Vec<_> = cluster.children().filter_map(|(_, child)| child.ready().cloned()).collect();
    let reply = UpReply {
        routers: cluster.router_addresses(),
        tls_dir: cluster.certificates().display().to_string(),
        data_dir: cluster.directory().display().to_string(),
        processes,
        tenants,
    };
    if args.json {
        println!("{}", serde_json::to_string(&reply)?);
        return Ok(());
    }
    for ready in &reply.processes {
        let role =
            [Role::Router, Role::Node, Role::Instance].into_iter().find(|role| role.name() == ready.role);
        let name = role.map_or_else(|| ready.role.clone(), |role| process_name((role, ready.number)));
        let addresses: Vec<_> =
            ready.addresses.iter().map(|(purpose, address)| format!("{purpose} {address}")).collect();
        println!("  {name:12} {}", addresses.join("  "));
    }
    for certificate in &reply.tenants {
        println!("  tenant       {certificate}");
    }
    let routers = reply.processes.iter().filter(|ready| ready.role == Role::Router.name());
    let gateway = routers.flat_map(|ready| &ready.addresses).find(|(purpose, _)| *purpose == "openai");
    if let Some((_, address)) = gateway {
        let model = args.model.as_deref().unwrap_or("any");
        println!(
            "try it with\n  curl -s http://{address}/v1/completions -d '{{\"model\":\"{model}\",\"prompt\":\"…\"}}'"
        );
    }
    println!("data and logs in {}", reply.data_dir);
    println!(
        "inspect it with\n  kvfleet status --cluster {} --tls-dir {}",
        reply.routers.join(","),
        reply.tls_dir
    );
    println!("Ctrl-C stops it");
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::Parser;
    use kvfleet_errors_doc::says;

    use super::*;
    use crate::args::{Args, Command};

    #[test]
    fn flags_set_the_shape_and_default_fetch_time() {
        let words = ["kvfleet", "up", "--block-tokens", "16", "--base-port", "30000", "--tenant", "3,5"];
        let Command::Up(args) = Args::try_parse_from(words).unwrap().command else { panic!("not up") };
        let shape = shape(&args).unwrap();
        assert_eq!((shape.block_tokens, shape.base_port), (16, Some(30_000)));
        assert_eq!(args.tenants, [3, 5]);
        assert_eq!(shape.fetch_floor_ms, InstanceConfig::default().fetch_floor_ms);
    }

    #[test]
    fn flags_set_the_openai_listener() {
        let up = |words: &[&str]| match Args::try_parse_from([&["kvfleet", "up"], words].concat())
            .unwrap()
            .command
        {
            Command::Up(args) => shape(&args),
            _ => panic!("not up"),
        };
        let (without, with) = (up(&[]).unwrap(), up(&["--openai", "8000"]).unwrap());
        assert_eq!((without.block_tokens, without.openai), (512, None));
        assert_eq!(with.block_tokens, 16);
        assert_eq!(with.openai, Some(OpenAiShape { port: 8000, open: false, models: vec![] }));
        let open = up(&["--openai", "8000", "--open"]).unwrap().openai;
        assert!(open.is_some_and(|openai| openai.open));
        let missing = up(&["--openai", "8000", "--model", "m", "--tokenizer", "nowhere.json"]).unwrap_err();
        says("a tokenizer of `up` that is not there", &missing, &[]);
        for half in [
            &["--model", "m"][..],
            &["--open"],
            &["--openai", "1", "--tokenizer", "t"],
            &["--openai", "1", "--model", "m"],
        ] {
            assert!(Args::try_parse_from([&["kvfleet", "up"], half].concat()).is_err(), "{half:?}");
        }
    }
}
