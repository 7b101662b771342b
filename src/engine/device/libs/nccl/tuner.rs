//! The tuner plugin, through which our rules and tables steer NCCL. Before each collective, NCCL asks the plugin which
//! algorithm to use. The plugin is data that our own library exports as `ncclTunerPlugin_v5` and `_v6` (NVIDIA/nccl,
//! src/include/plugin/tuner).
//!
//! NCCL finds the tuner by the variable `NCCL_TUNER_PLUGIN` and the profiler (`profiler.rs`) by `NCCL_PROFILER_PLUGIN`;
//! each contains the absolute path of our library. We set them if `SAGELLM_EXPLAIN=1`, or before a communicator is made
//! for a group that has a topology, or a rule or table line for NCCL. Otherwise we never set them: if they are set,
//! every communicator of the process and of its children calls the plugin, including communicators that are not ours.
//! The plugin recognizes ours by name: NCCL passes the name to the profiler together with a number, and the same number
//! to the tuner. For all other communicators, and if no rule or line fits, the plugin changes nothing.
//!
//! # Our algorithms in NCCL
//!
//! | algorithm that the policy names | algorithm of NCCL |
//! | --- | --- |
//! | `ring` | Ring |
//! | `double_tree`, `binomial_tree`, `tree`, `hierarchical` | Tree: a chain inside each host, a tree between hosts |
//! | any other | NCCL's own choice |
//! | `start` or none: all_reduce of a group with a topology | Ring if `select/start.rs` says ring, otherwise Tree |
//! | `start` or none, for any other operation | NCCL's own choice |
//!
//! Algorithms inside a host (`slots`, `rounds`) are not for libraries: rules that name them are skipped.
//!
//! The protocol (LL, LL128, Simple) is the one that NCCL expects to be fastest with that algorithm at that size. NCCL
//! also chooses the number of channels. If NCCL has ruled out an algorithm for a communicator, the plugin does not
//! force it.
//!
//! NCCL documents that it falls back to its own choice after a plugin error, but 2.30 does not (src/enqueue.cc). So no
//! function here returns an error.

use std::collections::VecDeque;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard};

use once_cell::sync::OnceCell;

use crate::algorithms::Algorithm;
use crate::config;
use crate::engine::device::communicator::Steering;
use crate::engine::device::rules;
use crate::os::environment;
use crate::select::Policy;
use crate::select::rules::{AlgorithmChoice, Rule};
use crate::select::start::Start;
use crate::types::Kind;

/// Indices of NCCL_ALGO_*.
const TREE: usize = 0;
const RING: usize = 1;
const SUCCESS: c_int = 0;

/// The kind for a value of ncclFunc_t.
fn kind_of(function: c_int) -> Option<Kind> {
    Some(match function {
        0 => Kind::Broadcast,
        1 => Kind::Reduce,
        2 => Kind::AllGather,
        3 => Kind::ReduceScatter,
        4 => Kind::AllReduce,
        _ => return None,
    })
}

/// Returns NCCL's algorithm for an operation. The first rule that fits decides, otherwise the first line of the table
/// that fits, otherwise the start rules if the user has set a topology. `None` leaves the choice to NCCL. `bytes` are
/// counted as in `select`; `nodes` is NCCL's number of hosts.
fn algorithm(policy: &Policy, kind: Kind, bytes: u64, ranks: usize, nodes: usize) -> Option<usize> {
    match rules::named(policy, kind, bytes) {
        Some(AlgorithmChoice::Hosts { algorithm: Algorithm::Ring, .. }) => Some(RING),
        Some(AlgorithmChoice::Hosts { algorithm: Algorithm::DoubleTree | Algorithm::Binomial, .. }) => Some(TREE),
        Some(AlgorithmChoice::Hierarchical { .. }) => Some(TREE),
        None if kind == Kind::AllReduce => policy.topology.map(|topology| {
            // If NVLink joins several hosts, the user's topology may count them as one host. And a group may be on
            // fewer hosts than the job.
            let start = Start::of(bytes, ranks, nodes.min(topology.hosts), topology.full_nvlink);
            if !start.hierarchical && start.algorithm == Algorithm::Ring { RING } else { TREE }
        }),
        _ => None,
    }
}

