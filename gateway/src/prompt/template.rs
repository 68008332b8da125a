//! Chat templates: render a conversation into the text that the engine would build.
//!
//! Templates are Jinja for Python. This file adds the functions and filters of that environment:
//! `tojson` without HTML escapes, `raise_exception`, `strftime_now`, methods of Python strings and
//! dicts, and values formatted as in Python. Not here: the preparation of messages (`messages.rs`).

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value};
use serde::Deserialize;

use super::PromptError;
use super::budget::{BoundedText, PromptBudget};
use super::messages::{self, ContentFormat, OrderedMap, Pair};
use super::python::{self, JsonError, JsonStyle};

/// Names of the special tokens that templates can use.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// File names of templates next to a tokenizer, in order of preference.
const TEMPLATE_FILES: [&str; 3] = ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"];

/// Work of one rendering, in units of minijinja: an instruction, or 64 bytes of created data. A
/// template that looks ahead in each message, as that of gpt-oss, takes about a million for 600
/// messages.
const FUEL: u64 = 4_000_000;

/// Names of minijinja's own filters, which ours call after a check. No template can write them.
const JOIN: &str = "\0join";
const REPLACE: &str = "\0replace";

/// Time of one rendering.
const RENDER_TIMEOUT: Duration = Duration::from_secs(2);

/// The chat template of one model.
#[derive(Debug)]
pub(super) struct Template {
    environment: Environment<'static>,
    content_format: ContentFormat,
    special_tokens: Vec<Pair>,
}

thread_local! {
    /// Limits of the rendering on this thread. Macros have variables of their own, so a variable
    /// of the template would not reach them.
    static LIMITS: Cell<RenderLimits> = const { Cell::new(RenderLimits { bytes_left: 0, deadline: None }) };
}

/// Limits of one rendering. [`FUEL`] bounds its instructions and what they create in sum; these
/// bound its output, also into variables, each text that it makes, and its time.
#[derive(Clone, Copy, Debug, Default)]
struct RenderLimits {
    bytes_left: usize,
    deadline: Option<Instant>,
}

impl RenderLimits {
    /// Sets the limits of the next rendering on this thread.
    fn begin(budget: PromptBudget) {
        let deadline = Instant::now().checked_add(RENDER_TIMEOUT);
        LIMITS.set(RenderLimits { bytes_left: budget.text_bytes, deadline });
    }

    /// Refuses to join items if the separators alone are more than the template may write.
    fn check_join(items: &Value, separator: &Value) -> Result<(), Error> {
        let count = items.len().unwrap_or_default();
        Self::check(count.saturating_mul(separator.as_str().map_or(0, str::len)))
    }

    /// Refuses to replace text if the new text is longer than the output may be.
    fn check_replace(value: &Value, from: &Value, to: &Value) -> Result<(), Error> {
        let (Some(value), Some(from), Some(to)) = (value.as_str(), from.as_str(), to.as_str()) else {
            return Ok(());
        };
        Self::check(value.matches(from).count().saturating_mul(to.len()))
    }

    /// Checks the size of a text before it is made.
    fn check(bytes: usize) -> Result<(), Error> {
        if bytes <= LIMITS.get().bytes_left { Ok(()) } else { Err(Error::from(ErrorKind::OutOfFuel)) }
    }

    /// Counts bytes that a template writes.
    fn charge(bytes: usize) -> Result<(), Error> {
        let limits = LIMITS.get();
        let is_in_time = limits.deadline.is_some_and(|deadline| Instant::now() < deadline);
        match limits.bytes_left.checked_sub(bytes).filter(|_| is_in_time) {
            Some(bytes_left) => LIMITS.set(RenderLimits { bytes_left, ..limits }),
            None => return Err(Error::from(ErrorKind::OutOfFuel)),
        }
        Ok(())
    }
}

/// Input of a template.
#[derive(Debug, Default)]
pub(super) struct Conversation<'a> {
    pub(super) messages: &'a [Value],
    pub(super) tools: Option<&'a [Value]>,
    pub(super) documents: Option<&'a Value>,
    pub(super) reasoning_effort: Option<&'a Value>,
    /// `chat_template_kwargs`; the request's own fields take precedence.
    pub(super) kwargs: Option<&'a Value>,
    pub(super) add_generation_prompt: bool,
    pub(super) continue_final_message: bool,
}

