//! Tests steps over simulated links, whose peer is lost or has sent certain frames.

use std::sync::Mutex;

use super::*;
use crate::engine::Polled;
use crate::engine::multihost::link::{Done, Ended, Mail, Mailbox};
use crate::op::signature;
use crate::types::{Dtype, Kind, ReduceOp};

/// A link whose peer has sent these frames and sends nothing else, or is lost.
#[derive(Default)]
struct Played {
    is_lost: bool,
    unread: Mutex<VecDeque<Vec<u8>>>,
    sent: Mutex<Vec<Vec<u8>>>,
}

/// A transfer from a lost peer. It writes to its memory when it is dropped, like a thread that is still reading.
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

/// A transfer from a peer that sends nothing.
struct Never;

impl Transfer for Never {
    fn wait(self: Box<Self>, _timeout: Duration) -> std::result::Result<Vec<u8>, Broken> {
        Err(Broken::late("nothing came".to_string()))
    }
    fn ends_within(&self, timeout: Duration) -> bool {
        std::thread::sleep(timeout);
        false
    }
}

impl Link for Played {
    fn receive(&self, _: usize, _: u32, _: Vec<u8>, _: usize) -> Result<Box<dyn Transfer>> {
        Ok(match self.unread.lock().unwrap().pop_front() {
            Some(frame) => Box::new(Ended(frame)),
            None if self.is_lost => Box::new(Writes(Vec::new())),
            None => Box::new(Never),
        })
    }
    fn has_unread(&self, _: usize, _: u32) -> bool {
        !self.unread.lock().unwrap().is_empty()
    }
    fn send(&self, _: usize, _: u32, buffer: Vec<u8>, bytes: usize) -> Result<Box<dyn Transfer>> {
        self.sent.lock().unwrap().push(buffer[..bytes].to_vec());
        Ok(Box::new(Ended(buffer)))
    }
    unsafe fn receive_into(&self, _: usize, _: u32, pieces: Vec<Span>) -> Result<Box<dyn Transfer>> {
        assert!(self.is_lost, "only frames travel here");
        Ok(Box::new(Writes(pieces)))
    }
    unsafe fn send_from(&self, _: usize, _: u32, _: Vec<Span>) -> Result<Box<dyn Transfer>> {
        unreachable!("no test sends a body")
    }
    fn cut(&self) {}
}

impl Mail for Played {
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
    fn keep_driven(&self) -> Box<dyn Send> {
        Box::new(())
    }
    fn poll(&self, _: Duration) -> Polled {
        Polled::Elsewhere
    }
}

fn transport(link: Arc<dyn Link>) -> Transport {
    let names = Arc::new(Names { processes: vec![String::new(); 2], ..Names::default() });
    Transport::new(link, names, 0, Arc::new(AtomicUsize::new(NOBODY)))
}

/// A freed buffer of this size is unmapped, so a transfer that outlives it crashes the process.
#[test]
fn a_buffer_outlives_its_transfers_where_the_peer_is_lost() {
    let mut transport = transport(Arc::new(Played { is_lost: true, ..Played::default() }));
    let receives = vec![Incoming { peer: 1, bytes: 64 << 20, into: None }];
    let deadline = clock::now() + 1_000_000_000;
    // SAFETY: no memory of the caller is used.
    let begun = unsafe { transport.begin(FrameHeader::default(), deadline, &[], receives, 1 << 20) };
    let outcome = begun.and_then(|begun| transport.complete(begun, Take::Each(&mut |_, _| {})));
    assert!(outcome.as_ref().is_err_and(|error| error.rank() == Some(1)), "{outcome:?}");
}

/// Returns the header of a broadcast. The segments of a broadcast have different chains.
fn header(number: u64, root: u32, chain: u64) -> FrameHeader {
    let signature = signature::of_call(Kind::Broadcast, (Dtype::Bytes, ReduceOp::Sum), root, (8, 8));
    FrameHeader { signature, number, chain, ..FrameHeader::default() }
}

fn told(word: Word, header: FrameHeader) -> Vec<u8> {
    frame(word, &header, 0).to_vec()
}

/// This rank's batch.
fn batch() -> FrameHeader {
    header(5, 0, 55)
}

/// Sends an empty message to rank 1 in this rank's batch, and receives one if `receives`.
fn step(transport: &mut Transport, receives: bool) -> Result<u64> {
    let sends = [Outgoing { peer: 1, pieces: Vec::new(), stays: true }];
    let receives = if receives { vec![Incoming { peer: 1, bytes: 0, into: None }] } else { Vec::new() };
    let deadline = clock::now() + 300_000_000;
    let take = Take::Each(&mut |_, _| {});
    // SAFETY: no memory of the caller is used.
    let begun = unsafe { transport.begin(batch(), deadline, &sends, receives, 1 << 20) }?;
    transport.complete(begun, take)
}

#[test]
fn questions_about_other_batches_are_dropped_even_if_nothing_is_received() {
    for receives in [false, true] {
        let link = Arc::new(Played::default());
        let measures = FrameHeader { number: 5, chain: 3, ..FrameHeader::default() };
        let headers = [header(1, 1, 7), header(4, 0, 8), measures, header(5, 0, 54), batch(), header(8, 1, 88)];
        let mut unread: Vec<_> = headers.repeat(20).into_iter().map(|one| told(Word::Question, one)).collect();
        unread.push(told(Word::Data, batch()));
        link.unread.lock().unwrap().extend(unread);
        let mut transport = transport(link.clone());
        step(&mut transport, receives).unwrap();
        assert_eq!(link.unread.lock().unwrap().len(), 0, "unread frames");
        assert_eq!(*link.sent.lock().unwrap(), [told(Word::Data, batch())]);
        if !receives {
            assert!(transport.peer(1).arrived_frame().is_some(), "the data stays for the operation that receives it");
        }
    }
}

#[test]
fn a_frame_of_another_operation_with_the_same_number_is_an_error_before_anything_is_sent() {
    for word in [Word::Question, Word::Data] {
        let link = Arc::new(Played::default());
        link.unread.lock().unwrap().push_back(told(word, header(5, 1, 55)));
        let error = step(&mut transport(link.clone()), false).unwrap_err().to_string();
        assert!(error.contains("root 0") && error.contains("root 1"), "{error}");
        assert!(link.sent.lock().unwrap().is_empty(), "{error}");
    }
}

#[test]
fn a_long_wait_sends_questions_after_twice_as_long_each_time() {
    let link = Arc::new(Played::default());
    let mut transport = transport(link.clone());
    let error = step(&mut transport, true).unwrap_err().to_string();
    assert!(error.contains("Timed out waiting for rank 1"), "{error}");
    // Questions follow the intervals of 100 ms whose number is a power of two. At most two of these end in the 300 ms.
    let sent = link.sent.lock().unwrap();
    assert_eq!((sent[0].clone(), sent[1].clone()), (told(Word::Data, batch()), told(Word::Question, batch())));
    assert!(sent.len() <= 3 && transport.peer(1).oldest_send(1).is_none(), "{} sends", sent.len());
}
