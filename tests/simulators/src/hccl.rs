//! The C interface of HCCL (CANN 9). Operators are in one file and the management of communicators in the other,
//! because since CANN 9 they are in two libraries.

#![allow(non_snake_case)]

mod config;
mod management;
mod operators;

use std::sync::Arc;

use sagellm::error::{Error, ErrorKind};
use sagellm::types::Dtype;

use crate::batch::{self, Sort};
use crate::comm::{Comm, Vendor};
use crate::settings;
use crate::table::Table;
use crate::trace;

const SUCCESS: i32 = 0;
const PARA: i32 = 1;
const PTR: i32 = 2;
const INTERNAL: i32 = 4;
const NOT_SUPPORT: i32 = 5;
const TIMEOUT: i32 = 9;
const TCP_CONNECT: i32 = 11;
const RUNTIME: i32 = 15;
const AGAIN: i32 = 20;
const REMOTE: i32 = 21;

static COMMS: Table<Comm> = Table::new(7);

/// Returns an error, and makes the end of an open group return it, too.
fn refuse(code: i32, text: impl Into<String>) -> i32 {
    trace::refuse(text);
    batch::with(Vendor::Hccl, |batch| {
        if batch.depth > 0 && batch.error == SUCCESS {
            batch.error = code;
        }
    });
    code
}

fn code_of(error: &Error) -> i32 {
    match error.kind() {
        ErrorKind::Timeout => TIMEOUT,
        ErrorKind::RankFailed | ErrorKind::Aborted => REMOTE,
        ErrorKind::System => TCP_CONNECT,
        ErrorKind::Invalid | ErrorKind::Mismatch => PARA,
        _ => INTERNAL,
    }
}

fn comm_of(handle: usize) -> Result<Arc<Comm>, i32> {
    if handle == 0 {
        return Err(refuse(PTR, "the communicator is null"));
    }
    COMMS.get(handle).ok_or_else(|| refuse(PARA, format!("{handle:#x} is no communicator")))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Chip {
    /// The first 910.
    First,
    /// A2 and A3.
    Second,
    /// 950.
    Newest,
}

fn chip() -> Chip {
    match settings::get().soc.as_str() {
        "Ascend910" | "Ascend910A" | "Ascend910ProA" | "Ascend910ProB" | "Ascend910PremiumA" => Chip::First,
        name if name.starts_with("Ascend950") => Chip::Newest,
        _ => Chip::Second,
    }
}

const INT16: i32 = 1;
const BFP16: i32 = 11;

/// The engine's type and the bytes of an element, if this chip can move elements of the type.
fn element(name: &str, dtype: i32) -> Result<(Dtype, usize), i32> {
    let found = match dtype {
        0 => (Dtype::I8, 1),
        1 => (Dtype::I16, 2),
        2 => (Dtype::I32, 4),
        3 => (Dtype::F16, 2),
        4 => (Dtype::F32, 4),
        5 => (Dtype::I64, 8),
        6 => (Dtype::U64, 8),
        7 => (Dtype::U8, 1),
        8 => (Dtype::U16, 2),
        9 => (Dtype::U32, 4),
        10 => (Dtype::F64, 8),
        11 => (Dtype::Bf16, 2),
        12 => (Dtype::Bytes, 16),
        14..=17 => (Dtype::Bytes, 1),
        _ => return Err(refuse(PARA, format!("{name}: data type {dtype}"))),
    };
    let able = match dtype {
        12 | 14..=17 => chip() == Chip::Newest,
        BFP16 => chip() != Chip::First,
        _ => true,
    };
    if able { Ok(found) } else { Err(refuse(NOT_SUPPORT, format!("{name}: data type {dtype} on this chip"))) }
}

/// True inside a group. An error if the group has calls of another sort, or if the chip has no groups of collectives.
fn grouped(name: &str, sort: Sort) -> Result<bool, i32> {
    if !batch::open(Vendor::Hccl) {
        return Ok(false);
    }
    let first = batch::with(Vendor::Hccl, |batch| *batch.sort.get_or_insert(sort));
    if first != sort {
        return Err(refuse(NOT_SUPPORT, format!("{name}: {sort:?} in a group of {first:?}")));
    }
    if sort == Sort::Collective && chip() == Chip::Newest {
        return Err(refuse(NOT_SUPPORT, format!("{name}: collectives in a group on this chip")));
    }
    Ok(true)
}