/// The fields of a `tokenizer_config.json` that templates need.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Config {
    chat_template: Option<TemplateSources>,
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum TemplateSources {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Debug, Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl Template {
    /// Loads the configured template, or the one next to the tokenizer; `None` if there is neither.
    /// The error is one line for the operator.
    pub(super) fn load(configured: &Path, tokenizer: &Path) -> Result<Option<Template>, String> {
        let folder = tokenizer.parent().unwrap_or(Path::new("."));
        let special = load_special_tokens(&folder.join("tokenizer_config.json"))?;
        let places: Vec<PathBuf> = match configured.as_os_str().is_empty() {
            true => {
                TEMPLATE_FILES.iter().map(|name| folder.join(name)).filter(|path| path.exists()).collect()
            }
            false => vec![configured.to_owned()],
        };
        for path in places {
            let text = read_file(&path)?;
            let is_json = path.extension().is_some_and(|extension| extension == "json");
            let sources = match is_json {
                true => parse_config(&path, &text)?.chat_template,
                false => Some(TemplateSources::One(text)),
            };
            if let Some(sources) = sources {
                return Template::new(sources, special)
                    .map(Some)
                    .map_err(|error| format!("{}: {error}", path.display()));
            }
        }
        Ok(None)
    }

    fn new(sources: TemplateSources, special: Vec<Pair>) -> Result<Template, String> {
        let sources = match sources {
            TemplateSources::One(template) => vec![NamedTemplate { name: "default".into(), template }],
            TemplateSources::Named(all) => all,
        };
        let mut environment = environment()?;
        let mut content = ContentFormat::Text;
        for NamedTemplate { name, template } in sources {
            if iterates_content_parts(&template) {
                content = ContentFormat::Parts;
            }
            let template = strip_generation_tags(&template);
            let added = environment.add_template_owned(name, template);
            added.map_err(|error| format!("the chat template is not valid Jinja: {error:#}"))?;
        }
        Ok(Template { environment, content_format: content, special_tokens: special })
    }

    /// Renders a conversation; `None` if it has content other than text.
    pub(super) fn render(
        &self,
        conversation: &Conversation<'_>,
        budget: PromptBudget,
        now: SystemTime,
    ) -> Result<Option<String>, PromptError> {
        let Some(messages) = messages::prepare(conversation.messages, self.content_format)? else {
            return Ok(None);
        };
        let last = messages.last().cloned();
        let named = match conversation.tools {
            Some(_) => self
                .environment
                .get_template("tool_use")
                .or_else(|_| self.environment.get_template("default")),
            None => self.environment.get_template("default"),
        };
        let template = named.map_err(|error| template_error(&error, budget))?;
        let context = self.context(conversation, messages, now)?;
        RenderLimits::begin(budget);
        let text = template
            .render(OrderedMap(context).into_value())
            .map_err(|error| template_error(&error, budget))?;
        if text.len() > budget.text_bytes {
            return Err(PromptError::TooMuchText { limit: budget.text_bytes });
        }
        match (conversation.continue_final_message, last) {
            (true, Some(last)) => cut_after_last_message(&text, &last).map(Some),
            _ => Ok(Some(text)),
        }
    }

    fn context(
        &self,
        conversation: &Conversation<'_>,
        messages: Vec<Value>,
        now: SystemTime,
    ) -> Result<Vec<Pair>, PromptError> {
        let none = || Value::from(());
        let moment = Value::from_function(move |format: &str| strftime(now, format));
        let ours: [Pair; 2] = [("documents".into(), none()), ("strftime_now".into(), moment)];
        let mut context: Vec<Pair> = self.special_tokens.iter().cloned().chain(ours).collect();
        if let Some(more) = conversation.kwargs.filter(|more| more.kind() == ValueKind::Map) {
            // A caller may send very many kwargs; they are unique, so none is searched for among
            // the others.
            let said = |name: &str| more.get_attr(name).is_ok_and(|value| !value.is_undefined());
            if let Some(name) = SPECIAL_TOKENS.iter().find(|name| said(name)) {
                return Err(PromptError::Shape(format!(
                    "chat_template_kwargs sets {name}, which belongs to the model; remove it"
                )));
            }
            context.retain(|(name, _)| !said(name));
            let keys = more.try_iter().into_iter().flatten();
            context.extend(keys.map(|key| (key.to_string().into(), more.get_item(&key).unwrap_or_default())));
        }
        let mut set = |name: &'static str, value: Value| {
            context.retain(|(known, _)| *known != name);
            context.push((name.into(), value));
        };
        let said =
            [("documents", conversation.documents), ("reasoning_effort", conversation.reasoning_effort)];
        for (name, value) in said {
            if let Some(value) = value.filter(|value| !value.is_none()) {
                set(name, value.clone());
            }
        }
        set("messages", messages.into_iter().collect());
        set("tools", conversation.tools.map_or_else(none, messages::tools));
        set("add_generation_prompt", Value::from(conversation.add_generation_prompt));
        // It affects the rendered text only afterwards, and vLLM does not pass it to templates.
        context.retain(|(name, _)| name != "continue_final_message");
        Ok(context)
    }
}

