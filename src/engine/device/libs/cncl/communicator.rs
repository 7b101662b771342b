//! Communicators of CNCL. They are made one at a time and outside any CNCL group, because a communicator that is made
//! inside a group is usable only after the group has ended.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

use super::declarations as sys;
use super::declarations::{CliqueId, Comm};
use crate::config;
use crate::engine::device::communicator::*;
use crate::engine::device::libs::common::*;
use crate::engine::device::lowering::{Capabilities, Double, Ops};
use crate::engine::device::runtime::Stream;
use crate::engine::loader::{Hints, Known, Library};
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

/// The capabilities of a current version, for documents and tests, which have no library.
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
            return Err(Error::system(format!(
                "sagellm: CNCL {major}.{minor}.{patch} ({}) is too old (cnclGetLibVersion returned {code}): 1.0 or newer \
                 is needed; update Neuware or name another file in SAGELLM_CNCL_LIBRARY",
                library.path
            )));
        }
        let able = Capabilities {
            name: format!("CNCL {major}.{minor}.{patch}"),
            group: table.group_start.there() && table.group_end.there(),
            abort: table.abort_comm.there(),
            missing: library.missing(sys::Table::NAMES),
            ..capabilities()
        };
        Ok(Arc::new(Cncl { library, table, able }))
    }

    fn check(&self, what: &str, code: c_int) -> Result<()> {
        if code == sys::SUCCESS { Ok(()) } else { Err(failure(self, what, code, "")) }
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
        // SAFETY: the vendor's function; it writes 136 bytes to `id`.
        let code = unsafe { self.table.get_clique_id.of(&self.library)?(&mut id) };
        self.check("cnclGetCliqueId", code)?;
        Ok([&id.data[..], &id.hash.to_ne_bytes()].concat())
    }

    fn create(self: Arc<Self>, setup: Setup) -> Result<Arc<dyn Communicator>> {
        join(&self.able.clone(), setup, move |setup, id: [u8; sys::ID_BYTES]| {
            let (mut data, mut hash) = ([0; 128], [0; 8]);
            data.copy_from_slice(&id[..128]);
            hash.copy_from_slice(&id[128..]);
            let id = CliqueId { data, hash: u64::from_ne_bytes(hash) };
            let Setup { rank, ranks, device, runtime, .. } = setup;
            let mut comm: Comm = std::ptr::null_mut();
            let init = self.table.init_comms.of(&self.library)?;
            // SAFETY: the vendor's function; the lists have one entry each and live until it returns.
            let code = unsafe { init(&mut comm, 1, &device, &(rank as c_int), ranks as c_int, &id) };
            self.check("cnclInitComms", code)?;
            let guard = HandleGuard::new(comm as usize);
            Ok(Arc::new(LibraryComm(Arc::new(Joined { api: self, guard, rank, ranks, device, runtime, own: () }))))
        })
    }

    fn describe_error(&self, code: i32) -> String {
        // SAFETY: the vendor's function; it takes any number.
        let words = self.table.get_error_str.optional().map(|get| text(unsafe { get(code) }));
        format!("{} (cnclResult_t {code:#04x})", words.unwrap_or_default())
    }
}

const NUMBERS: Numbers = Numbers {
    name: "CNCL",
    types: &[
        (Dtype::Bytes, sys::UINT8),
        (Dtype::U8, sys::UINT8),
        (Dtype::I8, sys::INT8),
        (Dtype::U16, sys::UINT16),
        (Dtype::I16, sys::INT16),
        (Dtype::U32, sys::UINT32),
        (Dtype::I32, sys::INT32),
        (Dtype::U64, sys::UINT64),
        (Dtype::I64, sys::INT64),
        (Dtype::F16, sys::FLOAT16),
        (Dtype::Bf16, sys::BFLOAT16),
        (Dtype::F32, sys::FLOAT32),
    ],
    ops: &[
        (ReduceOp::Sum, sys::SUM),
        (ReduceOp::Product, sys::PROD),
        (ReduceOp::Max, sys::MAX),
        (ReduceOp::Min, sys::MIN),
    ],
};

