//! NCCL. Communicators are blocking ones: with non-blocking ones the library starts a thread for every launched group
//! (NVIDIA/nccl, src/group.cc), which costs more than the launch. Joining gets its deadline from a thread of ours.

use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::engine::device::communicator::*;
use crate::engine::device::libs::loader::{Hints, Known, Library, Needed};
use crate::engine::device::lowering::{Capabilities, Double, Ops};
use crate::engine::device::runtime::{Runtime, Stream};
use crate::error::{Error, Result};
use crate::reduce::{f32_to_bf16, f32_to_f16};
use crate::types::{Dtype, ReduceOp};
use nccl_sys::{self as sys, Comm, Config, UniqueId};

pub static KNOWN: Known = Known {
    key: "NCCL",
    title: "NCCL",
    names: &["libnccl.so.2", "libnccl.so"],
    package: "nvidia/nccl/lib",
    companion: None,
    fix: "A PyTorch with CUDA brings it: pip install torch, or pip install nvidia-nccl-cu13.",
};

/// 2.18 has split, non-blocking abort and every call that is not optional here.
const OLDEST: c_int = 21800;

/// Since 2.24 8-bit floats are combined; before sm_90 the library refuses them itself, in every rank's call.
const FLOATS_OF_8_BITS: c_int = 22400;

/// Integers of 16 bits are missing. The 8-bit floats are last.
const REDUCES: [(Dtype, Ops); 12] = [
    (Dtype::U8, Ops::BASIC_AVG),
    (Dtype::I8, Ops::BASIC_AVG),
    (Dtype::U32, Ops::BASIC_AVG),
    (Dtype::I32, Ops::BASIC_AVG),
    (Dtype::U64, Ops::BASIC_AVG),
    (Dtype::I64, Ops::BASIC_AVG),
    (Dtype::F16, Ops::SCALING),
    (Dtype::Bf16, Ops::SCALING),
    (Dtype::F32, Ops::SCALING),
    (Dtype::F64, Ops::SCALING),
    (Dtype::F8E4M3, Ops::BASIC_AVG),
    (Dtype::F8E5M2, Ops::BASIC_AVG),
];

/// Where scaled sums cannot be made.
const REDUCES_UNSCALED: [(Dtype, Ops); 12] = {
    let mut list = REDUCES;
    let mut at = 0;
    while at < list.len() {
        list[at].1 = Ops::BASIC_AVG;
        at += 1;
    }
    list
};

pub struct Nccl {
    library: Library,
    table: sys::Table,
    able: Capabilities,
}

/// What a current version can do, for documents and tests that have no library.
pub fn capabilities() -> Capabilities {
    Capabilities {
        name: "NCCL".into(),
        reduces: &REDUCES,
        double: Double::Kept,
        gather: true,
        scatter: true,
        all_to_all_v: false,
        reduce_clobbers_input: false,
        group: true,
        split: true,
        shrink: true,
        abort: true,
        id_bytes: sys::ID_BYTES,
        missing: Vec::new(),
    }
}

pub fn version_text(code: c_int) -> String {
    format!("{}.{}.{}", code / 10000, code / 100 % 100, code % 100)
}

impl Nccl {
    pub fn open(hints: &Hints) -> Result<Arc<dyn Api>> {
        let library = Library::open(&KNOWN, hints)?;
        // SAFETY: the addresses are those of this library, which is never closed.
        let table = unsafe { sys::Table::load(|name| library.address(name).and_then(std::ptr::NonNull::new)) };
        let mut version = 0;
        // SAFETY: the vendor's function; it writes one int.
        let code = unsafe { table.get_version.of(&library)?(&mut version) };
        if code != sys::SUCCESS || version < OLDEST {
            let found = version_text(version);
            return Err(Error::System(format!(
                "sagellm: NCCL {found} ({}) is too old (ncclGetVersion returned {code}): {} or newer is needed; update \
                 PyTorch or nvidia-nccl-cu12 or -cu13, or name another file in SAGELLM_NCCL_LIBRARY",
                library.path,
                version_text(OLDEST)
            )));
        }
        let all: &'static [(Dtype, Ops)] = if table.create_premul_sum.there() { &REDUCES } else { &REDUCES_UNSCALED };
        let able = Capabilities {
            name: format!("NCCL {}", version_text(version)),
            reduces: if version < FLOATS_OF_8_BITS { &all[..all.len() - 2] } else { all },
            gather: table.gather.there(),
            scatter: table.scatter.there(),
            split: table.split.there(),
            shrink: table.shrink.there(),
            abort: table.abort.there(),
            missing: sys::Table::NAMES.iter().copied().filter(|name| !library.has(name)).collect(),
            ..capabilities()
        };
        Ok(Arc::new(Nccl { library, table, able }))
    }

