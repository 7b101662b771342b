//! The variables that change how the simulators behave. They are read once; README.md lists them.

use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use once_cell::sync::Lazy;

pub struct Settings {
    /// Number of devices that the runtimes report.
    pub devices: usize,
    /// Longest time of any wait, even if the vendor's wait has no limit.
    pub ceiling: Duration,
    /// Extra time that every operation of a communicator takes on its stream.
    pub slow: Duration,
    /// Delay of records on every stream, which go through a host queue; 0 for no queue.
    pub host_queue: Duration,
    /// `error_at`: the number, counted from 1, of the operation of this process that ends with an asynchronous error.
    /// `hang_at`: the number of the operation that never ends. 0 means no operation.
    pub error_at: usize,
    pub hang_at: usize,
    /// The number, from 1, of the call of this process that is rejected with an error; 0 for none. Only calls that
    /// would issue an operation count.
    pub refuse_at: usize,
    /// Extra time that the abort of a communicator takes.
    pub abort_takes: Duration,
    /// Number of the launch of this process, from 1, that returns only when its communicator is aborted; 0 for none.
    pub stuck_at: usize,
    /// Communicators connect all their ranks when they are made, not at their first use.
    pub eager: bool,
    /// How long a rank waits at a first use before the other ranks can see it.
    pub connect_takes: Duration,
    /// Communicators never become ready.
    pub init_hangs: bool,
    pub init_refused: bool,
    /// An operation whose peer aborts its communicator passes here, without an error and without that peer's data.
    pub peer_abort_passes: bool,
    /// Path of the file that lists the calls; the process id is appended.
    pub trace: Option<String>,
    /// Result of `cnrtQueryNotifier` and `cnrtQueueQuery` while the work runs.
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

/// Seconds from the vendor's variable; 0 means no limit.
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
    peer_abort_passes: text("SAGELLM_SIM_PEER_ABORT").as_deref() == Some("passes"),
    init_refused: text("SAGELLM_SIM_INIT").as_deref() == Some("refuse"),
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

/// True if this call, which is about to issue an operation, is the one that `SAGELLM_SIM_REFUSE_AT` selects.
pub fn refuses() -> bool {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    CALLS.fetch_add(1, Ordering::Relaxed) + 1 == get().refuse_at
}
