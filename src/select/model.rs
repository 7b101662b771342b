//! How long an operation inside one host should take: what `explain` compares ways with where nothing was measured.
//!
//! time = call + exchanges + rounds x cost of a round + bytes moved by the busiest rank x time a byte x ranks a core
//!
//! The start values come from docs/benchmarks.md (two and four ranks on two cores, 2026-11-21): 2.8 us for a call through
//! torch, 0.2 us an exchange between cores, 17 us where ranks share a core, 21 ps a byte in the cache and 37 ps from
//! memory. `sagellm tune` replaces predictions by measured times where a user wants to know better.

use super::rules::Way;
use super::{Shape, unit};
use crate::types::Kind;

/// A call through torch to the core and back, which no way avoids.
const CALL_NS: f64 = 2800.0;
const EXCHANGE_NS: f64 = 200.0;
/// Ranks that share a core wait for each other by switching.
const CROWDED_EXCHANGE_NS: f64 = 17_000.0;
const ROUND_NS: f64 = 300.0;
const CROWDED_ROUND_NS: f64 = 5_000.0;
/// A byte through a slot: written, read and combined alone by every rank.
const SLOT_NS: f64 = 0.060;
/// A byte through the stage, which stays in the cache, of a tensor that does too.
const CACHED_NS: f64 = 0.021;
/// The same of a tensor that comes from memory.
const MEMORY_NS: f64 = 0.037;

/// Nanoseconds of one operation of `bytes` (as `slot_payload` counts them) that goes `way`.
pub fn predict(kind: Kind, bytes: u64, way: Way, shape: &Shape, cache_bytes: u64) -> u64 {
    let ranks = shape.ranks.max(1) as f64;
    let crowded = shape.crowded();
    let share = (ranks / shape.cores.max(1) as f64).max(1.0);
    let exchange = if crowded { CROWDED_EXCHANGE_NS } else { EXCHANGE_NS };
    let time = match way {
        Way::Rounds { chunk } => {
            let chunk = chunk.clamp(64, shape.stage_bytes.max(64));
            let rounds = bytes.div_ceil(unit(kind, shape.ranks, chunk) as u64).max(1);
            let round = if crowded { CROWDED_ROUND_NS } else { ROUND_NS };
            // The header, the stage, and the results where they are collected.
            let exchanges = if crowded { 1.0 } else { 3.0 };
            let byte = per_byte(bytes, cache_bytes) * spill(bytes, chunk as u64, shape, cache_bytes);
            exchanges * exchange + rounds as f64 * round + moved(kind, ranks, bytes) * byte * share
        }
        _ => exchange + moved_by_slots(kind, ranks, bytes) * SLOT_NS * share,
    };
    (CALL_NS + time) as u64
}

/// Nanoseconds a byte: cached up to an eighth of the last-level cache, since buffers come in turn, and from memory above
/// a half of it.
fn per_byte(bytes: u64, cache_bytes: u64) -> f64 {
    let (low, high) = (cache_bytes as f64 / 8.0, cache_bytes as f64 / 2.0);
    let at = ((bytes as f64 - low) / (high - low).max(1.0)).clamp(0.0, 1.0);
    CACHED_NS + (MEMORY_NS - CACHED_NS) * at
}

/// Beside a stream of memory a large stage does not stay in the cache. That small chunks win there was measured; the tenth
/// is an assumption.
fn spill(bytes: u64, chunk: u64, shape: &Shape, cache_bytes: u64) -> f64 {
    if bytes > super::out_of_cache(cache_bytes) && !shape.crowded() && chunk > super::SMALL_CHUNK as u64 {
        1.1
    } else {
        1.0
    }
}

/// Bytes that the busiest rank stages and reads, as the table in engine/shm/bulk.rs has them.
fn moved(kind: Kind, ranks: f64, bytes: u64) -> f64 {
    let n = bytes as f64;
    match kind {
        Kind::AllReduce | Kind::Reduce => n * (3.0 * (1.0 - 1.0 / ranks) + 1.0 / ranks),
        Kind::ReduceScatter => n * 2.0 * (1.0 - 1.0 / ranks),
        Kind::AllGather | Kind::Gather => n * ranks,
        _ => n,
    }
}

fn moved_by_slots(kind: Kind, ranks: f64, bytes: u64) -> f64 {
    match kind {
        Kind::Broadcast | Kind::Scatter => bytes as f64,
        Kind::ReduceScatter => bytes as f64 * 2.0,
        _ => bytes as f64 * ranks,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::DEFAULT_CACHE_BYTES as CACHE;

    const APART: Shape = Shape { ranks: 2, hosts: 1, cores: 2, slot_bytes: 4096, stage_bytes: 512 << 10 };

    /// Medians of docs/benchmarks.md in microseconds, with the widest factor that is accepted between both: the model
    /// ranks ways and gives an order of size, no more.
    #[test]
    fn the_start_values_are_near_the_measured_table() {
        let crowded = Shape { ranks: 4, stage_bytes: 512 << 10, ..APART };
        let big = Way::Rounds { chunk: 512 << 10 };
        let small = Way::Rounds { chunk: 128 << 10 };
        let cases = [
            (Kind::AllReduce, 8, Way::Slots, APART, 3.04),
            (Kind::AllReduce, 64 << 10, big, APART, 6.40),
            (Kind::AllReduce, 1 << 20, big, APART, 49.5),
            (Kind::AllReduce, 64 << 20, small, APART, 5210.0),
            (Kind::AllGather, 512 << 10, big, APART, 33.8),
            (Kind::ReduceScatter, 1 << 20, big, APART, 30.6),
            (Kind::Broadcast, 1 << 20, big, APART, 24.1),
            (Kind::AllReduce, 8, Way::Slots, crowded, 20.0),
            (Kind::AllReduce, 1 << 20, big, crowded, 171.0),
            (Kind::AllReduce, 16 << 20, big, crowded, 3170.0),
        ];
        for (kind, bytes, way, shape, measured) in cases {
            let ratio = predict(kind, bytes, way, &shape, CACHE) as f64 / 1000.0 / measured;
            assert!((0.6..1.67).contains(&ratio), "{kind} of {bytes} bytes by {way}: {ratio} of what was measured");
        }
    }
}
