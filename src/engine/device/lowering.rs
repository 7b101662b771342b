//! What to ask of a library so that the result is the one that torch defines, for an operation the library may not have:
//! a pure function of facts that all ranks share. Where a library lacks something it is composed; where that would give
//! another result, it is refused with what to do instead.
//!
//! Nothing here names a vendor: [`Capabilities`] say what one can do. To add a vendor is to write its capabilities.
//!
//! # What a recipe says
//! `before` is done to the input on the communication stream, in order, then the library moves and combines `dtype`, then
//! `after` is done to what came out, in order. Where neither is empty the caller works in temporary memory. `dtype` may
//! be a view of the tensor's own bytes (complex numbers as pairs, bool as bytes); a change of the bytes is a `Cast`.

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

/// What becomes of 64-bit floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Double {
    /// They are what they are.
    Kept,
    /// The device has none: refused.
    Refused,
    /// The device has none, and the user allows 32 bits.
    AsFloat,
}

/// What one library, in the version found, can do. Data, so that the recipe needs no vendor's name.
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
    pub reduce_spoils: bool,
    /// Several calls between group start and group end are one launch.
    pub group: bool,
    /// Communicators can be made from a communicator.
    pub split: bool,
    pub shrink: bool,
    /// A communicator can be ended while an operation hangs.
    pub abort: bool,
    /// Bytes of the id that rank 0 makes.
    pub id_bytes: usize,
    /// Symbols that are missing, of those that would be used.
    pub missing: Vec<&'static str>,
}

impl Capabilities {
    pub fn combines(&self, dtype: Dtype, op: ReduceOp) -> bool {
        self.reduces.iter().any(|(own, ops)| *own == dtype && ops.has(op))
    }
}

/// An operation, as far as the recipe sees it. All ranks ask the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Asked {
    pub kind: Kind,
    /// Of the tensors, also where they are only moved; `Bytes` where the type is none of ours (8-bit floats).
    pub dtype: Dtype,
    pub op: ReduceOp,
    pub ranks: usize,
    /// All ranks' blocks are equal, and all ranks know it from the form of the call.
    pub even: bool,
    /// The tensor's memory is its elements in order: false for internal formats, which torch_npu gives tensors.
    pub plain: bool,
}

/// Something done to a tensor beside the library, on the communication stream.
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
    /// One call of its own for this kind.
    Native,
    /// Sends and receives that are under way together, and a local copy of the own block.
    Exchange,
    /// One broadcast (all_gather) or reduce (reduce_scatter) for each rank, of that rank's block.
    PerRoot,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Recipe {
    /// What the library does, which may be another kind than was asked for.
    pub kind: Kind,
    pub dtype: Dtype,
    pub op: ReduceOp,
    pub before: Vec<Local>,
    pub after: Vec<Local>,
    pub method: Method,
    /// Blocks must lie behind each other in one buffer; otherwise each may lie anywhere.
    pub flat: bool,
    /// What is sent and what is received must be different memory.
    pub apart: bool,
    /// The input may be overwritten: hand over a copy where it must stay.
    pub spoils: bool,
    /// The calls are one launch: `launch` puts them between group start and group end.
    pub grouped: bool,
    /// Why it is not one plain call, for `explain`; empty if it is.
    pub why: String,
}

/// Bytes up to which a tensor of a list is packed with others; larger ones are calls of their own in the same launch.
/// Packing costs four passes over the tensor's memory, a further call in a launch costs host time; where both are equal
/// was not measured for want of a device, `make bench-gpu` has the rows. `cpp/lower/call.cpp` compares: all ranks with the
/// same size.
pub const PACK_BYTES: usize = 1 << 20;

