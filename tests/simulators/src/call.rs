//! One operation as the core runs it: the arguments of the vendor's call, with device memory as addresses.
//!
//! The input is read when the operation's turn on the stream comes, and the output is written when the operation has
//! ended; in between the operation uses private memory. A device behaves like this, too. So a test sees work that runs
//! too early, and memory that is reused too early.

use sagellm::group::Group;
use sagellm::types::{Dtype, Kind, ReduceOp, Request, Span};

use crate::float8;
use crate::memory;

/// Tags of the engine's messages: the data, and the word that tells the sender that the receiver is there.
const DATA: u32 = 0;
const READY: u32 = 1;

/// Address of a factor, and the function that reads it.
pub type Scalar = (usize, fn(usize) -> f64);

#[derive(Clone, Debug)]
pub struct Call {
    pub kind: Kind,
    /// `Dtype::Bytes` if data is only moved.
    pub dtype: Dtype,
    pub op: ReduceOp,
    pub root: u32,
    pub inputs: Vec<Span>,
    pub outputs: Vec<Span>,
    /// Bytes of each rank's block, if they differ.
    pub in_blocks: Vec<usize>,
    pub out_blocks: Vec<usize>,
    /// Address to which the input is also copied, at the root of a broadcast that is not in place.
    pub copy_to: Option<usize>,
    /// Factor on the device by which the input is multiplied. Read when the operation runs.
    pub factor: Option<Scalar>,
    /// NCCL's number of an 8-bit float type. Such numbers are combined in 32 bits and rounded once.
    pub float8: Option<i32>,
}

/// True if the two pieces of memory share no byte.
pub fn apart(a: (usize, usize), b: (usize, usize)) -> bool {
    a.1 == 0 || b.1 == 0 || a.0 + a.1 <= b.0 || b.0 + b.1 <= a.0
}

pub fn span(addr: usize, bytes: usize) -> Vec<Span> {
    if bytes == 0 { Vec::new() } else { vec![Span { addr, bytes }] }
}

impl Call {
    /// A call that reads `input` and writes `output`, each of one piece.
    pub fn new(kind: Kind, input: (usize, usize), output: (usize, usize)) -> Call {
        Call {
            kind,
            dtype: Dtype::Bytes,
            op: ReduceOp::Sum,
            root: 0,
            inputs: span(input.0, input.1),
            outputs: span(output.0, output.1),
            in_blocks: Vec::new(),
            out_blocks: Vec::new(),
            copy_to: None,
            factor: None,
            float8: None,
        }
    }

    pub fn reducing(mut self, dtype: Dtype, op: ReduceOp) -> Call {
        (self.dtype, self.op) = (dtype, op);
        self
    }

    pub fn all_reduce(send: usize, recv: usize, bytes: usize) -> Call {
        Call::new(Kind::AllReduce, (send, bytes), (recv, bytes))
    }

    pub fn broadcast(send: usize, recv: usize, bytes: usize, root: u32, me: u32) -> Call {
        let mut call = if root == me {
            Call::new(Kind::Broadcast, (send, bytes), (0, 0))
        } else {
            Call::new(Kind::Broadcast, (0, 0), (recv, bytes))
        };
        call.root = root;
        call.copy_to = (root == me && send != recv).then_some(recv);
        call
    }

    pub fn reduce(send: usize, recv: usize, bytes: usize, root: u32, me: u32) -> Call {
        let mut call = Call::new(Kind::Reduce, (send, bytes), (recv, if root == me { bytes } else { 0 }));
        call.root = root;
        call
    }

    /// `bytes` is the size of one rank's block.
    pub fn all_gather(send: usize, recv: usize, bytes: usize, ranks: u32) -> Call {
        Call::new(Kind::AllGather, (send, bytes), (recv, bytes * ranks as usize))
    }

    /// `bytes` is the size of one rank's block.
    pub fn reduce_scatter(send: usize, recv: usize, bytes: usize, ranks: u32) -> Call {
        Call::new(Kind::ReduceScatter, (send, bytes * ranks as usize), (recv, bytes))
    }

    /// `bytes` is the size of one rank's block.
    pub fn all_to_all(send: usize, recv: usize, bytes: usize, ranks: u32) -> Call {
        Call::new(Kind::AllToAll, (send, bytes * ranks as usize), (recv, bytes * ranks as usize))
    }

    pub fn gather(send: usize, recv: usize, bytes: usize, root: u32, (me, ranks): (u32, u32)) -> Call {
        let all = if root == me { bytes * ranks as usize } else { 0 };
        let mut call = Call::new(Kind::Gather, (send, bytes), (recv, all));
        call.root = root;
        call
    }

    pub fn scatter(send: usize, recv: usize, bytes: usize, root: u32, (me, ranks): (u32, u32)) -> Call {
        let all = if root == me { bytes * ranks as usize } else { 0 };
        let mut call = Call::new(Kind::Scatter, (send, all), (recv, bytes));
        call.root = root;
        call
    }