/// Whether the policy may name an algorithm of NCCL, so that NCCL must ask the plugin.
fn steers(policy: &Policy) -> bool {
    let lines = policy.table.iter().flat_map(|table| table.lines.iter().map(|line| &line.rule));
    let names = |rule: &Rule| match rule.way {
        AlgorithmChoice::Hosts { algorithm, .. } => {
            matches!(algorithm, Algorithm::Ring | Algorithm::DoubleTree | Algorithm::Binomial)
        }
        way => matches!(way, AlgorithmChoice::Hierarchical { .. }),
    };
    policy.topology.is_some() || policy.rules.0.iter().chain(lines).any(names)
}

/// The communicators that we steer, and what NCCL has reported about communicators. The lists are small, and are
/// searched only once for each communicator.
struct Registry {
    /// Policies by communicator name. Written by `steer`.
    policies: Vec<(String, Arc<Policy>)>,
    /// Numbers and names of the communicators that were made last. Written by the profiler.
    names: VecDeque<(u64, String)>,
    /// Whether `announce` has run.
    announced: bool,
}

/// `Registry::names` has at most this many entries. No process has so many communicators. The oldest entries are
/// dropped first.
const MOST_NAMES: usize = 1024;

fn registry() -> MutexGuard<'static, Registry> {
    static REGISTRY: Mutex<Registry> =
        Mutex::new(Registry { policies: Vec::new(), names: VecDeque::new(), announced: false });
    REGISTRY.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// While this lives, communicators of this name use the policy that was passed to `steer`. All ranks must pass equal
/// policies.
pub struct Steered {
    name: String,
    /// Whether NCCL is expected to call the plugins for this communicator.
    asks: bool,
}

/// Registers the policy for a communicator of this name. Must be called before the communicator is made, and no other
/// communicator may have the name.
pub fn steer(name: &str, policy: &Arc<Policy>) -> Steered {
    registry().policies.push((name.to_string(), Arc::clone(policy)));
    let asks = steers(policy) || config::explains_devices();
    if asks {
        announce();
    }
    Steered { name: name.to_string(), asks }
}

impl Drop for Steered {
    fn drop(&mut self) {
        registry().policies.retain(|(name, _)| *name != self.name);
    }
}

impl Steering for Steered {
    fn problem(&self) -> Option<String> {
        let told = !self.asks || !numbers_of(&self.name).is_empty(); // NCCL reports all communicators
        let file = || {
            own_file()
                .map_or_else(|| "the extension module of sagellm".into(), |file| file.to_string_lossy().into_owned())
        };
        (!told).then(|| {
            format!(
                "its rules, its topology, and SAGELLM_EXPLAIN=1, come too late for NCCL, which looks for plugins with the first \
                 communicator of a process, or the variable NCCL_PROFILER_PLUGIN names another: set NCCL_TUNER_PLUGIN and \
                 NCCL_PROFILER_PLUGIN to {} before the program starts",
                file()
            )
        })
    }
}

/// Records that communicator `number` has this name. Called by the profiler.
pub(super) fn communicator_is(number: u64, name: &str) {
    let mut registry = registry();
    registry.names.retain(|(own, _)| *own != number);
    if registry.names.len() == MOST_NAMES {
        registry.names.pop_front();
    }
    registry.names.push_back((number, name.to_string()));
}

/// The numbers of this process's communicators that have this name.
pub(super) fn numbers_of(name: &str) -> Vec<u64> {
    registry().names.iter().filter(|(_, own)| own == name).map(|(number, _)| *number).collect()
}

fn policy_of(number: u64) -> Option<Arc<Policy>> {
    let registry = registry();
    let name = registry.names.iter().find(|(own, _)| *own == number).map(|(_, name)| name)?;
    registry.policies.iter().find(|(own, _)| own == name).map(|(_, policy)| policy.clone())
}

/// The tuner's state of one communicator.
struct Context {
    number: u64,
    ranks: usize,
    /// Number of hosts, as NCCL counts them.
    nodes: usize,
    /// Looked up at the first collective, because only then is it certain that NCCL has reported the name to the
    /// profiler.
    policy: OnceCell<Option<Arc<Policy>>>,
}

impl Context {
    /// Steers one collective. `times` has the times that NCCL expects, by algorithm and protocol; a negative time means
    /// impossible.
    fn choose(&self, function: c_int, bytes: usize, times: &mut [f32], protocols: usize) {
        let policy = self.policy.get_or_init(|| policy_of(self.number));
        let (Some(policy), Some(kind)) = (policy, kind_of(function)) else { return };
        // For an all_gather, NCCL counts the blocks of all ranks, but our rules count one block.
        let bytes = if kind == Kind::AllGather { bytes / self.ranks.max(1) } else { bytes };
        let Some(algorithm) = algorithm(policy, kind, bytes as u64, self.ranks, self.nodes) else { return };
        let Some(row) = times.get_mut(algorithm * protocols..(algorithm + 1) * protocols) else { return };
        let possible = row.iter_mut().filter(|time| **time >= 0.0);
        if let Some(best) = possible.min_by(|a, b| a.total_cmp(b)) {
            *best = 0.0; // lower than all others, so NCCL chooses this entry
        }
    }
}

