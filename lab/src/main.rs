//! The `kvfleet-lab` program: parses the command line and calls the library.

use std::process::ExitCode;

use clap::Parser;
use kvfleet_lab::args::LabArgs;
use kvfleet_lab::commands;

fn main() -> ExitCode {
    match commands::run(&LabArgs::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kvfleet-lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}