    /// As `check`, for a call on a communicator. Ours are blocking, but `NCCL_COMM_BLOCKING=0` has the last word in the
    /// library: then a call is in progress when it returns, and nothing else may be called before it is done.
    fn settle(&self, what: &str, code: c_int, comm: Comm, patience: Duration) -> Result<()> {
        if code != sys::IN_PROGRESS {
            return self.check(what, code, comm);
        }
        let get = self.table.get_async_error.of(&self.library)?;
        let end = Instant::now() + patience;
        let mut state = sys::IN_PROGRESS;
        while state == sys::IN_PROGRESS {
            if Instant::now() >= end {
                return Err(Error::Timeout(format!(
                    "sagellm: {}: {what} was still in progress after {} ms, on a communicator that NCCL_COMM_BLOCKING=0 \
                     keeps from blocking; unset the variable or look for the rank that is missing",
                    self.able.name,
                    patience.as_millis()
                )));
            }
            std::thread::sleep(Duration::from_micros(50));
            // SAFETY: the vendor's function; it writes one int and does not wait.
            let code = unsafe { get(comm, &mut state) };
            self.check("ncclCommGetAsyncError", code, comm)?;
        }
        self.check(what, state, comm)
    }

    fn check(&self, what: &str, code: c_int, comm: Comm) -> Result<()> {
        if code == sys::SUCCESS {
            return Ok(());
        }
        let last = self.table.get_last_error.optional().map(|get| {
            // SAFETY: the vendor's function; it takes a null communicator, and gives null or a text.
            text(unsafe { get(comm) })
        });
        let last = last.filter(|last| !last.is_empty()).map(|last| format!("; it says: {last}")).unwrap_or_default();
        Err(Error::System(format!("sagellm: {} failed in {what}: {}{last}", self.able.name, self.describe_error(code))))
    }

    /// Rank and number of ranks, which a new communicator knows.
    fn place(&self, comm: Comm) -> Result<(u32, u32)> {
        let (mut rank, mut ranks) = (0, 0);
        // SAFETY: the vendor's function on a communicator it has just made; it writes one int.
        let code = unsafe { self.table.comm_user_rank.of(&self.library)?(comm, &mut rank) };
        self.check("ncclCommUserRank", code, comm)?;
        // SAFETY: as above.
        let code = unsafe { self.table.comm_count.of(&self.library)?(comm, &mut ranks) };
        self.check("ncclCommCount", code, comm)?;
        Ok((rank as u32, ranks as u32))
    }

    fn make(self: &Arc<Nccl>, comm: Comm, (rank, ranks): (u32, u32), name: CString, keep: &Keep) -> NcclComm {
        let handle = Arc::new(Handle { gate: Gate::new(comm as usize), _name: name });
        NcclComm { api: self.clone(), handle, rank, ranks, keep: keep.clone() }
    }
}

impl Api for Nccl {
    fn capabilities(&self) -> &Capabilities {
        &self.able
    }

    fn describe(&self) -> String {
        format!("{} ({})", self.able.name, self.library.path)
    }

    fn unique_id(&self) -> Result<Vec<u8>> {
        let mut id = UniqueId([0; sys::ID_BYTES]);
        // SAFETY: the vendor's function; it writes 128 bytes.
        let code = unsafe { self.table.get_unique_id.of(&self.library)?(&mut id) };
        self.check("ncclGetUniqueId", code, std::ptr::null_mut())?;
        Ok(id.0.to_vec())
    }

