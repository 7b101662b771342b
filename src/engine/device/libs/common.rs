//! The code that the communicators of all vendors' libraries share. It decides which thread may still use the handle
//! and on which thread a communicator is joined and ended, and translates a call into the library's numbers. Each
//! library implements the rest as [`Calls`].

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

use crate::engine::device::communicator::*;
use crate::engine::device::lowering::Capabilities;
use crate::engine::device::runtime::{Runtime, Stream};
use crate::error::{Error, Result};
use crate::types::{Dtype, ReduceOp};

/// A library's numbers for element types and reduce ops.
pub struct Numbers {
    /// The library's name in error texts.
    pub name: &'static str,
    pub types: &'static [(Dtype, c_int)],
    pub ops: &'static [(ReduceOp, c_int)],
}

/// Arguments of a call, translated into a library's numbers. 0 or null if the call has no such argument.
pub struct Arguments {
    pub send: *mut c_void,
    pub recv: *mut c_void,
    pub count: usize,
    pub dtype: c_int,
    pub op: c_int,
    pub root: u32,
}

impl Numbers {
    pub fn dtype(&self, dtype: Dtype) -> Result<c_int> {
        let found = self.types.iter().find(|(own, _)| *own == dtype).map(|(_, number)| *number);
        found.ok_or_else(|| no_type(self.name, dtype))
    }

    fn op(&self, op: ReduceOp) -> Result<c_int> {
        let found = self.ops.iter().find(|(own, _)| *own == op).map(|(_, number)| *number);
        found.ok_or_else(|| no_op(self.name, op))
    }

    /// `made`: the number of an op that the library created for this call.
    pub fn arguments(&self, call: &Call<'_>, made: Option<c_int>, able: &Capabilities) -> Result<Arguments> {
        let (send, recv, count, dtype, op, root) = match *call {
            Call::AllReduce { send, recv, count, dtype, op } | Call::ReduceScatter { send, recv, count, dtype, op } => {
                (send, recv, count, dtype, Some(op), 0)
            }
            Call::Reduce { send, recv, count, dtype, op, root } => (send, recv, count, dtype, Some(op), root),
            Call::Broadcast { buffer, count, dtype, root } => (buffer, buffer, count, dtype, None, root),
            Call::AllGather { send, recv, count, dtype } => (send, recv, count, dtype, None, 0),
            Call::Gather { send, recv, count, dtype, root } | Call::Scatter { send, recv, count, dtype, root } => {
                (send, recv, count, dtype, None, root)
            }
            Call::AllToAllV { send, recv, dtype, .. } => (send, recv, 0, dtype, None, 0),
            Call::Exchange(_) | Call::Copy { .. } => return Err(no_call(able, call)),
        };
        let op = match (made, op) {
            (Some(made), _) => made,
            (None, Some(op)) => self.op(op)?,
            (None, None) => 0,
        };
        let at = |address: usize| address as *mut c_void;
        Ok(Arguments { send: at(send), recv: at(recv), count, dtype: self.dtype(dtype)?, op, root })
    }
}

/// The calls of one library. `handle` is one of the library's communicator handles as a number. It is valid until the
/// call returns.
pub trait Calls: Api + Sized + 'static {
    /// Further state of a communicator of this library.
    type Own: Send + Sync + 'static;

    /// Puts one call on the stream. `factor` is 0 or has the same meaning as in `Communicator::call_by_factor`.
    fn put(&self, comm: &Joined<Self>, handle: usize, call: &Call<'_>, factor: usize, stream: Stream) -> Result<Kept>;
    fn group_start(&self) -> Result<()>;
    fn group_end(&self, comm: &Joined<Self>) -> Result<()>;
    fn can_split(&self, _: &Joined<Self>, _: &[u32]) -> bool {
        false
    }
    fn split(&self, _: &Arc<Joined<Self>>, _: &Split) -> Result<Option<Arc<dyn Communicator>>> {
        Err(no_split(self.capabilities()))
    }
    /// `_waits`: the deadline, and the function that may end the wait earlier.
    fn shrink(
        &self,
        _: &Arc<Joined<Self>>,
        _exclude: &[u32],
        _waits: (Duration, GoOn),
        _name: &str,
    ) -> Result<Arc<dyn Communicator>> {
        Err(no_split(self.capabilities()))
    }
    fn poll(&self, handle: usize) -> Result<()>;
    fn abort(comm: &Arc<Joined<Self>>) -> Result<()>;
    fn close(comm: &Arc<Joined<Self>>, deadline: Duration) -> Result<()>;
}

