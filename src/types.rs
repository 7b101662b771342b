//! Plain data that every layer shares: what an operation does, which data it transfers, and where that data is in
//! memory. No code here has an effect. Every value is checked where it enters the core (`ffi/convert.rs`,
//! `group/check.rs`).

use std::fmt;

/// Declares an enum in which each variant has a number and a name. Each variant is one row, so `ALL` cannot omit a
/// variant.
macro_rules! enumeration {
    ($(#[$meta:meta])* $name:ident { $($variant:ident = $number:literal, $text:literal;)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum $name { $($variant = $number,)* }

        impl $name {
            pub const ALL: [$name; [$($number),*].len()] = [$($name::$variant),*];

            /// The name in tables, options and messages.
            pub fn name(self) -> &'static str {
                match self { $($name::$variant => $text,)* }
            }
        }
    };
}
pub(crate) use enumeration;

enumeration! {
    /// What a collective or point-to-point call does, with its name in torch.distributed. The numbers are part of
    /// signatures and of the C++ bridge.
    Kind {
        AllReduce = 1, "all_reduce";
        Broadcast = 2, "broadcast";
        Reduce = 3, "reduce";
        AllGather = 4, "all_gather";
        Gather = 5, "gather";
        Scatter = 6, "scatter";
        ReduceScatter = 7, "reduce_scatter";
        AllToAll = 8, "all_to_all";
        Barrier = 9, "barrier";
        Send = 10, "send";
        Recv = 11, "recv";
    }
}

impl Kind {
    /// All kinds except the two of messages.
    pub const COLLECTIVES: [Kind; Kind::ALL.len() - 2] = {
        let mut found = [Kind::Barrier; Kind::ALL.len() - 2];
        let (mut at, mut next) = (0, 0);
        while at < Kind::ALL.len() {
            if !Kind::ALL[at].is_p2p() {
                found[next] = Kind::ALL[at];
                next += 1;
            }
            at += 1;
        }
        assert!(next == found.len());
        found
    };

