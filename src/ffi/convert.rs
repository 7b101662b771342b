//! Converts between the bridge's types and the core's. The numbers of the shared enums are checked at compile time.

use super::bridge::ffi;
use crate::error::{Error, ErrorKind, Result, contained};
use crate::types::{CallNote, Dtype, Kind, Listed, ReduceOp, Request, Span, Spans, Strided};

/// A result that crosses to C++: a value, or an error as text.
pub(super) type Outcome<T> = std::result::Result<T, String>;

/// Does not compile if a bridge enum and a core enum have different numbers, or if the core's enum has a variant that
/// is not listed.
macro_rules! same_numbers {
    ($shared:ident, $core:ident: $($theirs:ident = $ours:ident),+) => {
        const _: () = { $(assert!(ffi::$shared::$theirs.repr == $core::$ours as u8);)+ };
        const _: fn($core) = |ours| match ours { $($core::$ours => (),)+ };
    };
}

same_numbers!(Kind, Kind: kAllReduce = AllReduce, kBroadcast = Broadcast, kReduce = Reduce, kAllGather = AllGather,
    kGather = Gather, kScatter = Scatter, kReduceScatter = ReduceScatter, kAllToAll = AllToAll, kBarrier = Barrier,
    kSend = Send, kRecv = Recv);
same_numbers!(Dtype, Dtype: kBytes = Bytes, kBool = Bool, kU8 = U8, kI8 = I8, kU16 = U16, kI16 = I16, kU32 = U32,
    kI32 = I32, kU64 = U64, kI64 = I64, kF16 = F16, kBf16 = Bf16, kF32 = F32, kF64 = F64, kC32 = C32, kC64 = C64,
    kC128 = C128, kF8E4M3 = F8E4M3, kF8E5M2 = F8E5M2);
same_numbers!(ErrorKind, ErrorKind: kInvalid = Invalid, kTimeout = Timeout, kRankFailed = RankFailed,
    kMismatch = Mismatch, kCorrupt = Corrupt, kAborted = Aborted, kInterrupted = Interrupted, kSystem = System, kBug = Bug);
const _: () = {
    assert!(ffi::ReduceOp::kSum.repr == ReduceOp::Sum.code());
    assert!(ffi::ReduceOp::kAvg.repr == ReduceOp::Avg.code());
    assert!(ffi::ReduceOp::kProduct.repr == ReduceOp::Product.code());
    assert!(ffi::ReduceOp::kMin.repr == ReduceOp::Min.code());
    assert!(ffi::ReduceOp::kMax.repr == ReduceOp::Max.code());
    assert!(ffi::ReduceOp::kBand.repr == ReduceOp::Band.code());
    assert!(ffi::ReduceOp::kBor.repr == ReduceOp::Bor.code());
    assert!(ffi::ReduceOp::kBxor.repr == ReduceOp::Bxor.code());
    assert!(ffi::ReduceOp::kPremulSum.repr == ReduceOp::PremulSum(1.0).code());
};

/// The text of an error, as it crosses the bridge: the code letter, then the message.
pub(super) fn coded(error: &Error) -> String {
    format!("{}{}", error.code(), error.text())
}

/// Runs `body`. Converts an error or a panic to the text that `cpp/host/errors.cpp` reads.
pub(super) fn guarded<T>(body: impl FnOnce() -> Result<T>) -> Outcome<T> {
    contained(body).map_err(|error| coded(&error))
}

/// Runs `body`, for a function that cannot return an error. A panic ends here; Rust's panic hook has already printed
/// it.
pub(super) fn quietly(body: impl FnOnce()) {
    let _ = contained(|| {
        body();
        Ok(())
    });
}

pub(super) fn unknown(what: &str, value: u8) -> Error {
    Error::bug(format!("sagellm: unknown {what} {value} came over the bridge"))
}

/// Checks the number, because C++ can cast any number to a shared enum.
pub(super) fn kind(kind: ffi::Kind) -> Result<Kind> {
    Kind::from_u8(kind.repr).ok_or_else(|| unknown("kind", kind.repr))
}

pub(super) fn dtype(dtype: ffi::Dtype) -> Result<Dtype> {
    Dtype::from_u8(dtype.repr).ok_or_else(|| unknown("dtype", dtype.repr))
}

pub(super) fn kind_named(name: &str) -> Result<Kind> {
    let known = || Kind::ALL.map(Kind::name).join(", ");
    let unknown = || Error::invalid(format!("sagellm: no operation is called {name:?}; there are {}", known()));
    Kind::from_name(name).ok_or_else(unknown)
}

pub(super) fn dtype_named(name: &str) -> Result<Dtype> {
    let known = || Dtype::ALL.map(Dtype::name).join(", ");
    let unknown = || Error::invalid(format!("sagellm: no element type is called {name:?}; there are {}", known()));
    Dtype::from_name(name).ok_or_else(unknown)
}

pub(super) fn spans(pieces: &[ffi::Piece]) -> Spans {
    pieces.iter().map(|piece| Span { addr: piece.addr, bytes: piece.bytes }).collect()
}

fn strided(tensor: &ffi::Strided) -> Strided {
    let ffi::Strided { addr, run, counts, strides, written } = *tensor;
    Strided { addr, run, counts, strides, written }
}

pub(super) fn listed(tensor: &ffi::Listed) -> Result<Listed> {
    Ok(Listed { dtype: dtype(tensor.dtype)?, bytes: tensor.bytes })
}

/// For each tensor of a list: its element type as the caller's number, and its size in bytes.
pub(super) fn elements_and_bytes(elements: &[u8], bytes: &[usize]) -> impl Iterator<Item = (u8, usize)> {
    elements.iter().copied().zip(bytes.iter().copied())
}

pub(super) fn request(asked: &ffi::Request<'_>) -> Result<Request> {
    let ffi::Request { call, inputs, outputs, in_blocks, out_blocks, list, also_touched } = *asked;
    let kind = kind(call.kind)?;
    // SAFETY: the pieces are memory of tensors that the shim holds in its `Completion` until `ended` or, for a call of
    // `run`, on its stack until `run` returns. c10d's rules forbid that the program writes them meanwhile.
    let mut request = unsafe { Request::new(kind, spans(inputs), spans(outputs)) };
    request.dtype = dtype(call.dtype)?;
    request.op = ReduceOp::from_u8(call.op.repr, call.factor).ok_or_else(|| unknown("reduce op", call.op.repr))?;
    request.root = call.root;
    request.tag = call.tag;
    request.timeout_ms = u64::try_from(call.timeout_ms).ok();
    request.in_blocks = in_blocks.to_vec();
    request.out_blocks = out_blocks.to_vec();
    request.list = list.iter().map(listed).collect::<Result<_>>()?;
    request.also_touched = also_touched.iter().map(strided).collect();
    request.note = note(call.note);
    Ok(request)
}

pub(super) fn note(note: ffi::CallNote) -> CallNote {
    let ffi::CallNote { counts, tensors, element, site, host_staged } = note;
    CallNote { counts, tensors, element, site, host_staged }
}
