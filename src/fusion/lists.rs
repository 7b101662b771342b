//! Into which operations the list of tensors of one call is divided (rules 1 and 16). Pure, and the same on all ranks,
//! which pass lists of equal types and sizes.
//!
//! Tensors that are only moved are one operation, whatever their types. An operation that combines numbers has one
//! type, so there is one for each type, in the order in which the types first occur. Where a vendor's library carries
//! an all_reduce, the small tensors of an operation are packed into one buffer, and each large tensor is a separate
//! operation in the same launch.

use crate::types::Kind;

/// Bytes up to which a tensor of a list is packed with others.
/// Packing costs four passes over the tensor's memory, a further call in a launch costs host time. The size at which
/// both are equal was not measured, because no device was at hand; `make bench-gpu` has the rows.
pub const PACK_BYTES: usize = 1 << 20;

/// For each tensor, by its type and bytes, the operation it belongs to: 0 for the first tensor, and each next one has
/// the next number.
pub fn operations(kind: Kind, by_vendor: bool, list: impl Iterator<Item = (u8, usize)>) -> Vec<u32> {
    let mut count = 0;
    let mut next = || {
        count += 1;
        count - 1
    };
    // Types and their operations. A list has few types: searched from the end, where the last one is.
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
