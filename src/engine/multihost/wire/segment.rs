//! Segments, into which a connection of several paths cuts its stream of frames. Each begins with a header.

/// Size of a segment's header in bytes.
pub const HEAD: usize = 32;
/// A segment has at most this many bytes. It is short, so that paths of different speed finish a message at about the
/// same time.
pub const SEGMENT: u64 = 64 << 10;
/// At most this many bytes of the stream may be sent but not yet acknowledged. The receiver may have to keep all of
/// them.
pub const WINDOW: u64 = 16 << 20;

const MAGIC: u32 = 0x7361_6765;

/// The header of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Offset in the stream of the `bytes` bytes that follow.
    pub at: u64,
    pub bytes: u32,
    /// The sender has received the other direction's stream up to this offset.
    pub ack: u64,
    /// The numbers of the paths that the sender suspects, one bit each.
    pub suspected: u16,
    /// How often the sender has changed `suspected`. Tells which value is newer, because segments of different paths
    /// overtake each other.
    pub changes: u64,
}

impl Segment {
    pub fn write(&self) -> [u8; HEAD] {
        let mut out = [0; HEAD];
        let words = [
            u64::from(MAGIC) << 32 | u64::from(self.bytes),
            self.at,
            self.ack,
            self.changes << 16 | u64::from(self.suspected),
        ];
        out.chunks_exact_mut(8).zip(words).for_each(|(at, word)| at.copy_from_slice(&word.to_le_bytes()));
        out
    }

    /// Parses a header. None if it is not the header of a segment.
    pub fn read(head: &[u8; HEAD]) -> Option<Segment> {
        let word = |at: usize| u64::from_le_bytes(head[at * 8..at * 8 + 8].try_into().expect("eight bytes"));
        let (suspected, changes) = (word(3) as u16, word(3) >> 16);
        let segment = Segment { at: word(1), bytes: word(0) as u32, ack: word(2), suspected, changes };
        (word(0) >> 32 == u64::from(MAGIC) && u64::from(segment.bytes) <= SEGMENT).then_some(segment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_as_it_was_written() {
        for bytes in [0, 1, SEGMENT as u32] {
            let segment = Segment { at: 1 << 63 | 5, bytes, ack: u64::MAX, suspected: 1 << 15 | 2, changes: 7 };
            assert_eq!(Segment::read(&segment.write()), Some(segment));
        }
    }

    #[test]
    fn other_bytes_are_no_header() {
        assert_eq!(Segment::read(&[0; HEAD]), None);
        assert_eq!(Segment::read(b"GET / HTTP/1.1\r\nHost: 10.0.0.1:2"), None);
        let long = Segment { at: 0, bytes: SEGMENT as u32 + 1, ack: 0, suspected: 0, changes: 0 };
        assert_eq!(Segment::read(&long.write()), None);
    }
}
