//! The contract between C++ and Rust. `observe` has the part for questions that need no group; `arrays` and `memory`
//! have the parts for plain memory. This file contains no logic. No panic crosses the bridge. Data that only Python
//! reads (statistics, explanations) crosses as one JSON text, which C++ does not parse.
//!
//! C++ -> Rust: `RustRendezvous::meet` meets the other ranks, and `RustGroup::build` makes the group. `RustGroup::run`
//! runs an operation; `RustGroup::issue` starts one and returns a `RustOp` for it. `RustDevices` makes a `RustCall` for
//! each launch on a device.
//! Rust -> C++: `Store` (c10d's key-value store), `Completion` (the shim's steps when an operation starts and ends),
//! `IdExchange` (exchanges ids of a vendor's communicators), `check_interrupt` (Python's pending signals),
//! `place_of_thread` and `place_of_call` (where the program is), `log_line` (Python's logging), `run_parallel` (torch's
//! intra-op threads).
//!
//! Each function has one meaning: no parameter selects what it does. `tests/it/layering.rs` lists each parameter that
//! is a bool or an enum, with the reason why it is data.
//!
//! Errors cross as text whose first letter is their `ErrorKind`; in C++ only `cpp/host/errors.cpp` reads and writes
//! that letter. This file has declarations only. `convert` translates between these types and the core's, `handles` has
//! the objects, and `calls`, `devices` and `simulate` have their functions.

use super::handles::{
    ParallelPart, RustCall, RustDevices, RustExternalOp, RustGroup, RustOp, RustRendezvous, RustRetired,
};

#[cxx::bridge(namespace = "sagellm")]
pub mod ffi {
    // ---------------------------------------------------------------------------------------------- shared numbers

    /// `types::Kind`. `convert` checks that the numbers of this enum and of the next three equal the core's.
    #[repr(u8)]
    #[derive(Debug)]
    enum Kind {
        /// The value of a struct that was not filled in. It is refused.
        kUnset = 0,
        kAllReduce = 1,
        kBroadcast = 2,
        kReduce = 3,
        kAllGather = 4,
        kGather = 5,
        kScatter = 6,
        kReduceScatter = 7,
        kAllToAll = 8,
        kBarrier = 9,
        kSend = 10,
        kRecv = 11,
    }

    /// `types::Dtype`. `cpp/lower/types.hpp` maps torch's types to these.
    #[repr(u8)]
    #[derive(Debug)]
    enum Dtype {
        kBytes = 0,
        kBool = 1,
        kU8 = 2,
        kI8 = 3,
        kU16 = 4,
        kI16 = 5,
        kU32 = 6,
        kI32 = 7,
        kU64 = 8,
        kI64 = 9,
        kF16 = 10,
        kBf16 = 11,
        kF32 = 12,
        kF64 = 13,
        kC32 = 14,
        kC64 = 15,
        kC128 = 16,
        kF8E4M3 = 17,
        kF8E5M2 = 18,
    }

    /// `types::ReduceOp` without a factor. `cpp/lower/types.hpp` checks that torch uses the same numbers.
    #[repr(u8)]
    #[derive(Debug)]
    enum ReduceOp {
        kSum = 0,
        kAvg = 1,
        kProduct = 2,
        kMin = 3,
        kMax = 4,
        kBand = 5,
        kBor = 6,
        kBxor = 7,
        kPremulSum = 8,
    }

    /// `error::ErrorKind`; the numbers are ASCII letters.
    #[repr(u8)]
    #[derive(Debug)]
    enum ErrorKind {
        kInvalid = 86,     // V
        kTimeout = 84,     // T
        kRankFailed = 68,  // D
        kMismatch = 77,    // M
        kCorrupt = 67,     // C
        kAborted = 65,     // A
        kInterrupted = 80, // P
        kSystem = 83,      // S
        kBug = 66,         // B
    }

    // ------------------------------------------------------------------------------------------------------- calls

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

    /// `types::Listed`.
    struct Listed {
        dtype: Dtype,
        bytes: usize,
    }

    /// `types::CallNote`.
    #[derive(Clone, Copy)]
    struct CallNote {
        counts: bool,
        tensors: u32,
        element: u8,
        site: u32,
        host_staged: bool,
    }

