//! The engine of a group of one rank: every collective is a local copy that ends when it is issued.

#![allow(unsafe_code)] // copies and reduces caller memory, which comes as addresses

use std::sync::Arc;

use super::pieces::{Pieces, transfer};
use super::{Control, Ended, Engine};
use crate::error::{Error, Result};
use crate::op::Op;
use crate::reduce::Kernel;
use crate::select::explain::Explanation;
use crate::select::{Choice, GroupShape, OpDesc, Policy, explain};
use crate::types::{Kind, ReduceOp};

pub struct Solo {
    policy: Arc<Policy>,
}

impl Solo {
    pub fn new(policy: Arc<Policy>) -> Solo {
        Solo { policy }
    }
}

/// A group without peers.
struct NoPeers;

impl Control for NoPeers {}

impl Engine for Solo {
    fn control(&self) -> Arc<dyn Control> {
        Arc::new(NoPeers)
    }

    fn describe(&self) -> String {
        "alone, every operation is a local copy".to_string()
    }

    fn submit(&mut self, op: Arc<Op>, kernel: Option<Kernel>, ended: &mut Ended) -> Result<()> {
        let outcome = run(&op, kernel.as_ref());
        ended.push((op, outcome));
        Ok(())
    }

    fn explain(&self, desc: OpDesc, _batched: bool) -> Explanation {
        explain::explain(desc, &GroupShape::without_memory(1), &self.policy)
    }
}

/// Runs `op`. A reduction on one rank calls its kernel too: for PREMUL_SUM the kernel multiplies and rounds, otherwise
/// it copies.
fn run(op: &Op, kernel: Option<&Kernel>) -> Result<()> {
    let request = &op.request;
    if request.kind.is_p2p() {
        return Err(Error::invalid(format!(
            "sagellm {}: a group of one rank has no other rank to exchange messages with",
            request.kind
        )));
    }
    op.record_load(OpDesc::of(request, 1).load());
    op.record_choice(Choice::ALONE.code());
    op.prepare();
    let (inputs, outputs) = (Pieces(request.inputs()), Pieces(request.outputs()));
    let bytes = inputs.bytes().min(outputs.bytes());
    match kernel {
        Some(kernel) if bytes > 0 => {
            let factors = match request.op {
                ReduceOp::PremulSum(factor) => vec![factor],
                _ => Vec::new(),
            };
            let mut data = vec![0u8; bytes];
            let at = data.as_mut_ptr();
            // SAFETY: `data` has `bytes` bytes. The kernel may work in place on its only source.
            unsafe {
                inputs.read(0, at, bytes);
                kernel.reduce(at, &[at.cast_const()], &factors, bytes / kernel.element_size());
                outputs.write(0, at, bytes);
            }
        }
        // SAFETY: the request's contract: inputs and outputs are valid, and are the same memory or do not overlap.
        _ if request.kind != Kind::Barrier => unsafe { transfer(inputs, 0, outputs, 0, bytes) },
        _ => (),
    }
    op.store_back();
    Ok(())
}
