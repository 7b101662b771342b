//! The format of mail between ranks: a first byte for the kind of letter, then its fields.

use std::borrow::Cow;
use std::mem::take;

use super::link::MOST_BODIES;
use super::ready::Ready;
use crate::error::{Error, Result};
use crate::fields::{Reader, Writer};

/// A message of at most this many bytes is always sent inside its letter.
pub const EAGER: usize = 16 << 10;
/// A message of at most this many bytes is sent inside its letter if the peer's `WINDOW` has room. For a larger
/// message, the two copies cost more than the exchanges that are saved.
pub const LONGEST_EAGER: usize = 128 << 10;
/// For each peer and direction: at most this many bytes of messages longer than `EAGER` may be in letters that no
/// receive has taken yet. This bounds what a receiver stores for a sender.
pub const WINDOW: u64 = 256 << 10;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Letter<'a> {
    /// A complete message of the program. `taken`, here and below, is about the opposite direction: how many bytes the
    /// receives of this letter's sender have taken from letters. Only messages longer than `EAGER` count.
    Eager { tag: u32, taken: u64, data: &'a [u8] },
    /// Announces a larger message. Its body stays at the sender until the receiver grants `number`.
    Large { tag: u32, taken: u64, bytes: u64, number: u64 },
    /// The receiver is ready to receive the message `number`, under the body number `body`.
    Granted { number: u64, taken: u64, body: u64 },
    /// The sender of this letter has posted a receive, for which no message has arrived.
    Ready(Ready),
    /// The receiver will not receive the body `number`, because the receiver's tensor has a different size.
    Refused { number: u64 },
    /// The sender leaves the group in order. Everything that it sent before this letter has arrived before this letter.
    Bye,
    /// The answer to `Bye`.
    Heard,
    /// The sender's group failed. The data is the fault, encoded by `Error::encode`.
    Fault(Cow<'a, [u8]>),
    /// To rank 0: the sender has entered the monitored barrier `turn`.
    Come { turn: u64 },
    /// From rank 0: the outcome of the monitored barrier `turn`.
    Decided { turn: u64, failed: bool },
}

const EAGER_MESSAGE: u8 = 1;
const LARGE: u8 = 2;
const GRANTED: u8 = 3;
const REFUSED: u8 = 4;
const BYE: u8 = 5;
const HEARD: u8 = 6;
const FAULT: u8 = 7;
const COME: u8 = 8;
const DECIDED: u8 = 9;
const READY: u8 = 10;

impl<'a> Letter<'a> {
    pub fn encode(&self) -> Vec<u8> {
        let kind = |kind: u8| Writer(Vec::with_capacity(40)).u8(kind); // fits all but `Fault`
        let letter = match self {
            Letter::Eager { tag, taken, data } => Writer(Letter::eager_head(*tag, *taken, data.len())).raw(data),
            Letter::Large { tag, taken, bytes, number } => kind(LARGE).u32(*tag).u64(*taken).u64(*bytes).u64(*number),
            Letter::Granted { number, taken, body } => kind(GRANTED).u64(*number).u64(*taken).u64(*body),
            Letter::Ready(Ready { tag, bytes, seen, ahead, body }) => {
                kind(READY).u32(*tag).u64(*bytes).u64(*seen).u64(*ahead).u64(*body)
            }
            Letter::Refused { number } => kind(REFUSED).u64(*number),
            Letter::Bye => kind(BYE),
            Letter::Heard => kind(HEARD),
            Letter::Fault(fault) => kind(FAULT).raw(fault),
            Letter::Come { turn } => kind(COME).u64(*turn),
            Letter::Decided { turn, failed } => kind(DECIDED).u64(*turn).u8(u8::from(*failed)),
        };
        letter.0
    }

    /// Returns the start of an encoded `Eager`, to which the caller appends `bytes` bytes of data.
    pub fn eager_head(tag: u32, taken: u64, bytes: usize) -> Vec<u8> {
        Writer(Vec::with_capacity(13 + bytes)).u8(EAGER_MESSAGE).u32(tag).u64(taken).0
    }

    /// Decodes a letter of `peer`. Fails if the mail is not a letter.
    pub fn decode(peer: usize, mail: &'a [u8]) -> Result<Letter<'a>> {
        Letter::read(mail).ok_or_else(|| Letter::none(peer, mail))
    }

    /// Returns the error for mail of `peer` that is not a letter.
    pub fn none(peer: usize, mail: &[u8]) -> Error {
        Error::system(format!(
            "sagellm: rank {peer} sent {} bytes that are no letter of ours: another version of sagellm runs there, or \
             another program talks to this one's port",
            mail.len()
        ))
    }

    fn read(mail: &'a [u8]) -> Option<Letter<'a>> {
        let mut from = Reader(mail);
        let letter = match from.u8()? {
            EAGER_MESSAGE => Letter::Eager { tag: from.u32()?, taken: from.u64()?, data: take(&mut from.0) },
            LARGE => {
                let (tag, taken, bytes) = (from.u32()?, from.u64()?, from.u64()?);
                Letter::Large { tag, taken, bytes, number: body(&mut from)? }
            }
            GRANTED => Letter::Granted { number: body(&mut from)?, taken: from.u64()?, body: body(&mut from)? },
            READY => {
                let (tag, bytes, seen) = (from.u32()?, from.u64()?, from.u64()?);
                Letter::Ready(Ready { tag, bytes, seen, ahead: from.u64()?, body: body(&mut from)? })
            }
            REFUSED => Letter::Refused { number: body(&mut from)? },
            BYE => Letter::Bye,
            HEARD => Letter::Heard,
            FAULT => Letter::Fault(take(&mut from.0).into()),
            COME => Letter::Come { turn: from.u64()? },
            DECIDED => Letter::Decided { turn: from.u64()?, failed: from.u8()? != 0 },
            _ => return None,
        };
        from.0.is_empty().then_some(letter)
    }
}

/// Reads the number of a body.
fn body(from: &mut Reader<'_>) -> Option<u64> {
    from.u64().filter(|number| *number < MOST_BODIES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::multihost::link::LONGEST_MAIL;

    #[test]
    fn a_letter_is_read_as_it_was_written_and_what_is_none_is_refused() {
        let data = vec![7; LONGEST_EAGER];
        let letters = [
            Letter::Eager { tag: 1 << 31, taken: 0, data: &[] },
            Letter::Eager { tag: 3, taken: 1 << 50, data: &data },
            Letter::Large { tag: 3, taken: 5, bytes: 1 << 40, number: 9 },
            Letter::Granted { number: 9, taken: 1 << 50, body: MOST_BODIES - 1 },
            Letter::Ready(Ready { tag: 1 << 31, bytes: 1 << 40, seen: 3, ahead: 2, body: MOST_BODIES - 1 }),
            Letter::Refused { number: 1 << 62 },
            Letter::Bye,
            Letter::Heard,
            Letter::Fault(b"Tlate"[..].into()),
            Letter::Come { turn: 4 },
            Letter::Decided { turn: 4, failed: true },
        ];
        for letter in &letters {
            let mail = letter.encode();
            assert!(mail.len() <= LONGEST_MAIL);
            assert_eq!(Letter::decode(1, &mail).as_ref(), Ok(letter));
            let short = &mail[..mail.len() - 1];
            let open_ended = matches!(letter, Letter::Eager { data: [_, ..], .. } | Letter::Fault(_));
            assert!(open_ended || Letter::decode(1, short).is_err(), "{letter:?} without its last byte");
        }
        let unknown = Letter::Granted { number: 9, taken: 0, body: MOST_BODIES }.encode();
        for nonsense in [&[][..], &[0], &[200, 1, 2], &[BYE, 0], &unknown] {
            assert!(Letter::decode(1, nonsense).unwrap_err().text().contains("rank 1"), "{nonsense:?}");
        }
    }
}
