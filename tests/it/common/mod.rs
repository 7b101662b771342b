//! Helpers of the tests: requests over plain vectors, random numbers, and a reference that shares no code with the
//! engine.

pub mod device;
pub mod host;
pub mod reference;
pub mod schedules;
pub mod simulators;

use std::io::Write as _;
use std::ops::{Deref, DerefMut};
use std::process::Command;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use sagellm::config::Settings;
use sagellm::engine::local;
use sagellm::engine::shm::memory::area::Area;
use sagellm::engine::shm::memory::arena;
use sagellm::engine::shm::memory::layout::Layout;
use sagellm::engine::shm::nodes::{Level, Nodes};
use sagellm::group::Group;
use sagellm::types::{Dtype, Kind, ReduceOp, Request, Span};

/// Returns a command that runs this program again with the single test `test`, even if that test is ignored. `module`
/// is the caller's `module_path!()`.
pub fn this_program(module: &str, test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([&test_name(module, test), "--exact", "--include-ignored", "--nocapture", "--test-threads=1"]);
    command
}

/// Returns the name of a test as libtest prints it, without the name of the program.
pub fn test_name(module: &str, test: &str) -> String {
    let (_, inside) = module.split_once("::").expect("a module of this program");
    format!("{inside}::{test}")
}

/// Areas of ranks that act as if they were bound to these NUMA nodes. Their stage buffers are small, and so is a chunk of a
/// sum that is made node by node.
pub fn areas_on(nodes: &[u32]) -> Vec<Arc<Area>> {
    let layout = Layout::new(nodes.len(), 1, Layout::smallest(nodes.len())).unwrap();
    local::areas_of(layout, &Nodes::of_list(Level::Numa, nodes).unwrap_or(Nodes::none())).unwrap()
}

/// Reports the progress of a run that takes minutes. Writes to stderr directly, because libtest keeps a test's output
/// until the test ends.
pub fn progress(what: &str, turn: u64, of: u64) {
    if of > 100 && turn.is_multiple_of(of / 8) {
        let _ = writeln!(std::io::stderr(), "{what}: {turn} of {of}");
    }
}

/// xorshift64*: the tests need repeatable random numbers, but not good ones.
#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n.max(1)
    }
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// The memory of a tensor: a vector, or a piece of the arena that peers can map.
pub enum Memory {
    Own(Vec<u8>),
    Shared { at: NonNull<u8>, bytes: usize },
}

impl Memory {
    /// Returns a copy of `from` in the arena.
    pub fn shared(from: &[u8]) -> Memory {
        let at = arena::allocate(from.len()).expect("the arena has room");
        // SAFETY: `allocate` returned at least this many bytes, which nothing else uses.
        unsafe { at.as_ptr().copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        Memory::Shared { at, bytes: from.len() }
    }
}

impl Deref for Memory {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Memory::Own(vector) => vector,
            // SAFETY: this object owns the piece until it is dropped. Tests access the bytes only while no operation
            // runs on them.
            Memory::Shared { at, bytes } => unsafe { std::slice::from_raw_parts(at.as_ptr(), *bytes) },
        }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Memory::Own(vector) => vector,
            // SAFETY: as in `deref`.
            Memory::Shared { at, bytes } => unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), *bytes) },
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Memory::Shared { at, .. } = self {
            // SAFETY: `allocate` returned this address, which is freed only here.
            unsafe { arena::free(*at) };
        }
    }
}

/// One rank's memory for one operation: the inputs and outputs that the kind needs.
pub struct Buffers {
    pub input: Memory,
    pub output: Memory,
    pub in_blocks: Vec<usize>,
    pub out_blocks: Vec<usize>,
    /// Whether the input is also the output.
    pub in_place: bool,
    /// Number of pieces in which the memory is passed, cut at element boundaries.
    pub pieces: usize,
}

impl Buffers {
    pub fn result(&self) -> &[u8] {
        if self.in_place { &self.input } else { &self.output }
    }

    /// Returns a copy of the buffers in memory that peers can map.
    pub fn in_arena(self) -> Buffers {
        Buffers { input: Memory::shared(&self.input), output: Memory::shared(&self.output), ..self }
    }
}

/// One operation of a test program, the same on all ranks.
#[derive(Clone, Debug)]
pub struct Spec {
    pub kind: Kind,
    pub dtype: Dtype,
    pub op: ReduceOp,
    pub root: usize,
    /// Number of elements of one block, or of the tensor in all_reduce, broadcast and reduce.
    pub count: usize,
    /// Uneven blocks: rank q's block has `count + q * skew` elements (all_to_all: `count + (from + to) * skew`).
    pub skew: usize,
    pub in_place: bool,
    pub pieces: usize,
    pub seed: u64,
}

impl Spec {
    pub fn block(&self, from: usize, to: usize) -> usize {
        let of = match self.kind {
            Kind::AllToAll => from + to,
            Kind::AllGather => from,
            Kind::ReduceScatter => to,
            _ => 0,
        };
        (self.count + of * self.skew) * self.dtype.size()
    }

