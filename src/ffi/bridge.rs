//! The contract between C++ and Rust: the only cxx bridge. No logic lives here, and no panic crosses it.
//!
//! C++ -> Rust: `connect` makes a group, `Group::issue` starts an operation, `Op` answers for it.
//! Rust -> C++: `Store` (c10d's key-value store), `Completion` (what the shim wants to do when an operation starts and
//! ends), `Link` (messages to other hosts), `check_interrupt` (Python's pending signals), `log_line` (Python's logging).
//!
//! Errors cross as text whose first letter is `Error::code` (V invalid, T timeout, D rank failed, M mismatch, A
//! aborted, P interrupted by Python, S system, B bug); `cpp/work/work.cpp` strips it and raises the matching exception.

use std::sync::Arc;
use std::time::Duration;

use super::callbacks::{CompletionHook, LinkHook, PythonHook, PythonLog, StoreHook};
use super::devices::{RustCall, RustDevices, RustRetired};
use super::simulate::{algorithms, predict, program};
use crate::config::{Config, Settings};
use crate::error::{Error, Result, contained};
use crate::group;
use crate::group::{Group, Op};
use crate::op::overlap::Reach;
use crate::types::{CallNote, Dtype, Kind, ReduceOp, Request, Span, Strided};

#[allow(clippy::too_many_arguments)] // one parameter a list of the request: cxx cannot pass them inside a struct
#[cxx::bridge(namespace = "sagellm")]
pub mod ffi {
    /// A contiguous piece of caller memory.
    #[derive(Clone, Copy)]
    struct Piece {
        addr: usize,
        bytes: usize,
    }

    /// `types::Strided`.
    struct Strided {
        addr: usize,
        run: usize,
        counts: [usize; 4],
        strides: [usize; 4],
        written: bool,
    }

    /// `types::Request` without its lists; the numbers are the discriminants in `types.rs`.
    struct Call {
        kind: u8,
        dtype: u8,
        op: u8,
        /// The factor of PREMUL_SUM.
        factor: f64,
        /// Root, or the peer of a send or receive (4294967295: from anyone).
        root: u32,
        tag: u32,
        /// Negative: the group's timeout.
        timeout_ms: i64,
        sync: bool,
        /// `Completion::prepare` must run before the inputs are read, `Completion::store_back` before the end is told.
        staged: bool,
        /// `types::CallNote`.
        counts: bool,
        tensors: u32,
        element: u8,
        site: u32,
        host_staged: bool,
    }

    /// An operation that the core only counts: a delegate's, or one that the shim makes of several.
    struct Foreign {
        kind: u8,
        composed: bool,
        root: u32,
        tag: u32,
        read: u64,
        written: u64,
        tensors: u32,
        element: u8,
        site: u32,
        host_staged: bool,
    }

    /// `select::cost::Model`: seconds, and seconds per byte.
    struct CostModel {
        host_alpha: f64,
        host_overhead: f64,
        host_beta: f64,
        network_alpha: f64,
        network_overhead: f64,
        network_beta: f64,
        gamma: f64,
        ranks_per_host: usize,
    }

    /// The fastest that one algorithm can do.
    struct Prediction {
        seconds: f64,
        segments: usize,
    }

    /// One message of one rank's schedule.
    struct ProgramLine {
        step: usize,
        sends: bool,
        peer: usize,
        /// Part numbers in the order of the message.
        parts: Vec<usize>,
        /// For a receive: "copy", "reduce_after", "reduce_before" or "in_rank_order".
        how: String,
    }

