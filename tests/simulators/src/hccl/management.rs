//! The functions that are in `libhcomm` since CANN 9: root information, communicators, their state, group calls.

use std::collections::HashSet;
use std::ffi::c_char;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex};

use super::{
    AGAIN, COMMS, Chip, INTERNAL, NOT_SUPPORT, PARA, PTR, REMOTE, RUNTIME, SUCCESS, TCP_CONNECT, chip, code_of,
    comm_of, config, grouped, refuse,
};
use crate::batch::{self, Job, Sort};
use crate::bootstrap::Place;
use crate::comm::{Comm, Fault, Vendor};
use crate::device::Runtime;
use crate::pointers::{In, Out, forever};
use crate::settings;
use crate::{acl, trace};

const ROOT_INFO_BYTES: usize = 4108;
/// The letter of HCCL's ids.
const LETTER: u8 = b'H';
const NAME_BYTES: usize = 128;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct RootInfo([u8; ROOT_INFO_BYTES]);

/// Devices on which a thread of this process is making a communicator. Only one thread at a time may do so.
static BUSY: Mutex<Option<HashSet<i32>>> = Mutex::new(None);
/// Handles of communicators that were made from another one.
static PARTS: Mutex<Option<HashSet<usize>>> = Mutex::new(None);

#[unsafe(no_mangle)]
extern "C" fn sim_HcclGetRootInfo(out: Out<RootInfo>) -> i32 {
    trace::call(|| "HcclGetRootInfo".to_string());
    if out.is_null() {
        return refuse(PTR, "HcclGetRootInfo");
    }
    if acl::current().is_err() {
        return refuse(RUNTIME, "no device was set on this thread");
    }
    match Place::new() {
        Ok(place) => {
            let mut id = [0; ROOT_INFO_BYTES];
            place.to_id(LETTER, &mut id);
            out.fill(&id);
            SUCCESS
        }
        Err(error) => refuse(TCP_CONNECT, error),
    }
}

/// Makes a communicator on this thread's device: now, or at the end of the group.
fn make(place: Place, (size, rank): (u32, u32), name: &str, part: bool, out: Out<usize>) -> i32 {
    let Ok(device) = acl::current() else { return refuse(RUNTIME, "no device was set on this thread") };
    let comm = Arc::new(Comm::new(Vendor::Hccl, place, (size, rank), device, name, true));
    let to = out.address();
    let job: Job = Box::new(move || {
        if !BUSY.lock().unwrap().get_or_insert_default().insert(device) {
            return refuse(INTERNAL, format!("two threads make communicators on device {device} at the same time"));
        }
        let met = comm.set_up(settings::get().hccl_connect);
        BUSY.lock().unwrap().get_or_insert_default().remove(&device);
        match met {
            Ok(()) => {
                let handle = COMMS.add(comm);
                if part {
                    PARTS.lock().unwrap().get_or_insert_default().insert(handle);
                }
                Out::of(to).set(handle);
                SUCCESS
            }
            Err(error) => refuse(code_of(&error), error.text()),
        }
    });
    match grouped("communicator", Sort::Management) {
        Err(error) => error,
        Ok(false) => job(),
        Ok(true) => {
            batch::with(Vendor::Hccl, |batch| batch.jobs.push(job));
            SUCCESS
        }
    }
}