/// The way of an operation, or the reason why there is none and what to do.
pub fn recipe(asked: &Asked, able: &Capabilities) -> Result<Recipe, String> {
    let name = &able.name;
    if !asked.plain {
        return Err(format!(
            "sagellm: {}: a tensor has an internal format of its device, whose bytes are not its elements in order, and \
             {name} moves bytes; convert it first, on NPU with torch_npu.npu_format_cast(tensor, 2)",
            asked.kind
        ));
    }
    match narrow_of(asked.dtype) {
        Some(narrow) if able.double == Double::AsFloat => {
            let mut recipe = recipe(&Asked { dtype: narrow, ..*asked }, able)?;
            recipe.before.insert(0, Local::Cast(narrow));
            recipe.after.push(Local::Cast(asked.dtype));
            recipe.why = join("64-bit floats travel as 32 bits, as SAGELLM_DOUBLE_AS_FLOAT=1 allows", &recipe.why);
            Ok(recipe)
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
fn moved(asked: &Asked, able: &Capabilities) -> Recipe {
    let Asked { kind, even, .. } = *asked;
    let plain = Recipe {
        kind,
        dtype: Dtype::Bytes,
        op: ReduceOp::Sum,
        before: Vec::new(),
        after: Vec::new(),
        method: Method::Native,
        flat: true,
        apart: false,
        spoils: false,
        grouped: false,
        why: String::new(),
    };
    let exchange = |why: String| Recipe { method: Method::Exchange, flat: false, why, ..plain.clone() };
    let lacks = || format!("{} has no {kind}: sends and receives", able.name);
    match kind {
        Kind::Barrier => Recipe {
            kind: Kind::AllReduce,
            dtype: Dtype::F32,
            why: "a barrier is an all_reduce of one number".into(),
            ..plain
        },
        Kind::Gather if !able.gather => exchange(lacks()),
        Kind::Scatter if !able.scatter => exchange(lacks()),
        // Which rank has equal blocks is known to that rank alone, so both forms of the call go one way.
        Kind::AllToAll if able.all_to_all_v => Recipe { apart: true, ..plain },
        Kind::AllToAll => exchange("all_to_all travels as sends and receives, equal blocks and others alike".into()),
        Kind::AllGather if !even => Recipe {
            method: Method::PerRoot,
            flat: false,
            grouped: able.group,
            why: "blocks differ: one broadcast for each rank".into(),
            ..plain
        },
        Kind::Send | Kind::Recv => exchange(String::new()),
        _ => plain,
    }
}

/// Kinds that combine numbers.
fn combined(asked: &Asked, able: &Capabilities) -> Result<Recipe, String> {
    let Asked { kind, dtype, op, .. } = *asked;
    let (wire, wire_op) = as_parts(kind, dtype, op)?;
    // torch has no operators for these, so nothing can be composed.
    if matches!(dtype, Dtype::F8E4M3 | Dtype::F8E5M2) && !able.combines(dtype, op) {
        return Err(format!(
            "sagellm: {kind}: {} does not combine {}; convert to float16 or bfloat16 first",
            able.name,
            dtype.name()
        ));
    }
    let base = Recipe {
        kind,
        dtype: wire,
        op: wire_op,
        before: Vec::new(),
        after: Vec::new(),
        method: Method::Native,
        flat: true,
        apart: false,
        spoils: false,
        grouped: false,
        why: String::new(),
    };
    let done = numbers(base, dtype, op, asked.ranks, able);
    let Some(mut recipe) = done else { return folded(asked, able) };
    if kind == Kind::ReduceScatter && !asked.even {
        recipe.method = Method::PerRoot;
        recipe.flat = false;
        recipe.grouped = able.group;
        recipe.spoils = able.reduce_spoils;
        recipe.why = join("blocks differ: one reduce for each rank", &recipe.why);
    }
    Ok(recipe)
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
fn numbers(base: Recipe, dtype: Dtype, op: ReduceOp, ranks: usize, able: &Capabilities) -> Option<Recipe> {
    let name = &able.name;
    if able.combines(base.dtype, base.op) {
        return Some(base);
    }
    // A truth value is 0 or 1, with or without a sign.
    if dtype == Dtype::Bool && able.combines(Dtype::I8, base.op) {
        return Some(Recipe { dtype: Dtype::I8, ..base });
    }
    let (sum, before, after) = match op {
        ReduceOp::Avg => (true, None, Some(Local::Divide(ranks))),
        ReduceOp::PremulSum(factor) => (true, Some(Local::Scale(factor)), None),
        _ => (false, None, None),
    };
    if sum {
        let mut recipe = numbers(Recipe { op: ReduceOp::Sum, ..base }, dtype, ReduceOp::Sum, ranks, able)?;
        if let Some(before) = before {
            recipe.before.insert(0, before);
        }
        recipe.after.extend(after);
        let what = if before.is_some() { "scaled first, then summed" } else { "summed, then divided" };
        let why = format!("{name} has no {} of {}: {what}", ReduceOp::name_of(op.code()), dtype.name());
        recipe.why = join(&why, &recipe.why);
        return Some(recipe);
    }
    let wide = wider(base.dtype).find(|wide| able.combines(*wide, base.op))?;
    let why = format!("{name} has no {} of {}: as {}", ReduceOp::name_of(op.code()), dtype.name(), wide.name());
    Some(Recipe { dtype: wide, before: vec![Local::Cast(wide)], after: vec![Local::Cast(dtype)], why, ..base })
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
fn folded(asked: &Asked, able: &Capabilities) -> Result<Recipe, String> {
    let Asked { kind, dtype, op, .. } = *asked;
    let moves = match kind {
        Kind::AllReduce => Kind::AllGather,
        Kind::Reduce => Kind::Gather,
        _ => Kind::AllToAll,
    };
    // Every rank receives blocks of one size, its own, so they lie behind each other.
    let even = kind != Kind::ReduceScatter || asked.even;
    let mut recipe = moved(&Asked { kind: moves, even, ..*asked }, able);
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
    recipe.before.extend(before);
    recipe.after = after;
    recipe.op = op;
    let why = format!(
        "{} cannot combine {} by {}: every rank gets the others' data ({moves}) and combines it itself",
        able.name,
        dtype.name(),
        ReduceOp::name_of(op.code())
    );
    recipe.why = join(&why, &recipe.why);
    Ok(recipe)
}

/// Two reasons as one.
pub fn join(first: &str, second: &str) -> String {
    if second.is_empty() { first.to_string() } else { format!("{first}; {second}") }
}
