//! Handles the frames of a stream that several paths carry. `single` does the same for one TCP connection.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::assembly::Sink;
use super::frame::{Frame, HEAD as FRAME_HEAD};
use super::receiver::{Incoming, Origin, Routes};
use super::transfer::Events;
use crate::os::fault_points;
use crate::os::fault_points::FaultPoint;

/// The frames of the stream, in order.
pub struct Parser {
    /// Everything before this offset of the stream was handled.
    pub position: u64,
    /// The same offset for the sending side, which acknowledges it (`Stripes::ack`).
    pub ack: Arc<AtomicU64>,
    head: [u8; FRAME_HEAD],
    filled: usize,
    pub current: Option<Incoming>,
    /// Where in the stream the data of `current` begins.
    pub start: u64,
}

impl Parser {
    pub fn new(ack: Arc<AtomicU64>) -> Parser {
        Parser { position: 0, ack, head: [0; FRAME_HEAD], filled: 0, current: None, start: 0 }
    }
}

/// The parser, together with what handles its frames.
pub struct Frames<'a, R> {
    pub parser: &'a mut Parser,
    pub routes: &'a R,
    pub from: Origin,
    pub events: &'a mut Events,
}

impl<R: Routes> Frames<'_, R> {
    /// Handles the next header. An error ends the connection.
    fn begin(&mut self) -> Result<(), String> {
        let frame = Frame::read(&self.parser.head).ok_or("it sent what is no frame")?;
        self.parser.filled = 0;
        fault_points::reached(FaultPoint::StreamSeen);
        self.parser.current = Incoming::begin(self.routes, self.from, frame, self.events)?;
        self.parser.start = self.parser.position;
        self.end();
        Ok(())
    }

    /// Ends the current frame if all its data is there.
    fn end(&mut self) {
        if let Some(one) = self.parser.current.take_if(|one| one.missing() == 0) {
            fault_points::reached(FaultPoint::StreamDone);
            self.parser.ack.store(self.parser.position, Ordering::Release); // before the transfer ends
            one.end(self.from, self.events);
        }
    }
}

impl<R: Routes> Sink for Frames<'_, R> {
    fn position(&self) -> u64 {
        self.parser.position
    }

    fn feed(&mut self, mut data: &[u8]) -> Result<(), String> {
        while !data.is_empty() {
            let parser = &mut *self.parser;
            let Some(one) = &mut parser.current else {
                let here = (FRAME_HEAD - parser.filled).min(data.len());
                parser.head[parser.filled..parser.filled + here].copy_from_slice(&data[..here]);
                parser.filled += here;
                parser.position += here as u64;
                data = &data[here..];
                if parser.filled == FRAME_HEAD {
                    self.begin()?;
                }
                continue;
            };
            let here = one.store(data);
            parser.position += here as u64;
            data = &data[here..];
            self.end();
        }
        Ok(())
    }

    fn current(&self) -> Option<Range<u64>> {
        let start = self.parser.start;
        self.parser.current.as_ref().map(|one| start..start.saturating_add(one.frame.data() as u64))
    }

    fn store(&mut self, at: u64, data: &[u8]) {
        let start = self.parser.start;
        if let Some(one) = &mut self.parser.current {
            one.target.write((at - start) as usize, data);
        }
    }

    fn skip(&mut self, bytes: u64) {
        self.parser.position += bytes;
        if let Some(one) = &mut self.parser.current {
            one.got += bytes as usize;
        }
        self.end();
    }
}