fn template_error(error: &Error, budget: PromptBudget) -> PromptError {
    // An error within a macro or an included template is the source of another.
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if error.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel) {
            return PromptError::TooMuchText { limit: budget.text_bytes };
        }
        cause = error.source();
    }
    let text = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    PromptError::Template(text)
}

/// Cuts the text at the end of the last message, for the model to continue it.
fn cut_after_last_message(text: &str, last: &Value) -> Result<String, PromptError> {
    let content = last.get_attr("content").unwrap_or_default();
    let content = content.as_str().unwrap_or_default();
    let kept = content.trim();
    let Some(at) = text.rfind(kept) else {
        return Err(PromptError::Template(
            "it does not keep the last message, which is to be continued".into(),
        ));
    };
    let whole = content.trim_start();
    let end = if text[at..].starts_with(whole) { at + whole.len() } else { at + kept.len() };
    Ok(text[..end].to_owned())
}

fn read_file(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| {
        format!("cannot read {}: {error}; name a chat template that this process may read", path.display())
    })
}

fn parse_config(path: &Path, text: &str) -> Result<Config, String> {
    serde_json::from_str(text)
        .map_err(|error| format!("{} is not JSON with a chat template: {error}", path.display()))
}

/// The special tokens of a `tokenizer_config.json`, each given as text or as an object with
/// `content`.
fn load_special_tokens(path: &Path) -> Result<Vec<Pair>, String> {
    if !path.exists() {
        return Ok(vec![]);
    }
    let rest = parse_config(path, &read_file(path)?)?.rest;
    let token = |name: &&'static str| {
        let value = rest.get(*name)?;
        let text = if value.as_str().is_some() { value.clone() } else { value.get_attr("content").ok()? };
        text.as_str().is_some().then(|| (Cow::Borrowed(*name), text.clone()))
    };
    Ok(SPECIAL_TOKENS.iter().filter_map(token).collect())
}

fn environment() -> Result<Environment<'static>, String> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.map_err(|error| error.to_string())?);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_formatter(|out: &mut Output<'_>, _: &mut State<'_, '_>, value: &Value| {
        let text = match value.as_str() {
            Some(text) => Cow::Borrowed(text),
            None => Cow::Owned(python::to_str(value)),
        };
        RenderLimits::charge(text.len())?;
        out.write_str(&text).map_err(Error::from)
    });
    environment.set_unknown_method_callback(|state, value, method, args| {
        match (method, args) {
            ("join", [items, ..]) => RenderLimits::check_join(items, value)?,
            ("replace", [from, to, ..]) => RenderLimits::check_replace(value, from, to)?,
            _ => {}
        }
        minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
    });
    environment.add_filter(JOIN, minijinja::filters::join);
    environment.add_filter("join", |state: &mut State<'_, '_>, items: Value, args: Rest<Value>| {
        // The separator is an argument, or a value of the map of named arguments.
        for argument in args.iter() {
            RenderLimits::check_join(&items, argument)?;
            for name in
                argument.try_iter().ok().filter(|_| argument.kind() == ValueKind::Map).into_iter().flatten()
            {
                RenderLimits::check_join(&items, &argument.get_item(&name)?)?;
            }
        }
        state.apply_filter(JOIN, &[&[items][..], &args[..]].concat())
    });
    environment.add_filter(REPLACE, minijinja::filters::replace);
    environment.add_filter("replace", |state: &mut State<'_, '_>, value: Value, args: Rest<Value>| {
        if let [from, to, ..] = &args[..] {
            RenderLimits::check_replace(&value, from, to)?;
        }
        state.apply_filter(REPLACE, &[&[value][..], &args[..]].concat())
    });
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", |value: Value| python::to_str(&value));
    environment.add_function("raise_exception", |text: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, text))
    });
    Ok(environment)
}

#[allow(clippy::needless_pass_by_value, reason = "minijinja passes filter arguments by value")]
fn tojson(state: &State<'_, '_>, value: &Value, options: Kwargs) -> Result<Value, Error> {
    let mut style = JsonStyle {
        indent: options.get("indent")?,
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ..JsonStyle::default()
    };
    if let Some(separators) = options.get::<Option<Vec<String>>>("separators")? {
        let [item, key] = <[String; 2]>::try_from(separators)
            .map_err(|_| Error::new(ErrorKind::InvalidOperation, "`separators` must be two strings"))?;
        (style.item_separator, style.key_separator) = (item, key);
    }
    options.assert_all_used()?;
    let mut text = BoundedText::new(LIMITS.get().bytes_left);
    python::write_json(&mut text, value, &style).map_err(|error| match error {
        JsonError::TooLong => Error::from(ErrorKind::OutOfFuel),
        JsonError::Python(_) => Error::new(ErrorKind::InvalidOperation, error.to_string()),
    })?;
    // The formatter counts its output; this counts its time.
    let text = text.into_string();
    state.consume_fuel(text.len() as u64 / 4)?;
    RenderLimits::charge(0)?;
    Ok(Value::from(text))
}

