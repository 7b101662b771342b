//! The part of the contract between C++ and Rust for functions over plain memory, which need no group: the formats of
//! compressed sums, and the rows of a mixture of experts. The rules of `bridge` hold here too.

use super::convert::{Outcome, guarded};
use crate::error::Result;
use crate::reduce::{Level, int8};
use crate::routing;

#[cxx::bridge(namespace = "sagellm")]
pub mod ffi {
    /// What each rank sends to each expert, and which rank this is.
    struct RowTable<'a> {
        taken: &'a [i64],
        experts: usize,
        rank: usize,
        own_last: bool,
    }

    extern "Rust" {
        /// Whole blocks of `encoded`, each a scale and `block` numbers; what is behind the values is 0.
        fn int8_encode(values: &[f32], block: usize, encoded: &mut [u8]) -> Result<()>;
        /// Adds addends of the size of `summed`, which lie one behind the other, with scales divided by `divisor`.
        fn int8_sum(addends: &[u8], block: usize, divisor: f32, summed: &mut [u8]) -> Result<()>;
        fn int8_decode(encoded: &[u8], block: usize, values: &mut [f32]) -> Result<()>;
        /// The places of the `places.len()` elements of largest magnitude, ascending.
        fn largest(values: &[f32], places: &mut [i32]) -> Result<()>;
        /// Assignments by expert, and how many each has.
        fn sort_assignments(experts: &[i64], counts: &mut [i64], order: &mut [i64]) -> Result<()>;
        /// Rows to each rank, from each rank, and of each expert of this rank.
        fn row_figures(taken: &[i64], experts: usize, rank: usize, found: &mut [i64]) -> Result<()>;
        /// `routing::Table::leaving`.
        fn rows_leaving(
            table: &RowTable,
            order: &[i64],
            wanted: &[i64],
            rows: &mut [i64],
            places: &mut [i64],
        ) -> Result<()>;
        /// `routing::Table::coming`.
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
    guarded(|| routing::Table::new(taken, experts, rank, false)?.figures(found))
}

fn table<'a>(of: &ffi::RowTable<'a>) -> Result<routing::Table<'a>> {
    routing::Table::new(of.taken, of.experts, of.rank, of.own_last)
}

fn rows_leaving(
    of: &ffi::RowTable<'_>,
    order: &[i64],
    wanted: &[i64],
    rows: &mut [i64],
    places: &mut [i64],
) -> Outcome<()> {
    guarded(|| table(of)?.leaving(order, wanted, rows, places))
}

fn rows_coming(of: &ffi::RowTable<'_>, sorting: &mut [i64], unsorted: &mut [i64]) -> Outcome<()> {
    guarded(|| table(of)?.coming(sorting, unsorted))
}
