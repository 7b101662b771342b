//! If several threads of a rank copy and combine the ranges of one operation, its results have the same bits as with
//! one thread. Tested for every kind, with ordinary and with reachable tensors. Ranks are threads, and each rank's
//! `Crowd` starts more threads for it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use crate::common::host::{Memory, config};
use crate::common::{Spec, on_ranks};
use sagellm::config::{Config, Threads};
use sagellm::group::Group;
use sagellm::host::Host;
use sagellm::os::topology;
use sagellm::types::{Dtype, Kind, ReduceOp};

/// Starts a thread for each part. Some parts begin late, so that the others are done long before.
#[derive(Default)]
struct Crowd {
    regions: AtomicUsize,
    /// The largest number of parts of a region.
    widest: AtomicUsize,
}

impl Host for Crowd {
    fn interrupted(&self) -> bool {
        false
    }
    fn threads(&self) -> usize {
        8
    }
    fn parallel(&self, parts: usize, part: &(dyn Fn(usize) + Sync)) {
        let turn = self.regions.fetch_add(1, Ordering::Relaxed);
        self.widest.fetch_max(parts, Ordering::Relaxed);
        std::thread::scope(|scope| {
            for number in 0..parts {
                scope.spawn(move || {
                    if (turn + number).is_multiple_of(7) {
                        std::thread::sleep(Duration::from_micros(50));
                    }
                    part(number);
                });
            }
        });
    }
}

fn connect(ranks: usize, threads: Threads) -> Vec<(Arc<Group>, Arc<Crowd>)> {
    let store = Memory::default();
    std::thread::scope(|scope| {
        let store = &store;
        let connecting: Vec<_> = (0..ranks)
            .map(|rank| {
                scope.spawn(move || {
                    let config = Config { threads, ..config(rank, ranks, Duration::from_secs(60)) };
                    let host = Arc::new(Crowd::default());
                    (Group::connect(config, store, Arc::<Crowd>::clone(&host)).unwrap(), host)
                })
            })
            .collect();
        connecting.into_iter().map(|one| one.join().unwrap()).collect()
    })
}

#[test]
fn rule_17_the_number_of_threads_changes_no_bit() {
    let most = topology::count_mask(&topology::affinity_mask()).min(4);
    for ranks in [2, 3] {
        let all = connect(ranks, Threads { most: 4, named: true });
        on_ranks(ranks, |me| {
            let (group, host) = &all[me];
            let mut seed = 0u64;
            for count in [9000, 40_000, 131_073, 300_001, 700_000] {
                for kind in Kind::COLLECTIVES {
                    for (dtype, op) in [(Dtype::F32, ReduceOp::Sum), (Dtype::Bf16, ReduceOp::Sum)] {
                        seed += 1;
                        let spec = Spec {
                            kind,
                            dtype,
                            op,
                            root: seed as usize % ranks,
                            count,
                            skew: [0, 37][seed as usize % 2],
                            in_place: seed.is_multiple_of(3),
                            pieces: 1 + seed as usize % 3,
                            seed,
                        };
                        let buffers = spec.buffers(me, ranks);
                        let mut buffers = if seed.is_multiple_of(2) { buffers.in_arena() } else { buffers };
                        let request = spec.request(&mut buffers);
                        let outcome = match seed.is_multiple_of(5) {
                            true => group.issue(request, None).and_then(|op| op.wait(None).map(drop)),
                            false => group.run(request, None),
                        };
                        outcome.unwrap_or_else(|error| panic!("rank {me}: {spec:?}: {error}"));
                        spec.check(&buffers, me, ranks);
                    }
                }
            }
            // If the ranges are long enough, several threads have parts, unless there is only one core.
            assert_eq!(host.regions.load(Ordering::Relaxed) > 0, most > 1);
            let widest = host.widest.load(Ordering::Relaxed);
            assert!(most == 1 || (2..=most).contains(&widest), "{widest} parts for {most} threads");
            assert_eq!(group.describe().contains("threads copy and combine"), most > 1, "{}", group.describe());
        });
    }
}

/// The progress thread splits its work too, if the rank has cores that torch's threads leave free.
#[test]
fn rule_17_operations_that_no_thread_waits_for_use_free_cores_and_have_the_same_bits() {
    for (own_cores, free) in [(8, 0), (9, 0), (10, 2), (20, 4)] {
        let hosts: Vec<Arc<Crowd>> = (0..2).map(|_| Arc::default()).collect();
        let theirs = hosts.iter().map(|host| Arc::<Crowd>::clone(host) as Arc<dyn Host>).collect();
        let groups = Group::local_with_threads(theirs, Duration::from_secs(60), 4, own_cores).unwrap();
        let (meeting, began) = (Barrier::new(2), Instant::now());
        on_ranks(2, |me| {
            let reached = || {
                meeting.wait();
                let reached = hosts.iter().all(|host| host.widest.load(Ordering::Relaxed) == free);
                meeting.wait();
                reached
            };
            // After a region that was late, the progress thread works alone for up to a second.
            for seed in 0u64.. {
                if reached() && seed >= 12 || began.elapsed() > Duration::from_secs(60) {
                    break;
                }
                let spec = Spec {
                    kind: [Kind::AllReduce, Kind::AllGather, Kind::Broadcast][seed as usize % 3],
                    dtype: [Dtype::F32, Dtype::Bf16][seed as usize % 2],
                    op: ReduceOp::Sum,
                    root: 0,
                    count: 700_000,
                    skew: 0,
                    in_place: seed.is_multiple_of(4),
                    pieces: 1,
                    seed,
                };
                let buffers = spec.buffers(me, 2);
                let mut buffers = if seed % 4 < 2 { buffers.in_arena() } else { buffers };
                let op = groups[me].issue(spec.request(&mut buffers), None).unwrap();
                while !op.is_done() {
                    std::thread::sleep(Duration::from_micros(200));
                }
                op.wait(None).unwrap();
                spec.check(&buffers, me, 2);
            }
            assert_eq!(hosts[me].widest.load(Ordering::Relaxed), free, "{own_cores} cores");
            let text = groups[me].describe();
            assert_eq!(text.contains(&format!("({free} beside the program)")), free > 0, "{text}");
        });
    }
}

#[test]
fn one_thread_needs_no_host() {
    for threads in [Threads { most: 1, named: true }, Threads::default()] {
        let all = connect(2, threads);
        on_ranks(2, |me| {
            let (group, host) = &all[me];
            let spec = Spec {
                kind: Kind::AllReduce,
                dtype: Dtype::F32,
                op: ReduceOp::Sum,
                root: 0,
                count: 500_000,
                skew: 0,
                in_place: true,
                pieces: 1,
                seed: 5,
            };
            let mut buffers = spec.buffers(me, 2);
            let request = spec.request(&mut buffers);
            group.run(request, None).unwrap();
            spec.check(&buffers, me, 2);
            assert_eq!(host.regions.load(Ordering::Relaxed), 0);
            assert!(!group.describe().contains("threads copy"), "{}", group.describe());
        });
    }
}
