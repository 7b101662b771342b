//! Decides which memory is passed to the library for a call: the caller's memory if the library can use it, otherwise
//! temporaries. The shim fills the temporaries before the call and copies them back after it. Pure. Ranks may decide
//! differently, because the decision does not change what is transferred.

use std::borrow::Cow;

use super::lowering::{Local, Lowering};
use crate::types::{Dtype, Few, Kind, Span, Spans};

/// The memory of a call as its caller passed it. The spans are in the order of the elements.
#[derive(Clone, Copy, Debug)]
pub struct Buffers<'a> {
    pub inputs: &'a [Span],
    pub outputs: &'a [Span],
    /// Bytes of each rank's block; empty if all blocks are equal.
    pub in_blocks: &'a [usize],
    pub out_blocks: &'a [usize],
}

/// One side of a call (input or output) as it is passed to the library.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Side {
    /// Size of the temporary in bytes; if it is set, the spans are offsets into the temporary. `None` if the spans are
    /// addresses of the caller's memory.
    pub temporary: Option<usize>,
    spans: Spans,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Input of the library. If it is a temporary, it holds the inputs contiguously, after the lowering's steps
    /// `before` were applied.
    pub send: Side,
    /// Output of the library. If it is a temporary, it is copied to the outputs after the lowering's steps `after` were
    /// applied.
    pub recv: Side,
    /// The library receives into the same temporary from which it sends.
    pub in_place: bool,
}

impl Side {
    fn whole(bytes: usize) -> Side {
        Side { temporary: Some(bytes), spans: Few::One(Span { addr: 0, bytes }) }
    }

    /// A temporary that holds these blocks contiguously.
    fn of_blocks(blocks: &[usize]) -> Side {
        let mut bytes = 0;
        let place = |block: &usize| {
            let span = Span { addr: bytes, bytes: *block };
            bytes += block;
            span
        };
        let spans = blocks.iter().map(place).collect();
        Side { temporary: Some(bytes), spans }
    }

    /// The spans as addresses. `base` is the address of the temporary, if there is one.
    pub fn at(&self, base: usize) -> Cow<'_, [Span]> {
        match self.temporary {
            None => Cow::Borrowed(&self.spans),
            Some(_) => self.spans.iter().map(|span| Span { addr: base + span.addr, bytes: span.bytes }).collect(),
        }
    }
}

impl Layout {
    /// The layout of a call of `kind` on tensors of `dtype`, in a group of `ranks` ranks.
    pub fn of(kind: Kind, dtype: Dtype, ranks: usize, buffers: &Buffers<'_>, lowering: &Lowering) -> Layout {
        if kind == Kind::Barrier {
            // A barrier sends one number. The shim creates it.
            return Layout { send: Side::whole(lowering.dtype.size()), recv: Side::default(), in_place: true };
        }
        let call =
            Placing { kind, ranks, buffers, lowering, item: dtype.size(), wire: wire_type(dtype, lowering).size() };
        let send = call.send();
        let gathered = send.temporary.is_some();
        let in_place = kind == Kind::AllReduce && lowering.kind == kind && gathered && !lowering.out_of_place;
        let recv = if in_place { Side::default() } else { call.receive(&send) };
        Layout { send, recv, in_place }
    }

    /// The memory into which the library receives. `send` and `recv` are the addresses of the temporaries.
    pub fn received(&self, send: usize, recv: usize) -> Cow<'_, [Span]> {
        if self.in_place { self.send.at(send) } else { self.recv.at(recv) }
    }
}

/// The element type that is transferred.
fn wire_type(dtype: Dtype, lowering: &Lowering) -> Dtype {
    let cast = lowering.before.iter().rev().find_map(|step| match step {
        Local::Cast(to) => Some(*to),
        _ => None,
    });
    cast.unwrap_or(dtype)
}

struct Placing<'a> {
    kind: Kind,
    ranks: usize,
    buffers: &'a Buffers<'a>,
    lowering: &'a Lowering,
    /// Element size in the caller's dtype and in the wire dtype.
    item: usize,
    wire: usize,
}

