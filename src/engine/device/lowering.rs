//! How to call a library so that the result is the one that torch defines, also for an operation that the library does
//! not have: a pure function of facts that all ranks share. A missing operation is composed of others; where that would
//! give another result, the call is refused with an advice.
//!
//! Nothing here names a vendor: [`Capabilities`] say what a library can do. To add a vendor is to write its
//! capabilities.
//!
//! # What a [`Lowering`] says
//! `before` is done to the input on the communication stream, in order, then the library moves and combines `dtype`, then
//! `after` is done to the result, in order. Where neither is empty the caller works in temporary memory. `dtype` may be
//! a view of the tensor's own bytes (complex numbers as pairs, bool as bytes); a change of the bytes is a `Cast`.

use crate::types::{Dtype, Kind, ReduceOp};

/// Reduce ops as a set: bit `ReduceOp::code`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ops(u16);

impl Ops {
    pub const SUM: Ops = Ops(1);
    pub const AVG: Ops = Ops(1 << 1);
    pub const PRODUCT: Ops = Ops(1 << 2);
    pub const MIN: Ops = Ops(1 << 3);
    pub const MAX: Ops = Ops(1 << 4);
    pub const PREMUL_SUM: Ops = Ops(1 << 8);
    pub const BASIC: Ops = Ops::SUM.and(Ops::PRODUCT).and(Ops::MIN).and(Ops::MAX);
    pub const BASIC_AVG: Ops = Ops::BASIC.and(Ops::AVG);
    pub const SCALING: Ops = Ops::BASIC_AVG.and(Ops::PREMUL_SUM);
    pub const NO_PRODUCT: Ops = Ops::SUM.and(Ops::MIN).and(Ops::MAX);

    pub const fn and(self, other: Ops) -> Ops {
        Ops(self.0 | other.0)
    }

    pub const fn has(self, op: ReduceOp) -> bool {
        let code = match op {
            ReduceOp::Sum => 0,
            ReduceOp::Avg => 1,
            ReduceOp::Product => 2,
            ReduceOp::Min => 3,
            ReduceOp::Max => 4,
            ReduceOp::Band => 5,
            ReduceOp::Bor => 6,
            ReduceOp::Bxor => 7,
            ReduceOp::PremulSum(_) => 8,
        };
        self.0 >> code & 1 == 1
    }
}

/// How 64-bit floats are treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Double {
    /// The device supports 64-bit floats; they are passed to the library unchanged.
    Kept,
    /// The device does not support them, and a call with them is refused.
    Refused,
    /// The device does not support them, and the user allows 32-bit floats in their place.
    AsFloat,
}

/// The capabilities of one library, in the version found. Data, so that lowering needs no vendor's name.
#[derive(Clone, Debug)]
pub struct Capabilities {
    /// For messages, with the version: "NCCL 2.30.7".
    pub name: String,
    /// Element types that it combines, and by which ops.
    pub reduces: &'static [(Dtype, Ops)],
    pub double: Double,
    pub gather: bool,
    pub scatter: bool,
    /// all_to_all with a count for every peer, between two contiguous buffers that differ.
    pub all_to_all_v: bool,
    /// A reduce to one root may leave partial sums in the input of the others.
    pub reduce_clobbers_input: bool,
    /// Several calls between group start and group end are one launch.
    pub group: bool,
    /// Communicators can be made from a communicator.
    pub split: bool,
    pub shrink: bool,
    /// A communicator can be ended while an operation hangs.
    pub abort: bool,
    /// Bytes of the id that rank 0 makes.
    pub id_bytes: usize,
    /// Functions that would be used and that the library lacks.
    pub missing: Vec<&'static str>,
}

impl Capabilities {
    pub fn combines(&self, dtype: Dtype, op: ReduceOp) -> bool {
        self.reduces.iter().any(|(own, ops)| *own == dtype && ops.has(op))
    }
}