    /// `engine::device::DeviceRequest`: one call on a device. The numbers are as in `Call`.
    struct DeviceRequest<'a> {
        name: &'a str,
        kind: u8,
        dtype: u8,
        op: u8,
        factor: f64,
        even: bool,
        plain: bool,
        root: u32,
        tag: u32,
        read: u64,
        written: u64,
        counts: bool,
        tensors: u32,
        element: u8,
        site: u32,
    }

    /// `engine::device::Terms`: how the calls of one launch are made. Timeouts of 0 are none.
    struct DeviceTerms {
        device: i32,
        region: bool,
        capturing: bool,
        timeout_ms: u64,
        join_timeout_ms: u64,
    }

    /// Calls that were checked and have their number.
    struct DeviceBegun {
        call: Box<RustCall>,
        number: u64,
        /// One for each call.
        recipes: Vec<DeviceRecipe>,
    }

    /// Where the memory of one call lies: so many of the pieces that come with it, those that are sent first.
    struct DevicePlaced {
        /// Where the factor of the library's own PREMUL_SUM lies on the device, or 0.
        factor: usize,
        sends: usize,
        receives: usize,
    }

    /// `recipe::Local`: what the shim does to a tensor beside the library's call.
    enum LocalStep {
        /// To `dtype`.
        Cast,
        /// Times `factor`.
        Scale,
        /// Through `count`.
        Divide,
        /// The blocks of all ranks, combined by `op`.
        Fold,
    }

    struct Local {
        step: LocalStep,
        dtype: u8,
        op: u8,
        factor: f64,
        count: usize,
    }

    /// `lowering::Recipe`, as far as the shim has to know it.
    struct DeviceRecipe {
        /// The kind that the library is asked for, and the element type that it is given (for what is only moved, 0).
        kind: u8,
        dtype: u8,
        flat: bool,
        apart: bool,
        spoils: bool,
        /// It is given the factor of its own PREMUL_SUM.
        premul: bool,
        /// What is done to the tensors before the library's call, and after it.
        before: Vec<Local>,
        after: Vec<Local>,
    }

    /// What a group is made from.
    struct Setup {
        rank: u32,
        size: u32,
        timeout_ms: u64,
        /// Name for messages.
        name: String,
        /// Why this group must not use shared memory, or empty. Tests and the option `engine="delegate"` set it.
        delegate_reason: String,
        /// The option `delegate`.
        delegate: String,
        /// The option `algorithm`, in the syntax of `select/rules.rs`.
        algorithm: String,
        /// `config::Settings`.
        fusion: bool,
        strict: bool,
    }

    extern "Rust" {
        type RustGroup;
        type RustOp;
        type RustForeign;
        type RustDevices;
        type RustCall;
        type RustRetired;

        /// Meets the other ranks through the store and builds the engine. Blocks until all came, or the timeout.
        fn connect(setup: &Setup, store: SharedPtr<Store>) -> Result<Box<RustGroup>>;

        /// Why the whole group must be served by a delegate (ranks on several hosts, say), or empty.
        fn delegate_reason(self: &RustGroup) -> String;
        /// Equal on all ranks and of no other attempt to make a group; zeros for one rank, or too many.
        fn id(self: &RustGroup) -> String;
        /// True when ranks live on several hosts and shared memory serves the inside of each: `open_link` must follow,
        /// and point-to-point calls go to a delegate.
        fn spans_hosts(self: &RustGroup) -> bool;
        fn open_link(self: &RustGroup, link: SharedPtr<Link>) -> Result<()>;
        /// Starts one operation; never waits for a peer. Errors here used no sequence number and sent nothing.
        /// `completion` may be null. Lists as in `types::Request`.
        fn issue(
            self: &RustGroup,
            call: &Call,
            inputs: &[Piece],
            outputs: &[Piece],
            in_blocks: &[usize],
            out_blocks: &[usize],
            also_touched: &[Strided],
            completion: SharedPtr<Completion>,
        ) -> Result<Box<RustOp>>;
        /// Starts one operation and finishes it on this thread (`call.sync`); the cheapest path.
        /// On any error the group is left in the state the error names; the caller's memory is no longer used.
        fn run(
            self: &RustGroup,
            call: &Call,
            inputs: &[Piece],
            outputs: &[Piece],
            in_blocks: &[usize],
            out_blocks: &[usize],
            also_touched: &[Strided],
            completion: SharedPtr<Completion>,
        ) -> Result<()>;
        /// True when one of two operations that touch this memory must wait for the other: see `Reach::meets`.
        fn memory_meets(one: &[Strided], other: &[Strided]) -> bool;
        /// In a group over several hosts: waits until no collective that was issued before touches `memory`, which a message
        /// that a delegate carries is about to read or (`writes`) write.
        fn wait_for_memory(self: &RustGroup, memory: &Piece, writes: bool) -> Result<()>;
        /// Rank 0 learns who is missing; the others wait for rank 0. Uses no sequence number, poisons nothing.
        fn monitored_barrier(self: &RustGroup, timeout_ms: i64, wait_all_ranks: bool) -> Result<()>;
        /// Number of the last collective issued (0 before the first).
        fn sequence(self: &RustGroup) -> u64;
        fn set_timeout(self: &RustGroup, timeout_ms: u64);
        /// Fails everything pending here and on the peers.
        fn abort(self: &RustGroup, reason: &str);
        /// Leaves the group in order: pending operations fail, peers still receive what was published.
        fn shutdown(self: &RustGroup);
        /// The group's fault with its code letter, or empty.
        fn fault(self: &RustGroup) -> String;
        /// Which engine serves it and why, for logs: one line.
        fn describe(self: &RustGroup) -> Result<String>;
        /// How an operation would travel, as `select::explain::Explanation::lines`. `kind` and `dtype` by their numbers.
        fn explain(self: &RustGroup, kind: u8, bytes: u64, dtype: u8) -> Result<String>;
        /// How the collective with this number travels or travelled, and what was recorded.
        fn explain_number(self: &RustGroup, number: u64) -> Result<String>;
        /// Counts and times as JSON (`stats/export.rs`).
        fn stats(self: &RustGroup) -> Result<String>;
        /// The last operations as JSON, oldest first.
        fn records(self: &RustGroup) -> Result<String>;
        fn reset_stats(self: &RustGroup);
        /// Which ranks of the default group its ranks are, for records.
        fn set_members(self: &RustGroup, members: &[u32]);
        /// Counts an operation from now until `ended`; dropped before, it counts as failed.
        fn foreign(self: &RustGroup, call: &Foreign) -> Result<Box<RustForeign>>;
        /// `timed`: this is the moment it ended. Any thread; a second call does nothing.
        fn ended(self: &RustForeign, well: bool, timed: bool);

        /// True when the operation has ended, well or not.
        fn is_done(self: &RustOp) -> bool;
        /// Negative: until the operation's own deadline. Ok: it ended well.
        fn wait(self: &RustOp, timeout_ms: i64) -> Result<()>;
        /// The error with its code letter, or empty.
        fn error(self: &RustOp) -> String;
        /// Sequence number within the group (collectives) or the ordered pair (point to point).
        fn number(self: &RustOp) -> u64;
        /// The rank a receive took from, or -1.
        fn source(self: &RustOp) -> i32;
        /// Nanoseconds from issue to end, 0 while it runs.
        fn duration_ns(self: &RustOp) -> u64;
        fn timeout_ms(self: &RustOp) -> u64;
        /// How it travels or travelled, and what was recorded, as `RustGroup::explain`.
        fn explain(self: &RustOp) -> String;
        /// Cancels a pending operation; a collective poisons its group.
        fn cancel(self: &RustOp);

        /// Opens a vendor's libraries for tensors on devices of this type (torch's name); `vendor` is "auto" or a name. An
        /// error says why that cannot be. `library` may be empty, `folders` are looked into.
        fn open_devices(
            self: &RustGroup,
            device_type: &str,
            vendor: &str,
            library: &str,
            folders: &[String],
        ) -> Result<Box<RustDevices>>;
        /// The library, its version and file.
        fn describe(self: &RustDevices) -> String;
        /// Makes the communicator of all ranks for a device now; returns when all are there.
        fn connect(self: &RustDevices, device: i32, timeout_ms: u64, exchange: &IdExchange) -> Result<()>;
        /// Checks and lowers calls that are one launch, and takes their numbers; an error sent nothing.
        /// Waits for other ranks only where it makes their communicator.
        fn begin(
            self: &RustDevices,
            calls: &[DeviceRequest],
            terms: &DeviceTerms,
            exchange: &IdExchange,
        ) -> Result<DeviceBegun>;
        /// Something that waits for all earlier calls on a device, to be watched as a call is.
        fn behind(self: &RustDevices, device: i32, timeout_ms: u64) -> Box<RustCall>;
        /// Whether what is put on a raw stream is being captured.
        fn capturing(self: &RustDevices, device: i32, stream: usize) -> Result<bool>;
        /// The engine's own raw stream of a lane, behind a raw event; `told` are events of `mark` that nobody waits for any
        /// more.
        fn stream_behind(self: &RustDevices, device: i32, lane: i32, event: usize, told: &[usize]) -> Result<usize>;
        /// A raw event behind all that is on a raw stream now.
        fn mark(self: &RustDevices, device: i32, stream: usize) -> Result<usize>;
        /// Whether the library can make the communicator of these ranks out of that of all.
        fn can_split(self: &RustDevices, device: i32, members: &[u32]) -> bool;
        /// Makes it, for the group of those ranks; all ranks of this one call at once. A rank that is a member of no new
        /// group (`is_member` false) names itself as `child`, and members as on some rank that is.
        fn split(
            self: &RustDevices,
            child: &RustDevices,
            is_member: bool,
            device: i32,
            members: &[u32],
            timeout_ms: u64,
        ) -> Result<()>;
        /// Takes the communicator of all ranks out of use; it ends with what this returns. `drained`: nothing is under way.
        fn retire(self: &RustDevices, device: i32, drained: bool) -> Box<RustRetired>;
        /// Unblocks whatever hangs; nothing can be issued afterwards.
        fn abort(self: &RustDevices);
        /// Leaves with the others; false where a signal handler raised meanwhile. `drained` as above.
        fn close(self: &RustDevices, timeout_ms: u64, drained: bool) -> bool;

        /// Puts the calls on a raw stream, as one launch; `pieces` are those of all of them. What the library was given
        /// stays until this is dropped.
        fn launch(self: &RustCall, placed: &[DevicePlaced], pieces: &[Piece], stream: usize) -> Result<()>;
        /// Until `poll` with what this returns, questions of this thread to the device break no capture of another one.
        fn before_poll(self: &RustCall) -> Result<u32>;
        /// Why they will not end, or ended badly, with its code letter; empty while they run and when they ended well.
        /// `passed`: the device has come past them.
        fn poll(self: &RustCall, passed: bool, mode: u32) -> String;
        /// Tells the statistics. `timed`: this is the moment of the end.
        fn ended(self: &RustCall, well: bool, timed: bool);
        /// How each of the calls travels, as `select::explain::Explanation::lines`.
        fn explain(self: &RustCall) -> Vec<String>;

        /// Whether the library can leave ranks out that do not call.
        fn can_shrink(self: &RustRetired) -> bool;
        /// Aborts what is under way, and makes the communicator of all ranks but `excluded`, which do not call.
        fn shrink(self: &RustRetired, child: &RustDevices, excluded: &[u32], timeout_ms: u64) -> Result<()>;

        /// Highest level that is logged: 0 off, 1 error, 2 warn, 3 info, 4 debug, 5 trace.
        fn set_log_level(level: u8);
        /// Facts about this machine as `name<TAB>value` lines (cores, quota, kernel, memory limits).
        fn doctor() -> String;
        /// As `RustGroup::explain` for a group that is not there: `ranks` ranks of this host, with the rules of `algorithm`
        /// and of the environment, and the table on disk.
        fn explain_without_group(kind: u8, bytes: u64, dtype: u8, ranks: u32, algorithm: &str) -> Result<String>;
        /// All choices such a group would make, as `select::explain::table_lines`.
        fn table_without_group(ranks: u32, algorithm: &str) -> Result<String>;
        /// Whether a tensor of a list on a device is packed with others (`engine::vendor::packs`).
        fn device_packs(bytes: usize) -> bool;
        /// Writes a decision table for `ranks` ranks on this machine; `lines` as in `select/table.rs`. Its path.
        fn save_table(ranks: u32, made: &str, lines: &str) -> Result<String>;
        /// Names of the algorithms that have a schedule for a kind of collective.
        fn algorithms(kind: &str) -> Result<Vec<String>>;
        /// Predicted times of one algorithm, one per size in bytes.
        fn predict(
            kind: &str,
            algorithm: &str,
            ranks: usize,
            sizes: &[f64],
            model: &CostModel,
        ) -> Result<Vec<Prediction>>;
        /// The messages of one rank, step by step; `parts` is set to the number of parts of the vector.
        fn program(
            kind: &str,
            algorithm: &str,
            ranks: usize,
            segments: usize,
            rank: usize,
            parts: &mut usize,
        ) -> Result<Vec<ProgramLine>>;
        /// Stops this process's threads of ours; called once, from atexit, with the GIL released.
        fn at_exit();
    }

    // SAFETY: the functions below take references and slices that live for the call, throw only where they return a
    // Result, and may be called from any thread (cpp/host/host.hpp says so).
    unsafe extern "C++" {
        include!("host/host.hpp");

        type Store;
        fn set(self: &Store, key: &str, value: &[u8]) -> Result<()>;
        /// Does not wait: false when the key is not there.
        fn try_get(self: &Store, key: &str, value: &mut Vec<u8>) -> Result<bool>;
        fn add(self: &Store, key: &str, by: i64) -> Result<i64>;

        type IdExchange;
        /// Hands an id from rank `from` to rank `to`, or from rank 0 to all where both are negative.
        fn share(self: &IdExchange, id: &mut [u8], from: i32, to: i32) -> Result<()>;
        /// A connection to the group's store that nobody else uses.
        fn store(self: &IdExchange) -> Result<SharedPtr<Store>>;

        type Link;
        /// Starts to receive at most `bytes` at `to` from a rank, under a tag. The memory stays valid until the transfer is
        /// dropped.
        unsafe fn receive(self: &Link, peer: u32, tag: u32, to: *mut u8, bytes: usize) -> Result<UniquePtr<InFlight>>;
        /// Starts to send `bytes` at `from`; as above.
        unsafe fn send(self: &Link, peer: u32, tag: u32, from: *mut u8, bytes: usize) -> Result<UniquePtr<InFlight>>;
        /// Breaks all connections, so that every wait on them ends.
        fn cut(self: &Link);

        type InFlight;
        /// Waits for its end. Blocks, without the GIL.
        fn wait(self: Pin<&mut InFlight>, timeout_ms: u64) -> Result<()>;

        type Completion;
        /// Copies strided inputs into their contiguous pieces. Runs on any thread, without the GIL.
        fn prepare(self: &Completion);
        /// Copies contiguous results back into strided outputs. Runs on any thread, without the GIL.
        fn store_back(self: &Completion);
        /// The operation has ended; `error` is empty or carries its code letter. Must not run Python nor block: queues.
        fn ended(self: &Completion, error: &str);

        /// True when a Python signal handler raised; the shim keeps the exception for the thread that asked.
        fn check_interrupt() -> bool;
        /// Hands one line to Python's logging, on a thread where that is safe. Never blocks on the GIL.
        fn log_line(level: u8, text: &str);
    }
}