    pub fn from_u8(value: u8) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u8 == value)
    }

    pub fn from_name(name: &str) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Whether the kind reduces elements. If so, dtype and reduce op must agree between ranks.
    pub fn reduces(self) -> bool {
        matches!(self, Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter)
    }

    /// Whether one rank has a special role (`Request::root`).
    pub fn rooted(self) -> bool {
        matches!(self, Kind::Broadcast | Kind::Reduce | Kind::Gather | Kind::Scatter)
    }

    pub const fn is_p2p(self) -> bool {
        matches!(self, Kind::Send | Kind::Recv)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Element type of an operation that reduces elements. Operations that only move data use `Bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Dtype {
    /// Data that is moved and never reduced; counts are in bytes.
    Bytes = 0,
    Bool = 1,
    U8 = 2,
    I8 = 3,
    U16 = 4,
    I16 = 5,
    U32 = 6,
    I32 = 7,
    U64 = 8,
    I64 = 9,
    F16 = 10,
    Bf16 = 11,
    F32 = 12,
    F64 = 13,
    /// Two f16: real, imaginary.
    C32 = 14,
    /// Two f32: real, imaginary.
    C64 = 15,
    /// Two f64: real, imaginary.
    C128 = 16,
    /// The next two types are reduced only on devices whose library supports them; the CPU moves them as bytes.
    F8E4M3 = 17,
    F8E5M2 = 18,
}

impl Dtype {
    /// The types that every engine supports.
    pub const ALL: [Dtype; 17] = [
        Dtype::Bytes,
        Dtype::Bool,
        Dtype::U8,
        Dtype::I8,
        Dtype::U16,
        Dtype::I16,
        Dtype::U32,
        Dtype::I32,
        Dtype::U64,
        Dtype::I64,
        Dtype::F16,
        Dtype::Bf16,
        Dtype::F32,
        Dtype::F64,
        Dtype::C32,
        Dtype::C64,
        Dtype::C128,
    ];

    pub fn from_u8(value: u8) -> Option<Dtype> {
        let all = Dtype::ALL.into_iter().chain([Dtype::F8E4M3, Dtype::F8E5M2]);
        all.into_iter().find(|dtype| *dtype as u8 == value)
    }

    /// The type of `Dtype::ALL` with this name.
    pub fn from_name(name: &str) -> Option<Dtype> {
        Dtype::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Size of one element in bytes.
    pub fn size(self) -> usize {
        match self {
            Dtype::Bytes | Dtype::Bool | Dtype::U8 | Dtype::I8 | Dtype::F8E4M3 | Dtype::F8E5M2 => 1,
            Dtype::U16 | Dtype::I16 | Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::U32 | Dtype::I32 | Dtype::F32 | Dtype::C32 => 4,
            Dtype::U64 | Dtype::I64 | Dtype::F64 | Dtype::C64 => 8,
            Dtype::C128 => 16,
        }
    }

    /// torch's name of the type.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::Bytes => "bytes",
            Dtype::Bool => "bool",
            Dtype::U8 => "uint8",
            Dtype::I8 => "int8",
            Dtype::U16 => "uint16",
            Dtype::I16 => "int16",
            Dtype::U32 => "uint32",
            Dtype::I32 => "int32",
            Dtype::U64 => "uint64",
            Dtype::I64 => "int64",
            Dtype::F16 => "float16",
            Dtype::Bf16 => "bfloat16",
            Dtype::F32 => "float32",
            Dtype::F64 => "float64",
            Dtype::C32 => "complex32",
            Dtype::C64 => "complex64",
            Dtype::C128 => "complex128",
            Dtype::F8E4M3 => "float8_e4m3fn",
            Dtype::F8E5M2 => "float8_e5m2",
        }
    }
}

/// How elements are reduced. `PremulSum` first multiplies each rank's input by that rank's factor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ReduceOp {
    Sum,
    Avg,
    Product,
    Min,
    Max,
    Band,
    Bor,
    Bxor,
    PremulSum(f64),
}

impl ReduceOp {
    /// The op for one of torch's `ReduceOp.RedOpType` numbers. `factor` is used only for `PREMUL_SUM`.
    pub fn from_u8(value: u8, factor: f64) -> Option<ReduceOp> {
        Some(match value {
            0 => ReduceOp::Sum,
            1 => ReduceOp::Avg,
            2 => ReduceOp::Product,
            3 => ReduceOp::Min,
            4 => ReduceOp::Max,
            5 => ReduceOp::Band,
            6 => ReduceOp::Bor,
            7 => ReduceOp::Bxor,
            8 => ReduceOp::PremulSum(factor),
            _ => return None,
        })
    }

    pub const fn code(self) -> u8 {
        match self {
            ReduceOp::Sum => 0,
            ReduceOp::Avg => 1,
            ReduceOp::Product => 2,
            ReduceOp::Min => 3,
            ReduceOp::Max => 4,
            ReduceOp::Band => 5,
            ReduceOp::Bor => 6,
            ReduceOp::Bxor => 7,
            ReduceOp::PremulSum(_) => 8,
        }
    }

    /// The name for a code, for error texts about another rank's call.
    pub fn name_of(code: u8) -> &'static str {
        const NAMES: [&str; 9] = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"];
        NAMES.get(code as usize).copied().unwrap_or("unknown")
    }
}

/// A piece of memory: the caller's memory in this process or on a device, or a buffer of ours. The address is a number,
/// not a pointer, because most code only compares it, and a device address must not be dereferenced here. Code that
/// dereferences it (`engine::pieces`, a vendor's library) relies on the contract of `Request::new`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub addr: usize,
    pub bytes: usize,
}

impl Span {
    pub fn overlaps(&self, other: &Span) -> bool {
        self.bytes > 0 && other.bytes > 0 && self.addr < other.addr + other.bytes && other.addr < self.addr + self.bytes
    }
}

/// A list that usually has one element. In that case it needs no allocation.
#[derive(Clone, Debug)]
pub enum Few<T> {
    One(T),
    Many(Vec<T>),
}

/// The spans on one side of a call.
pub type Spans = Few<Span>;

impl<T> Default for Few<T> {
    fn default() -> Few<T> {
        Few::Many(Vec::new())
    }
}

impl<T> From<Vec<T>> for Few<T> {
    fn from(list: Vec<T>) -> Few<T> {
        Few::Many(list)
    }
}

impl<T> FromIterator<T> for Few<T> {
    fn from_iter<I: IntoIterator<Item = T>>(from: I) -> Few<T> {
        let mut from = from.into_iter();
        let Some(one) = from.next() else { return Few::default() };
        match from.next() {
            None => Few::One(one),
            Some(second) => Few::Many([one, second].into_iter().chain(from).collect()),
        }
    }
}

/// Lists with equal elements are equal.
impl<T: PartialEq> PartialEq for Few<T> {
    fn eq(&self, other: &Few<T>) -> bool {
        **self == **other
    }
}

impl<T: Eq> Eq for Few<T> {}

impl<T> std::ops::Deref for Few<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Few::One(one) => std::slice::from_ref(one),
            Few::Many(list) => list,
        }
    }
}

/// A strided tensor: runs of equal length in caller memory, repeated in up to four dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strided {
    pub addr: usize,
    /// Length of one run in bytes.
    pub run: usize,
    /// For each dimension: the number of repetitions, and their distance in bytes; 1 and 0 if the dimension is unused.
    pub counts: [usize; Strided::DIMENSIONS],
    pub strides: [usize; Strided::DIMENSIONS],
    /// True if the call writes this memory, false if it reads it.
    pub written: bool,
}

impl Strided {
    pub const DIMENSIONS: usize = 4;

    /// The span from the first to the last byte.
    pub fn extent(&self) -> Span {
        let last: usize = self.counts.iter().zip(&self.strides).map(|(count, stride)| (count - 1) * stride).sum();
        Span { addr: self.addr, bytes: last + self.run }
    }
}

/// A tensor of a call's list: its size, and its element type if the call reduces, otherwise `Bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    pub dtype: Dtype,
    pub bytes: usize,
}

