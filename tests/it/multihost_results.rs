//! If results are compared (`verify`), bits that flip in one rank's results are also found in groups over several
//! hosts.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{Random, Spec, on_ranks, plain};
use sagellm::config::{Settings, Verify};
use sagellm::engine::local;
use sagellm::engine::verify::flips;
use sagellm::error::{Error, ErrorKind};
use sagellm::group::Group;
use sagellm::select::Policy;
use sagellm::types::{Dtype, Kind, ReduceOp};

const PLACES: [&[usize]; 6] = [&[0, 1], &[0, 0, 1], &[0, 0, 1, 1], &[0, 1, 0, 1], &[0, 0, 0, 1], &[0, 1, 2]];

fn groups(place: &[usize], verify: &str) -> Vec<Arc<Group>> {
    let policy = Policy { verify: Verify::parse(verify).unwrap(), ..Policy::default() };
    let links = local::links(place.len());
    Group::local_hosts_with(place, Duration::from_secs(60), Settings::default(), links, &policy).unwrap()
}

/// Runs `turns` equal operations, in which a bit of the victim's result flips, and barriers that carry the hashes.
/// Returns each rank's error.
fn errors(groups: &[Arc<Group>], spec: &Spec, victim: usize, bit: u64, turns: usize) -> Vec<Error> {
    let ranks = groups.len();
    let found = on_ranks(ranks, |me| {
        let group = &groups[me];
        let mut buffers = spec.buffers(me, ranks);
        let sends = spec.kind == Kind::Broadcast && me == spec.root;
        let bytes: &[u8] = if sends { &buffers.input } else { buffers.result() };
        let address = bytes.as_ptr() as usize + (bit as usize / 8) % bytes.len();
        if me == victim {
            flips::start(address, 1 << (bit % 8));
        }
        let mut error = None;
        for _ in 0..turns {
            let request = spec.request(&mut buffers);
            error = error.or_else(|| group.run(request, None).err());
        }
        if me == victim {
            flips::stop(address);
        }
        for _ in 0..12 {
            let barrier = || group.run(plain(Kind::Barrier, 0, Vec::new(), Vec::new()), None);
            error = error.or_else(|| barrier().err());
        }
        error.unwrap_or_else(|| panic!("rank {me} of {ranks}: not found: {spec:?}, bit {bit} of rank {victim}"))
    });
    on_ranks(ranks, |me| groups[me].shutdown());
    found
}

#[test]
fn flipped_bits_between_hosts_are_found_and_no_other_rank_is_blamed() {
    let flips: u64 = std::env::var("SAGELLM_TEST_FLIPS").ok().and_then(|n| n.parse().ok()).unwrap_or(48);
    let (mut several, mut attributed) = (0, 0);
    for trial in 0..flips {
        crate::common::progress("flipped bits between hosts", trial, flips);
        let mut random = Random::new(trial + 99);
        let place = PLACES[trial as usize % PLACES.len()];
        let ranks = place.len();
        let victim = random.below(ranks);
        let sampled = trial % 4 == 3;
        let spec = Spec {
            kind: random.pick(&[Kind::AllReduce, Kind::Broadcast, Kind::AllGather]),
            dtype: random.pick(&[Dtype::F32, Dtype::F64]),
            op: ReduceOp::Sum,
            root: random.below(ranks),
            count: random.pick(&[1, 40, 1000, 20_000, 1_100_000][..if sampled { 4 } else { 5 }]),
            skew: 0,
            in_place: false,
            pieces: 1 + random.below(3),
            seed: random.next(),
        };
        let groups = groups(place, if sampled { "sampled" } else { "all" });
        for error in errors(&groups, &spec, victim, random.next() >> 8, if sampled { 40 } else { 1 }) {
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{place:?} {spec:?}: {error}");
            assert!(error.rank().is_none_or(|rank| rank == victim && ranks > 2), "{place:?}, rank {victim}: {error}");
            if ranks > 2 && error.rank().is_none() {
                println!("{place:?}, rank {victim}, {:?} root {}: {error}", spec.kind, spec.root);
            }
            several += usize::from(ranks > 2);
            attributed += usize::from(error.rank().is_some());
        }
    }
    println!("of {several} errors in groups of three and more ranks {attributed} name the rank");
    assert!(attributed * 100 >= several * 80, "{attributed} of {several}");
}
