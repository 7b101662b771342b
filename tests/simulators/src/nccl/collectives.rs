//! NCCL's operations: they are checked, collected in groups, and passed to the core.

#![allow(clippy::too_many_arguments)] // the interface has them

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sagellm::reduce::{bf16_to_f32, f16_to_f32};
use sagellm::types::{Dtype, Kind, ReduceOp};

use super::plugins::Sessions;
use super::{INVALID_ARGUMENT, INVALID_USAGE, SUCCESS, UNHANDLED_CUDA_ERROR, code_of, in_background, refuse, usable};
use crate::batch::{self, Entry};
use crate::call::{Call, apart};
use crate::comm::{Comm, Fault, Vendor};
use crate::device::Runtime;
use crate::float8::FLOAT8;
use crate::memory;
use crate::pointers::Out;
use crate::settings;
use crate::stream::Stream;
use crate::{cuda, trace};

/// A factor of `ncclRedOpCreatePreMulSum`, for one communicator.
#[derive(Clone, Copy)]
pub struct Factor {
    dtype: i32,
    /// The value if it was read when the factor was made, or the address from which the operation reads it when it
    /// runs.
    value: Result<f64, usize>,
}

/// The data about a collective that the plug-ins get.
#[derive(Clone, Copy)]
pub struct Issued {
    /// NCCL's number of the function, if the tuner chooses for it.
    pub func: i32,
    pub name: &'static str,
    pub number: u64,
    pub send: usize,
    pub recv: usize,
    pub count: usize,
    pub root: i32,
    pub datatype: &'static str,
}

const FIRST_FACTOR: i32 = 5;

/// The engine's type, the size, and NCCL's name of an element type.
fn element(dtype: i32) -> Option<(Dtype, usize, &'static str)> {
    Some(match dtype {
        0 => (Dtype::I8, 1, "ncclInt8"),
        1 => (Dtype::U8, 1, "ncclUint8"),
        2 => (Dtype::I32, 4, "ncclInt32"),
        3 => (Dtype::U32, 4, "ncclUint32"),
        4 => (Dtype::I64, 8, "ncclInt64"),
        5 => (Dtype::U64, 8, "ncclUint64"),
        6 => (Dtype::F16, 2, "ncclFloat16"),
        7 => (Dtype::F32, 4, "ncclFloat32"),
        8 => (Dtype::F64, 8, "ncclFloat64"),
        9 => (Dtype::Bf16, 2, "ncclBfloat16"),
        10 => (Dtype::U8, 1, "ncclFloat8e4m3"),
        11 => (Dtype::U8, 1, "ncclFloat8e5m2"),
        _ => return None,
    })
}

fn read_scalar(dtype: i32) -> fn(usize) -> f64 {
    fn raw<const N: usize>(at: usize) -> [u8; N] {
        memory::read(at, N).try_into().expect("as many bytes as were asked for")
    }
    match dtype {
        0 => |at| f64::from(i8::from_le_bytes(raw(at))),
        1 => |at| f64::from(u8::from_le_bytes(raw(at))),
        2 => |at| f64::from(i32::from_le_bytes(raw(at))),
        3 => |at| f64::from(u32::from_le_bytes(raw(at))),
        4 => |at| i64::from_le_bytes(raw(at)) as f64,
        5 => |at| u64::from_le_bytes(raw(at)) as f64,
        6 => |at| f64::from(f16_to_f32(u16::from_le_bytes(raw(at)))),
        7 => |at| f64::from(f32::from_le_bytes(raw(at))),
        8 => |at| f64::from_le_bytes(raw(at)),
        _ => |at| f64::from(bf16_to_f32(u16::from_le_bytes(raw(at)))),
    }
}

/// One call before it is checked.
struct OpDesc {
    name: &'static str,
    func: i32,
    comm: usize,
    stream: usize,
    send: usize,
    recv: usize,
    count: usize,
    dtype: i32,
    root: i32,
}

