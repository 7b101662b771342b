//! Memory from which a frame's data is sent, or into which it is received.

#![allow(unsafe_code)] // copies from and to memory that the caller vouches for

use crate::types::Span;

/// The start of a buffer, or memory of a tensor in pieces.
pub enum Memory {
    Owned(Vec<u8>),
    /// Its creator guarantees that the memory is valid until the transfer has ended or was given up (`Mail::send_body`,
    /// `Mail::receive_body`, `Link::send_from`, `Link::receive_into`).
    Borrowed(Vec<Span>),
}

impl Memory {
    /// Appends pieces for the `bytes` bytes at offset `from`, as many as fit.
    pub fn pieces(&self, from: usize, bytes: usize, into: &mut Pieces) {
        match self {
            Memory::Owned(buffer) => {
                into.push(Span { addr: buffer.as_ptr() as usize + from, bytes });
            }
            Memory::Borrowed(spans) => {
                let (mut from, mut left) = (from, bytes);
                for span in spans {
                    if from >= span.bytes {
                        from -= span.bytes;
                        continue;
                    }
                    let here = (span.bytes - from).min(left);
                    if here == 0 || !into.push(Span { addr: span.addr + from, bytes: here }) {
                        return;
                    }
                    (from, left) = (0, left - here);
                }
            }
        }
    }

    /// Returns all pieces of the first `bytes` bytes. Borrowed memory has just this size.
    pub fn all(&self, bytes: usize) -> Vec<Span> {
        match self {
            Memory::Owned(buffer) => vec![Span { addr: buffer.as_ptr() as usize, bytes }],
            Memory::Borrowed(spans) => spans.clone(),
        }
    }

    /// Copies received bytes to this memory, beginning at offset `from`.
    pub fn write(&mut self, from: usize, data: &[u8]) {
        match self {
            Memory::Owned(buffer) => buffer[from..from + data.len()].copy_from_slice(data),
            Memory::Borrowed(spans) => {
                let (mut from, mut at) = (from, 0);
                for span in spans {
                    if from >= span.bytes {
                        from -= span.bytes;
                        continue;
                    }
                    let here = (span.bytes - from).min(data.len() - at);
                    // SAFETY: the pieces are valid and no other thread uses them (`Memory::Borrowed`). At least `here`
                    // bytes are left in this piece and in `data`.
                    unsafe {
                        std::ptr::copy_nonoverlapping(data.as_ptr().add(at), (span.addr + from) as *mut u8, here);
                    }
                    (from, at) = (0, at + here);
                    if at == data.len() {
                        return;
                    }
                }
            }
        }
    }

    /// Replaces borrowed memory by a copy and stops using it. The copy may lack the bytes before `from`.
    pub fn own(&mut self, from: usize) {
        if let Memory::Borrowed(spans) = self {
            let mut copy = vec![0; spans.iter().map(|span| span.bytes).sum()]; // unwritten pages use no memory
            let mut start = 0;
            for span in spans.iter() {
                let skipped = from.saturating_sub(start).min(span.bytes);
                let piece = (span.addr + skipped) as *const u8;
                // SAFETY: the pieces are valid until the transfer has ended, which it has not.
                let left = unsafe { std::slice::from_raw_parts(piece, span.bytes - skipped) };
                copy[start + skipped..start + span.bytes].copy_from_slice(left);
                start += span.bytes;
            }
            *self = Memory::Owned(copy);
        }
    }
}

/// The pieces for one system call.
pub struct Pieces {
    list: [Span; super::sockets::MOST],
    count: usize,
}

impl Default for Pieces {
    fn default() -> Pieces {
        Pieces { list: [Span { addr: 0, bytes: 0 }; super::sockets::MOST], count: 0 }
    }
}

impl Pieces {
    /// Appends a piece. False if there is no room.
    pub fn push(&mut self, span: Span) -> bool {
        if self.count == self.list.len() {
            return false;
        }
        self.list[self.count] = span;
        self.count += 1;
        true
    }

    pub fn as_slice(&self) -> &[Span] {
        &self.list[..self.count]
    }

    pub fn bytes(&self) -> usize {
        self.as_slice().iter().map(|span| span.bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_read_and_written_from_any_offset() {
        let mut one = vec![0u8; 5];
        let mut two = vec![0u8; 0];
        let mut three = vec![0u8; 7];
        let span = |buffer: &mut Vec<u8>| Span { addr: buffer.as_mut_ptr() as usize, bytes: buffer.len() };
        let spans = vec![span(&mut one), span(&mut two), span(&mut three)];
        let mut memory = Memory::Borrowed(spans);
        memory.write(3, &[1, 2, 3, 4]);
        memory.write(10, &[9, 9]);
        assert_eq!((one.as_slice(), three.as_slice()), ([0, 0, 0, 1, 2].as_slice(), [3, 4, 0, 0, 0, 9, 9].as_slice()));
        let mut pieces = Pieces::default();
        memory.pieces(4, 3, &mut pieces);
        let found: Vec<usize> = pieces.as_slice().iter().map(|piece| piece.bytes).collect();
        assert_eq!((found, pieces.as_slice()[0].addr), (vec![1, 2], one.as_ptr() as usize + 4));
        memory.own(4);
        one[4] = 77;
        let Memory::Owned(copy) = memory else { panic!("it is owned now") };
        assert_eq!(copy, [0, 0, 0, 0, 2, 3, 4, 0, 0, 0, 9, 9]);
    }
}
