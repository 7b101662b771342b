//! Local checks of a request: what the memory safety of the engine rests on. torch's own rules were checked before.

use super::Group;
use crate::error::{Error, Result};
use crate::reduce;
use crate::reduce::Kernel;
use crate::types::{ANY_RANK, Dtype, Kind, Request, Span};

impl Group {
    /// Refuses what does not fit together, before anything is numbered or sent; finds the kernel of a reduction.
    pub(super) fn validate(&self, request: &Request) -> Result<Option<Kernel>> {
        let (kind, ranks, me) = (request.kind, self.config.size, self.config.rank);
        let wrong = |text: String| Err(Error::Invalid(format!("sagellm {kind}: {text}")));
        let peer = request.root as usize;
        if kind.rooted() && peer >= ranks {
            return wrong(format!("root {peer} of a group of {ranks} ranks; ranks count from 0"));
        }
        if kind.is_p2p() && (peer == me || peer >= ranks) && !(kind == Kind::Recv && request.root == ANY_RANK) {
            return wrong(format!("peer {peer} for rank {me} of a group of {ranks} ranks"));
        }
        for blocks in [&request.in_blocks, &request.out_blocks] {
            if !blocks.is_empty() && blocks.len() != ranks {
                return wrong(format!("{} block sizes for {ranks} ranks", blocks.len()));
            }
        }
        let sum = |spans: &[Span]| spans.iter().map(|span| span.bytes).sum::<usize>();
        let (bytes_in, bytes_out) = (sum(request.inputs()), sum(request.outputs()));
        let blocks = |list: &Vec<usize>, total: usize| match list.is_empty() {
            true => total.is_multiple_of(ranks),
            false => list.iter().sum::<usize>() == total,
        };
        let own = |list: &Vec<usize>, total: usize| if list.is_empty() { total / ranks } else { list[me] };
        let root = peer == me;
        let fits = match kind {
            Kind::AllReduce => bytes_in == bytes_out,
            Kind::Reduce => bytes_out == if root { bytes_in } else { 0 },
            Kind::Broadcast => {
                if root {
                    bytes_out == 0
                } else {
                    bytes_in == 0
                }
            }
            Kind::AllGather => {
                blocks(&request.out_blocks, bytes_out) && own(&request.out_blocks, bytes_out) == bytes_in
            }
            Kind::Gather => bytes_out == if root { bytes_in * ranks } else { 0 },
            Kind::Scatter => bytes_in == if root { bytes_out * ranks } else { 0 },
            Kind::ReduceScatter => {
                blocks(&request.in_blocks, bytes_in) && own(&request.in_blocks, bytes_in) == bytes_out
            }
            Kind::AllToAll => {
                blocks(&request.in_blocks, bytes_in)
                    && blocks(&request.out_blocks, bytes_out)
                    && own(&request.in_blocks, bytes_in) == own(&request.out_blocks, bytes_out)
            }
            Kind::Barrier => bytes_in + bytes_out == 0,
            Kind::Send => bytes_out == 0,
            Kind::Recv => bytes_in == 0,
        };
        if !fits {
            return wrong(format!(
                "{bytes_in} bytes in, {bytes_out} bytes out, blocks {:?} and {:?} do not fit together for rank {me} of \
                 {ranks}",
                request.in_blocks, request.out_blocks
            ));
        }
        if !kind.reduces() {
            return Ok(None);
        }
        if request.dtype == Dtype::Bytes || request.inputs().iter().any(|span| span.bytes % request.dtype.size() != 0) {
            return wrong(format!("{bytes_in} bytes are no whole number of {} elements", request.dtype.name()));
        }
        match reduce::kernel(request.dtype, request.op, ranks) {
            Ok(kernel) => Ok(Some(kernel)),
            Err(error) => wrong(error.text().to_string()),
        }
    }
}
