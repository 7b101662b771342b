//! The elements of a batch as one vector: the concatenated spans of caller memory, divided into runs of one element
//! type.

#![allow(unsafe_code)] // copies and reduces caller memory, which comes as addresses

use std::ops::Range;

use crate::engine::pieces::{Pieces, transfer};
use crate::error::Result;
use crate::reduce;
use crate::reduce::Kernel;
use crate::types::{Dtype, ReduceOp, Span};

/// Consecutive elements of one type.
#[derive(Clone)]
pub struct Run {
    pub bytes: Range<usize>,
    pub dtype: Dtype,
    /// Reduces the elements of all ranks in one call, with the caller's reduce op.
    whole: Kernel,
    /// Combines partial results, each from some of the ranks, with the caller's reduce op. AVG and PREMUL_SUM use SUM:
    /// for AVG `last` divides, and partial results of PREMUL_SUM already contain the factors.
    part: Kernel,
    /// For AVG: divides by the number of ranks.
    last: Option<Kernel>,
}

#[derive(Clone)]
pub struct Vector {
    pub op: ReduceOp,
    pub inputs: Vec<Span>,
    pub outputs: Vec<Span>,
    pub runs: Vec<Run>,
}

/// Returns the reduce op that combines partial results.
pub fn partial(op: ReduceOp) -> ReduceOp {
    match op {
        ReduceOp::Avg | ReduceOp::PremulSum(_) => ReduceOp::Sum,
        other => other,
    }
}

impl Vector {
    pub fn new(op: ReduceOp) -> Vector {
        Vector { op, inputs: Vec::new(), outputs: Vec::new(), runs: Vec::new() }
    }

    /// Appends elements. They extend the last run if the type is the same.
    pub fn push(&mut self, dtype: Dtype, inputs: &[Span], outputs: &[Span], ranks: usize) -> Result<()> {
        let (start, bytes) = (self.bytes(), Pieces(inputs).bytes());
        self.inputs.extend(inputs);
        self.outputs.extend(outputs);
        match self.runs.last_mut() {
            Some(run) if run.dtype == dtype => run.bytes.end += bytes,
            _ => self.runs.push(Run {
                bytes: start..start + bytes,
                dtype,
                whole: reduce::kernel(dtype, self.op, ranks)?,
                part: reduce::kernel(dtype, partial(self.op), 1)?,
                last: if self.op == ReduceOp::Avg { Some(reduce::kernel(dtype, self.op, ranks)?) } else { None },
            }),
        }
        Ok(())
    }

    pub fn bytes(&self) -> usize {
        self.runs.last().map_or(0, |run| run.bytes.end)
    }

    /// Returns the largest element boundary at or below `at`.
    fn border(&self, at: usize) -> usize {
        let run = self.runs.iter().find(|run| at < run.bytes.end);
        run.map_or(at, |run| at - (at - run.bytes.start) % run.dtype.size())
    }

    /// Returns the size of the segments into which messages of these elements are cut. A message must be cut between
    /// two elements, so a vector of several types is not cut.
    pub fn segment(&self) -> usize {
        /// A segment and the elements with which it is combined fit into a core's cache.
        const SEGMENT: usize = 256 << 10;
        if self.runs.len() > 1 { usize::MAX } else { SEGMENT }
    }

    /// Returns part `part` of `range`, which is cut between elements into `parts` nearly equal parts.
    pub fn part(&self, range: &Range<usize>, part: usize, parts: usize) -> Range<usize> {
        let cut = |n: usize| match n {
            0 => range.start,
            n if n == parts => range.end,
            // Cuts at cache lines, so that two adjacent parts share no line.
            n => self.border(range.start + ((range.len() as u128 * n as u128 / parts as u128) as usize & !63)),
        };
        cut(part)..cut(part + 1)
    }

    /// Computes `own = theirs op own`, or `own op theirs` if `own_first`, for the bytes `at..at + own.len()` of the
    /// vector.
    pub fn combine(&self, at: usize, own: &mut [u8], theirs: &[u8], own_first: bool) {
        assert_eq!(own.len(), theirs.len(), "parts of one length");
        self.each(at..at + own.len(), |run, range| {
            let (own, theirs) = (&mut own[range.start - at..range.end - at], &theirs[range.start - at..range.end - at]);
            let (dst, other) = (own.as_mut_ptr(), theirs.as_ptr());
            let sources = if own_first { [dst.cast_const(), other] } else { [other, dst.cast_const()] };
            // SAFETY: both slices have the length of `range`. The destination is exactly one of the sources and does
            // not overlap the other.
            unsafe { run.part.reduce(dst, &sources, &[], range.len() / run.dtype.size()) };
        });
    }

    /// Combines partial results in the order of `parts`; None stands for the elements in `own`, which receives the
    /// result. Low precision is rounded once.
    pub fn combine_parts(&self, at: usize, own: &mut [u8], parts: &[Option<&[u8]>]) {
        let bytes = own.len();
        assert!(parts.iter().flatten().all(|part| part.len() == bytes), "parts of one length");
        self.each(at..at + bytes, |run, range| {
            let offset = range.start - at;
            let dst = own[offset..offset + range.len()].as_mut_ptr();
            let sources: Vec<*const u8> =
                parts.iter().map(|part| part.map_or(dst.cast_const(), |part| part[offset..].as_ptr())).collect();
            // SAFETY: every part has the bytes of `range` at its offset. The destination is exactly one of the sources
            // and overlaps none of the others, which are shared slices.
            unsafe { run.part.reduce(dst, &sources, &[], range.len() / run.dtype.size()) };
        });
    }

