//! The part of the bridge for functions on plain memory, which need no group: the formats of compressed sums, and the
//! rows of a mixture of experts. The rules of `bridge` apply here too.

use super::convert::{Outcome, guarded};
use crate::error::Result;
use crate::reduce::{Level, int8};
use crate::routing;

#[cxx::bridge(namespace = "sagellm")]
pub mod ffi {
    /// The fields of `routing::Table`: how many rows each rank sends to each expert, and which rank this is.
    struct RowTable<'a> {
        taken: &'a [i64],
        experts: usize,
        rank: usize,
    }

    extern "Rust" {
        /// Fills `encoded` with blocks. A block is a scale and `block` numbers. Numbers after the last value are 0.
        fn int8_encode(values: &[f32], block: usize, encoded: &mut [u8]) -> Result<()>;
        /// Divides the scales of the encoded arrays by `divisor`, then adds the arrays. Each has the size of `summed`;
        /// `addends` has one after another.
        fn int8_sum(addends: &[u8], block: usize, divisor: f32, summed: &mut [u8]) -> Result<()>;
        fn int8_decode(encoded: &[u8], block: usize, values: &mut [f32]) -> Result<()>;
        /// Writes to `places`, in ascending order, the indices of the `places.len()` elements with the largest
        /// magnitudes.
        fn largest(values: &[f32], places: &mut [i32]) -> Result<()>;
        /// Sorts assignments by expert, and counts the assignments of each expert.
        fn sort_assignments(experts: &[i64], counts: &mut [i64], order: &mut [i64]) -> Result<()>;
        /// See `routing::Table::figures`.
        fn row_figures(taken: &[i64], experts: usize, rank: usize, found: &mut [i64]) -> Result<()>;
        /// See `routing::Table::leaving`.
        fn rows_leaving(
            table: &RowTable,
            order: &[i64],
            wanted: &[i64],
            choices: usize,
            rows: &mut [i64],
            sources: &mut [i64],
            places: &mut [i64],
        ) -> Result<()>;
        /// See `routing::Table::coming`.
        fn rows_coming(table: &RowTable, sorting: &mut [i64], unsorted: &mut [i64]) -> Result<()>;
    }
}

fn int8_encode(values: &[f32], block: usize, encoded: &mut [u8]) -> Outcome<()> {
    guarded(|| int8::encode(Level::best(), values, block, encoded))
}

fn int8_sum(addends: &[u8], block: usize, divisor: f32, summed: &mut [u8]) -> Outcome<()> {
    guarded(|| int8::sum(Level::best(), addends, block, divisor, summed))
}

fn int8_decode(encoded: &[u8], block: usize, values: &mut [f32]) -> Outcome<()> {
    guarded(|| int8::decode(Level::best(), encoded, block, values))
}

fn largest(values: &[f32], places: &mut [i32]) -> Outcome<()> {
    guarded(|| int8::largest(values, places))
}

fn sort_assignments(experts: &[i64], counts: &mut [i64], order: &mut [i64]) -> Outcome<()> {
    guarded(|| routing::sort(experts, counts, order))
}

fn row_figures(taken: &[i64], experts: usize, rank: usize, found: &mut [i64]) -> Outcome<()> {
    guarded(|| routing::Table::new(taken, experts, rank)?.figures(found))
}

fn table<'a>(of: &ffi::RowTable<'a>) -> Result<routing::Table<'a>> {
    routing::Table::new(of.taken, of.experts, of.rank)
}

fn rows_leaving(
    of: &ffi::RowTable<'_>,
    order: &[i64],
    wanted: &[i64],
    choices: usize,
    rows: &mut [i64],
    sources: &mut [i64],
    places: &mut [i64],
) -> Outcome<()> {
    guarded(|| table(of)?.leaving(order, wanted, choices, routing::Leaving { rows, sources, places }))
}

fn rows_coming(of: &ffi::RowTable<'_>, sorting: &mut [i64], unsorted: &mut [i64]) -> Outcome<()> {
    guarded(|| table(of)?.coming(sorting, unsorted))
}
