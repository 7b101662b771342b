//! Large collectives in which several ranks of a host talk to other hosts, each to those at its position there (its
//! column):
//!
//! | collective | inside | in every column | inside |
//! | --- | --- | --- | --- |
//! | all_gather | | all_gather of the column's blocks | all_gather of what the columns have got |
//! | reduce_scatter | reduce_scatter of the columns' blocks | reduce_scatter to the column's ranks | |
//! | broadcast | broadcast on the root's host | broadcast of a share from the root's host | all_gather on the others |
//!
//! The first two need as many ranks on every host and use all of them, the third takes at most as many columns as the host
//! with the fewest ranks. Each byte crosses between two hosts as often as with one leader (`collectives`), over as many connections as there are
//! columns; inside the hosts fewer bytes are copied. Order of summation and bits are the same.
//!
//! Source: the two-level scheme of hierarchical all-reduces, known for instance from Horovod and MVAPICH2, kind by kind.

use super::batch::{Inner, Travel};
use super::collectives::{borders, schedule};
use super::vector::{Vector, copy_in, copy_out, span};
use crate::error::Result;
use crate::types::{Kind, Span};

impl Travel<'_> {
    /// Whether every rank of a block-wise collective talks to other hosts: where that was chosen and can be done.
    pub fn in_columns(&self) -> bool {
        self.way.leaders > 1 && self.place.is_even()
    }

    /// The ranks of this rank's column, and where their blocks begin when they lie behind each other, and the end.
    fn column_borders(&self, sizes: &[usize]) -> (Vec<usize>, Vec<usize>) {
        let members = self.place.leaders(self.place.index);
        let starts = borders(members.iter().map(|rank| sizes[*rank]));
        (members, starts)
    }

    /// As `all_gather`; `sizes` of the blocks by rank.
    pub fn all_gather_in_columns(&mut self, input: &[Span], outputs: &[Vec<Span>], sizes: &[usize]) -> Result<()> {
        let (members, starts) = self.column_borders(sizes);
        let total = starts[members.len()];
        let block = |host: usize| starts[host]..starts[host + 1];
        let mut memory = self.memory(total);
        copy_in(input, 0, &mut memory[block(self.place.host)]);
        let plan = schedule(self.way.algorithm, Kind::AllGather, members.len(), 0)?;
        self.between(&plan, &members, &mut memory[..total], &block, None)?;
        let out_blocks = self.place.columns().map(|ranks| ranks.iter().map(|rank| sizes[*rank]).sum()).collect();
        let outputs = self.place.columns().flatten().flat_map(|rank| outputs[rank].iter().copied()).collect();
        let inputs = pieces(&memory[..total]);
        self.ask_inside(Inner { inputs, outputs, out_blocks, ..Inner::new(Kind::AllGather) })?;
        *self.scratch = memory;
        // Every rank has heard what the others have issued: of its host before, of other hosts in its column.
        Ok(())
    }

    /// As `reduce_scatter`, but the blocks of `vector` lie column by column, in each in the order of the hosts.
    pub fn reduce_scatter_in_columns(&mut self, vector: &Vector, sizes: &[usize], output: &[Span]) -> Result<()> {
        let total = vector.bytes();
        let ends = borders(self.place.columns().map(|ranks| ranks.iter().map(|rank| sizes[*rank]).sum()));
        let shares: Vec<_> = ends.windows(2).map(|ends| ends[0]..ends[1]).collect();
        let mut memory = self.memory(total);
        self.reduce_inside(vector, &(0..total), &shares, 0, &mut memory)?;
        let mine = shares[self.place.index].clone();
        let own = &mut memory[mine.clone()];
        let (members, starts) = self.column_borders(sizes);
        let block = |host: usize| starts[host]..starts[host + 1];
        let plan = schedule(self.way.algorithm, Kind::ReduceScatter, members.len(), 0)?;
        self.between(&plan, &members, own, &block, Some((vector, mine.start)))?;
        let result = &mut own[block(self.place.host)];
        vector.finish(mine.start + starts[self.place.host], result);
        copy_out(output, 0, result);
        *self.scratch = memory;
        Ok(())
    }

    /// As `broadcast`, by so many columns.
    pub fn broadcast_in_columns(&mut self, data: &[Span], root: usize, columns: usize) -> Result<()> {
        let bytes: usize = data.iter().map(|span| span.bytes).sum();
        let share = |column: usize| bytes * column / columns..bytes * (column + 1) / columns;
        let (home, index) = (self.place.host_of[root], self.place.index);
        let mine = (index < columns).then(|| share(index));
        let mut memory = self.memory(mine.as_ref().map_or(0, ExactSizeIterator::len));
        if self.place.host == home {
            let position = self.leader_position(&self.place.leaders_with(root));
            let (inputs, outputs) =
                if self.place.me == root { (data.to_vec(), Vec::new()) } else { (Vec::new(), data.to_vec()) };
            self.ask_inside(Inner { root: position, inputs, outputs, ..Inner::new(Kind::Broadcast) })?;
        }
        if let Some(mine) = &mine {
            let own = &mut memory[..mine.len()];
            if self.place.host == home {
                copy_in(data, mine.start, own);
            }
            let members = self.place.leaders(index);
            let plan = schedule(self.way.algorithm, Kind::Broadcast, members.len(), home)?;
            let (parts, length) = (plan.parts(), mine.len());
            let range = |part: usize| length * part / parts..length * (part + 1) / parts;
            self.between(&plan, &members, own, &range, None)?;
        }
        if self.place.host != home {
            let mut out_blocks: Vec<usize> = (0..columns).map(|column| share(column).len()).collect();
            out_blocks.resize(self.place.neighbours().len(), 0);
            let inputs = mine.map_or(Vec::new(), |mine| pieces(&memory[..mine.len()]));
            let outputs = data.to_vec();
            self.ask_inside(Inner { inputs, outputs, out_blocks, ..Inner::new(Kind::AllGather) })?;
        }
        *self.scratch = memory;
        Ok(())
    }
}

/// The piece that a buffer is, if there is something in it.
fn pieces(buffer: &[u8]) -> Vec<Span> {
    if buffer.is_empty() { Vec::new() } else { vec![span(buffer)] }
}
