//! The C interface of NCCL 2.28 to 2.30 (NVIDIA/nccl, src/nccl.h.in): communicators and their set-up, split, shrink and
//! abort, collectives, messages, groups, and reductions with a factor. The plug-ins are in `plugins.rs`.

#![allow(non_snake_case)]

mod collectives;
mod config;
pub mod plugins;

use std::ffi::c_char;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, OnceLock};

use sagellm::error::{Error, ErrorKind};

use crate::batch::{self, Job};
use crate::bootstrap::Place;
use crate::comm::{Comm, Fault, Vendor};
use crate::device::Runtime;
use crate::memory;
use crate::pointers::{In, Out, forever};
use crate::settings;
use crate::table::Table;
use crate::trace;

pub use collectives::{Factor, Issued};
use config::Config;
use plugins::Sessions;

const SUCCESS: i32 = 0;
const UNHANDLED_CUDA_ERROR: i32 = 1;
const SYSTEM_ERROR: i32 = 2;
pub const INTERNAL_ERROR: i32 = 3;
const INVALID_ARGUMENT: i32 = 4;
const INVALID_USAGE: i32 = 5;
const REMOTE_ERROR: i32 = 6;
const IN_PROGRESS: i32 = 7;
const TIMEOUT: i32 = 8;

const ID_BYTES: usize = 128;
/// The letter of NCCL's ids.
const LETTER: u8 = b'N';
const NO_COLOR: i32 = -1;
const SHRINK_ABORT: i32 = 1;

/// Passed by value, as in NCCL's interface.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; ID_BYTES]);

/// The entry behind a handle. The handle is handed out before the communicator exists.
struct Slot {
    comm: OnceLock<Arc<Comm>>,
    /// The result with which the set-up failed, or 0.
    failed: AtomicI32,
    config: Config,
}

static COMMS: Table<Slot> = Table::new(5);

fn refuse(code: i32, text: impl Into<String>) -> i32 {
    trace::refuse(text);
    code
}

/// NCCL's result for an error of the engine.
fn code_of(error: &Error) -> i32 {
    match error.kind() {
        ErrorKind::RankFailed | ErrorKind::Aborted | ErrorKind::Interrupted => REMOTE_ERROR,
        ErrorKind::Invalid => INVALID_ARGUMENT,
        ErrorKind::Mismatch => INVALID_USAGE,
        ErrorKind::Bug => INTERNAL_ERROR,
        _ => SYSTEM_ERROR,
    }
}

fn code_of_fault(fault: Fault) -> i32 {
    match fault {
        Fault::None => SUCCESS,
        Fault::Remote | Fault::Injected => REMOTE_ERROR,
        Fault::Mismatch | Fault::Aborted => INVALID_USAGE,
        Fault::Timeout if settings::get().nccl_version >= 23_000 => TIMEOUT,
        Fault::Timeout => INTERNAL_ERROR,
        Fault::System => SYSTEM_ERROR,
    }
}

/// The state of a communicator, as the result of `ncclCommGetAsyncError`.
fn state_of(slot: &Slot) -> i32 {
    let failed = slot.failed.load(Ordering::Acquire);
    let Some(comm) = slot.comm.get().filter(|_| failed == SUCCESS) else {
        return if failed == SUCCESS { IN_PROGRESS } else { failed };
    };
    match comm.ready() {
        Ok(false) => IN_PROGRESS,
        Err(error) => code_of(&error),
        Ok(true) if comm.plugins.lock().unwrap().is_none() => IN_PROGRESS,
        Ok(true) if comm.fault() != Fault::None => code_of_fault(comm.fault()),
        Ok(true) if comm.in_progress.load(Ordering::Acquire) > 0 => IN_PROGRESS,
        Ok(true) => SUCCESS,
    }
}

