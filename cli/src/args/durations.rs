//! Durations as typed: a whole number and a unit.

use std::time::Duration;

/// Units, in milliseconds.
const UNITS: [(&str, u64); 5] = [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];

/// Parses `500ms`, `90s`, `15m`, `12h` or `7d`.
///
/// # Errors
/// If the number or the unit is missing, or the duration is zero or too large.
pub(super) fn parse_duration(text: &str) -> Result<Duration, String> {
    let digits = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let known = UNITS.iter().find(|(name, _)| *name == unit);
    let (Some((_, unit_ms)), false) = (known, number.is_empty()) else {
        return Err(format!(
            "{text:?} is not a duration: write a whole number and ms, s, m, h or d, as in 90s"
        ));
    };
    let millis = number.parse::<u64>().ok().and_then(|number| number.checked_mul(*unit_ms));
    match millis {
        None => Err(format!("{text:?} is too long: write a shorter duration")),
        Some(0) => Err(format!("{text:?} is zero: write a longer duration")),
        Some(millis) => Ok(Duration::from_millis(millis)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use kvfleet_errors_doc::says;

    #[test]
    fn parses_a_number_and_a_unit() {
        let spans =
            [("500ms", 500), ("90s", 90_000), ("15m", 900_000), ("12h", 43_200_000), ("7d", 604_800_000)];
        for (text, millis) in spans {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(millis)));
        }
        for text in ["", "s", "90", "-1s", "1.5s", "1 s", "1w", "s1"] {
            assert!(parse_duration(text).unwrap_err().contains("is not a duration"), "{text}");
        }
        says("a time that is none", &parse_duration("soon").unwrap_err(), &[]);
        says("a time that is over at once", &parse_duration("0s").unwrap_err(), &[]);
        says("a time that is too long", &parse_duration("999999999999999d").unwrap_err(), &[]);
        assert!(parse_duration("99999999999999999999s").is_err());
    }
}
