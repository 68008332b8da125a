//! Prepares a conversation as vLLM passes it to a chat template.
//!
//! It joins the parts of a message's content unless the template iterates them itself. It parses
//! the arguments of tool calls, and removes keys that vLLM does not pass on. Pure. Not here: the
//! template (`template.rs`).

use std::borrow::Cow;
use std::fmt::{self, Write};
use std::sync::Arc;

use minijinja::Value;
use minijinja::value::{Enumerator, Object, ObjectExt, ValueKind};

use super::PromptError;
use super::python::{self, JsonError, JsonStyle};

/// Form of a message's content that a template expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContentFormat {
    /// One string.
    Text,
    /// A list of parts.
    Parts,
}

/// Most entries that are searched linearly. Longer maps use a hash map, so that a hostile request
/// cannot make lookups slow.
const LINEAR_SEARCH_MAX: usize = 16;

/// A key and its value.
pub(super) type Pair = (Cow<'static, str>, Value);

/// A map that keeps the order of its entries. Requests have many small maps with known keys, where
/// building a hash map costs more than linear search.
#[derive(Debug)]
pub(super) struct OrderedMap(pub(super) Vec<Pair>);

impl OrderedMap {
    pub(super) fn into_value(self) -> Value {
        if self.0.len() <= LINEAR_SEARCH_MAX { Value::from_object(self) } else { Value::from_pairs(self.0) }
    }
}

impl Object for OrderedMap {
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

/// Messages for the template; `None` if one has content other than text.
pub(super) fn prepare(messages: &[Value], content: ContentFormat) -> Result<Option<Vec<Value>>, PromptError> {
    let mut all = Vec::with_capacity(messages.len());
    for (at, message) in messages.iter().enumerate() {
        let shape = |problem: &str| PromptError::Shape(format!("messages[{at}] {problem}"));
        if message.kind() != ValueKind::Map {
            return Err(shape("is not an object"));
        }
        let role = get(message, "role");
        if role.as_str().is_none() {
            return Err(shape("has no role"));
        }
        let Some(text) = content_of(&get(message, "content"), content).map_err(shape)? else {
            return Ok(None);
        };
        all.push(OrderedMap(fields(message, &role, text).map_err(shape)?).into_value());
    }
    Ok(Some(all))
}

fn get(value: &Value, key: &str) -> Value {
    value.get_attr(key).unwrap_or_default()
}

fn is_present(value: &Value) -> bool {
    !value.is_undefined() && !value.is_none()
}

fn fields(message: &Value, role: &Value, text: Value) -> Result<Vec<Pair>, &'static str> {
    let mut fields: Vec<Pair> = vec![("role".into(), role.clone()), ("content".into(), text)];
    let mut take = |key: &'static str| {
        let value = get(message, key);
        if is_present(&value) {
            fields.push((key.into(), value));
        }
    };
    match role.as_str().unwrap_or_default() {
        "assistant" => {
            ["reasoning", "reasoning_content"].into_iter().for_each(&mut take);
            // Older templates use this name.
            let reasoning = get(message, "reasoning");
            if is_present(&reasoning) {
                fields.retain(|(key, _)| key != "reasoning_content");
                fields.push(("reasoning_content".into(), reasoning));
            }
            let calls = get(message, "tool_calls");
            if is_present(&calls) {
                let calls = calls.try_iter().map_err(|_| "has tool_calls that are not a list")?;
                let calls = calls.map(|call| with_parsed_arguments(&call)).collect::<Result<Vec<_>, _>>()?;
                // Templates test for tool calls by the presence of the key.
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

/// Content in the form that the template expects; `None` if it is more than text.
fn content_of(value: &Value, content: ContentFormat) -> Result<Option<Value>, &'static str> {
    let mut texts = match value.kind() {
        ValueKind::Undefined | ValueKind::None => vec![],
        ValueKind::String => vec![value.clone()],
        ValueKind::Seq => {
            let mut texts = vec![];
            for part in value.try_iter().map_err(|_| "has content that is not a list")? {
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
        ContentFormat::Text if texts.len() == 1 => texts.swap_remove(0),
        ContentFormat::Text => {
            let texts: Vec<_> = texts.iter().filter_map(Value::as_str).collect();
            Value::from(texts.join("\n"))
        }
        ContentFormat::Parts => {
            let part = |text: Value| {
                OrderedMap(vec![("type".into(), Value::from("text")), ("text".into(), text)]).into_value()
            };
            texts.into_iter().map(part).collect()
        }
    }))
}

/// Length of a placeholder for a part that is not text: 256 pseudo-tokens, about the size of an
/// image.
const PLACEHOLDER_BYTES: usize = 1_024;

/// Writes a message as JSON, with a placeholder for each part that is not text; equal parts have
/// equal placeholders.
pub(super) fn write_with_placeholders(out: &mut impl Write, message: &Value) -> Result<(), JsonError> {
    let style = JsonStyle::default();
    let content = get(message, "content");
    if content.kind() != ValueKind::Seq {
        return python::write_json(out, message, &style);
    }
    python::write_items(out, &style, 0, ['{', '}'], message.try_iter()?, |out, key| {
        python::write_key(out, key, &style)?;
        if key.as_str() != Some("content") {
            return python::write_json(out, &message.get_item(key)?, &style);
        }
        python::write_items(out, &style, 0, ['[', ']'], content.try_iter()?, |out, part| {
            match text_of(part) {
                Some(_) => python::write_json(out, part, &style),
                None => Ok(write_placeholder(out, part)?),
            }
        })
    })
}

/// A digest of the part, repeated as a JSON string.
fn write_placeholder(out: &mut impl Write, part: &Value) -> fmt::Result {
    let mut digest = Fnv(0xcbf2_9ce4_8422_2325);
    // A part that is no JSON has the digest of what could be written.
    let _ = python::write_json(&mut digest, part, &JsonStyle::default());
    let number = format!("{:016x}", digest.0);
    out.write_char('"')?;
    for _ in 0..PLACEHOLDER_BYTES / number.len() {
        out.write_str(&number)?;
    }
    out.write_char('"')
}

/// FNV-1a of the text written to it.
struct Fnv(u64);

impl Write for Fnv {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.bytes().for_each(|byte| self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        Ok(())
    }
}

/// The text of a part; `None` if it is not text.
fn text_of(part: &Value) -> Option<Value> {
    if part.as_str().is_some() {
        return Some(part.clone());
    }
    let kind = get(part, "type");
    let text = get(part, "text");
    (kind.as_str() == Some("text") && text.as_str().is_some()).then_some(text)
}

/// A tool call with its arguments parsed from JSON.
fn with_parsed_arguments(call: &Value) -> Result<Value, &'static str> {
    let function = get(call, "function");
    if function.kind() != ValueKind::Map {
        return Ok(call.clone());
    }
    let arguments = get(&function, "arguments");
    let arguments = match arguments.as_str() {
        Some("") => OrderedMap(vec![]).into_value(),
        Some(json) => {
            serde_json::from_str(json).map_err(|_| "has a tool call with arguments that are not JSON")?
        }
        None if !is_present(&arguments) => OrderedMap(vec![]).into_value(),
        None => arguments,
    };
    Ok(with_entry(call, "function", with_entry(&function, "arguments", arguments)))
}

/// Copy of a map with `value` for `key`.
fn with_entry(map: &Value, key: &str, value: Value) -> Value {
    let keys = map.try_iter().into_iter().flatten();
    let pair = |name: String| -> Pair { (name.clone().into(), get(map, &name)) };
    let mut pairs: Vec<_> = keys.map(|name| pair(name.to_string())).collect();
    match pairs.iter_mut().find(|(name, _)| name == key) {
        Some(pair) => pair.1 = value,
        None => pairs.push((key.to_owned().into(), value)),
    }
    OrderedMap(pairs).into_value()
}

/// Tools as vLLM serialises them: known keys first in fixed order, and `None` for absent ones.
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
            ((*key).into(), if is_present(&found) { found } else { Value::from(()) })
        };
        let mut pairs: Vec<_> = first.iter().map(or_none).collect();
        let rest = value.try_iter().into_iter().flatten().map(|key| key.to_string());
        let rest: Vec<_> = rest.filter(|key| !first.contains(&key.as_str())).collect();
        pairs.extend(rest.into_iter().map(|key| (key.clone().into(), get(value, &key))));
        OrderedMap(pairs).into_value()
    };
    let function = ordered(&function, &["name", "description", "parameters"]);
    let tool = with_entry(&ordered(tool, &["type", "function"]), "function", function);
    if is_present(&get(&tool, "type")) { tool } else { with_entry(&tool, "type", Value::from("function")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordered_map_behaves_like_a_hash_map() {
        let of = |count: usize| {
            let pairs: Vec<Pair> = (0..count).map(|at| (format!("k{at}").into(), Value::from(at))).collect();
            (Value::from_pairs(pairs.clone()), OrderedMap(pairs).into_value())
        };
        for count in [0, 1, LINEAR_SEARCH_MAX, LINEAR_SEARCH_MAX + 1] {
            let (long, ours) = of(count);
            assert_eq!((ours.kind(), ours.len(), ours.is_true()), (long.kind(), long.len(), long.is_true()));
            assert_eq!((ours.to_string(), &ours), (long.to_string(), &long), "map of {count} keys");
            let json = |map| {
                let mut out = String::new();
                python::write_json(&mut out, map, &JsonStyle::default()).map(|()| out)
            };
            assert_eq!(json(&ours), json(&long), "same order");
            for key in ["k0", "k15", "k16", "other"] {
                assert_eq!(ours.get_attr(key).ok(), long.get_attr(key).ok(), "{key} of {count}");
            }
            assert_eq!(ours.get_item(&Value::from(0)).ok(), long.get_item(&Value::from(0)).ok());
        }
    }
}
