//! The collectives over several hosts, each made of operations inside the hosts and a schedule between them:
//!
//! | collective | inside | between the leaders | inside |
//! | --- | --- | --- | --- |
//! | all_reduce | reduce to the leader, or reduce_scatter over k leaders | all_reduce | broadcast, or all_gather |
//! | reduce | reduce to the leader (the root leads its host) | reduce | |
//! | broadcast | | broadcast from the root's host | broadcast |
//! | all_gather | all_gather | all_gather of the hosts' blocks | broadcast |
//! | reduce_scatter | reduce of all blocks | reduce_scatter of the hosts' blocks | scatter |
//! | gather | all_gather | gather of the hosts' blocks | |
//! | scatter | | scatter of the hosts' blocks | scatter |
//! | all_to_all | | every rank with every rank of other hosts | all_to_all |
//! | barrier | (the comparison) | barrier | (the issued numbers) |
//!
//! In an all_to_all both parts run at the same time. If several ranks of a host talk to other hosts, broadcast,
//! all_gather and reduce_scatter use `rails` instead.
//!
//! A leader sends as many bytes to other hosts as docs/internals/algorithms.md says for a schedule whose members are
//! the hosts. A sum first combines the ranks of each host, and then the hosts' results in the schedule's order.
//! Low-precision elements are rounded once inside the host, and once whenever the results of hosts are combined. Strict
//! mode sends uncombined elements instead: every rank receives one share from all ranks, combines it in rank order, and
//! sends the result to all. Strict mode sends up to ranks-per-host times as many bytes.

use std::ops::Range;

use super::batch::{BatchRun, HostCall};
use super::step::{Arrived, Incoming, Outgoing, Take};
use super::vector::{Vector, copy_across, copy_in, copy_out, cut, partial, span, whole, written};
use crate::algorithms::{Algorithm, Schedule, part_range};
use crate::error::{Error, Result};
use crate::types::{Kind, ReduceOp, Span};

/// From this size on, `compare_all` may pay. Copying this many bytes twice takes some 300 us; on a fast link the messages
/// of the comparison take a third of that.
const COMPARED: usize = 1 << 20;

/// While a lane moves at least this many bytes inside its host, the background thread of the link advances the lane's
/// transfers. Moving them takes some 100 us, and that thread begins 50 us after it was woken.
const DRIVEN: usize = 512 << 10;

/// Returns the schedule of the chosen algorithm, or the direct one if the chosen algorithm does not support the kind.
pub fn schedule(algorithm: Algorithm, kind: Kind, members: usize, root: usize) -> Result<Schedule> {
    Schedule::new(algorithm, kind, members, root, 1)
        .or_else(|| Schedule::new(Algorithm::Direct, kind, members, root, 1))
        .ok_or_else(|| Error::bug(format!("sagellm: no schedule for {kind} among {members} hosts")))
}

/// Returns the offsets of consecutive blocks that have these `sizes`, and the total size.
pub fn borders(sizes: impl Iterator<Item = usize>) -> Vec<usize> {
    std::iter::once(0)
        .chain(sizes.scan(0, |at, size| {
            *at += size;
            Some(*at)
        }))
        .collect()
}

