//! Chat templates: a conversation as the text that engines make of it.
//!
//! Templates are Jinja for Python; what they take from there is here: `tojson` without HTML in mind, `raise_exception`, `strftime_now`, methods of strings and maps, and values
//! written as Python writes them. Not here: what a template is given of a message (`messages.rs`).

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value};
use serde::Deserialize;

use super::Unreadable;
use super::messages::{self, Content, Pair, Pairs};
use super::python::{self, JsonStyle};

/// Names of special tokens that templates are given.
const SPECIAL: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Where templates lie beside a tokenizer, in the order in which they are taken.
const BESIDE: [&str; 3] = ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"];

/// The chat template of one model.
#[derive(Debug)]
pub(super) struct Template {
    environment: Environment<'static>,
    content: Content,
    special: Vec<Pair>,
}

/// What a conversation is rendered with.
#[derive(Debug, Default)]
pub(super) struct Conversation<'a> {
    pub(super) messages: &'a [Value],
    pub(super) tools: Option<&'a [Value]>,
    pub(super) documents: Option<&'a Value>,
    pub(super) reasoning_effort: Option<&'a Value>,
    /// `chat_template_kwargs`: what the request says beside them counts more.
    pub(super) more: Option<&'a Value>,
    pub(super) asks_for_answer: bool,
    pub(super) continues: bool,
}

/// A `tokenizer_config.json`, as far as templates need it.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Config {
    chat_template: Option<Templates>,
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<Named>),
}

#[derive(Debug, Deserialize)]
struct Named {
    name: String,
    template: String,
}

impl Template {
    /// Reads the template that is configured, or the one beside the tokenizer; nothing where neither is there. The error is a line for a person.
    pub(super) fn load(configured: &Path, tokenizer: &Path) -> Result<Option<Template>, String> {
        let folder = tokenizer.parent().unwrap_or(Path::new("."));
        let special = special(&folder.join("tokenizer_config.json"))?;
        let places: Vec<PathBuf> = match configured.as_os_str().is_empty() {
            true => BESIDE.iter().map(|name| folder.join(name)).filter(|path| path.exists()).collect(),
            false => vec![configured.to_owned()],
        };
        for path in places {
            let text = read(&path)?;
            let is_json = path.extension().is_some_and(|extension| extension == "json");
            let sources = match is_json {
                true => config(&path, &text)?.chat_template,
                false => Some(Templates::One(text)),
            };
            if let Some(sources) = sources {
                return Template::new(sources, special)
                    .map(Some)
                    .map_err(|error| format!("{}: {error}", path.display()));
            }
        }
        Ok(None)
    }

    fn new(sources: Templates, special: Vec<Pair>) -> Result<Template, String> {
        let sources = match sources {
            Templates::One(template) => vec![Named { name: "default".into(), template }],
            Templates::Named(all) => all,
        };
        let mut environment = environment()?;
        let mut content = Content::Text;
        for Named { name, template } in sources {
            if goes_through_parts(&template) {
                content = Content::Parts;
            }
            let template = without_generation(&template);
            let added = environment.add_template_owned(name, template);
            added.map_err(|error| format!("the chat template is no Jinja that we know: {error:#}"))?;
        }
        Ok(Template { environment, content, special })
    }

    /// The text of a conversation; nothing where it has more than text.
    pub(super) fn render(
        &self,
        conversation: &Conversation<'_>,
        now: SystemTime,
    ) -> Result<Option<String>, Unreadable> {
        let Some(messages) = messages::prepared(conversation.messages, self.content)? else {
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
        let template = named.map_err(|error| refused(&error))?;
        let context = self.context(conversation, messages, now);
        let text = template.render(Pairs(context).value()).map_err(|error| refused(&error))?;
        match (conversation.continues, last) {
            (true, Some(last)) => continued(&text, &last).map(Some),
            _ => Ok(Some(text)),
        }
    }

    fn context(&self, conversation: &Conversation<'_>, messages: Vec<Value>, now: SystemTime) -> Vec<Pair> {
        let none = || Value::from(());
        let moment = Value::from_function(move |format: &str| strftime(now, format));
        let ours: [Pair; 2] = [("documents".into(), none()), ("strftime_now".into(), moment)];
        let mut context: Vec<Pair> = self.special.iter().cloned().chain(ours).collect();
        if let Some(more) = conversation.more.filter(|more| more.kind() == ValueKind::Map) {
            // There may be many, each once: none is looked for among the others.
            let said = |name: &str| more.get_attr(name).is_ok_and(|value| !value.is_undefined());
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
        set("add_generation_prompt", Value::from(conversation.asks_for_answer));
        // It is about what becomes of the text, and no template sees it.
        context.retain(|(name, _)| name != "continue_final_message");
        context
    }
}

fn refused(error: &Error) -> Unreadable {
    let text = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    Unreadable::Template(text)
}

/// The text until the end of the last message.
fn continued(text: &str, last: &Value) -> Result<String, Unreadable> {
    let content = last.get_attr("content").unwrap_or_default();
    let content = content.as_str().unwrap_or_default();
    let kept = content.trim();
    let Some(at) = text.rfind(kept) else {
        return Err(Unreadable::Template(
            "it does not keep the last message, which is to be continued".into(),
        ));
    };
    let whole = content.trim_start();
    let end = if text[at..].starts_with(whole) { at + whole.len() } else { at + kept.len() };
    Ok(text[..end].to_owned())
}

fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| {
        format!("cannot read {}: {error}; name a chat template that this process may read", path.display())
    })
}

