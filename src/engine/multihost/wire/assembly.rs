//! The receiving side of a stream of frames that several TCP connections carry. `stripes` is the sending side.
//!
//! Bytes may arrive before the bytes in front of them, and they may arrive twice. Bytes of the frame that is being
//! received are stored immediately, at their place in its memory; bytes of later frames are kept until their turn. A
//! frame ends when all its bytes are there. Bytes that arrive again after that are dropped, because the frame's memory
//! may have other users by then.

use std::collections::BTreeMap;
use std::ops::Range;

/// Handles the stream, in order.
pub trait Sink {
    /// Returns the offset in the stream before which everything was handled.
    fn position(&self) -> u64;
    /// Handles the next bytes. An error ends the connection.
    fn feed(&mut self, data: &[u8]) -> Result<(), String>;
    /// Returns the offsets of the current frame's data in the stream, if a frame is being received.
    fn current(&self) -> Option<Range<u64>>;
    /// Stores data of the current frame that belongs at this offset of the stream.
    fn store(&mut self, at: u64, data: &[u8]);
    /// Skips the next `bytes` bytes, which belong to the current frame and are already in its memory.
    fn skip(&mut self, bytes: u64);
}

enum Ahead {
    /// Number of bytes of the current frame that are already in its memory.
    Stored(u64),
    Kept(Vec<u8>),
}

impl Ahead {
    fn bytes(&self) -> u64 {
        match self {
            Ahead::Stored(bytes) => *bytes,
            Ahead::Kept(data) => data.len() as u64,
        }
    }
}

/// The bytes that have arrived behind a gap, by offset, without overlaps.
#[derive(Default)]
pub struct Assembly {
    ahead: BTreeMap<u64, Ahead>,
}

/// Bytes that have arrived.
#[derive(Clone, Copy)]
pub enum Came<'a> {
    Data(&'a [u8]),
    /// This many bytes of the current frame, which are already in its memory.
    Stored(u64),
}

impl Assembly {
    /// Handles bytes that have arrived. They begin at offset `at` of the stream.
    pub fn arrived(&mut self, sink: &mut impl Sink, at: u64, came: Came) -> Result<(), String> {
        let begin = at;
        let end = at
            + match came {
                Came::Data(data) => data.len() as u64,
                Came::Stored(bytes) => bytes,
            };
        let mut at = at.max(sink.position());
        while at < end {
            let before = self.ahead.range(..=at).next_back().map_or(0, |(start, ahead)| start + ahead.bytes());
            if before > at {
                at = before;
                continue;
            }
            let until = self.ahead.range(at..).next().map_or(end, |(start, _)| end.min(*start));
            let next = at == sink.position();
            match came {
                Came::Data(data) => {
                    let data = &data[(at - begin) as usize..(until - begin) as usize];
                    if next { sink.feed(data)? } else { self.keep(sink, at, data) }
                }
                Came::Stored(_) if next => sink.skip(until - at),
                Came::Stored(_) => {
                    self.ahead.insert(at, Ahead::Stored(until - at));
                }
            }
            if next {
                self.advance(sink)?;
            }
            at = until.max(sink.position());
        }
        Ok(())
    }

    /// Writes the bytes of the current frame to its memory, and keeps a copy of the bytes of later frames.
    fn keep(&mut self, sink: &mut impl Sink, at: u64, data: &[u8]) {
        let current = sink.current().map_or(0, |current| current.end.saturating_sub(at)).min(data.len() as u64);
        let (now, later) = data.split_at(current as usize);
        if !now.is_empty() {
            sink.store(at, now);
            self.ahead.insert(at, Ahead::Stored(current));
        }
        if !later.is_empty() {
            self.ahead.insert(at + current, Ahead::Kept(later.to_vec()));
        }
    }

    /// Handles the bytes that are no longer behind a gap.
    fn advance(&mut self, sink: &mut impl Sink) -> Result<(), String> {
        while let Some(first) = self.ahead.first_entry().filter(|first| *first.key() <= sink.position()) {
            let (start, ahead) = first.remove_entry();
            let done = sink.position() - start;
            match ahead {
                Ahead::Stored(bytes) if bytes > done => sink.skip(bytes - done),
                Ahead::Kept(data) if data.len() as u64 > done => sink.feed(&data[done as usize..])?,
                _ => (),
            }
        }
        Ok(())
    }
}
