//! Decides how a library is called so that the result is the one that torch defines, even if the library does not have
//! the operation. The decision is a pure function of facts that all ranks share. A missing operation is composed of
//! other operations. If that would give a different result, the call is refused, and the error says what to do.
//!
//! No code here names a vendor: [`Capabilities`] say what a library can do. A new vendor only needs its capabilities.
//!
//! # Meaning of a [`Lowering`]
//! The steps `before` are applied to the input on the communication stream, in order. Then the library moves or reduces
//! elements of type `dtype`. Then the steps `after` are applied to the result, in order. If `before` is not empty, the
//! input is in temporary memory; if `after` is not empty, the output is. `dtype` may be a view of the tensor's bytes
//! (complex numbers as pairs, bool as bytes); a conversion of the bytes is a `Cast`.

use crate::types::{Dtype, Kind, ReduceOp};

/// A set of reduce ops. For each member, the bit with number `ReduceOp::code` is set.
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
    /// The device does not support them, and the user allows 32-bit floats instead.
    AsFloat,
}

/// The capabilities of one library, in the version that was found. They are data, so that lowering needs no vendor's
/// name.
#[derive(Clone, Debug)]
pub struct Capabilities {
    /// Name and version for error texts, for instance "NCCL 2.30.7".
    pub name: String,
    /// The element types that the library reduces, and for each the reduce ops.
    pub reduces: &'static [(Dtype, Ops)],
    pub double: Double,
    pub gather: bool,
    pub scatter: bool,
    /// The library has an all_to_all with a count for each peer, between two distinct contiguous buffers.
    pub all_to_all_v: bool,
    /// A reduce to one root may leave partial sums in the inputs of the other ranks.
    pub reduce_clobbers_input: bool,
    /// The library turns the calls between group start and group end into one launch.
    pub group: bool,
    /// The library can make a communicator out of another one.
    pub split: bool,
    pub shrink: bool,
    /// The library can end a communicator while an operation hangs.
    pub abort: bool,
    /// Size of the id that rank 0 makes.
    pub id_bytes: usize,
    /// Names of functions that we would use but the library does not have.
    pub missing: Vec<&'static str>,
}

impl Capabilities {
    pub fn combines(&self, dtype: Dtype, op: ReduceOp) -> bool {
        self.reduces.iter().any(|(own, ops)| *own == dtype && ops.has(op))
    }
}

/// The properties of an operation on which its lowering depends. Equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoweringInput {
    pub kind: Kind,
    /// Element type of the tensors, even if they are only moved. `Bytes` if `Dtype` does not have the type.
    pub dtype: Dtype,
    pub op: ReduceOp,
    pub ranks: usize,
    /// All ranks' blocks have equal sizes, and every rank knows that from the form of the call.
    pub equal_counts: bool,
    /// The tensor's memory holds its elements in order. False for the internal formats of torch_npu.
    pub dense: bool,
}

/// A step that the shim applies to a tensor before or after the library's call, on the communication stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Local {
    /// Casts to another type, with torch's rules; integers wrap.
    Cast(Dtype),
    /// Multiplies every element by the factor. For integers, the factor is first truncated to an integer.
    Scale(f64),
    /// Divides every element by the count; integers round towards zero.
    Divide(usize),
    /// Reduces a buffer that holds one block for each rank, element by element and in the order of the ranks.
    Fold(ReduceOp),
}

/// How the library is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// One call of the library for this kind.
    Native,
    /// Sends and receives that are in flight at the same time, and a local copy of the rank's own block.
    Exchange,
    /// For each rank, one broadcast (all_gather) or one reduce (reduce_scatter) of that rank's block.
    PerRoot,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Lowering {
    /// The operation that the library runs. May differ from the caller's kind.
    pub kind: Kind,
    pub dtype: Dtype,
    pub op: ReduceOp,
    pub before: Vec<Local>,
    pub after: Vec<Local>,
    pub method: Method,
    /// The blocks must be contiguous in one buffer. If false, each block may be anywhere.
    pub contiguous: bool,
    /// The library must send from and receive into different memory.
    pub out_of_place: bool,
    /// The library may overwrite its input, so if an input must be preserved, a copy is passed.
    pub clobbers_input: bool,
    /// The calls are one launch: `launch` puts them between group start and group end.
    pub grouped: bool,
    /// Why the operation is not a single plain call, for `explain`. Empty if it is one.
    pub why: String,
}

impl Lowering {
    /// One native call of the library, directly on the caller's memory.
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

/// Decides how the library is called for an operation. If the library cannot run the operation, the error says why and
/// what to do instead.
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

/// Returns the type with 32-bit floats that replaces a type with 64-bit floats, real or complex. `None` for other
/// types.
fn narrow_of(dtype: Dtype) -> Option<Dtype> {
    match dtype {
        Dtype::F64 => Some(Dtype::F32),
        Dtype::C128 => Some(Dtype::C64),
        _ => None,
    }
}

/// Lowers kinds that only move bytes.
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
        // Each rank knows only whether its own blocks are equal. So calls with equal and with unequal blocks use the
        // same method.
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

/// Lowers kinds that reduce numbers.
fn combined(asked: &LoweringInput, able: &Capabilities) -> Result<Lowering, String> {
    let LoweringInput { kind, dtype, op, .. } = *asked;
    let (wire, wire_op) = as_parts(kind, dtype, op)?;
    // torch has no operators for these types, so a missing reduction cannot be composed of local steps.
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

/// The type and op that define torch's result: complex numbers are reduced by their parts, bools as bytes by MIN or
/// MAX.
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
            // A complex product is not the product of the parts. `folded` multiplies complex numbers.
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

/// Uses one reduction that the library has, perhaps with local steps before and after it. `None` if there is no such
/// reduction; then a rank needs the data of all ranks.
fn numbers(base: Lowering, dtype: Dtype, op: ReduceOp, ranks: usize, able: &Capabilities) -> Option<Lowering> {
    let name = &able.name;
    if able.combines(base.dtype, base.op) {
        return Some(base);
    }
    // A bool is 0 or 1, which a signed and an unsigned byte store in the same way.
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

/// Returns the wider types in which SUM, PRODUCT, MIN and MAX, after the cast back, give the result that torch defines:
/// integers wrap to their width, and small floats are rounded once. A type of the same width but the other signedness
/// is no candidate, because hardware may saturate.
fn wider(dtype: Dtype) -> impl Iterator<Item = Dtype> {
    let types: &[Dtype] = match dtype {
        Dtype::U8 | Dtype::I8 | Dtype::U16 | Dtype::I16 => &[Dtype::I32, Dtype::I64],
        Dtype::U32 | Dtype::I32 => &[Dtype::I64],
        Dtype::F16 | Dtype::Bf16 => &[Dtype::F32],
        _ => &[],
    };
    types.iter().copied()
}

/// Composes a reduction that the library lacks. Every rank (for reduce, only the root) receives all inputs that it
/// needs and reduces them locally, in the order of the ranks. This works for every op, but memory and traffic grow with
/// the number of ranks.
fn folded(asked: &LoweringInput, able: &Capabilities) -> Result<Lowering, String> {
    let LoweringInput { kind, dtype, op, .. } = *asked;
    let moves = match kind {
        Kind::AllReduce => Kind::AllGather,
        Kind::Reduce => Kind::Gather,
        _ => Kind::AllToAll,
    };
    // An all_reduce and a reduce gather inputs of equal sizes. Only the blocks of a reduce_scatter may differ.
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

/// Joins two reasons into one text.
pub fn join(first: &str, second: &str) -> String {
    if second.is_empty() { first.to_string() } else { format!("{first}; {second}") }
}
