//! The variables that change how the simulators behave, read once. README.md has the list.

use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use once_cell::sync::Lazy;

pub struct Settings {
    /// Devices that the runtimes report.
    pub devices: usize,
    /// Nothing waits longer than this, whatever the vendor would do.
    pub ceiling: Duration,
    /// Every operation of a communicator takes this much longer on its stream.
    pub slow: Duration,
    /// Records go through a host queue that is this late, on every stream.
    pub host_queue: Duration,
    /// The n-th operation of this process (from 1) ends in an asynchronous error, or never ends; 0 for none.
    pub error_at: usize,
    pub hang_at: usize,
    /// The n-th call of this process that issues an operation (from 1) is refused with an error; 0 for none.
    pub refuse_at: usize,
    /// How much longer the abort of a communicator takes.
    pub abort_takes: Duration,
    /// The n-th launch of this process (from 1) returns only when its communicator is aborted; 0 for none.
    pub stuck_at: usize,
    /// Communicators connect all their ranks when they are made, not at the first use.
    pub eager: bool,
    /// How long a rank stays in a first use before the others can see that it has come.
    pub connect_takes: Duration,
    /// Communicators are never ready.
    pub init_hangs: bool,
    /// File (with the process id behind it) that lists the calls.
    pub trace: Option<String>,
    /// `cnrtQueryNotifier` and `cnrtQueueQuery` of running work.
    pub cnrt_pending: i32,
    pub nccl_version: i32,
    /// How long a call on a non-blocking NCCL communicator stays in progress.
    pub nccl_delay: Duration,
    pub soc: String,
    pub hccl_capability: u32,
    pub hccl_connect: Duration,
    pub hccl_exec: Duration,
}

fn text(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn number<T: FromStr>(name: &str, default: T) -> T {
    let Some(value) = text(name) else { return default };
    value.trim().parse().unwrap_or_else(|_| {
        eprintln!("sagellm simulator: {name}={value} is no number and is not used");
        default
    })
}

/// Seconds in the vendor's variable; 0 means no limit.
fn seconds(name: &str, default: u64) -> Duration {
    match number(name, default) {
        0 => Duration::from_secs(365 * 24 * 3600),
        seconds => Duration::from_secs(seconds),
    }
}

static SETTINGS: Lazy<Settings> = Lazy::new(|| Settings {
    devices: number("SAGELLM_SIM_DEVICES", 8),
    ceiling: Duration::from_millis(number("SAGELLM_SIM_TIMEOUT_MS", 60_000)),
    slow: Duration::from_micros(number("SAGELLM_SIM_SLOW_US", 0)),
    host_queue: Duration::from_micros(number("SAGELLM_SIM_HOST_QUEUE_US", 0)),
    error_at: number("SAGELLM_SIM_ERROR_AT", 0),
    hang_at: number("SAGELLM_SIM_HANG_AT", 0),
    refuse_at: number("SAGELLM_SIM_REFUSE_AT", 0),
    abort_takes: Duration::from_millis(number("SAGELLM_SIM_ABORT_MS", 0)),
    stuck_at: number("SAGELLM_SIM_STUCK_AT", 0),
    eager: text("SAGELLM_SIM_CONNECT").as_deref() == Some("eager"),
    connect_takes: Duration::from_millis(number("SAGELLM_SIM_CONNECT_MS", 0)),
    init_hangs: text("SAGELLM_SIM_INIT").as_deref() == Some("hang"),
    trace: text("SAGELLM_SIM_TRACE"),
    cnrt_pending: match text("SAGELLM_SIM_CNRT_PENDING").as_deref() {
        Some("notready") => 1,
        _ => 632_014,
    },
    nccl_version: number("SAGELLM_SIM_NCCL_VERSION", 23_007),
    nccl_delay: Duration::from_micros(number("SAGELLM_SIM_NCCL_DELAY_US", 500)),
    soc: text("SAGELLM_SIM_SOC").unwrap_or_else(|| "Ascend910B2".to_string()),
    hccl_capability: number("SAGELLM_SIM_HCCL_CAPABILITY", 12),
    hccl_connect: seconds("HCCL_CONNECT_TIMEOUT", 120),
    hccl_exec: seconds("HCCL_EXEC_TIMEOUT", 1836),
});

pub fn get() -> &'static Settings {
    &SETTINGS
}

/// Whether the call that is about to issue an operation is the one that `SAGELLM_SIM_REFUSE_AT` names.
pub fn refuses() -> bool {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    CALLS.fetch_add(1, Ordering::Relaxed) + 1 == get().refuse_at
}