/// Replaces `{% generation %}`, which marks assistant text for training and writes no output, by a
/// plain block.
fn strip_generation_tags(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        let word = tag[2..end].trim_matches(['-', '+']).trim();
        match word {
            "generation" => out.push_str(&tag.replace(word, "if true")),
            "endgeneration" => out.push_str(&tag.replace(word, "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Whether a template iterates the parts of a message's content.
///
/// vLLM searches the syntax tree for a loop over the content; this function only searches the text
/// of the tags.
fn iterates_content_parts(template: &str) -> bool {
    let tags = template.split("{%").skip(1).filter_map(|tag| tag.split("%}").next());
    tags.map(|tag| tag.trim_matches(['-', '+']).trim()).filter(|tag| tag.starts_with("for ")).any(|tag| {
        let Some((_, over)) = tag.split_once(" in ") else { return false };
        let over = over.split_whitespace().next().unwrap_or_default().split('|').next().unwrap_or_default();
        over == "content"
            || [".content", "['content']", "[\"content\"]"].iter().any(|end| over.ends_with(end))
    })
}

/// Formats a time as `datetime.strftime` does, in UTC.
fn strftime(now: SystemTime, format: &str) -> String {
    let seconds = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day, of_year) = date(days);
    let (hour, minute, second) = (of_day / 3_600, of_day / 60 % 60, of_day % 60);
    let weekday = WEEKDAYS[((days + 3) % 7) as usize];
    let month_name = MONTHS[(month - 1) as usize];
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            out.push(letter);
            continue;
        }
        let mut code = letters.next();
        let is_short = code == Some('-');
        if is_short {
            code = letters.next();
        }
        let two = |number: u64| if is_short { number.to_string() } else { format!("{number:02}") };
        out.push_str(&match code {
            Some('Y') => year.to_string(),
            Some('y') => two(year % 100),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('e') => format!("{day:2}"),
            Some('j') => {
                if is_short {
                    of_year.to_string()
                } else {
                    format!("{of_year:03}")
                }
            }
            Some('H') => two(hour),
            Some('I') => two((hour + 11) % 12 + 1),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.into(),
            Some('A') => weekday.into(),
            Some('a') => weekday[..3].into(),
            Some('B') => month_name.into(),
            Some('b') => month_name[..3].into(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".into(),
            Some('%') => "%".into(),
            Some(other) => format!("%{other}"),
            None => "%".into(),
        });
    }
    out
}

const WEEKDAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Year, month, day of the month and day of the year, for a number of days since 1970.
fn date(mut days: u64) -> (u64, u64, u64, u64) {
    let is_leap =
        |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let of_year = days + 1;
    let mut month = 1;
    for length in [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1, of_year)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values were written by Python 3.11, in UTC.
    #[test]
    fn strftime_matches_python() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        assert_eq!(
            strftime(at(1_709_210_096), "%d %b %Y, %A %H:%M:%S %j"),
            "29 Feb 2024, Thursday 12:34:56 060"
        );
        assert_eq!(strftime(at(0), "%B %-d, %I %p %% %a %y"), "January 1, 12 AM % Thu 70");
        assert_eq!(strftime(at(1_735_689_599), "%F %T %e"), "2024-12-31 23:59:59 31");
    }

    #[test]
    fn detects_templates_that_iterate_content_parts() {
        for yes in [
            "{% for part in message['content'] %}",
            "{%- for part in message.content -%}",
            "{% for c in content %}",
            "{% for c in message[\"content\"] | reverse %}",
        ] {
            assert!(iterates_content_parts(yes), "{yes}");
        }
        for no in ["{% for m in messages %}{{ m.content }}", "{{ 'for x in content' }}", "{% if content %}"] {
            assert!(!iterates_content_parts(no), "{no}");
        }
    }

    #[test]
    fn strips_generation_tags() {
        let text = "a{%- generation -%}b{% endgeneration %}c{% if x %}";
        assert_eq!(strip_generation_tags(text), "a{%- if true -%}b{% endif %}c{% if x %}");
    }
}
