//! What travels on a connection: frames, each a header of 32 bytes and its data.

/// Bytes of a header.
pub const HEAD: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The sender has joined the channel: it may be sent to from now on.
    Hello = 1,
    /// A message of a lane, under `tag`.
    Message = 2,
    /// What the sender has taken of the receiver's messages: it may send `number` more bytes of them.
    Credit = 3,
    /// For the receiver's mailbox.
    Mail = 4,
    /// The sender has memory for the body `number`, which has `bytes`. No data.
    Want = 5,
    /// The body `number`, which the receiver wants.
    Body = 6,
    /// The sender has left the channel.
    Cut = 7,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    pub kind: Kind,
    pub tag: u32,
    pub channel: u64,
    pub number: u64,
    /// Of the data; for `Want` of the body.
    pub bytes: u64,
}

impl Frame {
    pub fn new(kind: Kind, channel: u64, bytes: usize) -> Frame {
        Frame { kind, tag: 0, channel, number: 0, bytes: bytes as u64 }
    }

    /// Bytes that follow the header.
    pub fn data(&self) -> usize {
        match self.kind {
            Kind::Message | Kind::Mail | Kind::Body => self.bytes as usize,
            Kind::Hello | Kind::Credit | Kind::Want | Kind::Cut => 0,
        }
    }

    pub fn write(&self) -> [u8; HEAD] {
        let mut out = [0; HEAD];
        let words = [self.kind as u64 | u64::from(self.tag) << 32, self.channel, self.number, self.bytes];
        out.chunks_exact_mut(8).zip(words).for_each(|(at, word)| at.copy_from_slice(&word.to_le_bytes()));
        out
    }

    /// None where this is no header: the peer does not keep to the protocol.
    pub fn read(head: &[u8; HEAD]) -> Option<Frame> {
        let word = |at: usize| u64::from_le_bytes(head[at * 8..at * 8 + 8].try_into().expect("eight bytes"));
        let kind = match word(0) as u32 {
            1 => Kind::Hello,
            2 => Kind::Message,
            3 => Kind::Credit,
            4 => Kind::Mail,
            5 => Kind::Want,
            6 => Kind::Body,
            7 => Kind::Cut,
            _ => return None,
        };
        Some(Frame { kind, tag: (word(0) >> 32) as u32, channel: word(1), number: word(2), bytes: word(3) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_as_it_was_written() {
        for kind in [Kind::Hello, Kind::Message, Kind::Credit, Kind::Mail, Kind::Want, Kind::Body, Kind::Cut] {
            let frame = Frame { kind, tag: 0xffff_fff1, channel: 1 << 63 | 7, number: u64::MAX, bytes: 1 << 40 };
            assert_eq!(Frame::read(&frame.write()), Some(frame));
        }
    }

    #[test]
    fn other_bytes_are_no_header() {
        assert_eq!(Frame::read(b"GET / HTTP/1.1\r\nHost: 10.0.0.1\r\n"), None);
        assert_eq!(Frame::read(&[0; HEAD]), None);
    }
}
