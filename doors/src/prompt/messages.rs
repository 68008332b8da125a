//! A conversation as vLLM hands it to a chat template.
//!
//! It joins the parts of a message's content unless the template goes through them itself, reads the arguments of tool calls, and leaves out keys that
//! templates are not given. Pure. Not here: the template (`template.rs`).

use std::borrow::Cow;
use std::sync::Arc;

use minijinja::Value;
use minijinja::value::{Enumerator, Object, ObjectExt, ValueKind};

use super::Unreadable;
use super::python::{self, JsonStyle};

/// What a template does with the content of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// It takes it as text.
    Text,
    /// It goes through its parts.
    Parts,
}

/// Pairs that are looked through for a key; more of them are put where each is found at once, so that nobody's long map takes long.
const FEW_PAIRS: usize = 16;

/// A key, and what it stands for.
pub(super) type Pair = (Cow<'static, str>, Value);

/// A map of values that keeps its order. Each request has several, of a few keys that are known: to write them down costs less than to hash them.
#[derive(Debug)]
pub(super) struct Pairs(pub(super) Vec<Pair>);

impl Pairs {
    pub(super) fn value(self) -> Value {
        if self.0.len() <= FEW_PAIRS { Value::from_object(self) } else { Value::from_pairs(self.0) }
    }
}

impl Object for Pairs {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.0.iter().find(|(known, _)| known == key).map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let pair = |(key, value): &Pair| (Value::from(key.as_ref()), value.clone());
        self.mapped_rev_key_value_enumerator(move |pairs| Box::new(pairs.0.iter().map(pair)))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.0.len())
    }
}

/// Messages for the template; nothing where one has what is not text.
pub(super) fn prepared(messages: &[Value], content: Content) -> Result<Option<Vec<Value>>, Unreadable> {
    let mut all = Vec::with_capacity(messages.len());
    for (at, message) in messages.iter().enumerate() {
        let shape = |problem: &str| Unreadable::Shape(format!("messages[{at}] {problem}"));
        if message.kind() != ValueKind::Map {
            return Err(shape("is no object"));
        }
        let role = get(message, "role");
        if role.as_str().is_none() {
            return Err(shape("has no role"));
        }
        let Some(text) = content_of(&get(message, "content"), content).map_err(shape)? else {
            return Ok(None);
        };
        all.push(Pairs(fields(message, &role, text).map_err(shape)?).value());
    }
    Ok(Some(all))
}

fn get(value: &Value, key: &str) -> Value {
    value.get_attr(key).unwrap_or_default()
}

fn is_there(value: &Value) -> bool {
    !value.is_undefined() && !value.is_none()
}

fn fields(message: &Value, role: &Value, text: Value) -> Result<Vec<Pair>, &'static str> {
    let mut fields: Vec<Pair> = vec![("role".into(), role.clone()), ("content".into(), text)];
    let mut take = |key: &'static str| {
        let value = get(message, key);
        if is_there(&value) {
            fields.push((key.into(), value));
        }
    };
    match role.as_str().unwrap_or_default() {
        "assistant" => {
            ["reasoning", "reasoning_content"].into_iter().for_each(&mut take);
            // Templates know it by its older name.
            let reasoning = get(message, "reasoning");
            if is_there(&reasoning) {
                fields.retain(|(key, _)| key != "reasoning_content");
                fields.push(("reasoning_content".into(), reasoning));
            }
            let calls = get(message, "tool_calls");
            if is_there(&calls) {
                let calls = calls.try_iter().map_err(|_| "has tool_calls that are no list")?;
                let calls = calls.map(|call| with_arguments(&call)).collect::<Result<Vec<_>, _>>()?;
                // Templates ask whether there are any by whether the key is there.
                if !calls.is_empty() {
                    fields.push(("tool_calls".into(), calls.into_iter().collect()));
                }
            }
        }
        "tool" => take("tool_call_id"),
        _ => {}
    }
    let name = get(message, "name");
    if name.as_str().is_some() {
        fields.push(("name".into(), name));
    }
    Ok(fields)
}

/// Content as the template takes it; nothing where it is more than text.
fn content_of(value: &Value, content: Content) -> Result<Option<Value>, &'static str> {
    let mut texts = match value.kind() {
        ValueKind::Undefined | ValueKind::None => vec![],
        ValueKind::String => vec![value.clone()],
        ValueKind::Seq => {
            let mut texts = vec![];
            for part in value.try_iter().map_err(|_| "has content that is no list")? {
                match text_of(&part) {
                    Some(text) => texts.push(text),
                    None => return Ok(None),
                }
            }
            texts
        }
        _ => return Err("has content that is neither text nor a list of parts"),
    };
    Ok(Some(match content {
        Content::Text if texts.len() == 1 => texts.swap_remove(0),
        Content::Text => {
            let texts: Vec<_> = texts.iter().filter_map(Value::as_str).collect();
            Value::from(texts.join("\n"))
        }
        Content::Parts => {
            let part = |text: Value| {
                Pairs(vec![("type".into(), Value::from("text")), ("text".into(), text)]).value()
            };
            texts.into_iter().map(part).collect()
        }
    }))
}

