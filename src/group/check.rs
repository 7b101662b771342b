//! Checks a request locally. The engine's memory safety depends on these checks. The shim has already checked torch's
//! own rules.

use crate::error::{Error, Result};
use crate::reduce;
use crate::reduce::Kernel;
use crate::types::{ANY_RANK, Dtype, Kind, Request, Span};

fn wrong(kind: Kind, text: String) -> Error {
    Error::invalid(format!("sagellm {kind}: {text}"))
}

/// Refuses a request whose parts are inconsistent, before the request is numbered or sent. The request comes from rank
/// `me` of `ranks` ranks.
pub(super) fn validate(request: &Request, (me, ranks): (usize, usize)) -> Result<()> {
    let wrong = |text| wrong(request.kind, text);
    check_peer(request, (me, ranks)).map_err(wrong)?;
    for blocks in [&request.in_blocks, &request.out_blocks] {
        if !blocks.is_empty() && blocks.len() != ranks {
            return Err(wrong(format!("{} block sizes for {ranks} ranks", blocks.len())));
        }
    }
    let sum = |spans: &[Span]| spans.iter().map(|span| span.bytes).sum::<usize>();
    let (bytes_in, bytes_out) = (sum(request.inputs()), sum(request.outputs()));
    if !fits(request, (bytes_in, bytes_out), (me, ranks)) {
        return Err(wrong(format!(
            "{bytes_in} bytes in, {bytes_out} bytes out, blocks {:?} and {:?} do not fit together for rank {} of \
             {ranks}",
            request.in_blocks, request.out_blocks, me
        )));
    }
    let whole = |span: &Span| span.bytes.is_multiple_of(request.dtype.size());
    if request.kind.reduces() && (request.dtype == Dtype::Bytes || !request.inputs().iter().all(whole)) {
        return Err(wrong(format!("{bytes_in} bytes are no whole number of {} elements", request.dtype.name())));
    }
    Ok(())
}

/// Returns the kernel of a reduction. Fails if there is no kernel for the element type and the reduce op.
pub(super) fn kernel(request: &Request, ranks: usize) -> Result<Option<Kernel>> {
    if !request.kind.reduces() {
        return Ok(None);
    }
    let kernel = reduce::kernel(request.dtype, request.op, ranks);
    kernel.map(Some).map_err(|error| wrong(request.kind, error.text().to_string()))
}

/// Checks the root of a collective, or the peer of a message.
fn check_peer(request: &Request, (me, ranks): (usize, usize)) -> std::result::Result<(), String> {
    let kind = request.kind;
    let peer = request.root as usize;
    if kind.rooted() && peer >= ranks {
        return Err(format!("root {peer} of a group of {ranks} ranks; ranks count from 0"));
    }
    if kind.is_p2p() && (peer == me || peer >= ranks) && !(kind == Kind::Recv && request.root == ANY_RANK) {
        return Err(format!("peer {peer} for rank {me} of a group of {ranks} ranks"));
    }
    Ok(())
}

/// Whether the bytes read and written and the block sizes are consistent with the kind.
fn fits(request: &Request, (bytes_in, bytes_out): (usize, usize), (me, ranks): (usize, usize)) -> bool {
    let root = request.root as usize == me;
    // Without sizes, all blocks are equal.
    let blocks = |sizes: &[usize], total: usize| match sizes.is_empty() {
        true => total.is_multiple_of(ranks),
        false => sizes.iter().sum::<usize>() == total,
    };
    let own = |sizes: &[usize], total: usize| if sizes.is_empty() { total / ranks } else { sizes[me] };
    let (ins, outs) = (&request.in_blocks[..], &request.out_blocks[..]);
    match request.kind {
        Kind::AllReduce => bytes_in == bytes_out,
        Kind::Reduce => bytes_out == if root { bytes_in } else { 0 },
        Kind::Broadcast if root => bytes_out == 0,
        Kind::Broadcast => bytes_in == 0,
        Kind::AllGather => blocks(outs, bytes_out) && own(outs, bytes_out) == bytes_in,
        Kind::Gather => bytes_out == if root { bytes_in * ranks } else { 0 },
        Kind::Scatter => bytes_in == if root { bytes_out * ranks } else { 0 },
        Kind::ReduceScatter => blocks(ins, bytes_in) && own(ins, bytes_in) == bytes_out,
        Kind::AllToAll => {
            blocks(ins, bytes_in) && blocks(outs, bytes_out) && own(ins, bytes_in) == own(outs, bytes_out)
        }
        Kind::Barrier => bytes_in + bytes_out == 0,
        Kind::Send => bytes_out == 0,
        Kind::Recv => bytes_in == 0,
    }
}
