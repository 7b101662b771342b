//! Communicators of NCCL. They are blocking. For a non-blocking communicator, the library starts a thread for every
//! launched group (NVIDIA/nccl, src/group.cc), which costs more than the launch. A separate thread joins each
//! communicator, so that our wait for the join can have a deadline.

use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{profiler, tuner};
use crate::engine::device::communicator::*;
use crate::engine::device::libs::common::*;
use crate::engine::device::lowering::{Capabilities, Double, Ops};
use crate::engine::device::runtime::{Runtime, Stream};
use crate::engine::loader::{Hints, Known, Library};
use crate::error::{Error, Result};
use crate::reduce::{f32_to_bf16, f32_to_f16};
use crate::select::Policy;
use crate::types::{Dtype, Kind, ReduceOp};
use nccl_sys::{self as sys, Comm, Config, UniqueId};

/// `Symbol::of` for a function of `nccl_sys`.
trait Needed<F> {
    /// Returns the function, or an error that names it if the library does not have it.
    fn of(&self, library: &Library) -> Result<F>;
}

impl<F: Copy> Needed<F> for nccl_sys::Symbol<F> {
    fn of(&self, library: &Library) -> Result<F> {
        self.function.ok_or_else(|| library.lacks(self.name))
    }
}

pub static KNOWN: Known = Known {
    key: "NCCL",
    title: "NCCL",
    names: &["libnccl.so.2", "libnccl.so"],
    package: "nvidia/nccl/lib",
    companion: None,
    fix: "A PyTorch with CUDA brings it: pip install torch, or pip install nvidia-nccl-cu13.",
};

/// Oldest supported version: 2.18 has split, non-blocking abort, and every function that is not optional here.
const OLDEST: c_int = 21800;

/// Since 2.24 the library reduces 8-bit floats. On devices before sm_90, the library itself refuses each rank's call.
const FLOATS_OF_8_BITS: c_int = 22400;

/// The library has no 16-bit integers. The 8-bit floats must be last, because `open` drops the last two entries if the
/// library is too old for them.
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

/// The same list for libraries without scaled sums.
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

