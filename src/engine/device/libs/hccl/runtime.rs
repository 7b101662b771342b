//! Ascend's runtime (acl_rt.h). It has two kinds of events. An event of the newer kind ("Ex") may be recorded again
//! directly. An event of the older kind must be reset on a stream before it is recorded again; this kind is used only
//! if the runtime does not have the newer kind.

use std::collections::HashSet;
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Mutex};

use crate::engine::device::communicator::text;
use crate::engine::device::runtime::{Event, Runtime, Spare, Stream};
use crate::engine::loader::{Hints, Known, Library, symbols};
use crate::error::{Error, Result};

pub static KNOWN: Known = Known {
    key: "ACL",
    title: "the Ascend runtime",
    names: &["libascendcl.so", "libacl_rt.so"],
    package: "",
    companion: None,
    fix: "It is a part of CANN: run `source .../ascend-toolkit/set_env.sh` in this shell first.",
};

type Code = c_int;
type Handle = *mut c_void;
const SUCCESS: Code = 0;
/// aclInit was called before, by torch_npu. Treated as success.
const INITIALISED_BEFORE: Code = 100002;
/// Value of aclrtStreamStatus.
const STREAM_COMPLETE: c_int = 0;
/// ACL_EVENT_SYNC
const FLAG_SYNC: u32 = 1;
/// ACL_STREAM_FAST_LAUNCH | ACL_STREAM_FAST_SYNC; torch_npu uses the same flags.
const STREAM_FAST: u32 = 1 | 2;
const DEVICE_TO_DEVICE: c_int = 3;
/// ACL_MEM_MALLOC_HUGE_FIRST
const HUGE_FIRST: c_int = 0;
/// Value of aclmdlRICaptureStatus.
const CAPTURES_NOTHING: c_int = 0;

symbols! {
    /// Functions of acl.h and acl_rt.h.
    Table {
        init = "aclInit"(*const c_char) -> Code;
        recent_message = "aclGetRecentErrMsg"() -> *const c_char;
        set_device = "aclrtSetDevice"(i32) -> Code;
        stream_create = "aclrtCreateStreamWithConfig"(*mut Handle, u32, u32) -> Code;
        stream_create_plain = "aclrtCreateStream"(*mut Handle) -> Code;
        stream_query = "aclrtStreamQuery"(Handle, *mut c_int) -> Code;
        event_create_ex = "aclrtCreateEventExWithFlag"(*mut Handle, u32) -> Code;
        event_create = "aclrtCreateEventWithFlag"(*mut Handle, u32) -> Code;
        event_record = "aclrtRecordEvent"(Handle, Handle) -> Code;
        event_reset = "aclrtResetEvent"(Handle, Handle) -> Code;
        stream_wait_event = "aclrtStreamWaitEvent"(Handle, Handle) -> Code;
        capture_info = "aclmdlRICaptureGetInfo"(Handle, *mut c_int, *mut Handle) -> Code;
        allocate = "aclrtMalloc"(*mut *mut c_void, usize, c_int) -> Code;
        copy = "aclrtMemcpyAsync"(*mut c_void, usize, *const c_void, usize, c_int, Handle) -> Code;
    }
}

pub struct Acl {
    library: Library,
    table: Table,
    /// Events of the older kind that have been recorded. They need a reset before the next record.
    used: Mutex<HashSet<usize>>,
    spare: Spare,
}

impl Acl {
    pub fn open(hints: &Hints) -> Result<Arc<dyn Runtime>> {
        let library = Library::open(&KNOWN, hints)?;
        let table = Table::load(&library);
        let acl = Acl { library, table, used: Mutex::default(), spare: Spare::default() };
        // SAFETY: the runtime's function; null means no configuration.
        let code = unsafe { acl.table.init.of(&acl.library)?(std::ptr::null()) };
        if code != INITIALISED_BEFORE {
            acl.check("aclInit", code)?;
        }
        Ok(Arc::new(acl))
    }

    fn check(&self, what: &str, code: Code) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: the runtime's function; it returns null or a text.
        let words = self.table.recent_message.optional().map(|get| text(unsafe { get() })).unwrap_or_default();
        Err(Error::system(format!("sagellm: the Ascend runtime failed in {what}: aclError {code} {words}")))
    }

    fn used(&self) -> std::sync::MutexGuard<'_, HashSet<usize>> {
        self.used.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn reusable(&self) -> bool {
        self.table.event_create_ex.there()
    }
}

