//! The `kvfleet` command: parses what was typed and calls it. What the commands do is in the library.

use std::process::ExitCode;

use clap::Parser;
use kvfleet::args::{Args, Command};
use kvfleet::process::{Role, run as run_process};
use kvfleet::{admin, demo, replay, report, status, trace, up};

fn main() -> ExitCode {
    let args = Args::parse();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(cause) => return fail(&anyhow::anyhow!("cannot start threads: {cause}")),
    };
    match runtime.block_on(dispatch(args.command)) {
        Ok(code) => code,
        Err(error) => fail(&error),
    }
}

async fn dispatch(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Demo(args) => Ok(exit_code(demo::run(&args).await?)),
        Command::Up(args) => up::run(&args).await.map(|()| ExitCode::SUCCESS),
        Command::Replay(args) => {
            let outcome = replay::run(&args).await?;
            print!("{}", report::table(&outcome.report));
            outcome.files.iter().for_each(|file| println!("wrote {}", file.display()));
            Ok(exit_code(outcome.is_good()))
        }
        Command::Status(args) => status::run(&args).await.map(|()| ExitCode::SUCCESS),
        Command::Trace(command) => trace::run(&command).map(|()| ExitCode::SUCCESS),
        Command::Pin(args) => admin::pin(&args).await.map(|()| ExitCode::SUCCESS),
        Command::Unpin(args) => admin::unpin(&args).await.map(|()| ExitCode::SUCCESS),
        Command::Quota(args) => admin::quota(&args).await.map(|()| ExitCode::SUCCESS),
        Command::Router(args) => run_process(Role::Router, &args).await.map(|()| ExitCode::SUCCESS),
        Command::Node(args) => run_process(Role::Node, &args).await.map(|()| ExitCode::SUCCESS),
        Command::Instance(args) => run_process(Role::Instance, &args).await.map(|()| ExitCode::SUCCESS),
    }
}

/// A replay that lost a request or saw a wrong byte is a failure even though it has a report.
fn exit_code(is_good: bool) -> ExitCode {
    if is_good { ExitCode::SUCCESS } else { ExitCode::from(2) }
}

fn fail(error: &anyhow::Error) -> ExitCode {
    eprintln!("kvfleet: {error:#}");
    ExitCode::FAILURE
}
