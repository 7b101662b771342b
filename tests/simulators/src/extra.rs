//! A function that no vendor has. Every simulated runtime exports it, for tests of devices.

use std::time::Duration;

use crate::stream::STREAMS;

/// From now on, event records on this stream wait in the host queue, which all streams share, and are issued after this
/// delay. With a delay of 0 they are issued immediately. Returns 0, or 1 if there is no such stream.
#[unsafe(no_mangle)]
extern "C" fn sim_sagellm_sim_host_queue(stream: usize, microseconds: u64) -> i32 {
    match STREAMS.get(stream) {
        Some(stream) => {
            stream.set_host_queue(Duration::from_micros(microseconds));
            0
        }
        None => 1,
    }
}