/// The communicator of a handle, if it may be used now.
fn usable(handle: usize) -> Result<Arc<Comm>, i32> {
    let slot = COMMS.get(handle).ok_or_else(|| refuse(INVALID_ARGUMENT, format!("{handle:#x} is no communicator")))?;
    match state_of(&slot) {
        SUCCESS if !slot.config.name_lives() => {
            let name = &slot.config.name;
            Err(refuse(INVALID_ARGUMENT, format!("the name {name:?} was given back while its communicator lives")))
        }
        SUCCESS => Ok(Arc::clone(slot.comm.get().expect("it is ready"))),
        IN_PROGRESS => Err(refuse(INVALID_ARGUMENT, "the communicator is used while a call on it is in progress")),
        error => Err(refuse(error, "the communicator has failed")),
    }
}

/// Sets up a communicator and opens it for the plug-ins.
fn set_up(comm: &Arc<Comm>) -> i32 {
    if let Err(error) = comm.set_up(settings::get().ceiling) {
        return code_of(&error);
    }
    let peers = comm.peers();
    let shared = (0..peers.len()).any(|a| (0..a).any(|b| peers[a].physical == peers[b].physical));
    let allowed = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value.trim() == "1");
    if shared && !(allowed && settings::get().nccl_version >= 23_003) {
        comm.close();
        return refuse(INVALID_USAGE, "Duplicate GPU detected: two ranks of the communicator use one device");
    }
    match Sessions::open(comm) {
        Ok(sessions) => {
            *comm.plugins.lock().unwrap() = Some(sessions);
            SUCCESS
        }
        Err(result) => result,
    }
}

/// Hands out a handle and makes its communicator: now, at the end of the group, or on a new thread.
fn make(out: Out<usize>, config: Config, comm: impl FnOnce() -> Result<Arc<Comm>, i32> + Send + 'static) -> i32 {
    let blocking = config.blocking;
    let slot = Arc::new(Slot { comm: OnceLock::new(), failed: AtomicI32::new(SUCCESS), config });
    let handle = COMMS.add(Arc::clone(&slot));
    out.set(handle);
    let job: Job = Box::new(move || {
        let result = match comm() {
            Ok(comm) => {
                let _ = slot.comm.set(Arc::clone(&comm));
                set_up(&comm)
            }
            Err(error) => error,
        };
        slot.failed.store(result, Ordering::Release);
        result
    });
    if batch::open(Vendor::Nccl) {
        batch::with(Vendor::Nccl, |batch| batch.jobs.push(job));
        return if blocking { SUCCESS } else { IN_PROGRESS };
    }
    if blocking {
        let result = job();
        if result != SUCCESS {
            COMMS.remove(handle);
            out.set(0);
        }
        return result;
    }
    in_background(job)
}

