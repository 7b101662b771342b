//! Maps the requests of a batch, and their memory, to the collective that runs the batch.

use std::sync::Arc;

use super::batch::{BatchRun, Task};
use super::vector::{Vector, cut};
use crate::error::{Error, Result};
use crate::op::Op;
use crate::types::{Kind, Request, Span};

/// Runs the collective of a batch.
pub fn dispatch(run: &mut BatchRun, task: &Task) -> Result<()> {
    let request = &task.ops[0].request;
    let ranks = run.host_map.ranks();
    let root = request.root as usize;
    match request.kind {
        Kind::AllReduce | Kind::Reduce => {
            let vector = vector(&task.ops, ranks)?;
            let range = vector.part(&(0..vector.bytes()), task.batch.segment, task.batch.segments);
            match request.kind {
                Kind::AllReduce => run.all_reduce(&vector, &range),
                _ => run.reduce(&vector, &range, root),
            }
        }
        Kind::Broadcast => broadcast(run, task),
        Kind::AllGather => {
            let input: Vec<Span> = task.ops.iter().flat_map(|op| op.request.inputs().iter().copied()).collect();
            let mut outputs = vec![Vec::new(); ranks];
            for op in &task.ops {
                let blocks = blocks(op.request.outputs(), &op.request.out_blocks, ranks);
                outputs.iter_mut().zip(blocks).for_each(|(all, block)| all.extend(block));
            }
            run.all_gather(&input, &outputs)
        }
        Kind::ReduceScatter => reduce_scatter(run, request),
        Kind::Gather => {
            let size: usize = request.inputs().iter().map(|span| span.bytes).sum();
            let outputs = if run.host_map.me == root { blocks(request.outputs(), &[], ranks) } else { Vec::new() };
            run.gather(request.inputs(), &vec![size; ranks], &outputs, root)
        }
        Kind::Scatter => {
            let size: usize = request.outputs().iter().map(|span| span.bytes).sum();
            let inputs = if run.host_map.me == root { blocks(request.inputs(), &[], ranks) } else { Vec::new() };
            run.scatter(&inputs, &vec![size; ranks], request.outputs(), root)
        }
        Kind::AllToAll => {
            let inputs = blocks(request.inputs(), &request.in_blocks, ranks);
            run.all_to_all(&inputs, &blocks(request.outputs(), &request.out_blocks, ranks))
        }
        Kind::Barrier => run.barrier(),
        Kind::Send | Kind::Recv => Err(Error::bug("sagellm: a send or receive reached a lane")),
    }
}

/// Runs one segment of a broadcast.
fn broadcast(run: &mut BatchRun, task: &Task) -> Result<()> {
    let (request, batch) = (&task.ops[0].request, &task.batch);
    let root = request.root as usize;
    let data = if run.host_map.me == root { request.inputs() } else { request.outputs() };
    let total: usize = data.iter().map(|span| span.bytes).sum();
    let cut_at = |n: usize| if n == batch.segments { total } else { total / batch.segments * n };
    run.broadcast(&cut(data, &(cut_at(batch.segment)..cut_at(batch.segment + 1))), root)
}

/// Orders the blocks by host or by rail, in strict mode by rank, and runs the reduce_scatter.
fn reduce_scatter(run: &mut BatchRun, request: &Request) -> Result<()> {
    let ranks = run.host_map.ranks();
    let blocks = blocks(request.inputs(), &request.in_blocks, ranks);
    let sizes: Vec<usize> = blocks.iter().map(|block| block.iter().map(|span| span.bytes).sum()).collect();
    let mut vector = Vector::new(request.op);
    if run.chosen.strict {
        vector.push(request.dtype, request.inputs(), &[], ranks)?;
        return run.reduce_scatter_strict(&vector, &sizes, request.outputs());
    }
    let rails = run.over_rails();
    let order: Vec<usize> =
        if rails { run.host_map.rails().flatten().collect() } else { run.host_map.by_host().collect() };
    let in_order: Vec<Span> = order.iter().flat_map(|rank| blocks[*rank].iter().copied()).collect();
    vector.push(request.dtype, &in_order, &[], ranks)?;
    if rails {
        run.reduce_scatter_over_rails(&vector, &sizes, request.outputs())
    } else {
        run.reduce_scatter(&vector, &sizes, request.outputs())
    }
}

/// Returns the elements of a batch, sorted by type so that there are as few runs as possible.
fn vector(ops: &[Arc<Op>], ranks: usize) -> Result<Vector> {
    let mut vector = Vector::new(ops[0].request.op);
    let mut order: Vec<&Arc<Op>> = ops.iter().collect();
    order.sort_by_key(|op| op.request.dtype as u8);
    for op in order {
        vector.push(op.request.dtype, op.request.inputs(), op.request.outputs(), ranks)?;
    }
    Ok(vector)
}

/// Returns each rank's block of a list. If `sizes` is empty, all blocks have the same size.
fn blocks(spans: &[Span], sizes: &[usize], ranks: usize) -> Vec<Vec<Span>> {
    let total: usize = spans.iter().map(|span| span.bytes).sum();
    let mut start = 0;
    (0..ranks)
        .map(|rank| {
            let size = if sizes.is_empty() { total / ranks } else { sizes[rank] };
            let range = start..start + size;
            start += size;
            cut(spans, &range)
        })
        .collect()
}
