//! Records which pages of the arena are in use. `Extents` works with offsets of page ranges and touches no memory. It
//! allocates the smallest free range that fits; among ranges of equal size it takes the one with the lowest offset. It
//! merges adjacent free ranges.
//!
//! When a range is freed, its used pages stay filled, because filling a page costs far more than reusing it. If more
//! filled pages are free than should be kept, `to_give_back` names a range whose pages the caller must free.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// A range in use.
#[derive(Debug)]
pub struct Extent {
    pub bytes: usize,
    /// The group whose operations let peers access this memory, and how many such operations there are.
    pub holder: Option<(u64, usize)>,
    /// Offsets of the pages that were made private after an operation had failed. If there are any, peers can no longer
    /// reach the range, and it is not reused.
    pub private: Vec<Range<usize>>,
}

impl Extent {
    pub fn is_taken_out(&self) -> bool {
        !self.private.is_empty()
    }

    /// The parts of `pages` that are not private yet.
    pub fn not_private(&self, pages: Range<usize>) -> Vec<Range<usize>> {
        let mut left = vec![pages];
        for done in &self.private {
            let cut = |one: Range<usize>| [one.start..one.end.min(done.start), one.start.max(done.end)..one.end];
            left = left.into_iter().flat_map(cut).filter(|one| !one.is_empty()).collect();
        }
        left
    }
}

#[derive(Debug)]
struct Free {
    bytes: usize,
    /// Upper bound of the filled pages in this range, in bytes.
    filled: usize,
}

#[derive(Debug)]
pub struct Extents {
    page: usize,
    used: BTreeMap<usize, Extent>,
    free: BTreeMap<usize, Free>,
    by_size: BTreeSet<(usize, usize)>,
    bytes_used: usize,
    bytes_filled: usize,
}

impl Extents {
    /// Records `bytes` bytes of memory, all free, in pages of `page` bytes.
    pub fn new(bytes: usize, page: usize) -> Extents {
        let mut extents = Extents {
            page,
            used: BTreeMap::new(),
            free: BTreeMap::new(),
            by_size: BTreeSet::new(),
            bytes_used: 0,
            bytes_filled: 0,
        };
        extents.insert_free(0, Free { bytes, filled: 0 });
        extents
    }

    pub fn bytes_used(&self) -> usize {
        self.bytes_used
    }

    /// Upper bound of the filled pages in all free ranges, in bytes.
    pub fn bytes_filled(&self) -> usize {
        self.bytes_filled
    }

    pub fn count(&self) -> usize {
        self.used.len()
    }

    fn insert_free(&mut self, at: usize, free: Free) {
        self.bytes_filled += free.filled;
        self.by_size.insert((free.bytes, at));
        self.free.insert(at, free);
    }

    fn remove_free(&mut self, at: usize) -> Free {
        let free = self.free.remove(&at).expect("a free range that is in one list is in the other");
        self.by_size.remove(&(free.bytes, at));
        self.bytes_filled -= free.filled;
        free
    }

    /// Allocates a range of at least `bytes` bytes, in whole pages. Returns its offset.
    pub fn take(&mut self, bytes: usize) -> Option<usize> {
        let bytes = bytes.max(1).checked_next_multiple_of(self.page)?;
        let &(_, at) = self.by_size.range((bytes, 0)..).next()?;
        let Free { bytes: whole, filled } = self.remove_free(at);
        if whole > bytes {
            self.insert_free(at + bytes, Free { bytes: whole - bytes, filled: filled.min(whole - bytes) });
        }
        self.used.insert(at, Extent { bytes, holder: None, private: Vec::new() });
        self.bytes_used += bytes;
        Some(at)
    }

    /// Frees the range that starts at `at` and returns it. A range with private pages is never reused.
    pub fn release(&mut self, at: usize) -> Option<Extent> {
        let extent = self.used.remove(&at)?;
        self.bytes_used -= extent.bytes;
        if extent.is_taken_out() {
            return Some(extent);
        }
        let (mut from, mut free) = (at, Free { bytes: extent.bytes, filled: extent.bytes });
        let before = self.free.range(..at).next_back().map(|(start, free)| (*start, start + free.bytes));
        if let Some((start, end)) = before
            && end == at
        {
            let joined = self.remove_free(start);
            free = Free { bytes: joined.bytes + free.bytes, filled: joined.filled + free.filled };
            from = start;
        }
        if self.free.contains_key(&(at + extent.bytes)) {
            let joined = self.remove_free(at + extent.bytes);
            free = Free { bytes: free.bytes + joined.bytes, filled: free.filled + joined.filled };
        }
        self.insert_free(from, free);
        Some(extent)
    }

    /// If more than `kept` bytes of free ranges are filled, returns offset and length of the free range with the most
    /// filled pages. The caller must return these pages to the system; the range counts as empty from now on.
    pub fn to_give_back(&mut self, kept: usize) -> Option<(usize, usize)> {
        if self.bytes_filled <= kept {
            return None;
        }
        let (&at, _) = self.free.iter().max_by_key(|(_, free)| free.filled)?;
        let free = self.remove_free(at);
        let bytes = free.bytes;
        self.insert_free(at, Free { filled: 0, ..free });
        Some((at, bytes))
    }

