//! The profiler plugin. NCCL reports every collective that it runs to this plugin, which is exported as
//! `ncclProfiler_v5` and `_v6` (NVIDIA/nccl, src/include/plugin/profiler). For each communicator, kind and size class
//! the plugin records the algorithm, the protocol and the number of channels of the last collective, and a count, in a
//! fixed amount of memory. `explain` reports these records.
//!
//! NCCL calls the plugin when a collective is launched, on the launching thread. The plugin never waits there: if
//! another thread holds the lock, the collective is not recorded. NCCL also reports the names of communicators to the
//! plugin; the tuner uses them.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Mutex;

use super::tuner::{communicator_is, numbers_of, quietly};
use crate::stats;
use crate::types::Kind;

/// How NCCL ran the collectives of one kind and size class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ran {
    /// NCCL's name of the algorithm: "RING", "TREE", "NVLS", ...
    pub algorithm: Word,
    /// NCCL's name of the protocol: "LL", "LL128" or "SIMPLE".
    pub protocol: Word,
    pub channels: u8,
    /// How many collectives ran since the algorithm last changed or the entry was reused.
    pub times: u64,
}

/// A short text stored inline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Word([u8; 16]);

impl Word {
    fn new(text: &str) -> Word {
        let mut word = Word::default();
        word.0.iter_mut().zip(text.bytes().filter(u8::is_ascii_graphic)).for_each(|(to, byte)| *to = byte);
        word
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default().trim_end_matches('\0')
    }
}

#[derive(Clone, Copy)]
struct Line {
    communicator: u64,
    kind: Kind,
    class: u8,
    /// `Seen::clock` when the entry was last written. If all entries are in use, the one with the lowest value is
    /// replaced.
    last: u64,
    ran: Ran,
}

struct Seen {
    lines: [Option<Line>; LINES],
    clock: u64,
}

const LINES: usize = 256;

static SEEN: Mutex<Seen> = Mutex::new(Seen { lines: [None; LINES], clock: 0 });

impl Seen {
    fn note(&mut self, communicator: u64, kind: Kind, class: u8, ran: Ran) {
        self.clock += 1;
        let last = self.clock;
        let same = |line: &Line| (line.communicator, line.kind, line.class) == (communicator, kind, class);
        if let Some(line) = self.lines.iter_mut().flatten().find(|line| same(line)) {
            let way = |ran: &Ran| (ran.algorithm, ran.protocol, ran.channels);
            let times = if way(&line.ran) == way(&ran) { line.ran.times + 1 } else { 1 };
            (line.ran, line.last) = (Ran { times, ..ran }, last);
            return;
        }
        // An empty entry counts as the oldest.
        if let Some(line) = self.lines.iter_mut().min_by_key(|line| line.map_or(0, |line| line.last)) {
            *line = Some(Line { communicator, kind, class, last, ran });
        }
    }
}

/// Returns how the last collective of this kind and about this size ran, in communicators of this name. `None` if NCCL
/// has reported no such collective: the plugin is not loaded, the operation consists of sends and receives or runs
/// another kernel, or no such collective has run yet. `bytes` are counted as in `select`.
pub fn ran(name: &str, kind: Kind, bytes: u64) -> Option<Ran> {
    let numbers = numbers_of(name);
    let class = stats::class(bytes);
    let seen = SEEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let lines = seen.lines.iter().flatten();
    let fits = lines.filter(|line| line.kind == kind && line.class == class && numbers.contains(&line.communicator));
    fits.max_by_key(|line| line.last).map(|line| line.ran)
}

/// The value ncclProfileColl.
const COLLECTIVE: u64 = 2;

/// The structs ncclProfiler_v5_t and _v6_t. They differ only in descriptors of events that we do not request.
#[repr(C)]
pub struct Profiler {
    pub name: *const c_char,
    pub init: Init,
    pub start_event: StartEvent,
    pub stop_event: unsafe extern "C" fn(*mut c_void) -> c_int,
    pub record_event_state: unsafe extern "C" fn(*mut c_void, c_int, *const c_void) -> c_int,
    pub finalize: unsafe extern "C" fn(*mut c_void) -> c_int,
}

/// Arguments: context, number of the communicator, requested events, name, nodes, ranks, rank, logger.
type Init =
    unsafe extern "C" fn(*mut *mut c_void, u64, *mut c_int, *const c_char, c_int, c_int, c_int, *const c_void) -> c_int;
/// Arguments: context, handle of the event, descriptor of the event.
type StartEvent = unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *const Descriptor) -> c_int;

/// The beginning of ncclProfilerEventDescr_v5_t and _v6_t: the fields that all events have, then the member for
/// collectives.
#[repr(C)]
pub struct Descriptor {
    pub kind: u64,
    pub parent: *mut c_void,
    pub rank: c_int,
    pub collective: Collective,
}