    pub fn message(kind: Kind, buffer: usize, bytes: usize, peer: u32) -> Call {
        let mut call = match kind {
            Kind::Send => Call::new(kind, (buffer, bytes), (0, 0)),
            _ => Call::new(kind, (0, 0), (buffer, bytes)),
        };
        call.root = peer;
        call
    }

    /// A call on pieces (address, bytes), one for each rank.
    pub fn pieces(kind: Kind, inputs: &[(usize, usize)], outputs: &[(usize, usize)]) -> Call {
        let spans = |list: &[(usize, usize)]| list.iter().flat_map(|(at, bytes)| span(*at, *bytes)).collect();
        let sizes = |list: &[(usize, usize)]| list.iter().map(|(_, bytes)| *bytes).collect::<Vec<usize>>();
        let mut call = Call::new(kind, (0, 0), (0, 0));
        (call.inputs, call.outputs) = (spans(inputs), spans(outputs));
        if kind != Kind::AllGather {
            call.in_blocks = sizes(inputs);
        }
        if kind != Kind::ReduceScatter {
            call.out_blocks = sizes(outputs);
        }
        call
    }

    pub fn bytes(&self) -> usize {
        self.inputs.iter().chain(&self.outputs).map(|span| span.bytes).sum()
    }
}

/// A call that has reached its turn.
pub struct Running {
    call: Call,
    input: Vec<u8>,
    output: Vec<u8>,
    word: Vec<u8>,
    ops: Vec<std::sync::Arc<sagellm::group::Op>>,
}

impl Running {
    /// Reads the input. The private memory must not move or be freed before every operation has ended, so `self` must
    /// not be dropped before; `Comm::perform` ensures that.
    pub fn new(call: &Call) -> Running {
        let mut input = call.inputs.iter().flat_map(|span| memory::read(span.addr, span.bytes)).collect::<Vec<u8>>();
        let mut output = vec![0; call.outputs.iter().map(|span| span.bytes).sum()];
        let mut call = call.clone();
        if let Some(number) = call.float8 {
            input = float8::widened(number, &input);
            output.resize(4 * output.len(), 0);
            call.dtype = Dtype::F32;
        }
        if let Some((scalar, read)) = call.factor {
            call.op = ReduceOp::PremulSum(read(scalar));
        }
        Running { call, input, output, word: vec![0], ops: Vec::new() }
    }

    /// Issues the operation to the engine.
    pub fn issue(&mut self, group: &Group) -> sagellm::error::Result<()> {
        let whole = |memory: &mut Vec<u8>| span(memory.as_mut_ptr() as usize, memory.len());
        let (inputs, outputs) = (whole(&mut self.input), whole(&mut self.output));
        let word = whole(&mut self.word);
        // A message is a rendezvous: a send ends only after its receive has begun.
        if self.call.kind == Kind::Send {
            self.give(group, Kind::Recv, READY, (Vec::new(), word))?;
        } else if self.call.kind == Kind::Recv {
            self.give(group, Kind::Send, READY, (word, Vec::new()))?;
        }
        self.give(group, self.call.kind, DATA, (inputs, outputs))
    }

    fn give(
        &mut self,
        group: &Group,
        kind: Kind,
        tag: u32,
        (inputs, outputs): (Vec<Span>, Vec<Span>),
    ) -> sagellm::error::Result<()> {
        let call = &self.call;
        // SAFETY: the memory is the call's, which is kept until its operations have ended.
        let mut request = unsafe { Request::new(kind, inputs, outputs) };
        (request.dtype, request.op, request.root, request.tag) = (call.dtype, call.op, call.root, tag);
        (request.in_blocks, request.out_blocks) = (call.in_blocks.clone(), call.out_blocks.clone());
        self.ops.push(group.issue(request, None)?);
        Ok(())
    }

    pub fn ops(&self) -> &[std::sync::Arc<sagellm::group::Op>] {
        &self.ops
    }

    /// Writes the output, after every operation has succeeded.
    pub fn store(&self) {
        let mut at = 0;
        let narrow = self.call.float8.map(|number| float8::narrowed(number, &self.output));
        let output = narrow.as_ref().unwrap_or(&self.output);
        for span in &self.call.outputs {
            memory::write(span.addr, &output[at..at + span.bytes]);
            at += span.bytes;
        }
        if let Some(to) = self.call.copy_to {
            memory::write(to, &self.input);
        }
    }

    /// True for a message from a rank to itself.
    pub fn is_own(&self, me: u32) -> bool {
        self.call.kind.is_p2p() && self.call.root == me
    }

    pub fn kind(&self) -> Kind {
        self.call.kind
    }

    pub fn input(&self) -> &[u8] {
        &self.input
    }

    /// Sets the output to data that did not come from the engine.
    pub fn take(&mut self, data: &[u8]) {
        let bytes = self.output.len().min(data.len());
        self.output[..bytes].copy_from_slice(&data[..bytes]);
    }
}