/// `root` of a receive from any rank.
pub const ANY_RANK: u32 = u32::MAX;

/// One call as C++ passes it. C++ has checked it against torch's rules; the core checks it against the group's.
///
/// `inputs` and `outputs` are lists of contiguous spans. The spans of a list are read or written like one contiguous
/// piece of memory:
///
/// | kind | inputs | outputs |
/// | --- | --- | --- |
/// | all_reduce | own numbers | the result, as many bytes |
/// | reduce | own numbers | the result at the root, empty elsewhere |
/// | broadcast | the data at the root, empty elsewhere | the data elsewhere, empty at the root |
/// | all_gather | own block | one block per rank, in rank order; sizes in `out_blocks` if they differ |
/// | gather | own block | one equal block per rank at the root, empty elsewhere |
/// | scatter | one equal block per rank at the root, empty elsewhere | own block |
/// | reduce_scatter | one block per rank, in rank order; sizes in `in_blocks` if they differ | own block, reduced |
/// | all_to_all | one block per rank (`in_blocks`) | one block per rank (`out_blocks`) |
/// | barrier | empty | empty |
/// | send / recv | the data / empty | empty / the data |
///
/// An output may be the same memory as its input (in place), but must not overlap it otherwise.
#[derive(Clone, Debug)]
pub struct Request {
    pub kind: Kind,
    pub dtype: Dtype,
    pub op: ReduceOp,
    /// Group rank of the root, or the peer of a send or receive (`ANY_RANK` means a receive from any rank).
    pub root: u32,
    /// Used only for point-to-point calls.
    pub tag: u32,
    /// Milliseconds from issue until the operation fails; `None`: the group's timeout.
    pub timeout_ms: Option<u64>,
    /// See `Request::new`.
    inputs: Spans,
    outputs: Spans,
    /// The bytes of each rank's block, one entry per rank. Empty if all blocks are equal.
    pub in_blocks: Vec<usize>,
    pub out_blocks: Vec<usize>,
    /// All tensors of the call's list, including empty ones, in the caller's order. Every operation of the call has the
    /// whole list. Empty if the call has one tensor.
    pub list: Vec<Listed>,
    /// Caller memory that is read or written in addition to `inputs` and `outputs`: the strided tensors behind staged
    /// copies. Used only to keep operations on the same memory in order.
    pub also_touched: Vec<Strided>,
    pub note: CallNote,
}

