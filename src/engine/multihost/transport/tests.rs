//! A step over a link whose peer is lost.

use super::*;
use crate::engine::multihost::link::{Done, Mail, Mailbox};

/// A link whose peer is lost. Its transfers write to their memory when they are dropped, like a thread that is
/// still reading.
struct Lost;

struct Writes(Vec<Span>);

impl Drop for Writes {
    fn drop(&mut self) {
        // SAFETY: the test checks exactly this: the memory lives as long as the transfer.
        self.0.iter().for_each(|span| unsafe { std::ptr::write_bytes(span.addr as *mut u8, 7, span.bytes) });
    }
}

impl Transfer for Writes {
    fn wait(self: Box<Self>, _timeout: Duration) -> std::result::Result<Vec<u8>, Broken> {
        Err("Connection closed by peer".to_string().into())
    }
    fn ends_within(&self, _timeout: Duration) -> bool {
        true
    }
}

impl Link for Lost {
    fn receive(&self, _: usize, _: u32, _: Vec<u8>, _: usize) -> Result<Box<dyn Transfer>> {
        Ok(Box::new(Writes(Vec::new())))
    }
    fn send(&self, _: usize, _: u32, _: Vec<u8>, _: usize) -> Result<Box<dyn Transfer>> {
        Ok(Box::new(Writes(Vec::new())))
    }
    unsafe fn receive_into(&self, _: usize, _: u32, pieces: Vec<Span>) -> Result<Box<dyn Transfer>> {
        Ok(Box::new(Writes(pieces)))
    }
    unsafe fn send_from(&self, _: usize, _: u32, _: Vec<Span>) -> Result<Box<dyn Transfer>> {
        Ok(Box::new(Writes(Vec::new())))
    }
    fn cut(&self) {}
}

impl Mail for Lost {
    fn open_mailbox(&self, _: Arc<dyn Mailbox>) {}
    fn abandon_body(&self, _: usize, _: u64) {}
    fn mail(&self, _: usize, _: Vec<u8>) -> Result<()> {
        Ok(())
    }
    unsafe fn send_body(&self, _: usize, _: u64, _: Vec<Span>, _: Done) -> Result<()> {
        Ok(())
    }
    unsafe fn receive_body(&self, _: usize, _: u64, _: Vec<Span>, _: Done) -> Result<()> {
        Ok(())
    }
    fn await_mail(&self) -> Box<dyn Send> {
        Box::new(())
    }
    fn poll(&self, _: Duration) -> bool {
        false
    }
}

/// A freed buffer of this size is unmapped, so a transfer that outlives it crashes the process.
#[test]
fn a_buffer_outlives_its_transfers_where_the_peer_is_lost() {
    let names = Arc::new(Names { processes: vec![String::new(); 2], ..Names::default() });
    let mut transport = Transport::new(Arc::new(Lost), names, 0, Arc::new(AtomicUsize::new(NOBODY)));
    let receives = vec![Incoming { peer: 1, bytes: 64 << 20, into: None }];
    let deadline = clock::now() + 1_000_000_000;
    // SAFETY: no memory of the caller is used.
    let outcome = unsafe {
        transport.exchange(FrameHeader::default(), deadline, &[], receives, 1 << 20, Take::Each(&mut |_, _| {}))
    };
    assert!(outcome.as_ref().is_err_and(|error| error.rank() == Some(1)), "{outcome:?}");
}
