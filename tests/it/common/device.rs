//! Operations on devices for the tests: their data, the expected results, and the steps of the shim before and after
//! the library's call.

use std::time::{Duration, Instant};

use sagellm::engine::device::lowering::Double;
use sagellm::engine::device::{Capabilities, Local, LoweringInput, Runtime, Stream};
use sagellm::error::{Error, Result};
use sagellm::types::{Dtype, Kind, ReduceOp, Span};

use crate::common::reference::{bytes_of, decode_16, is_complex, is_float, reference_all};

pub const OPS: [ReduceOp; 9] = [
    ReduceOp::Sum,
    ReduceOp::Avg,
    ReduceOp::Product,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Band,
    ReduceOp::Bor,
    ReduceOp::Bxor,
    ReduceOp::PremulSum(2.0),
];

/// Returns the dtype of a complex number's parts, or `dtype` itself if it is real.
pub fn part(dtype: Dtype) -> Dtype {
    match dtype {
        Dtype::C32 => Dtype::F16,
        Dtype::C64 => Dtype::F32,
        Dtype::C128 => Dtype::F64,
        other => other,
    }
}

pub fn number(dtype: Dtype, bytes: &[u8]) -> f64 {
    match dtype {
        Dtype::F64 => f64::from_le_bytes(bytes.try_into().unwrap()),
        Dtype::F32 => f64::from(f32::from_le_bytes(bytes.try_into().unwrap())),
        Dtype::F16 => decode_16(u16::from_le_bytes(bytes.try_into().unwrap()), 10),
        _ => decode_16(u16::from_le_bytes(bytes.try_into().unwrap()), 7),
    }
}

fn bytes_of_number(dtype: Dtype, number: f64) -> Vec<u8> {
    if dtype == Dtype::F64 { number.to_le_bytes().to_vec() } else { bytes_of(dtype, number as f32) }
}

fn whole(dtype: Dtype, bytes: &[u8]) -> i128 {
    let signed = matches!(dtype, Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64);
    let mut wide = [if signed && bytes[bytes.len() - 1] >= 0x80 { 0xff } else { 0 }; 16];
    wide[..bytes.len()].copy_from_slice(bytes);
    i128::from_le_bytes(wide)
}

fn each(dtype: Dtype, data: &[u8], change: impl Fn(Dtype, &[u8]) -> Vec<u8>) -> Vec<u8> {
    let dtype = part(dtype);
    data.chunks(dtype.size()).flat_map(|element| change(dtype, element)).collect()
}

/// Applies one local step to the data, as the shim does with torch's operators.
pub fn local(step: Local, dtype: &mut Dtype, data: Vec<u8>, ranks: usize) -> Vec<u8> {
    match step {
        Local::Cast(to) => {
            let target = part(to);
            let out = each(*dtype, &data, |from, element| {
                if is_float(from) {
                    bytes_of_number(target, number(from, element))
                } else {
                    whole(from, element).to_le_bytes()[..target.size()].to_vec()
                }
            });
            *dtype = to;
            out
        }
        Local::Scale(factor) => reference_all(*dtype, ReduceOp::PremulSum(factor), &[data], &[factor]),
        Local::Divide(count) => each(*dtype, &data, |of, element| {
            if is_float(of) {
                bytes_of_number(of, number(of, element) / count as f64)
            } else {
                (whole(of, element) / count as i128).to_le_bytes()[..of.size()].to_vec()
            }
        }),
        Local::Fold(op) => {
            let block = data.len() / ranks;
            let blocks: Vec<Vec<u8>> = (0..ranks).map(|q| data[q * block..][..block].to_vec()).collect();
            reference_all(*dtype, op, &blocks, &vec![1.0; ranks])
        }
    }
}

/// Returns test data. Floats are whole numbers from -2 to 2, so that sums, products and halves are exact. Integers have
/// random bits.
pub fn data(dtype: Dtype, seed: usize, elements: usize) -> Vec<u8> {
    let mut state = seed as u64 * 2654435761 + 12345;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        state >> 33
    };
    let parts = if is_complex(dtype) { 2 * elements } else { elements };
    (0..parts)
        .flat_map(|_| match part(dtype) {
            Dtype::Bool => vec![(next() % 2) as u8],
            of if is_float(of) => bytes_of_number(of, (next() % 5) as f64 - 2.0),
            // Random in nearly all bits, so that sums overflow.
            of => (next() << 31 ^ next()).to_le_bytes()[..of.size()].to_vec(),
        })
        .collect()
}

