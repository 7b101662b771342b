//! Instructions that the core executes per call, compared with ceilings. Times on a shared machine drift by more than
//! the cost of a change. Instruction counts do not drift, so this test finds a call that became longer and never fails
//! because the machine is busy.
//!
//! A child process executes each scene, and this process steps the child's thread through the scene one instruction at
//! a time (ptrace). The peer has issued its part of each call before, so the counted thread waits for no rank. That
//! holds only for small operations: in larger ones the ranks wait for each other's rounds, and a busy machine lengthens
//! the waits. The counts include this program's instructions and the number of its calls into other objects (libc,
//! vdso). They do not include instructions of libc, because their number depends on the processor and on the version of
//! libc.

#![cfg(target_arch = "x86_64")] // reads the instruction pointer from the thread's registers
#![allow(unsafe_code)] // ptrace

use std::hint::black_box;
use std::io::{Read, Write};
use std::ops::{Range, RangeInclusive};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{on_memory, plain, this_program};
use sagellm::group::Group;
use sagellm::op::Op;
use sagellm::os::clock;
use sagellm::select::{GroupShape, OpDesc, Policy, intra};
use sagellm::stats::Stats;
use sagellm::types::{Dtype, Kind, Request};

/// Ceilings for instructions and for calls into other objects. Each ceiling is about 8 % above the least count of
/// several runs (rustc 1.95, 2026-11-25), so that the code of another compiler stays below it. A change that exceeds a
/// ceiling must be made shorter. If that is impossible, the change raises the ceiling, and its commit message says what
/// the instructions gain.
const CEILINGS: [(&str, Count); 5] = [
    ("all_reduce of 8 bytes", Count { instructions: 4350, calls: 24 }),
    ("barrier", Count { instructions: 3375, calls: 22 }),
    ("ten asynchronous all_reduces of 8 bytes, then ten waits", Count { instructions: 51400, calls: 275 }),
    ("the choice of an algorithm", Count { instructions: 100, calls: 4 }),
    ("statistics of an operation", Count { instructions: 340, calls: 5 }),
];

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Count {
    instructions: u64,
    calls: u64,
}

impl Count {
    fn is_within(self, ceiling: Count) -> bool {
        self.instructions <= ceiling.instructions && self.calls <= ceiling.calls
    }
}

/// Returns the least number of instructions, and of calls, of several turns.
fn least(turns: &[Count]) -> Count {
    let of = |number: fn(&Count) -> u64| turns.iter().map(number).min().unwrap_or(u64::MAX);
    Count { instructions: of(|turn| turn.instructions), calls: of(|turn| turn.calls) }
}

/// How often the child executes each scene. Only the least count is compared, because the first turn uses pages and code
/// for the first time, and a timer of the core adds instructions to some turns. On a busy machine the peer's threads may
/// not sleep yet when a part is counted, and the counted thread then does more. So a scene whose least count is above
/// its ceiling is repeated, up to the end of this range.
const TURNS: RangeInclusive<usize> = 3..=30;
/// Signal that the child raises before and after the counted part.
const MARK: i32 = libc::SIGUSR1;

fn mark() {
    // SAFETY: the tracer sees the signal before it is delivered and suppresses it.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::gettid(), MARK) };
}

fn counted<T>(body: impl FnOnce() -> T) -> T {
    mark();
    let result = body();
    mark();
    result
}

fn sum(memory: &mut [f32]) -> Request {
    // SAFETY: the bytes are the memory of the floats and are borrowed for the same time.
    let bytes = unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast::<u8>(), size_of_val(memory)) };
    let mut request = on_memory(Kind::AllReduce, 0, bytes);
    request.dtype = Dtype::F32;
    request
}

fn barrier() -> Request {
    plain(Kind::Barrier, 0, Vec::new(), Vec::new())
}

/// Waits until the peer has usually published its part and its threads sleep. If they do not sleep yet, a further turn
/// is counted.
fn settle() {
    std::thread::sleep(Duration::from_millis(3));
}

/// Counts the instructions of our call; the peer has issued its call before.
fn synchronous(groups: &[Arc<Group>], theirs: Request, ours: Request) {
    let peer = groups[1].issue(theirs, None).unwrap();
    settle();
    counted(|| groups[0].run(ours, None)).unwrap();
    peer.wait(None).unwrap();
}

/// Executes the scene of `CEILINGS` with this name once.
fn scene(name: &str, groups: &[Arc<Group>]) {
    let (mut mine, mut theirs) = (vec![1.0f32; 16384], vec![2.0f32; 16384]);
    match name {
        "all_reduce of 8 bytes" => synchronous(groups, sum(&mut theirs[..2]), sum(&mut mine[..2])),
        "barrier" => synchronous(groups, barrier(), barrier()),
        "ten asynchronous all_reduces of 8 bytes, then ten waits" => {
            let peers: Vec<_> = theirs.chunks_mut(2).take(10).map(|each| groups[1].issue(sum(each), None)).collect();
            settle();
            counted(|| {
                let ops: Vec<_> = mine.chunks_mut(2).take(10).map(|each| groups[0].issue(sum(each), None)).collect();
                ops.into_iter().for_each(|op| op.unwrap().wait(None).unwrap());
            });
            peers.into_iter().for_each(|op| op.unwrap().wait(None).unwrap());
        }
        "the choice of an algorithm" => {
            let (shape, policy) = (GroupShape::without_memory(4), Policy::default());
            let desc = OpDesc::of(&sum(&mut mine), 4);
            counted(|| black_box(intra::choose(black_box(desc), &shape, &policy)));
        }
        "statistics of an operation" => {
            let mut stats = Stats::new(2, 1024);
            let op = Op::new(sum(&mut mine), 1, 0, Duration::from_secs(1), None);
            let ended = [(Arc::new(op), Ok(()))];
            counted(|| {
                stats.issued(&ended[0].0);
                stats.ended(&ended, clock::stamp());
            });
        }
        other => panic!("no scene is called {other}"),
    }
}