    fn create(self: Arc<Self>, setup: Setup) -> Result<Arc<dyn Communicator>> {
        let id: [u8; sys::ID_BYTES] = setup.id.as_slice().try_into().map_err(|_| wrong_id(&self.able, &setup))?;
        let (what, go_on) = (joining(&self.able, &setup), setup.go_on.clone());
        within(setup.deadline, &what, &*go_on, move || {
            setup.runtime.set_device(setup.device)?;
            let (ranks, rank) = (setup.ranks as c_int, setup.rank as c_int);
            let keep = Keep { device: setup.device, runtime: setup.runtime.clone(), patience: setup.deadline };
            let mut comm: Comm = std::ptr::null_mut();
            let name = c_name(&setup.name);
            let mut config = Config::blocking(&name);
            let code = match self.table.init_rank_config.optional() {
                // SAFETY: the vendor's function; the config lives until it returns, the name as long as the communicator.
                Some(init) => unsafe { init(&mut comm, ranks, UniqueId(id), rank, &mut config) },
                // SAFETY: the vendor's function.
                None => unsafe { self.table.init_rank.of(&self.library)?(&mut comm, ranks, UniqueId(id), rank) },
            };
            self.made("ncclCommInitRankConfig", code, comm, (setup.rank, setup.ranks), name, &keep)
        })
    }

    fn describe_error(&self, code: i32) -> String {
        let words = self.table.get_error_string.optional().map(|get| {
            // SAFETY: the vendor's function; it takes any number.
            text(unsafe { get(code) })
        });
        format!("{} (ncclResult_t {code})", words.unwrap_or_default())
    }
}

impl Nccl {
    /// The communicator of a call that makes one, when it is ready.
    fn made(
        self: &Arc<Nccl>,
        what: &str,
        code: c_int,
        comm: Comm,
        place: (u32, u32),
        name: CString,
        keep: &Keep,
    ) -> Result<Arc<dyn Communicator>> {
        if code != sys::IN_PROGRESS {
            self.check(what, code, std::ptr::null_mut())?;
        }
        // Aborted when it is dropped, also where it does not come to be ready.
        let made = Arc::new(self.make(comm, place, name, keep));
        self.settle(what, code, comm, keep.patience)?;
        Ok(made)
    }
}

/// A name as C has it.
fn c_name(name: &str) -> CString {
    let bytes: Vec<u8> = name.bytes().filter(|byte| *byte != 0).take(NAME_BYTES).collect();
    CString::new(bytes).unwrap_or_default()
}

#[derive(Clone)]
struct Keep {
    device: i32,
    runtime: Arc<dyn Runtime>,
    /// How long a call of a communicator that does not block may be in progress.
    patience: Duration,
}

/// What the library knows of a communicator. Kept by threads that end it, too.
struct Handle {
    gate: Gate,
    /// The library reads it as long as the communicator lives.
    _name: CString,
}

struct NcclComm {
    api: Arc<Nccl>,
    handle: Arc<Handle>,
    rank: u32,
    ranks: u32,
    keep: Keep,
}

fn dtype(dtype: Dtype) -> Result<c_int> {
    Ok(match dtype {
        Dtype::Bytes | Dtype::U8 => sys::UINT8,
        Dtype::I8 => sys::INT8,
        Dtype::U32 => sys::UINT32,
        Dtype::I32 => sys::INT32,
        Dtype::U64 => sys::UINT64,
        Dtype::I64 => sys::INT64,
        Dtype::F16 => sys::FLOAT16,
        Dtype::Bf16 => sys::BFLOAT16,
        Dtype::F32 => sys::FLOAT32,
        Dtype::F64 => sys::FLOAT64,
        Dtype::F8E4M3 => sys::FLOAT8E4M3,
        Dtype::F8E5M2 => sys::FLOAT8E5M2,
        other => return Err(no_type("NCCL", other)),
    })
}

fn op(op: ReduceOp) -> Result<c_int> {
    Ok(match op {
        ReduceOp::Sum => sys::SUM,
        ReduceOp::Product => sys::PROD,
        ReduceOp::Max => sys::MAX,
        ReduceOp::Min => sys::MIN,
        ReduceOp::Avg => sys::AVG,
        other => return Err(no_op("NCCL", other)),
    })
}