impl BatchRun<'_> {
    /// All-reduces `range` of the vector.
    pub fn all_reduce(&mut self, vector: &Vector, range: &Range<usize>) -> Result<()> {
        if self.chosen.strict {
            return self.all_reduce_strict(vector, range);
        }
        let compared = self.compare_all(range.len())?;
        let leaders = self.chosen.leaders.clamp(1, self.host_map.min_local_size());
        let shares: Vec<Range<usize>> = (0..leaders).map(|at| vector.part(range, at, leaders)).collect();
        let mine = shares.get(self.host_map.local_rank).cloned();
        let bytes = if mine.is_some() { range.len() } else { 0 };
        let mut room = match leaders {
            1 => self.room(vector, range, bytes, compared),
            _ => Room::Scratch(self.memory(bytes)),
        };
        let memory = room.slice(bytes);
        self.reduce_inside(vector, range, &shares, 0, memory)?;
        if let Some(mine) = &mine {
            let members = self.host_map.leaders(self.host_map.local_rank);
            let own = &mut memory[mine.start - range.start..mine.end - range.start];
            self.combine_between(Kind::AllReduce, vector, mine, &members, 0, own)?;
            vector.finish(mine.start, own);
        }
        self.spread_inside(vector, range, &shares, memory)?;
        self.keep(room);
        self.share_issued(0)
    }

    /// Compares the headers of all ranks before any data is moved, if this pays. If this lane has run an earlier
    /// segment of the operation, the headers are known to be equal. Returns whether the headers were compared. The
    /// comparison pays if the group consists of more than two hosts with one rank each, and if working in place
    /// (`room`) saves more time than the comparison takes, which is log2(hosts) messages without data. A rank that
    /// finds a different header fails and sends nothing more. The others then wait for it, so no rank returns unless
    /// all headers are equal.
    fn compare_all(&mut self, bytes: usize) -> Result<bool> {
        if self.compared {
            return Ok(true);
        }
        let hosts = self.host_map.hosts.len();
        let compares = bytes >= COMPARED && hosts > 2 && self.host_map.ranks() == hosts;
        if compares {
            let members = self.host_map.leaders(0);
            let steps = schedule(Algorithm::Dissemination, Kind::Barrier, members.len(), 0)?;
            self.run_schedule(&steps, &members, &[], &|_| 0..0, None)?;
        }
        Ok(compares)
    }

    /// Returns working memory for `range` of the vector; `bytes` is 0 if this rank needs none. Give the memory back
    /// with `keep`. If this rank is alone on its host, and the operation is in place, contiguous and without a factor,
    /// the working memory may be the operation's own outputs, which saves two copies. On a mismatch the outputs stay
    /// unchanged, because nothing is combined before the headers were compared. If `compared`, the headers were
    /// compared before any data is moved. Otherwise there are only two hosts, and the other host's header is checked
    /// when its first data arrives.
    #[allow(unsafe_code)] // memory of an operation
    fn room(&mut self, vector: &Vector, range: &Range<usize>, bytes: usize, compared: bool) -> Room {
        let outputs = cut(&vector.outputs, range);
        let alone = self.inside.is_none() && (compared || self.host_map.hosts.len() == 2);
        let plain = !matches!(vector.op, ReduceOp::PremulSum(_));
        let in_place = alone && plain && cut(&vector.inputs, range) == outputs;
        // SAFETY: the operations of the batch outlive this memory, and only this thread uses their outputs.
        match unsafe { whole(&outputs) }.filter(|own| in_place && own.len() == bytes) {
            Some(own) => Room::Outputs(own),
            None => Room::Scratch(self.memory(bytes)),
        }
    }

    fn keep(&mut self, room: Room) {
        if let Room::Scratch(memory) = room {
            *self.scratch = memory;
        }
    }

    /// Reduces the elements of this host's ranks. Local rank i gets the result for `shares[i]`; if there is only one
    /// share, local rank `root` gets the result for all of `range`. The results are stored in `memory`, which covers
    /// `range`.
    pub fn reduce_inside(
        &mut self,
        vector: &Vector,
        range: &Range<usize>,
        shares: &[Range<usize>],
        root: usize,
        memory: &mut [u8],
    ) -> Result<()> {
        if self.inside.is_none() {
            vector.start(range.start, &mut memory[..range.len()]);
            return Ok(());
        }
        let (index, local_ranks) = (self.host_map.local_rank, self.host_map.local_ranks().len());
        for run in &vector.runs {
            let part = run.bytes.start.max(range.start)..run.bytes.end.min(range.end);
            if part.start >= part.end {
                continue;
            }
            let call = HostCall { dtype: run.dtype, op: inside_op(vector), ..HostCall::new(Kind::Reduce) };
            let inputs = cut(&vector.inputs, &part);
            let at = |range_of: &Range<usize>| range_of.start - range.start..range_of.end - range.start;
            if shares.len() == 1 {
                let outputs = if index == root { vec![written(&mut memory[at(&part)])] } else { Vec::new() };
                self.run_in_host(HostCall { root, inputs, outputs, ..call })?;
            } else {
                let common = |share: &Range<usize>| {
                    let start = share.start.max(part.start);
                    start..share.end.min(part.end).max(start)
                };
                let mut in_blocks: Vec<usize> = shares.iter().map(|share| common(share).len()).collect();
                in_blocks.resize(local_ranks, 0);
                let outputs = shares.get(index).map(|share| written(&mut memory[at(&common(share))]));
                let outputs = outputs.into_iter().filter(|span| span.bytes > 0).collect();
                self.run_in_host(HostCall { kind: Kind::ReduceScatter, inputs, outputs, in_blocks, ..call })?;
            }
        }
        Ok(())
    }

    /// Copies the results from the owners of the shares to the outputs of every rank of this host. `memory` covers
    /// `range`.
    fn spread_inside(
        &mut self,
        vector: &Vector,
        range: &Range<usize>,
        shares: &[Range<usize>],
        memory: &mut [u8],
    ) -> Result<()> {
        let outputs = cut(&vector.outputs, range);
        let Some(mine) = self.inside.map(|_| shares.get(self.host_map.local_rank)) else {
            copy_out(&outputs, 0, &memory[..range.len()]);
            return Ok(());
        };
        let own = mine.map(|mine| mine.start - range.start..mine.end - range.start);
        if shares.len() == 1 {
            return self.broadcast_inside(0, own.map(|own| &memory[own]), outputs);
        }
        let mut out_blocks: Vec<usize> = shares.iter().map(ExactSizeIterator::len).collect();
        out_blocks.resize(self.host_map.local_ranks().len(), 0);
        let inputs = own.map(|own| span(&memory[own])).into_iter().filter(|span| span.bytes > 0).collect();
        self.run_in_host(HostCall { inputs, outputs, out_blocks, ..HostCall::new(Kind::AllGather) })
    }

    /// Broadcasts from local rank `root` to the outputs of every rank of this host. `data` is Some only on the root.
    fn broadcast_inside(&mut self, root: usize, data: Option<&[u8]>, outputs: Vec<Span>) -> Result<()> {
        let Some(data) = data else {
            return self.run_in_host(HostCall { root, outputs, ..HostCall::new(Kind::Broadcast) });
        };
        copy_out(&outputs, 0, data);
        self.run_in_host(HostCall { root, inputs: vec![span(data)], ..HostCall::new(Kind::Broadcast) })
    }

    /// Runs all_reduce or reduce among the leaders. `share` is a range of the vector, and `own` has its bytes.
    fn combine_between(
        &mut self,
        kind: Kind,
        vector: &Vector,
        share: &Range<usize>,
        members: &[usize],
        root: usize,
        own: &mut [u8],
    ) -> Result<()> {
        let steps = schedule(self.chosen.algorithm, kind, members.len(), root)?;
        let parts = steps.parts();
        let ranges = |part: usize| {
            let range = vector.part(share, part, parts);
            range.start - share.start..range.end - share.start
        };
        self.run_schedule(&steps, members, &[written(own)], &ranges, Some((vector, share.start)))
    }

    /// Like `all_reduce`, but the result has the same bits as on one host.
    fn all_reduce_strict(&mut self, vector: &Vector, range: &Range<usize>) -> Result<()> {
        let (shares, own) = self.own_share_strict(vector, range)?;
        let outputs: Vec<Vec<Span>> = shares.iter().map(|share| cut(&vector.outputs, share)).collect();
        self.all_gather(&[span(&own)], &outputs)
    }

    /// Returns each rank's share of `range`, and the result for this rank's share, which is combined from the original
    /// elements of all ranks.
    fn own_share_strict(&mut self, vector: &Vector, range: &Range<usize>) -> Result<(Vec<Range<usize>>, Vec<u8>)> {
        let ranks = self.host_map.ranks();
        let shares: Vec<Range<usize>> = (0..ranks).map(|rank| vector.part(range, rank, ranks)).collect();
        let mine = shares[self.host_map.me].clone();
        let mut sources = vec![0u8; mine.len() * ranks];
        let inputs: Vec<Vec<Span>> = shares.iter().map(|share| cut(&vector.inputs, share)).collect();
        let outputs: Vec<Vec<Span>> =
            (0..ranks).map(|rank| vec![written(&mut sources[rank * mine.len()..(rank + 1) * mine.len()])]).collect();
        self.all_to_all(&inputs, &outputs)?;
        let mut own = vec![0u8; mine.len()];
        vector.combine_all(mine.start, &mut own, &sources, &self.factors);
        Ok((shares, own))
    }

    /// Reduces `range` of the vector to rank `root`.
    pub fn reduce(&mut self, vector: &Vector, range: &Range<usize>, root: usize) -> Result<()> {
        if self.chosen.strict {
            let (shares, own) = self.own_share_strict(vector, range)?;
            let outputs = shares.iter().map(|share| cut(&vector.outputs, share)).collect::<Vec<_>>();
            return self.gather(
                &[span(&own)],
                &shares.iter().map(ExactSizeIterator::len).collect::<Vec<_>>(),
                &outputs,
                root,
            );
        }
        let members = self.host_map.leaders_with(root);
        let leader = self.leader_position(&members);
        let mut room = self.room(vector, range, range.len(), false);
        let memory = room.slice(range.len());
        self.reduce_inside(vector, range, std::slice::from_ref(range), leader, memory)?;
        if self.host_map.local_rank == leader {
            let host = self.host_map.host_of[root];
            self.combine_between(Kind::Reduce, vector, range, &members, host, memory)?;
            if self.host_map.me == root {
                vector.finish(range.start, memory);
                copy_out(&vector.outputs, range.start, memory);
            }
        }
        self.keep(room);
        Ok(())
    }

    pub fn leader_position(&self, members: &[usize]) -> usize {
        let leader = members[self.host_map.host];
        self.host_map.local_ranks().iter().position(|rank| *rank == leader).expect("a leader lives on its host")
    }

    /// Broadcasts from rank `root`. `data` is the inputs on the root and the outputs on the other ranks.
    pub fn broadcast(&mut self, data: &[Span], root: usize) -> Result<()> {
        let rails = self.chosen.leaders.clamp(1, self.host_map.min_local_size());
        if rails > 1 {
            return self.broadcast_over_rails(data, root, rails);
        }
        let bytes: usize = data.iter().map(|span| span.bytes).sum();
        let members = self.host_map.leaders_with(root);
        let leader = self.leader_position(&members);
        if self.host_map.local_rank == leader {
            let steps = schedule(self.chosen.algorithm, Kind::Broadcast, members.len(), self.host_map.host_of[root])?;
            let range = |part: usize| part_range(bytes, steps.parts(), part);
            self.run_schedule(&steps, &members, data, &range, None)?;
        }
        if self.inside.is_none() {
            return Ok(());
        }
        let data = data.to_vec();
        let (inputs, outputs) =
            if self.host_map.local_rank == leader { (data, Vec::new()) } else { (Vec::new(), data) };
        self.run_in_host(HostCall { root: leader, inputs, outputs, ..HostCall::new(Kind::Broadcast) })
    }

    /// Gathers `input` of every rank on all ranks. `outputs[q]` is the memory for rank q's block. Blocks may differ in
    /// size.
    pub fn all_gather(&mut self, input: &[Span], outputs: &[Vec<Span>]) -> Result<()> {
        let sizes: Vec<usize> = outputs.iter().map(|spans| spans.iter().map(|span| span.bytes).sum()).collect();
        if self.over_rails() {
            return self.all_gather_over_rails(input, outputs, &sizes);
        }
        let hosts = self.host_borders(&sizes);
        let in_order: Vec<Span> = self.host_map.by_host().flat_map(|rank| outputs[rank].iter().copied()).collect();
        let block = |host: usize| hosts[host]..hosts[host + 1];
        let own = block(self.host_map.host);
        // If this host has several ranks, their blocks are copied to the outputs only after the other hosts' calls were
        // found to match. A rank that is alone on its host copies only its own block before that.
        let mut memory = if self.inside.is_some() { self.memory(own.len()) } else { Vec::new() };
        let here = if self.inside.is_some() { vec![written(&mut memory[..own.len()])] } else { cut(&in_order, &own) };
        self.gather_inside(input, &sizes, &here)?;
        if self.host_map.local_rank == 0 {
            let members = self.host_map.leaders(0);
            let steps = schedule(self.chosen.algorithm, Kind::AllGather, members.len(), 0)?;
            let (before, after) = (cut(&in_order, &(0..own.start)), cut(&in_order, &(own.end..hosts[members.len()])));
            self.run_schedule(&steps, &members, &[before, here.clone(), after].concat(), &block, None)?;
            copy_across(&here, &cut(&in_order, &own));
        }
        if self.inside.is_some() {
            let (inputs, outputs) =
                if self.host_map.local_rank == 0 { (in_order, Vec::new()) } else { (Vec::new(), in_order) };
            self.run_in_host(HostCall { inputs, outputs, ..HostCall::new(Kind::Broadcast) })?;
            *self.scratch = memory;
        }
        self.share_issued(0)
    }

    /// Gathers the blocks of this host's ranks, in rank order, into `blocks` on each of these ranks. `sizes` is indexed
    /// by rank of the group.
    fn gather_inside(&mut self, input: &[Span], sizes: &[usize], blocks: &[Span]) -> Result<()> {
        if self.inside.is_none() {
            copy_across(input, blocks);
            return Ok(());
        }
        let out_blocks = self.host_map.local_ranks().iter().map(|rank| sizes[*rank]).collect();
        let (inputs, outputs) = (input.to_vec(), blocks.to_vec());
        let gathered = HostCall { inputs, outputs, out_blocks, ..HostCall::new(Kind::AllGather) };
        self.run_in_host(gathered)
    }

    /// Returns the offset at which each host's blocks start, if the ranks' blocks are grouped by host.
    fn host_borders(&self, sizes: &[usize]) -> Vec<usize> {
        borders(self.host_map.hosts.iter().map(|ranks| ranks.iter().map(|rank| sizes[*rank]).sum()))
    }

    /// Reduce-scatters `vector` with one leader per host. `vector` has one block per rank, grouped by host. `sizes` is
    /// indexed by rank. `output` receives this rank's block.
    pub fn reduce_scatter(&mut self, vector: &Vector, sizes: &[usize], output: &[Span]) -> Result<()> {
        let hosts = self.host_borders(sizes);
        let total = vector.bytes();
        let own = hosts[self.host_map.host]..hosts[self.host_map.host + 1];
        let mut memory = self.memory(total);
        let whole = 0..total;
        self.reduce_inside(vector, &whole, std::slice::from_ref(&whole), 0, &mut memory)?;
        if self.host_map.local_rank == 0 {
            let members = self.host_map.leaders(0);
            let steps = schedule(self.chosen.algorithm, Kind::ReduceScatter, members.len(), 0)?;
            let ranges = |host: usize| hosts[host]..hosts[host + 1];
            self.run_schedule(&steps, &members, &[written(&mut memory[..total])], &ranges, Some((vector, 0)))?;
            vector.finish(own.start, &mut memory[own.clone()]);
        }
        if self.inside.is_none() {
            copy_out(output, 0, &memory[own]);
        } else {
            self.scatter_inside(0, &mut memory[own], sizes, output)?;
        }
        *self.scratch = memory;
        Ok(())
    }

    /// Like `reduce_scatter`, but the result has the same bits as on one host. `vector` is in rank order.
    pub fn reduce_scatter_strict(&mut self, vector: &Vector, sizes: &[usize], output: &[Span]) -> Result<()> {
        let starts = borders(sizes.iter().copied());
        let (ranks, mine) = (self.host_map.ranks(), sizes[self.host_map.me]);
        let mut sources = vec![0u8; mine * ranks];
        let inputs: Vec<Vec<Span>> =
            (0..ranks).map(|rank| cut(&vector.inputs, &(starts[rank]..starts[rank + 1]))).collect();
        let outputs: Vec<Vec<Span>> =
            (0..ranks).map(|rank| vec![written(&mut sources[rank * mine..(rank + 1) * mine])]).collect();
        self.all_to_all(&inputs, &outputs)?;
        let mut own = vec![0u8; mine];
        vector.combine_all(starts[self.host_map.me], &mut own, &sources, &self.factors);
        copy_out(output, 0, &own);
        Ok(())
    }

    /// Scatters `blocks` from local rank `root` to the ranks of this host. `blocks` has one block for each of these
    /// ranks.
    fn scatter_inside(&mut self, root: usize, blocks: &mut [u8], sizes: &[usize], output: &[Span]) -> Result<()> {
        let local_ranks = self.host_map.local_ranks();
        let (leads, equal) =
            (self.host_map.local_rank == root, local_ranks.windows(2).all(|two| sizes[two[0]] == sizes[two[1]]));
        if equal {
            let inputs = if leads { vec![span(blocks)] } else { Vec::new() };
            return self.run_in_host(HostCall {
                root,
                inputs,
                outputs: output.to_vec(),
                ..HostCall::new(Kind::Scatter)
            });
        }
        // The engine for shared memory cannot scatter blocks of unequal size, so every rank receives all blocks and
        // copies its own.
        let starts = borders(local_ranks.iter().map(|rank| sizes[*rank]));
        let piece = vec![written(blocks)];
        let (inputs, outputs) = if leads { (piece, Vec::new()) } else { (Vec::new(), piece) };
        self.run_in_host(HostCall { root, inputs, outputs, ..HostCall::new(Kind::Broadcast) })?;
        copy_out(output, 0, &blocks[starts[self.host_map.local_rank]..starts[self.host_map.local_rank + 1]]);
        Ok(())
    }

    /// Gathers `input` of every rank on rank `root`. `outputs[q]` is the memory for rank q's block; only the root uses
    /// `outputs`.
    pub fn gather(&mut self, input: &[Span], sizes: &[usize], outputs: &[Vec<Span>], root: usize) -> Result<()> {
        let hosts = self.host_borders(sizes);
        let total = *hosts.last().expect("at least one host");
        let mut memory = Vec::new();
        let blocks: Vec<Span> = if self.host_map.me == root {
            self.host_map.by_host().flat_map(|rank| outputs[rank].iter().copied()).collect()
        } else {
            memory = self.memory(total);
            vec![written(&mut memory[..total])]
        };
        self.gather_inside(input, sizes, &cut(&blocks, &(hosts[self.host_map.host]..hosts[self.host_map.host + 1])))?;
        let members = self.host_map.leaders_with(root);
        if members[self.host_map.host] == self.host_map.me {
            let steps = schedule(self.chosen.algorithm, Kind::Gather, members.len(), self.host_map.host_of[root])?;
            self.run_schedule(&steps, &members, &blocks, &|host| hosts[host]..hosts[host + 1], None)?;
        }
        if self.host_map.me != root {
            *self.scratch = memory;
        }
        Ok(())
    }

    /// Scatters the blocks of rank `root`. `inputs[q]` is rank q's block; only the root uses `inputs`.
    pub fn scatter(&mut self, inputs: &[Vec<Span>], sizes: &[usize], output: &[Span], root: usize) -> Result<()> {
        let hosts = self.host_borders(sizes);
        let total = *hosts.last().expect("at least one host");
        let own = hosts[self.host_map.host]..hosts[self.host_map.host + 1];
        let mut memory = self.memory(total);
        let members = self.host_map.leaders_with(root);
        let leader = self.leader_position(&members);
        let blocks: Vec<Span> = if self.host_map.me == root {
            self.host_map.by_host().flat_map(|rank| inputs[rank].iter().copied()).collect()
        } else {
            vec![written(&mut memory[..total])]
        };
        if self.host_map.local_rank == leader {
            let steps = schedule(self.chosen.algorithm, Kind::Scatter, members.len(), self.host_map.host_of[root])?;
            self.run_schedule(&steps, &members, &blocks, &|host| hosts[host]..hosts[host + 1], None)?;
        }
        if self.inside.is_none() {
            copy_across(&cut(&blocks, &own), output);
        } else {
            if self.host_map.me == root {
                copy_in(&blocks, own.start, &mut memory[own.clone()]);
            }
            self.scatter_inside(leader, &mut memory[own], sizes, output)?;
        }
        *self.scratch = memory;
        Ok(())
    }

    /// Sends `inputs[q]` to rank q, and receives rank q's block into `outputs[q]`.
    #[allow(unsafe_code)] // sends from and receives into memory of an operation
    pub fn all_to_all(&mut self, inputs: &[Vec<Span>], outputs: &[Vec<Span>]) -> Result<()> {
        let others = self.far_ranks();
        // If inputs and outputs overlap, arriving data is kept in buffers until all sends have been copied.
        let apart = !share_memory(inputs, outputs);
        let sends = others.iter().map(|rank| Outgoing { peer: *rank, pieces: inputs[*rank].clone(), stays: apart });
        let receives = others.iter().map(|rank| {
            let into = &outputs[*rank];
            Incoming { peer: *rank, bytes: bytes_of(into), into: apart.then(|| into.clone()) }
        });
        let (sends, receives) = (sends.collect::<Vec<_>>(), receives.collect());
        // The ranks of this host exchange their blocks while the messages between hosts are in flight.
        // SAFETY: this is memory of the batch's operations, which outlive `begun`. The memory of a send with `stays`
        // overlaps no receive, and `all_to_all_inside` writes none of it.
        let begun = unsafe { self.transport.begin(self.header, self.deadline, &sends, receives, usize::MAX) }?;
        self.all_to_all_inside(inputs, outputs)?;
        let mut factors = std::mem::take(&mut self.factors);
        let mut take = |at: usize, Arrived { header, at: from, data }: Arrived| {
            copy_out(&outputs[others[at]], from, data);
            factors[others[at]] = f64::from_bits(header.factor);
        };
        let issued = self.transport.complete(begun, Take::Each(&mut take))?;
        self.factors = factors;
        self.header.issued = self.header.issued.min(issued);
        Ok(())
    }

    /// Returns the ranks of other hosts in the order in which this rank sends to them. The ranks of a host start with
    /// different ranks of the next host, so that they do not all send to the same rank first.
    fn far_ranks(&self) -> Vec<usize> {
        let hosts = &self.host_map.hosts;
        let next = (1..hosts.len()).map(|ahead| &hosts[(self.host_map.host + ahead) % hosts.len()]);
        next.flat_map(|ranks| (0..ranks.len()).map(|at| ranks[(self.host_map.local_rank + at) % ranks.len()])).collect()
    }

    /// The part of an all_to_all among the ranks of this host.
    fn all_to_all_inside(&self, inputs: &[Vec<Span>], outputs: &[Vec<Span>]) -> Result<()> {
        let local_ranks = self.host_map.local_ranks();
        let list = |blocks: &[Vec<Span>]| -> (Vec<Span>, Vec<usize>) {
            let spans = local_ranks.iter().flat_map(|rank| blocks[*rank].iter().copied()).collect();
            (spans, local_ranks.iter().map(|rank| bytes_of(&blocks[*rank])).collect())
        };
        let ((inputs, in_blocks), (outputs, out_blocks)) = (list(inputs), list(outputs));
        let bytes: usize = out_blocks.iter().sum();
        let _driven = (bytes >= DRIVEN).then(|| self.transport.keep_driven());
        if self.inside.is_none() {
            copy_across(&inputs, &outputs);
            return Ok(());
        }
        self.run_in_host(HostCall { inputs, outputs, in_blocks, out_blocks, ..HostCall::new(Kind::AllToAll) })
    }

    /// Moves no data. No rank returns before all ranks have entered.
    pub fn barrier(&mut self) -> Result<()> {
        if self.host_map.local_rank == 0 {
            let members = self.host_map.leaders(0);
            let steps = schedule(self.chosen.algorithm, Kind::Barrier, members.len(), 0)?;
            self.run_schedule(&steps, &members, &[], &|_| 0..0, None)?;
        }
        self.share_issued(0)
    }
}

