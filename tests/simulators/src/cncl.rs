//! The C interface of CNCL 1.25, as in its header: cliques and their communicators, collectives, messages, groups.

#![allow(non_snake_case)]
#![allow(clippy::too_many_arguments)] // the interface has them

use std::ffi::c_char;
use std::sync::Arc;

use sagellm::error::{Error, ErrorKind};
use sagellm::types::{Dtype, Kind, ReduceOp};

use crate::batch::{self, Entry, Job};
use crate::bootstrap::{Place, hash};
use crate::call::{Call, apart};
use crate::cnrt;
use crate::comm::{Comm, Fault, Vendor};
use crate::device::Runtime;
use crate::pointers::{In, Out, forever};
use crate::settings;
use crate::stream::Stream;
use crate::table::Table;
use crate::trace;

const SUCCESS: i32 = 0;
const INTERNAL: i32 = 0x01;
const UNSUPPORTED: i32 = 0x11;
const NULL_POINTER: i32 = 0x21;
const NOT_INIT: i32 = 0x61;
const REINIT: i32 = 0x71;
const SOCKET: i32 = 0x22;
const RUNTIME: i32 = 0x03;
const IN_PROGRESS: i32 = 0x06;
const ASYNC_ERROR: i32 = 0x16;
const ARGUMENTS: i32 = 0x07;

const ID_BYTES: usize = 136;
/// The letter of CNCL's ids.
const LETTER: u8 = b'C';
/// Bytes of an id before its last part, which is their hash.
const DATA_BYTES: usize = 128;

static COMMS: Table<Comm> = Table::new(6);

#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub struct CliqueId([u8; ID_BYTES]);

/// Returns an error, and makes the end of an open group return it, too.
fn refuse(code: i32, text: impl Into<String>) -> i32 {
    trace::refuse(text);
    batch::with(Vendor::Cncl, |batch| {
        if batch.depth > 0 && batch.error == SUCCESS {
            batch.error = code;
        }
    });
    code
}

fn code_of(error: &Error) -> i32 {
    match error.kind() {
        ErrorKind::RankFailed | ErrorKind::Aborted | ErrorKind::Timeout => SOCKET,
        ErrorKind::Invalid | ErrorKind::Mismatch => ARGUMENTS,
        _ => INTERNAL,
    }
}

fn element(dtype: i32) -> Option<(Dtype, usize)> {
    Some(match dtype {
        0x10 => (Dtype::F16, 2),
        0x11 => (Dtype::Bf16, 2),
        0x12 => (Dtype::F32, 4),
        0x20 => (Dtype::I8, 1),
        0x21 => (Dtype::I16, 2),
        0x22 => (Dtype::I32, 4),
        0x23 => (Dtype::I64, 8),
        0x30 => (Dtype::U8, 1),
        0x31 => (Dtype::U16, 2),
        0x32 => (Dtype::U32, 4),
        0x33 => (Dtype::U64, 8),
        _ => return None,
    })
}

