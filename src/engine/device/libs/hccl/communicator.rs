//! HCCL. In CANN 9 two libraries; before, one. It has no groups that would help here (its own may not mix kinds, and not
//! hold a batch of messages), no abort and no gather: see `lowering` and docs/vendors.md.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::declarations as sys;
use super::declarations::{Comm, Config, RootInfo, SendRecvItem};
use crate::engine::device::communicator::*;
use crate::engine::device::libs::loader::{Hints, Known, Library};
use crate::engine::device::lowering::{Capabilities, Double, Ops};
use crate::engine::device::runtime::{Runtime, Stream};
use crate::error::{Error, Result};
use crate::types::{Dtype, ReduceOp};

static KNOWN_HCOMM: Known = Known {
    key: "HCOMM",
    title: "HCCL's libhcomm",
    names: &["libhcomm.so"],
    package: "",
    companion: None,
    fix: "It is a part of CANN 9.",
};

pub static KNOWN: Known = Known {
    key: "HCCL",
    title: "HCCL",
    names: &["libhccl.so"],
    package: "",
    companion: Some(&KNOWN_HCOMM),
    fix: "It is a part of CANN: run `source .../ascend-toolkit/set_env.sh` in this shell first.",
};

/// As documented for A2 and A3. No integers without sign, no 64-bit floats; PROD neither for int16 nor for bfloat16.
const REDUCES: [(Dtype, Ops); 7] = [
    (Dtype::I8, Ops::BASIC),
    (Dtype::I16, Ops::NO_PRODUCT),
    (Dtype::I32, Ops::BASIC),
    (Dtype::I64, Ops::BASIC),
    (Dtype::F16, Ops::BASIC),
    (Dtype::Bf16, Ops::NO_PRODUCT),
    (Dtype::F32, Ops::BASIC),
];

pub struct Hccl {
    library: Library,
    table: sys::Table,
    able: Capabilities,
    /// Communicators of one device must not be made at the same time; those of different devices may.
    making: Mutex<HashMap<i32, Arc<Mutex<()>>>>,
}

/// What a current version can do, for documents and tests that have no library.
pub fn capabilities() -> Capabilities {
    Capabilities {
        name: "HCCL".into(),
        reduces: &REDUCES,
        double: Double::Kept,
        gather: false,
        scatter: true,
        all_to_all_v: true,
        reduce_clobbers_input: true,
        group: false,
        split: true,
        shrink: false,
        abort: false,
        id_bytes: sys::ID_BYTES,
        missing: Vec::new(),
    }
}

impl Hccl {
    pub fn open(hints: &Hints) -> Result<Arc<dyn Api>> {
        let library = Library::open(&KNOWN, hints)?;
        let table = sys::Table::load(&library);
        for needed in ["HcclGetRootInfo", "HcclAllReduce", "HcclCommDestroy"] {
            if !library.has(needed) {
                return Err(library.lacks(needed));
            }
        }
        let able = Capabilities {
            name: name(&table),
            scatter: table.scatter.there(),
            all_to_all_v: table.all_to_all_v.there(),
            split: table.create_sub.there(),
            missing: sys::Table::NAMES.iter().copied().filter(|name| !library.has(name)).collect(),
            ..capabilities()
        };
        Ok(Arc::new(Hccl { library, table, able, making: Mutex::default() }))
    }

    fn check(&self, what: &str, code: c_int) -> Result<()> {
        if code == sys::SUCCESS {
            return Ok(());
        }
        Err(Error::System(format!(
            "sagellm: {} failed in {what}: {}; plog files below ~/ascend/log say more",
            self.able.name,
            self.describe_error(code)
        )))
    }

    /// An algorithm can be said where the library takes a config that has one.
    fn takes_algorithm(&self) -> bool {
        // SAFETY: the vendor's function.
        self.table.config_capability.optional().is_some_and(|ask| unsafe { ask() } > sys::CAN_TAKE_ALGORITHM)
    }

    fn config(&self, name: &str, algorithm: &str) -> Box<Config> {
        Config::new(name, if self.takes_algorithm() { algorithm } else { "" })
    }

