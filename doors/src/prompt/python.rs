//! Values as Python writes them: `json.dumps` and `str`, which chat templates are written for.
//!
//! Pure. Not here: the templates (`template.rs`).

use std::fmt::Write;

use minijinja::Value;
use minijinja::value::ValueKind;

/// Values in values; what requests have in them is less, by the JSON reader's own limit.
const NESTING_DEPTH: usize = 200;

/// How `json.dumps` is asked to write.
#[derive(Clone, Debug)]
pub(super) struct JsonStyle {
    /// Spaces of a level; none: all on one line.
    pub(super) indent: Option<usize>,
    /// Between two items.
    pub(super) item: String,
    /// Between a key and its value.
    pub(super) key: String,
    /// Whether what is not ASCII is written as `\u` and digits.
    pub(super) ascii: bool,
    /// Whether keys are in order.
    pub(super) sorted: bool,
}

impl Default for JsonStyle {
    fn default() -> Self {
        JsonStyle { indent: None, item: ", ".into(), key: ": ".into(), ascii: false, sorted: false }
    }
}

/// `json.dumps`; the error is what Python would raise.
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
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => write_json_text(out, value.as_str().unwrap_or_default(), style.ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<_> = value.try_iter().map_err(|error| error.to_string())?.collect();
            enclosed(out, style, depth, ['[', ']'], &items, |out, item| {
                write_json(out, item, style, depth + 1)
            })?;
        }
        ValueKind::Map => {
            let mut keys: Vec<_> = value.try_iter().map_err(|error| error.to_string())?.collect();
            if style.sorted {
                keys.sort();
            }
            enclosed(out, style, depth, ['{', '}'], &keys, |out, key| {
                let name = key.as_str().map_or_else(|| text(key), str::to_owned);
                write_json_text(out, &name, style.ascii);
                out.push_str(&style.key);
                let item = value.get_item(key).map_err(|error| error.to_string())?;
                write_json(out, &item, style, depth + 1)
            })?;
        }
        kind => return Err(format!("Object of type {kind} is not JSON serializable")),
    }
    Ok(())
}

fn enclosed(
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
    // With an indent, Python ends lines without a space.
    let item_end = if style.indent.is_some() { style.item.trim_end_matches(' ') } else { &style.item };
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

/// `str`: what `{{ value }}` writes.
pub(super) fn text(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        _ => shown(value, 0),
    }
}

/// `repr`.
fn shown(value: &Value, depth: usize) -> String {
    match value.kind() {
        ValueKind::None => "None".into(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.into(),
        ValueKind::Number => number(value),
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable if depth < NESTING_DEPTH => {
            let items: Vec<_> =
                value.try_iter().into_iter().flatten().map(|item| shown(&item, depth + 1)).collect();
            format!("[{}]", items.join(", "))
        }
        ValueKind::Map if depth < NESTING_DEPTH => {
            let pair = |key: Value| {
                let item = value.get_item(&key).unwrap_or_default();
                format!("{}: {}", shown(&key, depth + 1), shown(&item, depth + 1))
            };
            let pairs: Vec<_> = value.try_iter().into_iter().flatten().map(pair).collect();
            format!("{{{}}}", pairs.join(", "))
        }
        _ => value.to_string(),
    }
}

fn quoted(text: &str) -> String {
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

/// Whole numbers as they are, others with the fewest digits that mean them, as `repr` has them.
fn number(value: &Value) -> String {
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

    /// Both columns as Python 3.11 wrote them.
    #[test]
    fn values_are_written_as_python_writes_them() {
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
            assert_eq!(text(&value), written);
        }
        assert_eq!(text(&value("\"as it is\"")), "as it is");
        let style = JsonStyle { indent: Some(2), sorted: true, ascii: true, ..JsonStyle::default() };
        let dumped = json(&value(r#"{"b":[1,{}],"a":"é😀"}"#), &style).unwrap();
        assert_eq!(dumped, "{\n  \"a\": \"\\u00e9\\ud83d\\ude00\",\n  \"b\": [\n    1,\n    {}\n  ]\n}");
    }
}