/// Returns the number of elements in the block that rank `from` sends to rank `to`.
pub fn block(kind: Kind, equal_counts: bool, from: usize, to: usize) -> usize {
    match kind {
        _ if equal_counts => 3,
        Kind::AllGather => from * 2, // rank 0's block is empty
        Kind::ReduceScatter => to + 1,
        Kind::AllToAll => (from * 3 + to) % 4,
        _ => 3,
    }
}

pub struct Case {
    pub asked: LoweringInput,
    pub root: usize,
}

impl Case {
    pub fn input(&self, me: usize) -> Vec<u8> {
        let LoweringInput { kind, dtype, ranks, equal_counts, .. } = self.asked;
        let to_all =
            |me: usize| (0..ranks).flat_map(move |q| data(dtype, me * 100 + q, block(kind, equal_counts, me, q)));
        match kind {
            Kind::AllReduce | Kind::Reduce | Kind::Gather => data(dtype, me, 7),
            Kind::Broadcast if me == self.root => data(dtype, me, 7),
            Kind::AllGather => data(dtype, me, block(kind, equal_counts, me, 0)),
            Kind::Scatter if me == self.root => to_all(me).collect(),
            Kind::ReduceScatter | Kind::AllToAll => to_all(me).collect(),
            _ => Vec::new(),
        }
    }

    /// Returns the size in bytes, in the caller's dtype, of each block that rank `me` sends or receives.
    pub fn blocks(&self, me: usize, sends: bool) -> Vec<usize> {
        let LoweringInput { kind, dtype, ranks, equal_counts, .. } = self.asked;
        (0..ranks)
            .map(|q| if sends { block(kind, equal_counts, me, q) } else { block(kind, equal_counts, q, me) } * dtype.size())
            .collect()
    }

    /// Like `expected`, but rounded to floats if the library's policy for doubles is `AsFloat`.
    pub fn expected_by(&self, me: usize, able: &Capabilities) -> Vec<u8> {
        let LoweringInput { dtype, .. } = self.asked;
        let expected = self.expected(me);
        if able.double != Double::AsFloat || !matches!(dtype, Dtype::F64 | Dtype::C128) {
            return expected;
        }
        each(dtype, &expected, |of, bytes| bytes_of_number(of, f64::from(number(of, bytes) as f32)))
    }

    pub fn expected(&self, me: usize) -> Vec<u8> {
        let LoweringInput { kind, dtype, op, ranks, .. } = self.asked;
        let inputs: Vec<Vec<u8>> = (0..ranks).map(|q| self.input(q)).collect();
        let factor = if let ReduceOp::PremulSum(factor) = op { factor } else { 1.0 };
        let combined = |inputs: &[Vec<u8>]| reference_all(dtype, op, inputs, &vec![factor; ranks]);
        let cut = |from: usize, to: usize| {
            let sizes = self.blocks(from, true);
            let start: usize = sizes[..to].iter().sum();
            inputs[from][start..][..sizes[to]].to_vec()
        };
        let root = me == self.root;
        match kind {
            Kind::AllReduce => combined(&inputs),
            Kind::Reduce if root => combined(&inputs),
            Kind::Broadcast => inputs[self.root].clone(),
            Kind::AllGather => inputs.concat(),
            Kind::Gather if root => inputs.concat(),
            Kind::Scatter => cut(self.root, me),
            Kind::ReduceScatter => combined(&(0..ranks).map(|q| cut(q, me)).collect::<Vec<_>>()),
            Kind::AllToAll => (0..ranks).flat_map(|q| cut(q, me)).collect(),
            _ => Vec::new(),
        }
    }
}

pub fn spans(memory: &mut [u8], blocks: Option<Vec<usize>>) -> Vec<Span> {
    let mut addr = memory.as_mut_ptr() as usize;
    match blocks {
        _ if memory.is_empty() => Vec::new(),
        None => vec![Span { addr, bytes: memory.len() }],
        Some(blocks) => blocks
            .into_iter()
            .map(|bytes| {
                addr += bytes;
                // As in a layout, an empty block has the address 0.
                Span { addr: if bytes == 0 { 0 } else { addr - bytes }, bytes }
            })
            .collect(),
    }
}

/// Waits until the stream's work is complete. Polls, because the runtimes' own waiting functions take no deadline.
pub fn synchronize(runtime: &dyn Runtime, stream: Stream, deadline: Duration) -> Result<()> {
    let end = Instant::now() + deadline;
    let mut pause = Duration::from_micros(10);
    while !runtime.stream_idle(stream)? {
        if Instant::now() >= end {
            let text = format!("sagellm: a stream was not done within {} ms", deadline.as_millis());
            return Err(Error::timeout(text));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(1));
    }
    Ok(())
}