impl Placing<'_> {
    fn on_wire(&self, bytes: usize) -> usize {
        bytes / self.item * self.wire
    }

    fn send(&self) -> Side {
        let Buffers { inputs, in_blocks, .. } = *self.buffers;
        let cut = matches!(self.kind, Kind::Scatter | Kind::ReduceScatter | Kind::AllToAll);
        if self.lowering.before.is_empty()
            && !self.lowering.clobbers_input
            && let Some(spans) = self.as_they_lie(inputs, in_blocks, cut)
        {
            return Side { temporary: None, spans };
        }
        if inputs.is_empty() { Side::default() } else { self.temporary(inputs, in_blocks, cut) }
    }

    fn receive(&self, send: &Side) -> Side {
        let Buffers { inputs, outputs, out_blocks, .. } = *self.buffers;
        let (asked, kind) = (self.kind, self.lowering.kind);
        if outputs.is_empty() && (asked, kind) != (Kind::AllReduce, Kind::AllGather) {
            return Side::default();
        }
        let cut = matches!(asked, Kind::AllGather | Kind::Gather | Kind::AllToAll);
        let conflict = self.lowering.out_of_place && send.temporary.is_none() && any_overlap(inputs, outputs);
        if self.lowering.after.is_empty()
            && !conflict
            && let Some(spans) = self.as_they_lie(outputs, out_blocks, cut)
        {
            return Side { temporary: None, spans };
        }
        if kind == asked {
            return self.temporary(outputs, out_blocks, cut);
        }
        // The temporary receives the data of all ranks.
        let each = if kind == Kind::AllToAll { self.on_wire(total(outputs)) } else { total(&send.spans) };
        Side::of_blocks(&vec![each; self.ranks])
    }

    fn temporary(&self, spans: &[Span], blocks: &[usize], cut: bool) -> Side {
        if !cut {
            return Side::whole(self.on_wire(total(spans)));
        }
        let blocks = self.blocks(spans, blocks);
        Side::of_blocks(&blocks.iter().map(|bytes| self.on_wire(*bytes)).collect::<Vec<_>>())
    }

    /// Bytes of each rank's block.
    fn blocks(&self, spans: &[Span], blocks: &[usize]) -> Vec<usize> {
        if blocks.is_empty() { vec![total(spans) / self.ranks; self.ranks] } else { blocks.to_vec() }
    }

    /// Returns the caller's memory as spans that the library can use directly. `None` if a temporary is needed. `cut`:
    /// the memory consists of one block for each rank.
    fn as_they_lie(&self, spans: &[Span], blocks: &[usize], cut: bool) -> Option<Spans> {
        let run = as_run(spans);
        match run {
            _ if spans.is_empty() && cut => Some(vec![Span { addr: 0, bytes: 0 }; blocks.len()].into()),
            Some(run) if !cut || blocks.is_empty() => Some(run),
            None if !cut || self.lowering.contiguous => None,
            _ => per_rank(spans, &self.blocks(spans, blocks)).map(Spans::from),
        }
    }
}

fn total(spans: &[Span]) -> usize {
    spans.iter().map(|span| span.bytes).sum()
}

fn any_overlap(left: &[Span], right: &[Span]) -> bool {
    let meet = |a: &Span, b: &Span| a.addr.max(b.addr) < (a.addr + a.bytes).min(b.addr + b.bytes);
    left.iter().any(|a| right.iter().any(|b| meet(a, b)))
}

/// Joins all spans into one span if each begins where the previous one ends; otherwise returns `None`. An empty list
/// stays empty.
fn as_run(spans: &[Span]) -> Option<Spans> {
    let behind = spans.windows(2).all(|pair| pair[1].addr == pair[0].addr + pair[0].bytes);
    behind.then(|| spans.first().map(|first| Span { addr: first.addr, bytes: total(spans) }).into_iter().collect())
}