fn init(size: u32, root: In<RootInfo>, rank: u32, name: &str, out: Out<usize>) -> i32 {
    trace::call(|| format!("HcclCommInitRootInfo size={size} rank={rank} name={name}"));
    if root.is_null() || out.is_null() {
        return refuse(PTR, "HcclCommInitRootInfo");
    }
    if rank >= size {
        return refuse(PARA, format!("rank {rank} of {size}"));
    }
    let bytes = root.bytes(ROOT_INFO_BYTES).unwrap_or_default();
    match Place::from_id(LETTER, &bytes) {
        Some(place) => make(place, (size, rank), name, false, out),
        None => refuse(PARA, "the bytes are not those of a root information"),
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclCommInitRootInfo(size: u32, root: In<RootInfo>, rank: u32, out: Out<usize>) -> i32 {
    init(size, root, rank, "", out)
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclCommInitRootInfoConfig(
    size: u32,
    root: In<RootInfo>,
    rank: u32,
    configuration: In<u64>,
    out: Out<usize>,
) -> i32 {
    match config::read(configuration) {
        Ok(name) => init(size, root, rank, &name, out),
        Err(error) => error,
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclCommInitAll(count: u32, devices: In<i32>, out: Out<usize>) -> i32 {
    let Some(devices) = devices.list(count as usize).filter(|_| !out.is_null()) else {
        return refuse(PTR, "HcclCommInitAll");
    };
    let distinct: HashSet<i32> = devices.iter().copied().collect();
    if count == 0 || distinct.len() != devices.len() || devices.iter().any(|device| !Runtime::Acl.exists(*device)) {
        return refuse(PARA, format!("devices {devices:?}"));
    }
    let place = match Place::new() {
        Ok(place) => place,
        Err(error) => return refuse(TCP_CONNECT, error),
    };
    let jobs = devices.into_iter().enumerate().map(|(rank, device)| -> Job {
        let to = out.at(rank).address();
        Box::new(move || {
            let comm = Arc::new(Comm::new(Vendor::Hccl, place, (count, rank as u32), device, "", true));
            match comm.set_up(settings::get().hccl_connect) {
                Ok(()) => {
                    Out::of(to).set(COMMS.add(comm));
                    SUCCESS
                }
                Err(error) => code_of(&error),
            }
        })
    });
    batch::run_jobs(jobs.collect())
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclCreateSubCommConfig(
    parent: In<usize>,
    count: u32,
    ranks: In<u32>,
    id: u64,
    own: u32,
    configuration: In<u64>,
    out: Out<usize>,
) -> i32 {
    const NOBODY: u64 = 0xffff_ffff;
    trace::call(|| format!("HcclCreateSubCommConfig count={count} id={id:#x} own={own}"));
    let Some(handle) = parent.get() else { return refuse(PTR, "HcclCreateSubCommConfig") };
    let comm = match comm_of(handle) {
        Ok(comm) => comm,
        Err(error) => return error,
    };
    if PARTS.lock().unwrap().get_or_insert_default().contains(&handle) {
        return refuse(NOT_SUPPORT, "a part of a part");
    }
    if ranks.is_null() {
        // A rank that is in no part calls this without ranks, and with the id `NOBODY`.
        return if id == NOBODY { SUCCESS } else { refuse(PARA, format!("no ranks, and id {id:#x}")) };
    }
    if out.is_null() {
        return refuse(PTR, "HcclCreateSubCommConfig");
    }
    let ranks = ranks.list(count as usize).unwrap_or_default();
    let ordered = ranks.windows(2).all(|pair| pair[0] < pair[1]);
    if !ordered || ranks.get(own as usize) != Some(&comm.rank) || ranks.iter().any(|rank| *rank >= comm.size) {
        return refuse(PARA, format!("ranks {ranks:?} of {}, own number {own} for rank {}", comm.size, comm.rank));
    }
    if id == NOBODY {
        return refuse(PARA, "a part without an id");
    }
    let name = match config::read(configuration) {
        Ok(name) => name,
        Err(error) => return error,
    };
    match comm.child_place(&ranks, &format!("part {id}")) {
        Some(place) if place.first_use() => make(place, (count, own), &name, true, out),
        Some(_) => refuse(PARA, format!("the id {id} was used before")),
        None => INTERNAL,
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclCommDestroy(handle: usize) -> i32 {
    trace::call(|| "HcclCommDestroy".to_string());
    match comm_of(handle) {
        Err(error) => error,
        Ok(comm) if comm.running() > 0 => refuse(AGAIN, "operations of the communicator run"),
        Ok(comm) => {
            COMMS.remove(handle);
            comm.close();
            SUCCESS
        }
    }
}

fn getter<T: Copy>(handle: usize, out: Out<T>, value: impl Fn(&Comm) -> T) -> i32 {
    match comm_of(handle) {
        Err(error) => error,
        Ok(comm) if out.set(value(&comm)) => SUCCESS,
        Ok(_) => refuse(PTR, "nowhere to write to"),
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclGetRankSize(comm: usize, out: Out<u32>) -> i32 {
    getter(comm, out, |comm| comm.size)
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclGetRankId(comm: usize, out: Out<u32>) -> i32 {
    getter(comm, out, |comm| comm.rank)
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclGetCommName(comm: usize, out: Out<u8>) -> i32 {
    match comm_of(comm) {
        Err(error) => error,
        Ok(comm) => {
            let mut name = comm.name.clone().into_bytes();
            name.truncate(NAME_BYTES - 1);
            name.push(0);
            if out.fill(&name) { SUCCESS } else { refuse(PTR, "nowhere to write to") }
        }
    }
}

/// Reports a failure of a remote rank or an injected failure. After any other failure, reports success.
#[unsafe(no_mangle)]
extern "C" fn sim_HcclGetCommAsyncError(comm: usize, out: Out<i32>) -> i32 {
    if chip() == Chip::Newest {
        return refuse(NOT_SUPPORT, "HcclGetCommAsyncError on this chip");
    }
    getter(comm, out, |comm| match comm.fault() {
        Fault::Remote | Fault::Injected => REMOTE,
        _ => SUCCESS,
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclGetErrorString(result: i32) -> *const c_char {
    const NAMES: [&str; 25] = [
        "no error",
        "parameter error",
        "empty pointer",
        "memory error",
        "internal error",
        "not support feature",
        "not found specific resource",
        "resource unavailable",
        "call system interface error",
        "timeout",
        "open file fail",
        "tcp connect fail",
        "roce connect fail",
        "tcp transfer fail",
        "roce transfer fail",
        "call runtime api fail",
        "call driver api fail",
        "call profiling api fail",
        "call cce api fail",
        "call network api fail",
        "try again",
        "error cqe",
        "error communicator suspending",
        "retry constraint",
        "out of memory",
    ];
    let name = usize::try_from(result).ok().and_then(|at| NAMES.get(at)).copied();
    forever(&format!("{} (simulated HCCL)", name.unwrap_or("unknown error")))
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclGetCommConfigCapability() -> u32 {
    settings::get().hccl_capability
}

static DETERMINISTIC: AtomicI32 = AtomicI32::new(0);

#[unsafe(no_mangle)]
extern "C" fn sim_HcclSetConfig(config: i32, value: i32) -> i32 {
    if config != 0 || !(0..=2).contains(&value) {
        return refuse(PARA, format!("configuration {config} = {value}"));
    }
    DETERMINISTIC.store(value, Ordering::Relaxed);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclGetConfig(config: i32, value: Out<i32>) -> i32 {
    if config != 0 || !value.set(DETERMINISTIC.load(Ordering::Relaxed)) {
        refuse(PARA, "HcclGetConfig")
    } else {
        SUCCESS
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclGroupStart() -> i32 {
    if chip() == Chip::First {
        return refuse(NOT_SUPPORT, "groups on this chip");
    }
    batch::with(Vendor::Hccl, |batch| batch.depth += 1);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn sim_HcclGroupEnd() -> i32 {
    batch::close(
        Vendor::Hccl,
        || refuse(PARA, "HcclGroupEnd without HcclGroupStart"),
        |error| refuse(code_of(error), error.text()),
    )
}
