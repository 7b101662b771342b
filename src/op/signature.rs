//! The signature of an operation: the values on which all ranks must agree, packed into 64 bits that can be decoded for
//! error texts: kind (5 bits), reduce op (4), dtype (6), root (9), bytes (40). No other file of the product knows which
//! bits hold what.
//!
//! If an operation only moves data, bytes are signed but not the dtype. If blocks have different sizes, their sum is
//! signed. For an all_to_all no bytes are signed, because no rank knows all sizes (the tables of block sizes are
//! checked pair by pair); the lowest of its bits for bytes may be set as a mark instead.

use crate::types::{Dtype, Kind, ReduceOp, Request, Span};

const KIND: u32 = 59;
const OP: u32 = 55;
const DTYPE: u32 = 49;
const ROOT: u32 = 40;
/// The bits that hold the bytes.
const BYTES: u64 = (1 << ROOT) - 1;
/// The mark of an all_to_all.
const MARK: u64 = 1;

/// The signature of a request in a group of `ranks` ranks.
pub fn of(request: &Request, ranks: usize) -> u64 {
    debug_assert!(ranks <= 512);
    let sum = |spans: &[Span]| spans.iter().map(|span| span.bytes as u64).sum::<u64>();
    let sizes = (sum(request.inputs()), sum(request.outputs()));
    of_call(request.kind, (request.dtype, request.op), request.root, sizes)
}

/// The signature of a call that reads `read` bytes and writes `written` bytes.
pub fn of_call(kind: Kind, (dtype, op): (Dtype, ReduceOp), root: u32, (read, written): (u64, u64)) -> u64 {
    let bytes = match kind {
        Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter | Kind::Gather | Kind::Send => read,
        Kind::Broadcast => read.max(written),
        Kind::AllGather | Kind::Scatter | Kind::Recv => written,
        Kind::AllToAll | Kind::Barrier => 0,
    };
    let (dtype, op) = if kind.reduces() { (dtype as u64, u64::from(op.code())) } else { (0, 0) };
    let root = if kind.rooted() { field(u64::from(root), 0, DTYPE - ROOT) } else { 0 };
    (kind as u64) << KIND | op << OP | dtype << DTYPE | root << ROOT | (bytes & BYTES)
}

/// The bits of a word from `low` up to `high`.
fn field(word: u64, low: u32, high: u32) -> u64 {
    word >> low & ((1 << (high - low)) - 1)
}

/// The number of the signature's kind, which fits into 5 bits.
pub fn kind_code(signature: u64) -> u8 {
    (signature >> KIND) as u8
}

pub fn kind(signature: u64) -> Option<Kind> {
    Kind::from_u8(kind_code(signature))
}

/// The `ReduceOp::code` of the signature; 0 if the operation only moves data.
pub fn reduce_code(signature: u64) -> u8 {
    field(signature, OP, KIND) as u8
}

/// The signature with the bytes of another one added to its own.
pub fn with_bytes_of(signature: u64, other: u64) -> u64 {
    let bytes = ((signature & BYTES) + (other & BYTES)) & BYTES;
    signature & !BYTES | bytes
}

/// The signature of an all_to_all with the mark.
pub fn marked(signature: u64) -> u64 {
    debug_assert_eq!(kind(signature), Some(Kind::AllToAll), "only an all_to_all has this bit free");
    signature | MARK
}

pub fn is_marked(signature: u64) -> bool {
    kind(signature) == Some(Kind::AllToAll) && signature & MARK != 0
}

/// A signature as text: `all_reduce(1024 bytes, float32, SUM)`.
pub fn describe(signature: u64) -> String {
    let Some(kind) = kind(signature) else { return "an unknown operation".to_string() };
    let mut parts = Vec::new();
    if !matches!(kind, Kind::AllToAll | Kind::Barrier) {
        parts.push(format!("{} bytes", signature & BYTES));
    }
    if kind.reduces() {
        let dtype = Dtype::from_u8(field(signature, DTYPE, OP) as u8);
        parts.push(dtype.map_or("unknown dtype", Dtype::name).to_string());
        parts.push(ReduceOp::name_of(reduce_code(signature)).to_string());
    }
    if kind.rooted() {
        parts.push(format!("root {}", field(signature, ROOT, DTYPE)));
    }
    format!("{kind}({})", parts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGEST: (u64, u64) = (BYTES, BYTES);

    #[test]
    fn every_field_has_bits_of_its_own() {
        for kind in (0..=u8::MAX).filter_map(Kind::from_u8) {
            for dtype in (0..=u8::MAX).filter_map(Dtype::from_u8) {
                let op = ReduceOp::PremulSum(2.0);
                let signature = of_call(kind, (dtype, op), 511, LARGEST);
                assert_eq!(super::kind(signature), Some(kind));
                assert_eq!(reduce_code(signature), if kind.reduces() { op.code() } else { 0 });
                let text = describe(signature);
                assert!(text.starts_with(&kind.to_string()), "{text}");
                assert_eq!(text.contains("root 511"), kind.rooted(), "{text}");
                let reduction = format!(", {}, {}", dtype.name(), ReduceOp::name_of(op.code()));
                assert_eq!(text.contains(&reduction), kind.reduces(), "{text}");
                let signs_bytes = !matches!(kind, Kind::AllToAll | Kind::Barrier);
                assert_eq!(text.contains(&format!("{BYTES} bytes")), signs_bytes, "{text}");
            }
        }
    }

    #[test]
    fn bytes_are_added_without_a_carry_into_the_root() {
        let sign = |bytes| of_call(Kind::Reduce, (Dtype::F32, ReduceOp::Sum), 3, (bytes, 0));
        assert_eq!(with_bytes_of(sign(8), sign(16)), sign(24));
        assert_eq!(with_bytes_of(sign(BYTES), sign(2)), sign(1));
    }

    #[test]
    fn only_an_all_to_all_is_marked() {
        let sign = |kind| of_call(kind, (Dtype::F32, ReduceOp::Sum), 0, (1, 1));
        let all_to_all = sign(Kind::AllToAll);
        assert!(!is_marked(all_to_all) && is_marked(marked(all_to_all)));
        assert_eq!(describe(marked(all_to_all)), describe(all_to_all));
        assert!(!is_marked(sign(Kind::AllGather)), "an odd number of bytes is no mark");
    }
}