/// Returns one span for each block if every block is contiguous; otherwise `None`.
fn per_rank(spans: &[Span], blocks: &[usize]) -> Option<Vec<Span>> {
    let mut rest = spans.iter().copied();
    let mut left = Span { addr: 0, bytes: 0 };
    let mut found = Vec::with_capacity(blocks.len());
    for bytes in blocks {
        let mut block = Span { addr: 0, bytes: 0 };
        while block.bytes < *bytes {
            if left.bytes == 0 {
                left = rest.next()?;
            }
            if block.bytes == 0 {
                block.addr = left.addr;
            } else if left.addr != block.addr + block.bytes {
                return None;
            }
            let take = left.bytes.min(bytes - block.bytes);
            block.bytes += take;
            left = Span { addr: left.addr + take, bytes: left.bytes - take };
        }
        found.push(block);
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::device::Vendor;
    use crate::engine::device::lowering::{LoweringInput, lower};
    use crate::types::ReduceOp;

    fn spans(of: &[(usize, usize)]) -> Vec<Span> {
        of.iter().map(|&(addr, bytes)| Span { addr, bytes }).collect()
    }

    fn layout(
        vendor: Vendor,
        (kind, dtype, op): (Kind, Dtype, ReduceOp),
        inputs: &[(usize, usize)],
        outputs: &[(usize, usize)],
        blocks: &[usize],
    ) -> Layout {
        let (inputs, outputs) = (spans(inputs), spans(outputs));
        let asked = LoweringInput { kind, dtype, op, ranks: 2, equal_counts: blocks.is_empty(), dense: true };
        let lowering = lower(&asked, &vendor.capabilities()).unwrap();
        let buffers = Buffers { inputs: &inputs, outputs: &outputs, in_blocks: blocks, out_blocks: blocks };
        Layout::of(kind, dtype, 2, &buffers, &lowering)
    }

    const SUM: (Kind, Dtype, ReduceOp) = (Kind::AllReduce, Dtype::F32, ReduceOp::Sum);

    #[test]
    fn memory_that_serves_is_handed_over_as_it_lies() {
        let one = layout(Vendor::Nccl, SUM, &[(64, 8), (72, 8)], &[(64, 8), (72, 8)], &[]);
        assert_eq!((one.send.temporary, one.recv.temporary, one.in_place), (None, None, false));
        assert_eq!((&*one.send.at(5), &*one.received(5, 7)), (&spans(&[(64, 16)])[..], &spans(&[(64, 16)])[..]));
        // If the library gets each block separately, the blocks do not have to be contiguous.
        let moved = (Kind::AllToAll, Dtype::F32, ReduceOp::Sum);
        let parts = [(64, 8), (512, 8)];
        assert_eq!(*layout(Vendor::Nccl, moved, &parts, &parts, &[]).send.at(0), spans(&parts)[..]);
        let flat = layout(Vendor::Hccl, moved, &parts, &parts, &[]);
        assert_eq!((flat.send.temporary, flat.recv.temporary), (Some(16), Some(16)));
        assert_eq!(*flat.received(100, 200), spans(&[(200, 8), (208, 8)])[..]);
    }

    #[test]
    fn tensors_behind_gaps_and_casts_go_through_temporaries_in_the_type_that_travels() {
        let list = layout(Vendor::Nccl, SUM, &[(64, 8), (128, 8)], &[(64, 8), (128, 8)], &[]);
        assert_eq!((list.send.temporary, list.in_place), (Some(16), true));
        assert_eq!(*list.received(1000, 0), spans(&[(1000, 16)])[..]);
        // NCCL does not reduce 16-bit integers, so they are sent as 32-bit integers.
        let short = (Kind::ReduceScatter, Dtype::I16, ReduceOp::Sum);
        let wide = layout(Vendor::Nccl, short, &[(64, 8)], &[(128, 4)], &[]);
        assert_eq!(*wide.send.at(0), spans(&[(0, 8), (8, 8)])[..]);
        assert_eq!((wide.recv.temporary, &*wide.received(0, 32)), (Some(8), &spans(&[(32, 8)])[..]));
        // This operation is composed of an all_gather and local steps.
        let fold = (Kind::AllReduce, Dtype::I32, ReduceOp::Band);
        assert_eq!(layout(Vendor::Nccl, fold, &[(64, 8)], &[(64, 8)], &[]).recv.temporary, Some(16));
    }

    #[test]
    fn what_a_library_reads_and_writes_at_once_is_kept_apart() {
        let moved = (Kind::AllToAll, Dtype::U8, ReduceOp::Sum);
        let apart = layout(Vendor::Hccl, moved, &[(64, 8)], &[(128, 8)], &[]);
        assert_eq!((apart.send.temporary, apart.recv.temporary), (None, None));
        assert_eq!(layout(Vendor::Hccl, moved, &[(64, 8)], &[(68, 8)], &[]).recv.temporary, Some(8));
        let uneven = layout(Vendor::Nccl, moved, &[(64, 8)], &[(128, 8)], &[2, 6]);
        assert_eq!(*uneven.send.at(0), spans(&[(64, 2), (66, 6)])[..]);
        // If a rank has no data, it has an empty block for each rank.
        assert_eq!(layout(Vendor::Nccl, moved, &[], &[], &[0, 0]).send.at(0).len(), 2);
    }
}