/// The capabilities of a current version, for documents and tests, which have no library.
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
        // SAFETY: the addresses are from this library, which is never closed.
        let table = unsafe { sys::Table::load(|name| library.address(name).and_then(std::ptr::NonNull::new)) };
        let mut version = 0;
        // SAFETY: the vendor's function; it writes one int.
        let code = unsafe { table.get_version.of(&library)?(&mut version) };
        if code != sys::SUCCESS || version < OLDEST {
            let found = version_text(version);
            return Err(Error::system(format!(
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
            missing: library.missing(sys::Table::NAMES),
            ..capabilities()
        };
        Ok(Arc::new(Nccl { library, table, able }))
    }

    /// Like `check`, for a call that may still be in progress. We make blocking communicators, but the variable
    /// `NCCL_COMM_BLOCKING=0` overrides that inside the library. Then a call may still be in progress when it returns,
    /// and no other call on the communicator is allowed before it is complete.
    fn settle(&self, what: &str, code: c_int, comm: Comm, patience: Duration) -> Result<()> {
        if code != sys::IN_PROGRESS {
            return self.check(what, code, comm);
        }
        let get = self.table.get_async_error.of(&self.library)?;
        let end = Instant::now() + patience;
        let mut state = sys::IN_PROGRESS;
        while state == sys::IN_PROGRESS {
            if Instant::now() >= end {
                return Err(Error::timeout(format!(
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
            // SAFETY: the vendor's function; it accepts a null communicator, and returns null or a text.
            text(unsafe { get(comm) })
        });
        let last = last.filter(|last| !last.is_empty()).map(|last| format!("; it says: {last}")).unwrap_or_default();
        Err(failure(self, what, code, &last))
    }

    /// Rank and size of a new communicator, as the library reports them.
    fn place(&self, comm: Comm) -> Result<(u32, u32)> {
        let (mut rank, mut ranks) = (0, 0);
        // SAFETY: the vendor's function, on a communicator that it has just made; it writes one int.
        let code = unsafe { self.table.comm_user_rank.of(&self.library)?(comm, &mut rank) };
        self.check("ncclCommUserRank", code, comm)?;
        // SAFETY: as above.
        let code = unsafe { self.table.comm_count.of(&self.library)?(comm, &mut ranks) };
        self.check("ncclCommCount", code, comm)?;
        Ok((rank as u32, ranks as u32))
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
        // SAFETY: the vendor's function; it writes 128 bytes to `id`.
        let code = unsafe { self.table.get_unique_id.of(&self.library)?(&mut id) };
        self.check("ncclGetUniqueId", code, std::ptr::null_mut())?;
        Ok(id.0.to_vec())
    }

    fn create(self: Arc<Self>, setup: Setup) -> Result<Arc<dyn Communicator>> {
        join(&self.able.clone(), setup, move |setup, id: [u8; sys::ID_BYTES]| {
            let (ranks, rank) = (setup.ranks as c_int, setup.rank as c_int);
            let mut comm: Comm = std::ptr::null_mut();
            let name = c_name(&setup.name);
            let mut config = Config::blocking(&name);
            let code = match self.table.init_rank_config.optional() {
                // SAFETY: the vendor's function. The config lives until it returns, and the name as long as the
                // communicator.
                Some(init) => unsafe { init(&mut comm, ranks, UniqueId(id), rank, &mut config) },
                // SAFETY: the vendor's function.
                None => unsafe { self.table.init_rank.of(&self.library)?(&mut comm, ranks, UniqueId(id), rank) },
            };
            let (place, device) = ((setup.rank, setup.ranks), (setup.device, setup.runtime));
            self.made(
                "ncclCommInitRankConfig",
                code,
                comm,
                place,
                device,
                Own { _name: name, patience: setup.deadline },
            )
        })
    }

    fn describe_error(&self, code: i32) -> String {
        let words = self.table.get_error_string.optional().map(|get| {
            // SAFETY: the vendor's function; it accepts any number.
            text(unsafe { get(code) })
        });
        format!("{} (ncclResult_t {code})", words.unwrap_or_default())
    }

    fn steer(&self, name: &str, policy: &Arc<Policy>) -> Option<Box<dyn Steering>> {
        Some(Box::new(tuner::steer(name, policy)))
    }

    fn takes_topologies(&self) -> bool {
        true
    }

    fn ran(&self, name: &str, kind: Kind, bytes: u64) -> Option<String> {
        let ran = profiler::ran(name, kind, bytes)?;
        Some(format!("{}, protocol {}, {} channels", ran.algorithm.text(), ran.protocol.text(), ran.channels))
    }
}

impl Nccl {
    /// Wraps the handle that a library call has made, and waits until the communicator is ready.
    fn made(
        self: &Arc<Nccl>,
        what: &str,
        code: c_int,
        comm: Comm,
        (rank, ranks): (u32, u32),
        (device, runtime): (i32, Arc<dyn Runtime>),
        own: Own,
    ) -> Result<Arc<dyn Communicator>> {
        if code != sys::IN_PROGRESS {
            self.check(what, code, std::ptr::null_mut())?;
        }
        let (guard, patience) = (HandleGuard::new(comm as usize), own.patience);
        // Aborted on drop, even if the communicator does not become ready.
        let made = LibraryComm(Arc::new(Joined { api: self.clone(), guard, rank, ranks, device, runtime, own }));
        self.settle(what, code, comm, patience)?;
        Ok(Arc::new(made))
    }
}

/// The name as a C string, truncated to `NAME_BYTES`.
fn c_name(name: &str) -> CString {
    let bytes: Vec<u8> = name.bytes().filter(|byte| *byte != 0).take(NAME_BYTES).collect();
    CString::new(bytes).unwrap_or_default()
}

pub struct Own {
    /// Kept here, because the library reads it as long as the communicator lives.
    _name: CString,
    /// How long a call may be in progress on a non-blocking communicator.
    patience: Duration,
}

const NUMBERS: Numbers = Numbers {
    name: "NCCL",
    types: &[
        (Dtype::Bytes, sys::UINT8),
        (Dtype::U8, sys::UINT8),
        (Dtype::I8, sys::INT8),
        (Dtype::U32, sys::UINT32),
        (Dtype::I32, sys::INT32),
        (Dtype::U64, sys::UINT64),
        (Dtype::I64, sys::INT64),
        (Dtype::F16, sys::FLOAT16),
        (Dtype::Bf16, sys::BFLOAT16),
        (Dtype::F32, sys::FLOAT32),
        (Dtype::F64, sys::FLOAT64),
        (Dtype::F8E4M3, sys::FLOAT8E4M3),
        (Dtype::F8E5M2, sys::FLOAT8E5M2),
    ],
    ops: &[
        (ReduceOp::Sum, sys::SUM),
        (ReduceOp::Product, sys::PROD),
        (ReduceOp::Max, sys::MAX),
        (ReduceOp::Min, sys::MIN),
        (ReduceOp::Avg, sys::AVG),
    ],
};

/// The factor of a scaled sum in the call's element type, little-endian.
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

type DestroyOp = unsafe extern "C" fn(c_int, Comm) -> c_int;

/// The factor of a call's PREMUL_SUM, and the call's element type; `None` for other ops.
fn premul(call: &Call<'_>) -> Option<(f64, Dtype)> {
    match *call {
        Call::AllReduce { op: ReduceOp::PremulSum(factor), dtype, .. }
        | Call::Reduce { op: ReduceOp::PremulSum(factor), dtype, .. }
        | Call::ReduceScatter { op: ReduceOp::PremulSum(factor), dtype, .. } => Some((factor, dtype)),
        _ => None,
    }
}

impl Nccl {
    /// Creates an op for a scaled sum. Returns its number and the function that destroys it after use. `on_device`:
    /// device address of the factor, or 0 if the factor is in host memory.
    fn make_premul(&self, (factor, dtype): (f64, Dtype), on_device: usize, comm: Comm) -> Result<(c_int, DestroyOp)> {
        let mut bytes = factor_bytes(dtype, factor)?;
        let (scalar, residence) = match on_device {
            0 => (bytes.as_mut_ptr().cast::<c_void>(), sys::SCALAR_HOST),
            address => (address as *mut c_void, sys::SCALAR_DEVICE),
        };
        let mut made: c_int = 0;
        let create = self.table.create_premul_sum.of(&self.library)?;
        let destroy = self.table.destroy_op.of(&self.library)?;
        // SAFETY: the vendor's function. It reads a host scalar before it returns; the caller keeps a device scalar
        // until the stream has completed the call.
        let code = unsafe { create(&mut made, scalar, NUMBERS.dtype(dtype)?, residence, comm) };
        self.check("ncclRedOpCreatePreMulSum", code, comm).map(|()| (made, destroy))
    }

    /// Makes one call of the library, and returns its result code.
    fn one(&self, call: &Call<'_>, made: Option<c_int>, comm: Comm, stream: *mut c_void) -> Result<c_int> {
        let (table, library) = (&self.table, &self.library);
        let Arguments { send, recv, count, dtype, op, root } = NUMBERS.arguments(call, made, &self.able)?;
        let root = root as c_int;
        // SAFETY: each function below is declared as the vendor declares it. The caller's addresses point to memory of
        // this device, with as many elements as the call says, until the stream has completed the call. `comm` lives
        // while the guard is entered.
        Ok(unsafe {
            match call {
                Call::AllReduce { .. } => table.all_reduce.of(library)?(send, recv, count, dtype, op, comm, stream),
                Call::Reduce { .. } => table.reduce.of(library)?(send, recv, count, dtype, op, root, comm, stream),
                Call::ReduceScatter { .. } => {
                    table.reduce_scatter.of(library)?(send, recv, count, dtype, op, comm, stream)
                }
                Call::Broadcast { .. } => table.broadcast.of(library)?(send, recv, count, dtype, root, comm, stream),
                Call::AllGather { .. } => table.all_gather.of(library)?(send, recv, count, dtype, comm, stream),
                Call::Gather { .. } => table.gather.of(library)?(send, recv, count, dtype, root, comm, stream),
                Call::Scatter { .. } => table.scatter.of(library)?(send, recv, count, dtype, root, comm, stream),
                _ => return Err(no_call(&self.able, call)),
            }
        })
    }

    fn exchange(&self, own: &Joined<Nccl>, messages: &[Message], comm: Comm, stream: *mut c_void) -> Result<()> {
        let (send, recv) = (self.table.send.of(&self.library)?, self.table.recv.of(&self.library)?);
        own.exchange(messages, |message| {
            let (at, peer) = (message.addr as *mut c_void, message.peer as c_int);
            // SAFETY: as in `one`.
            let code = unsafe {
                if message.sends {
                    send(at, message.bytes, sys::UINT8, peer, comm, stream)
                } else {
                    recv(at, message.bytes, sys::UINT8, peer, comm, stream)
                }
            };
            // `group_end` waits for calls that are in progress.
            if code == sys::IN_PROGRESS { Ok(()) } else { self.check("exchange", code, comm) }
        })
    }

    /// Makes a communicator out of another one by calling `make`. `None` if this rank is in no new communicator.
    fn child(
        own: &Arc<Joined<Nccl>>,
        what: &'static str,
        (deadline, go_on): (Duration, GoOn),
        name: CString,
        make: impl FnOnce(Comm, &CStr, &mut Comm) -> c_int + Send + 'static,
    ) -> Result<Option<Arc<dyn Communicator>>> {
        let own = Arc::clone(own);
        let text = format!("{} {what} of rank {} of {}", own.api.able.name, own.rank, own.ranks);
        within(deadline, &text, &*go_on, move || {
            own.runtime.set_device(own.device)?;
            let api = &own.api;
            own.guard.enter(what, |parent| {
                let mut comm: Comm = std::ptr::null_mut();
                let code = make(parent as Comm, &name, &mut comm);
                if comm.is_null() {
                    return api.settle(what, code, parent as Comm, deadline).map(|()| None);
                }
                // The rank can be queried only when the communicator is ready.
                api.settle(what, code, comm, deadline)?;
                let (place, device) = (api.place(comm)?, (own.device, own.runtime.clone()));
                api.made(what, sys::SUCCESS, comm, place, device, Own { _name: name, patience: deadline }).map(Some)
            })
        })
    }
}

impl Calls for Nccl {
    type Own = Own;

    fn put(&self, own: &Joined<Nccl>, handle: usize, call: &Call<'_>, factor: usize, stream: Stream) -> Result<Kept> {
        let (comm, stream) = (handle as Comm, stream.0 as *mut c_void);
        if let Call::Exchange(messages) = call {
            return self.exchange(own, messages, comm, stream).map(|()| None);
        }
        let made = premul(call).map(|premul| self.make_premul(premul, factor, comm)).transpose()?;
        let code = self.one(call, made.map(|(number, _)| number), comm, stream);
        if let Some((number, destroy)) = made {
            // SAFETY: the op was made above for this communicator. NCCL allows destroying an op right after the last
            // call that uses it, even inside a group.
            unsafe { destroy(number, comm) };
        }
        self.settle(call.name(), code?, comm, own.own.patience).map(|()| None)
    }

    fn group_start(&self) -> Result<()> {
        // SAFETY: the vendor's function; it uses only state of this thread.
        let code = unsafe { self.table.group_start.of(&self.library)?() };
        self.check("ncclGroupStart", code, std::ptr::null_mut())
    }

    fn group_end(&self, own: &Joined<Nccl>) -> Result<()> {
        // SAFETY: the vendor's function; it uses only state of this thread.
        let code = unsafe { self.table.group_end.of(&self.library)?() };
        if code != sys::IN_PROGRESS {
            return self.check("ncclGroupEnd", code, std::ptr::null_mut());
        }
        own.guard.enter("group_end", |comm| self.settle("ncclGroupEnd", code, comm as Comm, own.own.patience))
    }

    fn can_split(&self, _: &Joined<Nccl>, _: &[u32]) -> bool {
        self.able.split
    }

    fn split(&self, own: &Arc<Joined<Nccl>>, split: &Split) -> Result<Option<Arc<dyn Communicator>>> {
        let call = self.table.split.of(&self.library)?;
        let place = split.members.iter().position(|member| *member == own.rank);
        let (color, key) = (place.map_or(sys::NO_COLOR, |_| split.number as c_int), place.unwrap_or(0) as c_int);
        let waits = (split.deadline, split.go_on.clone());
        Nccl::child(own, "ncclCommSplit", waits, c_name(&split.name), move |parent, name, comm| {
            let mut config = Config::blocking(name);
            // SAFETY: the vendor's function. The config lives until it returns, and the name as long as the
            // communicator.
            unsafe { call(parent, color, key, comm, &mut config) }
        })
    }

    fn shrink(
        &self,
        own: &Arc<Joined<Nccl>>,
        exclude: &[u32],
        waits: (Duration, GoOn),
        name: &str,
    ) -> Result<Arc<dyn Communicator>> {
        let call = self.table.shrink.of(&self.library)?;
        let mut exclude: Vec<c_int> = exclude.iter().map(|rank| *rank as c_int).collect();
        exclude.sort_unstable();
        let made = Nccl::child(own, "ncclCommShrink", waits, c_name(name), move |parent, name, comm| {
            let mut config = Config::blocking(name);
            let count = exclude.len() as c_int;
            // SAFETY: the vendor's function. The list and the config live until it returns, and the name as long as the
            // communicator.
            unsafe { call(parent, exclude.as_mut_ptr(), count, comm, &mut config, sys::SHRINK_ABORT) }
        })?;
        made.ok_or_else(|| Error::bug("sagellm: ncclCommShrink succeeded and gave no communicator"))
    }

    fn poll(&self, handle: usize) -> Result<()> {
        let Some(get) = self.table.get_async_error.optional() else { return Ok(()) };
        let (comm, mut state) = (handle as Comm, sys::SUCCESS);
        // SAFETY: the vendor's function; it writes one int and does not wait.
        let code = unsafe { get(comm, &mut state) };
        self.check("ncclCommGetAsyncError", code, comm)?;
        match state {
            sys::IN_PROGRESS => Ok(()), // another thread's call is in progress; that thread waits for it
            state => self.check("an operation that was launched earlier", state, comm),
        }
    }

    fn abort(comm: &Arc<Joined<Nccl>>) -> Result<()> {
        comm.end(("aborted", GRACE), ("ncclCommAbort", END), |own, handle| {
            let call = own.api.table.abort.of(&own.api.library)?;
            // SAFETY: the guard is shut, so this is the last use of the handle. The library allows abort while another
            // call hangs.
            let code = unsafe { call(handle as Comm) };
            own.api.check("ncclCommAbort", code, std::ptr::null_mut())
        })
    }

    fn close(comm: &Arc<Joined<Nccl>>, deadline: Duration) -> Result<()> {
        comm.end(("closed", deadline), ("the end of an NCCL communicator", deadline), move |own, handle| {
            let (api, comm) = (&own.api, handle as Comm);
            let destroy = api.table.destroy.of(&api.library)?;
            if let Some(finalize) = api.table.finalize.optional() {
                // SAFETY: the guard is shut, so there is no other use of the handle.
                let code = unsafe { finalize(comm) };
                api.settle("ncclCommFinalize", code, comm, deadline)?;
            }
            // SAFETY: as above; this is the last use of the handle.
            api.check("ncclCommDestroy", unsafe { destroy(comm) }, std::ptr::null_mut())
        })
    }
}