    fn make(self: &Arc<Hccl>, comm: Comm, rank: u32, ranks: u32, child: bool, keep: &Keep) -> Arc<dyn Communicator> {
        let gate = Arc::new(Gate::new(comm as usize));
        Arc::new(HcclComm { api: self.clone(), gate, rank, ranks, child, keep: keep.clone() })
    }

    fn alone_on(&self, device: i32) -> Arc<Mutex<()>> {
        let mut making = self.making.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        making.entry(device).or_default().clone()
    }
}

/// With the version, if the runtime tells it: major * 10^7 + minor * 10^5 + patch * 10^3.
fn name(table: &sys::Table) -> String {
    let mut number = 0;
    let known = table.version_of.optional().is_some_and(|ask| {
        // SAFETY: the vendor's function; it reads a name and writes one int.
        unsafe { ask(c"hcomm".as_ptr(), &mut number) == sys::SUCCESS }
    });
    if !known || number <= 0 {
        return "HCCL".into();
    }
    format!("HCCL {}.{}.{}", number / 10_000_000, number / 100_000 % 100, number / 1000 % 100)
}

impl Api for Hccl {
    fn capabilities(&self) -> &Capabilities {
        &self.able
    }

    fn describe(&self) -> String {
        format!("{} ({})", self.able.name, self.library.path)
    }

    fn unique_id(&self) -> Result<Vec<u8>> {
        let mut id = Box::new(RootInfo([0; sys::ID_BYTES]));
        // SAFETY: the vendor's function; it writes 4108 bytes.
        let code = unsafe { self.table.get_root_info.of(&self.library)?(&mut *id) };
        self.check("HcclGetRootInfo", code)?;
        Ok(id.0.to_vec())
    }

    fn create(self: Arc<Self>, setup: Setup) -> Result<Arc<dyn Communicator>> {
        let id: [u8; sys::ID_BYTES] = setup.id.as_slice().try_into().map_err(|_| wrong_id(&self.able, &setup))?;
        let what = joining(&self.able, &setup);
        let go_on = setup.go_on.clone();
        within(setup.deadline, &what, &*go_on, move || {
            setup.runtime.set_device(setup.device)?;
            let making = self.alone_on(setup.device);
            let _alone = making.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let config = self.config(&setup.name, &setup.algorithm);
            let mut comm: Comm = std::ptr::null_mut();
            let code = match self.table.init_config.optional() {
                // SAFETY: the vendor's function; id and config live until it returns, and say their own sizes.
                Some(init) => unsafe { init(setup.ranks, &RootInfo(id), setup.rank, &*config, &mut comm) },
                // SAFETY: the vendor's function.
                None => unsafe {
                    self.table.init.of(&self.library)?(setup.ranks, &RootInfo(id), setup.rank, &mut comm)
                },
            };
            self.check("HcclCommInitRootInfo", code)?;
            let keep = Keep { device: setup.device, runtime: setup.runtime.clone() };
            Ok(self.make(comm, setup.rank, setup.ranks, false, &keep))
        })
    }

    fn describe_error(&self, code: i32) -> String {
        // SAFETY: the vendor's function; it takes any number.
        let words = self.table.get_error_string.optional().map(|get| text(unsafe { get(code) }));
        format!("{} (HcclResult {code})", words.unwrap_or_default())
    }
}

#[derive(Clone)]
struct Keep {
    device: i32,
    runtime: Arc<dyn Runtime>,
}

struct HcclComm {
    api: Arc<Hccl>,
    gate: Arc<Gate>,
    rank: u32,
    ranks: u32,
    /// Made out of another, so that none can be made out of it.
    child: bool,
    keep: Keep,
}

fn dtype(dtype: Dtype) -> Result<c_int> {
    Ok(match dtype {
        Dtype::Bytes | Dtype::I8 => sys::INT8,
        Dtype::I16 => sys::INT16,
        Dtype::I32 => sys::INT32,
        Dtype::I64 => sys::INT64,
        Dtype::F16 => sys::FP16,
        Dtype::Bf16 => sys::BFP16,
        Dtype::F32 => sys::FP32,
        other => return Err(no_type("HCCL", other)),
    })
}

fn op(op: ReduceOp) -> Result<c_int> {
    Ok(match op {
        ReduceOp::Sum => sys::SUM,
        ReduceOp::Product => sys::PROD,
        ReduceOp::Max => sys::MAX,
        ReduceOp::Min => sys::MIN,
        other => return Err(no_op("HCCL", other)),
    })
}

