//! The page on metrics, from the calls in the sources that register them.
//!
//! It reads names, help texts and labels as literals, through bindings, builder functions and
//! closures of the same file. A name that it cannot follow is an error, so no metric is left out.
//! Not here: dashboards and alerts (`deploy/`).

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, ensure};
use syn::visit::Visit;

use super::{head, opening, row};
use crate::tidy::{Tree, is_test_file, is_test_only};

/// Part of the page: title, and the folder of its sources.
const PARTS: [(&str, &str); 4] = [
    ("Router", "router/src/"),
    ("Gateway", "gateway/src/"),
    ("Node", "node/src/"),
    ("Mock engine", "engine/src/"),
];

/// Constructors of the metrics library, and the type that Prometheus knows.
const TYPES: [(&str, &str); 8] = [
    ("IntCounter", "counter"),
    ("IntCounterVec", "counter"),
    ("IntGauge", "gauge"),
    ("IntGaugeVec", "gauge"),
    ("Gauge", "gauge"),
    ("GaugeVec", "gauge"),
    ("Histogram", "histogram"),
    ("HistogramVec", "histogram"),
];

/// Beginning of every name.
const PREFIX: &str = "kvfleet_";

/// One registered metric.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Metric {
    kind: String,
    labels: Vec<String>,
    help: String,
}

/// The whole page.
pub(super) fn page(tree: &Tree) -> anyhow::Result<String> {
    let mut text = opening("Metrics", "the calls that register them");
    text.push_str(
        "\nA process serves its metrics at `/metrics` of `process.metrics_listen`. The gateway's are \
         those of its\nrouter process. The [guide](../guide/observe.md) says which ones to watch.\n",
    );
    for (title, folder) in PARTS {
        let mut metrics = BTreeMap::new();
        let sources = tree.sources().iter().filter(|source| {
            source.path.starts_with(folder)
                && !is_test_file(&source.path)
                && source.text.contains("prometheus")
        });
        for source in sources {
            metrics
                .extend(metrics_of(&source.syntax).with_context(|| format!("metrics of {}", source.path))?);
        }
        text.push_str(&format!("\n## {title}\n"));
        text.push_str(&head(&["metric", "type", "labels", "meaning"]));
        for (name, Metric { kind, labels, help }) in metrics {
            let labels: Vec<String> = labels.iter().map(|label| format!("`{label}`")).collect();
            text.push_str(&row(&[&format!("`{name}`"), &kind, &labels.join(", "), &help]));
        }
    }
    Ok(text)
}

fn metrics_of(file: &syn::File) -> anyhow::Result<BTreeMap<String, Metric>> {
    let mut reader = Reader::default();
    for item in &file.items {
        if let syn::Item::Fn(function) = item {
            reader.functions.insert(function.sig.ident.to_string(), MetricBuilder::of_function(function));
        }
    }
    reader.visit_file(file);
    let lost: Vec<&String> = reader.named.iter().filter(|name| !reader.metrics.contains_key(*name)).collect();
    ensure!(lost.is_empty(), "no call with a type and a help text was found for {lost:?}");
    Ok(reader.metrics)
}

/// A function or closure that builds metrics, or their labels.
#[derive(Clone, Debug, Default)]
struct MetricBuilder {
    parameters: Vec<String>,
    /// Prometheus type that its body builds.
    kind: Option<String>,
    /// Labels that its body gives.
    labels: Vec<String>,
    /// Other builders that its body calls.
    calls: Vec<String>,
    /// Elements of the array that it returns.
    array: Vec<syn::Expr>,
}

impl MetricBuilder {
    fn of_function(function: &syn::ItemFn) -> MetricBuilder {
        let mut builder = MetricBuilder::default();
        builder.visit_block(&function.block);
        builder
    }

    fn of_closure(closure: &syn::ExprClosure) -> MetricBuilder {
        let mut builder = MetricBuilder::default();
        for parameter in &closure.inputs {
            if let syn::Pat::Ident(ident) = parameter {
                builder.parameters.push(ident.ident.to_string());
            }
        }
        if let syn::Expr::Array(array) = &*closure.body {
            builder.array = array.elems.iter().cloned().collect();
        }
        builder.visit_expr(&closure.body);
        builder
    }
}

impl<'ast> Visit<'ast> for MetricBuilder {
    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        if let Some(kind) = constructor(&call.func) {
            self.kind.get_or_insert_with(|| kind.to_owned());
            let labels = call.args.iter().nth(1).map(literals).unwrap_or_default();
            self.labels.extend(labels);
        }
        self.calls.extend(name_of(&call.func));
        syn::visit::visit_expr_call(self, call);
    }
}

/// Value of a binding, as far as it is known.
#[derive(Clone, Debug)]
enum Value {
    Texts(Vec<String>),
    MetricBuilder(MetricBuilder),
}