/// The factor of a scaled sum in the type of the numbers, little end first.
fn factor_bytes(dtype: Dtype, factor: f64) -> Result<[u8; 8]> {
    let mut bytes = [0; 8];
    match dtype {
        Dtype::F64 => bytes = factor.to_le_bytes(),
        Dtype::F32 => bytes[..4].copy_from_slice(&(factor as f32).to_le_bytes()),
        Dtype::F16 => bytes[..2].copy_from_slice(&f32_to_f16(factor as f32).to_le_bytes()),
        Dtype::Bf16 => bytes[..2].copy_from_slice(&f32_to_bf16(factor as f32).to_le_bytes()),
        other => return Err(no_type("NCCL's PREMUL_SUM", other)),
    }
    Ok(bytes)
}

impl NcclComm {
    /// Runs `body` with the library's number of the op; a scaled sum is made for the call and given back after it.
    fn with_op(
        &self,
        comm: Comm,
        kind: Dtype,
        (wanted, on_device): (ReduceOp, usize),
        body: impl FnOnce(c_int) -> Result<c_int>,
    ) -> Result<c_int> {
        let ReduceOp::PremulSum(factor) = wanted else { return body(op(wanted)?) };
        let api = &self.api;
        let mut bytes = factor_bytes(kind, factor)?;
        let (scalar, residence) = match on_device {
            0 => (bytes.as_mut_ptr().cast::<c_void>(), sys::SCALAR_HOST),
            address => (address as *mut c_void, sys::SCALAR_DEVICE),
        };
        let mut made: c_int = 0;
        let create = api.table.create_premul_sum.of(&api.library)?;
        let destroy = api.table.destroy_op.of(&api.library)?;
        // SAFETY: the vendor's function; it reads a scalar of the host before it returns, and the caller keeps one of the
        // device until the stream has passed the call.
        let code = unsafe { create(&mut made, scalar, dtype(kind)?, residence, comm) };
        api.check("ncclRedOpCreatePreMulSum", code, comm)?;
        let result = body(made);
        // SAFETY: made above for this communicator; allowed at once after the last call that uses it, also in a group.
        unsafe { destroy(made, comm) };
        result
    }

    fn one(&self, call: &Call<'_>, factor: usize, comm: Comm, stream: *mut c_void) -> Result<c_int> {
        let (table, library) = (&self.api.table, &self.api.library);
        let (to, from) = (|at: usize| at as *mut c_void, |at: usize| at as *const c_void);
        // SAFETY: each call below is the vendor's own declaration; the caller's addresses are memory of this device for
        // as many elements as it says, until the stream has passed the call; `comm` lives while the gate is entered.
        unsafe {
            Ok(match *call {
                Call::AllReduce { send, recv, count, dtype: of, op } => {
                    let f = table.all_reduce.of(library)?;
                    return self.with_op(comm, of, (op, factor), |op| {
                        Ok(f(from(send), to(recv), count, dtype(of)?, op, comm, stream))
                    });
                }
                Call::Reduce { send, recv, count, dtype: of, op, root } => {
                    let f = table.reduce.of(library)?;
                    let root = root as c_int;
                    return self.with_op(comm, of, (op, factor), |op| {
                        Ok(f(from(send), to(recv), count, dtype(of)?, op, root, comm, stream))
                    });
                }
                Call::ReduceScatter { send, recv, count, dtype: of, op } => {
                    let f = table.reduce_scatter.of(library)?;
                    return self.with_op(comm, of, (op, factor), |op| {
                        Ok(f(from(send), to(recv), count, dtype(of)?, op, comm, stream))
                    });
                }
                Call::Broadcast { buffer, count, dtype: of, root } => {
                    let f = table.broadcast.of(library)?;
                    f(from(buffer), to(buffer), count, dtype(of)?, root as c_int, comm, stream)
                }
                Call::AllGather { send, recv, count, dtype: of } => {
                    table.all_gather.of(library)?(from(send), to(recv), count, dtype(of)?, comm, stream)
                }
                Call::Gather { send, recv, count, dtype: of, root } => {
                    let f = table.gather.of(library)?;
                    f(from(send), to(recv), count, dtype(of)?, root as c_int, comm, stream)
                }
                Call::Scatter { send, recv, count, dtype: of, root } => {
                    let f = table.scatter.of(library)?;
                    f(from(send), to(recv), count, dtype(of)?, root as c_int, comm, stream)
                }
                Call::Exchange(messages) => return self.exchange(messages, comm, stream),
                Call::AllToAllV { .. } | Call::Copy { .. } => return Err(no_call(&self.api.able, call)),
            })
        }
    }

