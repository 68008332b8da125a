//! Reads Prometheus text: lines whose names are wanted strictly, all others not at all.
//!
//! An engine's text has thousands of lines and five of them matter, several times a second. Pure. Not here: what the numbers mean
//! (`reading.rs`).

/// What is wrong with a text, and in which line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TextError {
    /// It is something else.
    #[error("line {line} of the metrics is no text")]
    NotText {
        /// Which, from 1.
        line: usize,
    },
    /// A wanted line is not as it must be.
    #[error("line {line} of the metrics {problem}: {shown:?}")]
    Line {
        /// Which, from 1.
        line: usize,
        /// What is wrong.
        problem: &'static str,
        /// Its beginning.
        shown: String,
    },
}

/// Characters of a wrong line that are shown.
const SHOWN_MAX: usize = 60;

/// Calls `each` with the name and the value of each line that has one of these names.
///
/// # Errors
/// The first wanted line that cannot be read; `each` may have been called for those before it.
pub(super) fn read<'names>(
    body: &[u8],
    wanted: &[&'names str],
    mut each: impl FnMut(&'names str, f64),
) -> Result<(), TextError> {
    for (number, line) in (1..).zip(body.split(|byte| *byte == b'\n')) {
        let line = line.trim_ascii();
        let end = line.iter().position(|byte| !is_of_name(*byte)).unwrap_or(line.len());
        let (name, rest) = line.split_at(end);
        if name.is_empty() && !matches!(rest.first(), None | Some(b'#')) {
            let is_text = std::str::from_utf8(line).is_ok_and(|text| !text.contains(char::is_control));
            return Err(if is_text {
                wrong(number, "does not begin with a name", line)
            } else {
                TextError::NotText { line: number }
            });
        }
        let Some(name) = wanted.iter().find(|wanted| wanted.as_bytes() == name) else { continue };
        let value = std::str::from_utf8(rest).map_err(|_| TextError::NotText { line: number })?;
        each(name, value_of(value).map_err(|problem| wrong(number, problem, line))?);
    }
    Ok(())
}

fn wrong(line: usize, problem: &'static str, text: &[u8]) -> TextError {
    let shown = String::from_utf8_lossy(&text[..text.len().min(4 * SHOWN_MAX)]);
    TextError::Line { line, problem, shown: shown.chars().take(SHOWN_MAX).collect() }
}

fn is_of_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b':')
}

/// What stands behind a name: labels, a value, a time.
fn value_of(rest: &str) -> Result<f64, &'static str> {
    let rest = match rest.strip_prefix('{') {
        Some(labels) => behind_labels(labels).ok_or("has labels that are none")?,
        None => rest,
    };
    let mut words = rest.split([' ', '\t']).filter(|word| !word.is_empty());
    let value = words.next().ok_or("has no value")?;
    let value = value.parse::<f64>().map_err(|_| "has a value that is no number")?;
    if words.next().is_some_and(|time| time.parse::<i64>().is_err()) || words.next().is_some() {
        return Err("has more than a value and a time");
    }
    Ok(value)
}

/// What stands behind the brace that ends labels.
fn behind_labels(mut rest: &str) -> Option<&str> {
    loop {
        rest = rest.trim_start_matches([' ', '\t']);
        if let Some(behind) = rest.strip_prefix('}') {
            return Some(behind);
        }
        let (name, value) = rest.split_once('=')?;
        let name = name.trim_matches([' ', '\t']);
        if name.is_empty() || !name.bytes().all(is_of_name) {
            return None;
        }
        rest = behind_text(value.trim_start_matches([' ', '\t']))?.trim_start_matches([' ', '\t']);
        match rest.strip_prefix(',') {
            Some(behind) => rest = behind,
            None if rest.starts_with('}') => {}
            None => return None,
        }
    }
}

/// What stands behind a text in quotes.
fn behind_text(rest: &str) -> Option<&str> {
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
        read(text, &["a", "b:c"], |name, value| all.push((name, value))).map(|()| all)
    }

    #[test]
    fn wanted_lines_are_read_and_others_are_not_looked_at() {
        let text = b"# HELP a It is.\n# TYPE a gauge\na 1\nab nonsense {\n\n  b:c{x=\"}\\\"\\\\\",y=\"\"} +2.5e1 17\r\nb:c{} 0\nb:c{x=\"1\", } 3\na\t4\na -Inf\n";
        let expected =
            [("a", 1.0), ("b:c", 25.0), ("b:c", 0.0), ("b:c", 3.0), ("a", 4.0), ("a", f64::NEG_INFINITY)];
        assert_eq!(values(text).as_deref(), Ok(&expected[..]));
        assert!(values(b"a NaN").expect("is read")[0].1.is_nan());
        assert_eq!(values(b"").as_deref(), Ok(&[][..]));
    }

    #[test]
    fn a_wanted_line_that_is_wrong_is_refused_with_its_number() {
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
        fn no_bytes_are_too_wild(body in proptest::collection::vec(any::<u8>(), 0..200), beginning in "(a|b:c|)[{ ]?") {
            let mut text = beginning.into_bytes();
            text.extend(body);
            let _ = values(&text); // it answers
        }
    }
}
