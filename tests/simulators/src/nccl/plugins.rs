//! The plug-ins that NCCL loads by their paths: the tuner (v6, v5) of `NCCL_TUNER_PLUGIN` and the profiler (v6, v5) of
//! `NCCL_PROFILER_PLUGIN`. The layouts are those of NVIDIA/nccl, src/include/plugin.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use once_cell::sync::Lazy;

use crate::comm::Comm;
use crate::pointers::forever;
use crate::trace;

pub const ALGORITHMS: [&CStr; 7] =
    [c"TREE", c"RING", c"COLLNET_DIRECT", c"COLLNET_CHAIN", c"NVLS", c"NVLS_TREE", c"PAT"];
pub const PROTOCOLS: [&CStr; 3] = [c"LL", c"LL128", c"SIMPLE"];
const COSTS: usize = ALGORITHMS.len() * PROTOCOLS.len();
/// Largest chunk, in bytes. If the plug-in requests a larger one, it gets this.
const LARGEST_CHUNK: usize = 4 << 20;
const EVENT_COLL: u64 = 2;

/// The real type is variadic. The arguments after the format are not read.
type Logger = extern "C" fn(i32, u64, *const c_char, i32, *const c_char);

extern "C" fn log(level: i32, _flags: u64, _file: *const c_char, _line: i32, format: *const c_char) {
    if !format.is_null() {
        // SAFETY: the plug-in passes a string literal, as the interface requires.
        let text = unsafe { CStr::from_ptr(format) }.to_string_lossy().into_owned();
        trace::call(|| format!("plugin-log level={level} {text}"));
    }
}

#[repr(C)]
struct NvlDomains {
    domains: i32,
    least_ranks: i32,
    most_ranks: i32,
}

#[repr(C)]
struct TunerConstants {
    base_latencies: [[f64; 3]; 7],
    hardware_latencies: [[[f64; 3]; 7]; 3],
    bandwidths: [[[f64; 3]; 4]; 5],
}

const _: () = assert!(size_of::<NvlDomains>() == 12 && size_of::<TunerConstants>() == 8 * (21 + 63 + 60));

type TunerInit =
    extern "C" fn(*mut *mut c_void, u64, usize, usize, Logger, *mut NvlDomains, *mut TunerConstants) -> i32;
type GetCollInfo = extern "C" fn(*mut c_void, i32, usize, i32, *mut f32, i32, i32, i32, *mut i32) -> i32;
type GetChunkSize = extern "C" fn(*mut c_void, i32, usize, i32, i32, i32, *mut usize) -> i32;

/// The tuner's table in v5. v6 has one more entry at its end.
#[repr(C)]
struct Tuner {
    name: *const c_char,
    init: Option<TunerInit>,
    get_coll_info: Option<GetCollInfo>,
    finalize: Option<extern "C" fn(*mut c_void) -> i32>,
}

#[repr(C)]
struct TunerV6 {
    v5: Tuner,
    get_chunk_size: Option<GetChunkSize>,
}

/// The descriptor of a collective. The union after `rank` has the size of its largest member in v6.
#[repr(C)]
struct Event {
    kind: u64,
    parent: *mut c_void,
    rank: i32,
    number: u64,
    func: *const c_char,
    send: usize,
    recv: usize,
    count: usize,
    root: i32,
    datatype: *const c_char,
    channels: u8,
    warps: u8,
    algorithm: *const c_char,
    protocol: *const c_char,
    parent_group: *mut c_void,
    rest: [u64; 4],
}

#[repr(C)]
struct Profiler {
    name: *const c_char,
    init: Option<extern "C" fn(*mut *mut c_void, u64, *mut i32, *const c_char, i32, i32, i32, Logger) -> i32>,
    start: Option<extern "C" fn(*mut c_void, *mut *mut c_void, *mut Event) -> i32>,
    stop: Option<extern "C" fn(*mut c_void) -> i32>,
    record: Option<extern "C" fn(*mut c_void, i32, *mut c_void) -> i32>,
    finalize: Option<extern "C" fn(*mut c_void) -> i32>,
}

struct Loaded {
    address: usize,
    version: u32,
}