    fn exchange(&self, messages: &[Message], comm: Comm, stream: *mut c_void) -> Result<c_int> {
        let (table, library) = (&self.api.table, &self.api.library);
        let (send, recv) = (table.send.of(library)?, table.recv.of(library)?);
        self.group_start()?;
        let mut code = sys::SUCCESS;
        for message in messages {
            let (at, peer) = (message.addr as *mut c_void, message.peer as c_int);
            // SAFETY: as in `one`.
            code = unsafe {
                if message.sends {
                    send(at, message.bytes, sys::UINT8, peer, comm, stream)
                } else {
                    recv(at, message.bytes, sys::UINT8, peer, comm, stream)
                }
            };
            if code != sys::SUCCESS && code != sys::IN_PROGRESS {
                break;
            }
        }
        self.group_end().map(|()| code)
    }

    fn child(
        &self,
        what: &'static str,
        (deadline, go_on): (Duration, GoOn),
        name: CString,
        make: impl MakeChild,
    ) -> Result<Option<Arc<dyn Communicator>>> {
        let (api, keep, handle) = (self.api.clone(), self.keep.clone(), self.handle.clone());
        let keep = Keep { patience: deadline, ..keep };
        let text = format!("{} {what} of rank {} of {}", api.able.name, self.rank, self.ranks);
        within(deadline, &text, &*go_on, move || {
            keep.runtime.set_device(keep.device)?;
            handle.gate.enter(what, |parent| {
                let mut comm: Comm = std::ptr::null_mut();
                let code = make(parent as Comm, &name, &mut comm);
                if comm.is_null() {
                    return api.settle(what, code, parent as Comm, keep.patience).map(|()| None);
                }
                // Its rank is known when it is ready.
                api.settle(what, code, comm, keep.patience)?;
                let place = api.place(comm)?;
                api.made(what, sys::SUCCESS, comm, place, name, &keep).map(Some)
            })
        })
    }
}

/// Makes a communicator from its parent, and says how that went.
trait MakeChild: FnOnce(Comm, &CStr, &mut Comm) -> c_int + Send + 'static {}
impl<F: FnOnce(Comm, &CStr, &mut Comm) -> c_int + Send + 'static> MakeChild for F {}

impl Communicator for NcclComm {
    fn api(&self) -> Arc<dyn Api> {
        self.api.clone()
    }
    fn rank(&self) -> u32 {
        self.rank
    }
    fn ranks(&self) -> u32 {
        self.ranks
    }
    fn device(&self) -> i32 {
        self.keep.device
    }

    fn call(&self, call: &Call<'_>, stream: Stream) -> Result<Kept> {
        self.call_by_factor(call, 0, stream)
    }

    fn call_by_factor(&self, call: &Call<'_>, factor: usize, stream: Stream) -> Result<Kept> {
        self.handle.gate.enter(call.name(), |comm| {
            let code = self.one(call, factor, comm as Comm, stream.0 as *mut c_void)?;
            self.api.settle(call.name(), code, comm as Comm, self.keep.patience).map(|()| None)
        })
    }

    fn group_start(&self) -> Result<()> {
        // SAFETY: the vendor's function; state of this thread.
        let code = unsafe { self.api.table.group_start.of(&self.api.library)?() };
        self.api.check("ncclGroupStart", code, std::ptr::null_mut())
    }

    fn group_end(&self) -> Result<()> {
        // SAFETY: the vendor's function; state of this thread.
        let code = unsafe { self.api.table.group_end.of(&self.api.library)?() };
        if code != sys::IN_PROGRESS {
            return self.api.check("ncclGroupEnd", code, std::ptr::null_mut());
        }
        let patience = self.keep.patience;
        self.handle.gate.enter("group_end", |comm| self.api.settle("ncclGroupEnd", code, comm as Comm, patience))
    }

