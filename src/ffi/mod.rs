#![allow(unsafe_code)] // calls between Rust and C++; what cxx makes of the bridge is unsafe code, too

pub mod arrays;
pub mod bridge;
mod callbacks;
mod calls;
mod convert;
mod devices;
mod handles;
pub mod memory;
pub mod observe;
mod simulate;
