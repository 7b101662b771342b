//! Turns a lowering and one rank's memory into calls of the library. `calls` is pure, so that tests can run it with a
//! model of a library in plain memory. `launch` puts the calls on a stream.

use super::communicator::{Call, Communicator, Kept, Message};
use super::lowering::{Lowering, Method};
use super::runtime::{Runtime, Stream};
use crate::error::{Error, Result};
use crate::types::{Kind, Span};

/// One rank's part in an operation. Addresses are on the device. The memory holds elements of the lowering's wire type:
/// `send` after the steps `before`, and `recv` before the steps `after`.
///
/// `send` and `recv` follow the table of `types::Request`, for the kind that the lowering names. Each has one span for
/// each block, or a single span if the blocks are equal and contiguous. `send` is empty if the rank sends nothing, and
/// `recv` is empty if it receives nothing.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    pub lowering: &'a Lowering,
    pub rank: u32,
    pub ranks: u32,
    /// Rank of the root, or the peer of a send or receive.
    pub root: u32,
    /// If the library itself has PREMUL_SUM: device address of the factor, in the lowering's wire type. 0 if the
    /// lowering contains the factor.
    pub factor: usize,
    pub send: &'a [Span],
    pub recv: &'a [Span],
}

/// Host memory to which the calls refer. It must be kept until the stream has completed the calls.
#[derive(Default)]
pub struct Launched {
    kept: Vec<Box<dyn std::any::Any + Send>>,
}

impl Launched {
    /// The memory of one call.
    pub fn of(kept: Kept) -> Launched {
        Launched { kept: kept.into_iter().collect() }
    }

    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    fn keep(&mut self, kept: Kept) {
        self.kept.extend(kept);
    }
}

/// Puts an operation of a communicator on a stream. Never waits for the device. Waits for peers only if the library
/// must first connect ranks (`first_use`).
pub fn launch(
    communicator: &dyn Communicator,
    runtime: &dyn Runtime,
    job: &Job<'_>,
    stream: Stream,
) -> Result<Launched> {
    let mut launched = Launched::default();
    let mut run = |call: &Call<'_>| {
        let kept: Kept = match *call {
            Call::Copy { from, to, bytes } => runtime.copy(to, from, bytes, stream).map(|()| None)?,
            _ if job.factor != 0 => communicator.call_by_factor(call, job.factor, stream)?,
            _ => communicator.call(call, stream)?,
        };
        launched.keep(kept);
        Ok(())
    };
    if !job.lowering.grouped {
        calls(job, &mut run)?;
        return Ok(launched);
    }
    communicator.group_start()?;
    let called = calls(job, &mut run);
    // Called after an error too, because a library group that stays open would include this thread's later calls.
    let ended = communicator.group_end();
    called.and(ended).map(|()| launched)
}

/// Passes the calls of one rank to `run` in order. Stops at the first error.
pub fn calls(job: &Job<'_>, run: &mut dyn FnMut(&Call<'_>) -> Result<()>) -> Result<()> {
    let lowering = job.lowering;
    match (lowering.kind, lowering.method) {
        (Kind::AllToAll, Method::Native) => all_to_all(job, run),
        (_, Method::Native) => native(job, run),
        (_, Method::Exchange) => exchange(job, run),
        (_, Method::PerRoot) => per_root(job, run),
    }
}

