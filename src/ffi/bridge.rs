//! The contract between C++ and Rust; `observe` has the part for questions without a group, `arrays` and `memory` those for
//! memory without one. No logic lives here, and no panic crosses it. What Python only reads (statistics, explanations)
//! crosses as one JSON text, which C++ does not look into.
//!
//! C++ -> Rust: `RustRendezvous::meet` meets the other ranks, `RustGroup::build` makes the group, `RustGroup::run`
//! runs an operation, `RustGroup::issue` starts one and `RustOp` answers for it. `RustDevices` makes a `RustCall` of each
//! call on a device.
//! Rust -> C++: `Store` (c10d's key-value store), `Completion` (what the shim wants to do when an operation starts and
//! ends), `IdExchange` (ids of a vendor's communicators), `check_interrupt` (Python's pending signals),
//! `place_of_thread` and `place_of_call` (where the program is), `log_line` (Python's logging).
//!
//! A function has one meaning: no parameter selects what it does. `tests/it/layering.rs` lists each parameter that is a
//! bool or an enum, with the reason why it is data.
//!
//! Errors cross as text whose first letter is their `ErrorKind`; `cpp/host/errors.cpp` alone reads and writes it on that
//! side. This file declares; `convert` translates between these types and the core's, `handles` has the objects, `calls`,
//! `devices` and `simulate` their functions.

use super::handles::{RustCall, RustDevices, RustExternalOp, RustGroup, RustOp, RustRendezvous, RustRetired};

#[cxx::bridge(namespace = "sagellm")]
pub mod ffi {
    // ---------------------------------------------------------------------------------------------- shared numbers

    /// `types::Kind`; `convert` checks that the numbers are equal, as of the three below.
    #[repr(u8)]
    #[derive(Debug)]
    enum Kind {
        /// Of a struct that is not filled in yet; refused.
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

    /// `types::Dtype`; `cpp/lower/types.hpp` says which of torch's types each is.
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

    /// `types::ReduceOp` without its factor; `cpp/lower/types.hpp` checks that torch has the same numbers.
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

    /// `error::ErrorKind`; the numbers are letters.
    #[repr(u8)]
    #[derive(Debug)]
    enum ErrorKind {
        kInvalid = 86,     // V
        kTimeout = 84,     // T
        kRankFailed = 68,  // D
        kMismatch = 77,    // M
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

    /// `types::Request` without its memory.
    #[derive(Clone, Copy)]
    struct Call {
        kind: Kind,
        dtype: Dtype,
        op: ReduceOp,
        /// The factor of PREMUL_SUM.
        factor: f64,
        /// Root, or the peer of a send or receive (4294967295: from anyone).
        root: u32,
        tag: u32,
        /// Negative: the group's timeout.
        timeout_ms: i64,
        /// `Completion::prepare` and `store_back` copy.
        staged: bool,
        /// `types::CallNote`.
        counts: bool,
        tensors: u32,
        element: u8,
        site: u32,
        host_staged: bool,
    }

    /// `types::Request`.
    struct Request<'a> {
        call: Call,
        inputs: &'a [Piece],
        outputs: &'a [Piece],
        /// Sizes of the ranks' blocks in bytes; empty where all are equal.
        in_blocks: &'a [usize],
        out_blocks: &'a [usize],
        list: &'a [Listed],
        also_touched: &'a [Strided],
    }

    /// An operation that the core only counts.
    struct ExternalOp {
        kind: Kind,
        root: u32,
        tag: u32,
        read: u64,
        written: u64,
        tensors: u32,
        element: u8,
        site: u32,
        host_staged: bool,
        /// Negative: the group's timeout.
        timeout_ms: i64,
    }

    // ----------------------------------------------------------------------------------------------------- devices

    /// `engine::device::DeviceRequest`: one call on a device, whose memory is there.
    struct DeviceRequest<'a> {
        name: &'a str,
        request: Request<'a>,
        /// The memory of its tensors is their elements in order.
        dense: bool,
    }

    struct DevicesOpened {
        devices: Box<RustDevices>,
        /// The library, its version and file.
        description: String,
    }

    struct DevicesRetired {
        communicator: Box<RustRetired>,
        /// Whether the library can leave ranks out that do not call.
        can_shrink: bool,
    }

    /// `engine::device::Terms`: how the calls of one launch are made.
    struct DeviceTerms {
        device: i8,
        region: bool,
        capturing: bool,
    }

    /// Of calls that the device has passed.
    struct DevicePassed {
        /// The error, with its code letter, by which they failed; empty where they ended well, and while that is open.
        error: String,
        /// It is not known yet whether they ended well.
        undecided: bool,
    }

