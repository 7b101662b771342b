//! What a wire has if UCX carries its frames: the worker, and the connections that UCX knows.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::connection::Connection;
use super::driving::Counted;
use super::transfer::Events;
use super::{Wire, locked};
use crate::engine::multihost::ucx::{Data, Event, Worker, log_messages};

/// How often connections that may have to end are looked at.
pub const LOOK: Duration = Duration::from_millis(10);

pub struct Carrier {
    pub worker: Arc<Worker>,
    /// By number. A connection stays until UCX has ended everything that it did for it.
    connections: Mutex<HashMap<u64, Arc<Connection>>>,
    /// The numbers of connections that may have to end. The wire is driven for each of them.
    watched: Mutex<HashMap<u64, Counted>>,
    /// Whether there are any. Written under the lock, read without (relaxed: a pass that misses it ends soon).
    watches: AtomicBool,
}

impl Carrier {
    pub fn new(worker: Worker) -> Carrier {
        Carrier {
            worker: Arc::new(worker),
            connections: Mutex::default(),
            watched: Mutex::default(),
            watches: AtomicBool::new(false),
        }
    }

    /// From now on events of this connection are handled.
    pub fn add(&self, connection: &Arc<Connection>) {
        locked(&self.connections).insert(connection.token, Arc::clone(connection));
    }

    /// Has the connection looked at until it has ended or need not end.
    pub fn watch(&self, wire: &Wire, who: u64) {
        let mut watched = locked(&self.watched);
        watched.entry(who).or_insert_with(|| Counted::new(wire.driving()));
        self.watches.store(true, Ordering::Relaxed);
        drop(watched);
        wire.driving().wake_for_pending();
    }

    /// How long a pass may sleep.
    pub fn longest_sleep(&self, sleep: Duration) -> Duration {
        if self.watches.load(Ordering::Relaxed) { sleep.min(LOOK) } else { sleep }
    }

    /// Advances UCX and handles what has happened. Returns true if something advanced.
    pub fn pass(&self, wire: &Wire, events: &mut Events) -> bool {
        let mut happened = Vec::new();
        let moved = self.worker.progress(&mut happened);
        log_messages();
        for event in happened {
            self.handle(wire, event, events);
        }
        if self.watches.load(Ordering::Relaxed) {
            self.look(wire, events);
        }
        moved
    }

    fn handle(&self, wire: &Wire, event: Event, events: &mut Events) {
        match event {
            Event::Message { head, data } => {
                let who = u64::from_le_bytes(head[..8].try_into().expect("eight bytes"));
                match self.connection(who).filter(|connection| connection.broken().is_none()) {
                    Some(connection) => {
                        let carried = connection.carried().expect("UCX carries it");
                        if let Err(why) = carried.arrived(wire, &connection, &head, data, events) {
                            wire.drop_connection(&connection, &why, events);
                        }
                    }
                    None => {
                        if let Data::Held(held) = data {
                            self.worker.release(held);
                        }
                    }
                }
            }
            Event::Ended { name, outcome } => {
                let Some(connection) = self.connection(name.who) else { return };
                let carried = connection.carried().expect("UCX carries it");
                carried.ended(wire, &connection, name.number, outcome, events);
                self.forget_if_over(&connection);
            }
            Event::Failed { who, why } => {
                if let Some(connection) = self.connection(who) {
                    connection.carried().expect("UCX carries it").failed(&why);
                    self.watch(wire, who);
                }
            }
        }
    }

    fn connection(&self, who: u64) -> Option<Arc<Connection>> {
        locked(&self.connections).get(&who).cloned()
    }

    /// Forgets a connection that is broken and for which UCX does nothing any more.
    pub fn forget_if_over(&self, connection: &Connection) {
        if connection.broken().is_some() && connection.carried().is_some_and(|carried| carried.is_over()) {
            locked(&self.connections).remove(&connection.token);
        }
    }

    fn look(&self, wire: &Wire, events: &mut Events) {
        let numbers: Vec<u64> = locked(&self.watched).keys().copied().collect();
        let now = Instant::now();
        for who in numbers {
            let connection = self.connection(who).filter(|connection| connection.broken().is_none());
            let looked = connection.as_ref().map(|one| one.carried().expect("UCX carries it").look(now));
            if let Some(Ok(true)) = looked {
                continue;
            }
            let mut watched = locked(&self.watched);
            watched.remove(&who);
            self.watches.store(!watched.is_empty(), Ordering::Relaxed);
            drop(watched);
            if let (Some(connection), Some(Err(why))) = (connection, looked) {
                wire.drop_connection(&connection, &why, events);
            }
        }
    }
}
