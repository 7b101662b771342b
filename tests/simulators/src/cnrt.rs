//! The part of Cambricon's runtime that a user of CNCL needs. Names, numbers and the order of arguments are those of
//! `cnrt.h` 6.14.

#![allow(non_snake_case)]

use std::cell::Cell;
use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::time::Duration;

use crate::capture::{Capture, GRAPHS};
use crate::device::Runtime;
use crate::event::{EVENTS, Event};
use crate::memory;
use crate::pointers::{Out, forever};
use crate::settings;
use crate::stream::{Again, STREAMS, Stream, default_stream};
use crate::trace;

const SUCCESS: i32 = 0;
const NOT_READY: i32 = 1;
const ARGS_INVALID: i32 = 100_006;
const QUEUE_ERROR: i32 = 100_060;
const NO_MEMORY: i32 = 100_100;
const BUSY: i32 = 632_014;
const DRIVER_CALL: i32 = 632_015;
const NO_CONTEXT: i32 = 632_019;

const DISABLE_TIMING: u32 = 2;
const DISABLE_TIMING_ALL: u32 = 4;
const INTERPROCESS: u32 = 8;

thread_local! {
    static LAST: Cell<i32> = const { Cell::new(SUCCESS) };
}

/// Keeps a result that is not success for `cnrtGetLastError`, and returns it.
fn told(code: i32) -> i32 {
    if code != SUCCESS {
        LAST.with(|last| last.set(code));
    }
    code
}

fn code(done: bool, otherwise: i32) -> i32 {
    told(if done { SUCCESS } else { otherwise })
}

/// The queue of a handle. 0 and 1 are the thread's own queue, 2 is the queue that all threads share.
pub fn queue(handle: usize) -> Option<Arc<Stream>> {
    if handle > 2 {
        return STREAMS.get(handle).filter(|stream| stream.runtime == Runtime::Cnrt);
    }
    let device = Runtime::Cnrt.current()?;
    default_stream(Runtime::Cnrt, device, handle < 2)
}

fn on_queue(handle: usize, body: impl FnOnce(&Arc<Stream>) -> i32) -> i32 {
    if Runtime::Cnrt.current().is_none() {
        return told(NO_CONTEXT);
    }
    queue(handle).map_or_else(|| told(QUEUE_ERROR), |queue| body(&queue))
}

fn on_notifier(handle: usize, body: impl FnOnce(&Arc<Event>) -> i32) -> i32 {
    if Runtime::Cnrt.current().is_none() {
        return told(NO_CONTEXT);
    }
    EVENTS.get(handle).map_or_else(|| told(ARGS_INVALID), |event| body(&event))
}

/// Longest wait of the host. The vendor's waits have no limit.
fn longest() -> Duration {
    6 * settings::get().ceiling
}

