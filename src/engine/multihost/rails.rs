//! Large collectives in which several ranks of a host talk to other hosts. Each such rank talks to the ranks of other
//! hosts that have the same local rank (its rail):
//!
//! | collective | inside | in every rail | inside |
//! | --- | --- | --- | --- |
//! | all_gather | | all_gather of the rail's blocks | all_gather of the rails' results |
//! | reduce_scatter | reduce_scatter of the rails' blocks | reduce_scatter to the rail's ranks | |
//! | broadcast | broadcast on the root's host | broadcast of a share from the root's host | all_gather on the others |
//!
//! The first two need the same number of ranks on every host and use all ranks. Broadcast uses at most as many rails as
//! the smallest host has ranks. Between two hosts the same number of bytes is sent as with one leader (`collectives`),
//! but over one connection per rail, and fewer bytes are copied inside the hosts. The order of summation and the bits
//! of the result are the same.
//!
//! Source: the two-level scheme of hierarchical all-reduces, for instance in Horovod and MVAPICH2, applied to each
//! kind.

use super::batch::{BatchRun, HostCall};
use super::collectives::{borders, schedule};
use super::vector::{Vector, copy_in, copy_out, cut, span, written};
use crate::algorithms::part_range;
use crate::error::Result;
use crate::types::{Kind, Span};

impl BatchRun<'_> {
    /// Whether every rank talks to other hosts in this collective of blocks. True if this was chosen and is possible.
    pub fn over_rails(&self) -> bool {
        self.chosen.leaders > 1 && self.host_map.is_even()
    }

    /// Returns the ranks of this rank's rail, and the borders of their blocks in a contiguous buffer.
    fn rail_borders(&self, sizes: &[usize]) -> (Vec<usize>, Vec<usize>) {
        let members = self.host_map.leaders(self.host_map.local_rank);
        let starts = borders(members.iter().map(|rank| sizes[*rank]));
        (members, starts)
    }

    /// Like `all_gather`. `sizes` has the blocks' sizes by rank.
    pub fn all_gather_over_rails(&mut self, input: &[Span], outputs: &[Vec<Span>], sizes: &[usize]) -> Result<()> {
        let (members, starts) = self.rail_borders(sizes);
        let total = starts[members.len()];
        let block = |host: usize| starts[host]..starts[host + 1];
        let mut memory = self.memory(total);
        copy_in(input, 0, &mut memory[block(self.host_map.host)]);
        let steps = schedule(self.chosen.algorithm, Kind::AllGather, members.len(), 0)?;
        self.run_schedule(&steps, &members, &[written(&mut memory[..total])], &block, None)?;
        let out_blocks = self.host_map.rails().map(|ranks| ranks.iter().map(|rank| sizes[*rank]).sum()).collect();
        let outputs = self.host_map.rails().flatten().flat_map(|rank| outputs[rank].iter().copied()).collect();
        let inputs = pieces(&memory[..total]);
        self.run_in_host(HostCall { inputs, outputs, out_blocks, ..HostCall::new(Kind::AllGather) })?;
        *self.scratch = memory;
        // No `share_issued` is needed: every rank has the issued numbers of its host's ranks from the comparison
        // inside, and those of other hosts from its rail.
        Ok(())
    }

    /// Like `reduce_scatter`, but the blocks of `vector` are grouped by rail, and ordered by host within a rail.
    pub fn reduce_scatter_over_rails(&mut self, vector: &Vector, sizes: &[usize], output: &[Span]) -> Result<()> {
        let total = vector.bytes();
        let ends = borders(self.host_map.rails().map(|ranks| ranks.iter().map(|rank| sizes[*rank]).sum()));
        let shares: Vec<_> = ends.windows(2).map(|ends| ends[0]..ends[1]).collect();
        let mut memory = self.memory(total);
        self.reduce_inside(vector, &(0..total), &shares, 0, &mut memory)?;
        let mine = shares[self.host_map.local_rank].clone();
        let own = &mut memory[mine.clone()];
        let (members, starts) = self.rail_borders(sizes);
        let block = |host: usize| starts[host]..starts[host + 1];
        let steps = schedule(self.chosen.algorithm, Kind::ReduceScatter, members.len(), 0)?;
        self.run_schedule(&steps, &members, &[written(own)], &block, Some((vector, mine.start)))?;
        let result = &mut own[block(self.host_map.host)];
        vector.finish(mine.start + starts[self.host_map.host], result);
        copy_out(output, 0, result);
        *self.scratch = memory;
        Ok(())
    }

    /// Like `broadcast`, over `rails` rails.
    pub fn broadcast_over_rails(&mut self, data: &[Span], root: usize, rails: usize) -> Result<()> {
        let bytes: usize = data.iter().map(|span| span.bytes).sum();
        let share = |rail: usize| part_range(bytes, rails, rail);
        let (home, index) = (self.host_map.host_of[root], self.host_map.local_rank);
        let mine = (index < rails).then(|| share(index));
        let mut memory = self.memory(mine.as_ref().map_or(0, ExactSizeIterator::len));
        if self.host_map.host == home {
            let position = self.leader_position(&self.host_map.leaders_with(root));
            let (inputs, outputs) =
                if self.host_map.me == root { (data.to_vec(), Vec::new()) } else { (Vec::new(), data.to_vec()) };
            self.run_in_host(HostCall { root: position, inputs, outputs, ..HostCall::new(Kind::Broadcast) })?;
        }
        if let Some(mine) = &mine {
            let place =
                if self.host_map.host == home { cut(data, mine) } else { vec![written(&mut memory[..mine.len()])] };
            let members = self.host_map.leaders(index);
            let steps = schedule(self.chosen.algorithm, Kind::Broadcast, members.len(), home)?;
            let range = |part: usize| part_range(mine.len(), steps.parts(), part);
            self.run_schedule(&steps, &members, &place, &range, None)?;
        }
        if self.host_map.host != home {
            let mut out_blocks: Vec<usize> = (0..rails).map(|rail| share(rail).len()).collect();
            out_blocks.resize(self.host_map.local_ranks().len(), 0);
            let inputs = mine.map_or(Vec::new(), |mine| pieces(&memory[..mine.len()]));
            let outputs = data.to_vec();
            self.run_in_host(HostCall { inputs, outputs, out_blocks, ..HostCall::new(Kind::AllGather) })?;
        }
        *self.scratch = memory;
        Ok(())
    }
}

/// Returns a buffer as a list of one span, or an empty list if the buffer is empty.
fn pieces(buffer: &[u8]) -> Vec<Span> {
    if buffer.is_empty() { Vec::new() } else { vec![span(buffer)] }
}
