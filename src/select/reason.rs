//! Why a path was chosen, in one byte: what the record of an operation keeps, and what `explain` puts into words.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Reason {
    /// Nothing was recorded: the operation was refused, or has not been issued.
    Unknown = 0,
    Alone = 1,
    Message = 2,
    Delegated = 3,
    /// The rules of the option `algorithm` or of `SAGELLM_ALGORITHM`.
    Override = 4,
    /// A line of the decision table, written by `sagellm tune`.
    Measured = 5,
    FitsSlot = 6,
    InCache = 7,
    OutOfCache = 8,
    Crowded = 9,
    NoCommonSize = 10,
    NothingToMove = 11,
    /// Between hosts.
    Strict = 12,
    Model = 13,
    PowerOfTwo = 14,
    AnyCount = 15,
    FullNvlink = 16,
    Large = 17,
    OneSchedule = 18,
    Assumed = 19,
    Composed = 20,
    OneOrder = 21,
    /// Tensors on a device go to the library of its vendor.
    Vendor = 22,
}

impl Reason {
    pub const ALL: [Reason; 23] = [
        Reason::Unknown,
        Reason::Alone,
        Reason::Message,
        Reason::Delegated,
        Reason::Override,
        Reason::Measured,
        Reason::FitsSlot,
        Reason::InCache,
        Reason::OutOfCache,
        Reason::Crowded,
        Reason::NoCommonSize,
        Reason::NothingToMove,
        Reason::Strict,
        Reason::Model,
        Reason::PowerOfTwo,
        Reason::AnyCount,
        Reason::FullNvlink,
        Reason::Large,
        Reason::OneSchedule,
        Reason::Assumed,
        Reason::Composed,
        Reason::OneOrder,
        Reason::Vendor,
    ];

    pub fn from_u8(value: u8) -> Reason {
        Reason::ALL.into_iter().find(|reason| *reason as u8 == value).unwrap_or(Reason::Unknown)
    }

    /// One word for records and programs.
    pub fn name(self) -> &'static str {
        match self {
            Reason::Unknown => "unknown",
            Reason::Alone => "alone",
            Reason::Message => "message",
            Reason::Delegated => "delegated",
            Reason::Override => "override",
            Reason::Measured => "measured",
            Reason::FitsSlot => "fits_slot",
            Reason::InCache => "in_cache",
            Reason::OutOfCache => "out_of_cache",
            Reason::Crowded => "crowded",
            Reason::NoCommonSize => "no_common_size",
            Reason::NothingToMove => "nothing_to_move",
            Reason::Strict => "strict",
            Reason::Model => "model",
            Reason::PowerOfTwo => "power_of_two",
            Reason::AnyCount => "any_count",
            Reason::FullNvlink => "full_nvlink",
            Reason::Large => "large",
            Reason::OneSchedule => "one_schedule",
            Reason::Assumed => "assumed_link",
            Reason::Composed => "composed",
            Reason::OneOrder => "one_order",
            Reason::Vendor => "vendor",
        }
    }

    /// What kind of knowledge decided: the first word a reader wants.
    pub fn basis(self) -> &'static str {
        match self {
            Reason::Override => "override",
            Reason::Measured => "measurement",
            Reason::FitsSlot | Reason::InCache | Reason::OutOfCache | Reason::Crowded => "start value",
            Reason::PowerOfTwo | Reason::AnyCount | Reason::FullNvlink | Reason::Large => "start rule",
            Reason::Model | Reason::Assumed => "cost model",
            Reason::Unknown => "nothing",
            _ => "only way",
        }
    }

    pub fn text(self) -> &'static str {
        match self {
            Reason::Unknown => "nothing was recorded for it",
            Reason::Alone => "a group of one rank copies locally",
            Reason::Message => "a message has one way: small ones inside their envelope, large ones in pieces",
            Reason::Delegated => "the whole group is served by a delegate",
            Reason::Override => "a rule that the user gave",
            Reason::Measured => "the decision table: measured on this machine by `sagellm tune`",
            Reason::FitsSlot => "it fits into a slot, and one exchange is the least there can be",
            Reason::InCache => "it stays in the last-level cache, where fewer rounds win",
            Reason::OutOfCache => "it is larger than the last-level cache, where a small stage that stays cached wins",
            Reason::Crowded => "ranks share cores, so every round costs context switches and fewer rounds win",
            Reason::NoCommonSize => "no rank knows all the sizes of an all_to_all, so one way serves them all",
            Reason::NothingToMove => "it moves no data",
            Reason::Strict => "strict mode: only the direct exchange adds in the order of the ranks",
            Reason::OneOrder => {
                "small sums of floats are added in one order, whatever travels with them and whatever the link"
            }
            Reason::Vendor => "tensors on a device are carried by the library of its vendor",
            Reason::Composed => "no single operation does it, so it is made of several",
            Reason::Assumed => "the cost model, with a link of 50 us and 10 Gbit/s, because it was not measured",
            Reason::Model => "the cost model, with the link as it was measured when the group was made",
            Reason::PowerOfTwo => "below 1 MiB steps count most, and the count is a power of two",
            Reason::AnyCount => "below 1 MiB, and the count is no power of two",
            Reason::FullNvlink => "from 1 MiB bytes count most, and NVLink joins every pair",
            Reason::Large => "from 1 MiB a pipelined tree needs few steps and loads every link evenly",
            Reason::OneSchedule => "it is the schedule for this kind that needs the fewest steps",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_a_reason_and_every_reason_has_its_own_word_and_text() {
        let mut names: Vec<&str> = Reason::ALL.iter().map(|reason| reason.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Reason::ALL.len());
        for value in 0..=255 {
            let reason = Reason::from_u8(value);
            assert!(reason == Reason::Unknown || reason as u8 == value);
            assert!(!reason.text().is_empty() && !reason.basis().is_empty());
        }
    }
}
