//! The CUDA driver. The types come from the crate cudarc, and the compiler compares each function of the table with
//! cudarc's declaration. The functions are called through our table and not through cudarc, for three reasons. cudarc
//! opens the library only by its usual names, so no environment variable could name a file. It panics if the library or
//! a symbol is missing. And its result type is a closed enum, so if a newer driver returned an unknown code, the
//! behaviour would be undefined.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint};
use std::sync::{Arc, Mutex};

use cudarc::driver::sys;
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUevent_flags, CUresult, CUstream, CUstream_flags,
};

use crate::engine::device::communicator::text;
use crate::engine::device::runtime::{Event, Runtime, Spare, Stream};
use crate::engine::loader::{Hints, Known, Library, symbols};
use crate::error::{Error, Result};

pub static KNOWN: Known = Known {
    key: "CUDA",
    title: "the CUDA driver",
    names: &["libcuda.so.1", "libcuda.so"],
    package: "",
    companion: None,
    fix: "It comes with the driver of an NVIDIA GPU; in a container, start it with the GPUs of the host.",
};

type Code = c_int;
const SUCCESS: Code = 0;
const NOT_READY: Code = 600;
/// CU_STREAM_CAPTURE_STATUS_NONE as an integer. `SPARES_CAPTURES` is CU_STREAM_CAPTURE_MODE_RELAXED.
const CAPTURES_NOTHING: c_int = 0;

/// Declares a table of functions. Each signature is checked against a declaration of cudarc, whose name follows the
/// string. `_` in place of that name skips the check, for functions that have an integer argument here and a closed
/// enum in cudarc.
macro_rules! driver {
    ($table:ident { $($field:ident = $name:literal $declared:tt ($($argument:ty),*);)* }) => {
        symbols! {
            $table { $($field = $name($($argument),*) -> Code;)* }
        }
        $(declared!($declared, unsafe fn($($argument),*) -> CUresult);)*
    };
}

macro_rules! declared {
    (_, $function:ty) => {};
    ($name:ident, $function:ty) => {
        const _: $function = sys::$name;
    };
}

driver! {
    Table {
        init = "cuInit" cuInit(c_uint);
        driver_version = "cuDriverGetVersion" cuDriverGetVersion(*mut c_int);
        get_error_string = "cuGetErrorString" _(Code, *mut *const c_char);
        device_get = "cuDeviceGet" cuDeviceGet(*mut CUdevice, c_int);
        primary_retain = "cuDevicePrimaryCtxRetain" cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
        set_current = "cuCtxSetCurrent" cuCtxSetCurrent(CUcontext);
        stream_create = "cuStreamCreate" cuStreamCreate(*mut CUstream, c_uint);
        stream_query = "cuStreamQuery" cuStreamQuery(CUstream);
        stream_is_capturing = "cuStreamIsCapturing" _(CUstream, *mut c_int);
        exchange_capture_mode = "cuThreadExchangeStreamCaptureMode" _(*mut c_int);
        stream_wait_event = "cuStreamWaitEvent" cuStreamWaitEvent(CUstream, CUevent, c_uint);
        event_create = "cuEventCreate" cuEventCreate(*mut CUevent, c_uint);
        event_record = "cuEventRecord" cuEventRecord(CUevent, CUstream);
        allocate = "cuMemAlloc_v2" cuMemAlloc_v2(*mut CUdeviceptr, usize);
        copy = "cuMemcpyDtoDAsync_v2" cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
    }
}

pub struct Cuda {
    library: Library,
    table: Table,
    version: c_int,
    /// Primary contexts by device. They are kept until the process ends, because torch uses the same contexts.
    contexts: Mutex<HashMap<i32, usize>>,
    spare: Spare,
}

impl Cuda {
    pub fn open(hints: &Hints) -> Result<Arc<dyn Runtime>> {
        let library = Library::open(&KNOWN, hints)?;
        let table = Table::load(&library);
        let mut cuda = Cuda { library, table, version: 0, contexts: Mutex::default(), spare: Spare::default() };
        // SAFETY: the driver's functions; the second writes one int.
        let codes = unsafe {
            [cuda.table.init.of(&cuda.library)?(0), cuda.table.driver_version.of(&cuda.library)?(&mut cuda.version)]
        };
        cuda.check("cuInit", codes[0])?;
        cuda.check("cuDriverGetVersion", codes[1])?;
        Ok(Arc::new(cuda))
    }

    fn check(&self, what: &str, code: Code) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut words = std::ptr::null();
        if let Some(get) = self.table.get_error_string.optional() {
            // SAFETY: the driver's function; it writes null or a pointer to a static text.
            unsafe { get(code, &mut words) };
        }
        Err(Error::system(format!("sagellm: the CUDA driver failed in {what}: {} (CUresult {code})", text(words))))
    }

    /// True for success, false for "not ready"; any other code is an error.
    fn ready(&self, what: &str, code: Code) -> Result<bool> {
        if code == NOT_READY { Ok(false) } else { self.check(what, code).map(|()| true) }
    }
}