/// The struct ncclTuner_v5_t.
#[repr(C)]
pub struct TunerV5 {
    pub name: *const c_char,
    pub init: Init,
    pub get_coll_info: GetCollInfo,
    pub finalize: Finalize,
}

/// The struct ncclTuner_v6_t.
#[repr(C)]
pub struct TunerV6 {
    pub name: *const c_char,
    pub init: Init,
    pub get_coll_info: GetCollInfo,
    pub finalize: Finalize,
    /// Null: NCCL uses its own chunk sizes.
    pub get_chunk_size: *const c_void,
}

/// Arguments: context, number of the communicator, ranks, nodes, logger, NVLink domains, constants.
type Init =
    unsafe extern "C" fn(*mut *mut c_void, u64, usize, usize, *const c_void, *const c_void, *mut c_void) -> c_int;
/// Arguments: context, function, bytes, operations in the group, times, algorithms, protocols, registered, channels.
type GetCollInfo =
    unsafe extern "C" fn(*mut c_void, c_int, usize, c_int, *mut *mut f32, c_int, c_int, c_int, *mut c_int) -> c_int;
type Finalize = unsafe extern "C" fn(*mut c_void) -> c_int;

const _: () = assert!(size_of::<TunerV5>() == 32 && size_of::<TunerV6>() == 40);

// SAFETY: never written after initialisation; it contains a static text and functions that any thread may call.
unsafe impl Sync for TunerV5 {}
// SAFETY: as above.
unsafe impl Sync for TunerV6 {}

const NAME: *const c_char = c"sagellm".as_ptr();

// SAFETY: our library has no other symbols with these names.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)] // the names that NCCL looks up
pub static ncclTunerPlugin_v5: TunerV5 = TunerV5 { name: NAME, init, get_coll_info, finalize };

// SAFETY: as above.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclTunerPlugin_v6: TunerV6 =
    TunerV6 { name: NAME, init, get_coll_info, finalize, get_chunk_size: std::ptr::null() };

/// Sets the variables by which NCCL finds its plugins to the file that contains this code. Does so only if this file
/// exports the plugins (the extension module does, a test program does not). A variable that the user has set keeps its
/// value. Runs once in a process, before a communicator is made.
fn announce() {
    // Locked until this function ends, so that no other thread makes a communicator before the variables are set.
    let mut registry = registry();
    if std::mem::replace(&mut registry.announced, true) {
        return;
    }
    let Some(file) = own_file() else { return };
    for variable in [c"NCCL_TUNER_PLUGIN", c"NCCL_PROFILER_PLUGIN"] {
        environment::add(variable, &file);
    }
}

/// Returns the file from which this code was loaded, if NCCL would find the plugins in it.
fn own_file() -> Option<CString> {
    const NAME: &CStr = c"ncclTunerPlugin_v5";
    // The address of `init`, not of the plugin: the loader may have bound the plugin's name to another library.
    let own = (init as Init as *const ()).cast::<c_void>();
    // SAFETY: zero is a valid value of every field of `Dl_info`. dladdr fills them for an address in our library, and
    // the name lives as long as the file is loaded. The handle is used for one lookup while it is open.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(own, &raw mut info) == 0 || info.dli_fname.is_null() {
            return None;
        }
        let file = CStr::from_ptr(info.dli_fname).to_owned();
        let handle = libc::dlopen(file.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if handle.is_null() {
            return None;
        }
        let found = libc::dlsym(handle, NAME.as_ptr());
        libc::dlclose(handle);
        let mut place: libc::Dl_info = std::mem::zeroed();
        let same = libc::dladdr(found, &raw mut place) != 0 && place.dli_fbase == info.dli_fbase;
        same.then_some(file)
    }
}

/// Runs `body` and always returns success, so that NCCL gets neither an error nor a panic.
pub(super) fn quietly(body: impl FnOnce()) -> c_int {
    let _ = catch_unwind(AssertUnwindSafe(body));
    SUCCESS
}