/// The results of the checks.
struct Checked {
    comm: Arc<Comm>,
    stream: Arc<Stream>,
    size: usize,
    dtype: Dtype,
}

impl OpDesc {
    fn check(
        &self,
        send_bytes: impl Fn(&Comm, usize) -> usize,
        recv: impl Fn(&Comm, usize) -> usize,
    ) -> Result<Checked, i32> {
        let comm = usable(self.comm)?;
        let wrong = |text: String| Err(refuse(INVALID_ARGUMENT, format!("{}: {text}", self.name)));
        let Some((dtype, size, _)) = element(self.dtype) else { return wrong(format!("datatype {}", self.dtype)) };
        if !(0..comm.size as i32).contains(&self.root) {
            return wrong(format!("root or peer {} of {} ranks", self.root, comm.size));
        }
        let Some(stream) = cuda::stream(self.stream) else { return wrong(format!("stream {:#x}", self.stream)) };
        if stream.device != comm.device {
            return wrong(format!("a stream of device {} for one of {}", stream.device, comm.device));
        }
        let current = Runtime::Cuda.current();
        if current != Some(comm.device) {
            return wrong(format!("the thread's device is {current:?}, the communicator's {}", comm.device));
        }
        for (buffer, bytes) in [(self.send, send_bytes(&comm, size)), (self.recv, recv(&comm, size))] {
            if bytes > 0 && self.count > 0 && (buffer == 0 || !buffer.is_multiple_of(size)) {
                return wrong(format!("buffer {buffer:#x} of {size} byte elements"));
            }
        }
        Ok(Checked { comm, stream, size, dtype })
    }

    /// Adds the call to the open group, or issues it if there is none.
    fn issue(self, checked: Checked, call: Call) -> i32 {
        let Checked { comm, stream, .. } = checked;
        let datatype = element(self.dtype).map_or("", |(_, _, name)| name);
        let (rank, op) = (comm.rank, call.op.code());
        trace::call(|| {
            let (bytes, dtype, root) = (call.bytes(), self.dtype, self.root);
            let (count, stream) = (self.count, self.stream);
            format!(
                "{} count={count} dtype={dtype} op={op} root={root} rank={rank} bytes={bytes} stream={stream:#x}",
                self.name
            )
        });
        if self.count == 0 {
            return SUCCESS;
        }
        if settings::refuses() {
            return refuse(
                UNHANDLED_CUDA_ERROR,
                format!("{} is refused, as SAGELLM_SIM_REFUSE_AT asks for", self.name),
            );
        }
        let issued = Issued {
            func: self.func,
            name: self.name,
            number: 0,
            send: self.send,
            recv: self.recv,
            count: self.count,
            root: self.root,
            datatype,
        };
        let entry = Entry { comm, stream, call, issued: Some(issued) };
        if batch::open(Vendor::Nccl) {
            batch::with(Vendor::Nccl, |batch| batch.entries.push(entry));
            return SUCCESS;
        }
        launch(vec![entry])
    }
}

/// Records an error, so that the end of the group returns it, too.
fn done(result: Result<i32, i32>) -> i32 {
    let code = result.unwrap_or_else(|error| error);
    if code != SUCCESS && code != super::IN_PROGRESS {
        batch::with(Vendor::Nccl, |batch| {
            if batch.depth > 0 && batch.error == SUCCESS {
                batch.error = code;
            }
        });
    }
    code
}