/// Loads a plug-in. Each plug-in is loaded once in a process; a failure is remembered, too.
fn load(variable: &str, symbol: &str) -> Option<Loaded> {
    let path = std::env::var(variable).ok().filter(|path| path != "none")?;
    let file = CString::new(path.clone()).ok()?;
    // SAFETY: loading runs the plug-in's initialisers, which the user has requested by the variable.
    let library = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        trace::refuse(format!("{variable}={path} cannot be loaded"));
        return None;
    }
    [6, 5].into_iter().find_map(|version| {
        let name = CString::new(format!("{symbol}_v{version}")).ok()?;
        // SAFETY: the library was opened above and is never closed.
        let address = unsafe { libc::dlsym(library, name.as_ptr()) } as usize;
        trace::call(|| format!("plugin {symbol}_v{version} found={}", address != 0));
        (address != 0).then_some(Loaded { address, version })
    })
}

static TUNER: Lazy<Option<Loaded>> = Lazy::new(|| load("NCCL_TUNER_PLUGIN", "ncclTunerPlugin"));
static PROFILER: Lazy<Option<Loaded>> = Lazy::new(|| load("NCCL_PROFILER_PLUGIN", "ncclProfiler"));

fn tuner() -> Option<(&'static Tuner, Option<GetChunkSize>)> {
    let loaded = TUNER.as_ref()?;
    // SAFETY: the symbol is a data object with the layout of its version, in a library that stays loaded.
    let tuner = unsafe { &*(loaded.address as *const Tuner) };
    if loaded.version < 6 {
        return Some((tuner, None));
    }
    // SAFETY: as above, for the longer layout of v6.
    Some((tuner, unsafe { &*(loaded.address as *const TunerV6) }.get_chunk_size))
}

fn profiler() -> Option<&'static Profiler> {
    let loaded = PROFILER.as_ref()?;
    // SAFETY: the symbol is a data object with this layout in both versions, in a library that stays loaded.
    Some(unsafe { &*(loaded.address as *const Profiler) })
}

/// The plug-ins' data for one communicator. The addresses belong to the plug-ins; no other code reads the memory there.
pub struct Sessions {
    id: u64,
    tuner: Option<usize>,
    profiler: Option<(usize, u64)>,
}

impl Sessions {
    /// Opens a communicator for the plug-ins. An error of the tuner fails the set-up of the communicator.
    pub fn open(comm: &Comm) -> Result<Arc<Sessions>, i32> {
        let id = comm.place.number();
        let mut sessions = Sessions { id, tuner: None, profiler: None };
        if let Some((tuner, _)) = tuner()
            && let Some(init) = tuner.init
        {
            let mut context = null_mut();
            let size = comm.size as i32;
            let mut domains = NvlDomains { domains: 1, least_ranks: size, most_ranks: size };
            let mut constants = TunerConstants {
                base_latencies: [[6.0; 3]; 7],
                hardware_latencies: [[[1.0; 3]; 7]; 3],
                bandwidths: [[[40.0; 3]; 4]; 5],
            };
            let result = init(&mut context, id, comm.size as usize, 1, log, &mut domains, &mut constants);
            trace::call(|| format!("tuner-init id={id:#x} ranks={} result={result}", comm.size));
            if result != 0 {
                return Err(result);
            }
            sessions.tuner = Some(context as usize);
        }
        if let Some(profiler) = profiler()
            && let Some(init) = profiler.init
        {
            let (mut context, mut mask) = (null_mut(), 0);
            let name = forever(&comm.name);
            let result = init(&mut context, id, &mut mask, name, 1, comm.size as i32, comm.rank as i32, log);
            trace::call(|| format!("profiler-init id={id:#x} mask={mask} result={result}"));
            if result == 0 {
                sessions.profiler = Some((context as usize, mask as u64));
            }
        }
        Ok(Arc::new(sessions))
    }

