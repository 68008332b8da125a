//! Formats values as Python does, with `json.dumps` and `str`, because chat templates are written
//! for Python.
//!
//! Pure. Not here: the templates (`template.rs`).

use std::fmt::Write;

use minijinja::Value;
use minijinja::value::ValueKind;

/// Deepest nesting; the JSON parser's own limit is lower.
const NESTING_DEPTH: usize = 200;

/// Options of `json.dumps`.
#[derive(Clone, Debug)]
pub(super) struct JsonStyle {
    /// Spaces per level; `None` writes one line.
    pub(super) indent: Option<usize>,
    /// Separator between two items.
    pub(super) item_separator: String,
    /// Separator between a key and its value.
    pub(super) key_separator: String,
    /// Whether characters outside of ASCII are written as `\u` escapes.
    pub(super) ensure_ascii: bool,
    /// Whether keys are sorted.
    pub(super) sort_keys: bool,
}

impl Default for JsonStyle {
    fn default() -> Self {
        JsonStyle {
            indent: None,
            item_separator: ", ".into(),
            key_separator: ": ".into(),
            ensure_ascii: false,
            sort_keys: false,
        }
    }
}

/// `json.dumps`; the error is the text of Python's exception.
pub(super) fn json(value: &Value, style: &JsonStyle) -> Result<String, String> {
    let mut out = String::new();
    write_json(&mut out, value, style, 0)?;
    Ok(out)
}

fn write_json(out: &mut String, value: &Value, style: &JsonStyle, depth: usize) -> Result<(), String> {
    if depth > NESTING_DEPTH {
        return Err("values are nested too deeply".into());
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&repr_number(value)),
        ValueKind::String => write_json_text(out, value.as_str().unwrap_or_default(), style.ensure_ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<_> = value.try_iter().map_err(|error| error.to_string())?.collect();
            write_items(out, style, depth, ['[', ']'], &items, |out, item| {
                write_json(out, item, style, depth + 1)
            })?;
        }
        ValueKind::Map => {
            let mut keys: Vec<_> = value.try_iter().map_err(|error| error.to_string())?.collect();
            if style.sort_keys {
                keys.sort();
            }
            write_items(out, style, depth, ['{', '}'], &keys, |out, key| {
                let name = key.as_str().map_or_else(|| to_str(key), str::to_owned);
                write_json_text(out, &name, style.ensure_ascii);
                out.push_str(&style.key_separator);
                let item = value.get_item(key).map_err(|error| error.to_string())?;
                write_json(out, &item, style, depth + 1)
            })?;
        }
        kind => return Err(format!("Object of type {kind} is not JSON serializable")),
    }
    Ok(())
}

fn write_items(
    out: &mut String,
    style: &JsonStyle,
    depth: usize,
    [open, close]: [char; 2],
    items: &[Value],
    mut write: impl FnMut(&mut String, &Value) -> Result<(), String>,
) -> Result<(), String> {
    let line = |out: &mut String, depth: usize| {
        if let Some(indent) = style.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    };
    // With an indent, Python writes no space at the end of a line.
    let item_end = if style.indent.is_some() {
        style.item_separator.trim_end_matches(' ')
    } else {
        &style.item_separator
    };
    out.push(open);
    for (at, item) in items.iter().enumerate() {
        if at > 0 {
            out.push_str(item_end);
        }
        line(out, depth + 1);
        write(out, item)?;
    }
    if !items.is_empty() {
        line(out, depth);
    }
    out.push(close);
    Ok(())
}

fn write_json_text(out: &mut String, text: &str, ascii: bool) {
    out.push('"');
    for letter in text.chars() {
        match letter {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            letter if letter < ' ' || (ascii && !letter.is_ascii()) => {
                for unit in letter.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            letter => out.push(letter),
        }
    }
    out.push('"');
}

/// `str`, which `{{ value }}` writes.
pub(super) fn to_str(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        _ => repr(value, 0),
    }
}

/// `repr`.
fn repr(value: &Value, depth: usize) -> String {
    match value.kind() {
        ValueKind::None => "None".into(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.into(),
        ValueKind::Number => repr_number(value),
        ValueKind::String => repr_str(value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable if depth < NESTING_DEPTH => {
            let items: Vec<_> =
                value.try_iter().into_iter().flatten().map(|item| repr(&item, depth + 1)).collect();
            format!("[{}]", items.join(", "))
        }
        ValueKind::Map if depth < NESTING_DEPTH => {
            let pair = |key: Value| {
                let item = value.get_item(&key).unwrap_or_default();
                format!("{}: {}", repr(&key, depth + 1), repr(&item, depth + 1))
            };
            let pairs: Vec<_> = value.try_iter().into_iter().flatten().map(pair).collect();
            format!("{{{}}}", pairs.join(", "))
        }
        _ => value.to_string(),
    }
}

fn repr_str(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for letter in text.chars() {
        match letter {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            letter if letter == quote => out.extend(['\\', quote]),
            letter if letter.is_ascii_control() => {
                let _ = write!(out, "\\x{:02x}", u32::from(letter));
            }
            letter => out.push(letter),
        }
    }
    out.push(quote);
    out
}

/// Formats a number as `repr` does: integers exactly, floats with the fewest digits that
/// round-trip.
fn repr_number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(number) = f64::try_from(value.clone()) else { return value.to_string() };
    if !number.is_finite() {
        let name = if number.is_nan() { "NaN" } else { "Infinity" };
        return if number < 0.0 { format!("-{name}") } else { name.into() };
    }
    let scientific = format!("{number:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(exponent) if !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{number:?}"),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn value(json: &str) -> Value {
        serde_json::from_str(json).unwrap()
    }

    /// Expected values were written by Python 3.11.
    #[test]
    fn output_matches_python() {
        let cases = [
            (
                r#"{"b":1,"a":[true,null,1.0]}"#,
                r#"{"b": 1, "a": [true, null, 1.0]}"#,
                "{'b': 1, 'a': [True, None, 1.0]}",
            ),
            (
                r#"[1e16,1e-5,0.0001,123456789.25,-0.0]"#,
                "[1e+16, 1e-05, 0.0001, 123456789.25, -0.0]",
                "[1e+16, 1e-05, 0.0001, 123456789.25, -0.0]",
            ),
            (
                r#"{"é\n":"it's <b>","q":"\"'"}"#,
                "{\"é\\n\": \"it's <b>\", \"q\": \"\\\"'\"}",
                r#"{'é\n': "it's <b>", 'q': '"\''}"#,
            ),
            (r#"[]"#, "[]", "[]"),
            (r#"{}"#, "{}", "{}"),
            (r#"18446744073709551615"#, "18446744073709551615", "18446744073709551615"),
        ];
        for (input, dumped, written) in cases {
            let value = value(input);
            assert_eq!(json(&value, &JsonStyle::default()).unwrap(), dumped);
            assert_eq!(to_str(&value), written);
        }
        assert_eq!(to_str(&value("\"as it is\"")), "as it is");
        let style =
            JsonStyle { indent: Some(2), sort_keys: true, ensure_ascii: true, ..JsonStyle::default() };
        let dumped = json(&value(r#"{"b":[1,{}],"a":"é😀"}"#), &style).unwrap();
        assert_eq!(dumped, "{\n  \"a\": \"\\u00e9\\ud83d\\ude00\",\n  \"b\": [\n    1,\n    {}\n  ]\n}");
    }
}
