#![allow(unsafe_code)] // calls between Rust and C++; what cxx makes of the bridge is unsafe code, too

pub mod bridge;
pub mod callbacks;
mod calls;
mod convert;
pub mod devices;
pub mod simulate;
