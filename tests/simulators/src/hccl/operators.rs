//! HCCL's operators, with the limits of its hardware.

#![allow(clippy::too_many_arguments)] // the interface has them

use std::sync::Arc;

use sagellm::types::{Dtype, Kind, ReduceOp};

use super::{
    BFP16, Chip, INT16, NOT_SUPPORT, PARA, PTR, RUNTIME, SUCCESS, chip, code_of, comm_of, element, grouped, refuse,
};
use crate::batch::{self, Entry, Sort};
use crate::call::{Call, apart};
use crate::comm::{Comm, Vendor};
use crate::device::Runtime;
use crate::pointers::In;
use crate::stream::Stream;
use crate::{acl, settings, trace};

/// Address and bytes of a buffer.
type Buffer = (usize, usize);

struct OpDesc {
    name: &'static str,
    sort: Sort,
    comm: usize,
    stream: usize,
}

struct Checked {
    comm: Arc<Comm>,
    stream: Arc<Stream>,
}

impl Checked {
    fn ranks(&self) -> u32 {
        self.comm.size
    }
    fn me(&self) -> u32 {
        self.comm.rank
    }
}

const PRODUCT: i32 = 1;

impl OpDesc {
    fn new(name: &'static str, comm: usize, stream: usize) -> OpDesc {
        OpDesc { name, sort: Sort::Collective, comm, stream }
    }

    fn wrong<T>(&self, code: i32, text: impl std::fmt::Display) -> Result<T, i32> {
        Err(refuse(code, format!("{}: {text}", self.name)))
    }

    /// Checks everything that does not depend on buffers. `root` is a root or a peer.
    fn check(&self, root: u32) -> Result<Checked, i32> {
        let comm = comm_of(self.comm)?;
        if self.stream == 0 {
            return self.wrong(PTR, "the stream is null");
        }
        if acl::current().is_err() {
            return self.wrong(RUNTIME, "no device was set on this thread");
        }
        let Some(stream) = acl::stream(self.stream).filter(|stream| stream.device == comm.device) else {
            return self.wrong(PARA, format!("{:#x} is no stream of device {}", self.stream, comm.device));
        };
        let current = Runtime::Acl.current();
        if current != Some(comm.device) {
            return self.wrong(PARA, format!("the thread's device is {current:?}, the communicator's {}", comm.device));
        }
        if root >= comm.size {
            return self.wrong(PARA, format!("root or peer {root} of {}", comm.size));
        }
        if stream.fault() != 0 {
            return self.wrong(RUNTIME, format!("the stream has failed with {}", stream.fault()));
        }
        Ok(Checked { comm, stream })
    }

    fn present(&self, buffers: &[Buffer]) -> Result<(), i32> {
        match buffers.iter().find(|(buffer, bytes)| *buffer == 0 && *bytes > 0) {
            Some((_, bytes)) => self.wrong(PTR, format!("no buffer for {bytes} bytes")),
            None => Ok(()),
        }
    }

    /// Adds the reduction to the call, if the chip has it for this type. Its buffers must be aligned.
    fn reducing(
        &self,
        call: Call,
        (dtype, size, number): (Dtype, usize, i32),
        op: i32,
        at: &[usize],
    ) -> Result<Call, i32> {
        const ALL: [i32; 7] = [0, 1, 2, 3, 4, 5, BFP16];
        const NEWEST: [i32; 2] = [6, 10];
        let plain = match op {
            0 => ReduceOp::Sum,
            PRODUCT => ReduceOp::Product,
            2 => ReduceOp::Max,
            3 => ReduceOp::Min,
            _ => return self.wrong(PARA, format!("reduction {op}")),
        };
        let newest = chip() == Chip::Newest && NEWEST.contains(&number);
        if !newest && !ALL.contains(&number) {
            return self.wrong(NOT_SUPPORT, format!("no reduction of data type {number}"));
        }
        if op == PRODUCT && [INT16, BFP16].contains(&number) {
            return self.wrong(NOT_SUPPORT, format!("no product of data type {number}"));
        }
        if at.iter().any(|buffer| !buffer.is_multiple_of(size)) {
            return self.wrong(PARA, format!("buffers {at:#x?} are not aligned to {size} bytes"));
        }
        Ok(call.reducing(dtype, plain))
    }

