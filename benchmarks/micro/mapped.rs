//! How close the engine comes to the limit of an all_reduce on tensors that both ranks can map: float32, two ranks that
//! are threads of this process, no torch.
//!
//! `cargo bench --bench mapped`. Each line is one size. Four ways take turns within one run:
//! - *limit*: a plain loop. Each rank adds its half of both tensors and writes it to both tensors. The ranks
//!   synchronise by two flags.
//! - *mapped*: the engine with tensors in the arena.
//! - *staged*: the engine with ordinary tensors.
//! - *copy*: each rank copies the other rank's whole tensor, which is the least that an all_gather does.
//!
//! Before each call each rank writes its whole tensor, outside of the measured time, as a program does. Otherwise the
//! data would be in the cache of the rank that reads them, and every figure would be too low. Prints p10 and median.
//! The sums are checked, the times are not.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sagellm::engine::shm::memory::arena;
use sagellm::group::Group;
use sagellm::types::{Dtype, Kind, Request, Span};

const RANKS: usize = 2;
const SIZES: [usize; 7] = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20];
const WAYS: [&str; 4] = ["limit", "mapped", "staged", "copy"];

/// The memory of one rank: address of its tensor in the arena, its ordinary tensor, and the destination of *copy*.
struct Tensors {
    reachable: usize,
    ordinary: Vec<f32>,
    target: Vec<f32>,
}

/// A counter that one rank raises and the other rank waits for; no other data is on its cache lines.
#[repr(align(128))]
#[derive(Default)]
struct Flag(AtomicU64);

impl Flag {
    fn raise(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }
    /// Spins, because each rank should have a core; yields from time to time in case it has none.
    fn wait(&self, count: u64) {
        let mut turns = 0u32;
        while self.0.load(Ordering::Acquire) < count {
            spin_loop();
            turns += 1;
            if turns.is_multiple_of(20_000) {
                std::thread::yield_now();
            }
        }
    }
}

/// Waits until the other rank has called it as often as this rank.
fn meet(flags: &[Flag; RANKS], me: usize, count: &mut u64) {
    *count += 1;
    flags[me].raise();
    flags[1 - me].wait(*count);
}

/// # Safety
/// Both tensors have `elements` elements, and the other rank works on the other half only.
unsafe fn add_half(tensors: [*mut f32; RANKS], me: usize, elements: usize) {
    let half = elements / 2;
    for at in me * half..me * half + half {
        // SAFETY: the caller guarantees both, see above.
        unsafe {
            let sum = *tensors[0].add(at) + *tensors[1].add(at);
            *tensors[0].add(at) = sum;
            *tensors[1].add(at) = sum;
        }
    }
}

fn all_reduce(address: usize, bytes: usize) -> Request {
    let span = Span { addr: address, bytes };
    // SAFETY: the memory lives until the program ends.
    let mut request = unsafe { Request::new(Kind::AllReduce, vec![span], vec![span]) };
    request.dtype = Dtype::F32;
    request
}

/// Nanoseconds of each call of each way, measured on this rank.
fn rank(me: usize, bytes: usize, group: &Group, flags: &[Flag; RANKS], all: &[Tensors]) -> [Vec<u64>; WAYS.len()] {
    let elements = bytes / 4;
    let turns = (256usize << 20).div_euclid(bytes).clamp(30, 1000);
    let reachable = [0, 1].map(|rank| all[rank].reachable as *mut f32);
    let (ordinary, target) = (all[me].ordinary.as_ptr() as usize, all[me].target.as_ptr() as *mut f32);
    let mut times: [Vec<u64>; WAYS.len()] = Default::default();
    let mut count = flags[me].0.load(Ordering::Relaxed);
    for turn in 0..turns + 3 {
        for (way, times) in times.iter_mut().enumerate() {
            let address = if way == 2 { ordinary } else { reachable[me] as usize };
            // SAFETY: this rank's own tensor, which no other rank uses now.
            let own = unsafe { std::slice::from_raw_parts_mut(address as *mut f32, elements) };
            own.fill((me + 1) as f32);
            meet(flags, me, &mut count);
            let begin = Instant::now();
            match way {
                0 => {
                    meet(flags, me, &mut count);
                    // SAFETY: both ranks have written their tensors.
                    unsafe { add_half(reachable, me, elements) };
                    meet(flags, me, &mut count);
                }
                1 | 2 => group.run(all_reduce(address, bytes), None).expect("the operation ends"),
                // SAFETY: the other rank only reads its tensor now.
                _ => unsafe { target.copy_from_nonoverlapping(reachable[1 - me], elements) },
            }
            let time = begin.elapsed();
            meet(flags, me, &mut count);
            assert!(way == 3 || own[0] == 3.0 && own[elements - 1] == 3.0, "a wrong sum: {}", WAYS[way]);
            if turn >= 3 {
                times.push(time.as_nanos() as u64);
            }
            meet(flags, me, &mut count);
        }
    }
    times
}

fn main() {
    let groups: Vec<Arc<Group>> = Group::local(RANKS, Duration::from_secs(60)).expect("groups of threads");
    println!("{:>10} {:>20} {:>20} {:>20} {:>20} {:>14}", "bytes", WAYS[0], WAYS[1], WAYS[2], WAYS[3], "limit/mapped");
    println!("{:>10} p10 (median) in us, the slower rank of each call", "");
    for bytes in SIZES {
        let tensors = |_| {
            let reachable = arena::allocate(bytes).expect("the arena has room").as_ptr() as usize;
            Tensors { reachable, ordinary: vec![0.0; bytes / 4], target: vec![0.0; bytes / 4] }
        };
        let all = [0, 1].map(tensors);
        let flags: [Flag; RANKS] = Default::default();
        let (groups, flags, all) = (&groups, &flags, &all);
        let [one, two] = std::thread::scope(|scope| {
            let ranks = [0, 1].map(|me| scope.spawn(move || rank(me, bytes, &groups[me], flags, all)));
            ranks.map(|rank| rank.join().expect("a rank panicked"))
        });
        let mut line = format!("{bytes:>10}");
        let mut lows = [0.0; WAYS.len()];
        for way in 0..WAYS.len() {
            let mut slower: Vec<u64> = one[way].iter().zip(&two[way]).map(|(one, two)| *one.max(two)).collect();
            slower.sort_unstable();
            let at = |share: usize| slower[slower.len() * share / 100] as f64 / 1e3;
            lows[way] = at(10);
            line += &format!(" {:>20}", format!("{:.1} ({:.1})", at(10), at(50)));
        }
        println!("{line} {:>13.0}%", 100.0 * lows[0] / lows[1]);
        for tensors in all {
            let at = std::ptr::NonNull::new(tensors.reachable as *mut u8).expect("not null");
            // SAFETY: `allocate` returned this address, and no operation uses it.
            unsafe { arena::free(at) };
        }
    }
}