#[repr(C)]
pub struct Collective {
    pub sequence: u64,
    pub function: *const c_char,
    pub send: *const c_void,
    pub recv: *mut c_void,
    pub count: usize,
    pub root: c_int,
    pub dtype: *const c_char,
    pub channels: u8,
    pub warps: u8,
    pub algorithm: *const c_char,
    pub protocol: *const c_char,
    pub parent_group: *mut c_void,
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<Profiler>() == 48);
    assert!(offset_of!(Descriptor, rank) == 16 && offset_of!(Descriptor, collective) == 24);
    assert!(offset_of!(Collective, count) == 32 && offset_of!(Collective, dtype) == 48);
    assert!(offset_of!(Collective, channels) == 56 && offset_of!(Collective, algorithm) == 64);
    assert!(offset_of!(Collective, protocol) == 72);
};

// SAFETY: never written after initialisation; it contains a static text and functions that any thread may call.
unsafe impl Sync for Profiler {}

const NAME: *const c_char = c"sagellm".as_ptr();

// SAFETY: our library has no other symbols with these names.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)] // the names that NCCL looks up
pub static ncclProfiler_v5: Profiler =
    Profiler { name: NAME, init, start_event, stop_event, record_event_state, finalize };

// SAFETY: as above.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclProfiler_v6: Profiler =
    Profiler { name: NAME, init, start_event, stop_event, record_event_state, finalize };

/// A text that NCCL keeps valid during the call; null becomes an empty text.
fn text<'a>(text: *const c_char) -> &'a str {
    if text.is_null() {
        return "";
    }
    // SAFETY: NCCL passes texts that end in a zero byte and outlive the call; no reference is kept.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap_or_default()
}

/// The kind for a name that ncclFuncToString returns.
fn kind_of(function: &str) -> Option<Kind> {
    Some(match function {
        "AllGather" => Kind::AllGather,
        "AllReduce" => Kind::AllReduce,
        "Broadcast" => Kind::Broadcast,
        "Reduce" => Kind::Reduce,
        "ReduceScatter" => Kind::ReduceScatter,
        _ => return None,
    })
}

/// Element size for a name that ncclDatatypeToString returns, such as "ncclFloat32". All names that do not end in 16,
/// 32 or 64 stand for types of one byte: "ncclInt8", "ncclFloat8e4m3", and "Unknown" for uint8.
fn element_bytes(dtype: &str) -> u64 {
    match dtype.trim_start_matches(|c: char| !c.is_ascii_digit()) {
        "16" => 2,
        "32" => 4,
        "64" => 8,
        _ => 1,
    }
}

/// Our state of one communicator. NCCL passes it back with every event.
struct Context {
    number: u64,
    ranks: u64,
}

unsafe extern "C" fn init(
    context: *mut *mut c_void,
    number: u64,
    events: *mut c_int,
    name: *const c_char,
    _nodes: c_int,
    ranks: c_int,
    _rank: c_int,
    _logger: *const c_void,
) -> c_int {
    quietly(|| {
        communicator_is(number, text(name));
        let own = Box::into_raw(Box::new(Context { number, ranks: u64::try_from(ranks).unwrap_or(1) }));
        // SAFETY: `context` and `events` point to variables that NCCL owns; `finalize` frees the box.
        unsafe {
            *context = own.cast();
            *events = COLLECTIVE as c_int;
        }
    })
}

unsafe extern "C" fn start_event(
    context: *mut c_void,
    handle: *mut *mut c_void,
    descriptor: *const Descriptor,
) -> c_int {
    quietly(|| {
        // SAFETY: `handle` points to a variable that NCCL owns. With a null handle, NCCL reports nothing more about
        // this event.
        unsafe { *handle = std::ptr::null_mut() };
        // SAFETY: every descriptor begins with its kind. Its other fields are read below only if the kind is
        // COLLECTIVE.
        if context.is_null() || descriptor.is_null() || unsafe { (*descriptor).kind } != COLLECTIVE {
            return;
        }
        // SAFETY: the kind says that this is the descriptor of a collective. `init` made the context, and nothing
        // changes it.
        let (told, context) = unsafe { (&(*descriptor).collective, &*context.cast::<Context>()) };
        let Some(kind) = kind_of(text(told.function)) else { return };
        let blocks = if kind == Kind::ReduceScatter { context.ranks } else { 1 };
        let bytes = (told.count as u64).saturating_mul(element_bytes(text(told.dtype))).saturating_mul(blocks);
        let algorithm = Word::new(text(told.algorithm));
        let protocol = Word::new(text(told.protocol));
        let ran = Ran { algorithm, protocol, channels: told.channels, times: 1 };
        if let Ok(mut seen) = SEEN.try_lock() {
            seen.note(context.number, kind, stats::class(bytes), ran);
        }
    })
}

