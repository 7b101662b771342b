//! The part of the AscendCL runtime that a user of HCCL needs. Names, numbers and the order of arguments are those of
//! `acl_rt.h`. The two families of events behave as torch_npu describes them (AclInterface.cpp): events made by
//! `aclrtCreateEventExWithFlag` can be recorded again and again, all others need a reset in between.

#![allow(non_snake_case)]

use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::capture::{Capture, GRAPHS};
use crate::device::Runtime;
use crate::event::{EVENTS, Event};
use crate::memory;
use crate::pointers::{In, Out, forever};
use crate::settings;
use crate::stream::{Again, STREAMS, Stream};
use crate::trace;

const SUCCESS: i32 = 0;
const UNINITIALIZED: i32 = 100_001;
const REPEATED: i32 = 100_002;
const INVALID: i32 = 107_000;
const NO_DEVICE: i32 = 107_001;
const NO_CONTEXT: i32 = 107_002;
const NO_STREAM: i32 = 107_003;
const NO_TIMESTAMP: i32 = 107_006;
const NO_MEMORY: i32 = 207_001;
const STREAM_TIMEOUT: i32 = 507_046;
const EVENT_TIMEOUT: i32 = 507_047;

/// Event flags: those of the interface, and our own flag for the family that needs no reset.
const KNOWN_FLAGS: u32 = 0x7b;
const TIME_LINE: u32 = 8;
const EX: u32 = 1 << 31;
/// The context of device d is this number plus d.
const CONTEXT: usize = 0x5a6e_0d00_0000_0000;
/// Version number of CANN 9.1.0.
const VERSION: i32 = 90_100_000;

static INITIALIZED: AtomicBool = AtomicBool::new(false);

fn refuse(code: i32, text: impl Into<String>) -> i32 {
    trace::refuse(text);
    code
}

fn code(done: bool, otherwise: i32) -> i32 {
    if done { SUCCESS } else { refuse(otherwise, format!("error {otherwise}")) }
}

/// The device that this thread has set.
pub fn current() -> Result<i32, i32> {
    if !INITIALIZED.load(Ordering::Acquire) {
        return Err(refuse(UNINITIALIZED, "aclInit was not called"));
    }
    Runtime::Acl.current().ok_or_else(|| refuse(NO_CONTEXT, "no device was set on this thread"))
}

/// The stream of a handle. Handle 0 is not a stream.
pub fn stream(handle: usize) -> Option<Arc<Stream>> {
    STREAMS.get(handle).filter(|stream| stream.runtime == Runtime::Acl)
}

fn on_stream(handle: usize, body: impl FnOnce(&Arc<Stream>) -> i32) -> i32 {
    if let Err(error) = current() {
        return error;
    }
    stream(handle).map_or_else(|| refuse(NO_STREAM, format!("stream {handle:#x}")), |stream| body(&stream))
}

fn on_event(handle: usize, body: impl FnOnce(&Arc<Event>) -> i32) -> i32 {
    if let Err(error) = current() {
        return error;
    }
    EVENTS.get(handle).map_or_else(|| refuse(INVALID, format!("event {handle:#x}")), |event| body(&event))
}

