//! The `kvfleet` program: parses the command line and calls the library.

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use kvfleet::args::{Args, Command, NodeArgs, NodeCommand};
use kvfleet::process::{Role, Stop, run as run_process};
use kvfleet::{
    access, admin, certs, demo, inspect, keys, members, probe, replay, report, status, trace, up, weights,
    why,
};

/// mimalloc, because a gateway request makes many small allocations, for which the allocator of
/// libc is slow.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Longest wait at exit for work that cannot be cancelled, such as reading a trace.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// Exit status after a second Ctrl-C: that of a process killed by SIGINT, by shell convention.
const EXIT_INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    let args = Args::parse();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(cause) => return fail(&anyhow::anyhow!("cannot start threads: {cause}")),
    };
    let code = runtime.block_on(dispatch(args.command)).unwrap_or_else(|error| fail(&error));
    runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
    code
}

async fn dispatch(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Demo(args) => {
            run_interruptible(async |stop| Ok(exit_code(demo::run(&args, stop).await?))).await
        }
        Command::Up(args) => {
            run_interruptible(async |stop| up::run(&args, stop).await.map(|()| ExitCode::SUCCESS)).await
        }
        Command::Replay(args) => {
            run_interruptible(async |stop| {
                let outcome = replay::run_replay(&args, stop).await?;
                print!("{}", report::table(&outcome.report, args.verbose));
                outcome.files()?.iter().for_each(|file| println!("wrote {}", file.display()));
                Ok(exit_code(outcome.is_good()))
            })
            .await
        }
        Command::Crosscheck(args) => {
            run_interruptible(async |stop| Ok(exit_code(replay::crosscheck(&args, stop).await?))).await
        }
        Command::Access => {
            access::run();
            Ok(ExitCode::SUCCESS)
        }
        Command::Certs(command) => certs::run(&command).map(|()| ExitCode::SUCCESS),
        Command::Keys(command) => keys::run(&command).map(|()| ExitCode::SUCCESS),
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

/// Runs a command that owns child processes and temporary directories. Signal handlers are
/// installed first. At the second signal the command is dropped, with everything it owns.
async fn run_interruptible(
    command: impl AsyncFnOnce(&Stop) -> anyhow::Result<ExitCode>,
) -> anyhow::Result<ExitCode> {
    let stop = Stop::for_command()?;
    tokio::select! {
        code = command(&stop) => code,
        () = stop.forced() => Ok(ExitCode::from(EXIT_INTERRUPTED)),
    }
}

/// A replay with a lost request, a wrong byte or a fault that was not carried out fails, although
/// it has a report.
fn exit_code(is_good: bool) -> ExitCode {
    if is_good { ExitCode::SUCCESS } else { ExitCode::from(2) }
}

fn fail(error: &anyhow::Error) -> ExitCode {
    eprintln!("kvfleet: {error:#}");
    ExitCode::FAILURE
}