fn pending() -> i32 {
    settings::get().cnrt_pending
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtGetDeviceCount(count: Out<u32>) -> i32 {
    code(count.set(Runtime::Cnrt.count() as u32), ARGS_INVALID)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtSetDevice(device: i32) -> i32 {
    trace::call(|| format!("cnrtSetDevice device={device}"));
    if !Runtime::Cnrt.exists(device) {
        return told(ARGS_INVALID);
    }
    Runtime::Cnrt.choose(Some(device));
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtGetDevice(device: Out<i32>) -> i32 {
    Runtime::Cnrt.current().map_or_else(|| told(NO_CONTEXT), |current| code(device.set(current), ARGS_INVALID))
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtQueueCreate(out: Out<usize>) -> i32 {
    sim_cnrtQueueCreateWithPriority(out, 0, 0)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtQueueCreateWithPriority(out: Out<usize>, flags: u32, priority: i32) -> i32 {
    let Some(device) = Runtime::Cnrt.current() else { return told(NO_CONTEXT) };
    if flags != 0 || out.is_null() {
        return told(ARGS_INVALID);
    }
    match Stream::create(Runtime::Cnrt, device, flags, priority) {
        Some(queue) => code(out.set(STREAMS.add(queue)), ARGS_INVALID),
        None => told(NO_MEMORY),
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtDeviceGetQueuePriorityRange(least: Out<i32>, greatest: Out<i32>) -> i32 {
    code(least.set(7) && greatest.set(0), ARGS_INVALID)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtQueueDestroy(handle: usize) -> i32 {
    STREAMS.remove(handle).map_or_else(
        || told(QUEUE_ERROR),
        |queue| {
            queue.close();
            SUCCESS
        },
    )
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtQueueSync(handle: usize) -> i32 {
    on_queue(handle, |queue| code(queue.synchronize(longest()), DRIVER_CALL))
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtQueueQuery(handle: usize) -> i32 {
    on_queue(handle, |queue| code(queue.idle(), pending()))
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtNotifierCreate(out: Out<usize>) -> i32 {
    sim_cnrtNotifierCreateWithFlags(out, 0)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtNotifierCreateWithFlags(out: Out<usize>, flags: u32) -> i32 {
    let Some(device) = Runtime::Cnrt.current() else { return told(NO_CONTEXT) };
    let known = flags & !(DISABLE_TIMING | DISABLE_TIMING_ALL | INTERPROCESS) == 0;
    if !known || flags & INTERPROCESS != 0 && flags & DISABLE_TIMING_ALL == 0 {
        return told(ARGS_INVALID);
    }
    code(out.set(EVENTS.add(Event::new(device, flags, false))), ARGS_INVALID)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtNotifierDestroy(handle: usize) -> i32 {
    code(EVENTS.remove(handle).is_some(), ARGS_INVALID)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtPlaceNotifier(notifier: usize, handle: usize) -> i32 {
    trace::call(|| format!("cnrtPlaceNotifier notifier={notifier:#x} queue={handle:#x}"));
    on_queue(handle, |queue| {
        on_notifier(notifier, |event| {
            if event.device != queue.device {
                return told(ARGS_INVALID);
            }
            queue.record(event);
            SUCCESS
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtPlaceNotifierWithFlags(notifier: usize, handle: usize, flags: u32) -> i32 {
    if flags != 0 { told(ARGS_INVALID) } else { sim_cnrtPlaceNotifier(notifier, handle) }
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtQueueWaitNotifier(notifier: usize, handle: usize, flag: u32) -> i32 {
    trace::call(|| format!("cnrtQueueWaitNotifier notifier={notifier:#x} queue={handle:#x}"));
    if flag != 0 {
        return told(ARGS_INVALID);
    }
    on_queue(handle, |queue| on_notifier(notifier, |event| code(event.wait_on(queue), ARGS_INVALID)))
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtQueryNotifier(notifier: usize) -> i32 {
    on_notifier(notifier, |event| code(event.complete(), pending()))
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtWaitNotifier(notifier: usize) -> i32 {
    on_notifier(notifier, |event| code(event.synchronize(longest()), DRIVER_CALL))
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtNotifierElapsedTime(start: usize, end: usize, milliseconds: Out<f32>) -> i32 {
    on_notifier(start, |start| {
        on_notifier(end, |end| {
            if (start.flags | end.flags) & (DISABLE_TIMING | DISABLE_TIMING_ALL) != 0 {
                return told(ARGS_INVALID);
            }
            start.elapsed(end).map_or_else(|| told(NOT_READY), |time| code(milliseconds.set(time), ARGS_INVALID))
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtMemcpy(to: usize, from: usize, bytes: usize, direction: i32) -> i32 {
    if !(0..=5).contains(&direction) || bytes > 0 && (to == 0 || from == 0) {
        return told(ARGS_INVALID);
    }
    memory::copy(to, from, bytes);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtMemcpyAsync_V3(to: usize, from: usize, bytes: usize, handle: usize, direction: i32) -> i32 {
    if !(0..=5).contains(&direction) || bytes > 0 && (to == 0 || from == 0) {
        return told(ARGS_INVALID);
    }
    on_queue(handle, |queue| {
        queue.push(&Again::of(move || memory::copy(to, from, bytes)));
        SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtMemcpyAsync_V2(to: usize, from: usize, bytes: usize, handle: usize, direction: i32) -> i32 {
    sim_cnrtMemcpyAsync_V3(to, from, bytes, handle, direction)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtMemcpyAsync(to: usize, from: usize, bytes: usize, handle: usize, direction: i32) -> i32 {
    sim_cnrtMemcpyAsync_V3(to, from, bytes, handle, direction)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtMalloc(out: Out<usize>, bytes: usize) -> i32 {
    if Runtime::Cnrt.current().is_none() {
        return told(NO_CONTEXT);
    }
    memory::allocate(bytes).map_or_else(|| told(NO_MEMORY), |memory| code(out.set(memory), ARGS_INVALID))
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtFree(memory: usize) -> i32 {
    code(memory::free(memory), ARGS_INVALID)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtHostMalloc(out: Out<usize>, bytes: usize) -> i32 {
    sim_cnrtMalloc(out, bytes)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtFreeHost(memory: usize) -> i32 {
    sim_cnrtFree(memory)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtMemset(to: usize, value: i32, bytes: usize) -> i32 {
    memory::set(to, value as u8, bytes);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtMemsetAsync(to: usize, value: i32, bytes: usize, handle: usize) -> i32 {
    on_queue(handle, |queue| {
        queue.push(&Again::of(move || memory::set(to, value as u8, bytes)));
        SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtInvokeHostFunc(handle: usize, body: Option<extern "C" fn(*mut c_void)>, argument: usize) -> i32 {
    let Some(body) = body else { return told(ARGS_INVALID) };
    on_queue(handle, |queue| {
        queue.push(&Again::of(move || body(argument as *mut c_void)));
        SUCCESS
    })
}

/// Waits for all queues that have handles.
#[unsafe(no_mangle)]
extern "C" fn sim_cnrtSyncDevice() -> i32 {
    let Some(device) = Runtime::Cnrt.current() else { return told(NO_CONTEXT) };
    let queues = STREAMS.all();
    let own = queues.iter().filter(|queue| queue.runtime == Runtime::Cnrt && queue.device == device);
    code(own.fold(true, |all, queue| all & queue.synchronize(longest())), DRIVER_CALL)
}

fn name_of(error: i32) -> &'static str {
    match error {
        SUCCESS => "cnrtSuccess",
        NOT_READY => "cnrtErrorNotReady",
        ARGS_INVALID => "cnrtErrorArgsInvalid",
        QUEUE_ERROR => "cnrtErrorQueue",
        NO_MEMORY => "cnrtErrorNoMem",
        BUSY => "cnrtErrorBusy",
        DRIVER_CALL => "cnrtErrorCndrvFuncCall",
        NO_CONTEXT => "cnrtErrorNoCnrtContext",
        _ => "cnrtErrorUnknown",
    }
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtGetErrorName(error: i32) -> *const c_char {
    forever(name_of(error))
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtGetErrorStr(error: i32) -> *const c_char {
    forever(&format!("{} (simulated CNRT)", name_of(error)))
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtGetLastError() -> i32 {
    LAST.with(|last| last.replace(SUCCESS))
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtGetLibVersion(major: Out<i32>, minor: Out<i32>, patch: Out<i32>) -> i32 {
    code(major.set(6) && minor.set(14) && patch.set(1), ARGS_INVALID)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtDriverGetVersion(major: Out<i32>, minor: Out<i32>, patch: Out<i32>) -> i32 {
    code(major.set(6) && minor.set(2) && patch.set(0), ARGS_INVALID)
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtQueueBeginCapture(handle: usize, mode: u32) -> i32 {
    on_queue(handle, |queue| if mode > 2 { ARGS_INVALID } else { code(Capture::begin(queue, mode), ARGS_INVALID) })
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtQueueIsCapturing(handle: usize, status: Out<i32>) -> i32 {
    on_queue(handle, |queue| {
        // 0: no capture, 1: active, 2: invalidated.
        let found = queue.capture().map_or(0, |capture| if capture.valid() { 1 } else { 2 });
        code(status.set(found), ARGS_INVALID)
    })
}

#[unsafe(no_mangle)]
extern "C" fn sim_cnrtQueueEndCapture(handle: usize, topology: Out<usize>) -> i32 {
    on_queue(handle, |queue| match Capture::end(queue) {
        Ok(captured) => code(topology.set(GRAPHS.add(Arc::new(captured))), ARGS_INVALID),
        Err(_) => ARGS_INVALID,
    })
}
