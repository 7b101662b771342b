//! Sizes as people write them: `4096`, `64KiB`, `1MiB`. Read and written here alone, so that both are one language.

const UNITS: [(&str, u64); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

/// Bytes, or `None` for what is not a whole number with one of the units B, KiB, MiB, GiB.
pub fn parse(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().ok()?;
    let unit = match unit.trim() {
        "" => 1,
        unit => UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit))?.1,
    };
    number.checked_mul(unit)
}

/// The shortest exact form: `parse` gives the same number back.
pub fn text(bytes: u64) -> String {
    match UNITS.iter().find(|(_, unit)| bytes > 0 && bytes.is_multiple_of(*unit)) {
        Some((name, unit)) if *unit > 1 => format!("{}{name}", bytes / unit),
        _ => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [("0", 0), ("17", 17), ("8B", 8), ("64KiB", 65536), ("1 MiB", 1 << 20), ("2gib", 2 << 30)]
        {
            assert_eq!(parse(text), Some(bytes), "{text}");
        }
        for wrong in ["", "KiB", "-1", "1.5KiB", "1KB", "1 2", "99999999999999999999", "99999999999GiB"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        for bytes in [0, 1, 1023, 1024, 1025, 4096, 65536, 1 << 20, (1 << 20) + 1, 3 << 30, u64::MAX] {
            assert_eq!(parse(&text(bytes)), Some(bytes));
        }
        assert_eq!(text(65536), "64KiB");
    }
}
