//! Computes each rank's part of an operation on tensors that peers can reach. Pure.

use std::ops::Range;

use crate::engine::shm::nodes::{Neighbours, Nodes};
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
    pub nodes: &'a Nodes,
}

/// A range that this rank copies from the inputs of rank `source`, at `from`, to the outputs of rank `target`, at `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub source: usize,
    pub from: usize,
    pub target: usize,
    pub to: usize,
    pub bytes: usize,
}

/// One rank's part of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    Copy(Vec<Piece>),
    /// Copies `bytes` of rank `root`'s inputs at `at` into the outputs of `targets` at `at`.
    Spread {
        root: usize,
        at: usize,
        bytes: usize,
        targets: Vec<usize>,
    },
    /// Combines `bytes` of all ranks' inputs at `from`, and writes them into the outputs of `targets` at `to`.
    Fold {
        from: usize,
        to: usize,
        bytes: usize,
        targets: Vec<usize>,
    },
    /// Combines `bytes` of the inputs of this rank's node at `from` with the sums of rank `neighbours.before`, for rank
    /// `neighbours.after` or, on the last node, into the outputs of `targets`. If `delivers`, then copies the result from the
    /// output of `neighbours.after` into the outputs of `targets`.
    Relay {
        neighbours: Neighbours,
        from: usize,
        bytes: usize,
        targets: Vec<usize>,
        delivers: bool,
    },
}

/// Operations of at least this size are mapped if possible.
const FROM: usize = 16 << 10;
/// A broadcast of at least this size, and a scatter or gather whose blocks have at least this size, are mapped if
/// possible. Smaller ones are staged, so that a rank that only sends can return as soon as its data is staged, before
/// the other ranks have called.
const ROOTED_FROM: usize = 1 << 20;
/// Replaces `ROOTED_FROM` for a broadcast or gather if the host has fewer cores than ranks. A mapped operation ends
/// only when all ranks have done their parts, which takes longer if ranks share a core (docs/internals/benchmarks.md).
const CROWDED_FROM: usize = 2 << 20;

/// Whether an operation of this kind, with so many bytes of inputs and outputs on one rank, is mapped if possible.
/// `crowded`: the host has fewer cores than ranks.
pub fn is_mapped(kind: Kind, inputs: usize, outputs: usize, crowded: bool) -> bool {
    let from = if crowded { CROWDED_FROM } else { ROOTED_FROM };
    match kind {
        Kind::Barrier | Kind::Send | Kind::Recv => false,
        Kind::Broadcast => inputs.max(outputs) >= from,
        Kind::Gather => inputs >= from,
        Kind::Scatter => outputs >= ROOTED_FROM,
        Kind::AllReduce | Kind::Reduce | Kind::AllGather | Kind::ReduceScatter | Kind::AllToAll => {
            inputs.max(outputs) >= FROM
        }
    }
}

/// Whether rank `me` puts sums into its stage for the rank on the next node.
pub fn uses_stage(kind: Kind, me: usize, nodes: &Nodes) -> bool {
    let passes_on = |neighbours: Neighbours| neighbours.after.is_some();
    matches!(kind, Kind::AllReduce | Kind::Reduce) && nodes.neighbours(me).is_some_and(passes_on)
}

