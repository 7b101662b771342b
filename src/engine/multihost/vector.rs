//! The numbers of a batch as one vector: the spans of caller memory one after the other, in runs of one type each.

#![allow(unsafe_code)] // copies and reduces caller memory, which comes as addresses

use std::ops::Range;

use crate::engine::pieces::{Pieces, transfer};
use crate::error::Result;
use crate::reduce;
use crate::reduce::Kernel;
use crate::types::{Dtype, ReduceOp, Span};

/// Numbers of one type.
#[derive(Clone)]
pub struct Run {
    pub bytes: Range<usize>,
    pub dtype: Dtype,
    /// Reduces the numbers of all ranks at once, as the caller asked.
    whole: Kernel,
    /// Reduces those of some ranks: as `whole`, but AVG only adds, and factors were applied before.
    part: Kernel,
    /// Divides by the number of ranks, for AVG.
    last: Option<Kernel>,
}

#[derive(Clone)]
pub struct Vector {
    pub op: ReduceOp,
    pub inputs: Vec<Span>,
    pub outputs: Vec<Span>,
    pub runs: Vec<Run>,
}

/// The reduce op that combines partial results.
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

    /// Appends numbers; a run continues where the type does not change.
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

    /// The largest element boundary at or below `at`.
    fn border(&self, at: usize) -> usize {
        let run = self.runs.iter().find(|run| at < run.bytes.end);
        run.map_or(at, |run| at - (at - run.bytes.start) % run.dtype.size())
    }

    /// Bytes after which a message of these numbers may be cut, which is between two elements: its parts are whole elements of
    /// one type.
    pub fn segment(&self) -> usize {
        /// A segment and what it is combined with stay in a core's cache.
        const SEGMENT: usize = 256 << 10;
        if self.runs.len() > 1 { usize::MAX } else { SEGMENT }
    }

    /// Part `part` of `parts` nearly equal parts of `range`, cut between elements.
    pub fn part(&self, range: &Range<usize>, part: usize, parts: usize) -> Range<usize> {
        let cut = |n: usize| match n {
            0 => range.start,
            n if n == parts => range.end,
            // Cuts at cache lines keep the vector loops of one part from sharing a line with the next.
            n => self.border(range.start + ((range.len() as u128 * n as u128 / parts as u128) as usize & !63)),
        };
        cut(part)..cut(part + 1)
    }

    /// `own = own op theirs`, or with the operands swapped, for the bytes `at..at + own.len()` of the vector.
    pub fn combine(&self, at: usize, own: &mut [u8], theirs: &[u8], own_first: bool) {
        assert_eq!(own.len(), theirs.len(), "parts of one length");
        self.each(at..at + own.len(), |run, range| {
            let (own, theirs) = (&mut own[range.start - at..range.end - at], &theirs[range.start - at..range.end - at]);
            let (dst, other) = (own.as_mut_ptr(), theirs.as_ptr());
            let sources = if own_first { [dst.cast_const(), other] } else { [other, dst.cast_const()] };
            // SAFETY: both slices hold `range`; the destination is exactly one of the sources and does not overlap the
            // other.
            unsafe { run.part.reduce(dst, &sources, &[], range.len() / run.dtype.size()) };
        });
    }

    /// Combines partial results in the order of the list; low precision is rounded once.
    pub fn combine_parts(&self, at: usize, to: &mut [u8], parts: &[&[u8]]) {
        let bytes = to.len();
        assert!(parts.iter().all(|part| part.len() == bytes), "parts of one length");
        self.each(at..at + bytes, |run, range| {
            let offset = range.start - at;
            let from: Vec<*const u8> = parts.iter().map(|part| part[offset..].as_ptr()).collect();
            let dst = to[offset..offset + range.len()].as_mut_ptr();
            // SAFETY: every part holds `range` from its offset on; the destination overlaps none of them.
            unsafe { run.part.reduce(dst, &from, &[], range.len() / run.dtype.size()) };
        });
    }

    /// Copies this rank's numbers at `at..`, multiplied by its factor where the op has one: the start of a partial
    /// result.
    pub fn start(&self, at: usize, to: &mut [u8]) {
        copy_in(&self.inputs, at, to);
        if let ReduceOp::PremulSum(factor) = self.op {
            self.each(at..at + to.len(), |run, range| {
                let dst = to[range.start - at..range.end - at].as_mut_ptr();
                // SAFETY: the slice holds `range`; in place on the only source.
                unsafe { run.whole.reduce(dst, &[dst.cast_const()], &[factor], range.len() / run.dtype.size()) };
            });
        }
    }

    /// The last step when all ranks are in: AVG divides.
    pub fn finish(&self, at: usize, numbers: &mut [u8]) {
        self.each(at..at + numbers.len(), |run, range| {
            let Some(last) = &run.last else { return };
            let dst = numbers[range.start - at..range.end - at].as_mut_ptr();
            // SAFETY: the slice holds `range`; in place on the only source.
            unsafe { last.reduce(dst, &[dst.cast_const()], &[], range.len() / run.dtype.size()) };
        });
    }

    /// Combines the original numbers of all ranks, in the order of the ranks: the bits of one host. `sources` holds one
    /// range of `to.len()` bytes per rank, one after the other.
    pub fn combine_all(&self, at: usize, to: &mut [u8], sources: &[u8], factors: &[f64]) {
        let bytes = to.len();
        assert!(bytes == 0 || sources.len() == bytes * factors.len(), "one range a rank");
        self.each(at..at + bytes, |run, range| {
            let offset = range.start - at;
            let from: Vec<*const u8> = (0..factors.len()).map(|q| sources[q * bytes + offset..].as_ptr()).collect();
            let dst = to[offset..offset + range.len()].as_mut_ptr();
            // SAFETY: every source holds `range` from its offset on, checked above; the destination overlaps none of
            // them.
            unsafe { run.whole.reduce(dst, &from, factors, range.len() / run.dtype.size()) };
        });
    }

    /// Calls `each` for every run's part of `range`.
    fn each(&self, range: Range<usize>, mut each: impl FnMut(&Run, Range<usize>)) {
        for run in &self.runs {
            let common = range.start.max(run.bytes.start)..range.end.min(run.bytes.end);
            if common.start < common.end {
                each(run, common);
            }
        }
    }
}