impl HcclComm {
    fn one(&self, call: &Call<'_>, comm: Comm, stream: *mut c_void) -> Result<(c_int, Kept)> {
        let (table, library) = (&self.api.table, &self.api.library);
        let at = |addr: usize| addr as *mut c_void;
        // SAFETY: each call below is the vendor's own declaration; the caller's addresses are memory of this device for
        // as many elements as it says, until the stream has passed the call; `comm` lives while the gate is entered.
        let code = unsafe {
            match *call {
                Call::AllReduce { send, recv, count, dtype: of, op: by } => {
                    let f = table.all_reduce.of(library)?;
                    f(at(send), at(recv), count as u64, dtype(of)?, op(by)?, comm, stream)
                }
                Call::Reduce { send, recv, count, dtype: of, op: by, root } => {
                    let f = table.reduce.of(library)?;
                    f(at(send), at(recv), count as u64, dtype(of)?, op(by)?, root, comm, stream)
                }
                Call::ReduceScatter { send, recv, count, dtype: of, op: by } => {
                    let f = table.reduce_scatter.of(library)?;
                    f(at(send), at(recv), count as u64, dtype(of)?, op(by)?, comm, stream)
                }
                Call::Broadcast { buffer, count, dtype: of, root } => {
                    table.broadcast.of(library)?(at(buffer), count as u64, dtype(of)?, root, comm, stream)
                }
                Call::AllGather { send, recv, count, dtype: of } => {
                    table.all_gather.of(library)?(at(send), at(recv), count as u64, dtype(of)?, comm, stream)
                }
                Call::Scatter { send, recv, count, dtype: of, root } => {
                    table.scatter.of(library)?(at(send), at(recv), count as u64, dtype(of)?, root, comm, stream)
                }
                Call::AllToAllV { send, recv, send_counts, recv_counts, dtype: of } => {
                    let (sent, received) = (displacements(send_counts), displacements(recv_counts));
                    let kept = Box::new([send_counts.to_vec(), sent, recv_counts.to_vec(), received]);
                    let list = |which: usize| kept[which].as_ptr().cast::<c_void>();
                    let f = table.all_to_all_v.of(library)?;
                    let (from, to, of) = (at(send), at(recv), dtype(of)?);
                    let code = f(from, list(0), list(1), of, to, list(2), list(3), of, comm, stream);
                    return Ok((code, Some(kept)));
                }
                Call::Exchange(messages) => return self.exchange(messages, comm, stream),
                Call::Gather { .. } | Call::Copy { .. } => return Err(no_call(&self.api.able, call)),
            }
        };
        Ok((code, None))
    }

    /// A send waits on the stream for its receive, so several messages go as one batch; a library without batches gets
    /// them one by one in an order that cannot lock up.
    fn exchange(&self, messages: &[Message], comm: Comm, stream: *mut c_void) -> Result<(c_int, Kept)> {
        let (table, library) = (&self.api.table, &self.api.library);
        if let (Some(batch), true) = (table.batch_send_recv.optional(), messages.len() > 1) {
            let item = |message: &Message| SendRecvItem {
                kind: if message.sends { sys::SEND } else { sys::RECV },
                buffer: message.addr as *mut c_void,
                count: message.bytes as u64,
                dtype: sys::INT8,
                peer: message.peer,
            };
            let mut items: Box<Vec<SendRecvItem>> = Box::new(messages.iter().map(item).collect());
            // SAFETY: as in `one`; the list stays where it is until the stream has passed the call.
            let code = unsafe { batch(items.as_mut_ptr(), items.len() as u32, comm, stream) };
            return Ok((code, Some(items)));
        }
        let (send, recv) = (table.send.of(library)?, table.recv.of(library)?);
        for message in without_deadlock(messages, self.rank, self.ranks) {
            let call = if message.sends { send } else { recv };
            // SAFETY: as in `one`.
            let code = unsafe {
                call(message.addr as *mut c_void, message.bytes as u64, sys::INT8, message.peer, comm, stream)
            };
            if code != sys::SUCCESS {
                return Ok((code, None));
            }
        }
        Ok((sys::SUCCESS, None))
    }

