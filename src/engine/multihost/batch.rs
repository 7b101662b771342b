//! Runs one batch: the steps among the ranks of one host, and those of their leaders with other hosts. The collectives
//! themselves are in `collectives.rs`.
//!
//! Every rank of a host takes the same steps with the others of its host, and the leaders (the ranks with one local
//! rank on every host) run the same schedule with each other, so no rank waits for a message that never comes.

use std::ops::Range;
use std::time::Duration;

use super::host_map::HostMap;
use super::transport::{Arrived, FrameHeader, Transport};
use super::vector::{Vector, span};
use crate::algorithms::{Algorithm, How, Schedule};
use crate::engine::Told;
use crate::error::{Error, Result};
use crate::op;
use crate::os::clock;
use crate::types::{Dtype, Kind, ReduceOp, Request, Span};

/// The shared-memory group of the ranks of this host, one for each lane.
pub trait HostGroup: Send + Sync {
    /// Runs one operation to its end. The caller keeps its memory valid meanwhile.
    fn run(&self, request: Request) -> Result<()>;
    /// Fails all pending operations of this group, on this rank and on its peers.
    fn abort(&self, error: &Error);
    /// Leaves the group in an orderly way.
    fn leave(&self);
    /// The other ranks of this host, and whether each has ended or left.
    fn watched(&self) -> Vec<(usize, bool)>;
    /// Why one of this host's ranks has failed the group, by its place on the host.
    fn reported(&self) -> Option<Told>;
    /// The process of a rank of this host, for error texts.
    fn process(&self, index: usize) -> String;
}

/// The algorithm of a batch; the same on every rank (`select::inter::between_hosts`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChosenAlgorithm {
    pub algorithm: Algorithm,
    /// Ranks of each host that talk to other hosts.
    pub leaders: usize,
    /// Gives the bits of one host: every element is combined in the order of the ranks.
    pub strict: bool,
}

pub struct BatchRun<'a> {
    pub host_map: &'a HostMap,
    /// None where this rank is alone on its host.
    pub inside: Option<&'a dyn HostGroup>,
    pub transport: &'a mut Transport,
    /// This rank's header of the batch. `issued` falls to the smallest value that a peer reported.
    pub header: FrameHeader,
    /// Factors of PREMUL_SUM by rank, as far as received.
    pub factors: Vec<f64>,
    pub deadline: u64,
    pub chosen: ChosenAlgorithm,
    /// Memory that is reused from batch to batch.
    pub scratch: &'a mut Vec<u8>,
}

