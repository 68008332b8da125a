//! `kvfleet keys`: makes API keys for callers of the gateway.
//!
//! Not here: the file of keys, which the gateway reads (`kvfleet_gateway::KeyEntry`).

use kvfleet_gateway::{KeyEntry, NewKey};

use crate::args::{KeysCommand, NewKeyArgs};

/// Carries out the command.
///
/// # Errors
/// Invalid rights of a key, or no random bytes.
pub fn run(command: &KeysCommand) -> anyhow::Result<()> {
    let KeysCommand::New(args) = command;
    print!("{}", text(&new_key(args)?));
    Ok(())
}

fn new_key(args: &NewKeyArgs) -> anyhow::Result<NewKey> {
    let NewKeyArgs { name, tenant, models, requests_max } = args.clone();
    let models = (!models.is_empty()).then_some(models);
    Ok(NewKey::new(KeyEntry { name, tenant, models, requests_max, ..KeyEntry::default() })?)
}

/// The key, and its table.
fn text(new: &NewKey) -> String {
    format!(
        "key, shown only now; give it to the caller:\n  {}\n\ntable for the file of \
         gateway.openai.api_keys_file, on every router:\n\n{}",
        new.key, new.table
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::Parser;
    use kvfleet_errors_doc::says;

    use super::*;
    use crate::args::{Args, Command};

    fn new(words: &[&str]) -> anyhow::Result<NewKey> {
        match Args::try_parse_from([&["kvfleet", "keys", "new"], words].concat())?.command {
            Command::Keys(KeysCommand::New(args)) => new_key(&args),
            _ => panic!("not keys new"),
        }
    }

    #[test]
    fn prints_the_key_once_and_its_table() {
        let made = new(&["team-a", "--tenant", "3", "--model", "m,n", "--requests-max", "8"]).unwrap();
        let (key, table) = (&made.key, &made.table);
        let printed = text(&made);
        assert_eq!(printed.matches(key.as_str()).count(), 1);
        let (_, after) = printed.split_once("[[keys]]").unwrap();
        assert!(table.ends_with(after));
        for line in ["name = \"team-a\"", "tenant = 3", "models = [\"m\", \"n\"]", "requests_max = 8"] {
            assert!(table.lines().any(|own| own == line), "{line} is not in {table}");
        }
        assert!(new(&["team-a"]).is_err(), "the tenant is a decision");
        says("a new API key with a name of spaces", &new(&["team a", "--tenant", "3"]).err().unwrap(), &[]);
    }
}
