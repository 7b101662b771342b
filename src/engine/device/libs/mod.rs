#![allow(unsafe_code)] // calls functions of a vendor's library, which are looked up at run time

pub mod cncl;
mod common;
pub mod hccl;
pub mod nccl;
