//! `ncclConfig_t`: a size prefix, then fields that versions have added (NVIDIA/nccl, src/nccl.h.in). It is read as NCCL
//! reads it: as many bytes as the caller has, and of those only the fields that the caller's version knows.

use std::ffi::c_char;

use super::INVALID_ARGUMENT;
use crate::memory;
use crate::pointers::In;
use crate::trace;

const MAGIC: u32 = 0xcafe_beef;
const UNSET: i32 = i32::MIN;
const SHORTEST: usize = 24;
const LONGEST: usize = 4096;

/// Integer fields: name, offset, version that added it, smallest and largest value.
const FIELDS: [(&str, usize, u32, i32, i32); 15] = [
    ("blocking", 16, 21_400, 0, 1),
    ("cgaClusterSize", 20, 21_700, 0, 8),
    ("minCTAs", 24, 21_700, 1, i32::MAX),
    ("maxCTAs", 28, 21_700, 1, i32::MAX),
    ("splitShare", 40, 21_800, 0, 1),
    ("trafficClass", 44, 22_500, 0, i32::MAX),
    ("collnetEnable", 56, 22_700, 0, 1),
    ("CTAPolicy", 60, 22_700, 0, 3),
    ("shrinkShare", 64, 22_700, 0, 1),
    ("nvlsCTAs", 68, 22_700, 1, i32::MAX),
    ("nChannelsPerNetPeer", 72, 22_800, 1, 1024),
    ("nvlinkCentricSched", 76, 22_800, 0, 1),
    ("graphUsageMode", 80, 22_900, 0, 2),
    ("numRmaCtx", 84, 22_900, 1, i32::MAX),
    ("graphStreamOrdering", 92, 23_005, 0, 1),
];
const COMM_NAME: (usize, u32) = (48, 22_700);

#[derive(Clone)]
pub struct Config {
    pub blocking: bool,
    pub name: String,
    /// Address of the name in the caller's memory. NCCL copies the pointer and reads it as long as the communicator
    /// exists.
    pub name_at: usize,
}

impl Default for Config {
    fn default() -> Config {
        Config { blocking: true, name: String::new(), name_at: 0 }
    }
}

impl Config {
    /// `NCCL_COMM_BLOCKING` has priority over everything, even over a value that the caller has set.
    pub fn by_environment(self) -> Config {
        let blocking = match std::env::var("NCCL_COMM_BLOCKING").as_deref() {
            Ok("0") => false,
            Ok("1") => true,
            _ => self.blocking,
        };
        Config { blocking, ..self }
    }

    /// True if the name is still at the caller's address.
    pub fn name_lives(&self) -> bool {
        let bytes = self.name.as_bytes();
        let found = || memory::read(self.name_at, bytes.len() + 1);
        self.name_at == 0 || (found()[..bytes.len()] == *bytes && found()[bytes.len()] == 0)
    }

    pub fn read(pointer: In<u64>, default: Config) -> Result<Config, i32> {
        let Some(size) = pointer.get() else { return Ok(default.by_environment()) };
        let refuse = |text: String| {
            trace::refuse(format!("ncclConfig_t: {text}"));
            Err(INVALID_ARGUMENT)
        };
        if !(SHORTEST..=LONGEST).contains(&(size as usize)) {
            return refuse(format!("size {size}"));
        }
        let bytes = pointer.bytes(size as usize).unwrap_or_default();
        let word = |at: usize| i32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let (magic, version) = (word(8) as u32, word(12) as u32);
        if magic != MAGIC {
            return refuse(format!("magic {magic:#x}: not made with NCCL_CONFIG_INITIALIZER"));
        }
        let mut config = default;
        for (name, at, since, least, most) in FIELDS {
            if at + 4 > bytes.len() || version < since || word(at) == UNSET {
                continue;
            }
            let value = word(at);
            if !(least..=most).contains(&value) {
                return refuse(format!("{name} is {value} (version {version}, size {size})"));
            }
            if name == "blocking" {
                config.blocking = value == 1;
            }
            trace::call(|| format!("ncclConfig {name}={value}"));
        }
        let (at, since) = COMM_NAME;
        if at + 8 <= bytes.len() && version >= since {
            let pointer = usize::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
            config.name = In::<c_char>::at(pointer).text().unwrap_or_default();
            config.name_at = pointer;
        }
        Ok(config.by_environment())
    }
}
