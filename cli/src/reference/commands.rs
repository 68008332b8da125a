//! The page on commands and flags, from the definition of the command line.

use clap::{Arg, ArgAction, Command, CommandFactory};

use super::{check, head, opening, row};
use crate::args::Args;

#[test]
fn the_page_on_commands_is_current() {
    let mut command = Args::command().term_width(0);
    command.build();
    let mut text = opening("Commands", "the command line of kvfleet");
    text.push_str("\nEvery command also has `--help`. Flags of all commands:");
    text.push_str(" `--help`, and `--version` of `kvfleet` itself.\n");
    text.push_str(&format!("\n```\n{}\n```\n", command.get_after_help().unwrap()));
    for command in command.get_subcommands().filter(|command| !is_hidden(command)) {
        add(&mut text, command, "kvfleet");
    }
    check("cli.md", &text);
}

fn is_hidden(command: &Command) -> bool {
    command.is_hide_set() || command.get_name() == "help"
}

/// Adds a command, then its subcommands.
fn add(text: &mut String, command: &Command, above: &str) {
    let name = format!("{above} {}", command.get_name());
    let about = command.get_long_about().or(command.get_about()).map(ToString::to_string).unwrap_or_default();
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ").replace("\n       ", "\n");
    text.push_str(&format!("\n## {name}\n\n{}\n\n```\n{usage}\n```\n", wrap(&about)));
    let arguments: Vec<&Arg> = command.get_arguments().filter(|argument| is_listed(argument)).collect();
    if !arguments.is_empty() {
        text.push_str(&head(&["argument", "default", "meaning"]));
    }
    for argument in arguments {
        text.push_str(&row(&[&format!("`{}`", spelling(argument)), &default(argument), &meaning(argument)]));
    }
    for command in command.get_subcommands().filter(|command| !is_hidden(command)) {
        add(text, command, &name);
    }
}

fn is_listed(argument: &Arg) -> bool {
    !argument.is_hide_set() && !matches!(argument.get_id().as_str(), "help" | "version")
}

/// The argument as it is typed.
fn spelling(argument: &Arg) -> String {
    let values = argument.get_value_names().unwrap_or_default();
    let takes_value = argument.get_action().takes_values() && !values.is_empty();
    let value = if takes_value { values.join(" ") } else { String::new() };
    let repeats = if matches!(argument.get_action(), ArgAction::Append) { "…" } else { "" };
    match argument.get_long() {
        Some(long) if takes_value => format!("--{long} {value}{repeats}"),
        Some(long) => format!("--{long}"),
        None => format!("{value}{repeats}"),
    }
}

fn default(argument: &Arg) -> String {
    let takes_values = argument.get_action().takes_values();
    let values: Vec<String> =
        argument.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect();
    match (values.as_slice(), argument.is_required_set()) {
        ([], true) => "required".to_owned(),
        ([_, ..], _) if takes_values => format!("`{}`", values.join(" ")),
        _ => String::new(),
    }
}

/// Its help, the values it may have, and its variable.
fn meaning(argument: &Arg) -> String {
    let help = argument.get_long_help().or(argument.get_help()).map(ToString::to_string).unwrap_or_default();
    let mut parts = vec![help.split_whitespace().collect::<Vec<_>>().join(" ")];
    let allowed: Vec<String> =
        argument.get_possible_values().iter().map(|value| format!("`{}`", value.get_name())).collect();
    if !allowed.is_empty() && argument.get_action().takes_values() {
        parts.push(format!("One of {}.", allowed.join(", ")));
    }
    if let Some(variable) = argument.get_env() {
        parts.push(format!("Variable: `{}`.", variable.to_string_lossy()));
    }
    parts.join(" ")
}

/// Breaks prose into lines of at most 100 columns.
fn wrap(text: &str) -> String {
    const COLUMNS: usize = 100;
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().unwrap();
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > COLUMNS {
            lines.push(word.to_owned());
        } else {
            line.push_str(if line.is_empty() { "" } else { " " });
            line.push_str(word);
        }
    }
    lines.join("\n")
}
