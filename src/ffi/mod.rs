#![allow(unsafe_code)] // calls between Rust and C++; the code that cxx generates for the bridge is unsafe

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
