//! Error texts that name an operation, or two ranks' operations that differ.

use super::Op;
use super::signature::describe;
use crate::error::{Error, SAME_CALLS, laid_out};
use crate::types::{ANY_RANK, Kind};

/// For operations between hosts or on a device, which may have moved data before a mismatch is found.
pub const MOVED: &str = "What was received in it is undefined";
/// For operations on one host: their signatures are compared before data is moved.
pub const UNTOUCHED: &str = "No data was exchanged";

const SAME_SIZES: &str = "Both sides must use tensors of the same size";

impl Op {
    /// The operation as this rank called it, with its number, as text.
    pub fn what(&self) -> String {
        let request = &self.request;
        in_words(request.kind, request.root, request.tag, || {
            format!("{} number {}", describe(self.signature), self.number)
        })
    }
}

/// A message as text. If the operation is not a message, `collective` describes it.
pub fn in_words(kind: Kind, root: u32, tag: u32, collective: impl FnOnce() -> String) -> String {
    match kind {
        Kind::Send => format!("send to rank {root} with tag {tag}"),
        Kind::Recv if root == ANY_RANK => format!("recv from any rank with tag {tag}"),
        Kind::Recv => format!("recv from rank {root} with tag {tag}"),
        _ => collective(),
    }
}

/// What a rank called: the rank, the signature, and the number in its group.
pub struct Called {
    pub rank: usize,
    pub signature: u64,
    pub number: u64,
}

/// Returns the error for two ranks that called different operations. `data` says what happened to the data.
pub fn different(one: Called, other: Called, data: &str) -> Error {
    let calls = if one.rank < other.rank { [one, other] } else { [other, one] };
    let number = calls[0].number;
    let lines = calls.map(|call| {
        let at = if call.number == number { String::new() } else { format!(" as number {}", call.number) };
        format!("rank {} called {}{at}", call.rank, describe(call.signature))
    });
    let [first, second] = lines;
    let head = format!("ranks called different operations as number {number} of their group");
    Error::mismatch(laid_out(&head, &[first, second, data.to_string()], SAME_CALLS))
}

/// Returns the error for a receive on rank `me` whose buffer has a different size (`room`) than the message.
pub fn wrong_size(me: usize, from: usize, tag: u32, room: usize, bytes: usize) -> Error {
    let head =
        format!("rank {me} receives {room} bytes with tag {tag} from rank {from}, but the message has {bytes} bytes");
    Error::mismatch(laid_out(&head, &[], SAME_SIZES))
}

/// Returns the error for the send on rank `me` whose receive failed with `wrong_size`.
pub fn not_taken(me: usize, to: usize, tag: u32, bytes: usize) -> Error {
    let head = format!("rank {to} could not take the message of {bytes} bytes with tag {tag} from rank {me}");
    Error::mismatch(laid_out(&head, &["its receive buffer has another size".to_string()], SAME_SIZES))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::signature;
    use crate::types::{Dtype, ReduceOp};

    #[test]
    fn the_lower_rank_comes_first_whoever_finds_the_difference() {
        let called = |rank, number| Called {
            rank,
            signature: signature::of_call(Kind::Broadcast, (Dtype::F32, ReduceOp::Sum), rank as u32, (4, 4)),
            number,
        };
        let text = "sagellm: ranks called different operations as number 3 of their group\n  rank 0 called broadcast(4 bytes, \
                    root 0)\n  rank 2 called broadcast(4 bytes, root 2)";
        let rest = format!("\n  {UNTOUCHED}\n  {SAME_CALLS}");
        for (one, other) in [(0, 2), (2, 0)] {
            let error = different(called(one, 3), called(other, 3), UNTOUCHED);
            assert_eq!(error.text(), format!("{text}{rest}"));
        }
        let later = different(called(2, 4), called(0, 3), UNTOUCHED);
        assert_eq!(later.text(), format!("{text} as number 4{rest}"));
    }
}
