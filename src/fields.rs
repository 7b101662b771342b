//! Encodes as bytes what ranks tell each other through a store, shared memory and the link between hosts. The fields
//! (integers, bytes, texts and lists) follow one another, little-endian; a length precedes the data that it counts.
//! Pure.
//!
//! Any process with access may have written what is read. So a [`Reader`] never panics, returns `None` for a field that
//! is missing or too long, and allocates memory only for bytes that are present, never for a length that was read. An
//! optional field is a list with at most one entry.

/// Longest text, in bytes. Longer ones are cut.
const MAX_TEXT: usize = 1024;
/// Limit for lists, with one entry per rank. Far above the size of any group.
pub const MAX_LIST: usize = 1 << 16;

/// The fields that were written so far.
#[derive(Default)]
pub struct Writer(pub Vec<u8>);

impl Writer {
    pub fn u8(mut self, value: u8) -> Writer {
        self.0.push(value);
        self
    }
    pub fn u32(self, value: u32) -> Writer {
        self.raw(&value.to_le_bytes())
    }
    pub fn u64(self, value: u64) -> Writer {
        self.raw(&value.to_le_bytes())
    }
    /// Writes bytes without a length: the reader knows the length, or no field follows.
    pub fn raw(mut self, value: &[u8]) -> Writer {
        self.0.extend_from_slice(value);
        self
    }
    /// Writes bytes that are never cut.
    pub fn bytes(self, value: &[u8]) -> Writer {
        self.u32(value.len() as u32).raw(value)
    }
    pub fn text(self, value: &str) -> Writer {
        self.bytes(clip(value).as_bytes())
    }
    pub fn list<I>(self, items: I, write: impl Fn(Writer, I::Item) -> Writer) -> Writer
    where
        I: IntoIterator<IntoIter: ExactSizeIterator>,
    {
        let items = items.into_iter();
        let count = self.u32(items.len() as u32);
        items.fold(count, write)
    }
}

/// The bytes that are still to be read.
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub fn u8(&mut self) -> Option<u8> {
        self.array().map(|[byte]| byte)
    }
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk()?;
        self.0 = tail;
        Some(*head)
    }
    /// Reads at most `most` bytes.
    pub fn bytes(&mut self, most: usize) -> Option<&'a [u8]> {
        let length = self.u32()? as usize;
        let (head, tail) = self.0.split_at_checked((length <= most).then_some(length)?)?;
        self.0 = tail;
        Some(head)
    }
    /// A text of one line.
    pub fn text(&mut self) -> Option<String> {
        self.cleaned(&[])
    }
    /// A text of several lines.
    pub fn lines(&mut self) -> Option<String> {
        self.cleaned(&['\n'])
    }
    fn cleaned(&mut self, kept: &[char]) -> Option<String> {
        Some(cleaned(&String::from_utf8_lossy(self.bytes(MAX_TEXT)?), kept))
    }
    pub fn list<T>(&mut self, read: impl Fn(&mut Reader<'a>) -> Option<T>) -> Option<Vec<T>> {
        let count = self.u32()? as usize;
        let mut items = Vec::new(); // grows as its items are read
        for _ in 0..(count <= MAX_LIST).then_some(count)? {
            items.push(read(self)?);
        }
        Some(items)
    }
}

/// The longest prefix of a text that fits into a field.
pub fn clip(text: &str) -> &str {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Cleans a text from outside this process, for example from the store, which anyone with access can write. Replaces
/// control characters, so that the text can neither steer a terminal nor end a log line. Characters in `kept` stay.
pub fn cleaned(text: &str, kept: &[char]) -> String {
    let clean = |c: char| match c {
        _ if kept.contains(&c) => c,
        '\n' | '\t' => ' ',
        _ if c.is_control() => '?',
        _ => c,
    };
    text.chars().map(clean).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Any characters, control characters too. `any::<String>()` interprets a regular expression, for which Miri takes
    /// many minutes.
    fn text() -> impl Strategy<Value = String> {
        prop::collection::vec(any::<char>(), 0..24).prop_map(String::from_iter)
    }

    proptest! {
        #[test]
        fn fields_are_read_as_they_were_written_and_none_of_a_part_of_them(
            (byte, half, word) in any::<(u8, u32, u64)>(), bytes in any::<Vec<u8>>(),
            texts in prop::collection::vec(text(), 0..12),
            cut in any::<prop::sample::Index>(),
        ) {
            let numbers = Writer::default().u8(byte).u32(half).u64(word).raw(&[byte; 3]);
            let written = numbers.bytes(&bytes).list(&texts, |to, text| to.text(text)).0;
            let read = |bytes: &[u8]| {
                let mut from = Reader(bytes);
                let numbers = (from.u8()?, from.u32()?, from.u64()?, from.array()?);
                Some((numbers, from.bytes(300)?.to_vec(), from.list(Reader::lines)?, from.0.len()))
            };
            prop_assert_eq!(read(&written[..cut.index(written.len())]), None);
            let texts: Vec<String> = texts.iter().map(|text| cleaned(clip(text), &['\n'])).collect();
            prop_assert_eq!(read(&written), Some(((byte, half, word, [byte; 3]), bytes, texts, 0)));
        }

        #[test]
        fn random_bytes_are_read_without_panic_or_control_characters(bytes in any::<Vec<u8>>()) {
            prop_assert!(!Reader(&bytes).text().unwrap_or_default().contains(char::is_control));
            prop_assert!(Reader(&bytes).list(Reader::text).is_none_or(|items| items.len() * 4 < bytes.len()));
        }
    }

    #[test]
    fn a_length_that_is_only_claimed_is_refused() {
        for claimed in [1, MAX_TEXT as u32, MAX_LIST as u32, u32::MAX] {
            let bytes = Writer::default().u32(claimed).0;
            assert_eq!(Reader(&bytes).bytes(usize::MAX), None, "{claimed}");
            assert_eq!(Reader(&bytes).text(), None, "{claimed}");
            assert_eq!(Reader(&bytes).list(Reader::u64), None, "{claimed}");
        }
        let long = Writer::default().bytes(&[b'a'; MAX_TEXT + 1]).0;
        assert_eq!((Reader(&long).text(), Reader(&long).bytes(MAX_TEXT)), (None, None));
        assert_eq!(Reader(&long).bytes(MAX_TEXT + 1).map(<[u8]>::len), Some(MAX_TEXT + 1));
        let many = Writer::default().bytes(&[0; MAX_LIST + 1]).0;
        assert_eq!(Reader(&many).list(Reader::u8), None);
    }
}