fn reduction(op: i32) -> Option<ReduceOp> {
    [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Max, ReduceOp::Min].get(usize::try_from(op).ok()?).copied()
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclGetLibVersion(major: Out<i32>, minor: Out<i32>, patch: Out<i32>) -> i32 {
    if major.set(1) && minor.set(25) && patch.set(0) { SUCCESS } else { NULL_POINTER }
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclGetErrorStr(result: i32) -> *const c_char {
    let name = match result {
        SUCCESS => "CNCL_RET_SUCCESS",
        INTERNAL => "CNCL_RET_ERR_INTERNAL",
        UNSUPPORTED => "CNCL_RET_ERR_UNSUPPORTED",
        NULL_POINTER => "CNCL_RET_ERR_NULL_POINTER",
        NOT_INIT => "CNCL_RET_ERR_NOT_INIT",
        REINIT => "CNCL_RET_ERR_REINIT",
        SOCKET => "CNCL_RET_ERR_SYS_SOCKET",
        RUNTIME => "CNCL_RET_ERR_MLU_RUNTIME",
        IN_PROGRESS => "CNCL_RET_ASYNC_IN_PROGRESS",
        ASYNC_ERROR => "CNCL_RET_ERR_ASYNC_ERROR",
        ARGUMENTS => "CNCL_RET_ERR_ARGUMENTS",
        _ => "CNCL_RET_ERR_UNKNOWN",
    };
    forever(&format!("{name} (simulated CNCL)"))
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclGetCliqueId(out: Out<CliqueId>) -> i32 {
    if out.is_null() {
        return refuse(NULL_POINTER, "cnclGetCliqueId");
    }
    match Place::new() {
        Ok(place) => {
            let mut id = [0; ID_BYTES];
            place.to_id(LETTER, &mut id[..DATA_BYTES]);
            let sum = hash(&id[..DATA_BYTES]);
            id[DATA_BYTES..].copy_from_slice(&sum.to_le_bytes());
            out.fill(&id);
            SUCCESS
        }
        Err(error) => refuse(SOCKET, error),
    }
}

fn place_of(id: In<CliqueId>) -> Option<Place> {
    let bytes = id.bytes(ID_BYTES)?;
    let (data, sum) = bytes.split_at(DATA_BYTES);
    (hash(data).to_le_bytes() == sum).then(|| Place::from_id(LETTER, data))?
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclInitComms(
    comms: Out<usize>,
    count: i32,
    devices: In<i32>,
    ranks: In<i32>,
    size: i32,
    id: In<CliqueId>,
) -> i32 {
    trace::call(|| format!("cnclInitComms count={count} size={size}"));
    let Ok(number) = usize::try_from(count) else { return refuse(ARGUMENTS, format!("{count} communicators")) };
    let (Some(devices), Some(own)) = (devices.list(number), ranks.list(number)) else {
        return refuse(NULL_POINTER, "no list of devices or ranks");
    };
    if comms.is_null() {
        return refuse(NULL_POINTER, "no list of communicators");
    }
    if number == 0 || count > size || own.iter().any(|rank| !(0..size).contains(rank)) {
        return refuse(ARGUMENTS, format!("ranks {own:?} of {size}"));
    }
    if Runtime::Cnrt.current().is_none() || devices.iter().any(|device| !Runtime::Cnrt.exists(*device)) {
        return refuse(RUNTIME, format!("devices {devices:?}, this thread's is {:?}", Runtime::Cnrt.current()));
    }
    let place = match (id.is_null(), count == size) {
        (true, true) => Place::new().ok(),
        (true, false) => return refuse(NULL_POINTER, "a clique of several processes needs an id"),
        (false, _) => place_of(id),
    };
    let Some(place) = place else { return refuse(ARGUMENTS, "the bytes are not those of a clique id") };
    if !place.first_use() {
        return refuse(REINIT, "the clique id was used before in this process");
    }
    let mut jobs: Vec<Job> = Vec::new();
    for (at, (device, rank)) in devices.into_iter().zip(own).enumerate() {
        let shape = (size as u32, rank as u32);
        let comm = Arc::new(Comm::new(Vendor::Cncl, place, shape, device, "", true));
        // The entry in the caller's list is written when the communicator exists.
        let out = comms.at(at).address();
        Out::<usize>::of(out).set(0);
        jobs.push(Box::new(move || match comm.set_up(settings::get().ceiling) {
            Ok(()) => {
                Out::of(out).set(COMMS.add(comm));
                SUCCESS
            }
            Err(error) => code_of(&error),
        }));
    }
    if batch::open(Vendor::Cncl) {
        batch::with(Vendor::Cncl, |batch| batch.jobs.extend(jobs));
        return SUCCESS;
    }
    batch::run_jobs(jobs)
}

fn destroy(handle: usize) -> i32 {
    match COMMS.remove(handle) {
        Some(comm) => {
            comm.drain();
            comm.close();
            SUCCESS
        }
        None => refuse(NOT_INIT, "no communicator"),
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclFreeComm(comm: usize) -> i32 {
    destroy(comm)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclDestroyComms(comms: In<usize>, count: i32) -> i32 {
    let Some(list) = comms.list(count.max(0) as usize) else { return refuse(NULL_POINTER, "no communicators") };
    list.into_iter().map(destroy).fold(SUCCESS, |first, code| if first == SUCCESS { code } else { first })
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclAbortComm(comm: usize) -> i32 {
    trace::call(|| "cnclAbortComm".to_string());
    match COMMS.remove(comm) {
        Some(comm) => {
            comm.abort();
            SUCCESS
        }
        None => refuse(NOT_INIT, "no communicator"),
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclSetCommConfig(comm: usize, config: In<i32>) -> i32 {
    const PRIORITIES: [i32; 3] = [0, 0x10, 0x11];
    match (COMMS.get(comm), config.get()) {
        (None, _) => refuse(NOT_INIT, "no communicator"),
        (_, None) => refuse(NULL_POINTER, "no configuration"),
        (_, Some(priority)) if PRIORITIES.contains(&priority) => SUCCESS,
        (_, Some(priority)) => refuse(ARGUMENTS, format!("priority {priority}")),
    }
}

fn getter(out: Out<i32>, comm: usize, value: impl Fn(&Comm) -> i32) -> i32 {
    match COMMS.get(comm) {
        None => refuse(NOT_INIT, "no communicator"),
        Some(comm) if out.set(value(&comm)) => SUCCESS,
        Some(_) => refuse(NULL_POINTER, "nowhere to write to"),
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclGetCommCount(out: Out<i32>, comm: usize) -> i32 {
    getter(out, comm, |comm| comm.size as i32)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclGetCommRank(out: Out<i32>, comm: usize) -> i32 {
    getter(out, comm, |comm| comm.rank as i32)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclGetCommDevice(out: Out<i32>, comm: usize) -> i32 {
    getter(out, comm, |comm| comm.device)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclGetCommAsyncError(comm: usize) -> i32 {
    match COMMS.get(comm) {
        None => NOT_INIT,
        Some(comm) if comm.fault() != Fault::None => ASYNC_ERROR,
        Some(comm) if comm.running() > 0 => IN_PROGRESS,
        Some(_) => SUCCESS,
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclGroupStart() -> i32 {
    batch::with(Vendor::Cncl, |batch| batch.depth += 1);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclGroupEnd() -> i32 {
    batch::close(
        Vendor::Cncl,
        || refuse(ARGUMENTS, "cnclGroupEnd without cnclGroupStart"),
        |error| refuse(code_of(error), error.text()),
    )
}

/// Address and bytes of a buffer.
type Buffer = (usize, usize);

struct OpDesc {
    name: &'static str,
    comm: usize,
    queue: usize,
    dtype: i32,
}

struct Checked {
    comm: Arc<Comm>,
    queue: Arc<Stream>,
    size: usize,
    dtype: Dtype,
}

impl OpDesc {
    /// Checks everything that does not depend on the buffers.
    fn check(&self, root: i32) -> Result<Checked, i32> {
        let wrong = |code: i32, text: String| Err(refuse(code, format!("{}: {text}", self.name)));
        let Some(comm) = COMMS.get(self.comm) else { return wrong(NOT_INIT, "no communicator".to_string()) };
        if comm.fault() != Fault::None {
            return wrong(ASYNC_ERROR, "the communicator has failed".to_string());
        }
        if Runtime::Cnrt.current().is_none() {
            return wrong(RUNTIME, "no device was set on this thread".to_string());
        }
        let Some((dtype, size)) = element(self.dtype) else {
            return wrong(ARGUMENTS, format!("type {:#x}", self.dtype));
        };
        if !(0..comm.size as i32).contains(&root) {
            return wrong(ARGUMENTS, format!("root or peer {root} of {}", comm.size));
        }
        let Some(queue) = cnrt::queue(self.queue) else { return wrong(ARGUMENTS, "no queue".to_string()) };
        if queue.device != comm.device {
            return wrong(ARGUMENTS, format!("a queue of device {} for one of {}", queue.device, comm.device));
        }
        let current = Runtime::Cnrt.current();
        if current != Some(comm.device) {
            return wrong(ARGUMENTS, format!("the thread's device is {current:?}, the communicator's {}", comm.device));
        }
        Ok(Checked { comm, queue, size, dtype })
    }

    fn buffers(&self, checked: &Checked, buffers: &[Buffer]) -> Result<(), i32> {
        for (buffer, bytes) in buffers.iter().filter(|(_, bytes)| *bytes > 0) {
            if *buffer == 0 {
                return Err(refuse(NULL_POINTER, format!("{}: no buffer for {bytes} bytes", self.name)));
            }
            if !buffer.is_multiple_of(checked.size) {
                return Err(refuse(ARGUMENTS, format!("{}: {buffer:#x} is not aligned", self.name)));
            }
        }
        Ok(())
    }

    /// Checks two buffers: `inner` may be at `place`, inside `outer`; otherwise the two must not overlap.
    fn in_place(&self, inner: Buffer, outer: Buffer, place: usize) -> Result<(), i32> {
        if inner.0 == place || apart(inner, outer) {
            return Ok(());
        }
        Err(refuse(ARGUMENTS, format!("{}: the buffers overlap and are not in place", self.name)))
    }

    fn reducing(&self, checked: &Checked, op: i32, call: Call) -> Result<Call, i32> {
        match reduction(op) {
            Some(op) => Ok(call.reducing(checked.dtype, op)),
            None => Err(refuse(ARGUMENTS, format!("{}: reduction {op}", self.name))),
        }
    }

    fn issue(&self, checked: Checked, call: Call) -> i32 {
        trace::call(|| {
            let (op, root, rank, bytes) = (call.op.code(), call.root, checked.comm.rank, call.bytes());
            format!("{} dtype={:#x} op={op} root={root} rank={rank} bytes={bytes}", self.name, self.dtype)
        });
        if settings::refuses() {
            return refuse(RUNTIME, format!("{} is refused, as SAGELLM_SIM_REFUSE_AT asks for", self.name));
        }
        let entry = Entry { comm: checked.comm, stream: checked.queue, call, issued: None };
        if batch::open(Vendor::Cncl) {
            batch::with(Vendor::Cncl, |batch| batch.entries.push(entry));
            return SUCCESS;
        }
        batch::launch(vec![entry]).map_or_else(|error| refuse(code_of(&error), error.text()), |()| SUCCESS)
    }
}

fn done(result: Result<i32, i32>) -> i32 {
    result.unwrap_or_else(|error| error)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclAllReduce(
    send: usize,
    recv: usize,
    count: usize,
    dtype: i32,
    op: i32,
    comm: usize,
    queue: usize,
) -> i32 {
    let asked = OpDesc { name: "cnclAllReduce", comm, queue, dtype };
    done((|| {
        let checked = asked.check(0)?;
        let bytes = count * checked.size;
        asked.buffers(&checked, &[(send, bytes), (recv, bytes)])?;
        asked.in_place((send, bytes), (recv, bytes), recv)?;
        let call = asked.reducing(&checked, op, Call::all_reduce(send, recv, bytes))?;
        Ok(asked.issue(checked, call))
    })())
}

fn broadcast(asked: &OpDesc, send: usize, recv: usize, count: usize, root: i32) -> Result<i32, i32> {
    let checked = asked.check(root)?;
    let (bytes, me) = (count * checked.size, checked.comm.rank);
    asked.buffers(&checked, &[(send, if me == root as u32 { bytes } else { 0 }), (recv, bytes)])?;
    let call = Call::broadcast(send, recv, bytes, root as u32, me);
    Ok(asked.issue(checked, call))
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclBroadcast(
    send: usize,
    recv: usize,
    count: usize,
    dtype: i32,
    root: i32,
    comm: usize,
    queue: usize,
) -> i32 {
    done(broadcast(&OpDesc { name: "cnclBroadcast", comm, queue, dtype }, send, recv, count, root))
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclBcast(buffer: usize, count: usize, dtype: i32, root: i32, comm: usize, queue: usize) -> i32 {
    done(broadcast(&OpDesc { name: "cnclBcast", comm, queue, dtype }, buffer, buffer, count, root))
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclReduce(
    send: usize,
    recv: usize,
    count: usize,
    dtype: i32,
    op: i32,
    root: i32,
    comm: usize,
    queue: usize,
) -> i32 {
    let asked = OpDesc { name: "cnclReduce", comm, queue, dtype };
    done((|| {
        let checked = asked.check(root)?;
        let (bytes, me) = (count * checked.size, checked.comm.rank);
        asked.buffers(&checked, &[(send, bytes), (recv, if me == root as u32 { bytes } else { 0 })])?;
        let call = asked.reducing(&checked, op, Call::reduce(send, recv, bytes, root as u32, me))?;
        Ok(asked.issue(checked, call))
    })())
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclReduceScatter(
    send: usize,
    recv: usize,
    count: usize,
    dtype: i32,
    op: i32,
    comm: usize,
    queue: usize,
) -> i32 {
    let asked = OpDesc { name: "cnclReduceScatter", comm, queue, dtype };
    done((|| {
        let checked = asked.check(0)?;
        let (bytes, ranks, me) = (count * checked.size, checked.comm.size, checked.comm.rank as usize);
        let all = bytes * ranks as usize;
        asked.buffers(&checked, &[(send, all), (recv, bytes)])?;
        asked.in_place((recv, bytes), (send, all), send + me * bytes)?;
        let call = asked.reducing(&checked, op, Call::reduce_scatter(send, recv, bytes, ranks))?;
        Ok(asked.issue(checked, call))
    })())
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclAllGather(send: usize, recv: usize, count: usize, dtype: i32, comm: usize, queue: usize) -> i32 {
    let asked = OpDesc { name: "cnclAllGather", comm, queue, dtype };
    done((|| {
        let checked = asked.check(0)?;
        let (bytes, ranks, me) = (count * checked.size, checked.comm.size, checked.comm.rank as usize);
        let all = bytes * ranks as usize;
        asked.buffers(&checked, &[(send, bytes), (recv, all)])?;
        asked.in_place((send, bytes), (recv, all), recv + me * bytes)?;
        Ok(asked.issue(checked, Call::all_gather(send, recv, bytes, ranks)))
    })())
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclAlltoAll(send: usize, recv: usize, count: usize, dtype: i32, comm: usize, queue: usize) -> i32 {
    let asked = OpDesc { name: "cnclAlltoAll", comm, queue, dtype };
    done((|| {
        let checked = asked.check(0)?;
        let (bytes, ranks) = (count * checked.size, checked.comm.size);
        let all = bytes * ranks as usize;
        asked.buffers(&checked, &[(send, all), (recv, all)])?;
        asked.in_place((send, all), (recv, all), usize::MAX)?;
        Ok(asked.issue(checked, Call::all_to_all(send, recv, bytes, ranks)))
    })())
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclAlltoAllv(
    send: In<usize>,
    send_counts: In<u32>,
    send_types: In<i32>,
    recv: In<usize>,
    recv_counts: In<u32>,
    recv_types: In<i32>,
    comm: usize,
    queue: usize,
) -> i32 {
    const ANY_TYPE: i32 = 0x20;
    let asked = OpDesc { name: "cnclAlltoAllv", comm, queue, dtype: ANY_TYPE };
    done((|| {
        let checked = asked.check(0)?;
        let ranks = checked.comm.size as usize;
        let blocks = |buffers: In<usize>, counts: In<u32>, types: In<i32>| -> Result<Vec<Buffer>, i32> {
            let lists = (buffers.list(ranks), counts.list(ranks), types.list(ranks));
            let (Some(buffers), Some(counts), Some(types)) = lists else {
                return Err(refuse(NULL_POINTER, "cnclAlltoAllv: a list is missing"));
            };
            let mut all = Vec::new();
            for ((buffer, count), dtype) in buffers.into_iter().zip(counts).zip(types) {
                let Some((_, size)) = element(dtype) else {
                    return Err(refuse(ARGUMENTS, format!("cnclAlltoAllv: type {dtype:#x}")));
                };
                all.push((buffer, count as usize * size));
            }
            asked.buffers(&checked, &all)?;
            Ok(all)
        };
        let inputs = blocks(send, send_counts, send_types)?;
        let outputs = blocks(recv, recv_counts, recv_types)?;
        if inputs.iter().any(|input| outputs.iter().any(|output| !apart(*input, *output))) {
            return Err(refuse(ARGUMENTS, "cnclAlltoAllv: the buffers overlap"));
        }
        Ok(asked.issue(checked, Call::pieces(Kind::AllToAll, &inputs, &outputs)))
    })())
}

fn message(kind: Kind, buffer: usize, count: usize, dtype: i32, peer: i32, comm: usize, queue: usize) -> i32 {
    let asked = OpDesc { name: if kind == Kind::Send { "cnclSend" } else { "cnclRecv" }, comm, queue, dtype };
    done((|| {
        let checked = asked.check(peer)?;
        if peer == checked.comm.rank as i32 {
            return Err(refuse(ARGUMENTS, format!("{}: a message to oneself", asked.name)));
        }
        let bytes = count * checked.size;
        asked.buffers(&checked, &[(buffer, bytes)])?;
        Ok(asked.issue(checked, Call::message(kind, buffer, bytes, peer as u32)))
    })())
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclSend(buffer: usize, count: usize, dtype: i32, peer: i32, comm: usize, queue: usize) -> i32 {
    message(Kind::Send, buffer, count, dtype, peer, comm, queue)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnclRecv(buffer: usize, count: usize, dtype: i32, peer: i32, comm: usize, queue: usize) -> i32 {
    message(Kind::Recv, buffer, count, dtype, peer, comm, queue)
}