/// An operation, as far as lowering depends on it. The same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoweringInput {
    pub kind: Kind,
    /// Of the tensors, also where they are only moved; `Bytes` where the type is none of ours (8-bit floats).
    pub dtype: Dtype,
    pub op: ReduceOp,
    pub ranks: usize,
    /// All ranks' blocks are equal, and all ranks know it from the form of the call.
    pub equal_counts: bool,
    /// The tensor's memory is its elements in order: false for internal formats, which torch_npu gives tensors.
    pub dense: bool,
}

/// A step that the shim applies to a tensor before or after the library's call, on the communication stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Local {
    /// To another type as torch casts; integers wrap.
    Cast(Dtype),
    /// Every element times the factor; for integers the factor without its fraction.
    Scale(f64),
    /// Every element through the count; integers towards zero.
    Divide(usize),
    /// The buffer holds one block for each rank: combined element by element, in the order of the ranks.
    Fold(ReduceOp),
}

/// How the library is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// One call of the library for this kind.
    Native,
    /// Sends and receives that are under way together, and a local copy of the own block.
    Exchange,
    /// One broadcast (all_gather) or reduce (reduce_scatter) for each rank, of that rank's block.
    PerRoot,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Lowering {
    /// What the library does, which may be another kind than the caller's.
    pub kind: Kind,
    pub dtype: Dtype,
    pub op: ReduceOp,
    pub before: Vec<Local>,
    pub after: Vec<Local>,
    pub method: Method,
    /// Blocks must lie behind each other in one buffer; otherwise each may lie anywhere.
    pub contiguous: bool,
    /// The library must send from and receive into different memory.
    pub out_of_place: bool,
    /// The input may be overwritten: hand over a copy where it must stay.
    pub clobbers_input: bool,
    /// The calls are one launch: `launch` puts them between group start and group end.
    pub grouped: bool,
    /// Why it is not one plain call, for `explain`; empty if it is.
    pub why: String,
}

impl Lowering {
    /// One call of the library's own, on memory as it lies.
    fn native(kind: Kind, dtype: Dtype, op: ReduceOp) -> Lowering {
        Lowering {
            kind,
            dtype,
            op,
            before: Vec::new(),
            after: Vec::new(),
            method: Method::Native,
            contiguous: true,
            out_of_place: false,
            clobbers_input: false,
            grouped: false,
            why: String::new(),
        }
    }
}

/// How to call the library for an operation, or why that cannot be done and what to do.
pub fn lower(asked: &LoweringInput, able: &Capabilities) -> Result<Lowering, String> {
    let name = &able.name;
    if !asked.dense {
        return Err(format!(
            "sagellm: {}: a tensor has an internal format of its device, whose bytes are not its elements in order, and \
             {name} moves bytes; convert it first, on NPU with torch_npu.npu_format_cast(tensor, 2)",
            asked.kind
        ));
    }
    match narrow_of(asked.dtype) {
        Some(narrow) if able.double == Double::AsFloat => {
            let mut lowering = lower(&LoweringInput { dtype: narrow, ..*asked }, able)?;
            lowering.before.insert(0, Local::Cast(narrow));
            lowering.after.push(Local::Cast(asked.dtype));
            lowering.why = join("64-bit floats travel as 32 bits, as SAGELLM_DOUBLE_AS_FLOAT=1 allows", &lowering.why);
            Ok(lowering)
        }
        Some(narrow) if able.double == Double::Refused => Err(format!(
            "sagellm: {} of {}: {name} has no 64-bit floats, and its device keeps such tensors in 32 bits; convert to \
             {} first, or set SAGELLM_DOUBLE_AS_FLOAT=1 to have it done in every call",
            asked.kind,
            asked.dtype.name(),
            narrow.name()
        )),
        _ if asked.kind.reduces() => combined(asked, able),
        _ => Ok(moved(asked, able)),
    }
}

/// Of 64-bit floats the type with 32.
fn narrow_of(dtype: Dtype) -> Option<Dtype> {
    match dtype {
        Dtype::F64 => Some(Dtype::F32),
        Dtype::C128 => Some(Dtype::C64),
        _ => None,
    }
}

