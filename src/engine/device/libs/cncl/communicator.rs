//! CNCL. One communicator at a time is made, outside of any group: one that is made inside is not usable before its end.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

use super::declarations as sys;
use super::declarations::{CliqueId, Comm};
use crate::config;
use crate::engine::device::communicator::*;
use crate::engine::device::libs::loader::{Hints, Known, Library};
use crate::engine::device::lowering::{Capabilities, Double, Ops};
use crate::engine::device::runtime::{Runtime, Stream};
use crate::error::{Error, Result};
use crate::types::{Dtype, ReduceOp};

pub static KNOWN: Known = Known {
    key: "CNCL",
    title: "CNCL",
    names: &["libcncl.so.1", "libcncl.so"],
    package: "",
    companion: None,
    fix: "It is a part of Neuware: add $NEUWARE_HOME/lib64 to LD_LIBRARY_PATH.",
};

const REDUCES: [(Dtype, Ops); 11] = [
    (Dtype::U8, Ops::BASIC),
    (Dtype::I8, Ops::BASIC),
    (Dtype::U16, Ops::BASIC),
    (Dtype::I16, Ops::BASIC),
    (Dtype::U32, Ops::BASIC),
    (Dtype::I32, Ops::BASIC),
    (Dtype::U64, Ops::BASIC),
    (Dtype::I64, Ops::BASIC),
    (Dtype::F16, Ops::BASIC),
    (Dtype::Bf16, Ops::BASIC),
    (Dtype::F32, Ops::BASIC),
];

pub struct Cncl {
    library: Library,
    table: sys::Table,
    able: Capabilities,
}

/// What a current version can do, for documents and tests that have no library.
pub fn capabilities() -> Capabilities {
    Capabilities {
        name: "CNCL".into(),
        reduces: &REDUCES,
        double: if config::double_as_float() { Double::AsFloat } else { Double::Refused },
        gather: false,
        scatter: false,
        all_to_all_v: false,
        reduce_clobbers_input: false,
        group: true,
        split: false,
        shrink: false,
        abort: true,
        id_bytes: sys::ID_BYTES,
        missing: Vec::new(),
    }
}

impl Cncl {
    pub fn open(hints: &Hints) -> Result<Arc<dyn Api>> {
        let library = Library::open(&KNOWN, hints)?;
        let table = sys::Table::load(&library);
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: the vendor's function; it writes three ints.
        let code = unsafe { table.get_lib_version.of(&library)?(&mut major, &mut minor, &mut patch) };
        if code != sys::SUCCESS || major < 1 {
            return Err(Error::System(format!(
                "sagellm: CNCL {major}.{minor}.{patch} ({}) is too old (cnclGetLibVersion returned {code}): 1.0 or newer \
                 is needed; update Neuware or name another file in SAGELLM_CNCL_LIBRARY",
                library.path
            )));
        }
        let able = Capabilities {
            name: format!("CNCL {major}.{minor}.{patch}"),
            group: table.group_start.there() && table.group_end.there(),
            abort: table.abort_comm.there(),
            missing: sys::Table::NAMES.iter().copied().filter(|name| !library.has(name)).collect(),
            ..capabilities()
        };
        Ok(Arc::new(Cncl { library, table, able }))
    }

    fn check(&self, what: &str, code: c_int) -> Result<()> {
        if code == sys::SUCCESS {
            return Ok(());
        }
        Err(Error::System(format!("sagellm: {} failed in {what}: {}", self.able.name, self.describe_error(code))))
    }
}

impl Api for Cncl {
    fn capabilities(&self) -> &Capabilities {
        &self.able
    }

    fn describe(&self) -> String {
        format!("{} ({})", self.able.name, self.library.path)
    }

    fn unique_id(&self) -> Result<Vec<u8>> {
        let mut id = CliqueId { data: [0; 128], hash: 0 };
        // SAFETY: the vendor's function; it writes 136 bytes.
        let code = unsafe { self.table.get_clique_id.of(&self.library)?(&mut id) };
        self.check("cnclGetCliqueId", code)?;
        Ok([&id.data[..], &id.hash.to_ne_bytes()].concat())
    }

