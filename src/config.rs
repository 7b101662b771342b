//! The settings of a group, and the environment variables that the core reads. Plain data.

use std::fmt;
use std::time::Duration;

use once_cell::sync::Lazy;

#[derive(Clone, Debug)]
pub struct Config {
    pub rank: usize,
    pub size: usize,
    /// Timeout of operations whose caller gives none.
    pub timeout: Duration,
    /// Name in error texts and logs.
    pub name: String,
    /// Why this rank wants the delegate to serve the whole group; `None` if the engine may serve it.
    pub delegate_reason: Option<String>,
    /// The option `delegate`: the backend of torch that serves groups and operations which this engine cannot serve.
    /// Equal on all ranks.
    pub delegate: String,
    /// The option `algorithm`: rules that take precedence over those of the environment (`select::rules`).
    pub algorithm: String,
    /// The option `topology`: the user's description of the machines (`select::start::Topology` as text), or empty.
    pub topology: String,
    /// Rank 0's policy for the choice of algorithms (`select::policy`) as text. Set when the group is created.
    pub policy: String,
    pub settings: Settings,
    pub threads: Threads,
    /// The option `soft_timeout`. If it is `None`, the setting of the process applies (`soft_timeout`).
    pub soft_timeout: Option<Duration>,
    /// Addresses at which other ranks reach this process, for groups that need a delegate or a link, in the format of
    /// `rendezvous::addresses`. Empty if the caller names none.
    pub addresses: String,
}

/// The threads that may copy and combine for a waiting thread of this rank (`threads`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threads {
    pub most: u32,
    /// Whether `most` comes from the option `threads`, and is not the number of torch's intra-op threads.
    pub named: bool,
}

impl Default for Threads {
    fn default() -> Threads {
        Threads { most: 1, named: false }
    }
}

/// Options that should be equal on all ranks of a group. For `measure_link` and `verify`, rank 0's value applies to the
/// whole group, as part of its policy, and a rank with another value logs a warning. If `fusion` or `strict` differs in
/// a group over several hosts, the group fails with a mismatch. In a group on one host, `fusion` affects only the rank
/// that sets it, and `strict` has no effect. For `numa`, the value of the first rank of each host applies to that host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Fuses small operations that are pending at the same time.
    pub fusion: bool,
    /// Results have the bits that one host would give: every element is reduced in the order of the ranks.
    pub strict: bool,
    /// Measures the link between hosts when the group is created. If false, the start rules decide (`select::start`).
    pub measure_link: bool,
    /// Combines and broadcasts large tensors node by node (NUMA node or last-level cache), where that is possible
    /// (`engine::shm::nodes`).
    pub numa: bool,
    /// How much of each result is compared between the ranks.
    pub verify: Verify,
}

/// The option `verify`: whether ranks compare hashes of the results that are equal on all of them by contract, and what
/// happens if they differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verify {
    pub part: Part,
    /// Whether a difference is only logged. If not, it fails the group.
    pub warns: bool,
}

/// The part of each result that is hashed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    #[default]
    Nothing,
    /// A part of the result, which changes from operation to operation.
    Sample,
    All,
}

impl Verify {
    /// The texts of the option, for messages.
    pub const TEXTS: &'static str = "off, sampled, all, sampled:warn, all:warn";

    pub fn is_on(self) -> bool {
        self.part != Part::Nothing
    }

    /// The part of a group's description that says that its results are compared.
    pub fn described(self) -> String {
        if self.is_on() { format!(", results compared ({self})") } else { String::new() }
    }

    /// Parses the option. None if the text is not valid.
    pub fn parse(text: &str) -> Option<Verify> {
        let (part, rest) = text.split_once(':').map_or((text, None), |(part, rest)| (part, Some(rest)));
        let part = match (part, rest) {
            ("" | "off", None) => Part::Nothing,
            ("sampled", _) => Part::Sample,
            ("all", _) => Part::All,
            _ => return None,
        };
        matches!(rest, None | Some("warn")).then_some(Verify { part, warns: rest.is_some() })
    }
}

impl fmt::Display for Verify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.part {
            Part::Nothing => "off",
            Part::Sample => "sampled",
            Part::All => "all",
        })?;
        f.write_str(if self.warns && self.is_on() { ":warn" } else { "" })
    }
}

impl Config {
    /// The default delegate. If it is used, our own engine serves groups over several hosts, with its own link
    /// (`multihost/wire`). If the option `delegate` names another backend, that backend serves such groups completely.
    pub const LINK: &'static str = "gloo";

    /// The name, in texts, of the backend that serves this group if the engine cannot.
    pub fn served_by(&self) -> &str {
        if self.delegate.is_empty() { Config::LINK } else { &self.delegate }
    }

