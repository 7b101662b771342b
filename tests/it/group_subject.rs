//! What the diagnosis of a hang asks of a group while the group continues to run.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use crate::common::host::Memory;
use sagellm::config::Config;
use sagellm::group::Group;
use sagellm::host::Host;
use sagellm::progress::domain::Driven;
use sagellm::rendezvous::Rendezvous;
use sagellm::types::{Kind, Request};

fn barrier() -> Request {
    Request::without_memory(Kind::Barrier)
}

/// A program in which the late rank issues its barrier while the waiting group, whose deadline has passed, writes the
/// error text. `call_site` then drives the waiting group until its operation has ended.
#[derive(Default)]
struct Late {
    groups: OnceLock<[Weak<Group>; 2]>,
    asked: AtomicUsize,
}

impl Host for Late {
    fn interrupted(&self) -> bool {
        false
    }
    fn call_site(&self, _: u32) -> Option<String> {
        let [waits, comes] = self.groups.get()?.each_ref().map(|group| group.upgrade().unwrap());
        if self.asked.fetch_add(1, Ordering::Relaxed) == 0 {
            comes.issue(barrier(), None).unwrap();
            // The waiting group's lock is free here, so `pending` and `drive` may take it.
            while waits.pending() > 0 {
                waits.drive();
            }
        }
        None
    }
}

#[test]
fn an_operation_that_ends_while_the_text_of_its_deadline_is_made_has_ended_well() {
    let (store, program) = (Memory::default(), Arc::new(Late::default()));
    let (store, host) = (&store, &program);
    let groups = std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            scope.spawn(move || {
                let config = Config {
                    soft_timeout: Some(Duration::ZERO),
                    ..Config::without_options(rank, 2, Duration::from_secs(30))
                };
                let host: Arc<dyn Host> = Arc::<Late>::clone(host);
                Group::build(Rendezvous::new(config, store, host).unwrap(), None).unwrap()
            })
        });
        ranks.map(|rank| rank.join().unwrap())
    });
    program.groups.set(groups.each_ref().map(Arc::downgrade)).unwrap();
    let mut late = barrier();
    late.timeout_ms = Some(200);
    groups[0].run(late, None).unwrap();
    assert!(program.asked.load(Ordering::Relaxed) > 0, "its deadline had passed");
    for group in &groups {
        assert!(group.fault().is_none());
        group.set_timeout(Duration::from_secs(30));
    }
    let again = groups[0].issue(barrier(), None).unwrap();
    groups[1].run(barrier(), None).unwrap();
    again.wait(None).unwrap();
}