    /// Checks two buffers: `inner` may be at `place`, inside `outer`; otherwise the two must not overlap.
    fn in_place(&self, inner: Buffer, outer: Buffer, place: usize) -> Result<(), i32> {
        if inner.0 == place || apart(inner, outer) {
            return Ok(());
        }
        self.wrong(PARA, "the buffers overlap and are not in place")
    }

    fn distinct(&self, send: usize, recv: usize) -> Result<(), i32> {
        if send == recv && send != 0 { self.wrong(PARA, "send and receive buffer are the same") } else { Ok(()) }
    }

    fn may_issue(&self) -> Result<(), i32> {
        match settings::refuses() {
            true => self.wrong(RUNTIME, "it is refused, as SAGELLM_SIM_REFUSE_AT asks for"),
            false => Ok(()),
        }
    }

    fn issue(&self, checked: Checked, call: Call) -> Result<i32, i32> {
        let in_group = grouped(self.name, self.sort)?;
        trace::call(|| {
            let (dtype, op, root, bytes) = (call.dtype, call.op.code(), call.root, call.bytes());
            let (rank, stream) = (checked.me(), self.stream);
            format!("{} type={dtype:?} op={op} root={root} rank={rank} bytes={bytes} stream={stream:#x}", self.name)
        });
        if call.bytes() == 0 && !matches!(call.kind, Kind::Barrier | Kind::AllToAll) {
            return Ok(SUCCESS);
        }
        self.may_issue()?;
        let entry = Entry { comm: checked.comm, stream: checked.stream, call, issued: None };
        if in_group {
            batch::with(Vendor::Hccl, |batch| batch.entries.push(entry));
            return Ok(SUCCESS);
        }
        launch(vec![entry])
    }
}

/// Connects the ranks if they are not connected, and issues the entries.
fn launch(entries: Vec<Entry>) -> Result<i32, i32> {
    batch::launch(entries).map(|()| SUCCESS).map_err(|error| refuse(code_of(&error), error.text()))
}