// SAFETY of the calls below: each function is declared as the runtime declares it. Handles were made by this runtime
// and are alive, which the caller guarantees by holding them. Out-parameters are valid during the call.
impl Runtime for Acl {
    fn describe(&self) -> String {
        format!("Ascend runtime ({})", self.library.path)
    }

    fn set_device(&self, device: i32) -> Result<()> {
        // SAFETY: see above.
        let code = unsafe { self.table.set_device.of(&self.library)?(device) };
        self.check("aclrtSetDevice", code)
    }

    fn stream_create(&self) -> Result<Stream> {
        let mut made: Handle = std::ptr::null_mut();
        let code = match self.table.stream_create.optional() {
            // SAFETY: see above.
            Some(create) => unsafe { create(&mut made, 0, STREAM_FAST) },
            // SAFETY: see above.
            None => unsafe { self.table.stream_create_plain.of(&self.library)?(&mut made) },
        };
        self.check("aclrtCreateStream", code).map(|()| Stream(made as usize))
    }

    fn stream_idle(&self, stream: Stream) -> Result<bool> {
        let mut status = STREAM_COMPLETE;
        // SAFETY: see above.
        let code = unsafe { self.table.stream_query.of(&self.library)?(stream.0 as Handle, &mut status) };
        self.check("aclrtStreamQuery", code).map(|()| status == STREAM_COMPLETE)
    }

    /// False if the runtime or the chip does not support capture.
    fn capturing(&self, stream: Stream) -> Result<bool> {
        let Some(ask) = self.table.capture_info.optional() else { return Ok(false) };
        let (mut status, mut model): (c_int, Handle) = (CAPTURES_NOTHING, std::ptr::null_mut());
        // SAFETY: see above; it writes one enum of four bytes and one handle.
        let code = unsafe { ask(stream.0 as Handle, &mut status, &mut model) };
        Ok(code == SUCCESS && status != CAPTURES_NOTHING)
    }

    fn event_create(&self) -> Result<Event> {
        let mut made: Handle = std::ptr::null_mut();
        let create = if self.reusable() { &self.table.event_create_ex } else { &self.table.event_create };
        // SAFETY: see above.
        let code = unsafe { create.of(&self.library)?(&mut made, FLAG_SYNC) };
        self.check("aclrtCreateEvent", code).map(|()| Event(made as usize))
    }

    fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        if !self.reusable() && !self.used().insert(event.0) {
            // SAFETY: see above.
            let code = unsafe { self.table.event_reset.of(&self.library)?(event.0 as Handle, stream.0 as Handle) };
            self.check("aclrtResetEvent", code)?;
        }
        // SAFETY: see above.
        let code = unsafe { self.table.event_record.of(&self.library)?(event.0 as Handle, stream.0 as Handle) };
        self.check("aclrtRecordEvent", code)
    }

    fn event_wait(&self, stream: Stream, event: Event) -> Result<()> {
        // SAFETY: see above.
        let code = unsafe { self.table.stream_wait_event.of(&self.library)?(stream.0 as Handle, event.0 as Handle) };
        self.check("aclrtStreamWaitEvent", code)
    }

    fn copy(&self, to: usize, from: usize, bytes: usize, stream: Stream) -> Result<()> {
        let copy = self.table.copy.of(&self.library)?;
        let (to, from) = (to as *mut c_void, from as *const c_void);
        // SAFETY: see above; both addresses point to `bytes` bytes of this device's memory until the stream has
        // completed the copy.
        let code = unsafe { copy(to, bytes, from, bytes, DEVICE_TO_DEVICE, stream.0 as Handle) };
        self.check("aclrtMemcpyAsync", code)
    }

    fn spare(&self, device: i32) -> Result<usize> {
        self.spare.of(device, || {
            let mut made = std::ptr::null_mut();
            // SAFETY: see above.
            let code = unsafe { self.table.allocate.of(&self.library)?(&mut made, Spare::BYTES, HUGE_FIRST) };
            self.check("aclrtMalloc", code).map(|()| made as usize)
        })
    }
}