impl Cncl {
    fn exchange(&self, own: &Joined<Cncl>, messages: &[Message], comm: Comm, queue: *mut c_void) -> Result<()> {
        let (send, recv) = (self.table.send.of(&self.library)?, self.table.recv.of(&self.library)?);
        own.exchange(messages, |message| {
            let call = if message.sends { send } else { recv };
            let (at, peer) = (message.addr as *mut c_void, message.peer as c_int);
            // SAFETY: as in `put`.
            let code = unsafe { call(at, message.bytes, sys::UINT8, peer, comm, queue) };
            self.check("exchange", code)
        })
    }
}

impl Calls for Cncl {
    type Own = ();

    fn put(&self, own: &Joined<Cncl>, handle: usize, call: &Call<'_>, _: usize, stream: Stream) -> Result<Kept> {
        let (table, library, comm, queue) = (&self.table, &self.library, handle as Comm, stream.0 as *mut c_void);
        if let Call::Exchange(messages) = call {
            return self.exchange(own, messages, comm, queue).map(|()| None);
        }
        let Arguments { send, recv, count, dtype, op, root } = NUMBERS.arguments(call, None, &self.able)?;
        // On ranks other than the root, `recv` is the input (`Call::Reduce`). The library ignores the receive buffer
        // there, so null is passed: the library then cannot overwrite the input.
        let at_root = if root == own.rank { recv } else { std::ptr::null_mut() };
        let root = root as c_int;
        // SAFETY: each function below is declared as the vendor declares it. The caller's addresses point to memory of
        // this device, with as many elements as the call says, until the queue has completed the call. `comm` lives
        // while the guard is entered.
        let code = unsafe {
            match call {
                Call::AllReduce { .. } => table.all_reduce.of(library)?(send, recv, count, dtype, op, comm, queue),
                Call::Reduce { .. } => table.reduce.of(library)?(send, at_root, count, dtype, op, root, comm, queue),
                Call::ReduceScatter { .. } => {
                    table.reduce_scatter.of(library)?(send, recv, count, dtype, op, comm, queue)
                }
                Call::Broadcast { .. } => table.bcast.of(library)?(recv, count, dtype, root, comm, queue),
                Call::AllGather { .. } => table.all_gather.of(library)?(send, recv, count, dtype, comm, queue),
                _ => return Err(no_call(&self.able, call)),
            }
        };
        self.check(call.name(), code).map(|()| None)
    }

    fn group_start(&self) -> Result<()> {
        // SAFETY: the vendor's function.
        self.check("cnclGroupStart", unsafe { self.table.group_start.of(&self.library)?() })
    }

    fn group_end(&self, _: &Joined<Cncl>) -> Result<()> {
        // SAFETY: the vendor's function.
        self.check("cnclGroupEnd", unsafe { self.table.group_end.of(&self.library)?() })
    }

    fn poll(&self, handle: usize) -> Result<()> {
        let Some(get) = self.table.get_comm_async_error.optional() else { return Ok(()) };
        // SAFETY: the vendor's function; it returns the state and writes nothing.
        match unsafe { get(handle as Comm) } {
            sys::ASYNC_IN_PROGRESS => Ok(()),
            state => self.check("an operation that was launched earlier", state),
        }
    }

    fn abort(comm: &Arc<Joined<Cncl>>) -> Result<()> {
        comm.end(("aborted", GRACE), ("cnclAbortComm", END), |own, handle| {
            let call = own.api.table.abort_comm.of(&own.api.library)?;
            // SAFETY: the guard is shut, so this is the last use of the handle.
            own.api.check("cnclAbortComm", unsafe { call(handle as Comm) })
        })
    }

    /// All ranks of a clique must call this together: if a rank called it alone, it would wait for the others.
    fn close(comm: &Arc<Joined<Cncl>>, deadline: Duration) -> Result<()> {
        comm.end(("closed", deadline), ("the end of a CNCL communicator", deadline), |own, handle| {
            let destroy = own.api.table.destroy_comms.of(&own.api.library)?;
            let mut comm = handle as Comm;
            // SAFETY: the guard is shut, so this is the last use of the handle. It is passed as a list of one entry.
            own.api.check("cnclDestroyComms", unsafe { destroy(&mut comm, 1) })
        })
    }
}