impl Request {
    /// A call on caller memory. The remaining fields get default values, which the caller may change: dtype `Bytes`,
    /// reduce op SUM, root 0, tag 0, the group's timeout, equal blocks.
    ///
    /// # Safety
    ///
    /// If the call is passed to a group, the following must hold until the operation has ended. All bytes of `inputs`
    /// stay readable and all bytes of `outputs` stay writable. No other code writes the inputs or accesses the outputs.
    /// The operation has ended when `Group::run` returns, or when `Op::is_done`, `Op::wait` (with any result except
    /// `Error::wait_elapsed`) or `Completion::ended` reports it. If `issue` refuses the call, the contract ends
    /// immediately. (If two of its calls use the same memory, the group runs them in order.)
    #[allow(unsafe_code)] // declares the contract; nothing is read or written here
    pub unsafe fn new(kind: Kind, inputs: impl Into<Spans>, outputs: impl Into<Spans>) -> Request {
        Request { inputs: inputs.into(), outputs: outputs.into(), ..Request::without_memory(kind) }
    }

    /// A request for tests of code that only compares addresses. It must not be issued, because the addresses may be
    /// invalid.
    #[cfg(test)]
    pub fn of_addresses(kind: Kind, inputs: Vec<Span>, outputs: Vec<Span>) -> Request {
        Request { inputs: inputs.into(), outputs: outputs.into(), ..Request::without_memory(kind) }
    }

    /// A call without memory: a barrier, or a call in which this rank neither sends nor receives data.
    pub fn without_memory(kind: Kind) -> Request {
        Request {
            kind,
            dtype: Dtype::Bytes,
            op: ReduceOp::Sum,
            root: 0,
            tag: 0,
            timeout_ms: None,
            inputs: Spans::default(),
            outputs: Spans::default(),
            in_blocks: Vec::new(),
            out_blocks: Vec::new(),
            list: Vec::new(),
            also_touched: Vec::new(),
            note: CallNote::default(),
        }
    }

    pub fn inputs(&self) -> &[Span] {
        &self.inputs
    }

    pub fn outputs(&self) -> &[Span] {
        &self.outputs
    }
}

/// Facts about a call for statistics and texts, which are not needed to run it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallNote {
    /// Whether the statistics count this operation as a call. False for every operation of a split call except the
    /// first.
    pub counts: bool,
    /// Number of tensors of the call's list in this operation. 1 if the call takes no list, 0 if no caller requested
    /// the operation.
    pub tensors: u32,
    /// torch's number for the element type of the caller's tensors; `CallNote::NO_TYPE` if unknown.
    pub element: u8,
    /// Number of the call site in the caller's program, assigned by the shim; 0 if it was not looked up.
    pub site: u32,
    /// The caller's tensors are on a device, and copies of them in host memory are transferred.
    pub host_staged: bool,
}

impl CallNote {
    pub const NO_TYPE: u8 = u8::MAX;
}

impl Default for CallNote {
    fn default() -> CallNote {
        CallNote { counts: true, tensors: 1, element: CallNote::NO_TYPE, site: 0, host_staged: false }
    }
}