    /// Returns the range in use that contains all bytes from `offset` to `offset + bytes`, together with its start.
    pub fn holding(&mut self, offset: usize, bytes: usize) -> Option<(usize, &mut Extent)> {
        let (&start, extent) = self.used.range_mut(..=offset).next_back()?;
        let inside = offset - start <= extent.bytes && bytes <= extent.bytes - (offset - start);
        inside.then_some((start, extent))
    }

    pub fn starting_at(&mut self, at: usize) -> Option<&mut Extent> {
        self.used.get_mut(&at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;

    #[test]
    fn ranges_are_whole_pages_and_never_overlap() {
        let mut extents = Extents::new(64 * PAGE, PAGE);
        let (mut held, mut seed) = (Vec::<(usize, usize)>::new(), 1u64);
        for _ in 0..if cfg!(miri) { 60 } else { 20_000 } {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let draw = (seed >> 33) as usize;
            if draw.is_multiple_of(2) {
                let bytes = draw / 2 % (9 * PAGE);
                let Some(at) = extents.take(bytes) else { continue };
                let end = at + bytes.max(1).next_multiple_of(PAGE);
                assert!(at.is_multiple_of(PAGE) && end <= 64 * PAGE);
                assert!(held.iter().all(|&(start, stop)| end <= start || stop <= at), "{at}..{end} of {held:?}");
                held.push((at, end));
            } else if !held.is_empty() {
                let (at, end) = held.swap_remove(draw / 2 % held.len());
                assert_eq!(extents.release(at).unwrap().bytes, end - at);
            }
            assert_eq!(extents.bytes_used(), held.iter().map(|(at, end)| end - at).sum::<usize>());
            assert!(extents.bytes_filled() + extents.bytes_used() <= 64 * PAGE);
        }
        for (at, _) in held {
            extents.release(at);
        }
        assert_eq!((extents.free.len(), extents.by_size.len(), extents.count()), (1, 1, 0), "joined again");
        assert_eq!(extents.take(64 * PAGE), Some(0));
        assert_eq!((extents.take(1), extents.release(5)).0, None);
    }

    #[test]
    fn filled_pages_beyond_what_is_kept_are_given_back_largest_first() {
        let mut extents = Extents::new(100 * PAGE, PAGE);
        let held: Vec<usize> = [10, 1, 20, 1, 5].iter().map(|pages| extents.take(pages * PAGE).unwrap()).collect();
        for at in [held[0], held[2], held[4]] {
            extents.release(at);
        }
        // The freed range was merged with the free range behind it, which was never filled.
        assert_eq!(extents.bytes_filled(), 35 * PAGE);
        assert_eq!(extents.to_give_back(35 * PAGE), None);
        assert_eq!(extents.to_give_back(10 * PAGE), Some((11 * PAGE, 20 * PAGE)));
        assert_eq!(extents.to_give_back(10 * PAGE), Some((0, 10 * PAGE)));
        assert_eq!((extents.to_give_back(10 * PAGE), extents.bytes_filled()), (None, 5 * PAGE));
    }

    #[test]
    fn a_range_that_was_taken_out_is_not_used_again() {
        let mut extents = Extents::new(4 * PAGE, PAGE);
        let at = extents.take(2 * PAGE).unwrap();
        extents.starting_at(at).unwrap().private.push(at..at + PAGE);
        assert!(extents.release(at).unwrap().is_taken_out());
        assert_eq!((extents.take(3 * PAGE), extents.take(2 * PAGE)), (None, Some(2 * PAGE)));
    }

    #[test]
    fn pages_are_made_private_once() {
        let mut extent = Extent { bytes: 100, holder: None, private: Vec::new() };
        let left = |extent: &Extent, pages| -> Vec<(usize, usize)> {
            extent.not_private(pages).into_iter().map(|part| (part.start, part.end)).collect()
        };
        assert_eq!(left(&extent, 10..30), [(10, 30)]);
        extent.private = vec![10..20, 50..60, 20..30];
        assert_eq!(left(&extent, 0..100), [(0, 10), (30, 50), (60, 100)]);
        assert_eq!(left(&extent, 15..55), [(30, 50)]);
        assert_eq!(left(&extent, 12..28), []);
    }

    #[test]
    fn filled_pages_are_not_forgotten_when_a_range_is_cut() {
        let mut extents = Extents::new(100 * PAGE, PAGE);
        let (one, two) = (extents.take(10 * PAGE).unwrap(), extents.take(10 * PAGE).unwrap());
        let last = extents.take(80 * PAGE).unwrap();
        extents.release(one);
        assert!(extents.to_give_back(0).is_some());
        extents.release(two);
        // The first ten pages are empty now, the next ten filled.
        assert_eq!(extents.take(10 * PAGE), Some(one));
        assert_eq!(extents.bytes_filled(), 10 * PAGE);
        extents.release(last);
    }

    #[test]
    fn a_piece_is_found_only_within_one_range() {
        let mut extents = Extents::new(8 * PAGE, PAGE);
        let (one, two) = (extents.take(2 * PAGE).unwrap(), extents.take(PAGE).unwrap());
        assert_eq!(extents.holding(one + 5, 2 * PAGE - 5).map(|(at, _)| at), Some(one));
        assert!(extents.holding(one + 5, 2 * PAGE).is_none(), "it would reach into the next one");
        assert_eq!(extents.holding(two, PAGE).map(|(at, _)| at), Some(two));
        assert!(extents.holding(two + PAGE, 1).is_none() && extents.holding(7 * PAGE, 1).is_none());
        assert!(extents.holding(one, usize::MAX).is_none());
    }
}
