//! The part of the CUDA driver that a user of a collective library needs: contexts, streams, events, asynchronous
//! copies, host functions, capture. Names and numbers are those of `cuda.h` (CUDA 12).

#![allow(non_snake_case)]

use std::collections::HashMap;
use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::capture::{self, Capture, EXECUTABLE, GRAPHS};
use crate::device::Runtime;
use crate::event::{EVENTS, Event};
use crate::memory;
use crate::pointers::{Out, forever};
use crate::settings;
use crate::stream::{Again, STREAMS, Stream, default_stream};
use crate::trace;

type CUresult = i32;

const SUCCESS: CUresult = 0;
const INVALID_VALUE: CUresult = 1;
const OUT_OF_MEMORY: CUresult = 2;
const NOT_INITIALIZED: CUresult = 3;
const INVALID_DEVICE: CUresult = 101;
const INVALID_CONTEXT: CUresult = 201;
const INVALID_HANDLE: CUresult = 400;
const NOT_READY: CUresult = 600;
const LAUNCH_TIMEOUT: CUresult = 702;
const CAPTURE_UNSUPPORTED: CUresult = 900;
const CAPTURE_ISOLATION: CUresult = 905;
const CAPTURED_EVENT: CUresult = 907;

const DISABLE_TIMING: u32 = 2;
/// The context of device d is this number plus d.
const CONTEXT: usize = 0x5a6e_0c00_0000_0000;
const DRIVER_VERSION: i32 = 12_080;

static INITIALIZED: AtomicBool = AtomicBool::new(false);
static RETAINED: Mutex<Option<HashMap<i32, u32>>> = Mutex::new(None);

/// The device of this thread's current context.
fn current() -> Result<i32, CUresult> {
    if !INITIALIZED.load(Ordering::Acquire) {
        return Err(NOT_INITIALIZED);
    }
    Runtime::Cuda.current().ok_or(INVALID_CONTEXT)
}

/// The stream of a handle. 0 and 1 are the legacy default stream, 2 is the thread's own default stream.
pub fn stream(handle: usize) -> Option<Arc<Stream>> {
    if handle > 2 {
        return STREAMS.get(handle).filter(|stream| stream.runtime == Runtime::Cuda);
    }
    let device = Runtime::Cuda.current()?;
    default_stream(Runtime::Cuda, device, handle == 2)
}

fn on_stream(handle: usize, body: impl FnOnce(&Arc<Stream>) -> CUresult) -> CUresult {
    if let Err(error) = current() {
        return error;
    }
    stream(handle).map_or(INVALID_HANDLE, |stream| body(&stream))
}

fn on_event(handle: usize, body: impl FnOnce(&Arc<Event>) -> CUresult) -> CUresult {
    if let Err(error) = current() {
        return error;
    }
    EVENTS.get(handle).map_or(INVALID_HANDLE, |event| body(&event))
}

fn code(done: bool, otherwise: CUresult) -> CUresult {
    if done { SUCCESS } else { otherwise }
}

