//! The format of mail between ranks: a first byte for the kind of letter, then its fields, little-endian.

use std::borrow::Cow;

use super::ready::Ready;
use crate::error::{Error, Result};

/// A message of at most this many bytes is always sent inside its letter.
pub const EAGER: usize = 16 << 10;
/// A message of at most this many bytes is sent inside its letter if the peer's `WINDOW` has room. For a larger
/// message, the two copies cost more than the exchange that is saved.
pub const LONGEST_EAGER: usize = 64 << 10;
/// For each peer and direction: at most this many bytes of such messages may be waiting for their receives. This bounds
/// what a receiver stores for a sender.
pub const WINDOW: u64 = 256 << 10;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Letter<'a> {
    /// A complete message of the program. `taken`, here and below, counts bytes of messages longer than `EAGER`: those
    /// that the sender of this letter has received in letters and that its receives have taken.
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
        let put = |kind: u8, words: &[&[u8]]| {
            let mut bytes = Vec::with_capacity(1 + words.iter().map(|word| word.len()).sum::<usize>());
            bytes.push(kind);
            words.iter().for_each(|word| bytes.extend_from_slice(word));
            bytes
        };
        match self {
            Letter::Eager { tag, taken, data } => {
                let mut bytes = Letter::eager_head(*tag, *taken, data.len());
                bytes.extend_from_slice(data);
                bytes
            }
            Letter::Large { tag, taken, bytes, number } => {
                let words = [taken, bytes, number].map(|word| word.to_le_bytes());
                put(LARGE, &[&tag.to_le_bytes(), &words.concat()])
            }
            Letter::Granted { number, taken, body } => {
                put(GRANTED, &[&[number, taken, body].map(|word| word.to_le_bytes()).concat()])
            }
            Letter::Ready(Ready { tag, bytes, seen, ahead, body }) => {
                let words = [bytes, seen, ahead, body].map(|word| word.to_le_bytes());
                put(READY, &[&tag.to_le_bytes(), &words.concat()])
            }
            Letter::Refused { number } => put(REFUSED, &[&number.to_le_bytes()]),
            Letter::Bye => put(BYE, &[]),
            Letter::Heard => put(HEARD, &[]),
            Letter::Fault(fault) => put(FAULT, &[fault]),
            Letter::Come { turn } => put(COME, &[&turn.to_le_bytes()]),
            Letter::Decided { turn, failed } => put(DECIDED, &[&turn.to_le_bytes(), &[u8::from(*failed)]]),
        }
    }

    /// The start of an encoded `Eager`, to which the caller appends `bytes` bytes of data.
    pub fn eager_head(tag: u32, taken: u64, bytes: usize) -> Vec<u8> {
        let mut head = Vec::with_capacity(13 + bytes);
        head.push(EAGER_MESSAGE);
        head.extend_from_slice(&tag.to_le_bytes());
        head.extend_from_slice(&taken.to_le_bytes());
        head
    }

    /// Decodes a letter of `peer`. Fails if the mail is not a letter.
    pub fn decode(peer: usize, mail: &'a [u8]) -> Result<Letter<'a>> {
        Letter::read(mail).ok_or_else(|| Letter::none(peer, mail))
    }

    /// The error for mail of `peer` that is not a letter.
    pub fn none(peer: usize, mail: &[u8]) -> Error {
        Error::system(format!(
            "sagellm: rank {peer} sent {} bytes that are no letter of ours: another version of sagellm runs there, or \
             another program talks to this one's port",
            mail.len()
        ))
    }

    fn read(mail: &'a [u8]) -> Option<Letter<'a>> {
        let (kind, rest) = mail.split_first()?;
        let half = |at: usize| Some(u32::from_le_bytes(rest.get(at..at + 4)?.try_into().ok()?));
        let word = |at: usize| Some(u64::from_le_bytes(rest.get(at..at + 8)?.try_into().ok()?));
        let (letter, bytes) = match *kind {
            EAGER_MESSAGE => (Letter::Eager { tag: half(0)?, taken: word(4)?, data: &rest[12..] }, rest.len()),
            LARGE => (Letter::Large { tag: half(0)?, taken: word(4)?, bytes: word(12)?, number: word(20)? }, 28),
            GRANTED => (Letter::Granted { number: word(0)?, taken: word(8)?, body: word(16)? }, 24),
            READY => {
                let (tag, bytes, seen, ahead, body) = (half(0)?, word(4)?, word(12)?, word(20)?, word(28)?);
                (Letter::Ready(Ready { tag, bytes, seen, ahead, body }), 36)
            }
            REFUSED => (Letter::Refused { number: word(0)? }, 8),
            BYE => (Letter::Bye, 0),
            HEARD => (Letter::Heard, 0),
            FAULT => (Letter::Fault(rest.into()), rest.len()),
            COME => (Letter::Come { turn: word(0)? }, 8),
            DECIDED => (Letter::Decided { turn: word(0)?, failed: *rest.get(8)? != 0 }, 9),
            _ => return None,
        };
        (rest.len() == bytes).then_some(letter)
    }
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
            Letter::Granted { number: 9, taken: 1 << 50, body: 1 << 63 },
            Letter::Ready(Ready { tag: 1 << 31, bytes: 1 << 40, seen: 3, ahead: 2, body: 1 << 63 | 1 }),
            Letter::Refused { number: u64::MAX },
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
        for nonsense in [&[][..], &[0], &[200, 1, 2], &[BYE, 0]] {
            assert!(Letter::decode(1, nonsense).unwrap_err().text().contains("rank 1"), "{nonsense:?}");
        }
    }
}