    fn can_split(&self, _: &[u32]) -> bool {
        self.api.able.split
    }

    fn split(&self, split: &Split) -> Result<Option<Arc<dyn Communicator>>> {
        let call = self.api.table.split.of(&self.api.library)?;
        let place = split.members.iter().position(|member| *member == self.rank);
        let (color, key) = (place.map_or(sys::NO_COLOR, |_| split.number as c_int), place.unwrap_or(0) as c_int);
        let name = c_name(&split.name);
        let waits = (split.deadline, split.go_on.clone());
        self.child("ncclCommSplit", waits, name, move |parent, name, comm| {
            let mut config = Config::blocking(name);
            // SAFETY: the vendor's function; the config lives until it returns, the name as long as the communicator.
            unsafe { call(parent, color, key, comm, &mut config) }
        })
    }

    fn shrink(&self, exclude: &[u32], deadline: Duration, go_on: GoOn, name: &str) -> Result<Arc<dyn Communicator>> {
        let call = self.api.table.shrink.of(&self.api.library)?;
        let mut exclude: Vec<c_int> = exclude.iter().map(|rank| *rank as c_int).collect();
        exclude.sort_unstable();
        let name = c_name(name);
        let made = self.child("ncclCommShrink", (deadline, go_on), name, move |parent, name, comm| {
            let mut config = Config::blocking(name);
            let count = exclude.len() as c_int;
            // SAFETY: the vendor's function; list and config live until it returns, the name as long as the communicator.
            unsafe { call(parent, exclude.as_mut_ptr(), count, comm, &mut config, sys::SHRINK_ABORT) }
        })?;
        made.ok_or_else(|| Error::Bug("sagellm: ncclCommShrink succeeded and gave no communicator".into()))
    }

    fn poll(&self) -> Result<()> {
        self.handle.gate.enter("poll", |comm| {
            let Some(get) = self.api.table.get_async_error.optional() else { return Ok(()) };
            let mut state = sys::SUCCESS;
            // SAFETY: the vendor's function; it writes one int and does not wait.
            let code = unsafe { get(comm as Comm, &mut state) };
            self.api.check("ncclCommGetAsyncError", code, comm as Comm)?;
            match state {
                sys::IN_PROGRESS => Ok(()), // another thread's call, which waits for its end
                state => self.api.check("an operation that was launched earlier", state, comm as Comm),
            }
        })
    }

    fn abort(&self) -> Result<()> {
        let Some(comm) = self.handle.gate.shut("aborted", GRACE) else { return Ok(()) };
        let call = self.api.table.abort.of(&self.api.library)?;
        let (api, keep, handle) = (self.api.clone(), self.keep.clone(), self.handle.clone());
        within(END, "ncclCommAbort", &always, move || {
            let _alive = handle;
            keep.runtime.set_device(keep.device)?;
            // SAFETY: the gate is shut, so this is the last use; the library lets abort run beside a call that hangs.
            let code = unsafe { call(comm as Comm) };
            api.check("ncclCommAbort", code, std::ptr::null_mut())
        })
    }

    fn close(&self, deadline: Duration) -> Result<()> {
        let Some(comm) = self.handle.gate.shut("closed", deadline) else { return Ok(()) };
        let destroy = self.api.table.destroy.of(&self.api.library)?;
        let (api, keep, handle) = (self.api.clone(), self.keep.clone(), self.handle.clone());
        within(deadline, "the end of an NCCL communicator", &always, move || {
            let _alive = handle;
            keep.runtime.set_device(keep.device)?;
            if let Some(finalize) = api.table.finalize.optional() {
                // SAFETY: the gate is shut: no other use of the handle.
                let code = unsafe { finalize(comm as Comm) };
                api.settle("ncclCommFinalize", code, comm as Comm, deadline)?;
            }
            // SAFETY: as above, and the last use.
            api.check("ncclCommDestroy", unsafe { destroy(comm as Comm) }, std::ptr::null_mut())
        })
    }
}

impl Drop for NcclComm {
    /// Only of one that was neither closed nor aborted: a leaver who was not waited for must not wait for others.
    fn drop(&mut self) {
        if let Err(error) = self.abort() {
            log::warn!("{error}");
        }
    }
}