/// The spans that hold the bytes `range` of a list.
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

/// Copies caller memory at `at..` to a buffer, which may be that memory itself.
pub fn copy_in(spans: &[Span], at: usize, to: &mut [u8]) {
    // SAFETY: the contract of `Request`: its spans are valid until the operation has ended, and memory of an operation is the
    // same or does not overlap.
    unsafe { transfer(Pieces(spans), at, Pieces(&[written(to)]), 0, to.len()) };
}

/// Copies a buffer to caller memory at `at..`, which may be the buffer itself.
pub fn copy_out(spans: &[Span], at: usize, from: &[u8]) {
    // SAFETY: as for `copy_in`; only their operation writes its outputs.
    unsafe { transfer(Pieces(&[span(from)]), 0, Pieces(spans), at, from.len()) };
}

/// Copies one list to another one of its size, which may be the same memory.
pub fn copy_across(from: &[Span], to: &[Span]) {
    // SAFETY: as for `copy_in` and `copy_out`.
    unsafe { transfer(Pieces(from), 0, Pieces(to), 0, Pieces(from).bytes()) };
}

/// The memory of a list as one slice, where it is in one piece.
///
/// # Safety
/// The memory is valid, and nobody else uses it, as long as the slice lives.
pub unsafe fn whole<'a>(spans: &[Span]) -> Option<&'a mut [u8]> {
    let [one] = spans else { return None };
    // SAFETY: as the caller vouches.
    (one.bytes > 0).then(|| unsafe { std::slice::from_raw_parts_mut(one.addr as *mut u8, one.bytes) })
}

/// A buffer as a span.
pub fn span(buffer: &[u8]) -> Span {
    Span { addr: buffer.as_ptr() as usize, bytes: buffer.len() }
}

/// A writable buffer as a span.
pub fn written(buffer: &mut [u8]) -> Span {
    Span { addr: buffer.as_mut_ptr() as usize, bytes: buffer.len() }
}
