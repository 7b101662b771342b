//! Large collectives over several hosts, played by threads, with real connections over the loopback interface: their
//! results, and links that are cut in the middle of one.

use std::sync::Arc;
use std::time::Duration;

use crate::common::host::Memory;
use crate::common::{Random, Spec, on_ranks};
use crate::multihost_wire::{as_ranks, carriers, wires_over};
use sagellm::config::Settings;
use sagellm::engine::multihost::link::Link;
use sagellm::engine::multihost::wire::Over;
use sagellm::group::Group;
use sagellm::select::Policy;
use sagellm::select::rules::Rules;
use sagellm::types::{Dtype, Kind, ReduceOp};

const LONG: Duration = Duration::from_secs(60);
const PLACES: [&[usize]; 4] = [&[0, 1], &[0, 1, 2], &[0, 0, 1, 1], &[0, 1, 2, 3]];

/// Returns the links of the ranks of a group. Each rank has its own connections.
fn links(over: &Over, ranks: usize) -> Vec<Arc<dyn Link>> {
    as_ranks(&wires_over(over, ranks), &Memory::default(), 1, |_, link| Arc::new(link) as Arc<dyn Link>)
}

/// Makes the groups of all ranks, which use this algorithm for all sizes.
fn groups(place: &[usize], algorithm: &str, links: Vec<Arc<dyn Link>>) -> Vec<Arc<Group>> {
    let policy = Policy { rules: Rules::parse(&format!("*:0-={algorithm}")).unwrap(), ..Policy::default() };
    Group::local_hosts_with(place, LONG, Settings::default(), links, &policy).unwrap()
}

/// Returns an operation on integers, whose sum does not depend on the order.
fn large(kind: Kind, count: usize, seed: u64, ranks: usize) -> Spec {
    let root = seed as usize % ranks;
    Spec {
        kind,
        dtype: Dtype::I32,
        op: ReduceOp::Sum,
        root,
        count,
        skew: 5,
        in_place: seed.is_multiple_of(2),
        pieces: 1,
        seed,
    }
}

#[test]
fn operations_of_several_segments_over_real_connections_have_the_results_of_the_reference() {
    for over in carriers() {
        println!("{over:?}");
        for place in PLACES {
            let ranks = place.len();
            let groups = groups(place, "direct_two_step", links(&over, ranks));
            on_ranks(ranks, |me| {
                let kinds = Kind::COLLECTIVES.into_iter().cycle().take(2 * Kind::COLLECTIVES.len());
                for (seed, kind) in kinds.enumerate() {
                    // 2,200,003 numbers are 8.8 MB: several segments of the kinds that are cut into segments, and in
                    // the others bodies that wait for their request.
                    let whole = [Kind::AllReduce, Kind::Broadcast, Kind::Reduce].contains(&kind);
                    let spec = large(kind, if whole { 2_200_003 } else { 600_001 }, seed as u64, ranks);
                    let mut buffers = spec.buffers(me, ranks);
                    let request = spec.request(&mut buffers);
                    groups[me].run(request, None).unwrap_or_else(|error| panic!("rank {me}: {spec:?}: {error}"));
                    spec.check(&buffers, me, ranks);
                }
            });
            on_ranks(ranks, |me| groups[me].shutdown());
        }
    }
}

/// At a random time during a large operation, the link of one rank is cut. Each rank gets the right result or an error,
/// long before the deadline, and nothing writes the memory of an operation that has ended with an error.
#[test]
fn a_link_that_is_cut_in_the_middle_of_an_operation_is_an_error_and_leaves_its_memory_alone() {
    let rounds: u64 = std::env::var("SAGELLM_TEST_CUT_LINKS").ok().and_then(|n| n.parse().ok()).unwrap_or(40);
    let (mut ended, mut failed) = (0, 0);
    for seed in 1..=rounds {
        let mut random = Random::new(seed);
        let place = PLACES[random.below(PLACES.len())];
        let ranks = place.len();
        let kind = random.pick(&[Kind::AllReduce, Kind::AllReduce, Kind::Broadcast, Kind::AllGather, Kind::AllToAll]);
        let count = if matches!(kind, Kind::AllReduce | Kind::Broadcast) { 2_200_003 } else { 600_001 };
        let spec = large(kind, count, seed, ranks);
        let (victim, delay) = (random.below(ranks), Duration::from_micros(random.below(20_000) as u64));
        let algorithm = random.pick(&["ring", "direct_two_step", "halving_doubling", "binomial_tree"]);
        let links = links(&Over::Tcp, ranks);
        let groups = groups(place, algorithm, links.clone());
        let results = on_ranks(ranks, |me| {
            let mut buffers = spec.buffers(me, ranks);
            let request = spec.request(&mut buffers);
            let op = groups[me].issue(request, None).unwrap();
            if me == victim {
                std::thread::sleep(delay);
                links[me].cut();
            }
            let outcome = op.wait(None);
            let before = buffers.result().to_vec();
            std::thread::sleep(Duration::from_millis(30));
            assert!(buffers.result() == before, "seed {seed}: rank {me}: memory changed after the end: {outcome:?}");
            if outcome.is_ok() {
                spec.check(&buffers, me, ranks);
            }
            outcome
        });
        for (me, outcome) in results.iter().enumerate() {
            match outcome {
                Ok(()) => ended += 1,
                Err(error) => {
                    failed += 1;
                    let text = error.to_string();
                    assert!(!text.contains("Timed out"), "seed {seed}: rank {me}: {spec:?}: {text}");
                    assert!(text.contains("rank"), "seed {seed}: rank {me}: {text}");
                }
            }
        }
        on_ranks(ranks, |me| groups[me].shutdown());
    }
    println!("{ended} operations ended and {failed} failed");
    assert!(ended > 0 && failed > 0, "{ended} operations ended and {failed} failed: the times of the cuts are no test");
}