/// A call around the current one, with the type that it builds and its labels.
#[derive(Clone, Debug, Default)]
struct OuterCall {
    kind: Option<String>,
    labels: Vec<String>,
}

/// Walks a file and collects its metrics.
#[derive(Default)]
struct Reader {
    functions: BTreeMap<String, MetricBuilder>,
    bindings: BTreeMap<String, Value>,
    outer: Vec<OuterCall>,
    /// Names in the file, registered or not.
    named: BTreeSet<String>,
    metrics: BTreeMap<String, Metric>,
}

impl Reader {
    /// Texts that an expression stands for.
    fn texts(&self, expression: &syn::Expr) -> Vec<String> {
        match expression {
            syn::Expr::Path(_) => {
                match name_of(expression).and_then(|name| self.bindings.get(&name).cloned()) {
                    Some(Value::Texts(texts)) => texts,
                    _ => Vec::new(),
                }
            }
            syn::Expr::Reference(reference) => self.texts(&reference.expr),
            syn::Expr::Array(array) => array.elems.iter().flat_map(|element| self.texts(element)).collect(),
            syn::Expr::Call(call) => match self.builder(&call.func) {
                Some(builder) => self.returned(&builder, call),
                None => Vec::new(),
            },
            _ => literals(expression),
        }
    }

    /// Texts that a builder for labels returns.
    fn returned(&self, builder: &MetricBuilder, call: &syn::ExprCall) -> Vec<String> {
        let argument = |name: &String| builder.parameters.iter().position(|parameter| parameter == name);
        let elements = builder.array.iter().flat_map(|element| {
            match name_of(element).as_ref().and_then(argument).and_then(|at| call.args.iter().nth(at)) {
                Some(given) => self.texts(given),
                None => self.texts(element),
            }
        });
        elements.collect()
    }

    fn builder(&self, function: &syn::Expr) -> Option<MetricBuilder> {
        let name = name_of(function)?;
        match self.bindings.get(&name) {
            Some(Value::MetricBuilder(builder)) => Some(builder.clone()),
            _ => self.functions.get(&name).cloned(),
        }
    }

    /// The type and labels that a call builds, through the builders that it calls.
    fn built(&self, function: &syn::Expr, arguments: &[&syn::Expr]) -> OuterCall {
        if let Some(kind) = constructor(function) {
            let labels = arguments.get(1).map(|labels| self.texts(labels)).unwrap_or_default();
            return OuterCall { kind: Some(kind.to_owned()), labels };
        }
        let Some(builder) = self.builder(function) else { return OuterCall::default() };
        let inner = builder.calls.iter().filter_map(|name| self.functions.get(name));
        let built = std::iter::once(&builder).chain(inner).find(|builder| builder.kind.is_some());
        built.map_or_else(OuterCall::default, |built| OuterCall {
            kind: built.kind.clone(),
            labels: built.labels.clone(),
        })
    }

    /// Records a call with a name and a help text among its arguments.
    fn record(&mut self, call: &syn::ExprCall, built: &OuterCall) {
        let arguments: Vec<&syn::Expr> = call.args.iter().collect();
        let is_name =
            |argument: &&syn::Expr| matches!(self.texts(argument).as_slice(), [name] if is_metric_name(name));
        let Some(at) = arguments.iter().position(is_name) else { return };
        let text = |position: usize| {
            arguments.get(position).and_then(|argument| self.texts(argument).into_iter().next())
        };
        let (Some(name), Some(help)) = (text(at), text(at + 1)) else { return };
        let around = self.outer.iter().rev().find(|outer| outer.kind.is_some());
        let Some(kind) = built.kind.clone().or_else(|| around?.kind.clone()) else { return };
        let mut labels = around.map(|outer| outer.labels.clone()).unwrap_or_default();
        if built.kind.is_some() && constructor(&call.func).is_none() {
            labels = built.labels.clone();
            labels.extend(arguments.iter().skip(at + 2).flat_map(|argument| self.texts(argument)));
        }
        self.metrics.insert(name, Metric { kind, labels, help });
    }
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        if !is_test_only(&module.attrs) {
            syn::visit::visit_item_mod(self, module);
        }
    }

    fn visit_block(&mut self, block: &'ast syn::Block) {
        let outer = self.bindings.clone();
        syn::visit::visit_block(self, block);
        self.bindings = outer;
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        syn::visit::visit_local(self, local);
        let Some(value) = local.init.as_ref().map(|init| &*init.expr) else { return };
        match (&local.pat, value) {
            (syn::Pat::Tuple(names), syn::Expr::Tuple(values)) => {
                for (name, value) in names.elems.iter().zip(&values.elems) {
                    self.bind(name, value);
                }
            }
            (name, value) => self.bind(name, value),
        }
    }

    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        let arguments: Vec<&syn::Expr> = call.args.iter().collect();
        let built = self.built(&call.func, &arguments);
        self.record(call, &built);
        // Only constructors give a type to the options inside them.
        let outer = if constructor(&call.func).is_some() { built } else { OuterCall::default() };
        self.outer.push(outer);
        syn::visit::visit_expr_call(self, call);
        self.outer.pop();
    }

    fn visit_lit_str(&mut self, text: &'ast syn::LitStr) {
        let text = text.value();
        if is_metric_name(&text) {
            self.named.insert(text);
        }
    }
}

