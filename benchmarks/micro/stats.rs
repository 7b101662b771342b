//! Cost of the statistics in one small operation, in nanoseconds.
//!
//! `cargo bench --bench stats`. Prints the median and the 10th percentile of many blocks. Checks no time, because the
//! check would fail on a busy machine. The measured time covers `Stats::issued` and `Stats::ended` on operations that
//! were created just before, and three clock readings per 25 operations. With the statistics, an operation reads the
//! clock once less than before they existed (`Op::new`); this saving is not subtracted.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sagellm::group::Group;
use sagellm::op::Op;
use sagellm::os::clock;
use sagellm::stats::Stats;
use sagellm::types::{Dtype, Kind, Request, Span};

const BLOCK: usize = 1000;
const BLOCKS: usize = 400;
/// Operations that are created and then counted together: few enough to stay in the first-level cache, as in a program.
const FEW: usize = 25;

fn request(memory: &mut [f32]) -> Request {
    let span = Span { addr: memory.as_mut_ptr() as usize, bytes: std::mem::size_of_val(memory) };
    // SAFETY: no operation of this program reaches an engine, so no memory is read or written.
    let mut request = unsafe { Request::new(Kind::AllReduce, vec![span], vec![span]) };
    request.dtype = Dtype::F32;
    request
}

/// Nanoseconds per operation over blocks of `BLOCK` operations: the 10th percentile and the median.
fn measure(mut block: impl FnMut() -> Duration) -> (f64, f64) {
    for _ in 0..20 {
        block();
    }
    let mut each: Vec<f64> = (0..BLOCKS).map(|_| block().as_nanos() as f64 / BLOCK as f64).collect();
    each.sort_by(f64::total_cmp);
    (each[BLOCKS / 10], each[BLOCKS / 2])
}

fn show(what: &str, (p10, median): (f64, f64)) {
    println!("{what:<56} {p10:>8.1} {median:>8.1}");
}

fn main() {
    let mut memory = vec![1.0f32; 64];
    println!("{:<56} {:>8} {:>8}", "nanoseconds an operation", "p10", "median");

    let clock = measure(|| {
        let start = Instant::now();
        for _ in 0..BLOCK {
            black_box(Instant::now());
        }
        start.elapsed()
    });
    show("one reading of the clock, for comparison", clock);

    for (what, room, apart) in [
        ("issued + ended, counts made while waiting", 1024, true),
        ("issued + ended, counts made on the way", 1024, false),
        ("issued + ended, no ring, counts on the way", 0, false),
    ] {
        let mut stats = Stats::new(2, room);
        let mut number = 0;
        let both = measure(|| {
            let mut spent = Duration::ZERO;
            for _ in 0..BLOCK / FEW {
                let ops: Vec<_> = (0..FEW)
                    .map(|_| {
                        number += 1;
                        let op = Op::new(request(&mut memory), number, 0, Duration::from_secs(1), None);
                        op.record_load(8);
                        op.record_choice(1);
                        [(Arc::new(op), Ok(()))]
                    })
                    .collect();
                let (start, at) = (Instant::now(), clock::stamp());
                for ended in &ops {
                    stats.issued(&ended[0].0);
                    stats.ended(ended, at);
                }
                spent += start.elapsed();
                if apart {
                    stats.catch_up();
                }
            }
            spent
        });
        show(what, both);
        black_box(&stats);
    }

    let groups = Group::local(1, Duration::from_secs(1)).expect("a group of one");
    let whole = measure(|| {
        let start = Instant::now();
        for _ in 0..BLOCK {
            groups[0].run(request(&mut memory), None).expect("a local copy");
        }
        start.elapsed()
    });
    show("a whole all_reduce of 256 bytes in a group of one", whole);
    show("a whole all_reduce of 256 bytes between two threads", two_ranks());
}

/// Two ranks that are threads. Returns the times of rank 0.
fn two_ranks() -> (f64, f64) {
    let groups = Group::local(2, Duration::from_secs(10)).expect("two ranks in this process");
    let calls = (BLOCKS + 20) * BLOCK;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut memory = vec![1.0f32; 64];
            for _ in 0..calls {
                groups[1].run(request(&mut memory), None).expect("the other rank is here");
            }
        });
        let mut memory = vec![1.0f32; 64];
        measure(|| {
            let start = Instant::now();
            for _ in 0..BLOCK {
                groups[0].run(request(&mut memory), None).expect("the other rank is here");
            }
            start.elapsed()
        })
    })
}
