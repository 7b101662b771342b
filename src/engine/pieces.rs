//! Reads and writes a list of memory pieces like one contiguous range of bytes, for the engines' copies between caller
//! memory and staging buffers. Long ranges are split among the threads that were lent to the calling thread
//! (`threads`).

#![allow(unsafe_code)] // reads and writes caller memory, which comes as addresses

use crate::reduce::copy;
use crate::threads;
use crate::types::Span;

#[derive(Clone, Copy)]
pub struct Pieces<'a>(pub &'a [Span]);

impl Pieces<'_> {
    pub fn bytes(&self) -> usize {
        self.0.iter().map(|span| span.bytes).sum()
    }

    /// Returns the address of the `bytes` bytes at `offset`, if a single piece contains all of them.
    pub fn contiguous(&self, offset: usize, bytes: usize) -> Option<*mut u8> {
        let mut start = 0;
        for span in self.0 {
            if offset >= start && offset + bytes <= start + span.bytes {
                return Some((span.addr + (offset - start)) as *mut u8);
            }
            start += span.bytes;
        }
        None
    }

    /// Calls `each(address in a piece, position within the range, bytes)` for the parts of `offset..offset + bytes`.
    pub(super) fn walk(&self, offset: usize, bytes: usize, mut each: impl FnMut(*mut u8, usize, usize)) {
        let end = offset + bytes;
        let mut start = 0;
        for span in self.0 {
            let from = offset.max(start);
            let to = end.min(start + span.bytes);
            if from < to {
                each((span.addr + (from - start)) as *mut u8, from - offset, to - from);
            }
            start += span.bytes;
            if start >= end {
                return;
            }
        }
        assert!(start >= end, "sagellm: bytes {offset}..{end} of an operation with {start} bytes");
    }

    /// Copies the bytes `offset..offset + bytes` to `to`.
    ///
    /// # Safety
    /// `to` must be valid for `bytes` and overlap no piece. The pieces must be valid, as `Request` requires of the
    /// caller.
    pub unsafe fn read(&self, offset: usize, to: *mut u8, bytes: usize) {
        let to = to as usize;
        threads::split(bytes, |start, length| {
            // SAFETY: walk stays within the pieces and within `bytes` of `to`. No two parts have a byte in common.
            self.walk(offset + start, length, |piece, at, len| unsafe {
                copy((to + start + at) as *mut u8, piece, len)
            });
        });
    }

    /// Copies `from` to the bytes `offset..offset + bytes`.
    ///
    /// # Safety
    /// As for `read`, with `from` instead of `to`.
    pub unsafe fn write(&self, offset: usize, from: *const u8, bytes: usize) {
        let from = from as usize;
        threads::split(bytes, |start, length| {
            // SAFETY: walk stays within the pieces and within `bytes` of `from`. No two parts have a byte in common.
            self.walk(offset + start, length, |piece, at, len| unsafe {
                copy(piece, (from + start + at) as *const u8, len)
            });
        });
    }
}

/// Where each piece of a long list begins, so that the copies of one operation do not each count from the first piece.
#[derive(Default)]
pub struct Starts(Vec<usize>);

impl Starts {
    /// In lists of at most this many pieces, counting is as fast as searching.
    const SHORT: usize = 16;

    pub fn of(pieces: Pieces) -> Starts {
        if pieces.0.len() <= Starts::SHORT {
            return Starts::default();
        }
        Starts(pieces.0.iter().scan(0, |next, span| Some(std::mem::replace(next, *next + span.bytes))).collect())
    }

    /// Returns the pieces from the one that contains the byte `offset` on, and where that byte is in them. `pieces` is
    /// the list of which the starts are.
    pub fn skip<'a>(&self, pieces: Pieces<'a>, offset: usize) -> (Pieces<'a>, usize) {
        let Some(at) = self.0.partition_point(|start| *start <= offset).checked_sub(1) else { return (pieces, offset) };
        (Pieces(&pieces.0[at..]), offset - self.0[at])
    }
}

/// Copies a range of one list to a range of another list. If source and target are the same memory, nothing is copied.
///
/// # Safety
/// Both lists must be valid, and the ranges must be the same memory or not overlap.
pub unsafe fn transfer(from: Pieces, from_offset: usize, to: Pieces, to_offset: usize, bytes: usize) {
    threads::split(bytes, |start, length| {
        from.walk(from_offset + start, length, |source, at, len| {
            to.walk(to_offset + start + at, len, |target, inner, part| {
                // SAFETY: both walks stay within their lists. Identical memory is skipped, and other overlaps are
                // excluded by the contract. No two parts have a byte in common.
                unsafe {
                    let source = source.add(inner);
                    if source.cast_const() != target.cast_const() {
                        copy(target, source, part);
                    }
                }
            });
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(buffers: &mut [Vec<u8>]) -> Vec<Span> {
        buffers.iter_mut().map(|b| Span { addr: b.as_mut_ptr() as usize, bytes: b.len() }).collect()
    }

    #[test]
    fn a_byte_of_a_long_list_is_found_without_counting() {
        let sizes = (0..40).map(|i| [3, 0, 5, 1][i % 4]);
        let list: Vec<Span> = sizes.enumerate().map(|(i, bytes)| Span { addr: 1000 * (i + 1), bytes }).collect();
        for length in [1, Starts::SHORT, Starts::SHORT + 1, 40] {
            let pieces = Pieces(&list[..length]);
            let starts = Starts::of(pieces);
            for offset in 0..pieces.bytes() {
                let (rest, within) = starts.skip(pieces, offset);
                assert_eq!(rest.contiguous(within, 1), pieces.contiguous(offset, 1));
                assert!(length <= Starts::SHORT || within < rest.0[0].bytes);
            }
            let (rest, within) = starts.skip(pieces, pieces.bytes());
            assert_eq!(rest.bytes(), within, "the end of the list");
        }
    }

    #[test]
    fn ranges_cross_pieces_and_empty_pieces() {
        let mut buffers = vec![vec![1u8, 2, 3], vec![], vec![4, 5], vec![6]];
        let list = spans(&mut buffers);
        let pieces = Pieces(&list);
        assert_eq!(pieces.bytes(), 6);
        let mut out = [0u8; 4];
        // SAFETY: `out` has four bytes, and the pieces are alive.
        unsafe { pieces.read(1, out.as_mut_ptr(), 4) };
        assert_eq!(out, [2, 3, 4, 5]);
        assert!(pieces.contiguous(0, 3).is_some());
        assert!(pieces.contiguous(2, 2).is_none());
        // SAFETY: as above.
        unsafe { pieces.write(2, [9u8, 8].as_ptr(), 2) };
        assert_eq!(buffers, vec![vec![1, 2, 9], vec![], vec![8, 5], vec![6]]);
    }

    #[test]
    fn transfer_between_differently_cut_lists() {
        let mut a = vec![vec![1u8, 2], vec![3, 4, 5]];
        let mut b = vec![vec![0u8; 1], vec![0; 4]];
        let (from, to) = (spans(&mut a), spans(&mut b));
        // SAFETY: both lists are alive and distinct.
        unsafe { transfer(Pieces(&from), 1, Pieces(&to), 0, 4) };
        assert_eq!(b, vec![vec![2], vec![3, 4, 5, 0]]);
    }
}
