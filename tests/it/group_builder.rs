//! A group is built completely from the decision of its ranks, or not at all.

use std::sync::Arc;
use std::time::Duration;

use crate::common::host::{Memory, Quiet};
use sagellm::config::Config;
use sagellm::engine::local;
use sagellm::engine::multihost::host_map::HostMap;
use sagellm::error::ErrorKind;
use sagellm::group::Group;
use sagellm::rendezvous::{Decision, Hosts, Rendezvous};
use sagellm::types::{Kind, Request};

const TIMEOUT: Duration = Duration::from_secs(30);

/// Two ranks, played by threads, that have met and decided.
fn decided() -> [Rendezvous; 2] {
    let store = Memory::default();
    std::thread::scope(|scope| {
        let store = &store;
        let ranks = [0, 1].map(|rank| {
            scope.spawn(move || {
                let config = Config::without_options(rank, 2, TIMEOUT);
                Rendezvous::new(config, store, Arc::new(Quiet)).unwrap()
            })
        });
        ranks.map(|rank| rank.join().unwrap())
    })
}

fn barrier() -> Request {
    Request::without_memory(Kind::Barrier)
}

#[test]
fn a_rank_that_builds_no_group_of_what_was_decided_leaves_the_others() {
    for leaver in [0, 1] {
        let [first, second] = decided();
        let (leaves, stays) = if leaver == 0 { (first, second) } else { (second, first) };
        assert!(matches!(leaves.decision, Decision::SharedMemory(_)));
        drop(leaves);
        let group = Group::build(stays, None).unwrap();
        match group.run(barrier(), None) {
            Err(error) if error.kind() == ErrorKind::RankFailed => {
                let (rank, text) = (error.rank().unwrap(), error.text());
                assert_eq!(rank, leaver, "{text}");
                assert!(text.contains("left the group"), "{text}");
            }
            other => panic!("rank {leaver} left, and the barrier of the other ended with {other:?}"),
        }
    }
}

#[test]
fn a_link_is_taken_where_the_group_spans_hosts_and_nowhere_else() {
    let [one, other] = decided();
    let link = local::links(2).remove(0);
    let error = Group::build(one, Some(link)).err().expect("a group of one host takes no link");
    assert!(error.text().contains("takes no link"), "{error}");

    let hosts = |rank| Hosts {
        keys: Default::default(),
        host_map: HostMap::new(vec![0, 1], rank),
        insides: vec![None, None],
        reason: "the test says so".to_string(),
    };
    let spanning = Rendezvous { decision: Decision::Hosts(hosts(1)), ..other };
    assert!(spanning.spans_hosts() && spanning.delegate_reason().is_none());
    let error = Group::build(spanning, None).err().expect("a group over hosts needs its link");
    assert!(error.text().contains("no link between them was given"), "{error}");
}