// SAFETY: the shim's `Store` and `Completion` are written to be called from any thread (cpp/host/host.hpp says so).
unsafe impl Send for ffi::Store {}
// SAFETY: as above.
unsafe impl Sync for ffi::Store {}
// SAFETY: as above.
unsafe impl Send for ffi::Completion {}
// SAFETY: as above.
unsafe impl Sync for ffi::Completion {}

// SAFETY: as above.
unsafe impl Send for ffi::Link {}
// SAFETY: as above.
unsafe impl Sync for ffi::Link {}
// SAFETY: a transfer is waited on and dropped by one thread at a time, any thread (cpp/host/host.hpp says so).
unsafe impl Send for ffi::InFlight {}

/// A group, and its store: groups that are made later over the same one talk to it over the same connection.
pub struct RustGroup(pub(super) Arc<Group>, #[allow(dead_code)] cxx::SharedPtr<ffi::Store>);
pub struct RustOp(Arc<Op>);
pub struct RustForeign(group::Foreign);

/// Text of an error as it crosses the bridge.
pub(super) fn coded(error: &Error) -> String {
    format!("{}{}", error.code(), error.text())
}

/// Runs `body`; an error or a panic becomes the text that `cpp/work/work.cpp` reads.
pub(super) fn guarded<T>(body: impl FnOnce() -> Result<T>) -> std::result::Result<T, String> {
    contained(body).map_err(|error| coded(&error))
}

fn set_log_level(level: u8) {
    let _ = log::set_logger(&PythonLog);
    log::set_max_level(match level {
        0 => log::LevelFilter::Off,
        1 => log::LevelFilter::Error,
        2 => log::LevelFilter::Warn,
        3 => log::LevelFilter::Info,
        4 => log::LevelFilter::Debug,
        _ => log::LevelFilter::Trace,
    });
}

fn connect(setup: &ffi::Setup, store: cxx::SharedPtr<ffi::Store>) -> std::result::Result<Box<RustGroup>, String> {
    guarded(|| {
        let config = Config {
            rank: setup.rank as usize,
            size: setup.size as usize,
            timeout: Duration::from_millis(setup.timeout_ms),
            name: setup.name.clone(),
            delegate_reason: Some(setup.delegate_reason.clone()).filter(|reason| !reason.is_empty()),
            delegate: setup.delegate.clone(),
            algorithm: setup.algorithm.clone(),
            policy: String::new(),
            settings: Settings { fusion: setup.fusion, strict: setup.strict },
        };
        let group = Group::connect(config, &StoreHook(store.clone()), Arc::new(PythonHook))?;
        Ok(Box::new(RustGroup(group, store)))
    })
}

pub(super) fn spans(pieces: &[ffi::Piece]) -> Vec<Span> {
    pieces.iter().map(|piece| Span { addr: piece.addr, bytes: piece.bytes }).collect()
}

fn strided(tensor: &ffi::Strided) -> Strided {
    let ffi::Strided { addr, run, counts, strides, written } = *tensor;
    Strided { addr, run, counts, strides, written }
}

pub(super) fn unknown(what: &str, value: u8) -> Error {
    Error::Bug(format!("sagellm: unknown {what} {value} came over the bridge"))
}

pub(super) fn kind_and_dtype(kind: u8, dtype: u8) -> Result<(Kind, Dtype)> {
    let kind = Kind::from_u8(kind).ok_or_else(|| unknown("kind", kind))?;
    Ok((kind, Dtype::from_u8(dtype).ok_or_else(|| unknown("dtype", dtype))?))
}

fn memory_meets(one: &[ffi::Strided], other: &[ffi::Strided]) -> bool {
    let reach =
        |all: &[ffi::Strided]| Reach::of_all(Vec::new(), Vec::new(), &all.iter().map(strided).collect::<Vec<_>>());
    reach(one).meets(&reach(other))
}

fn request(
    call: &ffi::Call,
    inputs: &[ffi::Piece],
    outputs: &[ffi::Piece],
    in_blocks: &[usize],
    out_blocks: &[usize],
    also_touched: &[ffi::Strided],
) -> Result<Request> {
    let (kind, dtype) = kind_and_dtype(call.kind, call.dtype)?;
    Ok(Request {
        kind,
        dtype,
        op: ReduceOp::from_u8(call.op, call.factor).ok_or_else(|| unknown("reduce op", call.op))?,
        root: call.root,
        tag: call.tag,
        timeout_ms: u64::try_from(call.timeout_ms).ok(),
        sync: call.sync,
        inputs: spans(inputs),
        outputs: spans(outputs),
        in_blocks: in_blocks.to_vec(),
        out_blocks: out_blocks.to_vec(),
        also_touched: also_touched.iter().map(strided).collect(),
        note: CallNote {
            counts: call.counts,
            tensors: call.tensors,
            element: call.element,
            site: call.site,
            host_staged: call.host_staged,
        },
    })
}

fn hook(call: &ffi::Call, completion: cxx::SharedPtr<ffi::Completion>) -> Option<Box<dyn group::Completion>> {
    (!completion.is_null())
        .then(|| Box::new(CompletionHook { inner: completion, staged: call.staged }) as Box<dyn group::Completion>)
}

impl RustGroup {
    fn delegate_reason(&self) -> String {
        self.0.delegate_reason().unwrap_or_default().to_string()
    }

    fn id(&self) -> String {
        self.0.id()
    }

    fn spans_hosts(&self) -> bool {
        self.0.spans_hosts()
    }

    fn wait_for_memory(&self, memory: &ffi::Piece, writes: bool) -> std::result::Result<(), String> {
        let span = crate::types::Span { addr: memory.addr, bytes: memory.bytes };
        guarded(|| self.0.wait_for_memory(span, writes))
    }

    fn open_link(&self, link: cxx::SharedPtr<ffi::Link>) -> std::result::Result<(), String> {
        guarded(|| self.0.open_link(Arc::new(LinkHook(link))))
    }

    #[allow(clippy::too_many_arguments)] // as above
    fn issue(
        &self,
        call: &ffi::Call,
        inputs: &[ffi::Piece],
        outputs: &[ffi::Piece],
        in_blocks: &[usize],
        out_blocks: &[usize],
        also_touched: &[ffi::Strided],
        completion: cxx::SharedPtr<ffi::Completion>,
    ) -> std::result::Result<Box<RustOp>, String> {
        guarded(|| {
            let request = request(call, inputs, outputs, in_blocks, out_blocks, also_touched)?;
            Ok(Box::new(RustOp(self.0.issue(request, hook(call, completion))?)))
        })
    }

    #[allow(clippy::too_many_arguments)] // as above
    fn run(
        &self,
        call: &ffi::Call,
        inputs: &[ffi::Piece],
        outputs: &[ffi::Piece],
        in_blocks: &[usize],
        out_blocks: &[usize],
        also_touched: &[ffi::Strided],
        completion: cxx::SharedPtr<ffi::Completion>,
    ) -> std::result::Result<(), String> {
        guarded(|| {
            let request = request(call, inputs, outputs, in_blocks, out_blocks, also_touched)?;
            self.0.run(request, hook(call, completion))
        })
    }

    fn monitored_barrier(&self, timeout_ms: i64, wait_all_ranks: bool) -> std::result::Result<(), String> {
        guarded(|| {
            let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
            self.0.monitored_barrier(timeout, wait_all_ranks)
        })
    }

    fn sequence(&self) -> u64 {
        self.0.sequence()
    }
    fn set_timeout(&self, timeout_ms: u64) {
        self.0.set_timeout(Duration::from_millis(timeout_ms));
    }
    fn abort(&self, reason: &str) {
        let _ = guarded(|| {
            self.0.abort(reason);
            Ok(())
        });
    }
    fn shutdown(&self) {
        let _ = guarded(|| {
            self.0.shutdown();
            Ok(())
        });
    }
    fn fault(&self) -> String {
        self.0.fault().as_ref().map(coded).unwrap_or_default()
    }
    fn describe(&self) -> std::result::Result<String, String> {
        guarded(|| self.0.not_forked().map(|()| self.0.describe()))
    }
    fn explain(&self, kind: u8, bytes: u64, dtype: u8) -> std::result::Result<String, String> {
        guarded(|| {
            let (kind, dtype) = kind_and_dtype(kind, dtype)?;
            Ok(self.0.explain(kind, bytes, dtype).lines())
        })
    }
    fn explain_number(&self, number: u64) -> std::result::Result<String, String> {
        guarded(|| {
            self.0.not_forked()?;
            Ok(self.0.explain_number(number)?.lines())
        })
    }
    fn stats(&self) -> std::result::Result<String, String> {
        guarded(|| self.0.not_forked().map(|()| self.0.stats()))
    }
    fn records(&self) -> std::result::Result<String, String> {
        guarded(|| self.0.not_forked().map(|()| self.0.records()))
    }
    fn reset_stats(&self) {
        if self.0.not_forked().is_ok() {
            self.0.reset_stats();
        }
    }
    fn set_members(&self, members: &[u32]) {
        self.0.set_members(members.to_vec());
    }
    fn foreign(&self, call: &ffi::Foreign) -> std::result::Result<Box<RustForeign>, String> {
        guarded(|| {
            self.0.not_forked()?;
            let unknown = || Error::Bug(format!("sagellm: unknown kind {} came over the bridge", call.kind));
            let kind = Kind::from_u8(call.kind).ok_or_else(unknown)?;
            let note = CallNote {
                counts: true,
                tensors: call.tensors,
                element: call.element,
                site: call.site,
                host_staged: call.host_staged,
            };
            let (peer, bytes) = ((call.root, call.tag), (call.read, call.written));
            let carrier = if call.composed { group::Carrier::Composed } else { group::Carrier::Delegate };
            Ok(Box::new(RustForeign(self.0.foreign(kind, carrier, peer, bytes, note))))
        })
    }
}

impl RustOp {
    fn is_done(&self) -> bool {
        self.0.is_done()
    }
    fn wait(&self, timeout_ms: i64) -> std::result::Result<(), String> {
        guarded(|| self.0.wait(u64::try_from(timeout_ms).ok().map(Duration::from_millis)))
    }
    fn error(&self) -> String {
        self.0.error().map(coded).unwrap_or_default()
    }
    fn number(&self) -> u64 {
        self.0.number()
    }
    fn source(&self) -> i32 {
        self.0.source()
    }
    fn duration_ns(&self) -> u64 {
        self.0.duration().as_nanos() as u64
    }
    fn timeout_ms(&self) -> u64 {
        self.0.timeout().as_millis() as u64
    }
    fn explain(&self) -> String {
        self.0.explain().lines()
    }
    fn cancel(&self) {
        self.0.cancel();
    }
}

impl RustForeign {
    fn ended(&self, well: bool, timed: bool) {
        let _ = guarded(|| {
            self.0.end(well, timed);
            Ok(())
        });
    }
}

fn doctor() -> String {
    crate::os::topology::report()
}

fn explain_without_group(
    kind: u8,
    bytes: u64,
    dtype: u8,
    ranks: u32,
    algorithm: &str,
) -> std::result::Result<String, String> {
    guarded(|| {
        let (kind, dtype) = kind_and_dtype(kind, dtype)?;
        Ok(group::explain_without_group(kind, bytes, dtype, ranks as usize, algorithm)?.lines())
    })
}

fn table_without_group(ranks: u32, algorithm: &str) -> std::result::Result<String, String> {
    guarded(|| group::table_without_group(ranks as usize, algorithm))
}

fn device_packs(bytes: usize) -> bool {
    crate::engine::device::packs(bytes)
}

fn save_table(ranks: u32, made: &str, lines: &str) -> std::result::Result<String, String> {
    guarded(|| crate::select::file::make(ranks as usize, made, lines))
}

fn at_exit() {
    let _ = guarded(|| {
        group::at_exit();
        Ok(())
    });
}