    /// Returns the input of rank `rank` for rank `to` (or for all ranks) as bytes: small numbers in the dtype.
    pub fn data(&self, rank: usize, to: usize, bytes: usize) -> Vec<u8> {
        let mut random = Random::new(self.seed ^ (rank as u64) << 20 ^ (to as u64) << 40);
        let mut out = Vec::with_capacity(bytes);
        while out.len() < bytes {
            let number = random.below(2000) as i64 - 1000;
            match self.dtype {
                Dtype::F32 => out.extend((number as f32 * 0.37).to_le_bytes()),
                Dtype::F64 => out.extend((number as f64 * 0.37).to_le_bytes()),
                Dtype::Bf16 => out.extend(((number as f32 * 0.37).to_bits() >> 16).to_le_bytes()[..2].iter()),
                _ => out.extend(&number.to_le_bytes()[..self.dtype.size().min(8)]),
            }
        }
        out.truncate(bytes);
        out
    }

    pub fn buffers(&self, me: usize, ranks: usize) -> Buffers {
        let root = me == self.root;
        let tensor = self.count * self.dtype.size();
        let (mut in_blocks, mut out_blocks) = (Vec::new(), Vec::new());
        let concat = |part: &dyn Fn(usize) -> Vec<u8>| (0..ranks).flat_map(part).collect::<Vec<u8>>();
        let (input, output) = match self.kind {
            Kind::AllReduce => (self.data(me, 0, tensor), vec![0; tensor]),
            Kind::Reduce => (self.data(me, 0, tensor), vec![0; if root { tensor } else { 0 }]),
            Kind::Broadcast if root => (self.data(me, 0, tensor), Vec::new()),
            Kind::Broadcast => (Vec::new(), vec![0; tensor]),
            Kind::AllGather => {
                if self.skew > 0 {
                    out_blocks = (0..ranks).map(|q| self.block(q, 0)).collect();
                }
                (self.data(me, 0, self.block(me, 0)), vec![0; (0..ranks).map(|q| self.block(q, 0)).sum()])
            }
            Kind::Gather => (self.data(me, 0, tensor), vec![0; if root { tensor * ranks } else { 0 }]),
            Kind::Scatter => {
                let input = if root { concat(&|q| self.data(me, q, tensor)) } else { Vec::new() };
                (input, vec![0; tensor])
            }
            Kind::ReduceScatter => {
                if self.skew > 0 {
                    in_blocks = (0..ranks).map(|q| self.block(0, q)).collect();
                }
                (concat(&|q| self.data(me, q, self.block(0, q))), vec![0; self.block(0, me)])
            }
            Kind::AllToAll => {
                if self.skew > 0 {
                    in_blocks = (0..ranks).map(|q| self.block(me, q)).collect();
                    out_blocks = (0..ranks).map(|q| self.block(q, me)).collect();
                }
                let total = (0..ranks).map(|q| self.block(q, me)).sum();
                (concat(&|q| self.data(me, q, self.block(me, q))), vec![0; total])
            }
            _ => (Vec::new(), Vec::new()),
        };
        let in_place = self.in_place && self.kind == Kind::AllReduce;
        let (input, output) = (Memory::Own(input), Memory::Own(output));
        Buffers { input, output, in_blocks, out_blocks, in_place, pieces: self.pieces }
    }

    pub fn request(&self, buffers: &mut Buffers) -> Request {
        let size = if self.kind.reduces() { self.dtype.size() } else { 1 };
        let inputs = cut(&mut buffers.input, buffers.pieces, size);
        let outputs = if buffers.in_place { inputs.clone() } else { cut(&mut buffers.output, buffers.pieces, size) };
        let mut request = plain(self.kind, self.root as u32, inputs, outputs);
        if self.kind.reduces() {
            request.dtype = self.dtype;
        }
        request.op = self.op;
        (request.in_blocks, request.out_blocks) = (buffers.in_blocks.clone(), buffers.out_blocks.clone());
        request
    }

    /// Returns the expected result of rank `me`, computed by one thread in the simplest way.
    pub fn expected(&self, me: usize, ranks: usize) -> Vec<u8> {
        let root = me == self.root;
        let tensor = self.count * self.dtype.size();
        let all = |to: usize, bytes: usize| -> Vec<Vec<u8>> { (0..ranks).map(|q| self.data(q, to, bytes)).collect() };
        match self.kind {
            Kind::AllReduce => self.fold(&all(0, tensor)),
            Kind::Reduce if root => self.fold(&all(0, tensor)),
            Kind::Broadcast if !root => self.data(self.root, 0, tensor),
            Kind::AllGather => (0..ranks).flat_map(|q| self.data(q, 0, self.block(q, 0))).collect(),
            Kind::Gather if root => all(0, tensor).concat(),
            Kind::Scatter => self.data(self.root, me, tensor),
            Kind::ReduceScatter => self.fold(&all(me, self.block(0, me))),
            Kind::AllToAll => (0..ranks).flat_map(|q| self.data(q, me, self.block(q, me))).collect(),
            _ => Vec::new(),
        }
    }