fn bytes_of(spans: &[Span]) -> usize {
    spans.iter().map(|span| span.bytes).sum()
}

/// Whether a block of `a` shares memory with a block of `b`.
fn share_memory(a: &[Vec<Span>], b: &[Vec<Span>]) -> bool {
    let mut all: Vec<(usize, usize, bool)> =
        a.iter().flatten().map(|span| (span.addr, span.addr + span.bytes, true)).collect();
    all.extend(b.iter().flatten().map(|span| (span.addr, span.addr + span.bytes, false)));
    all.retain(|(start, end, _)| start < end);
    all.sort_unstable();
    let mut ends = [0, 0];
    all.iter().any(|(start, end, is_a)| {
        let shared = *start < ends[usize::from(!is_a)];
        ends[usize::from(*is_a)] = ends[usize::from(*is_a)].max(*end);
        shared
    })
}

/// The working memory of a collective.
enum Room {
    Outputs(&'static mut [u8]),
    Scratch(Vec<u8>),
}

impl Room {
    fn slice(&mut self, bytes: usize) -> &mut [u8] {
        match self {
            Room::Outputs(own) => own,
            Room::Scratch(memory) => &mut memory[..bytes],
        }
    }
}

/// Returns the reduce op among the ranks of a host. It applies the factors of PREMUL_SUM. For AVG it is SUM, because
/// `Vector::finish` divides.
fn inside_op(vector: &Vector) -> ReduceOp {
    match vector.op {
        ReduceOp::PremulSum(factor) => ReduceOp::PremulSum(factor),
        other => partial(other),
    }
}