/// Calls the plug-ins, then issues everything: immediately or, on a communicator that does not block, soon afterwards.
pub fn launch(entries: Vec<Entry>) -> i32 {
    const TUNED: std::ops::Range<i32> = 0..5;
    for entry in &entries {
        let Some(issued) = entry.issued.filter(|issued| TUNED.contains(&issued.func) && entry.comm.size > 1) else {
            continue;
        };
        let Some(sessions) = entry.comm.plugins.lock().unwrap().clone() else { continue };
        let sum = |spans: &[sagellm::types::Span]| spans.iter().map(|span| span.bytes).sum::<usize>();
        let bytes = sum(&entry.call.inputs).max(sum(&entry.call.outputs));
        match sessions.choose(issued.func, bytes, entries.len()) {
            Ok(chosen) => {
                let number = entry.comm.next_number();
                if let Some(handle) =
                    sessions.start(&entry.comm, &issued.name[4..], &Issued { number, ..issued }, chosen)
                {
                    Sessions::stop(handle);
                }
            }
            Err(error) => return refuse(error, format!("{}: the tuner failed", issued.name)),
        }
    }
    let blocking = entries.iter().all(|entry| entry.comm.blocking);
    if blocking {
        return batch::launch(entries).map_or_else(|error| refuse(code_of(&error), error.text()), |()| SUCCESS);
    }
    let mut comms: Vec<Arc<Comm>> = entries.iter().map(|entry| Arc::clone(&entry.comm)).collect();
    comms.dedup_by(|a, b| Arc::ptr_eq(a, b));
    comms.iter().for_each(|comm| _ = comm.in_progress.fetch_add(1, Ordering::AcqRel));
    in_background(Box::new(move || {
        if let Err(error) = batch::launch(entries) {
            comms.iter().for_each(|comm| comm.fail(Fault::of(&error)));
        }
        comms.iter().for_each(|comm| _ = comm.in_progress.fetch_sub(1, Ordering::AcqRel));
        SUCCESS
    }))
}

/// Adds the reduction with NCCL's number `op` to the call; it may be a factor of this communicator.
fn reduction(asked: &OpDesc, checked: &Checked, op: i32, call: Call) -> Result<Call, i32> {
    let wrong = |text: &str| Err(refuse(INVALID_ARGUMENT, format!("{}: {text} {op}", asked.name)));
    let mut call = call;
    if FLOAT8.contains(&asked.dtype) {
        if settings::get().nccl_version < 22_400 || op > 4 {
            return wrong("float8 is not combined before 2.24, nor by a factor; reduction");
        }
        call.float8 = Some(asked.dtype);
    }
    let plain = match op {
        0 => ReduceOp::Sum,
        1 => ReduceOp::Product,
        2 => ReduceOp::Max,
        3 => ReduceOp::Min,
        4 => ReduceOp::Avg,
        _ => {
            let Some(factor) = checked.comm.factors.lock().unwrap().get(&op).copied() else {
                return wrong("no reduction of this communicator has the number");
            };
            if factor.dtype != asked.dtype {
                return wrong("the factor has another datatype than the data, reduction");
            }
            let mut call = call.reducing(checked.dtype, ReduceOp::PremulSum(1.0));
            match factor.value {
                Ok(value) => call.op = ReduceOp::PremulSum(value),
                Err(scalar) => call.factor = Some((scalar, read_scalar(factor.dtype))),
            }
            return Ok(call);
        }
    };
    Ok(call.reducing(checked.dtype, plain))
}