    /// Asks the library to destroy it until it is no longer busy: the only end that HCCL has. It makes operations that
    /// are stuck fail, where it can.
    fn end(&self, why: &'static str, grace: Duration, deadline: Duration) -> Result<()> {
        let Some(comm) = self.gate.shut(why, grace) else { return Ok(()) };
        let destroy = self.api.table.destroy.of(&self.api.library)?;
        let (api, keep) = (self.api.clone(), self.keep.clone());
        // The thread itself ends a little before it would be left behind.
        let end = Instant::now() + deadline;
        within(deadline + GRACE, "the end of an HCCL communicator", &always, move || {
            keep.runtime.set_device(keep.device)?;
            loop {
                // SAFETY: the gate is shut: the last use, once the library accepts it.
                let code = unsafe { destroy(comm as Comm) };
                if code != sys::AGAIN || Instant::now() >= end {
                    return api.check("HcclCommDestroy", code);
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        })
    }
}

impl Communicator for HcclComm {
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
        self.gate.enter(call.name(), |comm| {
            let (code, kept) = self.one(call, comm as Comm, stream.0 as *mut c_void)?;
            self.api.check(call.name(), code).map(|()| kept)
        })
    }

    fn group_start(&self) -> Result<()> {
        Ok(())
    }

    fn group_end(&self) -> Result<()> {
        Ok(())
    }

    /// The library wants the members in ascending order, and no communicator made out of one that was made so.
    fn can_split(&self, members: &[u32]) -> bool {
        self.api.able.split && !self.child && members.is_sorted()
    }

    fn split(&self, split: &Split) -> Result<Option<Arc<dyn Communicator>>> {
        let make = self.api.table.create_sub.of(&self.api.library)?;
        if !self.can_split(&split.members) {
            return Err(no_split(&self.api.able));
        }
        let (api, gate, keep) = (self.api.clone(), self.gate.clone(), self.keep.clone());
        let (split, rank) = (split.clone(), self.rank);
        let what = format!("{}: to make a communicator of {} ranks", api.able.name, split.members.len());
        let go_on = split.go_on.clone();
        within(split.deadline, &what, &*go_on, move || {
            keep.runtime.set_device(keep.device)?;
            let making = api.alone_on(keep.device);
            let _alone = making.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            gate.enter("split", |parent| {
                let Split { mut members, number, name, algorithm, .. } = split;
                let (count, place) = (members.len() as u32, members.iter().position(|member| *member == rank));
                let mut config = api.config(&name, &algorithm);
                let (mut parent, mut comm) = (parent as Comm, std::ptr::null_mut());
                let (list, number, own) = match place {
                    Some(place) => (members.as_mut_ptr(), u64::from(number), place as u32),
                    None => (std::ptr::null_mut(), u64::from(u32::MAX), 0),
                };
                // SAFETY: the vendor's function; list and config live until it returns.
                let code = unsafe { make(&mut parent, count, list, number, own, &mut *config, &mut comm) };
                api.check("HcclCreateSubCommConfig", code)?;
                Ok(place.map(|place| api.make(comm, place as u32, count, true, &keep)))
            })
        })
    }

    fn shrink(&self, _: &[u32], _: Duration, _: GoOn, _: &str) -> Result<Arc<dyn Communicator>> {
        Err(no_split(&self.api.able))
    }

    fn poll(&self) -> Result<()> {
        self.gate.enter("poll", |comm| {
            let Some(get) = self.api.table.get_async_error.optional() else { return Ok(()) };
            let mut state = sys::SUCCESS;
            // SAFETY: the vendor's function; it writes one int.
            match unsafe { get(comm as Comm, &mut state) } {
                sys::NOT_SUPPORT => Ok(()), // this chip has no such query
                sys::SUCCESS => self.api.check("an operation that was launched earlier", state),
                code => self.api.check("HcclGetCommAsyncError", code),
            }
        })
    }

    fn abort(&self) -> Result<()> {
        self.end("aborted", GRACE, Duration::from_secs(2))
    }

    fn close(&self, deadline: Duration) -> Result<()> {
        self.end("closed", deadline, deadline)
    }
}

impl Drop for HcclComm {
    /// Only of one that was neither closed nor aborted.
    fn drop(&mut self) {
        if let Err(error) = self.abort() {
            log::warn!("{error}");
        }
    }
}
