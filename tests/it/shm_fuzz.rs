//! Plays a peer that breaks the protocol: bytes of the segment are flipped while operations run. Wrong numbers and
//! errors are allowed. A crash, a panic, a hang past the deadline, or a write outside the caller's memory is not.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use crate::common::{Random, Spec, on_ranks};
use sagellm::engine::local;
use sagellm::group::Group;
use sagellm::types::{ANY_RANK, Dtype, Kind, ReduceOp, Request, Span};

const GUARD: usize = 256;
/// Memory with bytes before and after it that must never change.
struct Guarded(Vec<u8>);

impl Guarded {
    fn new(bytes: usize) -> Guarded {
        let mut memory = vec![0x5a; bytes + 2 * GUARD];
        memory[GUARD..GUARD + bytes].fill(1);
        Guarded(memory)
    }
    fn span(&mut self) -> Vec<Span> {
        let bytes = self.0.len() - 2 * GUARD;
        if bytes == 0 { Vec::new() } else { vec![Span { addr: self.0.as_mut_ptr() as usize + GUARD, bytes }] }
    }
    fn check(&self) {
        let end = self.0.len() - GUARD;
        assert!(
            self.0[..GUARD].iter().chain(&self.0[end..]).all(|b| *b == 0x5a),
            "a write outside the caller's memory"
        );
    }
}

fn request(random: &mut Random, me: usize, ranks: usize) -> (Request, Guarded, Guarded) {
    let kind = random.pick(&Kind::ALL);
    let spec = Spec {
        kind,
        dtype: Dtype::F32,
        op: ReduceOp::Sum,
        root: random.below(ranks),
        count: random.pick(&[0, 1, 9, 600, 1500, 40_000]),
        skew: random.below(2) * 7,
        in_place: false,
        pieces: 1,
        seed: 1,
    };
    let peer = if me == 0 { 1 } else { 0 };
    let bytes = spec.count * 4;
    let mut buffers = spec.buffers(me, ranks);
    let like = spec.request(&mut buffers);
    let (mut input, mut output) = match kind {
        Kind::Send => (Guarded::new(bytes), Guarded::new(0)),
        Kind::Recv => (Guarded::new(0), Guarded::new(bytes)),
        _ => (Guarded::new(buffers.input.len()), Guarded::new(buffers.output.len())),
    };
    let mut request = crate::common::plain(like.kind, like.root, input.span(), output.span());
    (request.dtype, request.op) = (like.dtype, like.op);
    (request.in_blocks, request.out_blocks) = (like.in_blocks, like.out_blocks);
    if kind.is_p2p() {
        request.root = if kind == Kind::Recv && random.below(2) == 0 { ANY_RANK } else { peer };
        request.tag = random.below(2) as u32;
    }
    request.timeout_ms = Some(40);
    (request, input, output)
}

fn flip(areas_base: usize, total: usize, random: &mut Random, control_only: Option<usize>) {
    let at = random.below(control_only.unwrap_or(total).min(total));
    // SAFETY: `at` is inside the segment, which outlives the flipping thread. The access is atomic, like that of a
    // peer.
    let byte = unsafe { AtomicU8::from_ptr((areas_base + at) as *mut u8) };
    byte.store(random.next() as u8, Ordering::Relaxed);
}

#[test]
fn flipped_bytes_give_wrong_numbers_or_errors_and_nothing_worse() {
    let rounds: u64 = std::env::var("SAGELLM_TEST_FUZZ").ok().and_then(|n| n.parse().ok()).unwrap_or(40);
    for round in 0..rounds {
        crate::common::progress("rounds of fuzz", round + 1, rounds);
        let ranks = 2 + round as usize % 2;
        let areas = local::areas(ranks).unwrap();
        let total = areas[0].layout.total();
        let base = areas[0].segment().ptr(0, total) as usize;
        // Half of the rounds flip bytes in front of rank 0's fourth slot, among them all control words; the other half
        // flip any byte.
        let aim = (round % 2 == 0).then_some(areas[0].layout.slot(0, 0) + 3 * 4160);
        let groups = Group::over(areas, Duration::from_millis(200));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut random = Random::new(round * 31 + 7);
                while !stop.load(Ordering::Relaxed) {
                    flip(base, total, &mut random, aim);
                    if random.below(50) == 0 {
                        std::thread::sleep(Duration::from_micros(20));
                    }
                }
            });
            on_ranks(ranks, |me| {
                // All ranks make the same choices, so all of them send or all receive, and a message may have no match.
                let mut random = Random::new(round + 1000);
                for _ in 0..60 {
                    let (request, input, output) = request(&mut random, me, ranks);
                    let begin = Instant::now();
                    let outcome = groups[me].run(request, None);
                    assert!(begin.elapsed() < Duration::from_secs(5), "hung");
                    input.check();
                    output.check();
                    if outcome.is_err() {
                        break; // the group is unusable now, as it should be
                    }
                }
            });
            stop.store(true, Ordering::Relaxed);
        });
    }
}