unsafe extern "C" fn init(
    context: *mut *mut c_void,
    number: u64,
    ranks: usize,
    nodes: usize,
    _logger: *const c_void,
    _domains: *const c_void,
    _constants: *mut c_void,
) -> c_int {
    quietly(|| {
        let own = Box::into_raw(Box::new(Context { number, ranks, nodes, policy: OnceCell::new() }));
        // SAFETY: `context` points to a variable that NCCL owns; `finalize` frees the box.
        unsafe { *context = own.cast() };
    })
}

unsafe extern "C" fn get_coll_info(
    context: *mut c_void,
    function: c_int,
    bytes: usize,
    _operations: c_int,
    times: *mut *mut f32,
    algorithms: c_int,
    protocols: c_int,
    _registered: c_int,
    _channels: *mut c_int,
) -> c_int {
    quietly(|| {
        let (Ok(algorithms), Ok(protocols)) = (usize::try_from(algorithms), usize::try_from(protocols)) else { return };
        if context.is_null() || times.is_null() {
            return;
        }
        // SAFETY: `init` made the context, and only its `policy` changes, which has its own lock. `times` is one block
        // of algorithms times protocols floats, although its type says otherwise (src/enqueue.cc).
        let (context, times) = unsafe {
            (&*context.cast::<Context>(), std::slice::from_raw_parts_mut(times.cast::<f32>(), algorithms * protocols))
        };
        context.choose(function, bytes, times, protocols);
    })
}