/// Longest wait of the host; the driver's waits have no limit. Several operations in a row may each take twice our
/// limit.
fn longest() -> Duration {
    6 * settings::get().ceiling
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuInit(flags: u32) -> CUresult {
    if flags != 0 {
        return INVALID_VALUE;
    }
    INITIALIZED.store(true, Ordering::Release);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuDriverGetVersion(version: Out<i32>) -> CUresult {
    code(version.set(DRIVER_VERSION), INVALID_VALUE)
}

fn name_of(error: CUresult) -> &'static str {
    match error {
        SUCCESS => "CUDA_SUCCESS",
        INVALID_VALUE => "CUDA_ERROR_INVALID_VALUE",
        OUT_OF_MEMORY => "CUDA_ERROR_OUT_OF_MEMORY",
        NOT_INITIALIZED => "CUDA_ERROR_NOT_INITIALIZED",
        INVALID_DEVICE => "CUDA_ERROR_INVALID_DEVICE",
        INVALID_CONTEXT => "CUDA_ERROR_INVALID_CONTEXT",
        INVALID_HANDLE => "CUDA_ERROR_INVALID_HANDLE",
        401 => "CUDA_ERROR_ILLEGAL_STATE",
        NOT_READY => "CUDA_ERROR_NOT_READY",
        LAUNCH_TIMEOUT => "CUDA_ERROR_LAUNCH_TIMEOUT",
        CAPTURE_UNSUPPORTED => "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        901 => "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        903 => "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
        904 => "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
        CAPTURE_ISOLATION => "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
        CAPTURED_EVENT => "CUDA_ERROR_CAPTURED_EVENT",
        _ => "",
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuGetErrorName(error: CUresult, text: Out<*const c_char>) -> CUresult {
    match name_of(error) {
        "" => INVALID_VALUE,
        name => code(text.set(forever(name)), INVALID_VALUE),
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuGetErrorString(error: CUresult, text: Out<*const c_char>) -> CUresult {
    match name_of(error) {
        "" => INVALID_VALUE,
        name => code(text.set(forever(&format!("{name} (simulated driver)"))), INVALID_VALUE),
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuDeviceGetCount(count: Out<i32>) -> CUresult {
    if !INITIALIZED.load(Ordering::Acquire) {
        return NOT_INITIALIZED;
    }
    code(count.set(Runtime::Cuda.count() as i32), INVALID_VALUE)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuDeviceGet(device: Out<i32>, ordinal: i32) -> CUresult {
    if !Runtime::Cuda.exists(ordinal) {
        return INVALID_DEVICE;
    }
    code(device.set(ordinal), INVALID_VALUE)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuDeviceGetName(name: Out<u8>, length: i32, device: i32) -> CUresult {
    let mut text = format!("sagellm simulator {device}").into_bytes();
    text.truncate((length.max(1) - 1) as usize);
    text.push(0);
    if !Runtime::Cuda.exists(device) {
        return INVALID_DEVICE;
    }
    code(length > 0 && name.fill(&text), INVALID_VALUE)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuDevicePrimaryCtxRetain(context: Out<usize>, device: i32) -> CUresult {
    if !INITIALIZED.load(Ordering::Acquire) {
        return NOT_INITIALIZED;
    }
    if !Runtime::Cuda.exists(device) {
        return INVALID_DEVICE;
    }
    *RETAINED.lock().unwrap().get_or_insert_default().entry(device).or_insert(0) += 1;
    code(context.set(CONTEXT + device as usize), INVALID_VALUE)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuDevicePrimaryCtxRelease_v2(device: i32) -> CUresult {
    let mut retained = RETAINED.lock().unwrap();
    match retained.get_or_insert_default().get_mut(&device) {
        Some(count) if *count > 0 => {
            *count -= 1;
            SUCCESS
        }
        _ => INVALID_CONTEXT,
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuDevicePrimaryCtxGetState(device: i32, flags: Out<u32>, active: Out<i32>) -> CUresult {
    if !Runtime::Cuda.exists(device) {
        return INVALID_DEVICE;
    }
    let retained = RETAINED.lock().unwrap().get_or_insert_default().get(&device).copied().unwrap_or(0);
    code(flags.set(0) && active.set(i32::from(retained > 0)), INVALID_VALUE)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuCtxSetCurrent(context: usize) -> CUresult {
    if context == 0 {
        Runtime::Cuda.choose(None);
        return SUCCESS;
    }
    let device = context.wrapping_sub(CONTEXT) as i32;
    let retained = RETAINED.lock().unwrap().get_or_insert_default().get(&device).copied().unwrap_or(0);
    if context.wrapping_sub(CONTEXT) > i32::MAX as usize || retained == 0 {
        return INVALID_CONTEXT;
    }
    Runtime::Cuda.choose(Some(device));
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuCtxGetCurrent(context: Out<usize>) -> CUresult {
    if !INITIALIZED.load(Ordering::Acquire) {
        return NOT_INITIALIZED;
    }
    let current = Runtime::Cuda.current().map_or(0, |device| CONTEXT + device as usize);
    code(context.set(current), INVALID_VALUE)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuCtxGetDevice(device: Out<i32>) -> CUresult {
    match current() {
        Ok(current) => code(device.set(current), INVALID_VALUE),
        Err(error) => error,
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) -> CUresult {
    least.set(0);
    greatest.set(-5);
    SUCCESS
}

/// Waits for all streams that have handles.
#[unsafe(no_mangle)]
extern "C" fn sim_cuCtxSynchronize() -> CUresult {
    if capture::forbidden() {
        return CAPTURE_UNSUPPORTED;
    }
    let device = match current() {
        Ok(device) => device,
        Err(error) => return error,
    };
    let streams = STREAMS.all();
    let own = streams.iter().filter(|stream| stream.runtime == Runtime::Cuda && stream.device == device);
    code(own.fold(true, |all, stream| all & stream.synchronize(longest())), LAUNCH_TIMEOUT)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuStreamCreate(out: Out<usize>, flags: u32) -> CUresult {
    sim_cuStreamCreateWithPriority(out, flags, 0)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuStreamCreateWithPriority(out: Out<usize>, flags: u32, priority: i32) -> CUresult {
    let device = match current() {
        Ok(device) => device,
        Err(error) => return error,
    };
    if flags > 1 || out.is_null() {
        return INVALID_VALUE;
    }
    match Stream::create(Runtime::Cuda, device, flags, priority.clamp(-5, 0)) {
        Some(stream) => code(out.set(STREAMS.add(stream)), INVALID_VALUE),
        None => OUT_OF_MEMORY,
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuStreamDestroy_v2(handle: usize) -> CUresult {
    if let Err(error) = current() {
        return error;
    }
    match STREAMS.remove(handle) {
        Some(stream) => {
            stream.close();
            SUCCESS
        }
        None => INVALID_HANDLE,
    }
}

/// Returns whether the stream is being captured. If so, invalidates the capture, as a query of a stream does.
fn asked_while_capturing(stream: &Stream) -> bool {
    stream.capture().inspect(|capture| capture.invalidate()).is_some()
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuStreamQuery(handle: usize) -> CUresult {
    on_stream(handle, |stream| match asked_while_capturing(stream) {
        true => CAPTURE_UNSUPPORTED,
        false => code(stream.idle(), NOT_READY),
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuStreamSynchronize(handle: usize) -> CUresult {
    on_stream(handle, |stream| match asked_while_capturing(stream) {
        true => CAPTURE_UNSUPPORTED,
        false => code(stream.synchronize(longest()), LAUNCH_TIMEOUT),
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuStreamWaitEvent(handle: usize, event: usize, flags: u32) -> CUresult {
    trace::call(|| format!("cuStreamWaitEvent stream={handle:#x} event={event:#x}"));
    on_stream(handle, |stream| {
        on_event(event, |event| if flags > 1 { INVALID_VALUE } else { code(event.wait_on(stream), CAPTURE_ISOLATION) })
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuStreamGetFlags(handle: usize, flags: Out<u32>) -> CUresult {
    on_stream(handle, |stream| code(flags.set(stream.flags), INVALID_VALUE))
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuStreamGetPriority(handle: usize, priority: Out<i32>) -> CUresult {
    on_stream(handle, |stream| code(priority.set(stream.priority), INVALID_VALUE))
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuStreamIsCapturing(handle: usize, status: Out<i32>) -> CUresult {
    on_stream(handle, |stream| {
        // 0: no capture, 1: active, 2: invalidated.
        let found = stream.capture().map_or(0, |capture| if capture.valid() { 1 } else { 2 });
        code(status.set(found), INVALID_VALUE)
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuStreamGetCaptureInfo_v2(
    handle: usize,
    status: Out<i32>,
    id: Out<u64>,
    graph: Out<usize>,
    dependencies: Out<usize>,
    count: Out<usize>,
) -> CUresult {
    on_stream(handle, |stream| {
        let capture = stream.capture();
        id.set(capture.map_or(0, |capture| capture.id));
        graph.set(0);
        dependencies.set(0);
        count.set(0);
        sim_cuStreamIsCapturing(handle, status)
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuThreadExchangeStreamCaptureMode(mode: Out<u32>) -> CUresult {
    match mode.list(1).as_deref() {
        Some([new @ 0..=2]) => code(mode.set(capture::exchange_mode(*new)), INVALID_VALUE),
        _ => INVALID_VALUE,
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuStreamBeginCapture_v2(handle: usize, mode: u32) -> CUresult {
    if handle <= 1 {
        return CAPTURE_UNSUPPORTED; // the legacy stream cannot be captured
    }
    const ILLEGAL_STATE: CUresult = 401;
    on_stream(handle, |stream| if mode > 2 { INVALID_VALUE } else { code(Capture::begin(stream, mode), ILLEGAL_STATE) })
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuStreamEndCapture(handle: usize, graph: Out<usize>) -> CUresult {
    on_stream(handle, |stream| match Capture::end(stream) {
        Ok(captured) => code(graph.set(GRAPHS.add(Arc::new(captured))), INVALID_VALUE),
        Err(error) => {
            graph.set(0);
            error
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuGraphInstantiateWithFlags(executable: Out<usize>, graph: usize, _flags: u64) -> CUresult {
    GRAPHS.get(graph).map_or(INVALID_HANDLE, |graph| code(executable.set(EXECUTABLE.add(graph)), INVALID_VALUE))
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuGraphLaunch(executable: usize, handle: usize) -> CUresult {
    let Some(graph) = EXECUTABLE.get(executable) else { return INVALID_HANDLE };
    on_stream(handle, |stream| {
        graph.launch(stream);
        SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuGraphExecDestroy(executable: usize) -> CUresult {
    code(EXECUTABLE.remove(executable).is_some(), INVALID_HANDLE)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuGraphDestroy(graph: usize) -> CUresult {
    code(GRAPHS.remove(graph).is_some(), INVALID_HANDLE)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuEventCreate(out: Out<usize>, flags: u32) -> CUresult {
    match current() {
        Err(error) => error,
        Ok(_) if flags > 7 => INVALID_VALUE,
        Ok(device) => code(out.set(EVENTS.add(Event::new(device, flags, false))), INVALID_VALUE),
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuEventDestroy_v2(handle: usize) -> CUresult {
    code(EVENTS.remove(handle).is_some(), INVALID_HANDLE)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuEventRecord(event: usize, handle: usize) -> CUresult {
    trace::call(|| format!("cuEventRecord event={event:#x} stream={handle:#x}"));
    on_stream(handle, |stream| {
        on_event(event, |event| {
            if event.device != stream.device {
                return INVALID_HANDLE;
            }
            stream.record(event);
            SUCCESS
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuEventQuery(event: usize) -> CUresult {
    if capture::forbidden() {
        return CAPTURE_UNSUPPORTED;
    }
    on_event(event, |event| if event.captured() { CAPTURED_EVENT } else { code(event.complete(), NOT_READY) })
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuEventSynchronize(event: usize) -> CUresult {
    if capture::forbidden() {
        return CAPTURE_UNSUPPORTED;
    }
    on_event(event, |event| match event.captured() {
        true => CAPTURED_EVENT,
        false => code(event.synchronize(longest()), LAUNCH_TIMEOUT),
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuEventElapsedTime(milliseconds: Out<f32>, start: usize, end: usize) -> CUresult {
    on_event(start, |start| {
        on_event(end, |end| {
            if (start.flags | end.flags) & DISABLE_TIMING != 0 || !start.recorded() || !end.recorded() {
                return INVALID_HANDLE;
            }
            start.elapsed(end).map_or(NOT_READY, |time| code(milliseconds.set(time), INVALID_VALUE))
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuEventElapsedTime_v2(milliseconds: Out<f32>, start: usize, end: usize) -> CUresult {
    sim_cuEventElapsedTime(milliseconds, start, end)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuMemAlloc_v2(out: Out<usize>, bytes: usize) -> CUresult {
    if capture::forbidden() {
        return CAPTURE_UNSUPPORTED;
    }
    match current() {
        Err(error) => error,
        Ok(_) if bytes == 0 || out.is_null() => INVALID_VALUE,
        Ok(_) => memory::allocate(bytes).map_or(OUT_OF_MEMORY, |memory| code(out.set(memory), INVALID_VALUE)),
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuMemFree_v2(memory: usize) -> CUresult {
    if capture::forbidden() {
        return CAPTURE_UNSUPPORTED;
    }
    code(memory::free(memory), INVALID_VALUE)
}

fn copy_async(to: usize, from: usize, bytes: usize, handle: usize) -> CUresult {
    on_stream(handle, |stream| {
        stream.push(&Again::of(move || memory::copy(to, from, bytes)));
        SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuMemcpyAsync(to: usize, from: usize, bytes: usize, stream: usize) -> CUresult {
    copy_async(to, from, bytes, stream)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuMemcpyHtoDAsync_v2(to: usize, from: usize, bytes: usize, stream: usize) -> CUresult {
    copy_async(to, from, bytes, stream)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuMemcpyDtoHAsync_v2(to: usize, from: usize, bytes: usize, stream: usize) -> CUresult {
    copy_async(to, from, bytes, stream)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuMemcpyDtoDAsync_v2(to: usize, from: usize, bytes: usize, stream: usize) -> CUresult {
    copy_async(to, from, bytes, stream)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuMemsetD8Async(to: usize, value: u8, bytes: usize, handle: usize) -> CUresult {
    on_stream(handle, |stream| {
        stream.push(&Again::of(move || memory::set(to, value, bytes)));
        SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_cuLaunchHostFunc(
    handle: usize,
    body: Option<extern "C" fn(*mut c_void)>,
    argument: usize,
) -> CUresult {
    let Some(body) = body else { return INVALID_VALUE };
    on_stream(handle, |stream| {
        stream.push(&Again::of(move || body(argument as *mut c_void)));
        SUCCESS
    })
}