impl BatchRun<'_> {
    /// Memory for this batch; return it as `self.scratch`.
    pub fn memory(&mut self, bytes: usize) -> Vec<u8> {
        let mut memory = std::mem::take(self.scratch);
        if memory.len() < bytes {
            memory.resize(bytes, 0);
        }
        memory
    }

    /// Runs an operation among the ranks of this host; lists as in `Request`.
    #[allow(unsafe_code)] // makes a call over memory, and waits for its end
    pub fn run_in_host(&self, call: HostCall) -> Result<()> {
        let Some(inside) = self.inside else {
            return Err(Error::Bug("sagellm: a rank that is alone on its host called its host's group".to_string()));
        };
        let left = Duration::from_nanos(self.deadline.saturating_sub(clock::now()));
        // SAFETY: the memory belongs to operations of the batch, which end after this call, or to buffers of the batch,
        // which outlive it: `run` returns when the operation has ended.
        let mut request = unsafe { Request::new(call.kind, call.inputs, call.outputs) };
        (request.dtype, request.op, request.root) = (call.dtype, call.op, call.root as u32);
        request.timeout_ms = Some(left.as_millis() as u64 + 500); // the operation's own deadline is reported first
        (request.in_blocks, request.out_blocks) = (call.in_blocks, call.out_blocks);
        inside.run(request).map_err(|error| match error {
            // The host's group names ranks by its own numbers; the user knows those of the whole group. Where another
            // rank of the host reported the death, only the text names the dead rank.
            Error::RankFailed { rank, ref text }
                if rank < self.host_map.local_ranks().len() && text.contains(&format!("rank {rank} (pid")) =>
            {
                let failed = self.host_map.local_ranks()[rank];
                Error::RankFailed {
                    rank: failed,
                    text: format!(
                        "sagellm: rank {failed} ({}) ended or left the group: rank {} is in {} number {}. Make a new group \
                         without it to go on",
                        inside.process(rank),
                        self.host_map.me,
                        op::describe(self.header.signature),
                        self.header.number
                    ),
                }
            }
            other => self.outward(other),
        })
    }

    /// A report of the host's group, with the reporting rank's number in the whole group.
    fn outward(&self, error: Error) -> Error {
        let outward = |text: String| {
            let named = self.host_map.local_ranks().iter().enumerate().find_map(|(index, rank)| {
                let head = text.strip_suffix(&format!(" (reported by rank {index})"))?;
                Some(format!("{head} (reported by rank {rank})"))
            });
            named.unwrap_or(text)
        };
        match error {
            Error::Timeout(text) => Error::Timeout(outward(text)),
            Error::Mismatch(text) => Error::Mismatch(outward(text)),
            Error::Aborted(text) => Error::Aborted(outward(text)),
            Error::RankFailed { rank, text } => Error::RankFailed { rank, text: outward(text) },
            other => other,
        }
    }

    /// The ranks of this host compare the operations they are about to run, and exchange factors and issued numbers.
    pub fn compare_inside(&mut self) -> Result<()> {
        const WORDS: usize = 6;
        if self.inside.is_none() {
            return Ok(());
        }
        let FrameHeader { signature, lists, chain, number, issued, factor } = self.header;
        let own = [signature, chain, number, issued, factor, lists];
        let mine: Vec<u8> = own.iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut all = vec![0u8; mine.len() * self.host_map.local_ranks().len()];
        self.run_in_host(HostCall {
            inputs: vec![span(&mine)],
            outputs: vec![written(&mut all)],
            ..HostCall::new(Kind::AllGather)
        })?;
        for (rank, theirs) in self.host_map.local_ranks().iter().zip(all.chunks_exact(WORDS * 8)) {
            let word = |at: usize| u64::from_le_bytes(theirs[at * 8..at * 8 + 8].try_into().expect("eight bytes"));
            if (word(0), word(2)) != (signature, number) {
                return Err(Error::Mismatch(format!(
                    "sagellm: ranks called different operations: rank {} called {} as number {number} of their group, rank \
                     {rank} called {} as number {}. Every rank must call the same collectives in the same order with the \
                     same sizes",
                    self.host_map.me,
                    op::describe(signature),
                    op::describe(word(0)),
                    word(2)
                )));
            }
            if let Some(error) = self.header.other_list(self.host_map.me, *rank, word(5)) {
                return Err(error);
            }
            if word(1) != chain {
                return Err(Error::Mismatch(format!(
                    "sagellm: rank {} and rank {rank} agree about {} number {number} of their group, but not about all \
                     of it: its list of sizes, an earlier operation, one that travels with it, or the options of the group \
                     differ. Every rank must call the same collectives in the same order with the same sizes",
                    self.host_map.me,
                    op::describe(signature)
                )));
            }
            self.header.issued = self.header.issued.min(word(3));
            self.factors[*rank] = f64::from_bits(word(4));
        }
        Ok(())
    }

    /// After the data of a batch, every rank of this host learns the smallest issued number that its leader received.
    pub fn share_issued(&mut self, leader: usize) -> Result<()> {
        if self.inside.is_none() {
            return Ok(());
        }
        let mut word = self.header.issued.to_le_bytes();
        let piece = vec![written(&mut word)];
        let (inputs, outputs) =
            if self.host_map.local_rank == leader { (piece, Vec::new()) } else { (Vec::new(), piece) };
        self.run_in_host(HostCall { root: leader, inputs, outputs, ..HostCall::new(Kind::Broadcast) })?;
        self.header.issued = self.header.issued.min(u64::from_le_bytes(word));
        Ok(())
    }

    /// Runs the schedule of a collective among `members` (ranks of the group), of which this rank is one. The schedule
    /// works on `memory`, of which `ranges` are the parts; `numbers` says how they are combined, and at which offset of
    /// the vector `memory` begins.
    pub fn run_schedule(
        &mut self,
        schedule: &Schedule,
        members: &[usize],
        memory: &mut [u8],
        ranges: &dyn Fn(usize) -> Range<usize>,
        numbers: Option<(&Vector, usize)>,
    ) -> Result<()> {
        let position = members.iter().position(|rank| *rank == self.host_map.me).expect("only members come here");
        let ranges =
            |parts: &[Range<usize>]| -> Vec<Range<usize>> { parts.iter().cloned().flatten().map(ranges).collect() };
        let total = |ranges: &[Range<usize>]| ranges.iter().map(ExactSizeIterator::len).sum::<usize>();
        for k in 0..schedule.steps() {
            let step = schedule.step(position, k);
            let out: Vec<Vec<Range<usize>>> = step.sends.iter().map(|send| ranges(&send.parts)).collect();
            let into: Vec<Vec<Range<usize>>> = step.recvs.iter().map(|recv| ranges(&recv.parts)).collect();
            let sends: Vec<(usize, usize)> =
                step.sends.iter().zip(&out).map(|(send, ranges)| (members[send.peer], total(ranges))).collect();
            let receives: Vec<(usize, usize)> =
                step.recvs.iter().zip(&into).map(|(recv, ranges)| (members[recv.peer], total(ranges))).collect();
            // Data that must be combined in the order of the ranks is kept until all of it is there.
            let ordered = step.recvs.iter().any(|recv| recv.how == How::InRankOrder);
            let mut kept: Vec<(usize, Vec<u8>)> = Vec::new();
            let cell = std::cell::RefCell::new(&mut *memory);
            let issued = self.transport.exchange(
                self.header,
                self.deadline,
                &sends,
                |at, data| gather(&cell.borrow(), &out[at], data),
                &receives,
                |at, Arrived { data, .. }| {
                    if ordered {
                        kept.push((step.recvs[at].peer, data.to_vec()));
                    } else {
                        apply(&mut cell.borrow_mut(), &into[at], data, step.recvs[at].how, numbers);
                    }
                    Ok(())
                },
            )?;
            self.header.issued = self.header.issued.min(issued);
            if ordered {
                let (vector, start) = numbers.expect("only numbers are combined");
                kept.push((position, joined(memory, &into[0])));
                kept.sort_by_key(|(peer, _)| *peer);
                combine_in_order(memory, &into[0], &kept, vector, start);
            }
        }
        Ok(())
    }
}