unsafe extern "C" fn finalize(context: *mut c_void) -> c_int {
    quietly(|| {
        if !context.is_null() {
            // SAFETY: `init` made the pointer, and NCCL passes it here once.
            drop(unsafe { Box::from_raw(context.cast::<Context>()) });
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::rules::Rules;
    use crate::select::start::Topology;
    use crate::select::table::Line;

    const RULES: &str = "all_reduce:0-64KiB=double_tree;all_reduce:1MiB-=ring;all_gather:0-1KiB=ring;reduce:0-=start";

    fn policy() -> Arc<Policy> {
        Arc::new(Policy { rules: Rules::parse(RULES).unwrap(), ..Policy::default() })
    }

    /// Times for seven algorithms and three protocols; NVLS and PAT are impossible.
    fn times() -> [[f32; 3]; 7] {
        let mut times = [[-1.0; 3]; 7];
        times[TREE] = [30.0, 20.0, 40.0];
        times[RING] = [-1.0, 60.0, 50.0];
        times
    }

    /// Makes the calls that NCCL makes, through the C interface.
    fn ask(tuner: &TunerV6, number: u64, function: c_int, bytes: usize) -> [[f32; 3]; 7] {
        let mut context = std::ptr::null_mut();
        let mut times = times();
        let mut channels = 0;
        let nothing = std::ptr::null_mut::<c_void>();
        // SAFETY: all pointers are valid for these calls, which are in NCCL's order.
        let codes = unsafe {
            [
                (tuner.init)(&mut context, number, 8, 1, nothing, nothing, nothing),
                (tuner.get_coll_info)(context, function, bytes, 1, times.as_mut_ptr().cast(), 7, 3, 0, &mut channels),
                (tuner.finalize)(context),
            ]
        };
        assert_eq!((codes, channels), ([SUCCESS; 3], 0));
        times
    }

    fn chosen(times: [[f32; 3]; 7]) -> Option<(usize, usize)> {
        let zeros: Vec<_> =
            (0..7).flat_map(|a| (0..3).map(move |p| (a, p))).filter(|(a, p)| times[*a][*p] == 0.0).collect();
        assert!(zeros.len() <= 1);
        zeros.first().copied()
    }

    #[test]
    fn communicators_are_told_apart_and_steered_by_their_own_rules() {
        let _one = steer("tuner test one", &policy());
        communicator_is(11, "tuner test one");
        communicator_is(12, "torch's own");
        let v6 = &ncclTunerPlugin_v6;
        // Tree's fastest protocol is the second and Ring's the third; Ring's first protocol is impossible.
        assert_eq!(chosen(ask(v6, 11, 4, 4096)), Some((TREE, 1)));
        assert_eq!(chosen(ask(v6, 11, 4, 1 << 20)), Some((RING, 2)));
        for (number, function, bytes) in [(11, 4, 100 << 10), (11, 1, 8), (11, 77, 8), (12, 4, 4096), (13, 4, 4096)] {
            assert_eq!(ask(v6, number, function, bytes), times(), "{number} {function} {bytes}: left alone");
        }
        // If there are 8 ranks, NCCL's 8 KiB for all blocks are 1 KiB for one block.
        assert_eq!(chosen(ask(v6, 11, 2, 8 << 10)), Some((RING, 2)));
        assert_eq!(chosen(ask(v6, 11, 2, 9 << 10)), None);
    }

    #[test]
    fn a_line_of_the_table_counts_where_no_rule_does_and_names_end_with_their_guard() {
        let line = |text: &str| Line::parse(&format!("{text} 10 ns; start 20 ns")).unwrap();
        let mut table = crate::select::table::tests::example();
        table.lines = vec![line("all_reduce:0-=ring"), line("broadcast:0-=slots")];
        let policy = Policy { table: Some(table), ..(*policy()).clone() };
        let named = |kind, bytes| algorithm(&policy, kind, bytes, 8, 1);
        assert_eq!(named(Kind::AllReduce, 100 << 10), Some(RING));
        assert_eq!(named(Kind::AllReduce, 1), Some(TREE));
        assert_eq!(named(Kind::Reduce, 1), None);
        assert_eq!(named(Kind::Broadcast, 1), None);
        let guard = steer("tuner test two", &Arc::new(policy));
        communicator_is(21, "tuner test two");
        assert!(policy_of(21).is_some());
        drop(guard);
        assert!(policy_of(21).is_none());
    }

    #[test]
    fn a_topology_steers_every_all_reduce_by_the_start_rules() {
        let given = |hosts, rules: &str| Policy {
            topology: Some(Topology { hosts, full_nvlink: true }),
            rules: Rules::parse(rules).unwrap(),
            ..Policy::default()
        };
        let one = given(1, "");
        assert!(steers(&one) && steers(&given(1, "*:0-=start")) && !steers(&Policy::default()));
        for (bytes, expected) in [(8, TREE), (999_999, TREE), (1_000_000, RING), (1 << 30, RING)] {
            assert_eq!(algorithm(&one, Kind::AllReduce, bytes, 8, 1), Some(expected), "{bytes}");
            assert_eq!(algorithm(&one, Kind::Broadcast, bytes, 8, 1), None);
            assert_eq!(algorithm(&given(1, "*:0-=start"), Kind::AllReduce, bytes, 8, 1), Some(expected));
        }
        // First, NCCL counts two hosts, but the topology counts one, because NVLink joins them. Second, the group is on
        // one of the job's two hosts.
        assert_eq!(algorithm(&one, Kind::AllReduce, 1 << 30, 8, 2), Some(RING));
        assert_eq!(algorithm(&given(2, ""), Kind::AllReduce, 1 << 30, 8, 1), Some(RING));
        assert_eq!(algorithm(&given(2, ""), Kind::AllReduce, 1 << 30, 8, 2), Some(TREE), "hierarchical");
        assert_eq!(algorithm(&given(2, ""), Kind::AllReduce, 1 << 30, 2, 2), Some(RING), "one rank on each host");
        // A rule decides before the topology, even a rule that leaves the choice to NCCL.
        assert_eq!(algorithm(&given(1, "*:0-=tree"), Kind::AllReduce, 1 << 30, 8, 1), Some(TREE));
        assert_eq!(algorithm(&given(1, "*:0-=hierarchical"), Kind::AllReduce, 1 << 30, 8, 1), Some(TREE));
        assert_eq!(algorithm(&given(1, "*:0-=bruck"), Kind::AllReduce, 8, 8, 1), None);
    }

    #[test]
    fn an_impossible_algorithm_is_not_forced_and_strange_arguments_are_harmless() {
        let context = Context { number: 0, ranks: 2, nodes: 1, policy: OnceCell::from(Some(policy())) };
        let mut impossible = [-1.0f32; 21];
        context.choose(4, 1, &mut impossible, 3);
        assert_eq!(impossible, [-1.0; 21]);
        let mut short = [5.0f32; 2];
        context.choose(4, 1, &mut short, 3);
        assert_eq!(short, [5.0; 2]);
        let null = std::ptr::null_mut();
        // SAFETY: the functions must accept null pointers, which this test checks.
        let codes = unsafe {
            [get_coll_info(null, 4, 1, 1, std::ptr::null_mut(), -1, 3, 0, std::ptr::null_mut()), finalize(null)]
        };
        assert_eq!(codes, [SUCCESS; 2]);
    }
}
