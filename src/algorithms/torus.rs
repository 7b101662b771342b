//! 2D torus: the ranks are arranged in rows and columns, and each row and each column is a ring.
//!
//! p = R C ranks in R rows of C. R is the largest divisor of p up to its square root. Ranks are numbered row by row. N
//! bytes: the vector, or all blocks together.
//!
//! - reduce_scatter: a ring along the rows, after which each rank of a column has 1/C of the parts, summed over its
//!   row; then a ring along the columns. C + R - 2 steps.
//! - all_gather: along the columns, then along the rows. C + R - 2 steps.
//! - all_reduce: both. 2 (C + R - 2) steps, compared with 2 (p - 1) of one ring.
//!
//! Bytes per rank, sent and received: N (p - 1) / p, and twice that for all_reduce, like the ring. If p is prime, there
//! is one row, which is the ring. Order of summation for the part of row i, column j: first within each row, around the
//! ring from column j + 1 to j; then these sums down the column, around the ring from row i + 1 to i; always from left
//! to right. This order depends on an element's position in the vector. Source: Mikami et al., "Massively distributed
//! SGD: ImageNet/ResNet-50 training in a flash" (2018); the bucket algorithms on meshes of Barnett et al. (1993).

use std::ops::Range;

use super::{How, Pattern, Schedule, Step, Volume, one, run};
use crate::types::Kind;

pub(super) struct Torus;

impl Pattern for Torus {
    fn serves(&self, kind: Kind) -> bool {
        matches!(kind, Kind::AllReduce | Kind::ReduceScatter | Kind::AllGather)
    }

    fn cuts(&self, s: &Schedule) -> usize {
        s.ranks
    }

    fn steps(&self, s: &Schedule) -> usize {
        let once = Grid::of(s).steps();
        if s.kind == Kind::AllReduce { 2 * once } else { once }
    }

    fn step(&self, s: &Schedule, rank: usize, k: usize) -> Step {
        let grid = Grid::of(s);
        match s.kind {
            Kind::AllGather => grid.gather(rank, k),
            Kind::AllReduce if k >= grid.steps() => grid.gather(rank, k - grid.steps()),
            _ => grid.scatter(rank, k),
        }
    }

    fn volume(&self, s: &Schedule) -> Volume {
        let each = if s.kind == Kind::AllReduce { 2 * (s.ranks - 1) } else { s.ranks - 1 };
        Volume { sent: each, received: each }
    }

    fn alike(&self, s: &Schedule, k: usize) -> usize {
        let grid = Grid::of(s);
        let (rows, columns) = (grid.rows - 1, grid.columns - 1);
        let lengths = if s.kind == Kind::AllGather { vec![rows, columns] } else { vec![columns, rows, rows, columns] };
        let mut end = 0;
        for length in lengths {
            end += length;
            if k < end {
                return end - k;
            }
        }
        1
    }
}

struct Grid {
    rows: usize,
    columns: usize,
    /// Whether the parts of a column are contiguous. True for all_reduce, because its parts may be numbered freely. For
    /// other kinds the parts are blocks, which are in rank order.
    by_column: bool,
}

impl Grid {
    fn of(s: &Schedule) -> Grid {
        let rows = (1..=s.ranks.isqrt()).rev().find(|rows| s.ranks.is_multiple_of(*rows)).unwrap_or(1);
        Grid { rows, columns: s.ranks / rows, by_column: s.kind == Kind::AllReduce }
    }

    /// Number of steps of one pass over rows and columns.
    fn steps(&self) -> usize {
        self.columns + self.rows - 2
    }

    fn part(&self, row: usize, column: usize) -> usize {
        if self.by_column { column * self.rows + row } else { row * self.columns + column }
    }

    fn column(&self, column: usize) -> Vec<Range<usize>> {
        if self.by_column {
            run(column * self.rows..(column + 1) * self.rows)
        } else if self.columns == 1 {
            run(0..self.rows)
        } else {
            (0..self.rows).map(|row| self.part(row, column)).map(|part| part..part + 1).collect()
        }
    }

    /// Ring reduce_scatter along the rows, then along the columns.
    fn scatter(&self, rank: usize, k: usize) -> Step {
        let (row, column) = (rank / self.columns, rank % self.columns);
        if k < self.columns - 1 {
            let back = |by: usize| (column + 2 * self.columns - by) % self.columns;
            return self.along_row(row, column, self.column(back(k + 1)), self.column(back(k + 2)), How::ReduceBefore);
        }
        let k = k - (self.columns - 1);
        let back = |by: usize| self.part((row + 2 * self.rows - by) % self.rows, column);
        self.along_column(row, column, one(back(k + 1)), one(back(k + 2)), How::ReduceBefore)
    }

    /// Ring all_gather along the columns, then along the rows.
    fn gather(&self, rank: usize, k: usize) -> Step {
        let (row, column) = (rank / self.columns, rank % self.columns);
        if k < self.rows - 1 {
            let back = |by: usize| self.part((row + self.rows - by) % self.rows, column);
            return self.along_column(row, column, one(back(k)), one(back(k + 1)), How::Copy);
        }
        let k = k - (self.rows - 1);
        let back = |by: usize| (column + self.columns - by) % self.columns;
        self.along_row(row, column, self.column(back(k)), self.column(back(k + 1)), How::Copy)
    }

    fn along_row(&self, row: usize, column: usize, out: Vec<Range<usize>>, come: Vec<Range<usize>>, how: How) -> Step {
        let peer = |by: usize| row * self.columns + (column + by) % self.columns;
        let mut step = Step::default();
        step.send(peer(1), out);
        step.recv(peer(self.columns - 1), come, how);
        step
    }

    fn along_column(
        &self,
        row: usize,
        column: usize,
        out: Vec<Range<usize>>,
        come: Vec<Range<usize>>,
        how: How,
    ) -> Step {
        let peer = |by: usize| (row + by) % self.rows * self.columns + column;
        let mut step = Step::default();
        step.send(peer(1), out);
        step.recv(peer(self.rows - 1), come, how);
        step
    }
}