/// One rank of a communicator of library `L`. Threads that end the communicator also hold this object.
pub struct Joined<L: Calls> {
    pub api: Arc<L>,
    pub guard: HandleGuard,
    pub rank: u32,
    pub ranks: u32,
    pub device: i32,
    pub runtime: Arc<dyn Runtime>,
    pub own: L::Own,
}

impl<L: Calls> Joined<L> {
    /// Ends the communicator by calling `destroy` on a new thread. Does nothing if it has already ended. When `destroy`
    /// runs, no other thread uses the handle, except for calls that have not returned after `grace`.
    pub fn end(
        self: &Arc<Self>,
        (why, grace): (&'static str, Duration),
        (what, deadline): (&str, Duration),
        destroy: impl FnOnce(&Joined<L>, usize) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let Some(handle) = self.guard.shut(why, grace) else { return Ok(()) };
        let own = Arc::clone(self);
        within(deadline, what, &always, move || {
            own.runtime.set_device(own.device)?;
            destroy(&own, handle)
        })
    }

    /// Puts the messages on the stream as one group of the library. `one` puts a single message.
    pub fn exchange(&self, messages: &[Message], one: impl FnMut(&Message) -> Result<()>) -> Result<()> {
        self.api.group_start()?;
        let called = messages.iter().try_for_each(one);
        // Called after an error too, because a library group that stays open would include this thread's later calls.
        let ended = self.api.group_end(self);
        called.and(ended)
    }
}

/// Joins a communicator on a new thread. That thread first selects the device of `setup`.
pub fn join<const BYTES: usize>(
    able: &Capabilities,
    setup: Setup,
    make: impl FnOnce(Setup, [u8; BYTES]) -> Result<Arc<dyn Communicator>> + Send + 'static,
) -> Result<Arc<dyn Communicator>> {
    let id = setup.id.as_slice().try_into().map_err(|_| wrong_id(able, &setup))?;
    let (what, go_on) = (joining(able, &setup), Arc::clone(&setup.go_on));
    within(setup.deadline, &what, &*go_on, move || {
        setup.runtime.set_device(setup.device)?;
        make(setup, id)
    })
}

/// The error of a failed library call. `more` is appended to the library's own text.
pub fn failure(api: &dyn Api, what: &str, code: c_int, more: &str) -> Error {
    let name = &api.capabilities().name;
    Error::system(format!("sagellm: {name} failed in {what}: {}{more}", api.describe_error(code)))
}

/// The communicator as the rest of the engine uses it. A drop without `close` or `abort` aborts it, because a drop that
/// closed it would wait for the other ranks.
pub struct LibraryComm<L: Calls>(pub Arc<Joined<L>>);

impl<L: Calls> Communicator for LibraryComm<L> {
    fn api(&self) -> Arc<dyn Api> {
        self.0.api.clone()
    }
    fn rank(&self) -> u32 {
        self.0.rank
    }
    fn ranks(&self) -> u32 {
        self.0.ranks
    }
    fn device(&self) -> i32 {
        self.0.device
    }
    fn call(&self, call: &Call<'_>, stream: Stream) -> Result<Kept> {
        self.call_by_factor(call, 0, stream)
    }
    fn call_by_factor(&self, call: &Call<'_>, factor: usize, stream: Stream) -> Result<Kept> {
        self.0.guard.enter(call.name(), |handle| self.0.api.put(&self.0, handle, call, factor, stream))
    }
    fn group_start(&self) -> Result<()> {
        self.0.api.group_start()
    }
    fn group_end(&self) -> Result<()> {
        self.0.api.group_end(&self.0)
    }
    fn can_split(&self, members: &[u32]) -> bool {
        self.0.api.can_split(&self.0, members)
    }
    fn split(&self, split: &Split) -> Result<Option<Arc<dyn Communicator>>> {
        self.0.api.split(&self.0, split)
    }
    fn shrink(&self, exclude: &[u32], deadline: Duration, go_on: GoOn, name: &str) -> Result<Arc<dyn Communicator>> {
        self.0.api.shrink(&self.0, exclude, (deadline, go_on), name)
    }
    fn poll(&self) -> Result<()> {
        self.0.guard.enter("poll", |handle| self.0.api.poll(handle))
    }
    fn abort(&self) -> Result<()> {
        L::abort(&self.0)
    }
    fn close(&self, deadline: Duration) -> Result<()> {
        L::close(&self.0, deadline)
    }
}

impl<L: Calls> Drop for LibraryComm<L> {
    fn drop(&mut self) {
        if let Err(error) = self.abort() {
            log::warn!("{error}");
        }
    }
}