fn done(result: Result<i32, i32>) -> i32 {
    result.unwrap_or_else(|error| error)
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclAllReduce(
    send: usize,
    recv: usize,
    count: u64,
    number: i32,
    op: i32,
    comm: usize,
    stream: usize,
) -> i32 {
    let asked = OpDesc::new("HcclAllReduce", comm, stream);
    done((|| {
        let checked = asked.check(0)?;
        let (dtype, size) = element(asked.name, number)?;
        let bytes = count as usize * size;
        asked.present(&[(send, bytes), (recv, bytes)])?;
        asked.in_place((send, bytes), (recv, bytes), recv)?;
        let call = Call::all_reduce(send, recv, bytes);
        let call = asked.reducing(call, (dtype, size, number), op, &[send, recv])?;
        asked.issue(checked, call)
    })())
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclBroadcast(buffer: usize, count: u64, number: i32, root: u32, comm: usize, stream: usize) -> i32 {
    let asked = OpDesc::new("HcclBroadcast", comm, stream);
    done((|| {
        let checked = asked.check(root)?;
        let (_, size) = element(asked.name, number)?;
        let bytes = count as usize * size;
        asked.present(&[(buffer, bytes)])?;
        let call = Call::broadcast(buffer, buffer, bytes, root, checked.me());
        asked.issue(checked, call)
    })())
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclReduce(
    send: usize,
    recv: usize,
    count: u64,
    number: i32,
    op: i32,
    root: u32,
    comm: usize,
    stream: usize,
) -> i32 {
    let asked = OpDesc::new("HcclReduce", comm, stream);
    done((|| {
        let checked = asked.check(root)?;
        let (dtype, size) = element(asked.name, number)?;
        let bytes = count as usize * size;
        let out = if checked.me() == root { bytes } else { 0 };
        asked.present(&[(send, bytes), (recv, out)])?;
        let call = Call::reduce(send, recv, bytes, root, checked.me());
        let call = asked.reducing(call, (dtype, size, number), op, &[send, recv])?;
        asked.issue(checked, call)
    })())
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclReduceScatter(
    send: usize,
    recv: usize,
    count: u64,
    number: i32,
    op: i32,
    comm: usize,
    stream: usize,
) -> i32 {
    let asked = OpDesc::new("HcclReduceScatter", comm, stream);
    done((|| {
        let checked = asked.check(0)?;
        let (dtype, size) = element(asked.name, number)?;
        let (bytes, ranks, me) = (count as usize * size, checked.ranks(), checked.me() as usize);
        let all = bytes * ranks as usize;
        asked.present(&[(send, all), (recv, bytes)])?;
        asked.in_place((recv, bytes), (send, all), send + me * bytes)?;
        let call = Call::reduce_scatter(send, recv, bytes, ranks);
        let call = asked.reducing(call, (dtype, size, number), op, &[send, recv])?;
        asked.issue(checked, call)
    })())
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclAllGather(send: usize, recv: usize, count: u64, number: i32, comm: usize, stream: usize) -> i32 {
    let asked = OpDesc::new("HcclAllGather", comm, stream);
    done((|| {
        let checked = asked.check(0)?;
        let (_, size) = element(asked.name, number)?;
        let (bytes, ranks, me) = (count as usize * size, checked.ranks(), checked.me() as usize);
        let all = bytes * ranks as usize;
        asked.present(&[(send, bytes), (recv, all)])?;
        asked.in_place((send, bytes), (recv, all), recv + me * bytes)?;
        let call = Call::all_gather(send, recv, bytes, ranks);
        asked.issue(checked, call)
    })())
}

/// Blocks of one buffer. `lists` are counts and displacements in elements: host lists with one entry for each rank.
fn blocks(
    asked: &OpDesc,
    buffer: usize,
    lists: (In<u64>, In<u64>),
    ranks: u32,
    size: usize,
) -> Result<Vec<Buffer>, i32> {
    let (Some(counts), Some(starts)) = (lists.0.list(ranks as usize), lists.1.list(ranks as usize)) else {
        return asked.wrong(PTR, "a list of counts or displacements is null");
    };
    let blocks: Vec<Buffer> = counts
        .into_iter()
        .zip(starts)
        .map(|(count, start)| (if buffer == 0 { 0 } else { buffer + start as usize * size }, count as usize * size))
        .collect();
    asked.present(&blocks)?;
    Ok(blocks)
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclReduceScatterV(
    send: usize,
    counts: In<u64>,
    starts: In<u64>,
    recv: usize,
    recv_count: u64,
    number: i32,
    op: i32,
    comm: usize,
    stream: usize,
) -> i32 {
    let asked = OpDesc::new("HcclReduceScatterV", comm, stream);
    done((|| {
        let checked = asked.check(0)?;
        let (dtype, size) = element(asked.name, number)?;
        if chip() == Chip::First || op == PRODUCT || (6..=9).contains(&number) {
            return asked.wrong(NOT_SUPPORT, "products, unsigned types and the first 910 are not served");
        }
        asked.distinct(send, recv)?;
        let inputs = blocks(&asked, send, (counts, starts), checked.ranks(), size)?;
        let output = (recv, recv_count as usize * size);
        asked.present(&[output])?;
        if inputs[checked.me() as usize].1 != output.1 {
            return asked.wrong(PARA, "recvCount is not this rank's entry of sendCounts");
        }
        let call = Call::pieces(Kind::ReduceScatter, &inputs, &[output]);
        let call = asked.reducing(call, (dtype, size, number), op, &[send, recv])?;
        asked.issue(checked, call)
    })())
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclAllGatherV(
    send: usize,
    send_count: u64,
    recv: usize,
    counts: In<u64>,
    starts: In<u64>,
    number: i32,
    comm: usize,
    stream: usize,
) -> i32 {
    let asked = OpDesc::new("HcclAllGatherV", comm, stream);
    done((|| {
        let checked = asked.check(0)?;
        let (_, size) = element(asked.name, number)?;
        if chip() == Chip::First {
            return asked.wrong(NOT_SUPPORT, "not on the first 910");
        }
        let outputs = blocks(&asked, recv, (counts, starts), checked.ranks(), size)?;
        let input = (send, send_count as usize * size);
        asked.present(&[input])?;
        if outputs[checked.me() as usize].1 != input.1 {
            return asked.wrong(PARA, "sendCount is not this rank's entry of recvCounts");
        }
        asked.issue(checked, Call::pieces(Kind::AllGather, &[input], &outputs))
    })())
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclScatter(
    send: usize,
    recv: usize,
    count: u64,
    number: i32,
    root: u32,
    comm: usize,
    stream: usize,
) -> i32 {
    let asked = OpDesc::new("HcclScatter", comm, stream);
    done((|| {
        let checked = asked.check(root)?;
        let (_, size) = element(asked.name, number)?;
        let (bytes, ranks, me) = (count as usize * size, checked.ranks(), checked.me());
        let all = if me == root { bytes * ranks as usize } else { 0 };
        asked.present(&[(send, all), (recv, bytes)])?;
        let call = Call::scatter(send, recv, bytes, root, (me, ranks));
        asked.issue(checked, call)
    })())
}

fn message(kind: Kind, buffer: usize, count: u64, number: i32, peer: u32, comm: usize, stream: usize) -> i32 {
    let name = if kind == Kind::Send { "HcclSend" } else { "HcclRecv" };
    let asked = OpDesc { name, sort: Sort::Message, comm, stream };
    done((|| {
        let checked = asked.check(peer)?;
        let (_, size) = element(asked.name, number)?;
        let bytes = count as usize * size;
        asked.present(&[(buffer, bytes)])?;
        if peer == checked.me() {
            return asked.wrong(PARA, "a message to oneself");
        }
        asked.issue(checked, Call::message(kind, buffer, bytes, peer))
    })())
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclSend(buffer: usize, count: u64, number: i32, peer: u32, comm: usize, stream: usize) -> i32 {
    message(Kind::Send, buffer, count, number, peer, comm, stream)
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclRecv(buffer: usize, count: u64, number: i32, peer: u32, comm: usize, stream: usize) -> i32 {
    message(Kind::Recv, buffer, count, number, peer, comm, stream)
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclAlltoAll(
    send: usize,
    send_count: u64,
    send_type: i32,
    recv: usize,
    recv_count: u64,
    recv_type: i32,
    comm: usize,
    stream: usize,
) -> i32 {
    let asked = OpDesc::new("HcclAlltoAll", comm, stream);
    done((|| {
        let checked = asked.check(0)?;
        let (_, size) = element(asked.name, send_type)?;
        if (send_count, send_type) != (recv_count, recv_type) {
            return asked.wrong(PARA, "the counts or types of the two sides differ");
        }
        let (bytes, ranks) = (send_count as usize * size, checked.ranks());
        let all = bytes * ranks as usize;
        asked.present(&[(send, all), (recv, all)])?;
        asked.distinct(send, recv)?;
        asked.in_place((send, all), (recv, all), usize::MAX)?;
        asked.issue(checked, Call::all_to_all(send, recv, bytes, ranks))
    })())
}

fn uneven(asked: &OpDesc, checked: Checked, send: &[Buffer], recv: &[Buffer]) -> Result<i32, i32> {
    if send.iter().any(|input| recv.iter().any(|output| !apart(*input, *output))) {
        return asked.wrong(PARA, "send and receive buffer overlap");
    }
    asked.issue(checked, Call::pieces(Kind::AllToAll, send, recv))
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclAlltoAllV(
    send: usize,
    send_counts: In<u64>,
    send_starts: In<u64>,
    send_type: i32,
    recv: usize,
    recv_counts: In<u64>,
    recv_starts: In<u64>,
    recv_type: i32,
    comm: usize,
    stream: usize,
) -> i32 {
    let asked = OpDesc::new("HcclAlltoAllV", comm, stream);
    done((|| {
        let checked = asked.check(0)?;
        let ((_, of_send), (_, of_recv)) = (element(asked.name, send_type)?, element(asked.name, recv_type)?);
        if send_type != recv_type {
            return asked.wrong(PARA, "the types of the two sides differ");
        }
        asked.distinct(send, recv)?;
        let inputs = blocks(&asked, send, (send_counts, send_starts), checked.ranks(), of_send)?;
        let outputs = blocks(&asked, recv, (recv_counts, recv_starts), checked.ranks(), of_recv)?;
        uneven(&asked, checked, &inputs, &outputs)
    })())
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclAlltoAllVC(
    send: usize,
    matrix: In<u64>,
    send_type: i32,
    recv: usize,
    recv_type: i32,
    comm: usize,
    stream: usize,
) -> i32 {
    let asked = OpDesc::new("HcclAlltoAllVC", comm, stream);
    done((|| {
        let checked = asked.check(0)?;
        let (_, size) = element(asked.name, send_type)?;
        let (ranks, me) = (checked.ranks() as usize, checked.me() as usize);
        let Some(matrix) = matrix.list(ranks * ranks) else { return asked.wrong(PTR, "the matrix is null") };
        if send_type != recv_type {
            return asked.wrong(PARA, "the types of the two sides differ");
        }
        asked.distinct(send, recv)?;
        // The blocks of a buffer are adjacent.
        let packed = |buffer: usize, counts: &mut dyn Iterator<Item = u64>| -> Vec<Buffer> {
            let mut at = buffer;
            counts
                .map(|count| {
                    let bytes = count as usize * size;
                    at += bytes;
                    (at - bytes, bytes)
                })
                .collect()
        };
        let inputs = packed(send, &mut (0..ranks).map(|to| matrix[me * ranks + to]));
        let outputs = packed(recv, &mut (0..ranks).map(|from| matrix[from * ranks + me]));
        asked.present(&[(send, inputs.iter().map(|(_, bytes)| bytes).sum())])?;
        asked.present(&[(recv, outputs.iter().map(|(_, bytes)| bytes).sum())])?;
        uneven(&asked, checked, &inputs, &outputs)
    })())
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Item {
    kind: i32,
    buffer: usize,
    count: u64,
    dtype: i32,
    peer: u32,
}

const _: () = assert!(size_of::<Item>() == 32);

#[unsafe(no_mangle)]
extern "C" fn sim_HcclBatchSendRecv(items: In<Item>, count: u32, comm: usize, stream: usize) -> i32 {
    const SEND: i32 = 0;
    const RECV: i32 = 1;
    let asked = OpDesc { name: "HcclBatchSendRecv", sort: Sort::Message, comm, stream };
    done((|| {
        let checked = asked.check(0)?;
        if batch::open(Vendor::Hccl) {
            return asked.wrong(NOT_SUPPORT, "not inside a group");
        }
        let Some(items) = items.list(count as usize) else { return asked.wrong(PTR, "the list is null") };
        if count == 0 {
            return asked.wrong(PARA, "an empty list");
        }
        let mut entries = Vec::new();
        for item in items {
            let (_, size) = element(asked.name, item.dtype)?;
            let bytes = item.count as usize * size;
            asked.present(&[(item.buffer, bytes)])?;
            let kind = match item.kind {
                SEND => Kind::Send,
                RECV => Kind::Recv,
                other => return asked.wrong(PARA, format!("neither send nor receive: {other}")),
            };
            if item.peer >= checked.ranks() {
                return asked.wrong(PARA, format!("peer {} of {}", item.peer, checked.ranks()));
            }
            trace::call(|| format!("HcclBatchSendRecv item kind={kind} peer={} bytes={bytes}", item.peer));
            let call = Call::message(kind, item.buffer, bytes, item.peer);
            let (comm, stream) = (Arc::clone(&checked.comm), Arc::clone(&checked.stream));
            entries.push(Entry { comm, stream, call, issued: None });
        }
        asked.may_issue()?;
        launch(entries)
    })())
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclBarrier(comm: usize, stream: usize) -> i32 {
    let asked = OpDesc::new("HcclBarrier", comm, stream);
    done((|| {
        let checked = asked.check(0)?;
        asked.issue(checked, Call::new(Kind::Barrier, (0, 0), (0, 0)))
    })())
}