/// Letters that stand for a part that is no text: what read as text counts as 256 tokens, about what an image has.
const MARK_BYTES: usize = 1_024;

/// A message with a mark in place of each part that is no text: equal parts have equal ones.
pub(super) fn with_marks(message: &Value) -> Value {
    let content = get(message, "content");
    if content.kind() != ValueKind::Seq {
        return message.clone();
    }
    let marked = |part: Value| if text_of(&part).is_some() { part } else { Value::from(mark(&part)) };
    with(message, "content", content.try_iter().into_iter().flatten().map(marked).collect())
}

/// A number made of what a part says (FNV-1a), again and again.
fn mark(part: &Value) -> String {
    let text = python::json(part, &JsonStyle::default()).unwrap_or_default();
    let mut number = 0xcbf2_9ce4_8422_2325_u64;
    text.bytes().for_each(|byte| number = (number ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{number:016x}").repeat(MARK_BYTES / 16)
}

/// The text of a part.
fn text_of(part: &Value) -> Option<Value> {
    if part.as_str().is_some() {
        return Some(part.clone());
    }
    let kind = get(part, "type");
    let text = get(part, "text");
    (kind.as_str() == Some("text") && text.as_str().is_some()).then_some(text)
}

/// A tool call whose arguments are what their JSON says.
fn with_arguments(call: &Value) -> Result<Value, &'static str> {
    let function = get(call, "function");
    if function.kind() != ValueKind::Map {
        return Ok(call.clone());
    }
    let arguments = get(&function, "arguments");
    let arguments = match arguments.as_str() {
        Some("") => Pairs(vec![]).value(),
        Some(json) => {
            serde_json::from_str(json).map_err(|_| "has a tool call whose arguments are no JSON")?
        }
        None if !is_there(&arguments) => Pairs(vec![]).value(),
        None => arguments,
    };
    Ok(with(call, "function", with(&function, "arguments", arguments)))
}

/// A map with another value for one key.
fn with(map: &Value, key: &str, value: Value) -> Value {
    let keys = map.try_iter().into_iter().flatten();
    let pair = |name: String| -> Pair { (name.clone().into(), get(map, &name)) };
    let mut pairs: Vec<_> = keys.map(|name| pair(name.to_string())).collect();
    match pairs.iter_mut().find(|(name, _)| name == key) {
        Some(pair) => pair.1 = value,
        None => pairs.push((key.to_owned().into(), value)),
    }
    Pairs(pairs).value()
}

/// Tools as vLLM's own types write them again: every key in its order, and `None` for what was not said.
pub(super) fn tools(tools: &[Value]) -> Value {
    tools.iter().map(tool).collect()
}

fn tool(tool: &Value) -> Value {
    let function = get(tool, "function");
    if function.kind() != ValueKind::Map {
        return tool.clone();
    }
    let ordered = |value: &Value, first: &[&'static str]| {
        let or_none = |key: &&'static str| -> Pair {
            let found = get(value, key);
            ((*key).into(), if is_there(&found) { found } else { Value::from(()) })
        };
        let mut pairs: Vec<_> = first.iter().map(or_none).collect();
        let rest = value.try_iter().into_iter().flatten().map(|key| key.to_string());
        let rest: Vec<_> = rest.filter(|key| !first.contains(&key.as_str())).collect();
        pairs.extend(rest.into_iter().map(|key| (key.clone().into(), get(value, &key))));
        Pairs(pairs).value()
    };
    let function = ordered(&function, &["name", "description", "parameters"]);
    let tool = with(&ordered(tool, &["type", "function"]), "function", function);
    if is_there(&get(&tool, "type")) { tool } else { with(&tool, "type", Value::from("function")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_of_few_keys_is_what_one_of_many_is() {
        let of = |count: usize| {
            let pairs: Vec<Pair> = (0..count).map(|at| (format!("k{at}").into(), Value::from(at))).collect();
            (Value::from_pairs(pairs.clone()), Pairs(pairs).value())
        };
        for count in [0, 1, FEW_PAIRS, FEW_PAIRS + 1] {
            let (long, ours) = of(count);
            assert_eq!((ours.kind(), ours.len(), ours.is_true()), (long.kind(), long.len(), long.is_true()));
            assert_eq!((ours.to_string(), &ours), (long.to_string(), &long), "of {count} keys");
            let json = |map| python::json(map, &JsonStyle::default());
            assert_eq!(json(&ours), json(&long), "in their order");
            for key in ["k0", "k15", "k16", "other"] {
                assert_eq!(ours.get_attr(key).ok(), long.get_attr(key).ok(), "{key} of {count}");
            }
            assert_eq!(ours.get_item(&Value::from(0)).ok(), long.get_item(&Value::from(0)).ok());
        }
    }
}
