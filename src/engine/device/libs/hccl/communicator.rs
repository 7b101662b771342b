//! Communicators of HCCL, which consists of two libraries in CANN 9 and of one in older versions. HCCL's groups are not
//! used, because a group must not mix kinds and must not contain a batch of messages. HCCL has no abort and no gather:
//! see `lowering` and docs/internals/vendors.md.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::declarations as sys;
use super::declarations::{Comm, Config, RootInfo, SendRecvItem};
use crate::algorithms::Algorithm;
use crate::engine::device::communicator::*;
use crate::engine::device::libs::common::*;
use crate::engine::device::lowering::{Capabilities, Double, Ops};
use crate::engine::device::rules;
use crate::engine::device::runtime::Stream;
use crate::engine::loader::{Hints, Known, Library};
use crate::error::Result;
use crate::select::Policy;
use crate::select::rules::AlgorithmChoice;
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

/// The documented values for A2 and A3. They include no unsigned integers and no 64-bit floats; PROD supports neither
/// int16 nor bfloat16.
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
    /// A lock for each device: communicators of the same device must not be made concurrently, but communicators of
    /// different devices may.
    making: Mutex<HashMap<i32, Arc<Mutex<()>>>>,
}

/// The capabilities of a current version, for documents and tests, which have no library.
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
            missing: library.missing(sys::Table::NAMES),
            ..capabilities()
        };
        Ok(Arc::new(Hccl { library, table, able, making: Mutex::default() }))
    }

    fn check(&self, what: &str, code: c_int) -> Result<()> {
        if code == sys::SUCCESS {
            return Ok(());
        }
        Err(failure(self, what, code, "; plog files below ~/ascend/log say more"))
    }

    /// Whether the library's config has a field for the algorithm.
    fn takes_algorithm(&self) -> bool {
        // SAFETY: the vendor's function.
        self.table.config_capability.optional().is_some_and(|ask| unsafe { ask() } > sys::CAN_TAKE_ALGORITHM)
    }

    fn config(&self, name: &str, algorithm: &str) -> Box<Config> {
        Config::new(name, if self.takes_algorithm() { algorithm } else { "" })
    }

    fn alone_on(&self, device: i32) -> Arc<Mutex<()>> {
        let mut making = self.making.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        making.entry(device).or_default().clone()
    }
}

/// The value of the config's algorithm field, if the policy names one algorithm for every operation and size; otherwise
/// "".
fn algorithm_word(policy: &Policy) -> &'static str {
    match rules::named_for_all(policy) {
        Some(AlgorithmChoice::Hosts { algorithm: Algorithm::Ring, .. }) => "level0:NA;level1:ring",
        Some(AlgorithmChoice::Hosts { algorithm: Algorithm::Halving, .. }) => "level0:NA;level1:H-D_R",
        _ => "",
    }
}

/// The library's name, with its version if the runtime reports it as major * 10^7 + minor * 10^5 + patch * 10^3.
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

    fn algorithm(&self, policy: &Policy) -> &'static str {
        algorithm_word(policy)
    }

    fn unique_id(&self) -> Result<Vec<u8>> {
        let mut id = Box::new(RootInfo([0; sys::ID_BYTES]));
        // SAFETY: the vendor's function; it writes 4108 bytes to `id`.
        let code = unsafe { self.table.get_root_info.of(&self.library)?(&mut *id) };
        self.check("HcclGetRootInfo", code)?;
        Ok(id.0.to_vec())
    }

    fn create(self: Arc<Self>, setup: Setup) -> Result<Arc<dyn Communicator>> {
        join(&self.able.clone(), setup, move |setup, id: [u8; sys::ID_BYTES]| {
            let making = self.alone_on(setup.device);
            let _alone = making.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let config = self.config(&setup.name, &setup.algorithm);
            let Setup { rank, ranks, device, runtime, .. } = setup;
            let mut comm: Comm = std::ptr::null_mut();
            let code = match self.table.init_config.optional() {
                // SAFETY: the vendor's function. The id and the config live until it returns, and the config contains
                // its own size.
                Some(init) => unsafe { init(ranks, &RootInfo(id), rank, &*config, &mut comm) },
                // SAFETY: the vendor's function.
                None => unsafe { self.table.init.of(&self.library)?(ranks, &RootInfo(id), rank, &mut comm) },
            };
            self.check("HcclCommInitRootInfo", code)?;
            let (guard, own) = (HandleGuard::new(comm as usize), Own { child: false });
            Ok(Arc::new(LibraryComm(Arc::new(Joined { api: self.clone(), guard, rank, ranks, device, runtime, own }))))
        })
    }

    fn describe_error(&self, code: i32) -> String {
        // SAFETY: the vendor's function; it takes any number.
        let words = self.table.get_error_string.optional().map(|get| text(unsafe { get(code) }));
        format!("{} (HcclResult {code})", words.unwrap_or_default())
    }
}

pub struct Own {
    /// Whether this communicator was split off another one. The library cannot split such a communicator again.
    child: bool,
}