/// The child: executes all scenes while its parent traces it.
#[test]
#[ignore = "the child of a_call_executes_no_more_instructions_than_its_ceiling"]
fn the_counted_process() {
    let groups = Group::local(2, Duration::from_secs(60)).unwrap();
    // SAFETY: passes no pointers. From now on this thread is traced by its parent, the test below.
    assert_eq!(unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) }, 0);
    for (name, _) in CEILINGS {
        let mut goes_on = [1];
        while goes_on == [1] {
            scene(name, &groups);
            std::io::stdin().read_exact(&mut goes_on).unwrap();
        }
    }
}

/// Waits until a thread of the child stops or the child ends. Returns the thread and the signal that stopped it.
fn next_stop() -> Option<(i32, i32)> {
    let mut status = 0;
    // SAFETY: writes only `status`. `__WALL` includes threads; `__WNOTHREAD` limits the wait to children of this
    // thread.
    let thread = unsafe { libc::waitpid(-1, &mut status, libc::__WALL | libc::__WNOTHREAD) };
    libc::WIFSTOPPED(status).then(|| (thread, libc::WSTOPSIG(status))).filter(|_| thread > 0)
}

fn go_on(request: libc::c_uint, thread: i32, signal: i32) {
    // SAFETY: continues a thread that `next_stop` found stopped; no memory of this process is read or written.
    let done = unsafe { libc::ptrace(request, thread, 0, signal as libc::c_long) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

/// Returns the address of the next instruction of a stopped thread.
fn instruction_pointer(thread: i32) -> u64 {
    let at = std::mem::offset_of!(libc::user_regs_struct, rip);
    // SAFETY: reads a register of a thread that `next_stop` found stopped.
    unsafe { libc::ptrace(libc::PTRACE_PEEKUSER, thread, at, 0) as u64 }
}

/// Returns the address range of this program's code in the child.
fn code_of(child: u32) -> Range<u64> {
    let program = std::env::current_exe().unwrap();
    let maps = std::fs::read_to_string(format!("/proc/{child}/maps")).unwrap();
    let line = maps.lines().find(|line| line.contains(" r-xp ") && line.ends_with(program.to_str().unwrap())).unwrap();
    let mut ends = line.split([' ', '-']).map(|end| u64::from_str_radix(end, 16));
    ends.next().unwrap().unwrap()..ends.next().unwrap().unwrap()
}

/// Steps the child through its scenes. Calls `counted` with the count of each turn, in order.
fn step_through(child: u32, mut counted: impl FnMut(Count)) {
    let (mut count, mut code) = (None::<Count>, 0..0);
    let mut was_inside = true;
    while let Some((thread, signal)) = next_stop() {
        match (signal, &mut count) {
            (MARK, Some(_)) => count.take().into_iter().for_each(&mut counted),
            (MARK, None) => {
                count = Some(Count::default());
                code = if code.is_empty() { code_of(child) } else { code };
            }
            (libc::SIGTRAP, Some(count)) => {
                let is_inside = code.contains(&instruction_pointer(thread));
                count.instructions += u64::from(is_inside);
                count.calls += u64::from(was_inside && !is_inside);
                was_inside = is_inside;
            }
            _ => {
                go_on(libc::PTRACE_CONT, thread, signal);
                continue;
            }
        }
        go_on(if count.is_some() { libc::PTRACE_SINGLESTEP } else { libc::PTRACE_CONT }, thread, 0);
    }
}

#[test]
fn a_call_executes_no_more_instructions_than_its_ceiling() {
    let mut command = this_program(module_path!(), "the_counted_process");
    // `portable` selects the kernels that every processor has, so that the counts are the same on all processors.
    let command = command.env("SAGELLM_KERNELS", "portable").stdin(Stdio::piped()).stdout(Stdio::null());
    let mut child = command.spawn().unwrap();
    let mut answers = child.stdin.take().unwrap();
    let (mut counts, mut turns) = (Vec::new(), Vec::new());
    step_through(child.id(), |count| {
        turns.push(count);
        let ceiling = CEILINGS[counts.len()].1;
        let goes_on = turns.len() < *TURNS.start() || !least(&turns).is_within(ceiling) && turns.len() < *TURNS.end();
        answers.write_all(&[u8::from(goes_on)]).unwrap();
        if !goes_on {
            counts.push(std::mem::take(&mut turns));
        }
    });
    let _ = child.wait(); // an error if `next_stop` has already reaped the child
    assert_eq!(counts.len(), CEILINGS.len(), "the child ended early");
    let mut above = Vec::new();
    for ((name, ceiling), turns) in CEILINGS.iter().zip(counts) {
        let Count { instructions, calls } = least(&turns);
        println!("{name}: {instructions} instructions, {calls} calls; ceiling {ceiling:?}, turns {turns:?}");
        if !least(&turns).is_within(*ceiling) {
            above.push(format!("{name}: {instructions} instructions, {calls} calls into libc; {ceiling:?}"));
        }
    }
    assert!(above.is_empty(), "{above:#?}");
}
