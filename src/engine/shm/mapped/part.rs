//! Computes each rank's part of an operation on tensors that peers can reach. Pure.

use crate::types::Kind;

/// The numbers that determine a rank's part. `in_blocks` and `out_blocks` are as in `Request`.
#[derive(Clone, Copy, Debug)]
pub struct Shape<'a> {
    pub kind: Kind,
    pub me: usize,
    pub ranks: usize,
    pub root: usize,
    pub total_in: usize,
    pub total_out: usize,
    pub in_blocks: &'a [usize],
    pub out_blocks: &'a [usize],
}

/// A range that this rank copies from the inputs of rank `peer`, at `from`, to its own outputs, at `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub peer: usize,
    pub from: usize,
    pub to: usize,
    pub bytes: usize,
}

/// One rank's part of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    Copy(Vec<Piece>),
    /// Combines `bytes` of all ranks' inputs at `from`, and writes them into the outputs of `targets` at `to`.
    Fold {
        from: usize,
        to: usize,
        bytes: usize,
        targets: Vec<usize>,
    },
}

/// Whether operations of this kind are mapped if possible: those in which every rank has a part. In a broadcast,
/// scatter or gather, the root and the other ranks would not copy at the same time. A mapped broadcast of 16 MiB took
/// 1.09 times as long as a staged one, in which root and receivers copy at the same time (2 ranks, AMD EPYC,
/// 2026-11-25).
pub fn is_shared_by_all(kind: Kind) -> bool {
    matches!(kind, Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter | Kind::AllGather | Kind::AllToAll)
}

/// Whether other ranks write into the outputs of rank `me`.
pub fn exposes_outputs(kind: Kind, me: usize, root: usize) -> bool {
    kind == Kind::AllReduce || kind == Kind::Reduce && me == root
}

fn block(blocks: &[usize], total: usize, ranks: usize, q: usize) -> usize {
    if blocks.is_empty() { total / ranks } else { blocks[q] }
}

fn start(blocks: &[usize], total: usize, ranks: usize, q: usize) -> usize {
    if blocks.is_empty() { total / ranks * q } else { blocks[..q].iter().sum() }
}

/// The slice of `bytes` bytes that rank `q` combines: start and length, cut at cache lines.
fn slice(bytes: usize, ranks: usize, q: usize) -> (usize, usize) {
    let each = bytes.div_ceil(ranks).next_multiple_of(64);
    let start = (q * each).min(bytes);
    (start, each.min(bytes - start))
}

impl Part {
    /// `tables` is for all_to_all: each rank's block sizes, None if its blocks were in its slot.
    pub fn of(shape: &Shape, tables: &[Option<Vec<usize>>]) -> Part {
        let &Shape { kind, me, ranks, root, total_in, total_out, in_blocks, out_blocks } = shape;
        match kind {
            Kind::AllReduce | Kind::Reduce => {
                let (from, bytes) = slice(total_in, ranks, me);
                let targets = if kind == Kind::AllReduce { (0..ranks).collect() } else { vec![root] };
                Part::Fold { from, to: from, bytes, targets }
            }
            Kind::ReduceScatter => {
                let from = start(in_blocks, total_in, ranks, me);
                Part::Fold { from, to: 0, bytes: block(in_blocks, total_in, ranks, me), targets: vec![me] }
            }
            // The whole input of each rank becomes a block of the output.
            Kind::AllGather => {
                let pieces = others_first(me, ranks).map(|peer| Piece {
                    peer,
                    from: 0,
                    to: start(out_blocks, total_out, ranks, peer),
                    bytes: block(out_blocks, total_out, ranks, peer),
                });
                Part::Copy(pieces.collect())
            }
            Kind::AllToAll => {
                let pieces = others_first(me, ranks).filter_map(|peer| {
                    let table = tables[peer].as_ref()?;
                    let from = table[..me].iter().fold(0, |sum: usize, bytes| sum.saturating_add(*bytes));
                    let to = start(out_blocks, total_out, ranks, peer);
                    Some(Piece { peer, from, to, bytes: block(out_blocks, total_out, ranks, peer) })
                });
                Part::Copy(pieces.collect())
            }
            _ => unreachable!("never offered"),
        }
    }