    /// `types::Request` without its memory.
    #[derive(Clone, Copy)]
    struct Call {
        kind: Kind,
        dtype: Dtype,
        op: ReduceOp,
        /// The factor of PREMUL_SUM.
        factor: f64,
        /// Rank of the root, or the peer of a send or receive (4294967295 means a receive from any rank).
        root: u32,
        tag: u32,
        /// Negative: the group's timeout.
        timeout_ms: i64,
        /// Whether `Completion::prepare` and `store_back` have tensors to copy.
        staged: bool,
        note: CallNote,
    }

    /// `types::Request`.
    struct Request<'a> {
        call: Call,
        inputs: &'a [Piece],
        outputs: &'a [Piece],
        /// Sizes of the ranks' blocks in bytes; empty if all blocks are equal.
        in_blocks: &'a [usize],
        out_blocks: &'a [usize],
        list: &'a [Listed],
        also_touched: &'a [Strided],
    }

    /// An operation that the core does not run and only records.
    struct ExternalOp {
        kind: Kind,
        root: u32,
        tag: u32,
        read: u64,
        written: u64,
        note: CallNote,
        /// Negative: the group's timeout.
        timeout_ms: i64,
    }

    // ----------------------------------------------------------------------------------------------------- devices

    /// `engine::device::DeviceRequest`: one call on tensors in device memory.
    struct DeviceRequest<'a> {
        name: &'a str,
        request: Request<'a>,
        /// Whether each tensor's memory holds its elements in order.
        dense: bool,
    }

    struct DevicesOpened {
        devices: Box<RustDevices>,
        /// The library's name, version and file.
        description: String,
    }

    struct DevicesRetired {
        communicator: Box<RustRetired>,
        /// Whether the library can make a communicator without a call of the excluded ranks.
        can_shrink: bool,
    }

    /// `engine::device::Terms`: the conditions under which the calls of one launch run.
    struct DeviceTerms {
        device: i8,
        region: bool,
        capturing: bool,
    }

    /// State of calls that the device has executed.
    struct DevicePassed {
        /// The error with which the calls failed, with its code letter. Empty if they succeeded, and while it is
        /// unknown whether they did.
        error: String,
        /// Whether the result of the calls is still unknown.
        undecided: bool,
    }

    /// Calls that were checked and have taken their numbers.
    struct DeviceBegun {
        call: Box<RustCall>,
        number: u64,
        /// 0: no timeout.
        timeout_ms: u64,
        /// Key of the engine's stream that runs the calls. Single messages have one key for each pair of ranks and
        /// direction; all other calls have key 0.
        stream_key: i32,
        /// One entry for each call.
        lowerings: Vec<DeviceLowering>,
    }

    /// `engine::device::Placed`: device addresses of one call's temporaries; 0 if the call does not need that
    /// temporary.
    struct DevicePlaced {
        /// Address of the factor, if the library itself has PREMUL_SUM.
        factor: usize,
        send: usize,
        recv: usize,
    }

    /// `lowering::Local`: a step that the shim applies to a tensor before or after the library's call.
    enum LocalStep {
        /// Cast to `dtype`.
        Cast,
        /// Multiply by `factor`.
        Scale,
        /// Divide by `count`.
        Divide,
        /// Reduce the blocks of all ranks with `op`.
        Fold,
    }

    struct Local {
        step: LocalStep,
        dtype: Dtype,
        op: ReduceOp,
        factor: f64,
        count: usize,
    }

    /// The part of `lowering::Lowering` and `layout::Layout` that the shim needs.
    struct DeviceLowering {
        /// Element type of the library's call.
        dtype: Dtype,
        /// Whether the library itself has PREMUL_SUM. If so, the factor is passed to it.
        premul: bool,
        /// Whether a temporary holds the inputs contiguously, after the steps `before` were applied.
        gathers: bool,
        before: Vec<Local>,
        /// If `in_place`, the library receives into the temporary of the inputs; otherwise, if `receives` is not 0,
        /// into a temporary of `receives` bytes. In both cases the steps `after` are applied, and then the result is
        /// copied to the outputs. If neither holds, the library receives directly into the outputs.
        receives: usize,
        in_place: bool,
        after: Vec<Local>,
    }

    // ------------------------------------------------------------------------------------------------------ groups

    /// The parameters of a group.
    struct Setup {
        rank: u32,
        size: u32,
        timeout_ms: u64,
        /// The group's name in messages.
        name: String,
        /// Why this group must not use shared memory; empty if it may. Set by tests and by the option
        /// `engine="delegate"`.
        delegate_reason: String,
        /// The option `delegate`.
        delegate: String,
        /// The option `vendor`. It is only checked here.
        vendor: String,
        /// The option `algorithm`, in the syntax of `select/rules.rs`.
        algorithm: String,
        /// The option `topology`, in the syntax of `select::start::Topology`.
        topology: String,
        /// The option `soft_timeout`. If it is negative, the setting of the process applies.
        soft_timeout_ms: i64,
        /// The next four fields are those of `config::Settings`.
        fusion: bool,
        strict: bool,
        measure_link: bool,
        numa: bool,
        /// `config::Threads`.
        threads: u32,
        threads_named: bool,
        /// The option `verify`, in the syntax of `config::Verify`.
        verify: String,
        /// For each rank of the group, its rank in the default group; for records.
        members: Vec<u32>,
        /// Addresses at which other ranks reach this process, in the format of `rendezvous::addresses`.
        addresses: String,
    }

    /// What the ranks decided.
    struct Decision {
        rendezvous: Box<RustRendezvous>,
        /// Equal on all ranks, and unique to this attempt to create a group. Zeros if the ranks have not met, because
        /// there is only one rank or there are too many.
        id: String,
        /// Why a delegate must serve the whole group, for example because its ranks cannot share memory; empty
        /// otherwise.
        delegate_reason: String,
        /// Whether the group spans hosts and shared memory serves the ranks of each host. If so, `build` needs a link.
        spans_hosts: bool,
        /// If the group needs a delegate or a link: how its ranks reach each other, in the format of
        /// `rendezvous::addresses`. Empty if the ranks have not agreed on it.
        network: String,
    }

    struct Built {
        group: Box<RustGroup>,
        /// One line for logs: which engine serves the group and why.
        description: String,
    }

    struct GroupState {
        /// Number of the last collective on the CPU plus that of the last collective on devices (0 before the first).
        sequence: u64,
        /// The group's fault with its code letter, or empty.
        fault: String,
        /// True if the group has a fault, or if a call of its delegate has failed.
        failed: bool,
        /// `watched`: the other ranks that this rank watches. `gone`: those of them that have ended or left.
        watched: Vec<u32>,
        gone: Vec<u32>,
    }

    /// The state of an operation.
    struct OpFacts {
        /// Whether the operation has ended, with or without an error.
        done: bool,
        /// Sequence number within the group (collectives) or within the ordered pair of ranks (point-to-point).
        number: u64,
        /// The rank from which a receive took its message, or -1.
        source: i32,
        /// Nanoseconds from issue to end; 0 while the operation is pending.
        duration_ns: u64,
        timeout_ms: u64,
        /// The error with its code letter, or empty.
        error: String,
    }

    extern "Rust" {
        type RustRendezvous;
        type RustGroup;
        type RustOp;
        type RustExternalOp;
        type RustDevices;
        type RustCall;
        type RustRetired;
        type ParallelPart<'a>;

        /// Does part `number` of a range that is split among threads. `run_parallel` calls it on any of these threads.
        fn run(self: &ParallelPart, number: usize);

        /// Meets the other ranks through the store, and decides with them what serves the group. Blocks until all ranks
        /// have called, or until the timeout. If the result is dropped without `build`, the other ranks are notified
        /// that this rank leaves.
        #[Self = "RustRendezvous"]
        fn meet(setup: &Setup, store: SharedPtr<Store>) -> Result<Decision>;
        /// Connects to the other ranks of a group that spans hosts. They reach this process at `address` or, if there
        /// are several connections to each of them, at the addresses in `paths`. `link` is "tcp" or "ucx". After "ucx",
        /// a colon and the interfaces that UCX uses may follow; UCX's library may be in `folders`. Blocks until all
        /// ranks have called, or until the timeout.
        fn connect(
            self: &RustRendezvous,
            address: &str,
            paths: &str,
            link: &str,
            folders: &[String],
            timeout_ms: u64,
        ) -> Result<()>;
        /// Builds the complete group. If the group spans hosts, it must be connected; its ranks then measure the link
        /// together.
        #[Self = "RustGroup"]
        fn build(decided: Box<RustRendezvous>) -> Result<Built>;

        /// Starts one operation; never waits for a peer. If this fails, it has used no sequence number and sent
        /// nothing. `completion` may be null.
        fn issue(self: &RustGroup, request: &Request, completion: SharedPtr<Completion>) -> Result<Box<RustOp>>;
        /// Starts one operation and completes it on this thread. This is the path with the least overhead. After an
        /// error the group is in the state that the error names, and no longer uses the caller's memory.
        fn run(self: &RustGroup, request: &Request, completion: SharedPtr<Completion>) -> Result<()>;
        /// Rank 0 finds out which ranks are missing; the other ranks wait for rank 0. Uses no sequence number and does
        /// not poison the group.
        fn monitored_barrier(self: &RustGroup, timeout_ms: i64, wait_all_ranks: bool) -> Result<()>;
        fn state(self: &RustGroup) -> GroupState;
        fn set_timeout(self: &RustGroup, timeout_ms: u64);
        /// See `Group::add_ephemeral_timeout`.
        fn add_ephemeral_timeout(self: &RustGroup, more_ms: u64);
        /// Leaves the group in order: pending operations fail, but peers still receive what this rank has published.
        fn shutdown(self: &RustGroup);
        /// Fails everything that is pending here and on the peers, with this reason.
        fn abort(self: &RustGroup, reason: &str);
        /// How the collective with this number is run, and its record. The result is JSON, as for all functions below
        /// that return explanations, statistics or records (`select::export`, `stats::export`). `_C.pyi` has the types.
        fn explain_number(self: &RustGroup, number: u64) -> Result<String>;
        /// How an operation of this kind, size and element type would be run. Kind and element type are names.
        fn explain(self: &RustGroup, kind: &str, bytes: u64, dtype: &str) -> Result<String>;
        /// Returns the nanoseconds that the operation would take from issue to end. Does not start the operation.
        fn estimate(self: &RustGroup, request: &Request) -> Result<u64>;
        /// All counters and times.
        fn stats(self: &RustGroup) -> Result<String>;
        /// The sums of each kind of operation: a small part of `stats`, for callers that ask often.
        fn totals(self: &RustGroup) -> Result<String>;
        /// The last `last` operations, the oldest first. If the oldest pending operation is older than these, it
        /// precedes them.
        fn records(self: &RustGroup, last: usize) -> Result<String>;
        /// Resets all counts. Does nothing in a forked child.
        fn reset_stats(self: &RustGroup);

        /// Records an operation of the group's delegate from now until its end. If the result is dropped before the
        /// end, the operation counts as failed.
        fn delegate_op(self: &RustGroup, call: &ExternalOp) -> Result<Box<RustExternalOp>>;
        /// Like `delegate_op`, for an operation that the shim composes of several other operations. The caller must
        /// next issue the first of those, because the record gets the number of that operation.
        fn composed_op(self: &RustGroup, call: &ExternalOp) -> Result<Box<RustExternalOp>>;
        /// Called when a thread of the program begins to wait for the operation, and when it stops waiting.
        fn wait_begins(self: &RustExternalOp);
        fn wait_ends(self: &RustExternalOp);
        /// The operation has just succeeded. Of `ended`, `ended_unseen`, `failed` and `refused`, only the first call on
        /// any thread has an effect.
        fn ended(self: &RustExternalOp);
        /// The operation was issued, and its end cannot be observed; it may have ended long ago.
        fn ended_unseen(self: &RustExternalOp);
        /// The operation failed with the text `words`. If the group knows more about the failure, returns the error to
        /// report instead of `words`, with its code letter; otherwise empty. Repeated calls return the same text.
        fn failed(self: &RustExternalOp, words: &str) -> String;
        /// The carrier of the operation refused it and sent nothing.
        fn refused(self: &RustExternalOp);

        /// Waits until the operation ends, or until the timeout; if the timeout is negative, until the operation's own
        /// deadline. Ok means that the operation succeeded.
        fn wait(self: &RustOp, timeout_ms: i64) -> Result<()>;
        fn facts(self: &RustOp) -> OpFacts;
        /// Like `RustGroup::explain_number`.
        fn explain(self: &RustOp) -> String;

        /// Opens a vendor's libraries for tensors on devices of this type (torch's name). `vendor` is "auto" or a
        /// vendor's name. `library` may be empty; `folders` are searched. If no library can be opened, the error says
        /// why.
        fn open_devices(
            self: &RustGroup,
            device_type: &str,
            vendor: &str,
            library: &str,
            folders: &[String],
        ) -> Result<DevicesOpened>;
        /// Makes the communicator of all ranks; all ranks call this.
        fn connect(self: &RustDevices, device: i32, exchange: &IdExchange) -> Result<()>;
        /// Checks and lowers the calls of one launch, and takes their numbers. If this fails, nothing was sent. Waits
        /// for other ranks only if it must make a communicator.
        fn begin(
            self: &RustDevices,
            calls: &[DeviceRequest],
            terms: &DeviceTerms,
            exchange: &IdExchange,
        ) -> Result<DeviceBegun>;
        /// Begins a barrier that follows all earlier calls on the device. It launches nothing, and is watched like a
        /// call.
        fn begin_barrier(self: &RustDevices, device: i32) -> Result<DeviceBegun>;
        /// Whether the raw stream is being captured into a graph.
        fn is_capturing(self: &RustDevices, device: i32, stream: usize) -> Result<bool>;
        /// Makes the engine's raw stream for a stream key wait for the raw event, and returns the stream. `recycled`
        /// are events of `record_event` for which no stream waits any more.
        fn stream_behind(
            self: &RustDevices,
            device: i32,
            stream_key: i32,
            event: usize,
            recycled: &[usize],
        ) -> Result<usize>;
        /// Records a raw event behind all work that is now on the raw stream.
        fn record_event(self: &RustDevices, device: i32, stream: usize) -> Result<usize>;
        /// Whether the library can make a communicator of these ranks out of the communicator of all ranks.
        fn can_split(self: &RustDevices, device: i32, members: &[u32]) -> Result<bool>;
        /// Makes a communicator of `members` out of the communicator of all ranks. `child` is the group of these
        /// members. All ranks of this group together call this function or `split_without_child`.
        fn split(self: &RustDevices, child: &RustDevices, device: i32, members: &[u32]) -> Result<()>;
        /// Takes part in `split` on a rank that is in no new group. `members` must equal the list that the ranks of one
        /// of the new groups pass to `split`.
        fn split_without_child(self: &RustDevices, device: i32, members: &[u32]) -> Result<()>;
        /// Takes the communicator of all ranks out of use. The communicator ends when the returned object is dropped.
        /// `drained`: no operation is pending in it.
        fn retire(self: &RustDevices, device: i32, drained: bool) -> DevicesRetired;
        /// Ends the communicators together with the other ranks. Returns false if a signal handler raised an exception
        /// meanwhile. `drained`: no operation is pending in them.
        fn close(self: &RustDevices, timeout_ms: u64, drained: bool) -> bool;
        /// Aborts the communicators, which unblocks hanging operations. No operation can be issued afterwards.
        fn abort(self: &RustDevices);

        /// Puts the calls on a raw stream as one launch. Host memory that was passed to the library is kept until
        /// `self` is dropped. Captured calls count as ended, because no event reports their end.
        fn launch(self: &RustCall, placed: &[DevicePlaced], stream: usize) -> Result<()>;
        /// Fails the group on all ranks, because the caller could not launch the calls or could not complete their
        /// launch, and other ranks may have launched theirs. Dropping calls that were not launched has the same
        /// effect.
        fn failed_here(self: &RustCall, why: &str);
        /// Between this call and `poll_running` or `poll_passed`, this thread's device queries do not invalidate a
        /// graph capture of another thread. The caller passes the returned mode to that function.
        fn before_poll(self: &RustCall) -> Result<u32>;
        /// Polls calls that the device has not completed. If they will never complete, returns the error that is the
        /// reason, with its code letter; otherwise empty. After an error the group has failed, except if only its
        /// communicator has ended; the caller reports the error to the program and then calls `abort`.
        fn poll_running(self: &RustCall, capture_mode: u32) -> String;
        /// Polls calls that the device has completed. When their result is known, records their end in the statistics.
        /// After an error, the caller does the same as after `poll_running`.
        fn poll_passed(self: &RustCall, capture_mode: u32) -> DevicePassed;
        /// Whether the library reads host memory that `self` keeps. If so, captured calls must be kept as long as their
        /// graph may be replayed.
        fn keeps_memory(self: &RustCall) -> bool;
        /// For captured calls: if a replay would not complete, the error that is the reason, with its code letter;
        /// otherwise empty. After an error the group has failed; the caller reports the error to the program and then
        /// calls `abort`.
        fn look_at_replays(self: &RustCall) -> String;
        /// Ends the communicators of the calls' group, which unblocks hanging calls. This takes as long as the library
        /// needs.
        fn abort(self: &RustCall);
        /// Checks a launch that has not returned. If it must end, returns the error that is the reason, with its code
        /// letter; otherwise empty. After an error the group has failed, and `abort` makes the launch return.
        fn look_at_launch(self: &RustCall) -> String;
        /// How the library runs the calls: one JSON text for each.
        fn explain(self: &RustCall) -> Vec<String>;

        /// Makes the communicator of all ranks except `excluded`. The excluded ranks do not call this. Pending
        /// operations are aborted.
        fn shrink(self: &RustRetired, child: &RustDevices, excluded: &[u32]) -> Result<()>;

        /// Calls `fusion::lists::operations` for a list that one of our engines runs.
        #[Self = "RustGroup"]
        fn list_operations(kind: Kind, elements: &[u8], bytes: &[usize]) -> Result<Vec<u32>>;
        /// Calls `fusion::lists::operations` for a list that a vendor's library runs.
        #[Self = "RustDevices"]
        fn list_operations(kind: Kind, elements: &[u8], bytes: &[usize]) -> Result<Vec<u32>>;
    }

    // SAFETY: the functions below use references and slices only during the call, throw only if they return a Result,
    // and may be called from any thread (cpp/host/host.hpp says so).
    unsafe extern "C++" {
        include!("host/host.hpp");

        type Store;
        fn set(self: &Store, key: &str, value: &[u8]) -> Result<()>;
        /// Gets a value without waiting. False if the key does not exist.
        fn try_get(self: &Store, key: &str, value: &mut Vec<u8>) -> Result<bool>;
        fn add(self: &Store, key: &str, by: i64) -> Result<i64>;
        /// Deletes a key that only this rank reads. Does nothing if the store cannot delete.
        fn remove(self: &Store, key: &str) -> Result<()>;
        /// Identifies the connection: all stores that share a connection return the same number.
        fn connection(self: &Store) -> usize;

        type IdExchange;
        /// Sends an id from rank 0 to all ranks.
        fn broadcast(self: &IdExchange, id: &mut [u8]) -> Result<()>;
        /// Sends an id from one rank to another; both call this.
        fn pass(self: &IdExchange, id: &mut [u8], from: i32, to: i32) -> Result<()>;

        type Completion;
        // The steps of an operation. They are called in this order, on any thread and without the GIL.
        /// Called before the inputs are read. Copies strided inputs into contiguous pieces.
        fn prepare(self: &Completion);
        /// Called after the outputs were written. Copies contiguous results into strided tensors.
        fn store_back(self: &Completion);
        /// Called after the operation has ended. `error` is empty or begins with its code letter. Must not run Python
        /// and must not block; may queue work for other threads.
        fn ended(self: &Completion, error: &str);

        /// Whether a Python signal handler raised an exception. The shim keeps the exception for the calling thread.
        fn check_interrupt() -> bool;
        /// Where the Python thread with this `pthread_self` is (0: the main thread): "FILE:LINE in FUNCTION", or empty
        /// if it runs no code of the program. Waits for the GIL.
        fn place_of_thread(thread: u64) -> String;
        /// Where the program made the call with this `site`, in the format of `place_of_thread`. Does not wait.
        fn place_of_call(site: u32) -> String;
        /// Queues one line for Python's logging, which writes it on a thread where that is safe. Never blocks on the
        /// GIL.
        fn log_line(level: u8, text: &str);
        /// Number of threads that `run_parallel` would use if the calling thread called it now.
        fn intraop_threads() -> usize;
        /// Calls `part.run` with each number below `parts` on torch's intra-op threads, and returns after all of these
        /// calls have returned.
        fn run_parallel(parts: usize, part: &ParallelPart);
    }
}

// SAFETY: the shim's `Store` and `Completion` may be used from any thread (cpp/host/host.hpp says so).
unsafe impl Send for ffi::Store {}
// SAFETY: as above.
unsafe impl Sync for ffi::Store {}
// SAFETY: as above.
unsafe impl Send for ffi::Completion {}
// SAFETY: as above.
unsafe impl Sync for ffi::Completion {}
