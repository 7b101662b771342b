//! Runs one batch: the ranks of each host run steps among themselves, and the *leaders*, one or more ranks of each
//! host, run schedules with the leaders of the other hosts. The collectives themselves are in `collectives.rs`.
//!
//! All ranks of a host run the same steps, and all members of a schedule run the same schedule. So no rank waits for a
//! message that is never sent.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::frames::FrameHeader;
use super::host_map::HostMap;
use super::step::{Arrived, Incoming, Outgoing, Take};
use super::transport::{AFTER_DEADLINE, Exchange, Posted, Transport};
use super::vector::{Vector, cut, span, whole, written};
use crate::algorithms::{Algorithm, How, Recv, Schedule, Step};
use crate::engine::Told;
use crate::error::{Error, Result};
use crate::fusion::planner::Batch;
use crate::op::Op;
use crate::os::clock;
use crate::select::inter::HostsChoice;
use crate::types::{Dtype, Kind, ReduceOp, Request, Span};

/// A shared-memory group of this host's ranks. Each lane (`lanes`) has its own group.
pub trait HostGroup: Send + Sync {
    /// Runs one operation to its end. The caller keeps its memory valid until then.
    fn run(&self, request: Request) -> Result<()>;
    /// Fails all pending operations of this group, on this rank and on its peers.
    fn abort(&self, error: &Error);
    /// Leaves the group in order.
    fn leave(&self);
    /// Returns, for each other rank of this host, its position on the host and whether it has ended or left.
    fn watched(&self) -> Vec<(usize, bool)>;
    /// Returns the fault that a rank of this host has reported, with the rank's position on the host.
    fn reported(&self) -> Option<Told>;
    /// Returns the process of a rank of this host, for error texts. `index` is its position on the host.
    fn process(&self, index: usize) -> String;
}

/// The algorithm that was chosen for a batch. Equal on every rank (`select::inter::between_hosts`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChosenAlgorithm {
    pub algorithm: Algorithm,
    /// How many ranks of each host talk to other hosts.
    pub leaders: usize,
    /// Whether the result must be bit-identical to the result on one host: every element is combined in rank order.
    pub strict: bool,
}

/// A batch that a lane has taken from the planner.
pub struct Task {
    pub batch: Batch,
    pub ops: Vec<Arc<Op>>,
    pub header: FrameHeader,
    pub choice: HostsChoice,
}

pub struct BatchRun<'a> {
    pub host_map: &'a HostMap,
    /// None if this rank is alone on its host.
    pub inside: Option<&'a dyn HostGroup>,
    pub transport: &'a mut Transport,
    /// This rank's header of the batch. Its `issued` is lowered to the smallest one that a peer reports.
    pub header: FrameHeader,
    /// Factors of PREMUL_SUM by rank, as far as they have been received.
    pub factors: Vec<f64>,
    pub deadline: u64,
    pub chosen: ChosenAlgorithm,
    /// Whether this lane has compared the headers of all ranks in an earlier segment of this operation.
    pub compared: bool,
    /// Buffer that is reused from batch to batch.
    pub scratch: &'a mut Vec<u8>,
}