    fn create(self: Arc<Self>, setup: Setup) -> Result<Arc<dyn Communicator>> {
        let bytes: [u8; sys::ID_BYTES] = setup.id.as_slice().try_into().map_err(|_| wrong_id(&self.able, &setup))?;
        let (mut data, mut hash) = ([0; 128], [0; 8]);
        data.copy_from_slice(&bytes[..128]);
        hash.copy_from_slice(&bytes[128..]);
        let id = CliqueId { data, hash: u64::from_ne_bytes(hash) };
        let what = joining(&self.able, &setup);
        let go_on = setup.go_on.clone();
        within(setup.deadline, &what, &*go_on, move || {
            setup.runtime.set_device(setup.device)?;
            let (device, rank, ranks) = (setup.device, setup.rank as c_int, setup.ranks as c_int);
            let mut comm: Comm = std::ptr::null_mut();
            let init = self.table.init_comms.of(&self.library)?;
            // SAFETY: the vendor's function; lists of one entry, which live until it returns.
            let code = unsafe { init(&mut comm, 1, &device, &rank, ranks, &id) };
            self.check("cnclInitComms", code)?;
            let gate = Arc::new(Gate::new(comm as usize));
            let (rank, ranks, runtime) = (setup.rank, setup.ranks, setup.runtime);
            Ok(Arc::new(CnclComm { api: self, gate, rank, ranks, device, runtime }) as Arc<dyn Communicator>)
        })
    }

    fn describe_error(&self, code: i32) -> String {
        // SAFETY: the vendor's function; it takes any number.
        let words = self.table.get_error_str.optional().map(|get| text(unsafe { get(code) }));
        format!("{} (cnclResult_t {code:#04x})", words.unwrap_or_default())
    }
}

struct CnclComm {
    api: Arc<Cncl>,
    gate: Arc<Gate>,
    rank: u32,
    ranks: u32,
    device: i32,
    runtime: Arc<dyn Runtime>,
}

fn dtype(dtype: Dtype) -> Result<c_int> {
    Ok(match dtype {
        Dtype::Bytes | Dtype::U8 => sys::UINT8,
        Dtype::I8 => sys::INT8,
        Dtype::U16 => sys::UINT16,
        Dtype::I16 => sys::INT16,
        Dtype::U32 => sys::UINT32,
        Dtype::I32 => sys::INT32,
        Dtype::U64 => sys::UINT64,
        Dtype::I64 => sys::INT64,
        Dtype::F16 => sys::FLOAT16,
        Dtype::Bf16 => sys::BFLOAT16,
        Dtype::F32 => sys::FLOAT32,
        other => return Err(no_type("CNCL", other)),
    })
}

fn op(op: ReduceOp) -> Result<c_int> {
    Ok(match op {
        ReduceOp::Sum => sys::SUM,
        ReduceOp::Product => sys::PROD,
        ReduceOp::Max => sys::MAX,
        ReduceOp::Min => sys::MIN,
        other => return Err(no_op("CNCL", other)),
    })
}

impl CnclComm {
    fn one(&self, call: &Call<'_>, comm: Comm, queue: *mut c_void) -> Result<c_int> {
        let (table, library) = (&self.api.table, &self.api.library);
        let (to, from) = (|at: usize| at as *mut c_void, |at: usize| at as *const c_void);
        // SAFETY: each call below is the vendor's own declaration; the caller's addresses are memory of this device for
        // as many elements as it says, until the queue has passed the call; `comm` lives while the gate is entered.
        Ok(unsafe {
            match *call {
                Call::AllReduce { send, recv, count, dtype: of, op: by } => {
                    let f = table.all_reduce.of(library)?;
                    f(from(send), to(recv), count, dtype(of)?, op(by)?, comm, queue)
                }
                Call::Reduce { send, recv, count, dtype: of, op: by, root } => {
                    let f = table.reduce.of(library)?;
                    // Off the root the library takes no receive buffer, so it cannot write to the input.
                    let recv = if root == self.rank { to(recv) } else { std::ptr::null_mut() };
                    f(from(send), recv, count, dtype(of)?, op(by)?, root as c_int, comm, queue)
                }
                Call::ReduceScatter { send, recv, count, dtype: of, op: by } => {
                    let f = table.reduce_scatter.of(library)?;
                    f(from(send), to(recv), count, dtype(of)?, op(by)?, comm, queue)
                }
                Call::Broadcast { buffer, count, dtype: of, root } => {
                    table.bcast.of(library)?(to(buffer), count, dtype(of)?, root as c_int, comm, queue)
                }
                Call::AllGather { send, recv, count, dtype: of } => {
                    table.all_gather.of(library)?(from(send), to(recv), count, dtype(of)?, comm, queue)
                }
                Call::Exchange(messages) => return self.exchange(messages, comm, queue),
                Call::Gather { .. } | Call::Scatter { .. } | Call::AllToAllV { .. } | Call::Copy { .. } => {
                    return Err(no_call(&self.api.able, call));
                }
            }
        })
    }