/// Kinds that move bytes and change none.
fn moved(asked: &LoweringInput, able: &Capabilities) -> Lowering {
    let LoweringInput { kind, equal_counts, .. } = *asked;
    let native = Lowering::native(kind, Dtype::Bytes, ReduceOp::Sum);
    let exchange = |why: String| Lowering { method: Method::Exchange, contiguous: false, why, ..native.clone() };
    let lacks = || format!("{} has no {kind}: sends and receives", able.name);
    match kind {
        Kind::Barrier => Lowering {
            kind: Kind::AllReduce,
            dtype: Dtype::F32,
            why: "a barrier is an all_reduce of one number".into(),
            ..native
        },
        Kind::Gather if !able.gather => exchange(lacks()),
        Kind::Scatter if !able.scatter => exchange(lacks()),
        // Which rank has equal blocks is known to that rank alone, so both forms of the call go one way.
        Kind::AllToAll if able.all_to_all_v => Lowering { out_of_place: true, ..native },
        Kind::AllToAll => exchange("all_to_all travels as sends and receives, equal blocks and others alike".into()),
        Kind::AllGather if !equal_counts => Lowering {
            method: Method::PerRoot,
            contiguous: false,
            grouped: able.group,
            why: "blocks differ: one broadcast for each rank".into(),
            ..native
        },
        Kind::Send | Kind::Recv => exchange(String::new()),
        _ => native,
    }
}

/// Kinds that combine numbers.
fn combined(asked: &LoweringInput, able: &Capabilities) -> Result<Lowering, String> {
    let LoweringInput { kind, dtype, op, .. } = *asked;
    let (wire, wire_op) = as_parts(kind, dtype, op)?;
    // torch has no operators for these, so nothing can be composed.
    if matches!(dtype, Dtype::F8E4M3 | Dtype::F8E5M2) && !able.combines(dtype, op) {
        return Err(format!(
            "sagellm: {kind}: {} does not combine {}; convert to float16 or bfloat16 first",
            able.name,
            dtype.name()
        ));
    }
    let base = Lowering::native(kind, wire, wire_op);
    let done = numbers(base, dtype, op, asked.ranks, able);
    let Some(mut lowering) = done else { return folded(asked, able) };
    if kind == Kind::ReduceScatter && !asked.equal_counts {
        lowering.method = Method::PerRoot;
        lowering.contiguous = false;
        lowering.grouped = able.group;
        lowering.clobbers_input = able.reduce_clobbers_input;
        lowering.why = join("blocks differ: one reduce for each rank", &lowering.why);
    }
    Ok(lowering)
}

/// The type and op that torch defines the result by: complex numbers by their parts, truth values by their order.
fn as_parts(kind: Kind, dtype: Dtype, op: ReduceOp) -> Result<(Dtype, ReduceOp), String> {
    let undefined = || {
        let name = ReduceOp::name_of(op.code());
        Err(format!("sagellm: {kind}: {name} is not defined for {}; use another op or convert first", dtype.name()))
    };
    let bits = matches!(op, ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor);
    match dtype {
        Dtype::F8E4M3 | Dtype::F8E5M2 if bits || matches!(op, ReduceOp::PremulSum(_)) => undefined(),
        Dtype::Bytes => Err(format!(
            "sagellm: {kind}: the element type is none that can be combined; convert to float32, float16 or bfloat16"
        )),
        Dtype::C32 | Dtype::C64 | Dtype::C128 => match op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => Ok((parts_of(dtype), op)),
            // Parts do not multiply by themselves; `folded` does it on whole numbers.
            ReduceOp::Product => Ok((dtype, op)),
            _ => undefined(),
        },
        Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64 if bits => undefined(),
        Dtype::Bool => match op {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor => Ok((Dtype::U8, ReduceOp::Max)),
            ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => Ok((Dtype::U8, ReduceOp::Min)),
            ReduceOp::Bxor => Ok((dtype, op)),
            _ => undefined(),
        },
        _ => Ok((dtype, op)),
    }
}

fn parts_of(dtype: Dtype) -> Dtype {
    match dtype {
        Dtype::C32 => Dtype::F16,
        Dtype::C64 => Dtype::F32,
        _ => Dtype::F64,
    }
}