    /// A group without options, for tests.
    #[cfg(any(test, feature = "testing"))]
    pub fn without_options(rank: usize, size: usize, timeout: Duration) -> Config {
        Config {
            rank,
            size,
            timeout,
            name: "test".to_string(),
            delegate_reason: None,
            delegate: Config::LINK.to_string(),
            algorithm: String::new(),
            topology: String::new(),
            policy: String::new(),
            settings: Settings::default(),
            threads: Threads::default(),
            soft_timeout: None,
            addresses: String::new(),
        }
    }
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { fusion: true, strict: false, measure_link: true, numa: false, verify: Verify::default() }
    }
}

/// The folder to which a group that fails writes its last operations: the variable `SAGELLM_DUMP_DIR`; `None` if it is
/// unset or empty.
pub fn dump_folder() -> Option<&'static str> {
    static FOLDER: Lazy<Option<String>> =
        Lazy::new(|| std::env::var("SAGELLM_DUMP_DIR").ok().filter(|folder| !folder.is_empty()));
    FOLDER.as_deref()
}

/// Returns the soft timeout: after this time, but at the latest after half of an operation's timeout, the group asks
/// the ranks for which the operation waits what they are doing, and logs a line. This is the variable
/// `SAGELLM_SOFT_TIMEOUT` in seconds; 30 if it is unset, negative or not a number. If it is 0, no line is logged, and
/// the ranks are asked after half of the timeout.
pub fn soft_timeout() -> Duration {
    const UNSET: f64 = 30.0;
    static SOFT: Lazy<Duration> = Lazy::new(|| {
        let given = std::env::var("SAGELLM_SOFT_TIMEOUT").ok().and_then(|text| text.trim().parse().ok());
        let seconds = given.filter(|seconds: &f64| (0.0..1e9).contains(seconds)).unwrap_or(UNSET);
        Duration::from_secs_f64(seconds)
    });
    *SOFT
}

/// Returns how many operations' records each group keeps at least: the variable `SAGELLM_RING`, but at most `MOST`;
/// 1024 if it is unset or not a number.
pub fn ring() -> usize {
    const MOST: usize = 1 << 20;
    static RING: Lazy<usize> = Lazy::new(|| {
        std::env::var("SAGELLM_RING").ok().and_then(|text| text.trim().parse().ok()).unwrap_or(1024).min(MOST)
    });
    *RING
}

/// Size of the memory for tensors that peers can reach: the variable `SAGELLM_SHARED_BYTES`; `None` if it is unset or
/// not a number.
pub fn shared_bytes() -> Option<usize> {
    std::env::var("SAGELLM_SHARED_BYTES").ok().and_then(|text| text.trim().parse().ok())
}

/// Widest instruction set that the reduction kernels may use: the variable `SAGELLM_KERNELS`; `None` if it is unset or
/// blank. All sets give the same bits.
pub fn kernels() -> Option<String> {
    std::env::var("SAGELLM_KERNELS").ok().filter(|name| !name.trim().is_empty())
}

/// Path of a vendor's library: the variable `SAGELLM_<KEY>_LIBRARY`. Read each time the library is opened.
pub fn library(key: &str) -> Option<String> {
    std::env::var(format!("SAGELLM_{key}_LIBRARY")).ok().filter(|path| !path.is_empty())
}

/// A folder that contains vendor libraries under their usual names: the variable `SAGELLM_VENDOR_DIR`.
pub fn vendor_folder() -> Option<String> {
    std::env::var("SAGELLM_VENDOR_DIR").ok().filter(|folder| !folder.is_empty())
}

/// Whether 64-bit floats may be sent as 32-bit floats if a device does not support 64-bit floats: the variable
/// `SAGELLM_DOUBLE_AS_FLOAT`.
pub fn double_as_float() -> bool {
    std::env::var("SAGELLM_DOUBLE_AS_FLOAT").is_ok_and(|value| value == "1")
}

/// Whether groups keep the usual times of their calls and use those of earlier groups (`stats::kept`). True unless the
/// variable `SAGELLM_KEEP_TIMES` turns it off.
pub fn keeps_times() -> bool {
    let off = |value: String| ["0", "off", "false", "no"].contains(&value.trim().to_ascii_lowercase().as_str());
    !std::env::var("SAGELLM_KEEP_TIMES").is_ok_and(off)
}

/// Whether `explain` reports the algorithm that NCCL used: the variable `SAGELLM_EXPLAIN`. NCCL must load our plugin
/// for this.
pub fn explains_devices() -> bool {
    std::env::var("SAGELLM_EXPLAIN").is_ok_and(|value| value == "1")
}
