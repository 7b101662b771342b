//! `HcclCommConfig`: 32 to 2248 bytes, depending on the version (hcomm, comm_config.cc). It is read as HCCL's loader
//! reads it: as many bytes as the caller has, and of those only the fields that the caller's version knows.

use super::{PARA, refuse};
use crate::pointers::In;
use crate::trace;

const MAGIC: u32 = 0xf0f0_f0f0;
const SHORTEST: usize = 32;
const LONGEST: usize = 2248;
const NEWEST: u32 = 11;
const UNSET: u32 = u32::MAX;

pub fn read(config: In<u64>) -> Result<String, i32> {
    let size = config.get().ok_or_else(|| refuse(super::PTR, "HcclCommConfig is null"))? as usize;
    let wrong = |text: String| Err(refuse(PARA, format!("HcclCommConfig: {text}")));
    if !(SHORTEST..=LONGEST).contains(&size) {
        return wrong(format!("size {size}"));
    }
    let bytes = config.bytes(size).unwrap_or_default();
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let (magic, version) = (word(8), word(12));
    if magic != MAGIC {
        return wrong(format!("magic {magic:#x}: not made with HcclCommConfigInit"));
    }
    if version == 0 || version > NEWEST {
        trace::call(|| format!("warning HcclCommConfig version={version}"));
    }
    let has = |at: usize, bytes_of: usize, since: u32| version >= since && at + bytes_of <= size;
    let buffer = word(24);
    if buffer == 0 {
        return wrong("hcclBufferSize is 0".to_string());
    }
    if !matches!(word(28), 0 | 1 | 2 | UNSET) {
        return wrong(format!("hcclDeterministic is {}", word(28)));
    }
    let text = |at: usize, room: usize, since: u32| -> Result<String, i32> {
        if !has(at, room, since) {
            return Ok(String::new());
        }
        let field = &bytes[at..at + room];
        match field.iter().position(|byte| *byte == 0) {
            Some(end) => Ok(String::from_utf8_lossy(&field[..end]).into_owned()),
            None => Err(refuse(PARA, format!("HcclCommConfig: the text at {at} has no end"))),
        }
    };
    let name = text(32, 128, 2)?;
    text(160, 128, 3)?;
    if has(288, 4, 4) && word(288) > 6 {
        return wrong(format!("hcclOpExpansionMode is {}", word(288)));
    }
    let algorithm = text(320, 1600, 8)?;
    trace::call(|| {
        let deterministic = word(28) as i32;
        format!(
            "HcclCommConfig size={size} version={version} buffer={} deterministic={deterministic} name={name} \
             algo={algorithm}",
            buffer as i32
        )
    });
    Ok(name)
}