impl Job<'_> {
    fn wrong(&self, what: &str) -> Error {
        let Job { lowering, rank, ranks, send, recv, .. } = self;
        Error::bug(format!(
            "sagellm: {} of rank {rank} of {ranks}: {what}; {} and {} spans, {} and {} bytes",
            lowering.kind,
            send.len(),
            recv.len(),
            total(send),
            total(recv)
        ))
    }

    fn count(&self, bytes: usize) -> Result<usize> {
        let size = self.lowering.dtype.size();
        if bytes.is_multiple_of(size) {
            Ok(bytes / size)
        } else {
            Err(self.wrong(&format!("{bytes} bytes are no whole number of {}", self.lowering.dtype.name())))
        }
    }

    /// The block that is sent to rank `q` or received from it.
    fn block(&self, spans: &[Span], q: u32) -> Result<Span> {
        let ranks = self.ranks as usize;
        match spans {
            [] => Ok(Span { addr: 0, bytes: 0 }), // all blocks are empty
            _ if spans.len() == ranks => Ok(spans[q as usize]),
            [whole] if whole.bytes.is_multiple_of(ranks) => {
                let bytes = whole.bytes / ranks;
                Ok(Span { addr: whole.addr + bytes * q as usize, bytes })
            }
            _ => Err(self.wrong("that is no block for each rank")),
        }
    }

    /// Returns all blocks as one contiguous span. If the lowering is `contiguous`, the layout guarantees that this is
    /// possible.
    fn run(&self, spans: &[Span]) -> Result<Span> {
        // Empty blocks are skipped, because their addresses mean nothing.
        let mut whole = Span { addr: spans.first().map_or(0, |first| first.addr), bytes: 0 };
        for span in spans.iter().filter(|span| span.bytes > 0) {
            if whole.bytes == 0 {
                whole.addr = span.addr;
            } else if span.addr != whole.addr + whole.bytes {
                return Err(self.wrong("its blocks do not lie behind each other"));
            }
            whole.bytes += span.bytes;
        }
        Ok(whole)
    }
}

fn total(spans: &[Span]) -> usize {
    spans.iter().map(|span| span.bytes).sum()
}

fn native(job: &Job<'_>, run: &mut dyn FnMut(&Call<'_>) -> Result<()>) -> Result<()> {
    let Lowering { kind, dtype, op, .. } = *job.lowering;
    let (sent, received) = (job.run(job.send)?, job.run(job.recv)?);
    let (send, recv, root) = (sent.addr, received.addr, job.root);
    let at_root = job.rank == root;
    let ranks = job.ranks as usize;
    // The smaller of the sizes of input and output, and whether the larger size matches it.
    let (bytes, fits) = match kind {
        Kind::AllReduce => (sent.bytes, received.bytes == sent.bytes),
        Kind::Reduce => (sent.bytes, !at_root || received.bytes == sent.bytes),
        Kind::Broadcast if at_root => (sent.bytes, true),
        Kind::Broadcast => (received.bytes, true),
        Kind::AllGather => (sent.bytes, received.bytes == sent.bytes * ranks),
        Kind::Gather => (sent.bytes, !at_root || received.bytes == sent.bytes * ranks),
        Kind::ReduceScatter => (received.bytes, sent.bytes == received.bytes * ranks),
        Kind::Scatter => (received.bytes, !at_root || sent.bytes == received.bytes * ranks),
        _ => (0, false),
    };
    if !fits {
        return Err(job.wrong("the sizes do not belong together"));
    }
    let count = job.count(bytes)?;
    if count == 0 {
        return Ok(()); // on every rank, because the sizes agree
    }
    let call = match kind {
        Kind::AllReduce => Call::AllReduce { send, recv, count, dtype, op },
        Kind::Broadcast => Call::Broadcast { buffer: if at_root { send } else { recv }, count, dtype, root },
        Kind::Reduce => Call::Reduce { send, recv: if at_root { recv } else { send }, count, dtype, op, root },
        Kind::AllGather => Call::AllGather { send, recv, count, dtype },
        Kind::Gather => Call::Gather { send, recv, count, dtype, root },
        Kind::Scatter => Call::Scatter { send, recv, count, dtype, root },
        _ => Call::ReduceScatter { send, recv, count, dtype, op },
    };
    run(&call)
}

fn all_to_all(job: &Job<'_>, run: &mut dyn FnMut(&Call<'_>) -> Result<()>) -> Result<()> {
    let (sent, received) = (job.run(job.send)?, job.run(job.recv)?);
    let counts = |spans: &[Span]| -> Result<Vec<u64>> {
        (0..job.ranks).map(|q| Ok(job.count(job.block(spans, q)?.bytes)? as u64)).collect()
    };
    let (send_counts, recv_counts) = (counts(job.send)?, counts(job.recv)?);
    run(&Call::AllToAllV {
        send: sent.addr,
        recv: received.addr,
        send_counts: &send_counts,
        recv_counts: &recv_counts,
        dtype: job.lowering.dtype,
    })
}

