//! The part of the contract between C++ and Rust for questions that need no group: names, explanations, predictions. The
//! rules of `bridge` hold here too.

use super::handles::Core;

#[cxx::bridge(namespace = "sagellm")]
pub mod ffi {
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
        /// About this machine: cores, quota, kernel, memory limits. This and the next three are JSON.
        #[Self = "Core"]
        fn machine_facts() -> String;
        /// As `RustGroup::explain` for a group that is not there: `ranks` ranks of this host, with the rules of `algorithm`
        /// and of the environment, and the table on disk.
        #[Self = "Core"]
        fn explain_without_group(ranks: usize, algorithm: &str, kind: &str, bytes: u64, dtype: &str) -> Result<String>;
        /// All choices that such a group would make.
        #[Self = "Core"]
        fn table_without_group(ranks: usize, algorithm: &str) -> Result<String>;
        /// What the start rules say for `ranks` devices that are placed as `topology` says.
        #[Self = "Core"]
        fn start_rule(ranks: usize, topology: &str, kind: &str, bytes: u64) -> Result<String>;
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