    /// Compares the result of an operation with the expected one, bit for bit.
    pub fn check(&self, buffers: &Buffers, me: usize, ranks: usize) {
        let (found, expected) = (buffers.result(), self.expected(me, ranks));
        if found[..expected.len()] != expected[..] {
            let at = found.iter().zip(&expected).position(|(a, b)| a != b);
            panic!("rank {me} of {ranks}: {self:?} differs first at byte {at:?} of {}", expected.len());
        }
    }

    fn fold(&self, inputs: &[Vec<u8>]) -> Vec<u8> {
        let size = self.dtype.size();
        let count = inputs[0].len() / size;
        let mut out = Vec::new();
        for i in 0..count {
            let at = |q: usize| &inputs[q][i * size..(i + 1) * size];
            match self.dtype {
                Dtype::F32 => {
                    let value = |q: usize| f32::from_le_bytes(at(q).try_into().unwrap());
                    let sum = (1..inputs.len()).fold(value(0), |sum, q| self.pair(sum as f64, value(q) as f64) as f32);
                    out.extend(sum.to_le_bytes());
                }
                Dtype::Bf16 => {
                    let value =
                        |q: usize| f32::from_bits(u32::from(u16::from_le_bytes(at(q).try_into().unwrap())) << 16);
                    let sum = (1..inputs.len()).fold(value(0), |sum, q| self.pair(sum as f64, value(q) as f64) as f32);
                    let bits = sum.to_bits();
                    let rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
                    out.extend((rounded as u16).to_le_bytes());
                }
                Dtype::I32 => {
                    let value = |q: usize| i32::from_le_bytes(at(q).try_into().unwrap());
                    let sum = (1..inputs.len()).fold(value(0), |a, q| match self.op {
                        ReduceOp::Max => a.max(value(q)),
                        ReduceOp::Bxor => a ^ value(q),
                        _ => a.wrapping_add(value(q)),
                    });
                    out.extend(sum.to_le_bytes());
                }
                other => panic!("the reference does not know {other:?}"),
            }
        }
        out
    }

    /// Computes one addition or maximum of the reference, in f32. Operands in f32 are exact in f64. Rounding their f64
    /// sum to f32 gives the f32 sum, because double rounding is harmless for one addition.
    fn pair(&self, a: f64, b: f64) -> f64 {
        match self.op {
            ReduceOp::Max => a.max(b),
            _ => (a + b) as f32 as f64,
        }
    }
}

/// Returns the memory as up to `pieces` spans, cut at multiples of `size`.
pub fn cut(memory: &mut [u8], pieces: usize, size: usize) -> Vec<Span> {
    let (addr, bytes) = (memory.as_mut_ptr() as usize, memory.len());
    if bytes == 0 {
        return Vec::new();
    }
    let each = (bytes / size).div_ceil(pieces.max(1)).max(1) * size;
    (0..bytes).step_by(each).map(|start| Span { addr: addr + start, bytes: each.min(bytes - start) }).collect()
}

/// Returns a request with the values that most tests use: sums of bytes, tag 0, no blocks.
pub fn plain(kind: Kind, root: u32, inputs: Vec<Span>, outputs: Vec<Span>) -> Request {
    // SAFETY: every test keeps the memory of a call, and does not access it, until the call has ended.
    let mut request = unsafe { Request::new(kind, inputs, outputs) };
    request.root = root;
    if kind.reduces() {
        request.dtype = Dtype::U8;
    }
    request
}

/// Returns a request on one piece of memory: a message, a barrier, or a collective in place.
pub fn on_memory(kind: Kind, root: u32, memory: &mut [u8]) -> Request {
    let spans = cut(memory, 1, 1);
    let (inputs, outputs) = match kind {
        Kind::Send => (spans, Vec::new()),
        Kind::Recv => (Vec::new(), spans),
        Kind::Barrier => (Vec::new(), Vec::new()),
        _ => (spans.clone(), spans),
    };
    plain(kind, root, inputs, outputs)
}

/// Runs `body(rank)` on one thread per rank. Returns the results by rank.
pub fn on_ranks<T: Send>(ranks: usize, body: impl Fn(usize) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..ranks)
            .map(|rank| {
                let body = &body;
                scope.spawn(move || body(rank))
            })
            .collect();
        handles.into_iter().map(|handle| handle.join().expect("a rank panicked")).collect()
    })
}

/// Runs `body(groups, rank)` on one thread per rank, in turn for several layouts: all ranks on one host, one host per
/// rank and, from three ranks on, two ranks on one host. All ranks leave a group together.
pub fn for_each_layout(ranks: usize, timeout: Duration, body: impl Fn(&[Arc<Group>], usize) + Sync) {
    let places: [Vec<usize>; 2] = [(0..ranks).collect(), (0..ranks).map(|rank| rank % (ranks - 1).max(2)).collect()];
    let over_hosts = places[..(ranks - 1).min(2)].iter().map(|place| {
        Group::local_hosts(place, timeout, Settings::default(), local::links(ranks)).expect("groups of threads")
    });
    for groups in std::iter::once(Group::local(ranks, timeout).expect("groups of threads")).chain(over_hosts) {
        on_ranks(ranks, |me| body(&groups, me));
        on_ranks(ranks, |me| groups[me].shutdown());
    }
}
