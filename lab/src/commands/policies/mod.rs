//! `kvfleet-lab policies`: every eviction policy on the given traces and on generated traffic, as
//! JSON lines, as a document with tables, and as plots.
//!
//! `crate::policies` replays the traces.

mod document;
mod plot;

use std::path::{Path, PathBuf};

use crate::evict;
use crate::policies::{KNOWABLE, PolicyTrial, SHARES, Traffic, judge_policy, replay_all};
use kvfleet_sim::generate::{TraceSpec, TrafficKind};
use kvfleet_sim::stats::curve::OPTIMAL;

use super::{read_trace, write_summary};
use crate::args::PoliciesArgs;

/// Name of the document and of the folder with its plots.
const DOCUMENT: &str = "POLICIES.md";
const PLOTS: &str = "policies";

/// Properties of one kind of traffic, apart from its trials.
struct TrafficFacts {
    name: String,
    seeds: u64,
    /// Requests of the first seed.
    requests: usize,
    unique_blocks: usize,
}

/// The contents of the document.
struct Evaluation {
    judged: String,
    facts: Vec<TrafficFacts>,
    trials: Vec<PolicyTrial>,
}

/// Replays all traffic and writes the results.
pub(super) fn run(args: &PoliciesArgs) -> anyhow::Result<()> {
    if evict::by_name(&args.judge, 0).is_none() {
        anyhow::bail!("policy {} is unknown: choose one of {}", args.judge, evict::NAMES.join(", "));
    }
    let evaluation = evaluate(args)?;
    if args.json {
        for trial in &evaluation.trials {
            println!("{}", serde_json::to_string(trial)?);
        }
    }
    if let Some(path) = &args.summary {
        write_summary(path, &document::render_summary(&evaluation, &judgement(&evaluation)))?;
    }
    if let Some(directory) = &args.out {
        for file in write_document(directory, &evaluation)? {
            eprintln!("wrote {}", file.display());
        }
    } else if !args.json && args.summary.is_none() {
        print!("{}", document::render(&evaluation, &judgement(&evaluation)));
    }
    Ok(())
}

fn judgement(evaluation: &Evaluation) -> crate::policies::PolicyJudgement {
    judge_policy(&evaluation.trials, &evaluation.judged, &evict::BASELINES)
}

fn evaluate(args: &PoliciesArgs) -> anyhow::Result<Evaluation> {
    let mut evaluation = Evaluation { judged: args.judge.clone(), facts: vec![], trials: vec![] };
    for path in &args.files {
        let name =
            path.file_stem().map_or_else(|| "trace".to_owned(), |stem| stem.to_string_lossy().into_owned());
        evaluation.add(&Traffic::recorded(&name, read_trace(path)?), args);
    }
    for kind in TrafficKind::ALL {
        for seed in 1..=args.seeds {
            let spec = TraceSpec {
                block_tokens: args.block_tokens,
                ..TraceSpec::new(kind, seed, args.requests as u64)
            };
            evaluation.add(&Traffic::generated(spec), args);
        }
    }
    Ok(evaluation)
}

impl Evaluation {
    fn add(&mut self, traffic: &Traffic, args: &PoliciesArgs) {
        let seed = traffic.seed.map_or_else(String::new, |seed| format!(", seed {seed}"));
        eprintln!("replaying {}{seed}: {} requests", traffic.name, traffic.requests());
        let policies = [evict::NAMES.as_slice(), &[KNOWABLE, OPTIMAL]].concat();
        self.trials.extend(replay_all(traffic, &policies, &SHARES, args.threads.max(1)));
        match self.facts.iter_mut().find(|facts| facts.name == traffic.name) {
            Some(facts) => facts.seeds += 1,
            None => self.facts.push(TrafficFacts {
                name: traffic.name.clone(),
                seeds: u64::from(traffic.seed.is_some()),
                requests: traffic.requests(),
                unique_blocks: traffic.unique_blocks(),
            }),
        }
    }
}

fn write_document(directory: &Path, evaluation: &Evaluation) -> anyhow::Result<Vec<PathBuf>> {
    let plots = directory.join(PLOTS);
    std::fs::create_dir_all(&plots)
        .map_err(|cause| anyhow::anyhow!("cannot make {}: {cause}; choose another --out", plots.display()))?;
    let path = directory.join(DOCUMENT);
    std::fs::write(&path, document::render(evaluation, &judgement(evaluation)))
        .map_err(|cause| anyhow::anyhow!("cannot write {}: {cause}", path.display()))?;
    let mut written = vec![path];
    for facts in &evaluation.facts {
        let path = plots.join(format!("{}.svg", facts.name));
        plot::draw(&path, &facts.name, evaluation)?;
        written.push(path);
    }
    Ok(written)
}