/// Whether other ranks write into the outputs of rank `me`.
pub fn exposes_outputs(kind: Kind, me: usize, root: usize) -> bool {
    match kind {
        Kind::AllReduce => true,
        Kind::Reduce | Kind::Gather => me == root,
        Kind::Broadcast | Kind::Scatter => me != root,
        _ => false,
    }
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
        let &Shape { kind, me, ranks, root, total_in, total_out, in_blocks, out_blocks, nodes } = shape;
        match kind {
            Kind::AllReduce | Kind::Reduce => {
                if let Some(neighbours) = nodes.neighbours(me) {
                    return relay(shape, neighbours);
                }
                let (from, bytes) = slice(total_in, ranks, me);
                let targets = if kind == Kind::AllReduce { (0..ranks).collect() } else { vec![root] };
                Part::Fold { from, to: from, bytes, targets }
            }
            Kind::ReduceScatter => {
                let from = start(in_blocks, total_in, ranks, me);
                Part::Fold { from, to: 0, bytes: block(in_blocks, total_in, ranks, me), targets: vec![me] }
            }
            Kind::Broadcast => {
                // The ranks of each node copy the whole input into the outputs of their node.
                let mates = nodes.neighbours(me).map_or(0..ranks, |neighbours| neighbours.mates);
                let (at, bytes) = slice(if me == root { total_in } else { total_out }, mates.len(), me - mates.start);
                let targets: Vec<usize> = mates.filter(|rank| *rank != root).collect();
                Part::Spread { root, at, bytes: if targets.is_empty() { 0 } else { bytes }, targets }
            }
            Kind::Scatter | Kind::Gather => Part::Copy(between_root_and_all(shape)),
            // The whole input of each rank becomes a block of the output.
            Kind::AllGather => {
                let pieces = others_first(me, ranks).map(|peer| Piece {
                    source: peer,
                    from: 0,
                    target: me,
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
                    Some(Piece { source: peer, from, target: me, to, bytes: block(out_blocks, total_out, ranks, peer) })
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
            Part::Spread { bytes, .. } | Part::Fold { bytes, .. } | Part::Relay { bytes, .. } => *bytes,
        }
    }

    /// Returns a rank whose inputs (`inputs[rank]` bytes) or outputs (`outputs[rank]` bytes) are too small for this
    /// part. The sizes come from the ranks' slots, so nothing about them is assumed.
    pub fn too_small(&self, inputs: &[usize], outputs: &[usize]) -> Option<usize> {
        let within = |from: usize, bytes: usize, total: usize| from <= total && bytes <= total - from;
        match self {
            Part::Copy(pieces) => pieces.iter().find_map(|piece| {
                let Piece { source, from, target, to, bytes } = *piece;
                let input = (!within(from, bytes, inputs[source])).then_some(source);
                input.or_else(|| (!within(to, bytes, outputs[target])).then_some(target))
            }),
            Part::Spread { root, at, bytes, targets } => {
                let input = (!within(*at, *bytes, inputs[*root])).then_some(*root);
                input.or_else(|| targets.iter().copied().find(|rank| !within(*at, *bytes, outputs[*rank])))
            }
            Part::Fold { from, to, bytes, targets } => {
                let input = inputs.iter().position(|total| !within(*from, *bytes, *total));
                input.or_else(|| targets.iter().copied().find(|rank| !within(*to, *bytes, outputs[*rank])))
            }
            Part::Relay { neighbours, from, bytes, targets, delivers } => {
                let input = neighbours.mates.clone().find(|rank| !within(*from, *bytes, inputs[*rank]));
                let copied = neighbours.after.filter(|_| *delivers);
                let mut written = targets.iter().copied().chain(copied);
                input.or_else(|| written.find(|rank| !within(*from, *bytes, outputs[*rank])))
            }
        }
    }
}

/// The part of a rank in an all_reduce or reduce that is made node by node. The ranks of a node share the whole input.
fn relay(shape: &Shape, neighbours: Neighbours) -> Part {
    let Range { start, end } = neighbours.mates;
    let (from, bytes) = slice(shape.total_in, end - start, shape.me - start);
    let delivers = shape.kind == Kind::AllReduce && neighbours.after.is_some();
    let targets = match (shape.kind, neighbours.after) {
        (Kind::AllReduce, _) => (start..end).collect(),
        (_, None) => vec![shape.root],
        (_, Some(_)) => Vec::new(),
    };
    Part::Relay { neighbours, from, bytes, targets, delivers }
}

/// The pieces that rank `me` copies in a scatter or gather. A rank other than the root copies its own block, except the
/// last `1 / ranks` of it. The root copies these last parts, together about as many bytes as each other rank copies,
/// and also its own block.
fn between_root_and_all(shape: &Shape) -> Vec<Piece> {
    let &Shape { kind, me, ranks, root, total_in, total_out, .. } = shape;
    let scatters = kind == Kind::Scatter;
    let block = if scatters { total_out } else { total_in };
    let own = block - slice(block, ranks, ranks - 1).1;
    let piece = |rank: usize, start: usize, bytes: usize| match scatters {
        true => Piece { source: root, from: rank * block + start, target: rank, to: start, bytes },
        false => Piece { source: rank, from: start, target: root, to: rank * block + start, bytes },
    };
    if me != root {
        return vec![piece(me, 0, own)];
    }
    let others = others_first(me, ranks).filter(|rank| *rank != root);
    std::iter::once(piece(root, 0, block)).chain(others.map(|rank| piece(rank, own, block - own))).collect()
}

/// Returns all ranks, beginning with the one after `me`, so that they do not all read from the same rank at the same
/// time. `me` is last.
fn others_first(me: usize, ranks: usize) -> impl Iterator<Item = usize> {
    (1..=ranks).map(move |step| (me + step) % ranks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::shm::nodes::Level;

    fn shape(kind: Kind, me: usize, ranks: usize, total_in: usize, total_out: usize) -> Shape<'static> {
        static NONE: Nodes = Nodes::none();
        Shape { kind, me, ranks, root: 0, total_in, total_out, in_blocks: &[], out_blocks: &[], nodes: &NONE }
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
        let piece = |source, to, bytes| Piece { source, from: 0, target: 1, to, bytes };
        assert_eq!(part, Part::Copy(vec![piece(2, 8, 24), piece(0, 0, 8), piece(1, 8, 0)]));
        let tables = [Some(vec![5, 8, 1]), None, Some(vec![9, 24, 2])];
        let part = Part::of(&of(Kind::AllToAll, 1, 32, 32), &tables);
        let piece = |source, from, to, bytes| Piece { source, from, target: 1, to, bytes };
        assert_eq!(part, Part::Copy(vec![piece(2, 9, 8, 24), piece(0, 5, 0, 8)]));
        let too_small = [[13, 0, 33], [12, 0, 33], [13, 0, 32]].map(|inputs| part.too_small(&inputs, &[0, 32, 0]));
        assert_eq!(too_small, [None, Some(0), Some(2)]);
        assert_eq!(part.too_small(&[13, 0, 33], &[99, 31, 99]), Some(1));
    }

    /// Counts how often the parts of all ranks together write each output byte, and checks where the byte comes from.
    /// (q, i) stands for byte `i` of rank `q`'s inputs.
    #[test]
    fn the_parts_of_a_broadcast_scatter_and_gather_write_every_byte_once() {
        let (large, odd) = if cfg!(miri) { (1 << 10, 345) } else { (64 << 10, 12_345) };
        for ranks in 1..7 {
            for (root, block) in [(0, large), (ranks - 1, odd), (ranks / 2, 4), (0, 0)] {
                for kind in [Kind::Broadcast, Kind::Scatter, Kind::Gather] {
                    let sizes = |rank: usize| match (kind, rank == root) {
                        (Kind::Broadcast, true) => (block, 0),
                        (Kind::Broadcast, false) => (0, block),
                        (Kind::Scatter, true) => (block * ranks, block),
                        (Kind::Scatter, false) => (0, block),
                        (_, true) => (block, block * ranks),
                        (_, false) => (block, 0),
                    };
                    type Origin = Option<(usize, usize)>;
                    let mut outputs: Vec<Vec<Origin>> = (0..ranks).map(|q| vec![None; sizes(q).1]).collect();
                    let mut put = |(source, from): (usize, usize), (target, to): (usize, usize), bytes: usize| {
                        for i in 0..bytes {
                            assert_eq!(outputs[target][to + i].replace((source, from + i)), None, "written twice");
                        }
                    };
                    let (ins, outs): (Vec<_>, Vec<_>) = (0..ranks).map(sizes).unzip();
                    for me in 0..ranks {
                        let part = Part::of(&Shape { root, ..shape(kind, me, ranks, ins[me], outs[me]) }, &[]);
                        assert_eq!(part.too_small(&ins, &outs), None, "{kind:?} {ranks} {root} {block}");
                        match part {
                            Part::Copy(pieces) => {
                                pieces.iter().for_each(|p| put((p.source, p.from), (p.target, p.to), p.bytes));
                            }
                            Part::Spread { root, at, bytes, targets } => {
                                targets.into_iter().for_each(|q| put((root, at), (q, at), bytes));
                            }
                            Part::Fold { .. } | Part::Relay { .. } => panic!("{part:?}"),
                        }
                    }
                    for (q, output) in outputs.iter().enumerate() {
                        for (i, byte) in output.iter().enumerate() {
                            let expected = match kind {
                                Kind::Broadcast => (root, i),
                                Kind::Scatter => (root, q * block + i),
                                _ => (i / block, i % block),
                            };
                            assert_eq!(*byte, Some(expected), "{kind:?}, {ranks} ranks, root {root}, {block} bytes");
                        }
                    }
                }
            }
        }
    }

    /// Number of bytes that move between nodes in one operation, with N bytes of tensor. `wide` is the size of a number
    /// in sums that are not complete, in units of its size in a tensor.
    fn between_nodes(kind: Kind, of: &[u32], parts_on: &Nodes, bytes: usize, wide: usize) -> usize {
        let ranks = of.len();
        let far = |me: usize, peers: &mut dyn Iterator<Item = usize>| peers.filter(|rank| of[*rank] != of[me]).count();
        let of_rank = |me: usize| {
            let shape = Shape { nodes: parts_on, ..shape(kind, me, ranks, bytes, bytes) };
            match Part::of(&shape, &[]) {
                Part::Fold { bytes, targets, .. } => {
                    bytes * (far(me, &mut (0..ranks)) + far(me, &mut targets.into_iter()))
                }
                Part::Spread { root, bytes, targets, .. } => {
                    bytes * targets.len().min(1) * far(me, &mut std::iter::once(root))
                        + bytes * far(me, &mut targets.into_iter())
                }
                Part::Relay { neighbours, bytes, targets, delivers, .. } => {
                    let sums = wide * far(me, &mut neighbours.before.into_iter());
                    let copied = far(me, &mut neighbours.after.filter(|_| delivers).into_iter());
                    bytes * (far(me, &mut neighbours.mates.clone()) + sums + copied + far(me, &mut targets.into_iter()))
                }
                Part::Copy(pieces) => panic!("{pieces:?}"),
            }
        };
        (0..ranks).map(of_rank).sum()
    }

    /// What two levels are for: how much less moves between the nodes. Counted, because no machine with several nodes
    /// was there.
    #[test]
    fn two_levels_move_less_between_nodes() {
        const N: usize = 1 << 20;
        for (ranks, nodes) in [(16, 2), (32, 2), (16, 4), (64, 8)] {
            let of: Vec<u32> = (0..ranks).map(|rank| (rank * nodes / ranks) as u32).collect();
            let known = Nodes::of_list(Level::Numa, &of).unwrap();
            let flat = Nodes::none();
            let moved = |kind, nodes: &Nodes, wide| between_nodes(kind, &of, nodes, N, wide);
            // Each rank reads its slice of all inputs and writes it into all outputs.
            let away = ranks - ranks / nodes;
            assert_eq!(moved(Kind::AllReduce, &flat, 1), 2 * away * N);
            assert_eq!(moved(Kind::AllReduce, &known, 1), 2 * (nodes - 1) * N);
            assert_eq!(moved(Kind::AllReduce, &known, 2), 3 * (nodes - 1) * N, "16-bit numbers");
            assert_eq!(moved(Kind::Reduce, &flat, 1), away * N + away * N / ranks);
            // The root is on the first node, and the sums end on the last one.
            assert_eq!(moved(Kind::Reduce, &known, 1), nodes * N);
            assert_eq!(moved(Kind::Broadcast, &known, 1), (nodes - 1) * N);
            assert_eq!(moved(Kind::Broadcast, &flat, 1), away * N);
        }
    }

    #[test]
    fn a_part_of_a_relay_is_checked_against_every_tensor_that_it_touches() {
        let nodes = Nodes::of_list(Level::Numa, &[0, 0, 1, 1]).unwrap();
        let part = |kind, me, root| Part::of(&Shape { nodes: &nodes, root, ..shape(kind, me, 4, 256, 256) }, &[]);
        let neighbours = |mates, before, after| Neighbours { mates, before, after };
        assert_eq!(
            part(Kind::AllReduce, 1, 0),
            Part::Relay {
                neighbours: neighbours(0..2, None, Some(3)),
                from: 128,
                bytes: 128,
                targets: vec![0, 1],
                delivers: true
            }
        );
        assert_eq!(
            part(Kind::Reduce, 2, 1),
            Part::Relay {
                neighbours: neighbours(2..4, Some(0), None),
                from: 0,
                bytes: 128,
                targets: vec![1],
                delivers: false
            }
        );
        let too_small =
            |inputs: [usize; 4], outputs: [usize; 4]| part(Kind::AllReduce, 1, 0).too_small(&inputs, &outputs);
        assert_eq!(too_small([256, 256, 0, 0], [256, 256, 0, 256]), None, "it touches no other tensor");
        assert_eq!(too_small([256, 255, 0, 0], [256; 4]), Some(1));
        assert_eq!(too_small([256; 4], [255, 256, 256, 256]), Some(0));
        assert_eq!(too_small([256; 4], [256, 256, 256, 255]), Some(3), "the result is copied from there");
    }

    #[test]
    fn sizes_that_a_peer_made_up_are_refused() {
        let part = Part::of(&shape(Kind::AllToAll, 1, 2, 8, 8), &[Some(vec![usize::MAX, 4]), None]);
        assert_eq!(part.too_small(&[8, 8], &[]), Some(0));
    }
}