/// Checks two buffers: `inner` may be at `place`, inside `outer`; otherwise the two must not overlap.
fn in_place_or_apart(name: &str, inner: (usize, usize), outer: (usize, usize), place: usize) -> Result<(), i32> {
    if inner.0 == place || apart(inner, outer) {
        return Ok(());
    }
    Err(refuse(INVALID_USAGE, format!("{name}: the buffers overlap and are not in place")))
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclAllReduce(
    send: usize,
    recv: usize,
    count: usize,
    dtype: i32,
    op: i32,
    comm: usize,
    stream: usize,
) -> i32 {
    let asked = OpDesc { name: "ncclAllReduce", func: 4, comm, stream, send, recv, count, dtype, root: 0 };
    done((|| {
        let checked = asked.check(|_, size| count * size, |_, size| count * size)?;
        let bytes = count * checked.size;
        in_place_or_apart(asked.name, (send, bytes), (recv, bytes), recv)?;
        let call = reduction(&asked, &checked, op, Call::all_reduce(send, recv, bytes))?;
        Ok(asked.issue(checked, call))
    })())
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclBroadcast(
    send: usize,
    recv: usize,
    count: usize,
    dtype: i32,
    root: i32,
    comm: usize,
    stream: usize,
) -> i32 {
    let asked = OpDesc { name: "ncclBroadcast", func: 0, comm, stream, send, recv, count, dtype, root };
    done((|| {
        let own = |comm: &Comm, size: usize| if comm.rank as i32 == root { count * size } else { 0 };
        let checked = asked.check(own, |_, size| count * size)?;
        let call = Call::broadcast(send, recv, count * checked.size, root as u32, checked.comm.rank);
        Ok(asked.issue(checked, call))
    })())
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclBcast(buffer: usize, count: usize, dtype: i32, root: i32, comm: usize, stream: usize) -> i32 {
    sim_ncclBroadcast(buffer, buffer, count, dtype, root, comm, stream)
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclReduce(
    send: usize,
    recv: usize,
    count: usize,
    dtype: i32,
    op: i32,
    root: i32,
    comm: usize,
    stream: usize,
) -> i32 {
    let asked = OpDesc { name: "ncclReduce", func: 1, comm, stream, send, recv, count, dtype, root };
    done((|| {
        let own = |comm: &Comm, size: usize| if comm.rank as i32 == root { count * size } else { 0 };
        let checked = asked.check(|_, size| count * size, own)?;
        let bytes = count * checked.size;
        let call = Call::reduce(send, recv, bytes, root as u32, checked.comm.rank);
        let call = reduction(&asked, &checked, op, call)?;
        Ok(asked.issue(checked, call))
    })())
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclAllGather(send: usize, recv: usize, count: usize, dtype: i32, comm: usize, stream: usize) -> i32 {
    let asked = OpDesc { name: "ncclAllGather", func: 2, comm, stream, send, recv, count, dtype, root: 0 };
    done((|| {
        let checked = asked.check(|_, size| count * size, |comm, size| count * size * comm.size as usize)?;
        let (bytes, ranks, rank) = (count * checked.size, checked.comm.size, checked.comm.rank as usize);
        in_place_or_apart(asked.name, (send, bytes), (recv, bytes * ranks as usize), recv + rank * bytes)?;
        Ok(asked.issue(checked, Call::all_gather(send, recv, bytes, ranks)))
    })())
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclReduceScatter(
    send: usize,
    recv: usize,
    count: usize,
    dtype: i32,
    op: i32,
    comm: usize,
    stream: usize,
) -> i32 {
    let asked = OpDesc { name: "ncclReduceScatter", func: 3, comm, stream, send, recv, count, dtype, root: 0 };
    done((|| {
        let checked = asked.check(|comm, size| count * size * comm.size as usize, |_, size| count * size)?;
        let (bytes, ranks, rank) = (count * checked.size, checked.comm.size, checked.comm.rank as usize);
        in_place_or_apart(asked.name, (recv, bytes), (send, bytes * ranks as usize), send + rank * bytes)?;
        let call = reduction(&asked, &checked, op, Call::reduce_scatter(send, recv, bytes, ranks))?;
        Ok(asked.issue(checked, call))
    })())
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclAlltoAll(send: usize, recv: usize, count: usize, dtype: i32, comm: usize, stream: usize) -> i32 {
    let asked = OpDesc { name: "ncclAlltoAll", func: -1, comm, stream, send, recv, count, dtype, root: 0 };
    done((|| {
        let whole = |comm: &Comm, size: usize| count * size * comm.size as usize;
        let checked = asked.check(whole, whole)?;
        let (bytes, ranks) = (count * checked.size, checked.comm.size);
        let all = bytes * ranks as usize;
        in_place_or_apart(asked.name, (send, all), (recv, all), usize::MAX)?;
        Ok(asked.issue(checked, Call::all_to_all(send, recv, bytes, ranks)))
    })())
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclGather(
    send: usize,
    recv: usize,
    count: usize,
    dtype: i32,
    root: i32,
    comm: usize,
    stream: usize,
) -> i32 {
    let asked = OpDesc { name: "ncclGather", func: -1, comm, stream, send, recv, count, dtype, root };
    done((|| {
        let all = |comm: &Comm, size: usize| if comm.rank as i32 == root { count * size } else { 0 };
        let checked = asked.check(|_, size| count * size, all)?;
        let shape = (checked.comm.rank, checked.comm.size);
        let call = Call::gather(send, recv, count * checked.size, root as u32, shape);
        Ok(asked.issue(checked, call))
    })())
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclScatter(
    send: usize,
    recv: usize,
    count: usize,
    dtype: i32,
    root: i32,
    comm: usize,
    stream: usize,
) -> i32 {
    let asked = OpDesc { name: "ncclScatter", func: -1, comm, stream, send, recv, count, dtype, root };
    done((|| {
        let all = |comm: &Comm, size: usize| if comm.rank as i32 == root { count * size } else { 0 };
        let checked = asked.check(all, |_, size| count * size)?;
        let shape = (checked.comm.rank, checked.comm.size);
        let call = Call::scatter(send, recv, count * checked.size, root as u32, shape);
        Ok(asked.issue(checked, call))
    })())
}

fn message(kind: Kind, buffer: usize, count: usize, dtype: i32, peer: i32, comm: usize, stream: usize) -> i32 {
    let name = if kind == Kind::Send { "ncclSend" } else { "ncclRecv" };
    let asked = OpDesc { name, func: -1, comm, stream, send: buffer, recv: buffer, count, dtype, root: peer };
    done((|| {
        let checked = asked.check(|_, size| count * size, |_, size| count * size)?;
        let call = Call::message(kind, buffer, count * checked.size, peer as u32);
        Ok(asked.issue(checked, call))
    })())
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclSend(buffer: usize, count: usize, dtype: i32, peer: i32, comm: usize, stream: usize) -> i32 {
    message(Kind::Send, buffer, count, dtype, peer, comm, stream)
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclRecv(buffer: usize, count: usize, dtype: i32, peer: i32, comm: usize, stream: usize) -> i32 {
    message(Kind::Recv, buffer, count, dtype, peer, comm, stream)
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclRedOpCreatePreMulSum(
    out: Out<i32>,
    scalar: usize,
    dtype: i32,
    residence: i32,
    comm: usize,
) -> i32 {
    const DEVICE: i32 = 0;
    const HOST: i32 = 1;
    let comm = match usable(comm) {
        Ok(comm) => comm,
        Err(error) => return error,
    };
    if scalar == 0 || out.is_null() || element(dtype).is_none() || FLOAT8.contains(&dtype) {
        return refuse(INVALID_ARGUMENT, format!("ncclRedOpCreatePreMulSum of datatype {dtype}"));
    }
    let value = match residence {
        DEVICE => Err(scalar),
        HOST => Ok(read_scalar(dtype)(scalar)),
        _ => return refuse(INVALID_ARGUMENT, format!("residence {residence}")),
    };
    let mut factors = comm.factors.lock().unwrap();
    let handle = (FIRST_FACTOR..).find(|handle| !factors.contains_key(handle)).expect("there is a free number");
    factors.insert(handle, Factor { dtype, value });
    out.set(handle);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclRedOpDestroy(op: i32, comm: usize) -> i32 {
    match usable(comm) {
        Ok(comm) if comm.factors.lock().unwrap().remove(&op).is_some() => SUCCESS,
        Ok(_) => refuse(INVALID_ARGUMENT, format!("{op} is no reduction that was made")),
        Err(error) => error,
    }
}