fn stream(stream: Stream) -> CUstream {
    stream.0 as CUstream
}

fn event(event: Event) -> CUevent {
    event.0 as CUevent
}

// SAFETY of the calls below: each function is declared as the driver declares it. Handles were made by this driver and
// are alive, which the caller guarantees by holding them. Out-parameters are valid during the call.
impl Runtime for Cuda {
    fn describe(&self) -> String {
        let Cuda { version, library, .. } = self;
        format!("CUDA driver {}.{} ({})", version / 1000, version / 10 % 100, library.path)
    }

    fn set_device(&self, device: i32) -> Result<()> {
        let mut contexts = self.contexts.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let context = match contexts.get(&device) {
            Some(context) => *context,
            None => {
                let (mut handle, mut made): (CUdevice, CUcontext) = (0, std::ptr::null_mut());
                // SAFETY: see above.
                let code = unsafe { self.table.device_get.of(&self.library)?(&mut handle, device) };
                self.check("cuDeviceGet", code)?;
                // SAFETY: see above. The context is never released: torch keeps the same context until the process
                // ends.
                let code = unsafe { self.table.primary_retain.of(&self.library)?(&mut made, handle) };
                self.check("cuDevicePrimaryCtxRetain", code)?;
                *contexts.entry(device).or_insert(made as usize)
            }
        };
        // SAFETY: see above.
        let code = unsafe { self.table.set_current.of(&self.library)?(context as CUcontext) };
        self.check("cuCtxSetCurrent", code)
    }

    fn stream_create(&self) -> Result<Stream> {
        let mut made: CUstream = std::ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: see above.
        let code = unsafe { self.table.stream_create.of(&self.library)?(&mut made, flags) };
        self.check("cuStreamCreate", code).map(|()| Stream(made as usize))
    }

    fn stream_idle(&self, own: Stream) -> Result<bool> {
        // SAFETY: see above.
        let code = unsafe { self.table.stream_query.of(&self.library)?(stream(own)) };
        self.ready("cuStreamQuery", code)
    }

    fn capturing(&self, own: Stream) -> Result<bool> {
        let mut status = CAPTURES_NOTHING;
        // SAFETY: see above.
        let code = unsafe { self.table.stream_is_capturing.of(&self.library)?(stream(own), &mut status) };
        self.check("cuStreamIsCapturing", code).map(|()| status != CAPTURES_NOTHING)
    }

    fn exchange_capture_mode(&self, mode: u32) -> Result<u32> {
        let mut mode = mode as c_int;
        // SAFETY: see above; it reads and writes one enum of four bytes.
        let code = unsafe { self.table.exchange_capture_mode.of(&self.library)?(&mut mode) };
        self.check("cuThreadExchangeStreamCaptureMode", code).map(|()| mode as u32)
    }

    fn event_create(&self) -> Result<Event> {
        let mut made: CUevent = std::ptr::null_mut();
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        // SAFETY: see above.
        let code = unsafe { self.table.event_create.of(&self.library)?(&mut made, flags) };
        self.check("cuEventCreate", code).map(|()| Event(made as usize))
    }

    fn event_record(&self, own: Event, on: Stream) -> Result<()> {
        // SAFETY: see above.
        let code = unsafe { self.table.event_record.of(&self.library)?(event(own), stream(on)) };
        self.check("cuEventRecord", code)
    }

    fn event_wait(&self, waiting: Stream, own: Event) -> Result<()> {
        // SAFETY: see above.
        let code = unsafe { self.table.stream_wait_event.of(&self.library)?(stream(waiting), event(own), 0) };
        self.check("cuStreamWaitEvent", code)
    }

    fn copy(&self, to: usize, from: usize, bytes: usize, on: Stream) -> Result<()> {
        let copy = self.table.copy.of(&self.library)?;
        // SAFETY: see above; both addresses point to `bytes` bytes of this device's memory until the stream has
        // completed the copy.
        let code = unsafe { copy(to as CUdeviceptr, from as CUdeviceptr, bytes, stream(on)) };
        self.check("cuMemcpyDtoDAsync", code)
    }

    fn spare(&self, device: i32) -> Result<usize> {
        self.spare.of(device, || {
            let mut made: CUdeviceptr = 0;
            // SAFETY: see above.
            let code = unsafe { self.table.allocate.of(&self.library)?(&mut made, Spare::BYTES) };
            self.check("cuMemAlloc", code).map(|()| made as usize)
        })
    }
}