    /// Length of the part in bytes.
    pub fn bytes(&self) -> usize {
        match self {
            Part::Copy(pieces) => pieces.iter().map(|piece| piece.bytes).sum(),
            Part::Fold { bytes, .. } => *bytes,
        }
    }

    /// Returns a rank whose inputs (`inputs[rank]` bytes) or outputs (`outputs[rank]` bytes) are too small for this
    /// part. The sizes come from the ranks' slots, so nothing about them is assumed.
    pub fn too_small(&self, inputs: &[usize], outputs: &[usize]) -> Option<usize> {
        let within = |from: usize, bytes: usize, total: usize| from <= total && bytes <= total - from;
        match self {
            Part::Copy(pieces) => {
                pieces.iter().find(|piece| !within(piece.from, piece.bytes, inputs[piece.peer])).map(|piece| piece.peer)
            }
            Part::Fold { from, to, bytes, targets } => {
                let input = inputs.iter().position(|total| !within(*from, *bytes, *total));
                input.or_else(|| targets.iter().copied().find(|rank| !within(*to, *bytes, outputs[*rank])))
            }
        }
    }
}

/// All ranks, starting with the one after `me` so that not all read from the same rank at once. `me` is last.
fn others_first(me: usize, ranks: usize) -> impl Iterator<Item = usize> {
    (1..=ranks).map(move |step| (me + step) % ranks)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(kind: Kind, me: usize, ranks: usize, total_in: usize, total_out: usize) -> Shape<'static> {
        Shape { kind, me, ranks, root: 0, total_in, total_out, in_blocks: &[], out_blocks: &[] }
    }

    #[test]
    fn the_parts_of_an_all_reduce_cover_every_byte_once() {
        for ranks in 1..9 {
            for bytes in [0, 4, 64, 100, 4096, 12_345 * 4] {
                let mut next = 0;
                for me in 0..ranks {
                    let part = Part::of(&shape(Kind::AllReduce, me, ranks, bytes, bytes), &[]);
                    let Part::Fold { from, to, bytes: length, ref targets } = part else { panic!("{part:?}") };
                    assert_eq!((from, to, targets.len()), (next, next, ranks));
                    assert_eq!(part.too_small(&vec![bytes; ranks], &vec![bytes; ranks]), None);
                    if length > 0 {
                        assert_eq!(part.too_small(&vec![next + length - 1; ranks], &vec![bytes; ranks]), Some(0));
                    }
                    next += length;
                }
                assert_eq!(next, bytes, "{ranks} ranks");
            }
        }
    }

    #[test]
    fn blocks_of_different_sizes_go_where_the_lists_say() {
        let blocks = [8, 0, 24];
        let of = |kind, me, total_in, total_out| Shape {
            in_blocks: &blocks,
            out_blocks: &blocks,
            ..shape(kind, me, 3, total_in, total_out)
        };
        let part = Part::of(&of(Kind::ReduceScatter, 2, 32, 24), &[]);
        assert_eq!(part, Part::Fold { from: 8, to: 0, bytes: 24, targets: vec![2] });
        let part = Part::of(&of(Kind::AllGather, 1, 0, 32), &[]);
        let piece = |peer, to, bytes| Piece { peer, from: 0, to, bytes };
        assert_eq!(part, Part::Copy(vec![piece(2, 8, 24), piece(0, 0, 8), piece(1, 8, 0)]));
        let tables = [Some(vec![5, 8, 1]), None, Some(vec![9, 24, 2])];
        let part = Part::of(&of(Kind::AllToAll, 1, 32, 32), &tables);
        let expected = [Piece { peer: 2, from: 9, to: 8, bytes: 24 }, Piece { peer: 0, from: 5, to: 0, bytes: 8 }];
        assert_eq!(part, Part::Copy(expected.to_vec()));
        let too_small = [[13, 0, 33], [12, 0, 33], [13, 0, 32]].map(|inputs| part.too_small(&inputs, &[]));
        assert_eq!(too_small, [None, Some(0), Some(2)]);
    }

    #[test]
    fn sizes_that_a_peer_made_up_are_refused() {
        let part = Part::of(&shape(Kind::AllToAll, 1, 2, 8, 8), &[Some(vec![usize::MAX, 4]), None]);
        assert_eq!(part.too_small(&[8, 8], &[]), Some(0));
    }
}