const NUMBERS: Numbers = Numbers {
    name: "HCCL",
    types: &[
        (Dtype::Bytes, sys::INT8),
        (Dtype::I8, sys::INT8),
        (Dtype::I16, sys::INT16),
        (Dtype::I32, sys::INT32),
        (Dtype::I64, sys::INT64),
        (Dtype::F16, sys::FP16),
        (Dtype::Bf16, sys::BFP16),
        (Dtype::F32, sys::FP32),
    ],
    ops: &[
        (ReduceOp::Sum, sys::SUM),
        (ReduceOp::Product, sys::PROD),
        (ReduceOp::Max, sys::MAX),
        (ReduceOp::Min, sys::MIN),
    ],
};

impl Hccl {
    fn all_to_all(
        &self,
        Arguments { send, recv, dtype, .. }: &Arguments,
        (send_counts, recv_counts): (&[u64], &[u64]),
        comm: Comm,
        stream: *mut c_void,
    ) -> Result<(c_int, Kept)> {
        let (sent, received) = (displacements(send_counts), displacements(recv_counts));
        let kept = Box::new([send_counts.to_vec(), sent, recv_counts.to_vec(), received]);
        let list = |which: usize| kept[which].as_ptr().cast::<c_void>();
        let f = self.table.all_to_all_v.of(&self.library)?;
        // SAFETY: as in `put`; the lists do not move or change until the stream has completed the call.
        let code = unsafe { f(*send, list(0), list(1), *dtype, *recv, list(2), list(3), *dtype, comm, stream) };
        Ok((code, Some(kept)))
    }

    /// On the stream, a send waits for its receive, so several messages are passed to the library as one batch. If the
    /// library has no batches, the messages are passed to it one by one, in an order that cannot deadlock.
    fn exchange(
        &self,
        own: &Joined<Hccl>,
        messages: &[Message],
        comm: Comm,
        stream: *mut c_void,
    ) -> Result<(c_int, Kept)> {
        let (table, library) = (&self.table, &self.library);
        if let (Some(batch), true) = (table.batch_send_recv.optional(), messages.len() > 1) {
            let item = |message: &Message| SendRecvItem {
                kind: if message.sends { sys::SEND } else { sys::RECV },
                buffer: message.addr as *mut c_void,
                count: message.bytes as u64,
                dtype: sys::INT8,
                peer: message.peer,
            };
            let mut items: Box<Vec<SendRecvItem>> = Box::new(messages.iter().map(item).collect());
            // SAFETY: as in `put`; the list does not move or change until the stream has completed the call.
            let code = unsafe { batch(items.as_mut_ptr(), items.len() as u32, comm, stream) };
            return Ok((code, Some(items)));
        }
        let (send, recv) = (table.send.of(library)?, table.recv.of(library)?);
        for message in without_deadlock(messages, own.rank, own.ranks) {
            let call = if message.sends { send } else { recv };
            // SAFETY: as in `put`.
            let code = unsafe {
                call(message.addr as *mut c_void, message.bytes as u64, sys::INT8, message.peer, comm, stream)
            };
            if code != sys::SUCCESS {
                return Ok((code, None));
            }
        }
        Ok((sys::SUCCESS, None))
    }