fn copy(from: Span, to: Span, run: &mut dyn FnMut(&Call<'_>) -> Result<()>) -> Result<()> {
    if from.bytes == 0 || from.addr == to.addr {
        return Ok(());
    }
    run(&Call::Copy { from: from.addr, to: to.addr, bytes: from.bytes })
}

fn exchange(job: &Job<'_>, run: &mut dyn FnMut(&Call<'_>) -> Result<()>) -> Result<()> {
    let me = job.rank;
    let mut messages = Vec::new();
    let mut own = None;
    let mut message = |sends: bool, peer: u32, span: Span| {
        if peer == me {
            own = Some(span); // the root's own block; `local` copies it to or from the root's other buffer
        } else if span.bytes > 0 {
            messages.push(Message { peer, sends, addr: span.addr, bytes: span.bytes });
        }
    };
    let whole = |spans: &[Span]| job.run(spans);
    let mut local = None;
    match job.lowering.kind {
        Kind::Send => message(true, job.root, whole(job.send)?),
        Kind::Recv => message(false, job.root, whole(job.recv)?),
        Kind::Gather if me == job.root => {
            for q in 0..job.ranks {
                message(false, q, job.block(job.recv, q)?);
            }
            local = own.map(|to| Ok((whole(job.send)?, to)));
        }
        Kind::Gather => message(true, job.root, whole(job.send)?),
        Kind::Scatter if me == job.root => {
            for q in 0..job.ranks {
                message(true, q, job.block(job.send, q)?);
            }
            local = own.map(|from| Ok((from, whole(job.recv)?)));
        }
        Kind::Scatter => message(false, job.root, whole(job.recv)?),
        _ => {
            // Each rank begins with its successor, so that the ranks do not all send to rank 0 first.
            for step in 1..job.ranks {
                message(true, (me + step) % job.ranks, job.block(job.send, (me + step) % job.ranks)?);
                let from = (me + job.ranks - step) % job.ranks;
                message(false, from, job.block(job.recv, from)?);
            }
            local = Some(Ok((job.block(job.send, me)?, job.block(job.recv, me)?)));
        }
    }
    if job.lowering.kind.is_p2p() && job.root == me {
        return Err(Error::invalid(format!("sagellm: {}: rank {me} is its own peer", job.lowering.kind)));
    }
    if let Some(pair) = local {
        let (from, to): (Span, Span) = pair?;
        if from.bytes != to.bytes {
            return Err(job.wrong("what the rank has for itself has two sizes"));
        }
        copy(from, to, run)?;
    }
    if messages.is_empty() { Ok(()) } else { run(&Call::Exchange(&messages)) }
}

fn per_root(job: &Job<'_>, run: &mut dyn FnMut(&Call<'_>) -> Result<()>) -> Result<()> {
    let Lowering { kind, dtype, op, .. } = *job.lowering;
    if kind == Kind::AllGather {
        // First copies the rank's own block to the place from which the broadcast sends it.
        let own = job.block(job.recv, job.rank)?;
        let send = job.run(job.send)?;
        if own.bytes != send.bytes {
            return Err(job.wrong("the own block has two sizes"));
        }
        copy(send, own, run)?;
    }
    for root in 0..job.ranks {
        let block = job.block(if kind == Kind::AllGather { job.recv } else { job.send }, root)?;
        let count = job.count(block.bytes)?;
        if count == 0 {
            continue; // on every rank, because all ranks know all sizes
        }
        let call = if kind == Kind::AllGather {
            Call::Broadcast { buffer: block.addr, count, dtype, root }
        } else {
            let recv = if root == job.rank { job.run(job.recv)?.addr } else { block.addr };
            Call::Reduce { send: block.addr, recv, count, dtype, op, root }
        };
        run(&call)?;
    }
    Ok(())
}