    /// Starts a partial result: copies this rank's elements, beginning at offset `at`, and multiplies them by the
    /// factor of PREMUL_SUM.
    pub fn start(&self, at: usize, to: &mut [u8]) {
        copy_in(&self.inputs, at, to);
        if let ReduceOp::PremulSum(factor) = self.op {
            self.each(at..at + to.len(), |run, range| {
                let dst = to[range.start - at..range.end - at].as_mut_ptr();
                // SAFETY: the slice has the length of `range`. The kernel works in place on its only source.
                unsafe { run.whole.reduce(dst, &[dst.cast_const()], &[factor], range.len() / run.dtype.size()) };
            });
        }
    }

    /// Finishes a result that includes all ranks: for AVG it divides.
    pub fn finish(&self, at: usize, numbers: &mut [u8]) {
        self.each(at..at + numbers.len(), |run, range| {
            let Some(last) = &run.last else { return };
            let dst = numbers[range.start - at..range.end - at].as_mut_ptr();
            // SAFETY: the slice has the length of `range`. The kernel works in place on its only source.
            unsafe { last.reduce(dst, &[dst.cast_const()], &[], range.len() / run.dtype.size()) };
        });
    }

    /// Combines the original elements of all ranks in rank order, so the result has the same bits as on one host.
    /// `sources` has `to.len()` bytes per rank, concatenated.
    pub fn combine_all(&self, at: usize, to: &mut [u8], sources: &[u8], factors: &[f64]) {
        let bytes = to.len();
        assert!(bytes == 0 || sources.len() == bytes * factors.len(), "one range a rank");
        self.each(at..at + bytes, |run, range| {
            let offset = range.start - at;
            let from: Vec<*const u8> = (0..factors.len()).map(|q| sources[q * bytes + offset..].as_ptr()).collect();
            let dst = to[offset..offset + range.len()].as_mut_ptr();
            // SAFETY: every source has the bytes of `range` at its offset, as checked above. The destination overlaps
            // none of the sources.
            unsafe { run.whole.reduce(dst, &from, factors, range.len() / run.dtype.size()) };
        });
    }

    /// Calls `each` with every run and its part of `range`.
    fn each(&self, range: Range<usize>, mut each: impl FnMut(&Run, Range<usize>)) {
        for run in &self.runs {
            let common = range.start.max(run.bytes.start)..range.end.min(run.bytes.end);
            if common.start < common.end {
                each(run, common);
            }
        }
    }
}

/// Returns the spans that hold the bytes `range` of a list.
pub fn cut(spans: &[Span], range: &Range<usize>) -> Vec<Span> {
    let mut found = Vec::new();
    let mut start = 0;
    for span in spans {
        let (from, to) = (range.start.max(start), range.end.min(start + span.bytes));
        if from < to {
            found.push(Span { addr: span.addr + (from - start), bytes: to - from });
        }
        start += span.bytes;
    }
    found
}

/// Copies from caller memory, beginning at offset `at`, to a buffer. The buffer may be that memory itself.
pub fn copy_in(spans: &[Span], at: usize, to: &mut [u8]) {
    // SAFETY: by the contract of `Request`, its spans are valid until the operation has ended, and two pieces of an
    // operation's memory are identical or disjoint.
    unsafe { transfer(Pieces(spans), at, Pieces(&[written(to)]), 0, to.len()) };
}

/// Copies a buffer to caller memory, beginning at offset `at`. The buffer may be that memory itself.
pub fn copy_out(spans: &[Span], at: usize, from: &[u8]) {
    // SAFETY: as in `copy_in`; only the operation itself writes its outputs.
    unsafe { transfer(Pieces(&[span(from)]), 0, Pieces(spans), at, from.len()) };
}

/// Copies one list to another list of the same size. Both may be the same memory.
pub fn copy_across(from: &[Span], to: &[Span]) {
    // SAFETY: as in `copy_in` and `copy_out`.
    unsafe { transfer(Pieces(from), 0, Pieces(to), 0, Pieces(from).bytes()) };
}

/// Returns the memory of a list as one slice. None unless the list has exactly one span, which is not empty.
///
/// # Safety
/// The memory must be valid, and unused by others, as long as the slice lives.
pub unsafe fn whole<'a>(spans: &[Span]) -> Option<&'a mut [u8]> {
    let [one] = spans else { return None };
    // SAFETY: the caller vouches for the memory.
    (one.bytes > 0).then(|| unsafe { std::slice::from_raw_parts_mut(one.addr as *mut u8, one.bytes) })
}

/// Returns a buffer as a span.
pub fn span(buffer: &[u8]) -> Span {
    Span { addr: buffer.as_ptr() as usize, bytes: buffer.len() }
}

/// Returns a writable buffer as a span.
pub fn written(buffer: &mut [u8]) -> Span {
    Span { addr: buffer.as_mut_ptr() as usize, bytes: buffer.len() }
}