    fn exchange(&self, messages: &[Message], comm: Comm, queue: *mut c_void) -> Result<c_int> {
        let (table, library) = (&self.api.table, &self.api.library);
        let (send, recv) = (table.send.of(library)?, table.recv.of(library)?);
        self.group_start()?;
        let mut code = sys::SUCCESS;
        for message in messages {
            let call = if message.sends { send } else { recv };
            let at = message.addr as *mut c_void;
            // SAFETY: as in `one`.
            code = unsafe { call(at, message.bytes, sys::UINT8, message.peer as c_int, comm, queue) };
            if code != sys::SUCCESS {
                break;
            }
        }
        self.group_end().map(|()| code)
    }
}

impl Communicator for CnclComm {
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
        self.device
    }

    fn call(&self, call: &Call<'_>, stream: Stream) -> Result<Kept> {
        self.gate.enter(call.name(), |comm| {
            let code = self.one(call, comm as Comm, stream.0 as *mut c_void)?;
            self.api.check(call.name(), code).map(|()| None)
        })
    }

    fn group_start(&self) -> Result<()> {
        // SAFETY: the vendor's function.
        self.api.check("cnclGroupStart", unsafe { self.api.table.group_start.of(&self.api.library)?() })
    }

    fn group_end(&self) -> Result<()> {
        // SAFETY: the vendor's function.
        self.api.check("cnclGroupEnd", unsafe { self.api.table.group_end.of(&self.api.library)?() })
    }

    fn can_split(&self, _: &[u32]) -> bool {
        false
    }

    fn split(&self, _: &Split) -> Result<Option<Arc<dyn Communicator>>> {
        Err(no_split(&self.api.able))
    }

    fn shrink(&self, _: &[u32], _: Duration, _: GoOn, _: &str) -> Result<Arc<dyn Communicator>> {
        Err(no_split(&self.api.able))
    }

    fn poll(&self) -> Result<()> {
        self.gate.enter("poll", |comm| {
            let Some(get) = self.api.table.get_comm_async_error.optional() else { return Ok(()) };
            // SAFETY: the vendor's function; the state is what it returns.
            match unsafe { get(comm as Comm) } {
                sys::ASYNC_IN_PROGRESS => Ok(()),
                state => self.api.check("an operation that was launched earlier", state),
            }
        })
    }

    fn abort(&self) -> Result<()> {
        let Some(comm) = self.gate.shut("aborted", GRACE) else { return Ok(()) };
        let call = self.api.table.abort_comm.of(&self.api.library)?;
        let (api, runtime, device) = (self.api.clone(), self.runtime.clone(), self.device);
        within(END, "cnclAbortComm", &always, move || {
            runtime.set_device(device)?;
            // SAFETY: the gate is shut: the last use of the handle.
            api.check("cnclAbortComm", unsafe { call(comm as Comm) })
        })
    }

    /// All ranks of a clique must do this together; one that does it alone would wait for the others.
    fn close(&self, deadline: Duration) -> Result<()> {
        let Some(comm) = self.gate.shut("closed", deadline) else { return Ok(()) };
        let destroy = self.api.table.destroy_comms.of(&self.api.library)?;
        let (api, runtime, device) = (self.api.clone(), self.runtime.clone(), self.device);
        within(deadline, "the end of a CNCL communicator", &always, move || {
            runtime.set_device(device)?;
            let mut comm = comm as Comm;
            // SAFETY: the gate is shut: the last use of the handle, as a list of one.
            api.check("cnclDestroyComms", unsafe { destroy(&mut comm, 1) })
        })
    }
}

impl Drop for CnclComm {
    /// Only of one that was neither closed nor aborted.
    fn drop(&mut self) {
        if let Err(error) = self.abort() {
            log::warn!("{error}");
        }
    }
}