/// The time limit of a wait: the caller's milliseconds (-1 means none), at most six times our own limit.
fn limit(milliseconds: i32) -> Duration {
    let longest = 6 * settings::get().ceiling;
    u64::try_from(milliseconds).map_or(longest, |given| longest.min(Duration::from_millis(given)))
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclInit(_config: In<c_char>) -> i32 {
    match INITIALIZED.swap(true, Ordering::AcqRel) {
        true => refuse(REPEATED, "aclInit was called before"),
        false => SUCCESS,
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclFinalize() -> i32 {
    code(INITIALIZED.swap(false, Ordering::AcqRel), UNINITIALIZED)
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclGetRecentErrMsg() -> *const c_char {
    forever(&format!("{} (simulated AscendCL)", trace::last()))
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclsysGetVersionNum(package: In<c_char>, version: Out<i32>) -> i32 {
    match package.text() {
        Some(_) => code(version.set(VERSION), INVALID),
        None => refuse(INVALID, "no package"),
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtGetSocName() -> *const c_char {
    forever(&settings::get().soc)
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtGetDeviceCount(count: Out<u32>) -> i32 {
    code(count.set(Runtime::Acl.count() as u32), INVALID)
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtSetDevice(device: i32) -> i32 {
    trace::call(|| format!("aclrtSetDevice device={device}"));
    if !INITIALIZED.load(Ordering::Acquire) {
        return refuse(UNINITIALIZED, "aclInit was not called");
    }
    if !Runtime::Acl.exists(device) {
        return refuse(NO_DEVICE, format!("device {device}"));
    }
    Runtime::Acl.choose(Some(device));
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtResetDevice(_device: i32) -> i32 {
    Runtime::Acl.choose(None);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtGetDevice(device: Out<i32>) -> i32 {
    current().map_or_else(|error| error, |current| code(device.set(current), INVALID))
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtGetCurrentContext(context: Out<usize>) -> i32 {
    current().map_or_else(|error| error, |device| code(context.set(CONTEXT + device as usize), INVALID))
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtSetCurrentContext(context: usize) -> i32 {
    match i32::try_from(context.wrapping_sub(CONTEXT)) {
        Ok(device) => sim_aclrtSetDevice(device),
        Err(_) => refuse(INVALID, format!("context {context:#x}")),
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtCreateStream(out: Out<usize>) -> i32 {
    sim_aclrtCreateStreamWithConfig(out, 0, 0)
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtCreateStreamWithConfig(out: Out<usize>, priority: u32, flags: u32) -> i32 {
    let device = match current() {
        Ok(device) => device,
        Err(error) => return error,
    };
    if priority > 7 || flags > 0xf || out.is_null() {
        return refuse(INVALID, format!("priority {priority}, flags {flags}"));
    }
    match Stream::create(Runtime::Acl, device, flags, priority as i32) {
        Some(stream) => code(out.set(STREAMS.add(stream)), INVALID),
        None => NO_MEMORY,
    }
}

fn destroy_stream(handle: usize, force: bool) -> i32 {
    STREAMS.remove(handle).map_or_else(
        || refuse(NO_STREAM, format!("stream {handle:#x}")),
        |stream| {
            if force {
                stream.discard();
            }
            stream.close();
            SUCCESS
        },
    )
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtDestroyStream(handle: usize) -> i32 {
    destroy_stream(handle, false)
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtDestroyStreamForce(handle: usize) -> i32 {
    destroy_stream(handle, true)
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtStreamAbort(handle: usize) -> i32 {
    on_stream(handle, |stream| {
        stream.discard();
        SUCCESS
    })
}

/// The result for a stream. A stream that has failed returns its error for ever.
fn state(stream: &Stream) -> i32 {
    match stream.fault() {
        0 => SUCCESS,
        fault => refuse(fault, format!("the stream failed with {fault}")),
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtSynchronizeStream(handle: usize) -> i32 {
    sim_aclrtSynchronizeStreamWithTimeout(handle, -1)
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtSynchronizeStreamWithTimeout(handle: usize, milliseconds: i32) -> i32 {
    on_stream(handle, |stream| match stream.synchronize(limit(milliseconds)) {
        true => state(stream),
        false => refuse(STREAM_TIMEOUT, "the stream is not through"),
    })
}

/// Waits for all streams of the device.
#[unsafe(no_mangle)]
extern "C" fn sim_aclrtSynchronizeDevice() -> i32 {
    let device = match current() {
        Ok(device) => device,
        Err(error) => return error,
    };
    let streams = STREAMS.all();
    let own = streams.iter().filter(|stream| stream.runtime == Runtime::Acl && stream.device == device);
    code(own.fold(true, |all, stream| all & stream.synchronize(limit(-1))), STREAM_TIMEOUT)
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtStreamQuery(handle: usize, status: Out<i32>) -> i32 {
    const COMPLETE: i32 = 0;
    const NOT_READY: i32 = 1;
    on_stream(handle, |stream| {
        let found = if stream.idle() { COMPLETE } else { NOT_READY };
        if !status.set(found) { refuse(INVALID, "nowhere to write to") } else { state(stream) }
    })
}

fn create_event(out: Out<usize>, flags: u32, ex: bool) -> i32 {
    let device = match current() {
        Ok(device) => device,
        Err(error) => return error,
    };
    if flags & !KNOWN_FLAGS != 0 {
        return refuse(INVALID, format!("event flags {flags:#x}"));
    }
    // Without `EX`, a wait on an event that was not recorded is for the next record.
    let event = Event::new(device, flags | if ex { EX } else { 0 }, !ex);
    code(out.set(EVENTS.add(event)), INVALID)
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtCreateEvent(out: Out<usize>) -> i32 {
    create_event(out, TIME_LINE, false)
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtCreateEventWithFlag(out: Out<usize>, flags: u32) -> i32 {
    create_event(out, flags, false)
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtCreateEventExWithFlag(out: Out<usize>, flags: u32) -> i32 {
    create_event(out, flags, true)
}

fn is_ex(event: &Event) -> bool {
    event.flags & EX != 0
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtDestroyEvent(handle: usize) -> i32 {
    on_event(handle, |event| {
        if !is_ex(event) && event.waited_for() {
            return refuse(INVALID, "an event that streams still wait for is destroyed");
        }
        EVENTS.remove(handle);
        SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtRecordEvent(event: usize, handle: usize) -> i32 {
    trace::call(|| format!("aclrtRecordEvent event={event:#x} stream={handle:#x}"));
    on_stream(handle, |stream| {
        on_event(event, |event| {
            if event.device != stream.device {
                return refuse(INVALID, "event and stream are of two devices");
            }
            if !is_ex(event) && event.recorded() {
                return refuse(INVALID, "an event is recorded again without aclrtResetEvent");
            }
            stream.record(event);
            SUCCESS
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtStreamWaitEvent(handle: usize, event: usize) -> i32 {
    trace::call(|| format!("aclrtStreamWaitEvent stream={handle:#x} event={event:#x}"));
    on_stream(handle, |stream| on_event(event, |event| code(event.wait_on(stream), INVALID)))
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtResetEvent(event: usize, handle: usize) -> i32 {
    on_stream(handle, |_| {
        on_event(event, |event| {
            if is_ex(event) {
                return refuse(INVALID, "aclrtResetEvent of an event that needs none");
            }
            event.reset();
            SUCCESS
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtQueryEventStatus(event: usize, status: Out<i32>) -> i32 {
    const NOT_READY: i32 = 0;
    const COMPLETE: i32 = 1;
    on_event(event, |event| {
        let found = if event.recorded() && event.complete() { COMPLETE } else { NOT_READY };
        code(status.set(found), INVALID)
    })
}

/// Returns 0 for complete and 1 for not ready, the reverse of the status above. Not for Ex events.
fn older_query(event: usize, status: Out<i32>, complete: impl FnOnce(&Event) -> bool) -> i32 {
    on_event(event, |event| {
        if is_ex(event) {
            return refuse(INVALID, "only aclrtQueryEventStatus knows Ex events");
        }
        code(status.set(i32::from(!complete(event))), INVALID)
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtQueryEvent(event: usize, status: Out<i32>) -> i32 {
    older_query(event, status, |event| event.recorded() && event.complete())
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtQueryEventWaitStatus(event: usize, status: Out<i32>) -> i32 {
    older_query(event, status, |event| !event.waited_for())
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtSynchronizeEvent(event: usize) -> i32 {
    sim_aclrtSynchronizeEventWithTimeout(event, -1)
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtSynchronizeEventWithTimeout(event: usize, milliseconds: i32) -> i32 {
    on_event(event, |event| code(event.synchronize(limit(milliseconds)), EVENT_TIMEOUT))
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtEventElapsedTime(milliseconds: Out<f32>, start: usize, end: usize) -> i32 {
    on_event(start, |start| {
        on_event(end, |end| {
            if start.flags & end.flags & TIME_LINE == 0 {
                return refuse(NO_TIMESTAMP, "an event was made without ACL_EVENT_TIME_LINE");
            }
            let time = start.elapsed(end);
            time.map_or_else(
                || refuse(NO_TIMESTAMP, "an event is not complete"),
                |time| code(milliseconds.set(time), INVALID),
            )
        })
    })
}

fn check_copy(to: usize, room: usize, from: usize, bytes: usize, kind: i32) -> Result<(), i32> {
    let missing = bytes > 0 && (to == 0 || from == 0);
    if missing || bytes > room || !(0..=4).contains(&kind) {
        return Err(refuse(INVALID, format!("copy of {bytes} bytes into {room}, kind {kind}")));
    }
    current().map(|_| ())
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtMemcpy(to: usize, room: usize, from: usize, bytes: usize, kind: i32) -> i32 {
    if let Err(error) = check_copy(to, room, from, bytes, kind) {
        return error;
    }
    memory::copy(to, from, bytes);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtMemcpyAsync(to: usize, room: usize, from: usize, bytes: usize, kind: i32, stream: usize) -> i32 {
    if let Err(error) = check_copy(to, room, from, bytes, kind) {
        return error;
    }
    on_stream(stream, |stream| {
        stream.push(&Again::of(move || memory::copy(to, from, bytes)));
        SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtMemset(to: usize, room: usize, value: i32, bytes: usize) -> i32 {
    if let Err(error) = check_copy(to, room, to, bytes, 0) {
        return error;
    }
    memory::set(to, value as u8, bytes);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtMemsetAsync(to: usize, room: usize, value: i32, bytes: usize, stream: usize) -> i32 {
    if let Err(error) = check_copy(to, room, to, bytes, 0) {
        return error;
    }
    on_stream(stream, |stream| {
        stream.push(&Again::of(move || memory::set(to, value as u8, bytes)));
        SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtMalloc(out: Out<usize>, bytes: usize, _policy: i32) -> i32 {
    if let Err(error) = current() {
        return error;
    }
    if bytes == 0 || out.is_null() {
        return refuse(INVALID, "aclrtMalloc of nothing");
    }
    memory::allocate(bytes).map_or(NO_MEMORY, |memory| code(out.set(memory), INVALID))
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtFree(memory: usize) -> i32 {
    code(memory::free(memory), INVALID)
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtMallocHost(out: Out<usize>, bytes: usize) -> i32 {
    sim_aclrtMalloc(out, bytes, 0)
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtFreeHost(memory: usize) -> i32 {
    sim_aclrtFree(memory)
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtLaunchHostFunc(handle: usize, body: Option<extern "C" fn(*mut c_void)>, argument: usize) -> i32 {
    let Some(body) = body else { return refuse(INVALID, "no function") };
    on_stream(handle, |stream| {
        stream.push(&Again::of(move || body(argument as *mut c_void)));
        SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclrtSetOpWaitTimeout(_seconds: u32) -> i32 {
    current().map_or_else(|error| error, |_| SUCCESS)
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclmdlRICaptureBegin(handle: usize, mode: u32) -> i32 {
    on_stream(handle, |stream| if mode > 2 { INVALID } else { code(Capture::begin(stream, mode), INVALID) })
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclmdlRICaptureGetInfo(handle: usize, status: Out<i32>, model: Out<usize>) -> i32 {
    on_stream(handle, |stream| {
        // 0: no capture, 1: active, 2: invalidated.
        let found = stream.capture().map_or(0, |capture| if capture.valid() { 1 } else { 2 });
        code(status.set(found) && model.set(0), INVALID)
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_aclmdlRICaptureEnd(handle: usize, model: Out<usize>) -> i32 {
    on_stream(handle, |stream| match Capture::end(stream) {
        Ok(captured) => code(model.set(GRAPHS.add(Arc::new(captured))), INVALID),
        Err(_) => refuse(INVALID, "the capture was broken"),
    })
}