/// An operation among the ranks of one host; lists that are not given are empty.
pub struct HostCall {
    pub kind: Kind,
    pub dtype: Dtype,
    pub op: ReduceOp,
    /// A local rank.
    pub root: usize,
    pub inputs: Vec<Span>,
    pub outputs: Vec<Span>,
    pub in_blocks: Vec<usize>,
    pub out_blocks: Vec<usize>,
}

impl HostCall {
    pub fn new(kind: Kind) -> HostCall {
        let (inputs, outputs, in_blocks, out_blocks) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        HostCall { kind, dtype: Dtype::Bytes, op: ReduceOp::Sum, root: 0, inputs, outputs, in_blocks, out_blocks }
    }
}

/// A writable buffer as a span.
pub fn written(buffer: &mut [u8]) -> Span {
    Span { addr: buffer.as_mut_ptr() as usize, bytes: buffer.len() }
}

fn gather(memory: &[u8], ranges: &[Range<usize>], data: &mut [u8]) {
    let mut at = 0;
    for range in ranges {
        data[at..at + range.len()].copy_from_slice(&memory[range.clone()]);
        at += range.len();
    }
}

fn joined(memory: &[u8], ranges: &[Range<usize>]) -> Vec<u8> {
    ranges.iter().flat_map(|range| memory[range.clone()].iter().copied()).collect()
}

fn apply(memory: &mut [u8], ranges: &[Range<usize>], data: &[u8], how: How, numbers: Option<(&Vector, usize)>) {
    let mut at = 0;
    for range in ranges {
        let (own, theirs) = (&mut memory[range.clone()], &data[at..at + range.len()]);
        match (how, numbers) {
            (How::ReduceAfter, Some((vector, start))) => vector.combine(start + range.start, own, theirs, true),
            (How::ReduceBefore, Some((vector, start))) => vector.combine(start + range.start, own, theirs, false),
            _ => own.copy_from_slice(theirs),
        }
        at += range.len();
    }
}

fn combine_in_order(
    memory: &mut [u8],
    ranges: &[Range<usize>],
    sources: &[(usize, Vec<u8>)],
    vector: &Vector,
    start: usize,
) {
    let mut at = 0;
    for range in ranges {
        let parts: Vec<&[u8]> = sources.iter().map(|(_, data)| &data[at..at + range.len()]).collect();
        vector.combine_parts(start + range.start, &mut memory[range.clone()], &parts);
        at += range.len();
    }
}