impl BatchRun<'_> {
    /// Takes `scratch`, grown to at least `bytes`. Assign it back to `self.scratch` after use.
    pub fn memory(&mut self, bytes: usize) -> Vec<u8> {
        let mut memory = std::mem::take(self.scratch);
        if memory.len() < bytes {
            memory.resize(bytes, 0);
        }
        memory
    }

    /// Runs an operation among the ranks of this host. The lists of `call` have the same meaning as in `Request`.
    #[allow(unsafe_code)] // makes a call over memory, and waits for its end
    pub fn run_in_host(&self, call: HostCall) -> Result<()> {
        let Some(inside) = self.inside else {
            return Err(Error::bug("sagellm: a rank that is alone on its host called its host's group"));
        };
        let left = Duration::from_nanos(self.deadline.saturating_sub(clock::now()));
        // SAFETY: the memory belongs to operations of the batch, which end after this call, or to buffers of the batch,
        // which outlive the call. `run` returns only when the operation has ended.
        let mut request = unsafe { Request::new(call.kind, call.inputs, call.outputs) };
        (request.dtype, request.op, request.root) = (call.dtype, call.op, call.root as u32);
        request.timeout_ms = Some((left + AFTER_DEADLINE).as_millis() as u64);
        (request.in_blocks, request.out_blocks) = (call.in_blocks, call.out_blocks);
        inside.run(request).map_err(|error| match error.rank() {
            // If this rank itself found the loss of a rank, the error names the whole group, not the host's group.
            Some(rank) if error.found_by() == Some(self.host_map.me) && self.host_map.local_ranks().contains(&rank) => {
                self.transport.names().lost(rank, &self.header.during(), "")
            }
            _ => error,
        })
    }

    /// Compares the operations that the ranks of this host are about to run. Also gives each rank the PREMUL_SUM
    /// factors of the other ranks and the minimum of all `FrameHeader::issued`.
    pub fn compare_inside(&mut self) -> Result<()> {
        if self.inside.is_none() {
            return Ok(());
        }
        let mine = self.header.write();
        let mut all = vec![0u8; mine.len() * self.host_map.local_ranks().len()];
        self.run_in_host(HostCall {
            inputs: vec![span(&mine)],
            outputs: vec![written(&mut all)],
            ..HostCall::new(Kind::AllGather)
        })?;
        let (headers, _) = all.as_chunks::<{ FrameHeader::BYTES }>();
        for (rank, theirs) in self.host_map.local_ranks().iter().zip(headers) {
            let theirs = FrameHeader::read(theirs);
            if let Some(error) = self.header.disagreement(self.host_map.me, *rank, &theirs, "") {
                return Err(error);
            }
            self.header.issued = self.header.issued.min(theirs.issued);
            self.factors[*rank] = f64::from_bits(theirs.factor);
            self.transport.heard.iter_mut().for_each(|heard| heard.push((*rank, theirs.factor)));
        }
        Ok(())
    }

    /// Broadcasts to every rank of this host the smallest `issued` that local rank `leader` has received. Called after
    /// the batch's data was moved.
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

    /// Runs the schedule of a collective among `members` (ranks of the group), one of which is this rank. The schedule
    /// works on the memory of `spans`; `ranges` maps a part of the schedule to its bytes in that memory. If the
    /// schedule combines elements, `numbers` has the vector that combines them and the offset in that vector at which
    /// the memory begins. The memory must then be one span.
    #[allow(unsafe_code)] // sends from and receives into memory of the batch, and waits for the end
    pub fn run_schedule(
        &mut self,
        schedule: &Schedule,
        members: &[usize],
        spans: &[Span],
        ranges: &dyn Fn(usize) -> Range<usize>,
        numbers: Option<(&Vector, usize)>,
    ) -> Result<()> {
        let position = members.iter().position(|rank| *rank == self.host_map.me).expect("only members come here");
        let ranges =
            |parts: &[Range<usize>]| -> Vec<Range<usize>> { parts.iter().cloned().flatten().map(ranges).collect() };
        let segment = numbers.map_or(usize::MAX, |(vector, _)| vector.segment());
        let pieces = |ranges: &[Range<usize>]| ranges.iter().flat_map(|range| cut(spans, range)).collect();
        let receives = |step: &Step| -> Vec<Incoming> {
            let incoming = |recv: &Recv| {
                let ranges = ranges(&recv.parts);
                let bytes = ranges.iter().map(ExactSizeIterator::len).sum();
                Incoming { peer: members[recv.peer], bytes, into: (recv.how == How::Copy).then(|| pieces(&ranges)) }
            };
            step.recvs.iter().map(incoming).collect()
        };
        let mut posted: Option<Posted> = None;
        for k in 0..schedule.steps() {
            let step = schedule.step(position, k);
            let into: Vec<Vec<Range<usize>>> = step.recvs.iter().map(|recv| ranges(&recv.parts)).collect();
            // A step may combine received elements into memory that it also sends, but it never copies received data
            // into such memory (`algorithms`).
            let combined: Vec<&Range<usize>> = step
                .recvs
                .iter()
                .zip(&into)
                .filter(|(recv, _)| recv.how != How::Copy)
                .flat_map(|(_, all)| all)
                .collect();
            let sends: Vec<Outgoing> = step
                .sends
                .iter()
                .map(|send| {
                    let out = ranges(&send.parts);
                    let stays = !out.iter().any(|range| combined.iter().any(|other| overlap(range, other)));
                    Outgoing { peer: members[send.peer], pieces: pieces(&out), stays }
                })
                .collect();
            let next = (k + 1 < schedule.steps()).then(|| schedule.step(position, k + 1));
            let next = next.filter(|next| is_short(&step, next) && is_apart(&step, next)).map(|next| receives(&next));
            let mut each = |index: usize, Arrived { at, data, .. }: Arrived| {
                if let Some((vector, start)) = numbers {
                    let before = step.recvs[index].how == How::ReduceAfter;
                    combine_at(spans, &into[index], at, data, before, (vector, start));
                }
            };
            let order = rank_order(&step.recvs, position);
            let mut together = |at: usize, data: &[&[u8]]| {
                let (vector, start) = numbers.expect("only numbers are combined");
                combine_in_order(spans, &into[0], at, data, &order, (vector, start));
            };
            let ordered = step.recvs.iter().any(|recv| recv.how == How::InRankOrder);
            let take = if ordered { Take::Together(&mut together) } else { Take::Each(&mut each) };
            let (header, deadline, is_ahead) = (self.header, self.deadline, next.is_some());
            let receives = match posted.take() {
                Some(posted) => posted,
                // SAFETY: as below.
                None => unsafe { self.transport.post(&header, receives(&step), segment) }?,
            };
            let next = next.unwrap_or_default();
            let messages = Exchange { header, deadline, segment, sends: &sends, receives, next };
            // SAFETY: the memory belongs to the batch, which outlives the call, and no other thread uses it. In this
            // step nothing is received or combined into the memory of a send with `stays`, and no data of the next step
            // arrives in memory while this step uses that memory (`is_apart`).
            let (issued, ahead) = unsafe { self.transport.step(messages, take) }?;
            posted = is_ahead.then_some(ahead);
            self.header.issued = self.header.issued.min(issued);
        }
        Ok(())
    }
}

