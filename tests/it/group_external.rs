//! Operations of a delegate: which of them get a number and leave a record, and what `wait` returns to threads.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use crate::common::host::{Memory, Quiet};
use sagellm::config::Config;
use sagellm::group::{Carrier, ExternalOp, Group};
use sagellm::rendezvous::Rendezvous;
use sagellm::stats::history::State;
use sagellm::types::{ANY_RANK, CallNote, Kind};

/// Returns a group of one rank that a delegate serves.
fn group() -> Arc<Group> {
    let config = Config {
        delegate_reason: Some("the test says so".into()),
        ..Config::without_options(0, 1, Duration::from_secs(30))
    };
    Group::build(Rendezvous::new(config, &Memory::default(), Arc::new(Quiet)).unwrap(), None).unwrap()
}

fn begin(group: &Group, kind: Kind, root: u32) -> ExternalOp {
    group.external_op(kind, Carrier::Delegate, (root, 0), (8, 8), CallNote::default(), None)
}

/// Returns the numbers in the group's records, the oldest first.
fn numbers(group: &Group) -> Vec<u64> {
    group.records().iter().map(|record| record.number).collect()
}

#[test]
fn a_refused_call_leaves_no_trace() {
    let group = group();
    for (kind, root) in [(Kind::AllReduce, 0), (Kind::Send, 0), (Kind::Recv, 0), (Kind::Recv, ANY_RANK)] {
        let before = numbers(&group);
        let refused = begin(&group, kind, root);
        refused.refused();
        drop(refused);
        assert_eq!(numbers(&group), before, "{kind}");
        begin(&group, kind, root).end(true, true);
        assert_eq!(numbers(&group).last(), Some(&u64::from(root != ANY_RANK)), "{kind}");
    }
    assert!(!group.has_failed());
    assert!(group.stats().0.cells().iter().all(|cell| cell.count > 0 && cell.failed == 0));
}

#[test]
fn a_refused_call_keeps_its_number_where_another_has_the_next() {
    let group = group();
    let refused = begin(&group, Kind::AllReduce, 0);
    let next = begin(&group, Kind::AllReduce, 0);
    refused.refused();
    next.end(true, true);
    begin(&group, Kind::AllReduce, 0).end(true, true);
    assert_eq!(numbers(&group), [1, 2, 3]);
    assert_eq!(group.records().iter().next().unwrap().state, State::Failed);
    assert!(!group.has_failed());
}

#[test]
fn a_message_to_no_rank_has_no_number() {
    let group = group();
    for root in [1, ANY_RANK] {
        begin(&group, Kind::Send, root).end(true, true);
    }
    assert_eq!(numbers(&group), [0, 0]);
}

#[test]
fn a_failure_is_remembered_when_the_statistics_are_reset() {
    let group = group();
    begin(&group, Kind::Recv, 0).fail("Timed out");
    group.reset_stats();
    assert!(group.has_failed() && group.fault().is_none());
}

#[test]
fn all_threads_that_learn_of_a_failure_get_the_same_text() {
    let group = group();
    for _ in 0..300 {
        let op = begin(&group, Kind::Recv, 0);
        let together = Barrier::new(3);
        let texts = std::thread::scope(|scope| {
            let threads = [(); 3].map(|()| {
                scope.spawn(|| {
                    together.wait();
                    op.fail("Connection closed by peer").map(|error| error.text().to_string())
                })
            });
            threads.map(|thread| thread.join().unwrap())
        });
        assert!(texts[0].as_ref().is_some_and(|text| text.contains("lost rank 0")), "{texts:?}");
        assert!(texts.iter().all(|text| text == &texts[0]), "{texts:?}");
    }
}