fn config(path: &Path, text: &str) -> Result<Config, String> {
    serde_json::from_str(text)
        .map_err(|error| format!("{} is no JSON with a chat template: {error}", path.display()))
}

/// The special tokens that a `tokenizer_config.json` names, as text or as an object with it.
fn special(path: &Path) -> Result<Vec<Pair>, String> {
    if !path.exists() {
        return Ok(vec![]);
    }
    let rest = config(path, &read(path)?)?.rest;
    let token = |name: &&'static str| {
        let value = rest.get(*name)?;
        let text = if value.as_str().is_some() { value.clone() } else { value.get_attr("content").ok()? };
        text.as_str().is_some().then(|| (Cow::Borrowed(*name), text.clone()))
    };
    Ok(SPECIAL.iter().filter_map(token).collect())
}

fn environment() -> Result<Environment<'static>, String> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.map_err(|error| error.to_string())?);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_formatter(|out: &mut Output<'_>, _: &mut State<'_, '_>, value: &Value| {
        let written = match value.as_str() {
            Some(text) => out.write_str(text),
            None => out.write_str(&python::text(value)),
        };
        written.map_err(Error::from)
    });
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", |value: Value| python::text(&value));
    environment.add_function("raise_exception", |text: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, text))
    });
    Ok(environment)
}

#[allow(clippy::needless_pass_by_value, reason = "filters are given what was named by value")]
fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let mut style = JsonStyle {
        indent: options.get("indent")?,
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sorted: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ..JsonStyle::default()
    };
    if let Some(separators) = options.get::<Option<Vec<String>>>("separators")? {
        let [item, key] = <[String; 2]>::try_from(separators)
            .map_err(|_| Error::new(ErrorKind::InvalidOperation, "separators are two texts"))?;
        (style.item, style.key) = (item, key);
    }
    options.assert_all_used()?;
    let text = python::json(value, &style);
    text.map(Value::from).map_err(|error| Error::new(ErrorKind::InvalidOperation, error))
}

/// `{% generation %}` marks what a model said, for training; it writes nothing.
fn without_generation(template: &str) -> String {
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

/// Whether a template goes through the parts of a message's content.
///
/// vLLM asks the syntax tree whether a loop runs over a message's content or over a name that was given it; this asks the words of the tags.
fn goes_through_parts(template: &str) -> bool {
    let tags = template.split("{%").skip(1).filter_map(|tag| tag.split("%}").next());
    tags.map(|tag| tag.trim_matches(['-', '+']).trim()).filter(|tag| tag.starts_with("for ")).any(|tag| {
        let Some((_, over)) = tag.split_once(" in ") else { return false };
        let over = over.split_whitespace().next().unwrap_or_default().split('|').next().unwrap_or_default();
        over == "content"
            || [".content", "['content']", "[\"content\"]"].iter().any(|end| over.ends_with(end))
    })
}

/// `datetime.strftime` of a moment, in UTC.
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

/// Year, month and day, and the number of the day in its year, of a day since 1970.
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
    use std::time::Duration;

    use super::*;

    /// As Python 3.11 wrote them, in UTC.
    #[test]
    fn moments_are_written_as_python_writes_them() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        assert_eq!(
            strftime(at(1_709_210_096), "%d %b %Y, %A %H:%M:%S %j"),
            "29 Feb 2024, Thursday 12:34:56 060"
        );
        assert_eq!(strftime(at(0), "%B %-d, %I %p %% %a %y"), "January 1, 12 AM % Thu 70");
        assert_eq!(strftime(at(1_735_689_599), "%F %T %e"), "2024-12-31 23:59:59 31");
    }

    #[test]
    fn templates_that_go_through_parts_are_told() {
        for yes in [
            "{% for part in message['content'] %}",
            "{%- for part in message.content -%}",
            "{% for c in content %}",
            "{% for c in message[\"content\"] | reverse %}",
        ] {
            assert!(goes_through_parts(yes), "{yes}");
        }
        for no in ["{% for m in messages %}{{ m.content }}", "{{ 'for x in content' }}", "{% if content %}"] {
            assert!(!goes_through_parts(no), "{no}");
        }
    }

    #[test]
    fn marks_for_training_are_left_out() {
        let text = "a{%- generation -%}b{% endgeneration %}c{% if x %}";
        assert_eq!(without_generation(text), "a{%- if true -%}b{% endif %}c{% if x %}");
    }
}