impl Reader {
    fn bind(&mut self, name: &syn::Pat, value: &syn::Expr) {
        let syn::Pat::Ident(name) = name else { return };
        let value = match value {
            syn::Expr::Closure(closure) => Value::MetricBuilder(MetricBuilder::of_closure(closure)),
            value => Value::Texts(self.texts(value)),
        };
        self.bindings.insert(name.ident.to_string(), value);
    }
}

fn is_metric_name(text: &str) -> bool {
    let is_plain = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '_';
    text.strip_prefix(PREFIX).is_some_and(|rest| !rest.is_empty() && rest.chars().all(is_plain))
}

/// Prometheus type that this function of the metrics library builds.
fn constructor(function: &syn::Expr) -> Option<&'static str> {
    let syn::Expr::Path(path) = function else { return None };
    let owner = path.path.segments.iter().rev().nth(1)?.ident.to_string();
    TYPES.iter().find(|(name, _)| *name == owner).map(|(_, kind)| *kind)
}

/// Name of a path with one segment.
fn name_of(expression: &syn::Expr) -> Option<String> {
    match expression {
        syn::Expr::Path(path) => path.path.get_ident().map(ToString::to_string),
        _ => None,
    }
}

/// Texts that stand in the expression itself.
fn literals(expression: &syn::Expr) -> Vec<String> {
    match expression {
        syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => vec![text.value()],
        syn::Expr::Reference(reference) => literals(&reference.expr),
        syn::Expr::Array(array) => array.elems.iter().flat_map(literals).collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn found(body: &str) -> anyhow::Result<BTreeMap<String, Metric>> {
        let builders = "fn gauge(r: &R, name: &str, help: &str) -> G { IntGauge::new(name, help) }\n\
            fn labelled(r: &R, name: &str, help: &str, label: &str) -> G {\n\
                IntCounterVec::new(Opts::new(name, help), &[label]) }\n";
        metrics_of(&syn::parse_file(&format!("{builders} fn register() {{ {body} }}")).unwrap())
    }

    fn metric(kind: &str, labels: &[&str], help: &str) -> Metric {
        let labels = labels.iter().map(|label| (*label).to_owned()).collect();
        Metric { kind: kind.to_owned(), labels, help: help.to_owned() }
    }

    #[test]
    fn calls_are_followed_to_their_type_and_labels() {
        let one = |body: &str| found(body).unwrap().remove("kvfleet_a");
        for (body, expected) in [
            ("IntCounter::new(\"kvfleet_a\", \"A\");", metric("counter", &[], "A")),
            ("gauge(r, \"kvfleet_a\", \"A\");", metric("gauge", &[], "A")),
            ("labelled(r, \"kvfleet_a\", \"A\", \"end\");", metric("counter", &["end"], "A")),
            (
                "let (name, help) = (\"kvfleet_a\", \"A\"); let labels = &[\"x\", \"y\"];\n\
                 GaugeVec::new(Opts::new(name, help), labels);",
                metric("gauge", &["x", "y"], "A"),
            ),
            (
                "let by_tier = |name: &str, help: &str| IntGaugeVec::new(Opts::new(name, help), &[\"tier\"]);\n\
                 by_tier(\"kvfleet_a\", \"A\");",
                metric("gauge", &["tier"], "A"),
            ),
            (
                "let gauge = |name, help| gauge(r, name, help); gauge(\"kvfleet_a\", \"A\");",
                metric("gauge", &[], "A"),
            ),
            (
                "let and = |label| [\"instance\", label];\n\
                 let counter = |n, h, labels| IntCounterVec::new(Opts::new(n, h), labels);\n\
                 counter(\"kvfleet_a\", \"A\", &and(\"reason\"));",
                metric("counter", &["instance", "reason"], "A"),
            ),
            (
                "Histogram::with_opts(HistogramOpts::new(\"kvfleet_a\", \"A\").buckets(b));",
                metric("histogram", &[], "A"),
            ),
        ] {
            assert_eq!(one(body), Some(expected), "{body}");
        }
    }

    #[test]
    fn refuses_names_that_it_cannot_follow() {
        assert!(found("let name = \"kvfleet_a\"; somewhere::other(name, \"A\");").is_err());
        assert!(found("somewhere::new(\"kvfleet_a\", \"A\");").is_err());
        assert!(found("let other = \"kvfleet\"; log(\"Kvfleet_a\");").unwrap().is_empty());
    }
}