    /// Calls that were checked and have their number.
    struct DeviceBegun {
        call: Box<RustCall>,
        number: u64,
        /// 0: no timeout.
        timeout_ms: u64,
        /// 0 for collectives; each direction of messages between two ranks has a separate stream.
        stream_key: i32,
        /// One for each call.
        lowerings: Vec<DeviceLowering>,
    }

    /// `engine::device::Placed`: device addresses of the temporaries of one call; 0 where it has none.
    struct DevicePlaced {
        /// Address of the factor, where the library itself has PREMUL_SUM.
        factor: usize,
        send: usize,
        recv: usize,
    }

    /// `lowering::Local`: a step that the shim applies to a tensor before or after the library's call.
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
        dtype: Dtype,
        op: ReduceOp,
        factor: f64,
        count: usize,
    }

    /// The part of `lowering::Lowering` and `layout::Layout` that the shim needs.
    struct DeviceLowering {
        /// The element type of the library's call.
        dtype: Dtype,
        /// The library itself has PREMUL_SUM, and gets the factor.
        premul: bool,
        /// A temporary holds the inputs behind each other, after these steps.
        gathers: bool,
        before: Vec<Local>,
        /// The result is received in a temporary of so many bytes, or in that of the inputs, and copied to the outputs
        /// after these steps.
        receives: usize,
        in_place: bool,
        after: Vec<Local>,
    }

    // ------------------------------------------------------------------------------------------------------ groups

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
        /// The option `vendor`, which is only checked here.
        vendor: String,
        /// The option `algorithm`, in the syntax of `select/rules.rs`.
        algorithm: String,
        /// The option `topology`, as `select::start::Topology` reads it.
        topology: String,
        /// The option `soft_timeout`; negative: that of the process.
        soft_timeout_ms: i64,
        /// `config::Settings`.
        fusion: bool,
        strict: bool,
        measure_link: bool,
        /// Which ranks of the default group its ranks are, for records.
        members: Vec<u32>,
        /// Where other ranks reach this process, as `rendezvous::addresses` reads it.
        addresses: String,
    }

    /// What the ranks decided.
    struct Decision {
        rendezvous: Box<RustRendezvous>,
        /// Equal on all ranks and unique to this attempt to make a group; zeros where the ranks have not met, because
        /// there is one or too many.
        id: String,
        /// Why the whole group must be served by a delegate (its ranks cannot share memory, say), or empty.
        delegate_reason: String,
        /// Ranks live on several hosts and shared memory serves the inside of each: `build` needs a link, and
        /// point-to-point calls go to a delegate.
        spans_hosts: bool,
        /// How the ranks of a group that needs a delegate or a link reach each other, as `rendezvous::addresses` writes it;
        /// empty where they have not agreed on it.
        network: String,
    }

    struct Built {
        group: Box<RustGroup>,
        /// Which engine serves it and why, for logs: one line.
        description: String,
    }

    struct GroupState {
        /// Number of the last collective issued (0 before the first).
        sequence: u64,
        /// The group's fault with its code letter, or empty.
        fault: String,
        /// It has a fault, or a call of its delegate failed.
        failed: bool,
        /// The other ranks whose end this rank detects, and those of them that have ended or left.
        watched: Vec<u32>,
        gone: Vec<u32>,
    }

    /// The state of an operation.
    struct OpFacts {
        /// It has ended, well or not.
        done: bool,
        /// Sequence number within the group (collectives) or the ordered pair (point to point).
        number: u64,
        /// The rank a receive took from, or -1.
        source: i32,
        /// Nanoseconds from issue to end, 0 while it runs.
        duration_ns: u64,
        timeout_ms: u64,
        /// With its code letter, or empty.
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

        /// Meets the other ranks through the store and decides with them what serves the group. Blocks until all came, or
        /// the timeout. Dropping the result without `build` tells the other ranks that this one leaves.
        #[Self = "RustRendezvous"]
        fn meet(setup: &Setup, store: SharedPtr<Store>) -> Result<Decision>;
        /// Connects to the other ranks of a group that spans hosts, which reach this process at `address`. Blocks until all
        /// have called it, or the timeout.
        fn connect(self: &RustRendezvous, address: &str, timeout_ms: u64) -> Result<()>;
        /// Builds the group, whole. One that spans hosts must be connected; then all ranks measure the link together.
        #[Self = "RustGroup"]
        fn build(decided: Box<RustRendezvous>) -> Result<Built>;

        /// Starts one operation; never waits for a peer. Errors here used no sequence number and sent nothing.
        /// `completion` may be null.
        fn issue(self: &RustGroup, request: &Request, completion: SharedPtr<Completion>) -> Result<Box<RustOp>>;
        /// Starts one operation and finishes it on this thread; the cheapest path.
        /// After any error the group is in the state that the error names, and no longer uses the caller's memory.
        fn run(self: &RustGroup, request: &Request, completion: SharedPtr<Completion>) -> Result<()>;
        /// Rank 0 learns who is missing; the others wait for rank 0. Uses no sequence number, poisons nothing.
        fn monitored_barrier(self: &RustGroup, timeout_ms: i64, wait_all_ranks: bool) -> Result<()>;
        fn state(self: &RustGroup) -> GroupState;
        fn set_timeout(self: &RustGroup, timeout_ms: u64);
        /// `Group::add_ephemeral_timeout`.
        fn add_ephemeral_timeout(self: &RustGroup, more_ms: u64);
        /// Leaves in order: pending operations fail, peers still receive what was published.
        fn shutdown(self: &RustGroup);
        /// Everything pending here and on the peers fails, for this reason.
        fn abort(self: &RustGroup, reason: &str);
        /// How the collective with this number is carried out, and what was recorded. This and the answers below are JSON
        /// (`select::export`, `stats::export`), whose types `_C.pyi` has.
        fn explain_number(self: &RustGroup, number: u64) -> Result<String>;
        /// How an operation of this kind, size and type (by their names) would be carried out.
        fn explain(self: &RustGroup, kind: &str, bytes: u64, dtype: &str) -> Result<String>;
        /// All counts and times.
        fn stats(self: &RustGroup) -> Result<String>;
        /// The last operations, so many, oldest first, and before them the oldest one that is pending, if that is older.
        fn records(self: &RustGroup, last: usize) -> Result<String>;
        /// Resets all counts. Does nothing in a forked child.
        fn reset_stats(self: &RustGroup);

        /// Counts an operation of the group's delegate from now until its end; dropped before, it counts as failed.
        fn delegate_op(self: &RustGroup, call: &ExternalOp) -> Result<Box<RustExternalOp>>;
        /// The same for an operation that the shim makes of several, the first of which is issued next.
        fn composed_op(self: &RustGroup, call: &ExternalOp) -> Result<Box<RustExternalOp>>;
        /// This thread of the program waits for the operation from now on; and waits no longer.
        fn wait_begins(self: &RustExternalOp);
        fn wait_ends(self: &RustExternalOp);
        /// It has just ended well. Of this and the next three only the first call counts, on any thread.
        fn ended(self: &RustExternalOp);
        /// It was issued, and its end is not seen: it may have been long ago.
        fn ended_unseen(self: &RustExternalOp);
        /// It failed with the error `words`. Returns the error to report in its place, with its code letter, where the group
        /// knows more; the same each time.
        fn failed(self: &RustExternalOp, words: &str) -> String;
        /// Its carrier refused it, and sent nothing.
        fn refused(self: &RustExternalOp);

        /// Negative: until the operation's own deadline. Ok: it ended well.
        fn wait(self: &RustOp, timeout_ms: i64) -> Result<()>;
        fn facts(self: &RustOp) -> OpFacts;
        /// As `RustGroup::explain_number`.
        fn explain(self: &RustOp) -> String;

        /// Opens a vendor's libraries for tensors on devices of this type (torch's name); `vendor` is "auto" or a name. An
        /// error says why that cannot be. `library` may be empty, `folders` are looked into.
        fn open_devices(
            self: &RustGroup,
            device_type: &str,
            vendor: &str,
            library: &str,
            folders: &[String],
        ) -> Result<DevicesOpened>;
        /// Makes the communicator of all ranks, which all call this.
        fn connect(self: &RustDevices, device: i32, exchange: &IdExchange) -> Result<()>;
        /// Checks and lowers calls that are one launch, and takes their numbers; an error sent nothing.
        /// Waits for other ranks only where it makes their communicator.
        fn begin(
            self: &RustDevices,
            calls: &[DeviceRequest],
            terms: &DeviceTerms,
            exchange: &IdExchange,
        ) -> Result<DeviceBegun>;
        /// Begins a barrier after all earlier calls on the device; it launches nothing, and is watched like a call.
        fn begin_barrier(self: &RustDevices, device: i32) -> Result<DeviceBegun>;
        /// Whether what is put on the raw stream is being captured.
        fn is_capturing(self: &RustDevices, device: i32, stream: usize) -> Result<bool>;
        /// The engine's own raw stream for a stream key, after it was made to wait for the raw event. `recycled` are events
        /// of `record_event` for which no stream waits any more.
        fn stream_behind(
            self: &RustDevices,
            device: i32,
            stream_key: i32,
            event: usize,
            recycled: &[usize],
        ) -> Result<usize>;
        /// A raw event after all work that is on the raw stream now.
        fn record_event(self: &RustDevices, device: i32, stream: usize) -> Result<usize>;
        /// Whether the library can make the communicator of these ranks out of the communicator of all ranks.
        fn can_split(self: &RustDevices, device: i32, members: &[u32]) -> Result<bool>;
        /// Makes that communicator, for the group `child` of these ranks; all ranks of this group call this or the next
        /// together.
        fn split(self: &RustDevices, child: &RustDevices, device: i32, members: &[u32]) -> Result<()>;
        /// The same for a rank that is in no new group: with the members that a rank that is in one passes.
        fn split_without_child(self: &RustDevices, device: i32, members: &[u32]) -> Result<()>;
        /// Takes the communicator of all ranks out of use; it ends when the returned object is dropped. `drained`:
        /// nothing is under way.
        fn retire(self: &RustDevices, device: i32, drained: bool) -> DevicesRetired;
        /// Ends the communicators together with the other ranks; false where a signal handler raised meanwhile.
        /// `drained` as above.
        fn close(self: &RustDevices, timeout_ms: u64, drained: bool) -> bool;
        /// Aborts the communicators, which unblocks operations that hang; no operation can be issued afterwards.
        fn abort(self: &RustDevices);

        /// Puts the calls on a raw stream, as one launch. Host memory that the library was given is kept until this is
        /// dropped. Calls that are captured count as ended, because no event reports their end.
        fn launch(self: &RustCall, placed: &[DevicePlaced], stream: usize) -> Result<()>;
        /// The caller could not launch the calls, or not complete their launch: the group fails on all ranks, because
        /// others may have launched theirs. Calls that are dropped without a launch do so, too.
        fn failed_here(self: &RustCall, why: &str);
        /// From here until `poll_running` or `poll_passed`, which take the returned value, queries of this thread to the
        /// device break no capture of another thread.
        fn before_poll(self: &RustCall) -> Result<u32>;
        /// The device has not passed the calls. Empty, or the error, with its code letter, by which they will never end:
        /// then the group has failed, and the caller calls `abort` when it has told the program.
        fn poll_running(self: &RustCall, capture_mode: u32) -> String;
        /// The device has passed the calls: adds their end to the statistics, once it is known. After an error as above.
        fn poll_passed(self: &RustCall, capture_mode: u32) -> DevicePassed;
        /// Whether the library reads host memory that this keeps. Then captured calls are kept as long as their graph may
        /// be replayed.
        fn keeps_memory(self: &RustCall) -> bool;
        /// For captured calls: the error, with its code letter, by which a replay would not end; then the group has
        /// failed, and the caller calls `abort` when it has told the program.
        fn look_at_replays(self: &RustCall) -> String;
        /// Ends the communicators of the calls' group, which unblocks calls that hang. May last as long as the library
        /// needs.
        fn abort(self: &RustCall);
        /// Looks at a launch that has not returned. Empty, or the error, with its code letter, by which it shall not go on:
        /// the group has failed, and `abort` makes the launch return.
        fn look_at_launch(self: &RustCall) -> String;
        /// How the library runs each of the calls: JSON for each.
        fn explain(self: &RustCall) -> Vec<String>;

        /// Aborts operations that are under way, and makes the communicator of all ranks but `excluded`, which do not
        /// call this.
        fn shrink(self: &RustRetired, child: &RustDevices, excluded: &[u32]) -> Result<()>;

        /// `fusion::lists::operations`, of our engines.
        #[Self = "RustGroup"]
        fn list_operations(kind: Kind, elements: &[u8], bytes: &[usize]) -> Result<Vec<u32>>;
        /// The same, of a vendor's library.
        #[Self = "RustDevices"]
        fn list_operations(kind: Kind, elements: &[u8], bytes: &[usize]) -> Result<Vec<u32>>;
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
        /// Deletes a key that this rank alone reads, where the store can do so.
        fn remove(self: &Store, key: &str) -> Result<()>;
        /// The same number for all stores over one connection.
        fn connection(self: &Store) -> usize;

        type IdExchange;
        /// Hands an id from rank 0 to all.
        fn broadcast(self: &IdExchange, id: &mut [u8]) -> Result<()>;
        /// Hands an id from one rank to another; both call this.
        fn pass(self: &IdExchange, id: &mut [u8], from: i32, to: i32) -> Result<()>;

        type Completion;
        // Moments of the operation, on any thread, without the GIL, in this order.
        /// The inputs are about to be read: strided ones are copied into their contiguous pieces.
        fn prepare(self: &Completion);
        /// The outputs were written: contiguous results are copied into strided tensors.
        fn store_back(self: &Completion);
        /// The end. `error` is empty, or has its code letter. Must run no Python and not block; it may queue work for
        /// other threads.
        fn ended(self: &Completion, error: &str);

        /// True when a Python signal handler raised; the shim keeps the exception for the thread that asked.
        fn check_interrupt() -> bool;
        /// Where a thread of Python's is, by its `pthread_self` (0: the main thread): "FILE:LINE in FUNCTION", or empty where
        /// it is nowhere. Waits for the GIL.
        fn place_of_thread(thread: u64) -> String;
        /// The same of a call, by its `site`. Waits for nothing.
        fn place_of_call(site: u32) -> String;
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
