//! Frames, which a connection carries. A frame is a header of 32 bytes, followed by its data.

/// Size of a header in bytes.
pub const HEAD: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The sender has joined the channel: peers may send to it from now on.
    Hello = 1,
    /// A message of a lane, under `tag`.
    Message = 2,
    /// The sender has consumed `number` bytes of the receiver's messages: the receiver may send this many more.
    Credit = 3,
    /// Mail for the receiver's mailbox.
    Mail = 4,
    /// The sender has posted a receive for the body `number` of a lane, of `bytes` bytes. No data follows.
    Want = 5,
    /// The body `number`: a lane's in answer to a Want or ahead of it, a message of the program after a letter.
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
    /// Size of the data. In a `Want`: size of the body.
    pub bytes: u64,
}

impl Frame {
    pub fn new(kind: Kind, channel: u64, bytes: usize) -> Frame {
        Frame { kind, tag: 0, channel, number: 0, bytes: bytes as u64 }
    }

    /// Returns how many bytes of data follow the header.
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

    /// Parses a header. None if the kind is unknown: the peer does not speak this protocol.
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
