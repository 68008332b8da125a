//! The `kvfleet` command: parses what was typed and calls it. What the commands do is in the library.

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use kvfleet::args::{Args, Command, NodeArgs, NodeCommand};
use kvfleet::process::{Role, Stop, run as run_process};
use kvfleet::{admin, demo, inspect, members, probe, replay, report, status, trace, up, weights, why};

/// A request at a door makes and frees some hundred small things; with libc's allocator that was a quarter of its time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// How long work that cannot be cancelled, such as reading a trace, may hold up the end.
const LAST_WORK: Duration = Duration::from_secs(1);

/// Exit status after a second Ctrl-C: that of a process ended by SIGINT, as shells count.
const EXIT_INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    let args = Args::parse();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(cause) => return fail(&anyhow::anyhow!("cannot start threads: {cause}")),
    };
    let code = runtime.block_on(dispatch(args.command)).unwrap_or_else(|error| fail(&error));
    runtime.shutdown_timeout(LAST_WORK);
    code
}

async fn dispatch(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Demo(args) => {
            until_insisted(async |stop| Ok(exit_code(demo::run(&args, stop).await?))).await
        }
        Command::Up(args) => {
            until_insisted(async |stop| up::run(&args, stop).await.map(|()| ExitCode::SUCCESS)).await
        }
        Command::Replay(args) => {
            until_insisted(async |stop| {
                let outcome = replay::run(&args, stop).await?;
                print!("{}", report::table(&outcome.report));
                outcome.files()?.iter().for_each(|file| println!("wrote {}", file.display()));
                Ok(exit_code(outcome.is_good()))
            })
            .await
        }
        Command::Crosscheck(args) => {
            until_insisted(async |stop| Ok(exit_code(replay::crosscheck(&args, stop).await?))).await
        }
        Command::Why(args) => why::run(&args).await.map(|()| ExitCode::SUCCESS),
        Command::Status(args) => status::run(&args).await.map(|()| ExitCode::SUCCESS),
        Command::Trace(command) => trace::run(&command).map(|()| ExitCode::SUCCESS),
        Command::Pin(args) => admin::pin(&args).await.map(|()| ExitCode::SUCCESS),
        Command::Unpin(args) => admin::unpin(&args).await.map(|()| ExitCode::SUCCESS),
        Command::Quota(args) => admin::quota(&args).await.map(|()| ExitCode::SUCCESS),
        Command::Ttl(args) => admin::ttl(&args).await.map(|()| ExitCode::SUCCESS),
        Command::Weights(args) => weights::run(&args).await.map(|()| ExitCode::SUCCESS),
        Command::Members(command) => members::run(&command).await.map(|()| ExitCode::SUCCESS),
        Command::Router(args) => {
            run_process(Role::Router, &args.settings()).await.map(|()| ExitCode::SUCCESS)
        }
        Command::Node(NodeArgs { command: Some(NodeCommand::Inspect(args)), .. }) => {
            inspect::run(&args).await.map(|()| ExitCode::SUCCESS)
        }
        Command::Node(args) => run_process(Role::Node, &args.settings()).await.map(|()| ExitCode::SUCCESS),
        Command::Instance(args) => run_process(Role::Instance, &args).await.map(|()| ExitCode::SUCCESS),
        Command::Probe(args) => probe::probe(&args).await,
        Command::Drain(args) => probe::drain(&args).await,
    }
}

/// Runs a command that holds child processes and temporary directories. Signals are heard before it
/// begins; at the second one it is dropped, and with it all that it holds.
async fn until_insisted(
    command: impl AsyncFnOnce(&Stop) -> anyhow::Result<ExitCode>,
) -> anyhow::Result<ExitCode> {
    let stop = Stop::of_command()?;
    tokio::select! {
        code = command(&stop) => code,
        () = stop.insisted() => Ok(ExitCode::from(EXIT_INTERRUPTED)),
    }
}

/// A replay that lost a request, saw a wrong byte or did not do what it was asked is a failure even though
/// it has a report.
fn exit_code(is_good: bool) -> ExitCode {
    if is_good { ExitCode::SUCCESS } else { ExitCode::from(2) }
}

fn fail(error: &anyhow::Error) -> ExitCode {
    eprintln!("kvfleet: {error:#}");
    ExitCode::FAILURE
}
