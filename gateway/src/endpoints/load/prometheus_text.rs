//! Parser of Prometheus text: strict for wanted metrics, and skipping all other lines.
//!
//! An engine's answer has thousands of lines and is parsed several times a second, but only a few
//! lines matter. Pure. Not here: the meaning of the values (`sample.rs`).

/// Error of the parser, with the line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TextError {
    /// The line is not text.
    #[error("line {line} of the metrics is not text")]
    NotText {
        /// Number of the line, from 1.
        line: usize,
    },
    /// A wanted line is invalid.
    #[error("line {line} of the metrics {problem}: {shown:?}")]
    Line {
        /// Number of the line, from 1.
        line: usize,
        /// The problem.
        problem: &'static str,
        /// Start of the line.
        shown: String,
    },
}

/// Most characters of an invalid line in an error.
const SHOWN_MAX: usize = 60;

/// Calls `each` with name and value of every line with a wanted name.
///
/// # Errors
/// The first invalid line; `each` may have been called for earlier lines.
pub(super) fn parse<'names>(
    body: &[u8],
    wanted: &[&'names str],
    mut each: impl FnMut(&'names str, f64),
) -> Result<(), TextError> {
    for (number, line) in (1..).zip(body.split(|byte| *byte == b'\n')) {
        let line = line.trim_ascii();
        let end = line.iter().position(|byte| !is_name_byte(*byte)).unwrap_or(line.len());
        let (name, rest) = line.split_at(end);
        if name.is_empty() && !matches!(rest.first(), None | Some(b'#')) {
            let is_text = std::str::from_utf8(line).is_ok_and(|text| !text.contains(char::is_control));
            return Err(if is_text {
                line_error(number, "does not begin with a name", line)
            } else {
                TextError::NotText { line: number }
            });
        }
        let Some(name) = wanted.iter().find(|wanted| wanted.as_bytes() == name) else { continue };
        let value = std::str::from_utf8(rest).map_err(|_| TextError::NotText { line: number })?;
        each(name, parse_value(value).map_err(|problem| line_error(number, problem, line))?);
    }
    Ok(())
}

fn line_error(line: usize, problem: &'static str, text: &[u8]) -> TextError {
    let shown = String::from_utf8_lossy(&text[..text.len().min(4 * SHOWN_MAX)]);
    TextError::Line { line, problem, shown: shown.chars().take(SHOWN_MAX).collect() }
}

fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b':')
}

/// Parses the text after a name: labels, value, timestamp.
fn parse_value(rest: &str) -> Result<f64, &'static str> {
    let rest = match rest.strip_prefix('{') {
        Some(labels) => skip_labels(labels).ok_or("has invalid labels")?,
        None => rest,
    };
    let mut words = rest.split([' ', '\t']).filter(|word| !word.is_empty());
    let value = words.next().ok_or("has no value")?;
    let value = value.parse::<f64>().map_err(|_| "has a value that is not a number")?;
    if words.next().is_some_and(|time| time.parse::<i64>().is_err()) || words.next().is_some() {
        return Err("has more than a value and a timestamp");
    }
    Ok(value)
}

/// Text after the closing brace of labels.
fn skip_labels(mut rest: &str) -> Option<&str> {
    loop {
        rest = rest.trim_start_matches([' ', '\t']);
        if let Some(behind) = rest.strip_prefix('}') {
            return Some(behind);
        }
        let (name, value) = rest.split_once('=')?;
        let name = name.trim_matches([' ', '\t']);
        if name.is_empty() || !name.bytes().all(is_name_byte) {
            return None;
        }
        rest = skip_quoted(value.trim_start_matches([' ', '\t']))?.trim_start_matches([' ', '\t']);
        match rest.strip_prefix(',') {
            Some(behind) => rest = behind,
            None if rest.starts_with('}') => {}
            None => return None,
        }
    }
}

/// Text after a quoted string.
fn skip_quoted(rest: &str) -> Option<&str> {
    let inner = rest.strip_prefix('"')?;
    let mut is_escaped = false;
    for (at, byte) in inner.bytes().enumerate() {
        match byte {
            b'"' if !is_escaped => return inner.get(at + 1..),
            b'\\' => is_escaped = !is_escaped,
            _ => is_escaped = false,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn values(text: &[u8]) -> Result<Vec<(&'static str, f64)>, TextError> {
        let mut all = Vec::new();
        parse(text, &["a", "b:c"], |name, value| all.push((name, value))).map(|()| all)
    }

    #[test]
    fn reads_wanted_lines_only() {
        let text = b"# HELP a It is.\n# TYPE a gauge\na 1\nab nonsense {\n\n  b:c{x=\"}\\\"\\\\\",y=\"\"} \
            +2.5e1 17\r\nb:c{} 0\nb:c{x=\"1\", } 3\na\t4\na -Inf\n";
        let expected =
            [("a", 1.0), ("b:c", 25.0), ("b:c", 0.0), ("b:c", 3.0), ("a", 4.0), ("a", f64::NEG_INFINITY)];
        assert_eq!(values(text).as_deref(), Ok(&expected[..]));
        assert!(values(b"a NaN").expect("is read")[0].1.is_nan());
        assert_eq!(values(b"").as_deref(), Ok(&[][..]));
    }

    #[test]
    fn reports_the_number_of_an_invalid_line() {
        for wrong in [
            "a",
            "a ",
            "a{",
            "a{x} 1",
            "a{x=1} 1",
            "a{x=\"1} 1",
            "a{x=\"1\"",
            "a{x=\"1\"y=\"2\"} 1",
            "a{=\"1\"} 1",
            "a{x=\"1\"}",
            "a one",
            "a 1 2 3",
            "a 1 soon",
            "a,1",
            "a 1;",
            "a 0x1",
            "a{x=\"1\"}{} 1",
        ] {
            let text = format!("# first\n{wrong}");
            match values(text.as_bytes()) {
                Err(TextError::Line { line: 2, .. }) => {}
                other => panic!("{wrong:?}: {other:?}"),
            }
        }
        assert_eq!(values(b"a 1\n\xff\xfe 1"), Err(TextError::NotText { line: 2 }));
        assert_eq!(values(b"a{x=\"\xff\"} 1"), Err(TextError::NotText { line: 1 }));
        assert!(matches!(values(b"<html>"), Err(TextError::Line { line: 1, .. })));
    }

    proptest! {
        #[test]
        fn accepts_any_bytes(body in proptest::collection::vec(any::<u8>(), 0..200), beginning in "(a|b:c|)[{ ]?") {
            let mut text = beginning.into_bytes();
            text.extend(body);
            let _ = values(&text); // it must not panic
        }
    }
}
