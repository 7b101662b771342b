//! Cambricon's runtime (cnrt.h 6). Two result codes mean "still running"; each also leaves an error behind, which must
//! be cleared. Events are called notifiers, and streams are called queues. The order of arguments differs from other
//! runtimes.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use crate::engine::device::communicator::text;
use crate::engine::device::runtime::{Event, Runtime, Spare, Stream};
use crate::engine::loader::{Hints, Known, Library, symbols};
use crate::error::{Error, Result};

pub static KNOWN: Known = Known {
    key: "CNRT",
    title: "the Cambricon runtime",
    names: &["libcnrt.so"],
    package: "",
    companion: None,
    fix: "It is a part of Neuware: add $NEUWARE_HOME/lib64 to LD_LIBRARY_PATH.",
};

type Code = c_int;
type Handle = *mut c_void;
const SUCCESS: Code = 0;
/// cnrtErrorNotReady and cnrtErrorBusy. Which of them is returned depends on the runtime's version.
const RUNNING: [Code; 2] = [1, 632014];
/// CNRT_NOTIFIER_DISABLE_TIMING_ALL
const UNTIMED: c_uint = 4;
/// cnrtMemcpyDevToDev
const DEVICE_TO_DEVICE: c_int = 1;
/// cnrtQueueCaptureStatusNone
const CAPTURES_NOTHING: c_int = 0;

symbols! {
    /// Functions of cnrt.h.
    Table {
        set_device = "cnrtSetDevice"(c_int) -> Code;
        lib_version = "cnrtGetLibVersion"(*mut c_int, *mut c_int, *mut c_int) -> Code;
        get_error_str = "cnrtGetErrorStr"(Code) -> *const c_char;
        get_last_error = "cnrtGetLastError"() -> Code;
        queue_create = "cnrtQueueCreate"(*mut Handle) -> Code;
        queue_query = "cnrtQueueQuery"(Handle) -> Code;
        is_capturing = "cnrtQueueIsCapturing"(Handle, *mut c_int) -> Code;
        notifier_create = "cnrtNotifierCreateWithFlags"(*mut Handle, c_uint) -> Code;
        notifier_create_plain = "cnrtNotifierCreate"(*mut Handle) -> Code;
        place_notifier = "cnrtPlaceNotifier"(Handle, Handle) -> Code;
        queue_wait_notifier = "cnrtQueueWaitNotifier"(Handle, Handle, c_uint) -> Code;
        allocate = "cnrtMalloc"(*mut *mut c_void, usize) -> Code;
        copy_v3 = "cnrtMemcpyAsync_V3"(*mut c_void, *mut c_void, usize, Handle, c_int) -> Code;
        copy_v2 = "cnrtMemcpyAsync_V2"(*mut c_void, *mut c_void, usize, Handle, c_int) -> Code;
        copy = "cnrtMemcpyAsync"(*mut c_void, *mut c_void, usize, Handle, c_int) -> Code;
    }
}

pub struct Cnrt {
    library: Library,
    table: Table,
    spare: Spare,
}

impl Cnrt {
    pub fn open(hints: &Hints) -> Result<Arc<dyn Runtime>> {
        let library = Library::open(&KNOWN, hints)?;
        let table = Table::load(&library);
        for needed in ["cnrtSetDevice", "cnrtQueueCreate", "cnrtQueueWaitNotifier"] {
            if !library.has(needed) {
                return Err(library.lacks(needed)); // runtimes before version 5 used other names
            }
        }
        Ok(Arc::new(Cnrt { library, table, spare: Spare::default() }))
    }

    fn check(&self, what: &str, code: Code) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: the runtime's function; it accepts any number.
        let words = self.table.get_error_str.optional().map(|get| text(unsafe { get(code) })).unwrap_or_default();
        Err(Error::system(format!("sagellm: the Cambricon runtime failed in {what}: {words} (cnrtRet_t {code})")))
    }

    /// Returns true for success and false for "still running". In the second case the runtime keeps the code as the
    /// thread's last error, and this function clears it.
    fn ready(&self, what: &str, code: Code) -> Result<bool> {
        if !RUNNING.contains(&code) {
            return self.check(what, code).map(|()| true);
        }
        if let Some(clear) = self.table.get_last_error.optional() {
            // SAFETY: the runtime's function; it uses only state of this thread.
            unsafe { clear() };
        }
        Ok(false)
    }
}