/// As one call with what the library combines, if that is possible: `None` where all ranks' data must come together.
fn numbers(base: Lowering, dtype: Dtype, op: ReduceOp, ranks: usize, able: &Capabilities) -> Option<Lowering> {
    let name = &able.name;
    if able.combines(base.dtype, base.op) {
        return Some(base);
    }
    // A truth value is 0 or 1, with or without a sign.
    if dtype == Dtype::Bool && able.combines(Dtype::I8, base.op) {
        return Some(Lowering { dtype: Dtype::I8, ..base });
    }
    let (sum, before, after) = match op {
        ReduceOp::Avg => (true, None, Some(Local::Divide(ranks))),
        ReduceOp::PremulSum(factor) => (true, Some(Local::Scale(factor)), None),
        _ => (false, None, None),
    };
    if sum {
        let mut lowering = numbers(Lowering { op: ReduceOp::Sum, ..base }, dtype, ReduceOp::Sum, ranks, able)?;
        if let Some(before) = before {
            lowering.before.insert(0, before);
        }
        lowering.after.extend(after);
        let what = if before.is_some() { "scaled first, then summed" } else { "summed, then divided" };
        let why = format!("{name} has no {} of {}: {what}", ReduceOp::name_of(op.code()), dtype.name());
        lowering.why = join(&why, &lowering.why);
        return Some(lowering);
    }
    let wide = wider(base.dtype).find(|wide| able.combines(*wide, base.op))?;
    let why = format!("{name} has no {} of {}: as {}", ReduceOp::name_of(op.code()), dtype.name(), wide.name());
    Some(Lowering { dtype: wide, before: vec![Local::Cast(wide)], after: vec![Local::Cast(dtype)], why, ..base })
}

/// Types in which SUM, PRODUCT, MIN and MAX of this one give the same after the cast back: integers modulo their width,
/// small floats rounded once. Not the same width with another sign: hardware may saturate.
fn wider(dtype: Dtype) -> impl Iterator<Item = Dtype> {
    let types: &[Dtype] = match dtype {
        Dtype::U8 | Dtype::I8 | Dtype::U16 | Dtype::I16 => &[Dtype::I32, Dtype::I64],
        Dtype::U32 | Dtype::I32 => &[Dtype::I64],
        Dtype::F16 | Dtype::Bf16 => &[Dtype::F32],
        _ => &[],
    };
    types.iter().copied()
}

/// Every rank (reduce: the root) gets all the inputs it needs and combines them itself, in the order of the ranks. Costs
/// as many times the memory and the traffic as there are ranks, and can do everything.
fn folded(asked: &LoweringInput, able: &Capabilities) -> Result<Lowering, String> {
    let LoweringInput { kind, dtype, op, .. } = *asked;
    let moves = match kind {
        Kind::AllReduce => Kind::AllGather,
        Kind::Reduce => Kind::Gather,
        _ => Kind::AllToAll,
    };
    // Every rank receives blocks of one size, its own, so they lie behind each other.
    let equal_counts = kind != Kind::ReduceScatter || asked.equal_counts;
    let mut lowering = moved(&LoweringInput { kind: moves, equal_counts, ..*asked }, able);
    let mut after = vec![Local::Fold(op)];
    let (before, fold) = match op {
        ReduceOp::Avg => (None, ReduceOp::Sum),
        ReduceOp::PremulSum(factor) => (Some(Local::Scale(factor)), ReduceOp::Sum),
        other => (None, other),
    };
    after[0] = Local::Fold(fold);
    if op == ReduceOp::Avg {
        after.push(Local::Divide(asked.ranks));
    }
    lowering.before.extend(before);
    lowering.after = after;
    lowering.op = op;
    let why = format!(
        "{} cannot combine {} by {}: every rank gets the others' data ({moves}) and combines it itself",
        able.name,
        dtype.name(),
        ReduceOp::name_of(op.code())
    );
    lowering.why = join(&why, &lowering.why);
    Ok(lowering)
}

/// Two reasons as one.
pub fn join(first: &str, second: &str) -> String {
    if second.is_empty() { first.to_string() } else { format!("{first}; {second}") }
}
