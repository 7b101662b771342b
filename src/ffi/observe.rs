//! The part of the bridge for questions that need no group: names, explanations, predictions. The rules of `bridge`
//! apply here too.

use super::handles::Core;

#[cxx::bridge(namespace = "sagellm")]
pub mod ffi {
    /// The fields of `select::cost::Model`: times in seconds, and in seconds per byte.
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

    /// The shortest time of one algorithm for one size, and the number of segments with which it is reached.
    struct Prediction {
        seconds: f64,
        segments: usize,
    }

    /// One rank's part of a schedule.
    struct Program {
        /// Number of parts into which the vector is divided.
        parts: usize,
        messages: Vec<ProgramLine>,
    }

    /// One message in a rank's part of a schedule.
    struct ProgramLine {
        step: usize,
        sends: bool,
        peer: usize,
        /// Numbers of the parts, in their order in the message.
        parts: Vec<usize>,
        /// What a receive does with its data: "copy", "reduce_after", "reduce_before" or "in_rank_order". Always "copy"
        /// for a send.
        how: String,
    }

    extern "Rust" {
        type Core;

        /// Sets the highest level that is logged: 0 off, 1 error, 2 warn, 3 info, 4 debug, 5 trace.
        #[Self = "Core"]
        fn set_log_level(level: u8);
        /// Ends the threads that the core has started in this process. Called once, from atexit, by a thread that has
        /// released the GIL.
        #[Self = "Core"]
        fn at_exit();
        /// Python's names of the kinds, in the order of their numbers.
        #[Self = "Core"]
        fn kind_names() -> Vec<String>;
        /// The names of the element types that every engine can reduce.
        #[Self = "Core"]
        fn dtype_names() -> Vec<String>;
        /// Facts about this machine: cores, quota, kernel, memory limits. The results of this and the next three
        /// functions are JSON.
        #[Self = "Core"]
        fn machine_facts() -> String;
        /// Like `RustGroup::explain`, for an assumed group of `ranks` ranks on this host. It uses the rules of
        /// `algorithm` and of the environment, and the table on disk.
        #[Self = "Core"]
        fn explain_without_group(ranks: usize, algorithm: &str, kind: &str, bytes: u64, dtype: &str) -> Result<String>;
        /// All choices that such a group would make.
        #[Self = "Core"]
        fn table_without_group(ranks: usize, algorithm: &str) -> Result<String>;
        /// The algorithm that the start rules (`select/start.rs`) choose for `ranks` devices with this topology.
        #[Self = "Core"]
        fn start_rule(ranks: usize, topology: &str, kind: &str, bytes: u64) -> Result<String>;
        /// Writes a decision table for `ranks` ranks on this machine, and returns its path. `lines` has the format of
        /// `select/table.rs`.
        #[Self = "Core"]
        fn save_table(ranks: usize, made: &str, lines: &str) -> Result<String>;
        /// Names of the algorithms that have a schedule for a kind.
        #[Self = "Core"]
        fn algorithms_of(kind: &str) -> Result<Vec<String>>;
        /// The predicted time of one algorithm for each size (in bytes) in `sizes`.
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