unsafe extern "C" fn stop_event(_: *mut c_void) -> c_int {
    quietly(|| ())
}

unsafe extern "C" fn record_event_state(_: *mut c_void, _: c_int, _: *const c_void) -> c_int {
    quietly(|| ())
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

    /// Reports one collective of `count` elements, with the calls that NCCL makes.
    fn tell(number: u64, name: &CStr, function: &CStr, count: usize, dtype: &CStr, algorithm: &CStr, kind: u64) {
        let (mut context, mut handle, mut events) = (std::ptr::null_mut(), 7 as *mut c_void, 0);
        let collective = Collective {
            sequence: 0,
            function: function.as_ptr(),
            send: std::ptr::null(),
            recv: std::ptr::null_mut(),
            count,
            root: 0,
            dtype: dtype.as_ptr(),
            channels: 4,
            warps: 8,
            algorithm: algorithm.as_ptr(),
            protocol: c"LL128".as_ptr(),
            parent_group: std::ptr::null_mut(),
        };
        let descriptor = Descriptor { kind, parent: std::ptr::null_mut(), rank: 0, collective };
        let profiler = &ncclProfiler_v6;
        // SAFETY: all pointers are valid for these calls, which are in NCCL's order.
        let codes = unsafe {
            [
                (profiler.init)(&mut context, number, &mut events, name.as_ptr(), 1, 4, 0, std::ptr::null()),
                (profiler.start_event)(context, &mut handle, &descriptor),
                (profiler.record_event_state)(handle, 0, std::ptr::null()),
                (profiler.stop_event)(handle),
                (profiler.finalize)(context),
            ]
        };
        assert_eq!((codes, handle.is_null(), events), ([0; 5], true, COLLECTIVE as c_int));
    }

    #[test]
    fn what_ran_is_remembered_by_name_kind_and_size() {
        let name = c"profiler test";
        for _ in 0..3 {
            tell(501, name, c"AllReduce", 1000, c"ncclFloat32", c"TREE", COLLECTIVE);
        }
        tell(501, name, c"ReduceScatter", 250, c"ncclFloat32", c"RING", COLLECTIVE);
        tell(501, name, c"Broadcast", 4000, c"Unknown", c"NVLS_TREE", COLLECTIVE);
        tell(502, c"another", c"AllGather", 1000, c"ncclBfloat16", c"PAT", COLLECTIVE);
        let told = |kind| {
            ran("profiler test", kind, 4000)
                .map(|ran| format!("{} {} {}", ran.algorithm.text(), ran.channels, ran.times))
        };
        assert_eq!(told(Kind::AllReduce).as_deref(), Some("TREE 4 3"));
        assert_eq!(told(Kind::ReduceScatter).as_deref(), Some("RING 4 1"));
        assert_eq!(told(Kind::Broadcast).as_deref(), Some("NVLS_TREE 4 1"));
        assert_eq!(told(Kind::AllGather), None);
        assert_eq!(ran("another", Kind::AllGather, 2000).unwrap().protocol.text(), "LL128");
        assert_eq!(ran("profiler test", Kind::AllReduce, 40), None);
        tell(501, name, c"AllReduce", 1000, c"ncclFloat32", c"RING", COLLECTIVE);
        assert_eq!(told(Kind::AllReduce).as_deref(), Some("RING 4 1"));
        tell(501, name, c"AllReduce", 1000, c"ncclFloat32", c"TREE", 4); // not the kind of a collective
        tell(501, name, c"Sideways", 1000, c"ncclFloat32", c"TREE", COLLECTIVE);
        assert_eq!(told(Kind::AllReduce).as_deref(), Some("RING 4 1"));
    }

    #[test]
    fn memory_is_fixed_and_the_oldest_gives_way() {
        let mut seen = Seen { lines: [None; LINES], clock: 0 };
        let ran =
            Ran { algorithm: Word::new("A_WORD_THAT_IS_TOO_LONG"), protocol: Word::new("LL"), channels: 1, times: 1 };
        assert_eq!(ran.algorithm.text(), "A_WORD_THAT_IS_T");
        for communicator in 0..LINES as u64 {
            seen.note(communicator, Kind::Reduce, 3, ran);
        }
        seen.note(0, Kind::Reduce, 3, ran);
        seen.note(1000, Kind::Reduce, 3, ran);
        let there = |seen: &Seen, number| seen.lines.iter().flatten().any(|line| line.communicator == number);
        assert!(there(&seen, 1000) && there(&seen, 0) && !there(&seen, 1));
    }
}