fn in_background(job: Job) -> i32 {
    let started = sagellm::os::watch::spawn("sim-nccl", move || {
        std::thread::sleep(settings::get().nccl_delay);
        job();
    });
    if started.is_ok() { IN_PROGRESS } else { SYSTEM_ERROR }
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclGetVersion(version: Out<i32>) -> i32 {
    if version.set(settings::get().nccl_version) { SUCCESS } else { INVALID_ARGUMENT }
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclGetErrorString(result: i32) -> *const c_char {
    forever(match result {
        SUCCESS => "no error",
        UNHANDLED_CUDA_ERROR => "unhandled cuda error (simulated NCCL)",
        SYSTEM_ERROR => "unhandled system error (simulated NCCL)",
        INTERNAL_ERROR => "internal error (simulated NCCL)",
        INVALID_ARGUMENT => "invalid argument (simulated NCCL)",
        INVALID_USAGE => "invalid usage (simulated NCCL)",
        REMOTE_ERROR => "remote process exited or there was a network error (simulated NCCL)",
        IN_PROGRESS => "NCCL operation in progress (simulated NCCL)",
        TIMEOUT => "timeout (simulated NCCL)",
        _ => "unknown result code (simulated NCCL)",
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclGetLastError(_comm: usize) -> *const c_char {
    forever(&trace::last())
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclGetUniqueId(out: Out<UniqueId>) -> i32 {
    trace::call(|| "ncclGetUniqueId".to_string());
    match Place::new() {
        Ok(place) => {
            let mut id = [0; ID_BYTES];
            place.to_id(LETTER, &mut id);
            if out.fill(&id) { SUCCESS } else { INVALID_ARGUMENT }
        }
        Err(error) => refuse(SYSTEM_ERROR, error),
    }
}

fn init(out: Out<usize>, ranks: i32, id: &UniqueId, rank: i32, config: &Config, device: Option<i32>) -> i32 {
    trace::call(|| format!("ncclCommInitRank ranks={ranks} rank={rank} blocking={}", config.blocking));
    let Some(device) = device else {
        return refuse(UNHANDLED_CUDA_ERROR, "no device was set on this thread");
    };
    if out.is_null() || ranks < 1 || !(0..ranks).contains(&rank) {
        return refuse(INVALID_ARGUMENT, format!("rank {rank} of {ranks}"));
    }
    let Some(place) = Place::from_id(LETTER, &id.0) else {
        return refuse(INVALID_ARGUMENT, "the bytes are not those of an id");
    };
    let (config, shape) = (config.clone(), (ranks as u32, rank as u32));
    make(out, config.clone(), move || {
        Ok(Arc::new(Comm::new(Vendor::Nccl, place, shape, device, &config.name, config.blocking)))
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclCommInitRank(out: Out<usize>, ranks: i32, id: UniqueId, rank: i32) -> i32 {
    init(out, ranks, &id, rank, &Config::default().by_environment(), Runtime::Cuda.current())
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclCommInitRankConfig(out: Out<usize>, ranks: i32, id: UniqueId, rank: i32, config: In<u64>) -> i32 {
    match Config::read(config, Config::default()) {
        Ok(config) => init(out, ranks, &id, rank, &config, Runtime::Cuda.current()),
        Err(error) => error,
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclCommInitAll(out: Out<usize>, count: i32, devices: In<i32>) -> i32 {
    let ranks = count.max(0) as usize;
    let devices = if devices.is_null() { (0..count).collect() } else { devices.list(ranks).unwrap_or_default() };
    if out.is_null() || ranks == 0 || devices.iter().any(|device| !Runtime::Cuda.exists(*device)) {
        return refuse(INVALID_ARGUMENT, format!("{count} ranks on devices {devices:?}"));
    }
    let mut id = UniqueId([0; ID_BYTES]);
    match Place::new() {
        Ok(place) => place.to_id(LETTER, &mut id.0),
        Err(error) => return refuse(SYSTEM_ERROR, error),
    }
    sim_ncclGroupStart();
    for (rank, device) in devices.into_iter().enumerate() {
        init(out.at(rank), count, &id, rank as i32, &Config::default(), Some(device));
    }
    sim_ncclGroupEnd()
}

fn is_alone(comm: &Comm) -> bool {
    comm.fault() != Fault::None
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclCommSplit(parent: usize, color: i32, key: i32, out: Out<usize>, config: In<u64>) -> i32 {
    trace::call(|| format!("ncclCommSplit color={color} key={key}"));
    let comm = match usable(parent) {
        Ok(comm) => comm,
        Err(error) => return error,
    };
    if out.is_null() || color < NO_COLOR {
        return refuse(INVALID_ARGUMENT, format!("color {color}"));
    }
    let inherited = Config { blocking: comm.blocking, ..Config::default() };
    let config = match Config::read(config, inherited) {
        Ok(config) => config,
        Err(error) => return error,
    };
    let number = comm.next_child(false);
    let own = config.clone();
    let split = move || -> Result<Option<Arc<Comm>>, i32> {
        let own = [color.to_le_bytes(), key.to_le_bytes()].concat();
        let all = comm.exchange(&own).map_err(|error| code_of(&error))?;
        let word = |bytes: &[u8]| i32::from_le_bytes(bytes.try_into().expect("four bytes"));
        let mut members: Vec<(i32, u32)> = (0..comm.size)
            .filter(|rank| word(&all[*rank as usize][..4]) == color)
            .map(|rank| (word(&all[rank as usize][4..]), rank))
            .collect();
        if color == NO_COLOR {
            return Ok(None);
        }
        members.sort_unstable();
        let ranks: Vec<u32> = members.into_iter().map(|(_, rank)| rank).collect();
        let own = ranks.iter().position(|rank| *rank == comm.rank).ok_or(INTERNAL_ERROR)?;
        let place = comm.child_place(&ranks, &format!("split {number} {color}")).ok_or(INTERNAL_ERROR)?;
        let shape = (ranks.len() as u32, own as u32);
        Ok(Some(Arc::new(Comm::new(Vendor::Nccl, place, shape, comm.device, &config.name, config.blocking))))
    };
    if color == NO_COLOR {
        out.set(0);
        let job: Job = Box::new(move || split().err().unwrap_or(SUCCESS));
        return match (batch::open(Vendor::Nccl), config.blocking) {
            (true, _) => {
                batch::with(Vendor::Nccl, |batch| batch.jobs.push(job));
                SUCCESS
            }
            (false, true) => job(),
            (false, false) => in_background(job),
        };
    }
    make(out, own, move || split()?.ok_or(INTERNAL_ERROR))
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclCommShrink(
    parent: usize,
    exclude: In<i32>,
    count: i32,
    out: Out<usize>,
    config: In<u64>,
    flags: i32,
) -> i32 {
    trace::call(|| format!("ncclCommShrink count={count} flags={flags}"));
    let Some(comm) = COMMS.get(parent).and_then(|slot| slot.comm.get().cloned()) else {
        return refuse(INVALID_ARGUMENT, "no communicator");
    };
    let excluded = exclude.list(count.max(0) as usize).unwrap_or_default();
    let named = |rank: u32| excluded.contains(&(rank as i32));
    if out.is_null() || excluded.is_empty() || excluded.iter().any(|rank| !(0..comm.size as i32).contains(rank)) {
        return refuse(INVALID_ARGUMENT, format!("exclude {excluded:?} of {} ranks", comm.size));
    }
    if named(comm.rank) || (flags != SHRINK_ABORT && is_alone(&comm)) {
        return refuse(INVALID_USAGE, "an excluded rank shrinks, or a failed communicator without NCCL_SHRINK_ABORT");
    }
    let inherited = Config { blocking: comm.blocking, ..Config::default() };
    let config = match Config::read(config, inherited) {
        Ok(config) => config,
        Err(error) => return error,
    };
    if flags == SHRINK_ABORT {
        comm.abort();
    }
    let number = comm.next_child(true);
    let ranks: Vec<u32> = (0..comm.size).filter(|rank| !named(*rank)).collect();
    let own = ranks.iter().position(|rank| *rank == comm.rank).unwrap_or(0);
    let Some(place) = comm.child_place(&ranks, &format!("shrink {number}")) else { return INTERNAL_ERROR };
    let (shape, device) = ((ranks.len() as u32, own as u32), comm.device);
    make(out, config.clone(), move || {
        Ok(Arc::new(Comm::new(Vendor::Nccl, place, shape, device, &config.name, config.blocking)))
    })
}

fn getter(handle: usize, out: Out<i32>, value: impl Fn(&Comm) -> i32) -> i32 {
    match usable(handle) {
        Ok(comm) if out.set(value(&comm)) => SUCCESS,
        Ok(_) => INVALID_ARGUMENT,
        Err(error) => error,
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclCommCount(comm: usize, out: Out<i32>) -> i32 {
    getter(comm, out, |comm| comm.size as i32)
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclCommUserRank(comm: usize, out: Out<i32>) -> i32 {
    getter(comm, out, |comm| comm.rank as i32)
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclCommCuDevice(comm: usize, out: Out<i32>) -> i32 {
    getter(comm, out, |comm| comm.device)
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclCommGetAsyncError(comm: usize, out: Out<i32>) -> i32 {
    let Some(slot) = COMMS.get(comm) else { return refuse(INVALID_ARGUMENT, "no communicator") };
    if out.set(state_of(&slot)) { SUCCESS } else { INVALID_ARGUMENT }
}

fn close_plugins(comm: &Comm) {
    let sessions = comm.plugins.lock().unwrap().take();
    if let Some(sessions) = sessions {
        sessions.close();
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclCommFinalize(comm: usize) -> i32 {
    match usable(comm) {
        Ok(comm) if comm.drain() => SUCCESS,
        Ok(_) => INTERNAL_ERROR,
        Err(error) => error,
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclCommDestroy(handle: usize) -> i32 {
    trace::call(|| "ncclCommDestroy".to_string());
    let Some(slot) = COMMS.remove(handle) else { return refuse(INVALID_ARGUMENT, "no communicator") };
    if let Some(comm) = slot.comm.get() {
        comm.drain();
        comm.close();
        close_plugins(comm);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclCommAbort(handle: usize) -> i32 {
    trace::call(|| "ncclCommAbort".to_string());
    let Some(slot) = COMMS.remove(handle) else { return refuse(INVALID_ARGUMENT, "no communicator") };
    slot.failed.store(INVALID_USAGE, Ordering::Release);
    if let Some(comm) = slot.comm.get() {
        comm.abort();
        close_plugins(comm);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclGroupStart() -> i32 {
    batch::with(Vendor::Nccl, |batch| batch.depth += 1);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclGroupEnd() -> i32 {
    let batch = match batch::end(Vendor::Nccl) {
        None => return refuse(INVALID_USAGE, "ncclGroupEnd without ncclGroupStart"),
        Some(None) => return SUCCESS,
        Some(Some(batch)) => batch,
    };
    if batch.error != SUCCESS {
        return batch.error;
    }
    let pending = batch.jobs.len();
    let result = if pending > 0 { batch::run_jobs(batch.jobs) } else { SUCCESS };
    if result != SUCCESS { result } else { collectives::launch(batch.entries) }
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclMemAlloc(out: Out<usize>, bytes: usize) -> i32 {
    match memory::allocate(bytes) {
        Some(memory) if out.set(memory) => SUCCESS,
        _ => INVALID_ARGUMENT,
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclMemFree(memory: usize) -> i32 {
    if memory == 0 || memory::free(memory) { SUCCESS } else { INVALID_ARGUMENT }
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclCommRegister(comm: usize, memory: usize, bytes: usize, out: Out<usize>) -> i32 {
    match usable(comm) {
        Ok(_) if memory != 0 && bytes > 0 && out.set(memory) => SUCCESS,
        Ok(_) => INVALID_ARGUMENT,
        Err(error) => error,
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclCommDeregister(comm: usize, _handle: usize) -> i32 {
    usable(comm).err().unwrap_or(SUCCESS)
}

/// Behaves like NCCL since 2.29 without support for windows: success, and no window.
#[unsafe(no_mangle)]
extern "C" fn sim_ncclCommWindowRegister(comm: usize, memory: usize, bytes: usize, out: Out<usize>, flags: i32) -> i32 {
    match usable(comm) {
        Ok(_) if memory != 0 && bytes > 0 && (0..=3).contains(&flags) && out.set(0) => SUCCESS,
        Ok(_) => INVALID_ARGUMENT,
        Err(error) => error,
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_ncclCommWindowDeregister(comm: usize, _window: usize) -> i32 {
    usable(comm).err().unwrap_or(SUCCESS)
}