/// An operation among the ranks of one host. Unset lists are empty.
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

/// Whether the receives of the next step may be posted before this step ends. A receive that copies must not write
/// memory into which this step receives or combines, nor memory that this step sends to a rank other than the receive's
/// peer. The peer itself may return a part in the next step: it sends the part only after it has received all of it.
fn is_apart(step: &Step, next: &Step) -> bool {
    let meet = |some: &[Range<usize>], others: &[Range<usize>]| {
        some.iter().any(|range| others.iter().any(|other| overlap(range, other)))
    };
    next.recvs.iter().filter(|recv| recv.how == How::Copy).all(|recv| {
        let sent = step.sends.iter().any(|send| send.peer != recv.peer && meet(&send.parts, &recv.parts));
        let received = step.recvs.iter().any(|before| meet(&before.parts, &recv.parts));
        !sent && !received
    })
}

/// Whether the comparisons of `is_apart` take little time. Exchanges with hundreds of hosts have many messages a step.
fn is_short(step: &Step, next: &Step) -> bool {
    next.recvs.len() * (step.sends.len() + step.recvs.len()) <= 1 << 12
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

/// Returns the memory of a range of elements. The range lies in one span.
#[allow(unsafe_code)] // memory of a batch
fn numbers_of<'a>(spans: &[Span], range: &Range<usize>) -> &'a mut [u8] {
    // SAFETY: this is memory of the batch that this thread runs. It is used for one combination, during which nothing
    // else uses it.
    unsafe { whole(&cut(spans, range)) }.unwrap_or_default()
}

/// Combines `data` into `ranges`. A message has the bytes of `ranges`, in order, and `data` starts at offset `at` of
/// it. With `own_first`, this rank's elements are the left operand.
fn combine_at(
    spans: &[Span],
    ranges: &[Range<usize>],
    at: usize,
    data: &[u8],
    own_first: bool,
    (vector, start): (&Vector, usize),
) {
    for (here, part) in covered(ranges, at..at + data.len()) {
        vector.combine(start + here.start, numbers_of(spans, &here), &data[part], own_first);
    }
}

/// Returns the operands of a step that combines in rank order, from the lowest rank to the highest. An operand is the
/// index of a receive, or None for this rank, which is at `position` in the schedule.
fn rank_order(recvs: &[Recv], position: usize) -> Vec<Option<usize>> {
    let mut order: Vec<Option<usize>> = std::iter::once(None).chain((0..recvs.len()).map(Some)).collect();
    order.sort_by_key(|index| index.map_or(position, |index| recvs[index].peer));
    order
}

/// Combines the elements of all ranks into `ranges`, in the order `order`. A message has the bytes of `ranges`, in
/// order. `data` has one slice per receive, and each slice starts at offset `at` of its message.
fn combine_in_order(
    spans: &[Span],
    ranges: &[Range<usize>],
    at: usize,
    data: &[&[u8]],
    order: &[Option<usize>],
    (vector, start): (&Vector, usize),
) {
    let bytes = data.first().map_or(0, |first| first.len());
    for (here, part) in covered(ranges, at..at + bytes) {
        let parts: Vec<Option<&[u8]>> =
            order.iter().map(|index| index.map(|index| &data[index][part.clone()])).collect();
        vector.combine_parts(start + here.start, numbers_of(spans, &here), &parts);
    }
}

/// Returns the parts of `ranges` that a piece of a message covers, each with its place in the piece. The message has
/// the bytes of `ranges`, in order; `message` is the piece.
fn covered(ranges: &[Range<usize>], message: Range<usize>) -> Vec<(Range<usize>, Range<usize>)> {
    let mut found = Vec::with_capacity(ranges.len());
    let mut begin = 0;
    for range in ranges {
        let (from, to) = (message.start.max(begin), message.end.min(begin + range.len()));
        if from < to {
            let here = range.start + (from - begin)..range.start + (to - begin);
            found.push((here, from - message.start..to - message.start));
        }
        begin += range.len();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithms::Send;

    #[test]
    fn receives_are_posted_a_step_ahead_where_no_other_rank_uses_the_memory() {
        let is_ahead = |algorithm, kind, ranks: usize| {
            let schedule = Schedule::new(algorithm, kind, ranks, 0, 1).unwrap();
            (0..ranks).all(|me| {
                let steps: Vec<Step> = (0..schedule.steps()).map(|k| schedule.step(me, k)).collect();
                steps.len() > 1 && steps.windows(2).all(|two| is_apart(&two[0], &two[1]))
            })
        };
        assert!(is_ahead(Algorithm::Ring, Kind::AllGather, 4));
        assert!(is_ahead(Algorithm::TwoStep, Kind::AllReduce, 4));
        assert!(is_ahead(Algorithm::TwoStep, Kind::Broadcast, 4));
        assert!(is_ahead(Algorithm::Binomial, Kind::Broadcast, 8));
        assert!(is_ahead(Algorithm::Halving, Kind::AllReduce, 2));
        assert!(is_ahead(Algorithm::Halving, Kind::AllReduce, 4));
    }

    #[test]
    fn a_receive_is_not_posted_while_its_memory_is_in_use() {
        let parts = |range: Range<usize>| std::iter::once(range).collect::<Vec<_>>();
        let recv = |peer, part: usize, how| Recv { peer, parts: parts(part..part + 1), how };
        let step = Step {
            sends: vec![Send { peer: 1, parts: parts(0..2) }],
            recvs: vec![recv(2, 5, How::ReduceAfter), recv(2, 6, How::Copy)],
        };
        let next = |peer, part, how| Step { sends: Vec::new(), recvs: vec![recv(peer, part, how)] };
        assert!(is_apart(&step, &next(3, 7, How::Copy)));
        assert!(is_apart(&step, &next(1, 0, How::Copy)), "rank 1 has received it before it sends it");
        assert!(!is_apart(&step, &next(2, 1, How::Copy)), "rank 1 may still receive it");
        assert!(!is_apart(&step, &next(2, 5, How::Copy)) && !is_apart(&step, &next(2, 6, How::Copy)));
        assert!(is_apart(&step, &next(2, 5, How::ReduceAfter)), "what is combined arrives in a buffer");
    }
}