    /// Calls the library's destroy function until the function no longer reports that the communicator is busy. HCCL
    /// has no other way to end a communicator. If the library can make stuck operations fail, it does so here.
    fn destroy(comm: &Arc<Joined<Hccl>>, why: &'static str, grace: Duration, deadline: Duration) -> Result<()> {
        comm.end((why, grace), ("the end of an HCCL communicator", deadline + GRACE), move |own, handle| {
            let destroy = own.api.table.destroy.of(&own.api.library)?;
            // Earlier than the time at which `comm.end` gives up and leaves this thread behind.
            let until = Instant::now() + deadline;
            loop {
                // SAFETY: the guard is shut, and this is the last use of the handle when the library accepts the call.
                let code = unsafe { destroy(handle as Comm) };
                if code != sys::AGAIN || Instant::now() >= until {
                    return own.api.check("HcclCommDestroy", code);
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        })
    }

    /// Does the work of `split`. Runs on a new thread, which has selected the device of `own`.
    fn part(own: &Arc<Joined<Hccl>>, split: Split) -> Result<Option<Arc<dyn Communicator>>> {
        let (api, device) = (&own.api, own.device);
        let make = api.table.create_sub.of(&api.library)?;
        let making = api.alone_on(device);
        let _alone = making.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        own.guard.enter("split", |parent| {
            let Split { mut members, number, name, algorithm, .. } = split;
            let (ranks, place) = (members.len() as u32, members.iter().position(|member| *member == own.rank));
            let mut config = api.config(&name, &algorithm);
            let (mut parent, mut comm) = (parent as Comm, std::ptr::null_mut());
            let (list, number, rank) = match place {
                Some(place) => (members.as_mut_ptr(), u64::from(number), place as u32),
                None => (std::ptr::null_mut(), u64::from(u32::MAX), 0),
            };
            // SAFETY: the vendor's function; the list and the config live until it returns.
            let code = unsafe { make(&mut parent, ranks, list, number, rank, &mut *config, &mut comm) };
            api.check("HcclCreateSubCommConfig", code)?;
            let (api, runtime, guard) = (api.clone(), own.runtime.clone(), HandleGuard::new(comm as usize));
            let joined = Joined { api, guard, rank, ranks, device, runtime, own: Own { child: true } };
            Ok(place.map(|_| Arc::new(LibraryComm(Arc::new(joined))) as Arc<dyn Communicator>))
        })
    }
}

impl Calls for Hccl {
    type Own = Own;

    fn put(&self, own: &Joined<Hccl>, handle: usize, call: &Call<'_>, _: usize, stream: Stream) -> Result<Kept> {
        let (table, library, comm, stream) = (&self.table, &self.library, handle as Comm, stream.0 as *mut c_void);
        if let Call::Exchange(messages) = call {
            let (code, kept) = self.exchange(own, messages, comm, stream)?;
            return self.check(call.name(), code).map(|()| kept);
        }
        let arguments = NUMBERS.arguments(call, None, &self.able)?;
        let Arguments { send, recv, count, dtype, op, root } = arguments;
        let count = count as u64;
        // SAFETY: each function below is declared as the vendor declares it. The caller's addresses point to memory of
        // this device, with as many elements as the call says, until the stream has completed the call. `comm` lives
        // while the guard is entered.
        let code = unsafe {
            match *call {
                Call::AllReduce { .. } => table.all_reduce.of(library)?(send, recv, count, dtype, op, comm, stream),
                Call::Reduce { .. } => table.reduce.of(library)?(send, recv, count, dtype, op, root, comm, stream),
                Call::ReduceScatter { .. } => {
                    table.reduce_scatter.of(library)?(send, recv, count, dtype, op, comm, stream)
                }
                Call::Broadcast { .. } => table.broadcast.of(library)?(recv, count, dtype, root, comm, stream),
                Call::AllGather { .. } => table.all_gather.of(library)?(send, recv, count, dtype, comm, stream),
                Call::Scatter { .. } => table.scatter.of(library)?(send, recv, count, dtype, root, comm, stream),
                Call::AllToAllV { send_counts, recv_counts, .. } => {
                    let (code, kept) = self.all_to_all(&arguments, (send_counts, recv_counts), comm, stream)?;
                    return self.check(call.name(), code).map(|()| kept);
                }
                _ => return Err(no_call(&self.able, call)),
            }
        };
        self.check(call.name(), code).map(|()| None)
    }

    fn group_start(&self) -> Result<()> {
        Ok(())
    }

    fn group_end(&self, _: &Joined<Hccl>) -> Result<()> {
        Ok(())
    }

    /// The library requires that members are in ascending order, and that the parent itself was not made by a split.
    fn can_split(&self, own: &Joined<Hccl>, members: &[u32]) -> bool {
        self.able.split && !own.own.child && members.is_sorted()
    }

    fn split(&self, own: &Arc<Joined<Hccl>>, split: &Split) -> Result<Option<Arc<dyn Communicator>>> {
        self.table.create_sub.of(&self.library)?; // fails with an error that names the function, if it is missing
        if !self.can_split(own, &split.members) {
            return Err(no_split(&self.able));
        }
        let what = format!("{}: to make a communicator of {} ranks", self.able.name, split.members.len());
        let (own, split, go_on) = (Arc::clone(own), split.clone(), split.go_on.clone());
        within(split.deadline, &what, &*go_on, move || {
            own.runtime.set_device(own.device)?;
            Hccl::part(&own, split)
        })
    }

    fn poll(&self, handle: usize) -> Result<()> {
        let Some(get) = self.table.get_async_error.optional() else { return Ok(()) };
        let mut state = sys::SUCCESS;
        // SAFETY: the vendor's function; it writes one int.
        match unsafe { get(handle as Comm, &mut state) } {
            sys::NOT_SUPPORT => Ok(()), // this chip does not support the query
            sys::SUCCESS => self.check("an operation that was launched earlier", state),
            code => self.check("HcclGetCommAsyncError", code),
        }
    }

    fn abort(comm: &Arc<Joined<Hccl>>) -> Result<()> {
        Hccl::destroy(comm, "aborted", GRACE, Duration::from_secs(2))
    }

    fn close(comm: &Arc<Joined<Hccl>>, deadline: Duration) -> Result<()> {
        Hccl::destroy(comm, "closed", deadline, deadline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::rules::Rules;

    #[test]
    fn one_algorithm_for_everything_is_a_word_of_the_config() {
        let of = |rules: &str| algorithm_word(&Policy { rules: Rules::parse(rules).unwrap(), ..Policy::default() });
        assert_eq!(of("*:0-=ring"), "level0:NA;level1:ring");
        assert_eq!(of("*:0-=halving_doubling"), "level0:NA;level1:H-D_R");
        for rules in ["", "*:0-1KiB=ring", "all_reduce:0-=ring", "*:0-=start"] {
            assert_eq!(of(rules), "");
        }
    }
}