// SAFETY of the calls below: each function is declared as the runtime declares it. Handles were made by this runtime
// and are alive, which the caller guarantees by holding them. Out-parameters are valid during the call.
impl Runtime for Cnrt {
    fn describe(&self) -> String {
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        if let Some(get) = self.table.lib_version.optional() {
            // SAFETY: see above.
            unsafe { get(&mut major, &mut minor, &mut patch) };
        }
        format!("Cambricon runtime {major}.{minor}.{patch} ({})", self.library.path)
    }

    fn set_device(&self, device: i32) -> Result<()> {
        // SAFETY: see above.
        let code = unsafe { self.table.set_device.of(&self.library)?(device) };
        self.check("cnrtSetDevice", code)
    }

    fn stream_create(&self) -> Result<Stream> {
        let mut made: Handle = std::ptr::null_mut();
        // SAFETY: see above.
        let code = unsafe { self.table.queue_create.of(&self.library)?(&mut made) };
        self.check("cnrtQueueCreate", code).map(|()| Stream(made as usize))
    }

    fn stream_idle(&self, stream: Stream) -> Result<bool> {
        // SAFETY: see above.
        let code = unsafe { self.table.queue_query.of(&self.library)?(stream.0 as Handle) };
        self.ready("cnrtQueueQuery", code)
    }

    /// False if the runtime does not support capture.
    fn capturing(&self, stream: Stream) -> Result<bool> {
        let Some(ask) = self.table.is_capturing.optional() else { return Ok(false) };
        let mut status = CAPTURES_NOTHING;
        // SAFETY: see above; it writes one enum of four bytes.
        let code = unsafe { ask(stream.0 as Handle, &mut status) };
        Ok(code == SUCCESS && status != CAPTURES_NOTHING)
    }

    fn event_create(&self) -> Result<Event> {
        let mut made: Handle = std::ptr::null_mut();
        let code = match self.table.notifier_create.optional() {
            // SAFETY: see above.
            Some(create) => unsafe { create(&mut made, UNTIMED) },
            // SAFETY: see above.
            None => unsafe { self.table.notifier_create_plain.of(&self.library)?(&mut made) },
        };
        self.check("cnrtNotifierCreate", code).map(|()| Event(made as usize))
    }

    fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: see above.
        let code = unsafe { self.table.place_notifier.of(&self.library)?(event.0 as Handle, stream.0 as Handle) };
        self.check("cnrtPlaceNotifier", code)
    }

    fn event_wait(&self, stream: Stream, event: Event) -> Result<()> {
        let wait = self.table.queue_wait_notifier.of(&self.library)?;
        // SAFETY: see above. The event is the first argument here.
        let code = unsafe { wait(event.0 as Handle, stream.0 as Handle, 0) };
        self.check("cnrtQueueWaitNotifier", code)
    }

    fn copy(&self, to: usize, from: usize, bytes: usize, stream: Stream) -> Result<()> {
        let Table { copy_v3, copy_v2, copy, .. } = &self.table;
        let newest = copy_v3.optional().or(copy_v2.optional());
        let call = newest.map_or_else(|| copy.of(&self.library), Ok)?;
        let (to, from) = (to as *mut c_void, from as *mut c_void);
        // SAFETY: see above; both addresses point to `bytes` bytes of this device's memory until the queue has
        // completed the copy.
        let code = unsafe { call(to, from, bytes, stream.0 as Handle, DEVICE_TO_DEVICE) };
        self.check("cnrtMemcpyAsync", code)
    }

    fn spare(&self, device: i32) -> Result<usize> {
        self.spare.of(device, || {
            let mut made = std::ptr::null_mut();
            // SAFETY: see above.
            let code = unsafe { self.table.allocate.of(&self.library)?(&mut made, Spare::BYTES) };
            self.check("cnrtMalloc", code).map(|()| made as usize)
        })
    }
}