    /// Chooses the algorithm and protocol of a collective: the cheapest of the table after the tuner has changed it.
    pub fn choose(&self, func: i32, bytes: usize, grouped: usize) -> Result<(usize, usize), i32> {
        const UNUSABLE: f32 = -1.0;
        let offered = costs(func, bytes);
        let mut table = offered;
        let mut channels = 0;
        if let (Some(context), Some((tuner, chunk))) = (self.tuner, tuner()) {
            if let Some(get) = tuner.get_coll_info {
                let (algorithms, protocols) = (ALGORITHMS.len() as i32, PROTOCOLS.len() as i32);
                let context = context as *mut c_void;
                let costs = table.as_mut_ptr();
                let result = get(context, func, bytes, grouped as i32, costs, algorithms, protocols, 0, &mut channels);
                if result != 0 {
                    trace::refuse(format!("the tuner gave {result} for function {func}"));
                    return Err(result);
                }
            }
            let best = cheapest(&table)?;
            if offered[best] == UNUSABLE {
                trace::refuse(format!("the tuner chose {}, which was marked unusable", describe(best)));
                return Err(super::INTERNAL_ERROR);
            }
            if let Some(chunk) = chunk {
                let mut size = 1 << 19;
                let (algorithm, protocol) = (best / PROTOCOLS.len(), best % PROTOCOLS.len());
                let context = context as *mut c_void;
                let used = channels.max(1);
                let result = chunk(context, func, bytes, algorithm as i32, protocol as i32, used, &mut size);
                trace::call(|| format!("tuner-chunk size={} result={result}", size.min(LARGEST_CHUNK)));
            }
        }
        let best = cheapest(&table)?;
        let (id, tuned) = (self.id, self.tuner.is_some());
        trace::call(|| {
            format!("chose id={id:#x} func={func} bytes={bytes} channels={channels} tuned={tuned} {}", describe(best))
        });
        Ok((best / PROTOCOLS.len(), best % PROTOCOLS.len()))
    }

    /// Reports the start of a collective to the profiler. Returns the profiler's handle, for `stop`.
    pub fn start(&self, comm: &Comm, name: &str, what: &super::Issued, chosen: (usize, usize)) -> Option<usize> {
        let (context, mask) = self.profiler?;
        let start = profiler()?.start.filter(|_| mask & EVENT_COLL != 0)?;
        let mut event = Event {
            kind: EVENT_COLL,
            parent: null_mut(),
            rank: comm.rank as i32,
            number: what.number,
            func: forever(name),
            send: what.send,
            recv: what.recv,
            count: what.count,
            root: what.root,
            datatype: forever(what.datatype),
            channels: 1,
            warps: 8,
            algorithm: ALGORITHMS[chosen.0].as_ptr(),
            protocol: PROTOCOLS[chosen.1].as_ptr(),
            parent_group: null_mut(),
            rest: [0; 4],
        };
        let mut handle = null_mut();
        let result = start(context as *mut c_void, &mut handle, &mut event);
        (result == 0 && !handle.is_null()).then_some(handle as usize)
    }

    pub fn stop(handle: usize) {
        if let Some(stop) = profiler().and_then(|profiler| profiler.stop) {
            stop(handle as *mut c_void);
        }
    }

    pub fn close(&self) {
        if let (Some(context), Some(finalize)) = (self.tuner, tuner().and_then(|(tuner, _)| tuner.finalize)) {
            finalize(context as *mut c_void);
        }
        if let (Some((context, _)), Some(finalize)) = (self.profiler, profiler().and_then(|p| p.finalize)) {
            finalize(context as *mut c_void);
        }
    }
}

fn describe(at: usize) -> String {
    let text = |name: &CStr| name.to_string_lossy().into_owned();
    format!("algo={} proto={}", text(ALGORITHMS[at / PROTOCOLS.len()]), text(PROTOCOLS[at % PROTOCOLS.len()]))
}

/// Costs of every pair in microseconds, which grow with the size. Pairs other than trees and rings are impossible: -1.
fn costs(func: i32, bytes: usize) -> [f32; COSTS] {
    const ALL_REDUCE: i32 = 4;
    let mut table = [-1.0; COSTS];
    for (algorithm, latency) in [(0, 8.0), (1, 12.0)] {
        // Trees serve only all_reduce; all other functions use rings.
        if algorithm == 0 && func != ALL_REDUCE {
            continue;
        }
        for (protocol, bandwidth) in [5.0e3, 18.0e3, 24.0e3].into_iter().enumerate() {
            table[algorithm * PROTOCOLS.len() + protocol] =
                (latency * (1.0 + protocol as f64) + bytes as f64 / bandwidth * (1.2 - 0.2 * algorithm as f64)) as f32;
        }
    }
    table
}

fn cheapest(table: &[f32; COSTS]) -> Result<usize, i32> {
    let usable = (0..COSTS).filter(|at| table[*at] >= 0.0);
    usable.min_by(|a, b| table[*a].total_cmp(&table[*b])).ok_or(super::INTERNAL_ERROR)
}
