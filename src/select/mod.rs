//! How an operation travels: a pure function of what all ranks share. Nothing local may enter here: no clock, no queue
//! length, no `sync` flag; two ranks that chose differently would wait for one another for ever.

pub mod cost;
pub mod hosts;

use crate::types::{Kind, Request};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// One exchange of tagged slots (`engine/shm/small.rs`).
    Slots,
    /// Rounds through staging buffers, `chunk` bytes a round (`engine/shm/bulk.rs`).
    Rounds { chunk: usize },
}

/// What all ranks of a group know.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub ranks: usize,
    /// Cores that the ranks of this host may use together; agreed when they met.
    pub cores: usize,
    pub slot_bytes: usize,
    pub stage_bytes: usize,
}

/// Bytes that the rank with the most writes into its slot when the operation goes by slots.
pub fn slot_payload(request: &Request, ranks: usize) -> usize {
    let sum = |spans: &[crate::types::Span]| spans.iter().map(|span| span.bytes).sum::<usize>();
    match request.kind {
        Kind::AllReduce | Kind::Reduce | Kind::Gather | Kind::ReduceScatter => sum(&request.inputs),
        Kind::Broadcast => sum(&request.inputs).max(sum(&request.outputs)),
        Kind::AllGather => {
            request.out_blocks.iter().copied().max().unwrap_or_else(|| sum(&request.outputs) / ranks.max(1))
        }
        Kind::Scatter => sum(&request.outputs) * ranks,
        // The slot always carries the block table; whether the blocks fit too is said in its header (small.rs).
        Kind::AllToAll => ranks * 8,
        Kind::Barrier | Kind::Send | Kind::Recv => 0,
    }
}

/// Start values, measured with two ranks on two cores (docs/benchmarks.md): as few rounds as the buffers allow while the
/// tensor stays in the last-level cache, smaller chunks where it does not, as few rounds as possible where ranks share
/// cores, because then every round costs context switches.
pub fn choose(kind: Kind, payload: usize, shape: Shape) -> Path {
    const OUT_OF_CACHE: usize = 24 << 20;
    if payload <= shape.slot_bytes && kind != Kind::AllToAll {
        return Path::Slots;
    }
    let crowded = shape.ranks > shape.cores;
    let chunk = if payload > OUT_OF_CACHE && !crowded { shape.stage_bytes.min(128 << 10) } else { shape.stage_bytes };
    Path::Rounds { chunk: chunk.min(shape.stage_bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_07_the_choice_ignores_local_facts_and_is_total() {
        let shape = Shape { ranks: 2, cores: 2, slot_bytes: 4096, stage_bytes: 512 << 10 };
        for kind in [Kind::AllReduce, Kind::Broadcast, Kind::AllGather, Kind::ReduceScatter] {
            assert_eq!(choose(kind, 0, shape), Path::Slots);
            assert_eq!(choose(kind, 4096, shape), Path::Slots);
            assert_eq!(choose(kind, 4097, shape), Path::Rounds { chunk: 512 << 10 });
            assert_eq!(choose(kind, 64 << 20, shape), Path::Rounds { chunk: 128 << 10 });
            assert_eq!(choose(kind, 64 << 20, Shape { ranks: 4, ..shape }), Path::Rounds { chunk: 512 << 10 });
        }
    }
}
