#![allow(unsafe_code)] // calls of functions that were found at run time in a library of a vendor

pub mod cncl;
mod common;
pub mod hccl;
pub mod loader;
pub mod nccl;
