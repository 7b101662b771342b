//! The part of the contract between C++ and Rust for explanations, statistics and predictions: the structs, and the
//! functions that need no group. The rules of `bridge` hold here too.

use super::handles::Core;

#[cxx::bridge(namespace = "sagellm")]
pub mod ffi {
    struct Fact {
        name: String,
        value: String,
    }

    /// `select::explain::Explanation`. Nanoseconds are 0 where they are unknown.
    #[derive(Default)]
    struct Explanation {
        kind: String,
        bytes: u64,
        ranks: usize,
        hosts: usize,
        slot_bytes: usize,
        choice: String,
        reason: String,
        code: u64,
        /// The vendor's library that carried the operation, and the algorithm that it reports. Of the other fields only
        /// `kind`, `bytes`, `ranks`, `number` and `decided` have a meaning then. Empty for operations that an engine or
        /// a delegate carries.
        library: String,
        ran: String,
        decided: String,
        predicted_ns: u64,
        measured_ns: u64,
        table: String,
        overruled: Vec<String>,
        rejected: Vec<Alternative>,
        /// The operation was called. Otherwise the other fields have no meaning.
        past: bool,
        number: u64,
        host_staged: bool,
        /// 0 before it has started.
        recorded: u64,
        batch: Batch,
    }

    /// An algorithm that was not chosen.
    struct Alternative {
        way: String,
        /// 0 where it cannot run this operation.
        predicted_ns: u64,
        why_not: String,
    }

    /// `select::explain::Batch`; no operations where it is not known.
    #[derive(Default)]
    struct Batch {
        operations: u64,
        first: u64,
        last: u64,
        /// Bytes of all operations together where one algorithm was chosen for them, else -1.
        bytes: i64,
    }

    /// `select::explain::Table`.
    struct ChoiceTable {
        note: String,
        rules: Vec<String>,
        rows: Vec<ChoiceRow>,
    }

    struct ChoiceRow {
        kind: String,
        sizes: String,
        way: String,
        reason: String,
        /// 0 where it was not measured.
        measured_ns: u64,
    }

    /// `stats::Stats` of a group. Times in nanoseconds.
    struct Stats {
        rank: usize,
        size: usize,
        /// The moment at which it was read, on the clock of the records and since the epoch.
        now: u64,
        wall: u64,
        /// When counting began.
        since: u64,
        /// Operations since the group was made.
        issued: u64,
        /// `stats::Fused`.
        batches: u64,
        batched_ops: u64,
        largest_batch: u64,
        /// `stats::HostStaged`.
        host_staged_count: u64,
        host_staged_bytes: u64,
        /// One a rank.
        waits: Vec<PeerWait>,
        cells: Vec<Cell>,
    }

    /// `stats::Wait`.
    struct PeerWait {
        count: u64,
        total: u64,
        longest: u64,
    }

    /// `stats::Cell`.
    struct Cell {
        kind: String,
        path: String,
        /// -1 where several are mixed.
        size_class: i32,
        count: u64,
        failed: u64,
        tensors: u64,
        bytes: u64,
        whole: u64,
        took: u64,
        waiting: u64,
        copying: u64,
        reducing: u64,
        longest: u64,
        times: Vec<Bucket>,
    }

    /// The first value behind a bucket of the histogram, and how many values it holds.
    struct Bucket {
        bound: u64,
        count: u64,
    }

    /// `stats::ring::Record`. Ranks are -1 for no rank or any rank.
    struct Record {
        id: u64,
        number: u64,
        kind: String,
        dtype: String,
        op: String,
        path: String,
        reason: String,
        state: String,
        counts: bool,
        tensors: u32,
        element: u8,
        site: u32,
        host_staged: bool,
        root: i64,
        tag: u32,
        late: i64,
        together: u64,
        first: u64,
        last: u64,
        read: u64,
        written: u64,
        issued: u64,
        ended: u64,
        waiting: u64,
        copying: u64,
        reducing: u64,
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

    /// The fastest that one algorithm can do at one size, and in how many segments.
    struct Prediction {
        seconds: f64,
        segments: usize,
    }

    /// The schedule of one rank.
    struct Program {
        /// The parts that the vector is cut into.
        parts: usize,
        messages: Vec<ProgramLine>,
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

    // Lists of these cross in `bridge`, too.
    impl Vec<Explanation> {}
    impl Vec<Record> {}

    extern "Rust" {
        type Core;

        /// Highest level that is logged: 0 off, 1 error, 2 warn, 3 info, 4 debug, 5 trace.
        #[Self = "Core"]
        fn set_log_level(level: u8);
        /// Stops this process's threads of ours; called once, from atexit, with the GIL released.
        #[Self = "Core"]
        fn at_exit();
        /// The names that Python knows the kinds by, in the order of their numbers.
        #[Self = "Core"]
        fn kind_names() -> Vec<String>;
        /// Those of the element types that every engine combines.
        #[Self = "Core"]
        fn dtype_names() -> Vec<String>;
        /// About this machine: cores, quota, kernel, memory limits.
        #[Self = "Core"]
        fn machine_facts() -> Vec<Fact>;
        /// As `RustGroup::explain` for a group that is not there: `ranks` ranks of this host, with the rules of `algorithm`
        /// and of the environment, and the table on disk.
        #[Self = "Core"]
        fn explain_without_group(
            ranks: usize,
            algorithm: &str,
            kind: &str,
            bytes: u64,
            dtype: &str,
        ) -> Result<Explanation>;
        /// All choices that such a group would make.
        #[Self = "Core"]
        fn table_without_group(ranks: usize, algorithm: &str) -> Result<ChoiceTable>;
        /// What the start rules say for `ranks` devices that are placed as `topology` says.
        #[Self = "Core"]
        fn start_rule(ranks: usize, topology: &str, kind: &str, bytes: u64) -> Result<Explanation>;
        /// Writes a decision table for `ranks` ranks on this machine; `lines` as in `select/table.rs`. Its path.
        #[Self = "Core"]
        fn save_table(ranks: usize, made: &str, lines: &str) -> Result<String>;
        /// The algorithms that have a schedule for a kind.
        #[Self = "Core"]
        fn algorithms_of(kind: &str) -> Result<Vec<String>>;
        /// Predicted times of one algorithm, one for each of `sizes` in bytes.
        #[Self = "Core"]
        fn predict(
            kind: &str,
            algorithm: &str,
            ranks: usize,
            sizes: &[f64],
            model: &CostModel,
        ) -> Result<Vec<Prediction>>;
        /// The messages of one rank, step by step.
        #[Self = "Core"]
        fn program(kind: &str, algorithm: &str, ranks: usize, segments: usize, rank: usize) -> Result<Program>;
    }
}
