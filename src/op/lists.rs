//! The lists on which the ranks of an operation must agree in addition to its signature: the tensors of a call that has
//! a list, or the sizes of the ranks' blocks. Two calls whose lists have the same total size have equal signatures, so
//! a hash of the list is also part of the chain of calls (rule 5). A call with a list gets every error that separate
//! calls would get.

use super::signature;
use crate::error::{Error, laid_out};
use crate::types::{Dtype, Kind, Listed, ReduceOp, Request};

/// Set in the hash of a list of tensors, and never in the hash of a list of block sizes.
const OF_TENSORS: u64 = 1 << 63;
/// The lowest bits of the hash of a list of tensors are the number of tensors, or this value if there are more.
const MANY: u64 = 0xffff;
/// The bits of a `word` that hold the size.
const BYTES: u64 = (1 << 56) - 1;

/// Hash of the list of a request: its tensors ([`of_tensors`]), or the sizes of the ranks' blocks. 0 if there is no
/// list or all blocks are equal, because the signature's bytes then determine the sizes.
pub fn hash(request: &Request) -> u64 {
    if !request.list.is_empty() {
        return of_tensors(&request.list);
    }
    of_blocks(request.kind, (&request.in_blocks, &request.out_blocks))
}

/// Hash of the sizes of the blocks that a call reads and writes. 0 if `hash` would return 0.
pub fn of_blocks(kind: Kind, (read, written): (&[usize], &[usize])) -> u64 {
    let blocks = match kind {
        Kind::AllGather => written,
        Kind::ReduceScatter => read,
        _ => return 0,
    };
    if blocks.iter().all(|bytes| *bytes == blocks[0]) {
        return 0;
    }
    (mixed(blocks.len(), blocks.iter().map(|bytes| *bytes as u64)) >> 1).max(1)
}

/// Whether an operation with this signature may have a list.
pub fn possible(signature: u64) -> bool {
    matches!(signature::kind(signature), Some(Kind::AllReduce | Kind::AllGather | Kind::ReduceScatter))
}

/// For two operations with this signature: whether different lists always give different `aux` words in their headers
/// (`engine/shm/small.rs`).
pub fn told_by_aux(signature: u64) -> bool {
    let premul = ReduceOp::PremulSum(1.0).code();
    signature::kind(signature) == Some(Kind::AllReduce) && signature::reduce_code(signature) != premul
}

/// Hash of a list of tensors: their number, and the size and type of each, in order.
pub fn of_tensors(list: &[Listed]) -> u64 {
    let hash = mixed(list.len(), list.iter().map(word)) & !MANY;
    OF_TENSORS | hash | (list.len() as u64).min(MANY)
}

/// Whether this is the hash of a list of tensors.
pub fn is_of_tensors(hash: u64) -> bool {
    hash & OF_TENSORS != 0
}

/// Number of tensors in the list. 0 if this is not the hash of a list of tensors.
pub fn count(hash: u64) -> usize {
    if is_of_tensors(hash) { (hash & MANY) as usize } else { 0 }
}

fn mixed(count: usize, words: impl Iterator<Item = u64>) -> u64 {
    words.fold(count as u64, |hash, word| (hash.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// A tensor of a list as one word: type and size.
pub fn word(tensor: &Listed) -> u64 {
    (tensor.dtype as u64) << 56 | (tensor.bytes as u64 & BYTES)
}

/// Returns the text of a `word`: `8 bytes`, `8 bytes of float32`.
fn describe(word: u64) -> String {
    let bytes = counted(word & BYTES, "byte");
    match Dtype::from_u8((word >> 56) as u8) {
        Some(Dtype::Bytes) => bytes,
        dtype => format!("{bytes} of {}", dtype.map_or("an unknown type", Dtype::name)),
    }
}

fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// The first position at which two lists differ, and the two tensors at that position as [`word`]s.
pub struct Place {
    pub at: usize,
    pub own: u64,
    pub theirs: u64,
}

/// Returns the error for two ranks whose lists of tensors differ in operation `number`. `call` is the operation's
/// signature as text. `own` and `theirs` are each a rank and the hash of its list. If a rank passed only one tensor,
/// its hash is not that of a list of tensors. `data` says what happened to the data.
pub fn differ(
    call: &str,
    number: u64,
    own: (usize, u64),
    theirs: (usize, u64),
    (place, data): (Option<Place>, &str),
) -> Error {
    let passed = |(rank, hash): (usize, u64)| {
        let tensors = match count(hash) as u64 {
            0 => "one tensor and no list".to_string(),
            MANY => format!("{MANY} tensors or more"),
            count => counted(count, "tensor"),
        };
        format!("rank {rank} passed {tensors}")
    };
    let place = place.map_or_else(String::new, |place| {
        let (ours, others) = (describe(place.own), describe(place.theirs));
        format!("tensor {} has {ours} on rank {} and {others} on rank {}", place.at, own.0, theirs.0)
    });
    let head = format!("ranks passed different lists of tensors to {call}, number {number} of their group");
    let lines = [passed(own), passed(theirs), place, data.to_string()];
    let advice = "Every rank must pass as many tensors, with the same sizes and types in the same order";
    Error::mismatch(laid_out(&head, &lines, advice))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(tensors: &[(Dtype, usize)]) -> Vec<Listed> {
        tensors.iter().map(|&(dtype, bytes)| Listed { dtype, bytes }).collect()
    }

    #[test]
    fn lists_of_equal_totals_have_different_hashes() {
        use Dtype::{F32, I32};
        let lists = [
            list(&[(F32, 8), (F32, 24)]),
            list(&[(F32, 24), (F32, 8)]),
            list(&[(F32, 32), (F32, 0)]),
            list(&[(F32, 0), (F32, 32)]),
            list(&[(F32, 8), (F32, 8), (F32, 16)]),
            list(&[(F32, 16), (F32, 16)]),
            list(&[(F32, 8); 4]),
            list(&[(I32, 8), (F32, 24)]),
        ];
        let mut hashes: Vec<u64> = lists.iter().map(|list| of_tensors(list)).collect();
        for (hash, list) in hashes.iter().zip(&lists) {
            assert!(is_of_tensors(*hash) && hash & MANY == list.len() as u64);
        }
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), lists.len());
    }

    #[test]
    fn the_hash_of_block_sizes_is_none_of_tensors() {
        let mut request = Request::without_memory(Kind::AllGather);
        assert_eq!(hash(&request), 0);
        request.out_blocks = vec![4, 4];
        assert_eq!(hash(&request), 0);
        for first in 0..1000 {
            request.out_blocks = vec![first, 2000 - first, 1];
            assert!(hash(&request) != 0 && !is_of_tensors(hash(&request)));
        }
    }
}
