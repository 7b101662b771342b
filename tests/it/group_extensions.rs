//! Ephemeral timeouts: an addition applies to all operations that are issued after the addition and before the first of
//! these operations has ended.

use std::sync::Arc;
use std::time::Duration;

use crate::common::plain;
use sagellm::group::{Carrier, Group, Op};
use sagellm::types::{CallNote, Kind};

const SECONDS: fn(u64) -> Duration = Duration::from_secs;

fn barrier(group: &Group) -> Arc<Op> {
    group.issue(plain(Kind::Barrier, 0, Vec::new(), Vec::new()), None).unwrap()
}

fn timeouts(ops: &[Arc<Op>]) -> Vec<u64> {
    ops.iter().map(|op| op.timeout().as_secs()).collect()
}

#[test]
fn rule_11_an_addition_ends_with_the_first_operation_that_was_issued_after_it() {
    let groups = Group::local(2, SECONDS(60)).unwrap();
    let (group, peer) = (&groups[0], &groups[1]);
    let mut ops = vec![barrier(group)];
    group.add_ephemeral_timeout(SECONDS(30));
    ops.extend([barrier(group), barrier(group)]);
    group.add_ephemeral_timeout(SECONDS(5));
    ops.push(barrier(group));
    assert_eq!(timeouts(&ops), [60, 90, 90, 95]);
    assert_eq!(barrier(peer).timeout(), SECONDS(60), "the addition is of one rank");
    drop(barrier(peer));
    ops[1].wait(None).unwrap(); // the first operation after the 30 seconds were added: its end removes them
    ops.push(barrier(group));
    assert_eq!(ops[4].timeout(), SECONDS(65));
    let mut request = plain(Kind::Barrier, 0, Vec::new(), Vec::new());
    request.timeout_ms = Some(7000);
    ops.push(group.issue(request, None).unwrap());
    assert_eq!(ops[5].timeout(), SECONDS(12), "it is added to a timeout of the call's own, too");
    (0..4).for_each(|_| drop(barrier(peer)));
    ops.iter().for_each(|op| op.wait(None).unwrap());
    let last = barrier(group);
    assert_eq!(last.timeout(), SECONDS(60));
    drop(barrier(peer));
    last.wait(None).unwrap();
}

/// The first operation after an addition may be an operation on a device. The core only counts such an operation.
#[test]
fn rule_11_an_operation_on_a_device_owns_an_addition_until_it_ends() {
    let groups = Group::local(2, SECONDS(60)).unwrap();
    let group = &groups[0];
    group.add_ephemeral_timeout(SECONDS(30));
    let call = group.external_op(Kind::AllReduce, Carrier::Device, (0, 0), (8, 8), CallNote::default(), None);
    assert_eq!(barrier(group).timeout(), SECONDS(90));
    call.end(true, true);
    assert_eq!(barrier(group).timeout(), SECONDS(60));
}
