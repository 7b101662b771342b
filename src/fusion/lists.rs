//! Divides the list of tensors of one call into operations (rules 1 and 16). Pure. All ranks pass lists of equal types
//! and sizes, so they get equal results.
//!
//! If tensors are only moved, the list is one operation, whatever their types. If tensors are combined, there is one
//! operation for each type, in the order in which the types first occur. If a vendor's library runs an all_reduce, the
//! small tensors of an operation are packed into one buffer, and each large tensor is a separate operation in the same
//! launch.

use crate::types::Kind;

/// If a tensor of a list has at most this many bytes, it is packed with other small ones. Packing costs four passes
/// over the tensor's memory; one more call in a launch costs host time. The size at which both cost the same was not
/// measured, because no device was available; `make bench-gpu` has the rows.
pub const PACK_BYTES: usize = 1 << 20;

/// Returns for each tensor the number of its operation. `list` has each tensor's type and size. The first tensor is in
/// operation 0, and operations are numbered in the order of their first tensors.
pub fn operations(kind: Kind, by_vendor: bool, list: impl Iterator<Item = (u8, usize)>) -> Vec<u32> {
    let mut count = 0;
    let mut next = || {
        count += 1;
        count - 1
    };
    // The types so far, each with its current operation. A list has few types. The search starts at the end, because
    // consecutive tensors usually have the same type.
    let mut open: Vec<(u8, u32)> = Vec::new();
    list.map(|(element, bytes)| {
        if by_vendor && kind == Kind::AllReduce && bytes > PACK_BYTES {
            return next();
        }
        let element = if kind.reduces() { element } else { 0 };
        if let Some((_, number)) = open.iter().rev().find(|(of, _)| *of == element) {
            return *number;
        }
        let number = next();
        open.push((element, number));
        number
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE: usize = PACK_BYTES + 1;

    #[test]
    fn rule_01_a_list_is_one_operation_for_each_type() {
        let mixed = [(6, 8), (7, 8), (6, 0), (7, LARGE), (1, 8)];
        assert_eq!(operations(Kind::AllReduce, false, mixed.into_iter()), [0, 1, 0, 1, 2]);
        assert_eq!(operations(Kind::ReduceScatter, true, mixed.into_iter()), [0, 1, 0, 1, 2]);
        assert_eq!(operations(Kind::AllGather, true, mixed.into_iter()), [0, 0, 0, 0, 0]);
        assert!(operations(Kind::AllReduce, false, [].into_iter()).is_empty());
    }

    #[test]
    fn rule_16_large_tensors_travel_alone_on_a_device_and_close_no_pack() {
        let list = [(6, 8), (6, LARGE), (6, PACK_BYTES), (7, 8), (7, LARGE), (6, 8)];
        assert_eq!(operations(Kind::AllReduce, true, list.into_iter()), [0, 1, 0, 2, 3, 0]);
    }
}
